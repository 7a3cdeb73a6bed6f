"""Unedited scripts of Accelerate, Lightning, transformers and Horovod (our drop-in) are audited against one
process: right ones are equal, and planted faults are named."""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.audit.audit import AuditRequest, audit
from meshwright.audit.result import NOT_COMPARABLE, Audit

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def torchvision_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning and transformers import torchvision, which may be built for another torch."""
    lines = ("from meshwright.user.torchvision_import import mend_torchvision", "mend_torchvision()")
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")])))


@dataclass(frozen=True)
class Trainer:
    """A script, the package that it needs, and its arguments on both sides."""

    package: str
    script: str
    arguments: str = ""

    def __str__(self) -> str:
        return f"{self.script} {self.arguments}".strip()

    def audit(self, folder: Path, start: str = "random", ranks: int = 2, fault: str = "") -> Audit:
        if importlib.util.find_spec(self.package) is None:
            pytest.skip(f"{self.package} is not installed")
        own = f"{PROGRAMS / self.script} {self.arguments}"
        launcher = "torch.distributed.run --standalone --nproc-per-node"
        alone = own
        if self.package == "meshwright":
            launcher, alone = "meshwright.compat.horovod -np", f"-m meshwright.compat.horovod -np 1 {own}"
        request = AuditRequest(
            f"{sys.executable} {alone}",
            f"{sys.executable} -m {launcher} {ranks} {own} {f'--fault {fault}' if fault else ''}",
            steps=2,
            start=start,
            cpu=True,
            timeout_s=300,
            threads=1,
        )
        return audit(request, folder)


ACCELERATE = Trainer("accelerate", "accelerate_fsdp2.py")
LIGHTNING = Trainer("lightning", "lightning_trainer.py", "--accumulate 2")
LIGHTNING_FSDP = Trainer("lightning", "lightning_trainer.py", "--accumulate 2 --strategy fsdp")
TRANSFORMERS = Trainer("transformers", "transformers_trainer.py")
HOROVOD = Trainer("meshwright", "horovod_gpt.py")
ALL = (ACCELERATE, LIGHTNING, LIGHTNING_FSDP, TRANSFORMERS, HOROVOD)


@pytest.mark.parametrize("start", ["random", "own"])
@pytest.mark.parametrize("trainer", ALL, ids=str)
def test_a_right_script_trains_as_one_process_does(tmp_path: Path, trainer: Trainer, start: str) -> None:
    result = trainer.audit(tmp_path / "records", start)
    assert result.exit_code == 0, result.to_dict()
    assert result.checked["gradients"] == result.checked["weights"] > 0


@pytest.mark.parametrize(
    ("trainer", "fault", "cause"),
    [
        (ACCELERATE, "scheduler", "other_optimizer"),
        (ACCELERATE, "divided_twice", "scaled"),
        (ACCELERATE, "mean_over_ranks", "averaged_over_ranks"),
        (ACCELERATE, "norm_before_accumulation", "clipped_each_microbatch"),
        (LIGHTNING, "world_size", "scaled"),
        (LIGHTNING, "mean_over_ranks", "averaged_over_ranks"),
        (LIGHTNING, "learning_rate", "other_optimizer"),
        (LIGHTNING_FSDP, "world_size", "scaled"),
        (LIGHTNING_FSDP, "mean_over_ranks", "averaged_over_ranks"),
        (LIGHTNING_FSDP, "learning_rate", "other_optimizer"),
        (TRANSFORMERS, "mean_over_ranks", "averaged_over_ranks"),
        (TRANSFORMERS, "accumulation", "averaged_over_ranks"),
        (TRANSFORMERS, "clipping", "clipped_differently"),
        (TRANSFORMERS, "adam_betas", "other_optimizer"),
        (HOROVOD, "sum", "scaled"),
        (HOROVOD, "clipped_before_synchronize", "missing_reduction"),
        (HOROVOD, "no_broadcast", "different_start"),
        (HOROVOD, "fp16", "low_precision"),
        (HOROVOD, "row", "part"),
    ],
    ids=str,
)
def test_a_fault_is_named(tmp_path: Path, trainer: Trainer, fault: str, cause: str) -> None:
    result = trainer.audit(tmp_path / "records", fault=fault)
    assert result.exit_code == 3
    assert result.explained is not None
    assert result.explained.cause == cause


@pytest.mark.parametrize(
    ("trainer", "fault", "words"),
    [
        (ACCELERATE, "shuffled", "of them are the same"),
        (LIGHTNING, "automatic_sampler", "which shuffles: the package lightning made it, and not the script"),
        (LIGHTNING, "same_rows", "the ranks do not divide the data"),
        (LIGHTNING, "accumulation", "the reference accumulates the gradients of 2 micro-batches"),
        (TRANSFORMERS, "seed", "of them are the same"),
    ],
    ids=str,
)
def test_other_samples_are_not_comparable(tmp_path: Path, trainer: Trainer, fault: str, words: str) -> None:
    result = trainer.audit(tmp_path / "records", fault=fault)
    assert result.exit_code == NOT_COMPARABLE
    assert words in (result.samples or "")
