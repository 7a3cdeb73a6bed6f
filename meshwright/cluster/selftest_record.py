"""Which parts of plans have never run on several GPUs of a kind, and which of them `doctor --selftest` has since proved
there.

On CPU ranks, the tests of this package prove every part. On GPUs they could only use one GPU, which several ranks
shared. So a part of a plan for several GPUs is untested until a selftest on GPUs of this kind has passed; what passed
is kept in the cache folder, by device and by the versions of torch and of this package.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from meshwright.cluster.cluster import Cluster
from meshwright.files.cache import cache_folder
from meshwright.files.storage import write_atomically, writing
from meshwright.plan import Plan
from meshwright.version import VERSION

SEVERAL_MACHINES = "several machines"
_NEEDS_NO_MESSAGES = ("auto", "native", "shared_memory")  # the other algorithms are schedules of messages


def plan_parts(plan: Plan) -> tuple[str, ...]:
    """The parts of a plan that exist only on several ranks, in words."""
    return tuple(_plan_parts(plan)) if plan.processes > 1 else ()


def _plan_parts(plan: Plan) -> Iterator[str]:
    axes = [axis for axis, size in plan.axes.model_dump().items() if size > 1]
    yield from (f"the {axis} axis" for axis in axes)
    if len(plan.axes.factors) > 1:
        yield "several axes"
    if plan.compute.cuda_graphs:
        yield "CUDA graphs with exchange"
    if plan.memory.offload != "none":
        yield "offload on several ranks"
    if plan.axes.replicate > 1 and plan.gradients.algorithm not in _NEEDS_NO_MESSAGES:
        yield f"gradients.algorithm {plan.gradients.algorithm}"
    if plan.numerics.batch_norm == "synchronized" and plan.data_ranks > 1:
        yield "synchronized BatchNorm"
    if plan.gradients.servers:
        yield "parameter servers"


def untested_parts(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """The parts of a plan that have not been proved on several GPUs of the cluster's kind. Empty on CPU ranks."""
    if cluster.kind != "cuda" or plan.processes == 1:
        return ()
    passed = frozenset.intersection(*(load_passed_parts(node.device.name) for node in cluster.nodes))
    parts = [part for part in plan_parts(plan) if part not in passed]
    is_on_several = plan.processes > min(node.count for node in cluster.nodes)
    return (*parts, SEVERAL_MACHINES) if is_on_several else tuple(parts)


def load_passed_parts(device: str) -> frozenset[str]:
    """The parts that a selftest on several GPUs of this name has proved, with the present versions."""
    try:
        parts = json.loads(_file(device).read_text())["parts"]
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()
    return frozenset(part for part in parts if isinstance(part, str)) if isinstance(parts, list) else frozenset()


def save_passed_parts(device: str, parts: Iterable[str]) -> Path:
    """Stores what the newest selftest has proved, in place of what an earlier one had proved."""
    file = _file(device)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    contents = {"device": device, "torch": str(torch.__version__), "meshwright": VERSION, "parts": sorted(parts)}
    write_atomically(file, json.dumps(contents, indent=1))
    return file


def _file(device: str) -> Path:
    identity = json.dumps([device, str(torch.__version__), torch.version.cuda, VERSION])
    return cache_folder() / f"selftest-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
