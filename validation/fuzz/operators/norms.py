# ruff: noqa: E501 (a template is one line)
"""Norms of torch, and those that models write themselves."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("norms")
_add = FAMILY.add
_WEIGHT = "self.{m} = nn.Parameter(torch.ones({D}) + torch.randn({D}) / 8)"
_LAST = ("BLD", "LBD", "ND", "BD")

_add("LayerNorm", "{y} = self.{m}({x})", init="self.{m} = nn.LayerNorm({D})", takes=_LAST)
_add("F.layer_norm", "{y} = F.layer_norm({x}, {x}.shape[-1:])")
_add("LayerNorm of two dimensions", "{y} = self.{m}({x})", init="self.{m} = nn.LayerNorm(({L}, {D}))", takes=("BLD",))
_add("LayerNorm of heads", "{y} = self.{m}({x})", init="self.{m} = nn.LayerNorm({E})", takes=("BLHE", "BHLE"))
_add("RMSNorm", "{y} = self.{m}({x})", init="self.{m} = nn.RMSNorm({D})", takes=_LAST)
_add(
    "rms by hand",
    "{y} = {x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-3) * self.{m}",
    init=_WEIGHT,
    takes=_LAST,
)
_add(
    "layer norm by hand",
    "mean, var = {x}.mean(-1, keepdim=True), {x}.var(-1, keepdim=True, unbiased=False)\n{y} = ({x} - mean) / (var + 1e-3).sqrt() * self.{m}",
    init=_WEIGHT,
    takes=_LAST,
)
_add("F.normalize", "{y} = F.normalize({x}, dim={d}) * 2")
_add("GroupNorm", "{y} = self.{m}({x})", init="self.{m} = nn.GroupNorm(2, {D})", takes=("BDL",))
_add("GroupNorm of a picture", "{y} = self.{m}({x})", init="self.{m} = nn.GroupNorm(2, {C})", takes=("BCSS",))
_add("GroupNorm of rows", "{y} = self.{m}({x})", init="self.{m} = nn.GroupNorm(2, {D})", takes=("ND", "BD"))
_add("InstanceNorm1d", "{y} = self.{m}({x})", init="self.{m} = nn.InstanceNorm1d({D}, affine=True)", takes=("BDL",))
_add("InstanceNorm2d", "{y} = self.{m}({x})", init="self.{m} = nn.InstanceNorm2d({C}, affine=True)", takes=("BCSS",))
_add(
    "BatchNorm1d",
    "{y} = self.{m}({x})",
    init="self.{m} = nn.BatchNorm1d({D})",
    takes=("BD", "BDL", "ND"),
    needs="batch_norm",
)
_add("BatchNorm2d", "{y} = self.{m}({x})", init="self.{m} = nn.BatchNorm2d({C})", takes=("BCSS",), needs="batch_norm")
_add("BatchNorm1d evaluated", "{y} = self.{m}.eval()({x})", init="self.{m} = nn.BatchNorm1d({D})", takes=("BD", "BDL"))
_add("local_response_norm", "{y} = F.local_response_norm({x}, 3)", takes=("BDL", "BCSS"))
_add(
    "standardize positions",
    "{y} = ({x} - {x}.mean(1, keepdim=True)) / ({x}.std(1, keepdim=True) + 0.1)",
    takes=("BLD",),
)
