# ruff: noqa: E501 (a template is one line)
"""Products: of activations with weights, and of activations with each other, along every dimension."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("contractions")
_add = FAMILY.add
_SQUARE = "self.{m} = nn.Parameter(torch.randn({D}, {D}) / {D} ** 0.5)"
_POSITIONS = "self.{m} = nn.Parameter(torch.randn({L}, {L}) / {L} ** 0.5)"

_add("linear", "{y} = {x} + self.{m}({x})", init="self.{m} = nn.Linear({D}, {D})", takes=("BLD", "LBD", "ND", "BD"))
_add("F.linear", "{y} = F.linear({x}, self.{m}) * {c}", init=_SQUARE, takes=("BLD", "LBD", "ND", "BD"))
_add("matmul weight", "{y} = {x} @ self.{m}", init=_SQUARE, takes=("BLD", "LBD", "ND", "BD"))
_add("weight matmul", "{y} = torch.matmul(self.{m}, {x})", init=_SQUARE, takes=("BDL",))
_add("mix positions", "{y} = {x} + self.{m} @ {x}", init=_POSITIONS, takes=("BLD", "BHLE"))
_add("mix positions causal", "{y} = {x} + self.{m}.tril() @ {x}", init=_POSITIONS, takes=("BLD", "BHLE"))
_add("mix positions by layer", "{y} = {x} + self.{m}({x})", init="self.{m} = nn.Linear({L}, {L})", takes=("BDL",))
_add("einsum features", "{y} = torch.einsum('bld,de->ble', {x}, self.{m})", init=_SQUARE, takes=("BLD",))
_add(
    "einsum ellipsis",
    "{y} = torch.einsum('...d,ed->...e', {x}, self.{m})",
    init=_SQUARE,
    takes=("BLD", "LBD", "ND", "BD"),
)
_add("einsum positions", "{y} = torch.einsum('kl,bld->bkd', self.{m}, {x})", init=_POSITIONS, takes=("BLD",))
_add(
    "einsum position weights",
    "{y} = {x} + torch.einsum('bld,l->bd', {x}, self.{m}).unsqueeze(1)",
    init="self.{m} = nn.Parameter(torch.randn({L}) / {L})",
    takes=("BLD",),
)
_add(
    "einsum scores",
    "s = torch.einsum('bld,bkd->blk', {x}, {x}) / {D}\n{y} = {x} + torch.einsum('blk,bkd->bld', s.softmax(-1), {x})",
    takes=("BLD",),
)
_add(
    "einsum features of pairs",
    "g = torch.einsum('bld,ble->bde', {x}, {x}) / {L}\n{y} = {x} + torch.einsum('ble,bde->bld', {x}, g) / {D}",
    takes=("BLD",),
)
_add("einsum sum", "{y} = {x} + torch.einsum('bld->bd', {x}).unsqueeze(1) / {L}", takes=("BLD",))
_add("einsum transpose", "{y} = torch.einsum('bld->bdl', {x})", takes=("BLD",), gives="BDL")
_add("bmm", "{y} = {x} + torch.bmm(torch.bmm({x}, {x}.transpose(1, 2)).softmax(-1), {x})", takes=("BLD",))
_add("bmm features", "{y} = {x} + torch.bmm({x}, torch.bmm({x}.transpose(1, 2), {x})) / (4 * {L})", takes=("BLD",))
_add("baddbmm", "{y} = torch.baddbmm({x}, {x} @ {x}.mT / {D}, {x}, beta=1, alpha={c})", takes=("BLD",))
_add(
    "addmm",
    "{y} = torch.addmm(self.{m}bias, {x}, self.{m})",
    init=_SQUARE + "\nself.{m}bias = nn.Parameter(torch.randn({D}))",
    takes=("ND", "BD"),
)
_add("mm", "{y} = torch.mm({x}, self.{m})", init=_SQUARE, takes=("ND", "BD"))
_add("tensordot", "{y} = torch.tensordot({x}, self.{m}, dims=([-1], [0]))", init=_SQUARE, takes=("BLD", "LBD", "BD"))
_add(
    "tensordot positions",
    "{y} = torch.tensordot({x}, self.{m}, dims=([1], [0])).transpose(1, 2)",
    init=_POSITIONS,
    takes=("BLD",),
)
_add(
    "bilinear",
    "{y} = F.bilinear({x}, {x}, self.{m})",
    init="self.{m} = nn.Parameter(torch.randn({D}, {D}, {D}) / {D})",
    takes=("BLD", "BD"),
)
_add(
    "outer",
    "{y} = {x} + torch.outer(self.{m}, self.{m}n)",
    init="self.{m} = nn.Parameter(torch.randn({L}))\nself.{m}n = nn.Parameter(torch.randn({D}))",
    takes=("BLD",),
)
_add(
    "matrix vector",
    "{y} = {x} * torch.sigmoid({x} @ self.{m}).unsqueeze(-1)",
    init="self.{m} = nn.Parameter(torch.randn({D}))",
    takes=("BLD", "BD", "ND"),
)
_add("gram of positions", "{y} = ({x} @ {x}.mT).tril() @ {x} / {L} / {D} + {x}", takes=("BLD", "BHLE"))
_add(
    "weights by head",
    "{y} = torch.einsum('bhle,hef->bhlf', {x}, self.{m})",
    init="self.{m} = nn.Parameter(torch.randn({H}, {E}, {E}) / {E} ** 0.5)",
    takes=("BHLE",),
)
_add(
    "weights by position",
    "{y} = {x} * self.{m}",
    init="self.{m} = nn.Parameter(1 + torch.randn({L}, 1) / 4)",
    takes=("BLD", "BHLE"),
)
_add(
    "positions parameter slice",
    "{y} = {x} + self.{m}[:, : {x}.shape[1]]",
    init="self.{m} = nn.Parameter(torch.randn(1, {L} + 3, {D}) / 4)",
    takes=("BLD",),
)
_add(
    "mlp",
    "{y} = {x} + self.{m}b(F.gelu(self.{m}a({x})))",
    init="self.{m}a = nn.Linear({D}, 2 * {D})\nself.{m}b = nn.Linear(2 * {D}, {D})",
    takes=("BLD", "BD", "ND"),
)
_add(
    "gated mlp",
    "{y} = {x} + self.{m}c(F.silu(self.{m}a({x})) * self.{m}b({x}))",
    init="self.{m}a = nn.Linear({D}, 2 * {D}, bias=False)\nself.{m}b = nn.Linear({D}, 2 * {D}, bias=False)\nself.{m}c = nn.Linear(2 * {D}, {D}, bias=False)",
    takes=("BLD", "BD"),
)
_add(
    "gated mlp of one layer",
    "gate, up = self.{m}a({x}).chunk(2, -1)\n{y} = {x} + self.{m}b(torch.sigmoid(gate) * up)",
    init="self.{m}a = nn.Linear({D}, 4 * {D})\nself.{m}b = nn.Linear(2 * {D}, {D})",
    takes=("BLD",),
)
_add(
    "mlp with norm inside",
    "{y} = {x} + self.{m}b(F.layer_norm(F.relu(self.{m}a({x})), (2 * {D},)))",
    init="self.{m}a = nn.Linear({D}, 2 * {D})\nself.{m}b = nn.Linear(2 * {D}, {D})",
    takes=("BLD", "BD"),
)
_add(
    "mlp with feature sums inside",
    "h = self.{m}a({x})\nh = h - h.mean(-1, keepdim=True)\n{y} = {x} + self.{m}b(torch.tanh(h).cumsum(-1) / {D})",
    init="self.{m}a = nn.Linear({D}, 2 * {D})\nself.{m}b = nn.Linear(2 * {D}, {D})",
    takes=("BLD", "BD"),
)
_add(
    "mlp with a write inside",
    "h = self.{m}a({x})\nh[..., {k}] = h[..., {k}] * {c}\n{y} = {x} + self.{m}b(h)",
    init="self.{m}a = nn.Linear({D}, 2 * {D})\nself.{m}b = nn.Linear(2 * {D}, {D})",
    takes=("BLD", "BD"),
)
_add(
    "mlp with roll inside",
    "h = torch.tanh(self.{m}a({x}))\n{y} = {x} + self.{m}b(h + h.roll({k}, -1))",
    init="self.{m}a = nn.Linear({D}, 2 * {D})\nself.{m}b = nn.Linear(2 * {D}, {D})",
    takes=("BLD", "BD"),
)
_add(
    "mlp with step inside",
    "h = torch.tanh(self.{m}a({x}))\n{y} = {x} + self.{m}b(h[..., ::2] + h[..., 1::2])",
    init="self.{m}a = nn.Linear({D}, 4 * {D})\nself.{m}b = nn.Linear(2 * {D}, {D})",
    takes=("BLD", "BD"),
)
_add(
    "mlp called twice",
    "{y} = {x} + self.{m}b(torch.tanh(self.{m}a({x})))\n{y} = {y} + self.{m}b(torch.tanh(self.{m}a({y})))",
    init="self.{m}a = nn.Linear({D}, 2 * {D})\nself.{m}b = nn.Linear(2 * {D}, {D})",
    takes=("BLD", "BD"),
)
