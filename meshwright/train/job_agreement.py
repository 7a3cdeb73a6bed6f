"""Ranks that another launcher has started make sure that all have the same job, plan and code before they train."""

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.agreement import agree, digest, short_value
from meshwright.processes.environment import read_environment
from meshwright.processes.world import World

# Libraries: `agreement.versions` compares the first two, and differences in others show up as errors of their own.
_COMPARED_ALREADY = ("meshwright", "torch")


def agree_on_job(job: Job, plan: Plan | None, device: str, recorded_steps: int, world: World) -> None:
    """Raises an InputError on every rank if a rank has another job, plan or kind of device, or another version of a
    file that the job calls. `plan` is None if rank 0 is to choose it."""
    fields = job.model_dump(mode="json", exclude={"plan"})
    record = {
        **_texts("", fields),
        **(_texts("plan.", plan.model_dump(mode="json")) if plan else {"plan": "auto"}),
        **{f"the file of '{module}'": _file_digest(module) for module in sorted(set(_called_modules(fields)))},
        "device": device,
        "--record": str(recorded_steps),
    }
    agree(record, world.rank, world.size, world.store, "job", job.train.timeout_s)


def agree_on_plan(plan: Plan, world: World, timeout_s: float) -> None:
    """Raises an InputError on every rank if ranks that another launcher has started give `parallelize` other plans. In
    a process group that existed before, which has no store of ours, they are not compared."""
    if world.store is not None and read_environment().fork_server_pid is None:
        agree(_texts("plan.", plan.model_dump(mode="json")), world.rank, world.size, world.store, "plan", timeout_s)


def _texts(prefix: str, fields: dict[str, Any]) -> dict[str, str]:
    """Returns the values of nested fields as short texts, by names such as `train.global_batch`."""
    texts: dict[str, str] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            texts |= _texts(f"{prefix}{name}.", value)
        else:
            texts[prefix + name] = short_value(value)
    return texts


def _called_modules(value: Any) -> Iterator[str]:
    """Yields the modules and files of the job's `call` fields that are the user's or of a library."""
    if isinstance(value, dict):
        call = value.get("call")
        if isinstance(call, str) and call.split(".")[0] not in _COMPARED_ALREADY:
            yield call.rpartition(":" if ":" in call else ".")[0]
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _called_modules(entry)


def _file_digest(module: str) -> str:
    """Returns the digest of the file of a module. A module that cannot be found is reported when the job is checked."""
    with suppress(Exception):
        # Users keep their modules in the working folder, which console scripts do not have on the path.
        file = Path(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
        if not file.exists():
            spec = importlib.util.find_spec(module)
            file = Path((spec.origin or "") if spec else "")
        return digest(file.read_bytes())
    return "unknown"
