# ruff: noqa: E501 (a template is one line)
"""Custom autograd functions, checkpoints, and transforms of functions."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("functions")
_add = FAMILY.add


def _function(name: str, forward: str, backward: str, arguments: str = "x", saves: str = "x", gives: str = "") -> str:
    values = ", ".join("None" for _ in arguments.split(", ")[1:])
    return (
        f"class {name}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, {arguments}):\n"
        f"        ctx.save_for_backward({saves})\n        return {forward}\n\n    @staticmethod\n"
        f"    def backward(ctx, g):\n        ({saves},) = ctx.saved_tensors\n"
        f"        return {backward}{', ' + values if values else ''}{gives}\n"
    )


_SEQUENCE = ("BLD", "BLHE", "BDL", "BHLE")
_add(
    "Function pointwise",
    "{y} = {x} + Swish.apply({x})",
    definitions=_function("Swish", "x * x.sigmoid()", "g * (x.sigmoid() * (1 + x * (1 - x.sigmoid())))"),
)
_add(
    "Function mixes positions",
    "{y} = WithFlip.apply({x})",
    definitions=_function("WithFlip", "x + x.flip(1) / 2", "g + g.flip(1) / 2"),
    takes=_SEQUENCE,
)
_add(
    "Function sums positions",
    "{y} = {x} + Totals.apply({x})",
    definitions=_function("Totals", "x.cumsum(1) / x.shape[1]", "g.flip(1).cumsum(1).flip(1) / x.shape[1]"),
    takes=("BLD", "BLHE"),
)
_add(
    "Function mixes features",
    "{y} = Centered.apply({x})",
    definitions=_function("Centered", "x - x.mean(-1, keepdim=True)", "g - g.mean(-1, keepdim=True)"),
)
_add(
    "Function shifts",
    "{y} = {x} + Shifted.apply({x})",
    definitions=_function("Shifted", "x.roll(1, 1)", "g.roll(-1, 1)"),
    takes=_SEQUENCE,
)
_add("Function straight through", "{y} = {x} + Rounded.apply({x})", definitions=_function("Rounded", "x.round()", "g"))
_add(
    "Function reverses gradients",
    "{y} = Reversed.apply({x})",
    definitions=_function("Reversed", "x.view_as(x)", "-0.5 * g"),
)
_add(
    "Function of a slice",
    "{y} = FirstZero.apply({x})",
    definitions="class FirstZero(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        x = x.clone()\n        x[:, 0] = 0\n        return x\n\n    @staticmethod\n    def backward(ctx, g):\n        g = g.clone()\n        g[:, 0] = 0\n        return g\n",
    takes=("BLD", "BLHE", "BDL"),
)
_add(
    "Function of two",
    "{y} = Product.apply({x}, {x}.flip(-1))",
    definitions="class Product(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, a, b):\n        ctx.save_for_backward(a, b)\n        return a * b.sigmoid()\n\n    @staticmethod\n    def backward(ctx, g):\n        a, b = ctx.saved_tensors\n        s = b.sigmoid()\n        return g * s, g * a * s * (1 - s)\n",
)
_add(
    "Function with a weight",
    "{y} = {x} + Linear.apply({x}, self.{m})",
    init="self.{m} = nn.Parameter(torch.randn({D}, {D}) / {D} ** 0.5)",
    definitions="class Linear(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, w):\n        ctx.save_for_backward(x, w)\n        return x @ w.t()\n\n    @staticmethod\n    def backward(ctx, g):\n        x, w = ctx.saved_tensors\n        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)\n",
    takes=("BLD", "ND", "BD"),
)
_add(
    "Function with position weight",
    "{y} = PositionScale.apply({x}, self.{m})",
    init="self.{m} = nn.Parameter(torch.ones({L}, 1))",
    definitions="class PositionScale(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, w):\n        ctx.save_for_backward(x, w)\n        return x * w\n\n    @staticmethod\n    def backward(ctx, g):\n        x, w = ctx.saved_tensors\n        return g * w, (g * x).sum((0, 2))[:, None]\n",
    takes=("BLD",),
)
_add(
    "Function detaches half",
    "{y} = {x} + Scaled.apply({x}, {c})",
    definitions="class Scaled(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, factor):\n        ctx.factor = factor\n        return x * factor\n\n    @staticmethod\n    def backward(ctx, g):\n        return g * ctx.factor, None\n",
)

_add(
    "checkpoint", "{y} = torch.utils.checkpoint.checkpoint(lambda z: z + torch.tanh(z) * {c}, {x}, use_reentrant=False)"
)
_add(
    "checkpoint of a layer",
    "{y} = {x} + torch.utils.checkpoint.checkpoint(self.{m}, {x}, use_reentrant=False)",
    init="self.{m} = nn.Linear({D}, {D})",
    takes=("BLD", "ND", "BD"),
)
_add(
    "checkpoint of an mlp",
    "{y} = {x} + torch.utils.checkpoint.checkpoint(self.{m}, {x}, use_reentrant=False)",
    init="self.{m} = nn.Sequential(nn.Linear({D}, 2 * {D}), nn.GELU(), nn.Linear(2 * {D}, {D}))",
    takes=("BLD", "BD"),
)
_add(
    "checkpoint of a mix",
    "{y} = torch.utils.checkpoint.checkpoint(lambda z: z + z.roll(1, 1) * {c}, {x}, use_reentrant=False)",
    takes=_SEQUENCE,
)
_add("checkpoint reentrant", "{y} = {x} + torch.utils.checkpoint.checkpoint(torch.tanh, {x}, use_reentrant=True)")
_add("vmap", "{y} = torch.func.vmap(lambda row: row * {c} + row.tanh())({x})")
_add(
    "vmap over positions",
    "{y} = {x} + torch.func.vmap(lambda row: row - row.mean(-1, keepdim=True), in_dims=1, out_dims=1)({x})",
    takes=("BLD",),
)
_add("grad of a function", "{y} = {x} + torch.func.grad(lambda z: (z.tanh() ** 2).sum())({x})")
_add("detach", "{y} = {x} + {c} * {x}.detach()")
_add("detach of a mean", "{y} = {x} - {x}.detach().mean(1, keepdim=True)", takes=("BLD", "BDL", "BLHE"))
_add("no_grad", "with torch.no_grad():\n    scale = {x}.abs().amax({d}, keepdim=True)\n{y} = {x} / (scale + 1)")
_add("straight through", "{y} = {x} + ({x}.round() - {x}).detach()")
_add(
    "straight through choice",
    "s = {x}.softmax({d})\nhard = torch.zeros_like(s).scatter({d}, s.argmax({d}, keepdim=True), 1.0)\n{y} = {x} * (1 + hard - s.detach() + s)",
)
_add(
    "inner gradient",
    "z = {x}.detach().requires_grad_()\nwith torch.enable_grad():\n    g = torch.autograd.grad((z**3).sum(), z)[0]\n{y} = {x} + g * {c} / (1 + g.abs())",
)
