"""Meshwright: plan, prove and run distributed training of any PyTorch model."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Loaded when first used: `import meshwright` and `meshwright --help` do not wait for torch.
_WHERE = {
    "Job": "meshwright.job",
    "Plan": "meshwright.plan",
    "Session": "meshwright.train.session",
    "best_plan": "meshwright.planner.search",
    "load_job": "meshwright.job",
    "load_plan": "meshwright.job",
    "parallelize": "meshwright.train.parallelize",
    "predict": "meshwright.planner.predict",
    "prove": "meshwright.proof.prove_model",
}
__all__ = [
    "Job",
    "Plan",
    "Session",
    "__version__",
    "best_plan",
    "load_job",
    "load_plan",
    "parallelize",
    "predict",
    "prove",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    return getattr(import_module(_WHERE[name]), name)
