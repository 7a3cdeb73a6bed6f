"""Ranks on one machine: their environment, their output, and what happens when one of them fails."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError, RankError
from meshwright.processes.local import fork_server
from meshwright.processes.local.fork_server import preloaded
from meshwright.processes.local.launch import RankSettings, launch
from tests.processes.processes import listening, tree, wait_until

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module", autouse=True)
def one_fork_server() -> Iterator[None]:
    """The ranks of all tests are forked from one process, as those of all launches of a command."""
    with preloaded("tests.processes.worker"):
        yield


def start(case: str, folder: Path, *arguments: str, count: int = 2, restarts: int = 2) -> int:
    ranks = RankSettings(count=count, device="cpu", threads=1, restarts=restarts, grace_s=10)
    return launch("tests.processes.worker", [case, str(folder), *arguments], ranks, folder)


def reports(folder: Path, attempt: int) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"report-*-{attempt}.json"))]


def test_ranks_listen_on_loopback_only_and_only_rank_0_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hold").touch()

    def listening_addresses() -> set[str]:
        try:
            wait_until(lambda: len(reports(tmp_path, 0)) == 2, "both ranks running")
            return listening(tree(os.getpid()))
        finally:
            (tmp_path / "go").touch()

    with ThreadPoolExecutor() as pool:
        future = pool.submit(listening_addresses)
        assert start("plain", tmp_path, "a $b $$ ${local_rank}") == 0
    addresses = future.result()
    assert addresses, "the store and Gloo listen somewhere"
    assert addresses <= LOOPBACK

    for facts in reports(tmp_path, 0):
        assert facts["threads"] == 1
        assert facts["size"] == 2
        assert facts["arguments"][-1] == "a $b $$ ${local_rank}"
    out, err = capfd.readouterr()
    assert out == "stdout of rank 0\n"
    assert err == "terminal of rank 0\n"
    first, second = ((tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert "noise of rank 0" in first
    assert "rank 1" not in first
    assert all(f"{word} of rank 1" in second for word in ("stdout", "terminal", "noise"))
    assert "attempt 0" in second


def test_the_failing_rank_is_reported_first_and_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError) as caught:
        start("raising", tmp_path, restarts=3)  # after one restart it is clear that the failure repeats
    line, rest = str(caught.value).split("\n")
    expected = r"rank 1 failed at step 2 \(forward\): ValueError: the seventh sample is odd \(worker\.py, line \d+\)"
    assert re.fullmatch(expected, line)
    assert rest == f"after 1 restart; its log: {tmp_path / 'rank-1.log'}"
    assert capfd.readouterr() == ("", f"{line}: all ranks start again (1 of at most 3 times)\n")
    log = (tmp_path / "rank-1.log").read_text()
    assert log.count("Traceback") == 2
    assert "attempt 1" in log


def test_a_failure_before_the_first_step_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^rank 1 failed in start-up: KeyError: 'head.weight' \(.*\)\nits log"):
        start("early", tmp_path)
    assert not reports(tmp_path, 1)


def test_a_users_mistake_is_an_input_error_and_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^train.global_batch is 3, but there are 2 ranks: choose a multiple$"):
        start("mistaken", tmp_path)
    assert not reports(tmp_path, 1)


ENDINGS = {
    "sys.exit(0)": "SystemExit: exit code 0",
    "os._exit(0)": "SystemExit: exit code 0",
    "raise StopIteration": "StopIteration",
    "raise GeneratorExit": "GeneratorExit",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
}


@pytest.mark.parametrize("statement", ENDINGS)
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_code_that_ends_a_rank_is_an_error_with_file_and_line(tmp_path: Path, statement: str, count: int) -> None:
    file = tmp_path / "statement-0.py"
    file.write_text(f"\n{statement}\n")
    with pytest.raises(RankError) as caught:
        start("ending", tmp_path, count=count)
    line = str(caught.value).splitlines()[0]
    assert line == f"rank {count - 1} failed at step 0 (data): {ENDINGS[statement]} ({file}, line 2)"


@pytest.mark.parametrize(
    ("code", "count", "words"),
    [
        (0, 1, "rank 0 ended with exit code 0 before training was finished at step 0 (data)"),
        (0, 2, "rank 1 ended with exit code 0 before training was finished at step 0 (data)"),
        (3, 1, "rank 0 exited with code 3 at step 0 (data)"),
    ],
)
def test_a_rank_that_a_library_ends_is_an_error(tmp_path: Path, code: int, count: int, words: str) -> None:
    (tmp_path / "statement-0.py").write_text(f"import ctypes\nctypes.CDLL(None)._exit({code})")
    with pytest.raises(RankError) as caught:
        start("ending", tmp_path, count=count)
    assert str(caught.value).splitlines()[0] == words


def test_a_rank_that_ends_early_again_and_again_is_restarted_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "statement-1.py").write_text("import ctypes\nctypes.CDLL(None)._exit(0)")
    with pytest.raises(RankError, match=r"^rank 0 ended with exit code 0 .* at step 1 \(data\)\nafter 1 restart; "):
        start("ending", tmp_path, count=1, restarts=3)
    assert capfd.readouterr().err.count("all ranks start again") == 1


KILLED_WORKER = """
from tests.data.test_samples import Suicidal, read_training

read_training(Suicidal(), workers=1)
"""


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_data_loader_worker_that_is_killed_is_named(tmp_path: Path, count: int) -> None:
    (tmp_path / "statement-0.py").write_text(KILLED_WORKER)
    with pytest.raises(RankError) as caught:
        start("ending", tmp_path, count=count)
    expected = (
        rf"rank {count - 1} failed at step 0 \(data\): a data loader worker \(process \d+\)"
        r" (was killed by signal: Killed|exited unexpectedly): lower data\.workers if memory ran out;"
        r" with data\.workers 0, an error in the data set's code is shown"
    )
    assert re.fullmatch(expected, str(caught.value).splitlines()[0])


def test_a_module_that_cannot_be_imported_is_reported_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = RankSettings(count=2, device="cpu", threads=1, restarts=2)
    with pytest.raises(
        RankError, match=r"^rank \d failed in start-up: ModuleNotFoundError: No module named 'tests.absent'"
    ):
        launch("tests.absent", [], ranks, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_one_kill_costs_one_restart_and_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kills").write_text("1")
    assert start("killed", tmp_path) == 1
    line = "rank 1 was killed by SIGKILL at step 2 (backward): all ranks start again (1 of at most 2 times)\n"
    assert line in capfd.readouterr().err
    assert [facts["attempt"] for facts in reports(tmp_path, 1)] == [1, 1]
    assert (tmp_path / "rank-0.log").read_text().count("--- attempt") == 2


def test_a_crash_after_the_end_costs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert start("crashing_at_exit", tmp_path, restarts=0) == 0
    assert capfd.readouterr().out == "last words of rank 0\n"
    assert "last words of rank 1\n" in (tmp_path / "rank-1.log").read_text()


@pytest.mark.soak
def test_kills_up_to_the_limit_are_survived(tmp_path: Path) -> None:
    (tmp_path / "kills").write_text("2")
    assert start("killed", tmp_path, restarts=2) == 2
    assert len(reports(tmp_path, 2)) == 2


@pytest.mark.soak
def test_kills_beyond_the_limit_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "kills").write_text("9")
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL at step 2 \(backward\)\nafter 1 restart; "):
        start("killed", tmp_path, restarts=1)


def test_a_kill_during_start_up_is_survived(tmp_path: Path) -> None:
    (tmp_path / "kills").write_text("0")
    (tmp_path / "kill-start-up").touch()
    assert start("killed", tmp_path) == 1
    assert len(reports(tmp_path, 1)) == 2


@pytest.mark.soak
def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        start("stuck", tmp_path, "6", restarts=0)  # joining may take as long, too, where cores are busy
    line, files = str(caught.value).splitlines()
    assert re.sub(r"line \d+", "line N", line) == (
        "rank 1 has not entered the all-reduce of 8 float32 values called in step (worker.py, line N) at step 1;"
        " rank 0 waits there; rank 1 is in wait_for (worker.py, line N) (no answer within 6 s)"
    )
    report = Path(files.removeprefix("the report of all ranks: "))
    assert (report.parent, report.read_text().splitlines()[0]) == (tmp_path, line)


def test_the_environment_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    with pytest.raises(InputError):
        start("mistaken", tmp_path)
    assert dict(os.environ) == before


def test_a_killed_fork_server_costs_one_restart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The ranks die with the process that forked them. A new one forks their replacements."""
    (tmp_path / "hold").touch()

    def kill_the_parent_of_a_rank() -> None:
        wait_until(lambda: len(reports(tmp_path, 0)) == 2, "both ranks running")
        (tmp_path / "go").touch()
        os.kill(reports(tmp_path, 0)[0]["parent"], signal.SIGKILL)

    with ThreadPoolExecutor() as pool:
        future = pool.submit(kill_the_parent_of_a_rank)
        restarts = start("plain", tmp_path)
    future.result()
    assert restarts == 1
    assert "was killed by SIGKILL" in capfd.readouterr().err
    assert len(reports(tmp_path, 1)) == 2


DYING_SPARE = """
import os
import signal
from pathlib import Path

from tests.processes.worker import main

folder = Path(os.environ["DYING_SPARE"])
(folder / f"import {os.getpid()}").touch()
if len(list(folder.glob("import *"))) == 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start_with_a_dying_spare(folder: Path, restarts: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kills the process from which the ranks were forked, whose replacement dies while it imports."""
    (folder / "dying_spare.py").write_text(DYING_SPARE)
    (folder / "hold").touch()
    monkeypatch.setenv("DYING_SPARE", str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")

    def kill_the_parent_of_a_rank() -> None:
        wait_until(lambda: len(reports(folder, 0)) == 2, "both ranks running")
        (folder / "go").touch()
        os.kill(reports(folder, 0)[0]["parent"], signal.SIGKILL)

    monkeypatch.setattr(fork_server, "_preloaded", None)
    ranks = RankSettings(count=2, device="cpu", threads=1, restarts=restarts, grace_s=10)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(kill_the_parent_of_a_rank)
        try:
            return launch("dying_spare", ["plain", str(folder)], ranks, folder)
        finally:
            future.result()


def test_a_spare_that_dies_while_it_imports_costs_a_restart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start_with_a_dying_spare(tmp_path, 2, monkeypatch) == 1
    assert "died as soon as it was started: it starts again (2 of at most 2 times)" in capfd.readouterr().err
    assert len(reports(tmp_path, 1)) == 2


@pytest.mark.soak
def test_spares_that_die_more_often_than_restarts_are_left_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RankError, match=r"^the process that starts the ranks died as soon as it was started$"):
        start_with_a_dying_spare(tmp_path, 1, monkeypatch)


def test_ranks_have_the_environment_and_random_numbers_of_a_new_process(tmp_path: Path) -> None:
    start("plain", tmp_path)
    first, second = reports(tmp_path, 0)
    assert first["random"] != second["random"]
    assert first["parent"] == second["parent"] != os.getpid()
    assert all(facts["path"] == os.getcwd() and facts["session"] == facts["pid"] for facts in (first, second))
