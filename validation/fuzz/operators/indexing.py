# ruff: noqa: E501 (a template is one line)
"""Reading a part of a tensor by numbers, slices, lists, masks and tensors of indices."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("indexing")
_add = FAMILY.add

_add("index int", "{y} = {x} + {c} * {x}[{at}].unsqueeze({d})")
_add("index last", "{y} = {x} - {c} * {x}[{last}].unsqueeze({d})")
_add("index slice", "{y} = {x} * {c} + {x}[{range}].mean({d}, keepdim=True)")
_add("index step", "{y} = {x} + {x}[{step}].sum({d}, keepdim=True) / {n}")
_add("index shifted", "{y} = {x}.clone()\n{y} = torch.cat([{x}[:, 1:], {x}[:, :1]], 1)", takes=("BLD", "BLHE", "BDL"))
_add("differences", "{y} = torch.cat([{x}[:, 1:] - {x}[:, :-1], {x}[:, -1:]], 1)", takes=("BLD", "BLHE"))
_add("ellipsis", "{y} = {x} + {x}[..., {i} : {i} + 1]", choices={"i": (0, 1, 2)})
_add(
    "ellipsis pairs",
    "{y} = torch.stack([-{x}[..., 1::2], {x}[..., ::2]], -1).flatten(-2)",
    takes=("BLD", "BHLE", "BLHE", "BD"),
)
_add("None index", "{y} = ({x}[:, None] * {c})[:, 0]")
_add("index list", "{y} = {x} + {x}[:, [{i}, 0]].mean(1, keepdim=True)", choices={"i": (1, 2, 5)}, takes=("BLD", "BDL"))
_add("index tensor", "order = torch.arange({n} - 1, -1, -1)\n{y} = {x} + {c} * torch.index_select({x}, {d}, order)")
_add(
    "index by permutation", "p = torch.arange({L}).view(2, -1).t().reshape(-1)\n{y} = {x}[:, p]", takes=("BLD", "BLHE")
)
_add(
    "boolean mask sum",
    "{y} = {x} + {x}[{x} > 0].sum() * 0 + {x}[:, torch.arange({L}) % 3 == 1].sum(1, keepdim=True)",
    takes=("BLD", "BLHE"),
)
_add("masked_select", "{y} = {x} * (1 + {x}[:, :, :1].masked_select({x}[:, :, :1] > 0).sum() * 0)", takes=("BLD",))
_add("gather", "index = {x}.detach().argsort({d})\n{y} = {x} + {c} * torch.gather({x}, {d}, index)")
_add(
    "take_along_dim",
    "index = {x}.detach().abs().argmax({d}, keepdim=True)\n{y} = {x} + torch.take_along_dim({x}, index, {d})",
)
_add(
    "argmax as index",
    "best = {x}.detach().sum(-1).argmax(1)\n{y} = {x} + {x}[torch.arange({x}.shape[0]), best].unsqueeze(1)",
    takes=("BLD",),
)
_add("where", "{y} = torch.where({x} > 0, {x}, {c} * {x})")
_add(
    "where by position",
    "p = torch.arange({n}).view([-1 if k == {d} else 1 for k in range({x}.dim())])\n{y} = torch.where(p < {b}, {x}, {x} * {c})",
)
_add("masked_fill", "{y} = {x}.masked_fill({x} < -0.5, {c})")
_add(
    "masked_fill by position",
    "{y} = {x}.masked_fill((torch.arange({L}) >= {i})[:, None], {c})",
    takes=("BLD", "BHLE"),
    choices={"i": (1, 4, 6)},
)
_add("narrow", "{y} = torch.cat([{x}.narrow({d}, {a}, {n} - {a}), {x}.narrow({d}, 0, {a})], {d})")
_add("select", "{y} = {x} * torch.sigmoid({x}.select({d}, {i})).unsqueeze({d})")
_add("take", "{y} = {x} + torch.take({x}, torch.tensor([{i}])) * 0 + {c}", choices={"i": (0, 3)}, needs="one_part")
_add("index_select features", "{y} = {x}.index_select(-1, torch.arange({x}.shape[-1]).roll({k}))")
_add(
    "length from mask",
    "length = (t != 1).sum(1)\n{y} = {x} + {x}[torch.arange({x}.shape[0]), length.clamp(max={L}) - 1].unsqueeze(1)",
    takes=("BLD",),
    needs="tokens",
)
_add("mask by token", "{y} = {x} * (t != 3).unsqueeze(-1)", takes=("BLD",), needs="tokens")
_add(
    "mean by mask",
    "mask = (t % 2 == 0).unsqueeze(-1).to({x}.dtype)\n{y} = {x} + ({x} * mask).sum(1, keepdim=True) / (1 + mask.sum(1, keepdim=True))",
    takes=("BLD",),
    needs="tokens",
)
_add("where by token", "{y} = torch.where((t == 2)[..., None], {x} * {c}, {x})", takes=("BLD",), needs="tokens")
_add("one_hot", "{y} = {x} + F.one_hot(t % {D}, {D}).to({x}.dtype)", takes=("BLD",), needs="tokens")
_add(
    "gather rows by token",
    "{y} = {x} + {c} * {x}.gather(1, (t % {L}).unsqueeze(-1).expand(-1, -1, {D}))",
    takes=("BLD",),
    needs="tokens",
)
_add("shift tokens", "{y} = {x} + (t == t.roll(1, 1)).unsqueeze(-1) * {c}", takes=("BLD",), needs="tokens")
