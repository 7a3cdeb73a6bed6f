# ruff: noqa: E501 (a template is one line)
"""Recurrent layers, embeddings with their options, and mixtures of experts."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("layers")
_add = FAMILY.add
_TOKENS = {"takes": ("BLD",), "needs": "tokens"}

_add("GRU", "{y} = {x} + self.{m}({x})[0]", init="self.{m} = nn.GRU({D}, {D}, batch_first=True)", takes=("BLD",))
_add("GRU time first", "{y} = {x} + self.{m}({x})[0]", init="self.{m} = nn.GRU({D}, {D})", takes=("LBD",))
_add(
    "LSTM",
    "o, (h, _) = self.{m}({x})\n{y} = {x} + o + h[0].unsqueeze(1)",
    init="self.{m} = nn.LSTM({D}, {D}, batch_first=True)",
    takes=("BLD",),
)
_add(
    "LSTM both ways",
    "{y} = {x} + self.{m}({x})[0]",
    init="self.{m} = nn.LSTM({D}, {D} // 2, batch_first=True, bidirectional=True)",
    takes=("BLD",),
)
_add("RNN", "{y} = {x} + self.{m}({x})[0]", init="self.{m} = nn.RNN({D}, {D}, batch_first=True)", takes=("BLD",))
_add(
    "GRUCell",
    "h = torch.zeros_like({x}[:, 0])\nhs = []\nfor step in {x}.unbind(1):\n    h = self.{m}(step, h)\n    hs.append(h)\n{y} = {x} + torch.stack(hs, 1)",
    init="self.{m} = nn.GRUCell({D}, {D})",
    takes=("BLD",),
)

_add("Embedding", "{y} = {x} + self.{m}(t)", init="self.{m} = nn.Embedding({V}, {D})", **_TOKENS)
_add(
    "Embedding padding_idx",
    "{y} = {x} + self.{m}(t)",
    init="self.{m} = nn.Embedding({V}, {D}, padding_idx=3)",
    **_TOKENS,
)
_add("Embedding max_norm", "{y} = {x} + self.{m}(t)", init="self.{m} = nn.Embedding({V}, {D}, max_norm=1.0)", **_TOKENS)
_add(
    "Embedding scale_grad_by_freq",
    "{y} = {x} + self.{m}(t)",
    init="self.{m} = nn.Embedding({V}, {D}, scale_grad_by_freq=True)",
    **_TOKENS,
)
_add(
    "Embedding of shifted tokens",
    "{y} = {x} + self.{m}(F.pad(t, (1, 0))[:, :-1])",
    init="self.{m} = nn.Embedding({V}, {D})",
    **_TOKENS,
)
_add(
    "Embedding of bigrams",
    "{y} = {x} + self.{m}((t + 5 * t.roll(1, 1)) % {V})",
    init="self.{m} = nn.Embedding({V}, {D})",
    **_TOKENS,
)
_add("Embedding tied", "{y} = {x} + self.words(t.flip(1)) * {c}", **_TOKENS)
_add(
    "F.embedding",
    "{y} = {x} + F.embedding(t % 5, self.{m})",
    init="self.{m} = nn.Parameter(torch.randn(5, {D}))",
    **_TOKENS,
)
_add(
    "F.embedding scale_grad_by_freq",
    "{y} = {x} + F.embedding(t % 5, self.{m}, scale_grad_by_freq=True)",
    init="self.{m} = nn.Parameter(torch.randn(5, {D}))",
    **{**_TOKENS, "needs": "one_part tokens"},
)
_add(
    "weight indexed by token",
    "{y} = {x} + self.{m}[t % 5]",
    init="self.{m} = nn.Parameter(torch.randn(5, {D}))",
    **_TOKENS,
)
_add("EmbeddingBag", "{y} = {x} + self.{m}(t).unsqueeze(1)", init="self.{m} = nn.EmbeddingBag({V}, {D})", **_TOKENS)
_add(
    "positions by arange",
    "{y} = {x} + self.{m}(torch.arange({x}.shape[1]))",
    init="self.{m} = nn.Embedding({L}, {D})",
    takes=("BLD",),
)
_add(
    "positions by cumsum",
    "{y} = {x} + self.{m}((torch.ones_like(t).cumsum(1) - 1) * (t != 3))",
    init="self.{m} = nn.Embedding({L}, {D})",
    **_TOKENS,
)
_add(
    "positions by sine",
    "p = torch.arange({x}.shape[1], dtype={x}.dtype)[:, None] / (1 + torch.arange({D}))\n{y} = {x} + torch.where(torch.arange({D}) % 2 == 0, p.sin(), p.cos())",
    takes=("BLD",),
)
_add(
    "positions buffer",
    "{y} = {x} + self.{m}[: {x}.shape[1]]",
    init="self.register_buffer('{m}', torch.randn({L} + 2, {D}))",
    takes=("BLD",),
)
_add(
    "positions buffer by index",
    "{y} = {x} + self.{m}[torch.arange({x}.shape[1])]",
    init="self.register_buffer('{m}', torch.randn({L} + 2, {D}))",
    takes=("BLD",),
)
_add(
    "segments",
    "{y} = {x} + self.{m}((torch.arange({L}) >= {L} // 2).long().expand({x}.shape[0], -1))",
    init="self.{m} = nn.Embedding(2, {D})",
    takes=("BLD",),
)

_add(
    "experts in a list",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = ExpertList()",
    definitions="""
class ExpertList(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear({D}, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear({D}, {D}), nn.GELU(), nn.Linear({D}, {D})) for _ in range(4)
        )

    def forward(self, x):
        rows = x.reshape(-1, {D})
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out = out.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return out.view_as(x)
""",
    takes=("BLD",),
)
_add(
    "experts stacked",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = Mixture()",
    definitions="""
class StackedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 2 * {D}, {D}) / {D} ** 0.5)
        self.down = nn.Parameter(torch.randn(4, {D}, 2 * {D}) / {D} ** 0.5)

    def forward(self, rows, chosen, weights):
        out = torch.zeros_like(rows)
        for number in range(self.num_experts):
            row, place = torch.where(chosen == number)
            hidden = F.silu(F.linear(rows[row], self.up[number]))
            out.index_add_(0, row, F.linear(hidden, self.down[number]) * weights[row, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear({D}, 4, bias=False)
        self.experts = StackedExperts()

    def forward(self, x):
        rows = x.reshape(-1, {D})
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        return self.experts(rows, chosen, weights).reshape(x.shape)
""",
    takes=("BLD",),
)
