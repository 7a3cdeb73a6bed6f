# ruff: noqa: E501 (a template is one line)
"""Writing into tensors: into a clone, into zeros, into views, and into what the operator before returned."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("in-place")
_add = FAMILY.add

_add("write index", "{y} = {x}.clone()\n{y}[{at}] = {y}[{at}] * {c}")
_add("write constant", "{y} = {x}.clone()\n{y}[{at}] = {c}")
_add("write slice", "{y} = {x}.clone()\n{y}[{range}] += {c}")
_add("write slice of another", "{y} = {x}.clone()\n{y}[{range}] = torch.tanh({x}[{range}])")
_add("write step", "{y} = {x}.clone()\n{y}[{step}] *= {c}")
_add("write mask", "{y} = {x}.clone()\n{y}[{x} > 0.5] = {c}")
_add("write mask by token", "{y} = {x}.clone()\n{y}[t == 3] = {c}", takes=("BLD",), needs="tokens")
_add("write straight", "{y} = {x} * 1\n{y}[{at}] += 1", takes=("BLD", "BDL", "BHLE", "BD"))
_add("zeros and write", "{y} = torch.zeros_like({x})\n{y}[{range}] = {x}[{range}]\n{y} = {y} + {c} * {x}")
_add("zeros and copy_", "{y} = torch.zeros_like({x})\n{y}.copy_({x})\n{y}[{at}] = 0")
_add("empty and copy_", "{y} = torch.empty_like({x})\n{y}.copy_({x} * {c})")
_add(
    "new_zeros and write",
    "z = {x}.new_zeros({x}.shape)\nz[:, 1:] = {x}[:, :-1]\n{y} = {x} + z",
    takes=("BLD", "BLHE", "BDL"),
)
_add("add_", "{y} = {x}.clone()\n{y}.add_({x}, alpha={c})")
_add("mul_", "{y} = {x} + 0\n{y}.mul_({c}).add_(1)")
_add("zero_ of a slice", "{y} = {x}.clone()\n{y}.narrow({d}, {i}, 1).zero_()")
_add("fill_ of a select", "{y} = {x}.clone()\n{y}.select({d}, {i}).fill_({c})")
_add("view and mul_", "{y} = {x}.clone()\n{y}.transpose(-1, -2).mul_({c})", takes=("BLD", "BDL", "BHLE"))
_add("slice view add_", "{y} = {x}.clone()\npart = {y}[{range}]\npart.add_({c})\n{y} = {y} * 1")
_add("flat view write", "{y} = {x}.clone()\n{y}.view(-1)[{i}] = 0", choices={"i": (0, 3)}, needs="one_part")
_add(
    "loop of select and mul_",
    "{y} = {x}.clone()\nfor number in range(0, {n}, 3):\n    {y}.select({d}, number).mul_({c})",
)
_add("index_copy_", "{y} = {x}.clone()\n{y}.index_copy_({d}, torch.tensor([{i}]), {x}.narrow({d}, 0, 1) * {c})")
_add("index_fill_", "{y} = {x}.clone()\n{y}.index_fill_({d}, torch.tensor([{i}]), {c})")
_add("index_add_", "{y} = {x}.clone()\n{y}.index_add_({d}, torch.tensor([{i}]), {x}.narrow({d}, {j}, 1))")
_add(
    "index_put_",
    "{y} = {x}.clone()\n{y}.index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor({c}, dtype={x}.dtype), accumulate=True)",
    takes=("BDL",),
    needs="one_part",
)
_add(
    "scatter_",
    "index = {x}.detach().argmax({d}, keepdim=True)\n{y} = {x} + torch.zeros_like({x}).scatter_({d}, index, {c})",
)
_add(
    "scatter_add",
    "index = torch.zeros_like({x}, dtype=torch.long) + {i}\n{y} = torch.zeros_like({x}).scatter_add({d}, index, {x}) + {x}",
)
_add("masked_fill_", "{y} = {x}.clone()\n{y}.masked_fill_({x} > 1, {c})")
_add("masked_scatter", "{y} = {x}.masked_scatter({x} > 0, {x}.detach() * {c})", needs="one_part")
_add("clamp_", "{y} = {x} * 1\n{y}.clamp_(-1, 1)\n{y} = {y} + {c} * {x}")
_add("relu_", "{y} = {x} + F.relu_({x} * {c})")
_add(
    "setitem tensor index",
    "{y} = {x}.clone()\n{y}[:, torch.tensor([0, {i}])] = {c}",
    takes=("BLD", "BLHE", "BDL"),
    choices={"i": (1, 3, 5)},
)
_add(
    "setitem permutation", "{y} = torch.empty_like({x})\n{y}[:, torch.arange({L}).flip(0)] = {x}", takes=("BLD", "BLHE")
)
_add(
    "loop of writes",
    "{y} = {x}.clone()\nfor k in range(1, {L}):\n    {y}[:, k] = {y}[:, k] + 0.5 * {y}[:, k - 1].clone()",
    takes=("BLD",),
)
_add(
    "loop of states",
    "state = torch.zeros_like({x}[:, 0])\nstates = []\nfor k in range({x}.shape[1]):\n    state = 0.5 * state + {x}[:, k]\n    states.append(state)\n{y} = torch.stack(states, 1)",
    takes=("BLD",),
)
_add(
    "out argument",
    "with torch.no_grad():\n    z = torch.empty_like({x})\n    torch.mul({x}, {c}, out=z)\n{y} = {x} + z",
)
_add("swap by write", "{y} = {x}.clone()\n{y}[:, 0], {y}[:, -1] = {x}[:, -1], {x}[:, 0]", takes=("BLD", "BLHE", "BDL"))
_add(
    "fill diagonal",
    "scores = {x} @ {x}.mT\nscores.diagonal(0, -2, -1).fill_(0)\n{y} = {x} + scores.softmax(-1) @ {x}",
    takes=("BLD", "BHLE"),
)
_add(
    "triu_ mask",
    "mask = torch.full(({L}, {L}), float('-inf'), dtype={x}.dtype).triu_(1)\n{y} = {x} + ({x} @ {x}.mT / 4 + mask).softmax(-1) @ {x}",
    takes=("BLD", "BHLE"),
)
