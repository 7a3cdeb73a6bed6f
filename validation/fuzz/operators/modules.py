# ruff: noqa: E501 (a template is one line)
"""What modules do besides computing: parameters that are used twice, tied, parametrized or frozen, buffers that change,
hooks, and code that depends on values."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("modules")
_add = FAMILY.add
_LAYER = "self.{m} = nn.Linear({D}, {D})"
_LAST = ("BLD", "LBD", "ND", "BD")

_add("layer used twice", "{y} = {x} + self.{m}(torch.tanh(self.{m}({x})))", init=_LAYER, takes=_LAST)
_add(
    "weight used twice",
    "{y} = {x} @ self.{m} @ self.{m}.t()",
    init="self.{m} = nn.Parameter(torch.randn({D}, {D}) / {D} ** 0.5)",
    takes=_LAST,
)
_add(
    "tied layers",
    "{y} = {x} + self.{m}b(torch.tanh(self.{m}({x})))",
    init=_LAYER + "\nself.{m}b = nn.Linear({D}, {D})\nself.{m}b.weight = self.{m}.weight",
    takes=_LAST,
)
_add("frozen layer", "{y} = {x} + self.{m}({x})", init=_LAYER + "\nself.{m}.requires_grad_(False)", takes=_LAST)
_add("frozen bias", "{y} = {x} + self.{m}({x})", init=_LAYER + "\nself.{m}.bias.requires_grad_(False)", takes=_LAST)
_add("unused layer", "{y} = {x} * {c}", init=_LAYER, takes=_LAST)
_add(
    "weight_norm",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = torch.nn.utils.parametrizations.weight_norm(nn.Linear({D}, {D}))",
    takes=_LAST,
)
_add(
    "weight_norm by hand",
    "w = self.{m}.weight\n{y} = F.linear({x}, w / w.norm(dim=1, keepdim=True), self.{m}.bias)",
    init=_LAYER,
    takes=_LAST,
)
_add(
    "spectral_norm",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = torch.nn.utils.parametrizations.spectral_norm(nn.Linear({D}, {D}))",
    takes=_LAST,
)
_add(
    "parametrize",
    "{y} = {x} + self.{m}({x})",
    init=_LAYER + "\ntorch.nn.utils.parametrize.register_parametrization(self.{m}, 'weight', Symmetric())",
    definitions="class Symmetric(nn.Module):\n    def forward(self, w):\n        return w.triu() + w.triu(1).mT",
    takes=_LAST,
)
_add(
    "orthogonal",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = torch.nn.utils.parametrizations.orthogonal(nn.Linear({D}, {D}))",
    takes=("BLD", "BD"),
)
_add(
    "low rank",
    "{y} = {x} + self.{m}({x}) + self.{m}b(self.{m}a({x})) * 2",
    init=_LAYER
    + "\nself.{m}.requires_grad_(False)\nself.{m}a = nn.Linear({D}, 2, bias=False)\nself.{m}b = nn.Linear(2, {D}, bias=False)",
    takes=_LAST,
)
_add(
    "complex weight",
    "z = torch.fft.rfft({x}, dim=-1) * torch.view_as_complex(self.{m})\n{y} = {x} + torch.fft.irfft(z, n={D}, dim=-1)",
    init="self.{m} = nn.Parameter(torch.randn({D} // 2 + 1, 2))",
    takes=_LAST,
)
_add(
    "complex parameter",
    "z = {x}.to(torch.complex128) * self.{m}\n{y} = {x} + z.real + z.imag",
    init="self.{m} = nn.Parameter(torch.randn({D}, dtype=torch.complex128))",
    takes=("BLD", "BD"),
)
_add("fft of positions", "{y} = {x} + torch.fft.fft({x}, dim=1).real / {L}", takes=("BLD",))
_add(
    "fft filter",
    "z = torch.fft.rfft({x}, dim=1)\n{y} = {x} + torch.fft.irfft(z * torch.view_as_complex(self.{m})[:, None], n={L}, dim=1)",
    init="self.{m} = nn.Parameter(torch.randn({L} // 2 + 1, 2))",
    takes=("BLD",),
)
_add("fft of two dimensions", "{y} = {x} + torch.fft.fft2({x}).real / {L} / 2", takes=("BLD", "BDL"))
_add("scalar parameter", "{y} = {x} * self.{m} + self.{m}.exp()", init="self.{m} = nn.Parameter(torch.tensor(0.3))")
_add(
    "layer scale",
    "{y} = {x} + self.{m} * self.{m}l({x})",
    init="self.{m} = nn.Parameter(torch.full(({D},), 0.5))\nself.{m}l = nn.Linear({D}, {D})",
    takes=_LAST,
)
_add("PReLU", "{y} = self.{m}({x})", init="self.{m} = nn.PReLU()")
_add(
    "buffer mean of positions",
    "self.{m}.mul_(0.9).add_({x}.detach().mean((0, 1)), alpha=0.1)\n{y} = {x} - self.{m}",
    init="self.register_buffer('{m}', torch.zeros({D}))",
    takes=("BLD",),
    needs="one_part",
)
_add(
    "buffer of the first position",
    "self.{m}.copy_({x}.detach()[0, 0])\n{y} = {x} + self.{m}",
    init="self.register_buffer('{m}', torch.zeros({D}))",
    takes=("BLD",),
    needs="one_part",
)
_add(
    "buffer counts calls",
    "self.{m} += 1\n{y} = {x} + {c} / self.{m}",
    init="self.register_buffer('{m}', torch.zeros(()))",
    needs="one_part",
)
_add(
    "forward hook",
    "{y} = {x} + self.{m}({x})",
    init=_LAYER + "\nself.{m}.register_forward_hook(lambda module, inputs, output: output * {c})",
    takes=_LAST,
)
_add(
    "forward hook mixes positions",
    "{y} = {x} + self.{m}({x})",
    init=_LAYER + "\nself.{m}.register_forward_hook(lambda module, inputs, output: output + output.flip(1))",
    takes=("BLD",),
)
_add(
    "forward pre hook",
    "{y} = {x} + self.{m}({x})",
    init=_LAYER + "\nself.{m}.register_forward_pre_hook(lambda module, inputs: (torch.tanh(inputs[0]),))",
    takes=_LAST,
)
_add(
    "backward hook",
    "{y} = {x} + self.{m}({x})",
    init=_LAYER + "\nself.{m}.register_full_backward_hook(lambda module, gin, gout: (gin[0] * {c},))",
    takes=_LAST,
)
_add("tensor hook", "{y} = {x} * 1\nif {y}.requires_grad:\n    {y}.register_hook(lambda g: g * {c})")
_add(
    "tensor hook mixes positions",
    "{y} = {x} * 1\nif {y}.requires_grad:\n    {y}.register_hook(lambda g: g - g.mean(1, keepdim=True))",
    takes=("BLD",),
)
_add(
    "tensor hook clips",
    "{y} = {x} * 1\nif {y}.requires_grad:\n    {y}.register_hook(lambda g: g / (1 + g.abs().max() * 0 + g.abs().sum((1, 2), keepdim=True)))",
    takes=("BLD",),
)
_add(
    "parameter hook",
    "{y} = {x} + self.{m}({x})",
    init=_LAYER + "\nself.{m}.weight.register_hook(lambda g: g * {c})",
    takes=_LAST,
)
_add("item decides", "{y} = {x} * {c} if {x}.sum().item() > 1e9 else {x} + {c}")
_add("value decides", "{y} = {x} + 1 if bool(({x}[0] > 1e6).any()) else {x} * {c}")
_add(
    "shape decides",
    "{y} = {x}[:, : {L} // 2].repeat(1, 2, 1) if {x}.shape[1] == {L} and {L} % 2 == 0 else {x}",
    takes=("BLD",),
)
_add("length decides", "{y} = {x} / {x}.shape[1] ** 0.5 + {x}.size(1) / {L}", takes=("BLD", "BDL", "BHLE"))
_add("len decides", "{y} = {x} / len({x}[0])", takes=("BLD",))
_add(
    "Sequential",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = nn.Sequential(nn.Linear({D}, 2 * {D}), nn.Tanh(), nn.Linear(2 * {D}, {D}))",
    takes=_LAST,
)
_add(
    "ModuleDict",
    "{y} = {x} + self.{m}['b'](F.relu(self.{m}['a']({x})))",
    init="self.{m} = nn.ModuleDict(dict(a=nn.Linear({D}, 2 * {D}), b=nn.Linear(2 * {D}, {D})))",
    takes=_LAST,
)
_add(
    "ParameterList",
    "{y} = {x} * self.{m}[0] + self.{m}[1]",
    init="self.{m} = nn.ParameterList([torch.randn({D}) for _ in range(2)])",
    takes=_LAST,
)
_add("Dropout of nothing", "{y} = F.dropout(self.{m}({x}), 0.0)", init="self.{m} = nn.Dropout(0.0)")
