"""When a launcher is stopped or killed, its ranks save or die, and none of them is left running."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forking.forked import Process, start
from tests.processes.processes import is_alive, tree, wait_until

pytestmark = pytest.mark.usefixtures("nothing_left")


def stages(folder: Path) -> list[str]:
    return [json.loads(file.read_text())["stage"] for file in sorted(folder.glob("report-*.json"))]


@contextmanager
def launcher(case: str, folder: Path, grace_s: float = 30) -> Iterator[Process]:
    """Starts a launcher in a process group of its own, as a shell does."""
    process = start("tests.processes.parent:main", case, str(folder), str(grace_s))
    pids: set[int] = {process.pid}
    try:
        wait_until(lambda: stages(folder) == ["stepping"] * 2 or process.poll() is not None, "ranks stepping")
        assert process.poll() is None, process.communicate()
        pids |= tree(process.pid)
        assert len(pids) >= 3
        yield process
        process.communicate(timeout=60)
        wait_until(lambda: not any(map(is_alive, pids)), "no process left")
    finally:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_sigterm_lets_the_ranks_save(tmp_path: Path) -> None:
    with launcher("until_stopped", tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (out, err) == ("Stopped: stopped by SIGTERM\n", "")
    assert stages(tmp_path) == ["saved"] * 2


def test_ctrl_c_reaches_the_whole_group_and_lets_the_ranks_save(tmp_path: Path) -> None:
    with launcher("until_stopped", tmp_path) as process:
        for pid in tree(process.pid):  # also the ranks, as if they shared the terminal
            os.kill(pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (out, err) == ("Stopped: stopped by SIGINT\n", "")
    assert stages(tmp_path) == ["saved"] * 2


@pytest.mark.soak
def test_ranks_that_ignore_a_stop_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    with launcher("ignoring_stop", tmp_path, grace_s=0.5) as process:
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == "Stopped: stopped by SIGTERM\n"


@pytest.mark.soak
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with launcher("ignoring_stop", tmp_path, grace_s=1000) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(1)  # signals that follow each other within 0.3 s count as one
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "Stopped: stopped by SIGINT\n"


def test_killing_the_launcher_leaves_no_process(tmp_path: Path) -> None:
    with launcher("until_stopped", tmp_path) as process:
        process.send_signal(signal.SIGKILL)
