"""Faults of public reports, each written as it was reported: the audit finds it, names the quantity and the cause, and
says that its repaired twin is right."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run_in_process

PROGRAMS = Path(__file__).parent / "programs" / "reported"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Report:
    """A script, the quantity that differs first (kind and end of its name), the cause, and words of its sentence."""

    script: str
    what: str
    name: str | None
    cause: str
    words: str
    ranks: int = 2
    arguments: str = ""


REPORTS = (
    Report("multi_token_loss", "gradient", "ahead.weight", "averaged_over_ranks", "second of two terms"),
    Report("attention_sinks", "norm", None, "norm_of_part", "only the part that rank 0 has of"),
    Report("context_ranks", "gradient", "output.weight", "averaged_over_ranks", "means of each rank"),
    Report("router_count", "gradient", "router.weight", "router_loss", "added to the loss for the router"),
    Report("head_norm", "gradient", "out_norm.weight", "missing_reduction", "their sum is the reference's"),
    Report("expert_norm", "norm", None, "norm_of_part", "the parameters that only rank 1 holds"),
    Report("averaged_again", "gradient", "output.weight", "scaled", "divided by the number of ranks"),
    Report("averaged_again", "gradient", "output.weight", "scaled", "ranks", 4, "--hybrid"),
    Report("clipped_parts", "clipped gradient", "output.weight", "norm_of_part", "parts that the rank itself holds"),
    Report("own_tokens", "gradient", "output.weight", "averaged_over_ranks", "means of each rank"),
    Report("accumulation", "gradient", "output.weight", "averaged_over_ranks", "micro-batch", 1, "--accumulate"),
)


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(report: Report, fault: str) -> tuple[int, dict[str, Any]]:
        script = PROGRAMS / f"{report.script}.py"
        start = "python" if report.ranks == 1 else f"torchrun --standalone --nproc-per-node {report.ranks}"
        candidate = f"{start} {script} {report.arguments} {fault}"
        commands = ("--reference", f"python {script}", "--candidate", candidate)
        result = run_in_process(monkeypatch, capsys, ("audit", *commands, "--steps", "2", "--json"))
        return result.exit_code, json.loads(result.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report.script}{report.arguments}")
def test_a_reported_fault_is_found_and_its_repair_is_right(audit: Any, report: Report) -> None:
    code, result = audit(report, "--fault")
    first = result["first_difference"]
    assert (code, first["what"], first["cause"]) == (3, report.what, report.cause)
    assert (first["parameter"] or "").endswith(report.name or "")
    assert report.words in first["explanation"]
    code, result = audit(report, "")
    assert (code, result["first_difference"]) == (0, None)
