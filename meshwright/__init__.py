"""Meshwright: plan, prove and run distributed training of any PyTorch model."""

from importlib import import_module
from typing import Any

from meshwright.compat import register_doors
from meshwright.version import VERSION, note_untried_torch

__version__ = VERSION
register_doors()

# The public names and their modules, which are imported at first use: `import meshwright` does not import torch.
_MODULES = {
    "Job": "meshwright.job",
    "Plan": "meshwright.plan",
    "Session": "meshwright.train.session",
    "best_cluster": "meshwright.auto.questions",
    "best_plan": "meshwright.auto.choose",
    "compare": "meshwright.audit.from_python.compare_folders",
    "compare_plans": "meshwright.auto.questions",
    "diagnose": "meshwright.auto.diagnosis",
    "diagnose_job": "meshwright.auto.diagnosis",
    "explain_run": "meshwright.report.run.slower",
    "largest_batch": "meshwright.auto.questions",
    "launch": "meshwright.processes.local.launch_function",
    "load_job": "meshwright.job",
    "load_plan": "meshwright.job",
    "parallelize": "meshwright.proof.before_training.parallelize",
    "predict": "meshwright.auto.predict",
    "prove": "meshwright.proof.prove_model",
    "record": "meshwright.audit.from_python.record",
    "sweep": "meshwright.auto.questions",
}
__all__ = [
    "Job",
    "Plan",
    "Session",
    "__version__",
    "best_cluster",
    "best_plan",
    "compare",
    "compare_plans",
    "diagnose",
    "diagnose_job",
    "explain_run",
    "largest_batch",
    "launch",
    "load_job",
    "load_plan",
    "parallelize",
    "predict",
    "prove",
    "record",
    "sweep",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except (ImportError, AttributeError) as error:
        note_untried_torch(error)
        raise
