"""Views and copies that only move elements: those that change the layout, and those that keep it."""

from validation.fuzz.operators.operator import SEQUENCES, Family

FAMILY = Family("views")
_add = FAMILY.add

# ---- other layouts of the same values
_add("view heads", "{y} = {x}.view({x}.shape[0], {x}.shape[1], {H}, {E})", takes=("BLD",), gives="BLHE")
_add("unflatten heads", "{y} = {x}.unflatten(-1, ({H}, {E}))", takes=("BLD",), gives="BLHE")
_add("transpose heads", "{y} = {x}.transpose(1, 2)", takes=("BLHE",), gives="BHLE")
_add("transpose heads back", "{y} = {x}.permute(0, 2, 1, 3)", takes=("BHLE",), gives="BLHE")
_add("reshape heads back", "{y} = {x}.reshape({x}.shape[0], -1, {D})", takes=("BLHE",), gives="BLD")
_add("flatten heads back", "{y} = {x}.flatten(2)", takes=("BLHE",), gives="BLD")
_add("transpose", "{y} = {x}.transpose(1, 2)", takes=("BLD",), gives="BDL")
_add("permute", "{y} = {x}.permute(0, 2, 1)", takes=("BLD",), gives="BDL")
_add("mT", "{y} = {x}.mT", takes=("BDL",), gives="BLD")
_add("movedim back", "{y} = torch.movedim({x}, 1, -1)", takes=("BDL",), gives="BLD")
_add("swapaxes batch", "{y} = {x}.swapaxes(0, 1)", takes=("BLD",), gives="LBD")
_add("swapaxes batch back", "{y} = {x}.transpose(0, 1).contiguous()", takes=("LBD",), gives="BLD")
_add("reshape rows", "{y} = {x}.reshape(-1, {D})", takes=("BLD",), gives="ND")
_add("flatten rows", "{y} = {x}.flatten(0, 1)", takes=("BLD",), gives="ND")
_add("view rows back", "{y} = {x}.view(-1, {L}, {D})", takes=("ND",), gives="BLD")
_add("unflatten rows back", "{y} = {x}.unflatten(0, (-1, {L}))", takes=("ND",), gives="BLD")

# ---- the same layout
_add("chunk", "a, b = {x}.chunk(2, {d})\n{y} = torch.cat([b, a], {d})")
_add("split", "a, b = {x}.split([{a}, {rest}], {d})\n{y} = torch.cat([b * {c}, a], {d})")
_add("tensor_split", "parts = torch.tensor_split({x}, 3, {d})\n{y} = torch.cat([parts[1], parts[2], parts[0]], {d})")
_add("unbind", "parts = {x}.unbind({d})\n{y} = torch.stack(parts[::-1], {d})")
_add("unsqueeze", "{y} = ({x}.unsqueeze({d}) * {c}).squeeze({d})")
_add("expand", "{y} = {x} + {x}.narrow({d}, {i}, 1).expand_as({x})")
_add("broadcast_to", "{y} = {x} * torch.sigmoid({x}.narrow({d}, {i}, 1)).broadcast_to({x}.shape)")
_add("movedim", "{y} = torch.tanh({x}.movedim({d}, -1)).movedim(-1, {d})")
_add("roll", "{y} = {x} + {x}.roll({k}, {d})")
_add("roll without dim", "{y} = {x} + {c} * {x}.roll({k})", needs="one_part")
_add("flip", "{y} = {x} + {c} * {x}.flip({d})")
_add("rot90", "{y} = {x} - {c} * torch.rot90({x}, 2, [{d}, {e}])")
_add("repeat", "{y} = torch.cat([{x}, {x}], {d}).narrow({d}, {i}, {n})")
_add("tile", "{y} = {x}.tile(1, 2, 1)[:, {i} : {i} + {L}]", takes=("BLD",), choices={"i": (0, 1, 3, 5)})
_add("repeat_interleave", "{y} = {x}.repeat_interleave(2, {d}).narrow({d}, {i}, {n})")
_add("unfold", "w = {x}.unfold({d}, 3, 1).mean(-1)\n{y} = torch.cat([{x}.narrow({d}, 0, 2), w], {d})")
_add("windows", "{y} = {x}.unflatten(1, (2, -1)).flip(1).flatten(1, 2)", takes=("BLD", "BLHE"))
_add("ravel", "{y} = ({x}.ravel() * {c}).view_as({x})")
_add("contiguous", "{y} = {x}.mT.contiguous().mT * {c}", takes=("BLD", "BHLE", "BDL", "LBD"))
_add("pad and cut", "{y} = F.pad({x}, (0, 0, {k}, 0))[:, : {x}.shape[1]]", takes=("BLD",))
_add("shift by cat", "{y} = {x} + torch.cat([torch.zeros_like({x}[:, :1]), {x}[:, :-1]], 1)", takes=("BLD", "BLHE"))
_add("pixel pairs", "{y} = {x}.reshape({x}.shape[0], -1, 2 * {D}).reshape_as({x})", takes=("BLD",))
_add("concatenate summary", "{y} = torch.cat([{x}.mean(1, keepdim=True), {x}], 1)[:, 1:]", takes=("BLD",))
_add("class token", "{y} = torch.cat([{x}[:, :1] * {c}, {x}], 1)[:, :-1]", takes=("BLD",))
_add(
    "diagonal",
    "{y} = {x} + torch.diagonal({x}, 0, {d}, -1).sum(-1).reshape(-1)[0]",
    takes=("BLD", "BDL"),
    needs="one_part",
)
_add("stack", "{y} = torch.stack([{x}, {x} * {c}], {d}).sum({d})")
_add(
    "squeeze size one",
    "{y} = {x} + {x}[:, {i} : {i} + 1].squeeze(1).unsqueeze(1)",
    takes=SEQUENCES[:1],
    choices={"i": (0, 3)},
)
