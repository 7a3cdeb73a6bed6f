"""`meshwright export PLAN --to deepspeed|accelerate|torchrun`: writes the configuration with which another program
trains by a plan, and lists what that configuration cannot say."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.export.configurations.accelerate import accelerate_configuration
from meshwright.export.configurations.deepspeed import deepspeed_configuration
from meshwright.export.configurations.torchrun import torchrun_configuration
from meshwright.export.configurations.training import Configuration, PlannedTraining, Unsaid
from meshwright.files.storage import write_atomically
from meshwright.files.yaml_file import read_mapping
from meshwright.job import Job, load_plan
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules

_FILES = {"deepspeed": "ds_config.json", "accelerate": "accelerate.yaml", "torchrun": "torchrun.sh"}
_WRITERS: dict[str, Callable[[PlannedTraining], Configuration]] = {
    "deepspeed": deepspeed_configuration,
    "accelerate": accelerate_configuration,
    "torchrun": torchrun_configuration,
}
PROGRAMS = tuple(_FILES)


@dataclass(frozen=True)
class ExportedPlan:
    """The file that was written, the command that trains with it, and what the file cannot say."""

    plan: Plan
    program: str
    file: Path
    command: str
    cannot_say: tuple[Unsaid, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object that `meshwright export --json` prints."""
        return {
            "file": str(self.file),
            "bytes": self.file.stat().st_size,
            "format": self.program,
            "plan": self.plan.summary(),
            "command": self.command,
            "cannot_say": [entry._asdict() for entry in self.cannot_say],
        }

    def lines(self) -> list[str]:
        """Returns the lines that `meshwright export` prints."""
        unsaid = [f"  {entry.field} ({entry.value}): {entry.instead}" for entry in self.cannot_say]
        heading = "what it cannot say, and what to do instead:" if unsaid else "it says all of the plan"
        return [f"{self.plan.summary()}, for {self.program}: {self.file}", self.command, heading, *unsaid]


def export_plan(
    source: Path, to: str, job: Job | None, cluster: Cluster | None, output: Path | None = None
) -> ExportedPlan:
    """Writes the configuration of a program. `source` is a plan file, the output of `meshwright plan --json`, or a run
    folder. `cluster` says on which machines; None means the GPUs of one."""
    plan = _read(source)
    training = _training(plan, job, cluster)
    configuration = _WRITERS[to](training)
    file = output or Path(_FILES[to])
    write_atomically(file, configuration.text)
    command = configuration.command.replace("FILE", str(file))
    return ExportedPlan(plan, to, file, command, configuration.cannot_say)


def _training(plan: Plan, job: Job | None, cluster: Cluster | None) -> PlannedTraining:
    check_rules(plan, "export")
    if cluster is None:
        return PlannedTraining(plan, job, "cuda")
    if plan.world_size > cluster.device_count:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but the cluster '{cluster.name}' has"
            f" {cluster.device_count} devices: name another one with --cluster"
        )
    per_machine = max(node.count for node in cluster.nodes)
    return PlannedTraining(plan, job, cluster.kind, -(-plan.world_size // per_machine))


def _read(source: Path) -> Plan:
    if source.is_dir():
        if not (source / "plan.yaml").is_file():
            raise InputError(
                f"{source}: this folder has no plan.yaml: name a plan file, or a folder that `train` wrote"
            )
        return load_plan(source / "plan.yaml")
    best = read_mapping(source, "plan").get("best")
    if isinstance(best, dict) and isinstance(best.get("plan"), dict):  # of `meshwright plan --json`
        return load_plan(best["plan"], str(source))
    return load_plan(source)
