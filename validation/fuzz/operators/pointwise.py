"""Functions of single elements."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("pointwise")
_add = FAMILY.add

_add(
    "activation",
    "{y} = F.{f}({x})",
    choices={
        "f": (
            "relu",
            "gelu",
            "silu",
            "elu",
            "softplus",
            "leaky_relu",
            "mish",
            "selu",
            "hardswish",
            "relu6",
            "tanhshrink",
            "softsign",
        )
    },
)
_add("arithmetic", "{y} = {x} {f}", choices={"f": ("* 0.7 + 0.1", "- 0.3", "/ 1.7", "* -0.8", "** 2 * 0.2", "+ 1")})
_add(
    "function",
    "{y} = torch.{f}({x})",
    choices={
        "f": (
            "tanh",
            "sigmoid",
            "sin",
            "cos",
            "atan",
            "erf",
            "sinh",
            "asinh",
            "abs",
            "neg",
            "square",
            "log1p_abs",
            "expm1_small",
        )[:11]
    },
)
_add("exp and log", "{y} = torch.log1p(torch.exp({x}.clamp(max=4)))")
_add("clamp", "{y} = {x}.clamp(-1.5, 1.5) + 0.1 * {x}")
_add("maximum", "{y} = torch.maximum({x}, {c} * {x})")
_add("lerp", "{y} = torch.lerp({x}, {x}.tanh(), 0.3)")
_add("addcmul", "{y} = torch.addcmul({x}, {x}, {x}.sigmoid(), value={c})")
_add("sqrt", "{y} = ({x} * {x} + 0.1).sqrt()")
_add("sign", "{y} = {x} + {c} * {x}.sign()")
_add("floor", "{y} = {x} + {c} * {x}.floor()")
_add("remainder", "{y} = {x} + torch.remainder({x}, 1.0)")
_add("cast", "{y} = {x} + {x}.float().double().detach() * 0 + {x}.to({x}.dtype)")
_add("glu", "{y} = F.glu(torch.cat([{x}, {x} * {c}], {d}), {d})")
_add("type_as", "{y} = {x} + torch.ones(1).type_as({x}) * {c}")
_add("nan_to_num", "{y} = torch.nan_to_num({x}) * {c}")
_add(
    "random of a generator",
    "g = torch.Generator().manual_seed(3)\n{y} = {x} + torch.randn({x}.shape[-1], generator=g, dtype={x}.dtype)",
)
_add("keep", "kept = {x}\n{y} = torch.tanh({x})")
_add("join", "{y} = {x} + {c} * kept", needs="kept")
