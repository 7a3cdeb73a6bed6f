"""Prints which functions and settings of torch and Python differ after `import meshwright`, with a session, and when it
is freed. Before that, a plain loop makes a step, which changes what torch itself changes. The argument says what is
compiled in both: `none` or `model`."""

import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_LOOKED_AT = ("torch", "os", "sys", "warnings", "threading", "pickle")


def state() -> dict[str, Any]:
    """Every function and class of their modules by its name, and the settings that can be asked for."""
    found: dict[str, Any] = {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in _LOOKED_AT and isinstance(module, ModuleType)
        for attribute, value in list(vars(module).items())
        if callable(value)
    }
    compiler: Any = torch._dynamo.config
    found |= {f"compiler.{name}": repr(getattr(compiler, name, None)) for name in compiler._config}
    found |= {
        "threads": torch.get_num_threads(),
        "precision of products": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "dtype": torch.get_default_dtype(),
        "finders": list(sys.meta_path),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "filters of warnings": list(warnings.filters),
        "folder": os.getcwd(),
    }
    return found


def changed(before: Mapping[str, Any]) -> list[str]:
    after = state()
    return sorted(name for name, value in before.items() if name in after and value != after[name])


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randint(0, 2, (8,))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


def plain_step(compiles: bool) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    compiled: Callable[[Tensor], Tensor] = torch.compile(net) if compiles else net
    inputs, targets = batch()
    functional.cross_entropy(compiled(inputs), targets).backward()
    optimizer.step()


def main(compilation: str) -> None:
    plain_step(compilation != "none")
    before = state()
    import meshwright as mw

    imported = changed(before)
    net = model()
    plan = mw.Plan.model_validate({"numerics": {"precision": "bf16"}, "compute": {"compile": compilation}})
    optimizer = torch.optim.AdamW(net.parameters())
    before = state()
    session = mw.parallelize(net, optimizer, loss=functional.cross_entropy, plan=plan, sample_batch=batch())
    for _ in range(3):
        session.step(batch())
    trained = changed(before)
    del session
    gc.collect()
    print(json.dumps({"imported": imported, "trained": trained, "freed": changed(before)}))


if __name__ == "__main__":
    main(sys.argv[1])
