"""Unedited scripts of DeepSpeed and Megatron core are audited against one process: right ones, planted faults, and
three faults of megatron-core 0.16.1 that nobody planted."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.audit.audit import AuditRequest, audit
from meshwright.audit.result import Audit

PROGRAMS = Path(__file__).parent / "programs"
REPOSITORY = Path(__file__).parents[2]
DEEPSPEED, MEGATRON = REPOSITORY / ".venv-peers", REPOSITORY / ".venv-megatron"
LATENT = "--swiglu --mla"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
needs_deepspeed = pytest.mark.skipif(
    not (DEEPSPEED / "ready").exists(), reason="DeepSpeed is not installed: make peers"
)
needs_megatron = pytest.mark.skipif(
    not (MEGATRON / "ready").exists(), reason="Megatron is not installed: make megatron"
)


@dataclass(frozen=True)
class Script:
    environment: Path
    path: Path

    def audit(self, folder: Path, reference: str, candidate: str) -> Audit:
        start = f"{self.environment / 'bin' / 'python'} -m torch.distributed.run --standalone --nproc-per-node"
        request = AuditRequest(
            f"{start} 1 {self.path} {reference}",
            f"{start} 2 {self.path} {candidate}",
            steps=2,
            cpu=True,
            timeout_s=300,
            threads=1,
        )
        return audit(request, folder)


ZERO = Script(DEEPSPEED, PROGRAMS / "deepspeed_zero.py")
GPT = Script(MEGATRON, PROGRAMS / "megatron" / "megatron_gpt.py")


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_of_zero_trains_as_one_process_does(tmp_path: Path, stage: int) -> None:
    result = ZERO.audit(tmp_path, "--stage 1", f"--stage {stage}")
    assert result.equal, result.to_dict()


@needs_deepspeed
@pytest.mark.parametrize(("stage", "fault"), [(1, "world_size"), (2, "mean_over_ranks"), (3, "clipping")])
def test_a_fault_under_zero_is_found(tmp_path: Path, stage: int, fault: str) -> None:
    result = ZERO.audit(tmp_path, "--stage 1", f"--stage {stage} --fault {fault}")
    assert not result.equal


@needs_megatron
@pytest.mark.parametrize("model", ["", "--swiglu", f"{LATENT} --repair rope query_norm"])
def test_tensor_parallelism_of_megatron_trains_as_one_process_does(tmp_path: Path, model: str) -> None:
    result = GPT.audit(tmp_path, model, f"--tensor 2 {model}")
    assert result.equal, result.to_dict()


@needs_megatron
@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("--swiglu", "--pipeline 2"),
        ("--swiglu --experts 1", "--experts 2"),
        ("--swiglu", "--distributed-optimizer"),
        ("--swiglu --bf16", "--distributed-optimizer"),
        ("--sinks", "--tensor 2 --repair sinks"),
    ],
)
def test_other_axes_of_megatron_train_as_one_process_does(tmp_path: Path, model: str, axes: str) -> None:
    result = GPT.audit(tmp_path, model, f"{model} {axes}")
    assert result.equal, result.to_dict()
    assert not result.only_candidate


@needs_megatron
@pytest.mark.parametrize(
    ("model", "axes", "what", "cause", "words"),
    [
        ("--swiglu", "--distributed-optimizer --fault data_size", "gradient", "scaled", "the number of ranks"),
        ("--sinks", "--tensor 2", "norm", "norm_of_part", "only the part that rank 0 has of"),
        (LATENT, "--tensor 2 --repair query_norm", "gradient", "missing_reduction", "rows 16 to 23"),
    ],
)
def test_a_cause_under_megatron_is_named(
    tmp_path: Path, model: str, axes: str, what: str, cause: str, words: str
) -> None:
    """The last two are faults of megatron-core 0.16.1 itself: Megatron-LM#7452 (8), and that of latent attention."""
    result = GPT.audit(tmp_path, model, f"{model} {axes}")
    assert result.first_difference is not None
    assert result.explained is not None
    assert (result.first_difference.what, result.explained.cause) == (what, cause)
    assert words in result.explained.explanation


@needs_megatron
@pytest.mark.parametrize("fault", ["tensor_size", "query_norm_not_summed", "norm_of_one_part", "row"])
def test_a_fault_under_megatron_is_found(tmp_path: Path, fault: str) -> None:
    result = GPT.audit(tmp_path, "--swiglu", f"--tensor 2 --swiglu --fault {fault}")
    assert not result.equal


@needs_megatron
@pytest.mark.parametrize(
    ("repaired", "wrong"), [("query_norm", "linear_kv_down_proj.weight"), ("rope", "q_layernorm.weight")]
)
def test_a_gradient_that_megatron_gets_wrong_is_named_first(tmp_path: Path, repaired: str, wrong: str) -> None:
    result = GPT.audit(tmp_path, LATENT, f"--tensor 2 {LATENT} --repair {repaired}")
    assert not result.equal
    first = result.first_difference
    assert first is not None
    assert (first.name or "").endswith(wrong)
