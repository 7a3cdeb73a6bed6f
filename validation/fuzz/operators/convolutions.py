# ruff: noqa: E501 (a template is one line)
"""Convolutions, pooling, padding and resampling, of sequences and of pictures."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("convolutions")
_add = FAMILY.add
_CONV1D = "self.{m} = nn.Conv1d({D}, {D}, {kernel})"
_PICTURE = ("BCSS",)

_add("Conv1d", "{y} = {x} + self.{m}({x})", init="self.{m} = nn.Conv1d({D}, {D}, 3, padding=1)", takes=("BDL",))
_add("Conv1d size one", "{y} = self.{m}({x})", init="self.{m} = nn.Conv1d({D}, {D}, 1)", takes=("BDL",))
_add(
    "Conv1d of a transpose",
    "{y} = {x} + self.{m}({x}.transpose(1, 2)).transpose(1, 2)",
    init="self.{m} = nn.Conv1d({D}, {D}, 3, padding=1)",
    takes=("BLD",),
)
_add(
    "Conv1d depthwise causal",
    "{y} = {x} + self.{m}({x}.mT)[..., : {x}.shape[1]].mT",
    init="self.{m} = nn.Conv1d({D}, {D}, 3, padding=2, groups={D})",
    takes=("BLD",),
)
_add(
    "Conv1d padded causal",
    "{y} = self.{m}(F.pad({x}, (2, 0)))",
    init="self.{m} = nn.Conv1d({D}, {D}, 3)",
    takes=("BDL",),
)
_add(
    "Conv1d over features",
    "{y} = {x} + self.{m}({x}.reshape(-1, 1, {D})).reshape({x}.shape)",
    init="self.{m} = nn.Conv1d(1, 1, 3, padding=1)",
    takes=("BLD", "BD"),
)
_add(
    "Conv1d dilated",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = nn.Conv1d({D}, {D}, 3, padding=2, dilation=2)",
    takes=("BDL",),
)
_add(
    "ConvTranspose1d",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = nn.ConvTranspose1d({D}, {D}, 3, padding=1)",
    takes=("BDL",),
)
_add(
    "Conv2d of a reshape",
    "{y} = {x} + self.{m}({x}.unsqueeze(1)).squeeze(1)",
    init="self.{m} = nn.Conv2d(1, 1, 3, padding=1)",
    takes=("BLD", "BDL"),
)
_add(
    "F.conv1d",
    "{y} = F.conv1d({x}, self.{m}, padding=1)",
    init="self.{m} = nn.Parameter(torch.randn({D}, {D}, 3) / {D})",
    takes=("BDL",),
)
_add("avg_pool1d", "{y} = {x} + F.avg_pool1d({x}, 3, 1, 1)", takes=("BDL", "BLD"))
_add("max_pool1d", "{y} = {x} + F.max_pool1d({x}, 3, 1, 1)", takes=("BDL", "BLD"))
_add("adaptive pool", "{y} = {x} + F.adaptive_avg_pool1d({x}, 1)", takes=("BDL",))
_add("pool and interpolate", "{y} = {x} + F.interpolate(F.avg_pool1d({x}, 2), size={x}.shape[-1])", takes=("BDL",))
_add("interpolate linear", "{y} = F.interpolate({x}, scale_factor=2, mode='linear')[..., ::2]", takes=("BDL",))
_add("F.pad reflect", "{y} = F.pad({x}, (1, 1), mode='reflect')[..., 2:]", takes=("BDL",))
_add("F.pad features", "{y} = F.pad({x}, (1, 0))[..., :-1]")
_add("fold pairs", "{y} = {x} + {x}.unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1)", takes=("BLD",))

_add("Conv2d", "{y} = {x} + F.relu(self.{m}({x}))", init="self.{m} = nn.Conv2d({C}, {C}, 3, padding=1)", takes=_PICTURE)
_add(
    "Conv2d grouped",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = nn.Conv2d({C}, {C}, 3, padding=1, groups=2)",
    takes=_PICTURE,
)
_add(
    "Conv2d strided",
    "{y} = {x} + F.interpolate(self.{m}({x}), {x}.shape[2:])",
    init="self.{m} = nn.Conv2d({C}, {C}, 3, stride=2, padding=1)",
    takes=_PICTURE,
)
_add(
    "Conv2d bottleneck",
    "{y} = {x} + self.{m}b(F.relu(self.{m}a({x})))",
    init="self.{m}a = nn.Conv2d({C}, 2 * {C}, 1)\nself.{m}b = nn.Conv2d(2 * {C}, {C}, 3, padding=1)",
    takes=_PICTURE,
)
_add(
    "ConvTranspose2d",
    "{y} = {x} + self.{m}({x})",
    init="self.{m} = nn.ConvTranspose2d({C}, {C}, 3, padding=1)",
    takes=_PICTURE,
)
_add("max_pool2d", "{y} = {x} + F.max_pool2d({x}, 3, 1, 1)", takes=_PICTURE)
_add("avg_pool2d", "{y} = F.avg_pool2d({x}, 3, 1, 1)", takes=_PICTURE)
_add("adaptive pool gate", "{y} = {x} * torch.sigmoid(F.adaptive_avg_pool2d({x}, 1))", takes=_PICTURE)
_add(
    "squeeze and excite",
    "{y} = {x} * torch.sigmoid(self.{m}({x}.mean((2, 3))))[..., None, None]",
    init="self.{m} = nn.Linear({C}, {C})",
    takes=_PICTURE,
)
_add("interpolate bilinear", "{y} = F.interpolate({x}, scale_factor=2, mode='bilinear')[..., ::2, ::2]", takes=_PICTURE)
_add("F.unfold", "{y} = {x} + F.unfold({x}, 3, padding=1).unflatten(1, ({C}, -1)).mean(2).view_as({x})", takes=_PICTURE)
_add("channel shuffle", "{y} = {x}.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)", takes=_PICTURE)
_add("pixel_shuffle", "{y} = F.pixel_shuffle(F.pixel_unshuffle({x}, 2).roll(1, 1), 2)", takes=_PICTURE)
_add(
    "grid_sample",
    "g = F.affine_grid(torch.eye(2, 3, dtype={x}.dtype).repeat({x}.shape[0], 1, 1) * 0.9, list({x}.shape), align_corners=False)\n{y} = F.grid_sample({x}, g, align_corners=False)",
    takes=_PICTURE,
)
