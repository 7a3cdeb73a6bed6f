# ruff: noqa: E501 (a template is one line)
"""Reductions that are broadcast back, scans, and sorting."""

from validation.fuzz.operators.operator import Family

FAMILY = Family("reductions")
_add = FAMILY.add

_add("mean", "{y} = {x} - {x}.mean({d}, keepdim=True)")
_add("mean of all", "{y} = {x} + {x}.mean() * 0 + {x}.mean((1, 2), keepdim=True)", takes=("BLD", "BDL", "BLHE"))
_add("sum", "{y} = {x} + {x}.sum({d}, keepdim=True) / {n}")
_add("sum and unsqueeze", "s = {x}.sum({d})\n{y} = {x} * torch.sigmoid(s / {n}).unsqueeze({d})")
_add("sum of two", "{y} = {x} / (1 + {x}.abs().sum(({d}, {e}), keepdim=True) / 16)")
_add("amax", "{y} = {x} - {x}.amax({d}, keepdim=True)")
_add("max", "values, _ = {x}.max({d}, keepdim=True)\n{y} = {x} + {c} * values")
_add("min", "{y} = {x} - {x}.min({d}).values.unsqueeze({d})")
_add("var", "{y} = {x} / (0.5 + {x}.var({d}, keepdim=True, unbiased=False))")
_add("var unbiased", "{y} = {x} / (0.5 + {x}.var({d}, keepdim=True))")
_add("std", "{y} = {x} / (0.5 + {x}.std({d}, keepdim=True))")
_add("norm", "{y} = {x} / (0.5 + {x}.norm(dim={d}, keepdim=True))")
_add("vector_norm", "{y} = {x} / (0.5 + torch.linalg.vector_norm({x}, dim={d}, keepdim=True))")
_add("logsumexp", "{y} = {x} - {x}.logsumexp({d}, keepdim=True)")
_add("prod", "{y} = {x} + torch.tanh({x} / 2 + 1).prod({d}, keepdim=True)")
_add("softmax", "{y} = {x} + {x}.softmax({d})")
_add("log_softmax", "{y} = {x} + {c} * F.log_softmax({x}, {d})")
_add("argmax", "{y} = {x} + {c} * {x}.argmax({d}, keepdim=True) / {n}")
_add("any", "{y} = {x} + ({x} > 1.5).any({d}, keepdim=True) * {c}")
_add("count_nonzero", "{y} = {x} + (({x} > 0).sum({d}, keepdim=True) / {n}) * {c}")
_add("all", "{y} = {x} * (1 + ({x} > -2).all({d}, keepdim=True) * {c})")
_add("median", "{y} = {x} - {x}.median({d}, keepdim=True).values")
_add("quantile", "{y} = {x} - {x}.quantile(0.5, {d}, keepdim=True)")
_add("kthvalue", "{y} = {x} + {c} * {x}.kthvalue(2, {d}, keepdim=True).values")
_add("mode of signs", "{y} = {x} + {x}.sign().sum({d}, keepdim=True) * {c} / {n}")
_add("cumsum", "{y} = {x} + torch.cumsum({x}, {d}) / {n}")
_add("cumprod", "{y} = {x} + torch.cumprod(torch.tanh({x}) + 1, {d})")
_add("logcumsumexp", "{y} = {x} - {c} * torch.logcumsumexp({x}, {d})")
_add("cummax", "{y} = {x} + {c} * torch.cummax({x}, {d}).values")
_add("cummin", "{y} = {x} + {x}.cummin({d})[0]")
_add(
    "running mean",
    "count = torch.arange(1, {L} + 1, dtype={x}.dtype)[:, None]\n{y} = {x} + {x}.cumsum(1) / count",
    takes=("BLD",),
)
_add("diff", "{y} = {x} + torch.diff({x}, dim={d}, prepend={x}.narrow({d}, 0, 1))")
_add("sort", "{y} = {x} + {c} * {x}.sort({d}).values")
_add(
    "argsort",
    "order = {x}.detach().sum(-1).argsort(1)\n{y} = {x} + {x}.take_along_dim(order[..., None], 1)",
    takes=("BLD",),
)
_add("topk", "{y} = {x} + {x}.topk(2, {d}).values.sum({d}, keepdim=True) * {c}")
_add(
    "topk rows",
    "best = {x}.sum(-1).topk(2, 1)\n{y} = {x} + {x}.gather(1, best.indices[..., None].expand(-1, -1, {D})).mean(1, keepdim=True)",
    takes=("BLD",),
)
_add(
    "sort positions",
    "order = t.argsort(dim=1, stable=True)\n{y} = {x}.gather(1, order[..., None].expand_as({x}))",
    takes=("BLD",),
    needs="tokens",
)
_add(
    "cumsum of mask",
    "place = (t != 0).cumsum(1)\n{y} = {x} + torch.sin(place * {c})[..., None]",
    takes=("BLD",),
    needs="tokens",
)
_add("trapezoid", "{y} = {x} + torch.trapezoid({x}, dim={d}).unsqueeze({d}) / {n}")
_add("renorm", "{y} = {x} / {x}.detach().abs().amax({d}, keepdim=True).clamp(min=1)")
_add(
    "bincount",
    "count = torch.bincount(t.flatten() % 4, minlength=4) * 0\n{y} = {x} + count[t % 4].unsqueeze(-1)",
    takes=("BLD",),
    needs="tokens",
)
