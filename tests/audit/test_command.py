"""`meshwright audit` as a user calls it: programs of this folder, on real ranks, right ones and ones with a fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.audit.recorder.record_files import read_tensors
from tests.cli.commands import run_in_process

PROGRAMS = Path(__file__).parent / "programs"
# Program, ranks, fault (none for a right program), and the causes of which one has to be named.
RIGHT = (("ddp", 2), ("fsdp2", 2), ("fsdp2_tensor", 4), ("tensor_sequence", 2), ("hand_tensor", 2), ("pipelining", 2))
FAULTS = (
    ("ddp", 2, "no_sync", "missing_reduction"),
    ("ddp", 2, "world_size", "scaled"),
    ("experts", 2, "norm_without_experts", "norm_of_part"),
    ("experts", 2, "expert_divided_twice", "expert_gradients"),
    ("pipelining", 2, "norm_of_own_stage", "norm_of_part"),
)


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the command with a program and its one-process form; returns its exit code and its JSON."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(program: str, ranks: int, *options: str, arguments: str = "") -> tuple[int, dict[str, Any]]:
        script = PROGRAMS / f"{program}.py"
        candidate = f"torchrun --standalone --nproc-per-node {ranks} {script} {arguments}"
        command = ("audit", "--reference", f"python {script}", "--candidate", candidate, "--json", *options)
        result = run_in_process(monkeypatch, capsys, command)
        assert result.stdout, result.stderr
        return result.exit_code, json.loads(result.stdout.splitlines()[-1])

    return run


def test_a_fault_is_named_and_saved_with_its_page(audit: Any, tmp_path: Path) -> None:
    saved, page = tmp_path / "audit.json", tmp_path / "audit.html"
    code, result = audit("ddp", 2, "--output", str(saved), "--html", str(page), arguments="--fault no_sync")
    first = result["first_difference"]
    assert code == 3
    assert result["comparable"]
    assert not result["equal"]
    assert first["cause"] == "missing_reduction"
    assert first["step"] == 1
    rows = json.loads(saved.read_text())["compared"]["rows"]
    assert len(rows) == sum(result["checked"].values())
    assert first["parameter"] in page.read_text()


def test_a_right_program_is_equal(audit: Any) -> None:
    code, result = audit("ddp", 2)
    assert code == 0
    assert result["equal"]
    assert result["only_reference"] == result["only_candidate"] == result["not_compared"] == []
    assert result["checked"]["gradients"] == result["checked"]["weights"] > 0


def test_one_row_on_one_rank_that_is_a_hundredth_off_is_found_with_its_place(audit: Any) -> None:
    code, result = audit("ddp", 2, arguments="--fault row")
    first = result["first_difference"]
    assert (code, first["step"], first["what"], first["ranks"], len(first["rows"])) == (3, 1, "gradient", [1], 1)


@pytest.mark.parametrize(("arguments", "row"), [("--layout fsdp1", None), ("--layout fsdp2 --fault row", 527)])
def test_sketches_of_large_matrices_are_compared(audit: Any, tmp_path: Path, arguments: str, row: int | None) -> None:
    """Flat parts of FSDP1 cut rows. Under FSDP2, row 7 of the second rank's 520 is 1% off."""
    code, result = audit("large/wide", 2, "--steps", "1", "--records", str(tmp_path), arguments=arguments)
    files = (tmp_path / "candidate").glob("rank-*/0001-gradient-*.safetensors")
    keys = {key for file in files for key in read_tensors(file)}
    assert "0.up.weight#0.sketch" in keys
    assert "0.up.weight#0" not in keys
    if row is None:
        assert (code, result["first_difference"]) == (0, None)
    else:
        first = result["first_difference"]
        assert (code, first["parameter"], first["rows"], first["cause"]) == (3, "1.up.weight", [row], "part")


@pytest.mark.soak
@pytest.mark.parametrize(("program", "ranks"), RIGHT)
@pytest.mark.parametrize("start", ["random", "own"])
def test_right_programs_are_equal(audit: Any, program: str, ranks: int, start: str) -> None:
    code, result = audit(program, ranks, "--start", start)
    assert (code, result["first_difference"]) == (0, None)


@pytest.mark.soak
@pytest.mark.parametrize(("program", "ranks", "fault", "cause"), FAULTS)
def test_faults_are_named(audit: Any, program: str, ranks: int, fault: str, cause: str) -> None:
    code, result = audit(program, ranks, arguments=f"--fault {fault}")
    assert (code, result["first_difference"]["cause"]) == (3, cause)


@pytest.mark.soak
def test_other_samples_are_not_comparable(audit: Any) -> None:
    code, result = audit("ddp", 2, arguments="--fault same_rows")
    assert code == 4
    assert result["samples"]
