"""`doctor --selftest`: every case is proved against one device, a broken one is named, and `plan` marks what no
selftest has proved on several GPUs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.cli import doctor as command
from meshwright.cluster.detect import find_cluster
from meshwright.cluster.selftest_record import (
    SEVERAL_MACHINES,
    load_passed_parts,
    save_passed_parts,
    untested_parts,
)
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.selftest import run
from meshwright.selftest.cases import Placement, all_cases
from meshwright.selftest.rank import RESULTS, CaseProof
from meshwright.selftest.report import selftest_lines, selftest_report, write_report
from meshwright.selftest.run import CaseResult, Selftest, run_selftest

CASES = {case.name: case for case in all_cases()}
TWO_RANKS = [name for name, case in CASES.items() if case.plan.world_size == 2]
ALL_AXES = {f"the {axis} axis" for axis in Axes.model_fields}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cases_have_every_axis_and_what_one_gpu_cannot_run() -> None:
    parts = {part for case in CASES.values() for part in case.parts}
    assert ALL_AXES | {"several axes", "CUDA graphs with exchange", "offload on several ranks"} <= parts
    assert len(CASES) == len(all_cases()), "every name is there once"
    on_gpus = [case for case in CASES.values() if case.left_out("gpus", 2) is None]
    assert {part for case in on_gpus for part in case.parts} == parts - {"several axes"}
    assert all(case.left_out("gpus", 8) is None for case in CASES.values())
    assert "from rank to rank" in (CASES["pipeline, 1f1b"].left_out("shared", 1) or "")
    assert CASES["shard × tensor"].left_out("shared", 1) is None
    assert CASES["shard, CUDA graphs"].left_out("cpu", 2) == "it needs GPUs"


def test_cpu_ranks_pass(cache: Path) -> None:
    names = ("replicate, accumulation", "tensor, sequence and loss", "shard, CUDA graphs")
    selftest = run_selftest(placement=("cpu", 2), only=names)
    assert {result.case.name: result.state for result in selftest.results} == {
        **dict.fromkeys(names, "passed"),
        "shard, CUDA graphs": "left out",
    }
    assert selftest.passed
    assert selftest.passed_parts == {"the replicate axis", "the tensor axis"}
    assert not cache.exists() or not list(cache.rglob("selftest-*")), "CPU ranks prove nothing about GPUs"


@pytest.mark.soak
def test_all_cases_pass_on_cpu_ranks(cache: Path) -> None:
    selftest = run_selftest(placement=("cpu", 2))
    assert [(r.case.name, r.words) for r in selftest.results if r.state == "failed"] == []
    assert {part for r in selftest.results if r.state == "passed" for part in r.case.parts} >= ALL_AXES


def test_ranks_that_die_fail_their_case_and_the_others_go_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second case of the first group kills its ranks, the fourth differs from one device."""
    names = TWO_RANKS[:4]
    numbers = [list(CASES).index(name) for name in names]
    started: list[list[int]] = []

    def launch(placement: Placement, ranks: int, given: Sequence[int], folder: Path) -> str | None:
        started.append(list(given))
        for number in given:
            with (folder / RESULTS).open("a") as file:
                file.write(json.dumps({"number": number}) + "\n")
                if number == numbers[1]:
                    return "rank 1 was killed by SIGABRT"
                difference = "step 1, gradient head differs by 0.5" if number == numbers[3] else None
                proof = CaseProof(number, difference is None, 0.5 if difference else 1e-15, 1e-12, 1.0, difference)
                file.write(json.dumps(asdict(proof)) + "\n")
        return None

    monkeypatch.setattr(run, "_launch", launch)
    selftest = run_selftest(placement=("gpus", 2), only=names)
    assert started == [numbers, numbers[2:]]
    assert [result.state for result in selftest.results] == ["passed", "failed", "passed", "failed"]
    assert selftest.results[1].words == "rank 1 was killed by SIGABRT"
    assert selftest.results[3].words == "step 1, gradient head differs by 0.5"
    assert not selftest.passed


def passed_everywhere() -> Selftest:
    results = tuple(CaseResult(case, "passed", "differs by 1e-15", 1.0) for case in CASES.values())
    return Selftest("gpus", "H100-SXM", 8, results, 60.0)


def test_a_part_has_passed_if_all_of_its_cases_have() -> None:
    selftest = passed_everywhere()
    assert selftest.passed_parts > ALL_AXES
    failed = CaseResult(CASES["tensor × pipeline"], "failed", "rank 1 died")
    others = tuple(result for result in selftest.results if result.case != failed.case)
    parts = Selftest("gpus", "H100-SXM", 8, (*others, failed), 60.0).passed_parts
    assert "the replicate axis" in parts
    assert not {"the tensor axis", "the pipeline axis", "several axes"} & parts


def test_plans_for_several_gpus_are_untested_until_a_selftest_has_passed(cache: Path) -> None:
    plan = Plan.model_validate({"axes": {"replicate": 4, "tensor": 2}})
    one, two = find_cluster("8xH100"), find_cluster("2x8xH100")
    device = one.nodes[0].device.name
    assert untested_parts(plan, one) == ("the replicate axis", "the tensor axis", "several axes")
    assert untested_parts(Plan(), one) == ()
    assert untested_parts(plan, find_cluster("8xcpu")) == ()
    save_passed_parts(device, passed_everywhere().passed_parts - {"several axes"})
    assert load_passed_parts(device) >= ALL_AXES
    assert untested_parts(plan, one) == ("several axes",)
    save_passed_parts(device, passed_everywhere().passed_parts)
    assert untested_parts(plan, one) == ()
    assert untested_parts(plan, find_cluster("8xA100-80GB")) != ()
    wide = Plan.model_validate({"axes": {"replicate": 16}})
    assert untested_parts(wide, two) == (SEVERAL_MACHINES,)
    (file,) = cache.rglob("selftest-*.json")
    for damaged in ("", "[]", '{"parts": 1}'):
        file.write_text(damaged)
        assert load_passed_parts(device) == frozenset()


def test_the_plan_command_marks_untested_plans(cache: Path) -> None:
    words = ["plan", "mnist", "--cluster", "2xH100", "--top", "2"]
    report = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout.splitlines()[-1])
    of_several = [entry for entry in report["ranked"] if entry["summary"].startswith(("replicate", "shard"))]
    assert of_several
    assert all(entry["untested"] for entry in of_several)
    assert "Untested (*) on several H100" in report["explanation"]
    assert " *" in CliRunner().invoke(app, words).stdout


def test_the_command_writes_a_report_and_ends_with_3_if_a_case_failed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = passed_everywhere()
    file = tmp_path / "report.txt"
    monkeypatch.setattr(run, "run_selftest", lambda tell: good)
    result = CliRunner().invoke(app, ["doctor", "--selftest", "--output", str(file)])
    assert result.exit_code == 0
    *lines, last = file.read_text().splitlines()
    assert lines == list(selftest_lines(json.loads(last)))
    assert json.loads(last) == selftest_report(good)
    assert f"{len(CASES)} passed, 0 failed, 0 left out, in 60 s" in result.stdout
    broken = Selftest("shared", "H100-SXM", 1, (CaseResult(CASES["tensor"], "failed", "rank 1 died"),), 3.0)
    monkeypatch.setattr(run, "run_selftest", lambda tell: broken)
    failed = CliRunner().invoke(app, ["doctor", "--selftest", "--output", str(file), "--json"])
    assert failed.exit_code == 3
    assert json.loads(failed.stdout.splitlines()[-1])["results"][0]["words"] == "rank 1 died"
    assert "stay marked as untested" in file.read_text()
    for words in (["--output", str(file)], ["--selftest", "--calibrate"], ["--selftest", "--output", str(tmp_path)]):
        assert isinstance(CliRunner().invoke(app, ["doctor", *words]).exception, InputError), words
    assert command.SELFTEST_REPORT.endswith(".txt")
    write_report(selftest_report(good), file)
    assert "H100-SXM, a GPU for each rank, over NCCL" in file.read_text().splitlines()[0]
