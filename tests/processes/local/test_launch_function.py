"""`mw.launch`: the function's value, output and errors come back to the process that called it, and no rank is left.
Functions that are defined in a test travel to the ranks by value, as those of a notebook."""

import functools
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright
from meshwright.errors import InputError, RankError
from meshwright.processes.local import fork_server, run_in_ranks
from meshwright.processes.local.fork_server import ForkServer, kept_fork_server, preloaded
from meshwright.processes.local.launch_function import launch
from tests.processes.processes import is_alive, listening, tree, wait_until

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module", autouse=True)
def one_fork_server() -> Iterator[None]:
    """All tests fork their ranks from one process, as all launches of a notebook do."""
    with preloaded("meshwright.processes.local.called_rank"):
        yield


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_in_ranks, "_GRACE_S", 0.3)


def test_the_public_name_is_the_function() -> None:
    assert meshwright.launch is launch
    assert "launch" in meshwright.__all__


def test_ranks_are_those_of_torchrun_and_rank_0_returns_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    class Answer:
        def __init__(self, **values: Any) -> None:
            self.values = values

    def call(tensor: torch.Tensor, *, scale: float) -> Answer:
        dist.init_process_group("gloo")
        total = tensor * (dist.get_rank() + 1) * scale
        dist.all_reduce(total)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
        values = {name: os.environ[name] for name in names}
        print(f"sum {total.item():g}")
        os.write(2, b"from C++\n")
        dist.barrier()
        return Answer(total=total, arguments=sys.argv, path=sys.path, folder=Path.cwd(), **values)

    answer = launch(call, torch.ones(1), scale=2.0, ranks=2, device="cpu")
    assert isinstance(answer, Answer), "a class that travelled to the ranks and back is still the same class"
    assert answer.values.pop("total").item() == 6
    assert answer.values == {
        "arguments": sys.argv,
        "path": sys.path,
        "folder": Path.cwd(),
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 1] sum 6", "sum 6"]
    assert sorted(err.splitlines()) == ["[rank 1] from C++", "from C++"]


def test_nothing_listens_beyond_loopback() -> None:
    def addresses(caller: int) -> set[str]:
        dist.init_process_group("gloo")
        dist.barrier()
        found = listening(tree(caller))
        dist.barrier()
        return found

    found = launch(addresses, os.getpid(), device="cpu")
    assert found, "the store and Gloo listen somewhere"
    assert found <= LOOPBACK


def test_the_traceback_of_the_rank_that_raised_first_is_shown(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / f"{os.getpid()}").touch()
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("the seventh sample is odd")
        dist.barrier()
        while True:
            time.sleep(1)

    with pytest.raises(RankError) as caught:
        launch(fail, tmp_path, device="cpu")
    first, *rest = str(caught.value).splitlines()
    line = fail.__code__.co_firstlineno + 4
    assert first == f"rank 1 of 2 failed: ValueError: the seventh sample is odd ({__file__}, line {line})"
    assert rest[:3] == ["", "Traceback (most recent call last):", f'  File "{__file__}", line {line}, in fail']
    assert 'raise ValueError("the seventh sample is odd")' in rest[3]
    assert rest[-1] == "ValueError: the seventh sample is odd"
    assert not any(is_alive(int(file.name)) for file in tmp_path.iterdir())


def _kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (_kill_itself, "rank 1 of 2 was killed by SIGKILL, which the system also sends when memory runs out,"),
        (functools.partial(os._exit, 0), "rank 1 of 2 ended with exit code 0 before .*run had returned"),
        (functools.partial(sys.exit, 3), "rank 1 of 2 failed: SystemExit: exit code 3"),
    ],
    ids=["killed", "os._exit", "sys.exit"],
)
def test_a_rank_that_dies_is_named_and_not_the_rank_that_lost_it(end: Callable[[], None], message: str) -> None:
    def run() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            end()
        dist.barrier()

    with pytest.raises(RankError, match=message):
        launch(run, device="cpu")


def test_a_child_of_a_dead_rank_hides_nothing_and_is_ended(tmp_path: Path) -> None:
    """A child such as a data loader's worker has the rank's connection and streams open."""

    def run(folder: Path) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(600)
        (folder / f"{child}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="rank 0 of 1 was killed by SIGKILL"):
        launch(run, tmp_path, ranks=1, device="cpu")
    (child,) = (int(file.name) for file in tmp_path.iterdir())
    wait_until(lambda: not is_alive(child), "the child ended")


def test_ranks_that_run_too_long_are_ended(tmp_path: Path) -> None:
    def run(folder: Path) -> None:
        (folder / f"{os.getpid()}").touch()
        while True:
            time.sleep(1)

    with pytest.raises(RankError, match=r"run did not return within timeout_s=0.2 in ranks 0, 1"):
        launch(run, tmp_path, device="cpu", timeout_s=0.2)
    assert not any(is_alive(int(file.name)) for file in tmp_path.iterdir())


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    def run(folder: Path) -> None:
        (folder / f"{os.getpid()}").touch()
        while True:
            time.sleep(1)

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks running")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore SIGINT
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            launch(run, tmp_path, device="cpu")
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    wait_until(lambda: not any(is_alive(int(file.name)) for file in tmp_path.iterdir()), "no rank left")


def test_an_interrupt_before_the_answer_of_the_fork_server_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the answer would be taken for that to the next request."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    server = ForkServer("json")
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            server.reap(1)
    assert server.exit_code(1) == -signal.SIGKILL
    server.close()
    assert not is_alive(server._end.pid)


def test_a_script_is_not_executed_again_and_needs_no_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import meshwright as mw\n"
        "print('the script runs')\n"
        "class Model:\n    name = 'tiny'\n"
        "def train(steps):\n    return Model(), steps + offset\n"
        "offset = 10\n"
        "model, steps = mw.launch(train, 5, ranks=1, device='cpu')\n"
        "print(type(model) is Model, model.name, steps)\n"
    )
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == "the script runs\nTrue tiny 15\n"


def test_a_launch_within_a_rank_is_refused() -> None:
    def nested() -> str:
        try:
            meshwright.launch(print)
        except InputError as error:
            return str(error)
        return "not refused"

    assert launch(nested, ranks=1, device="cpu").startswith(
        "mw.launch was called in a process that is a rank already (RANK=0, WORLD_SIZE=1): call it outside of the ranks"
    )


def test_what_cannot_be_copied_is_named() -> None:
    def use(lock: Any) -> Any:
        return threading.Lock()

    with pytest.raises(InputError, match=r"use cannot be sent to the ranks .*: cannot pickle '_thread.lock' object"):
        launch(use, threading.Lock(), device="cpu")
    with pytest.raises(RankError, match=r"what .*use returned, an object of class lock, cannot be sent from rank 0"):
        launch(use, None, ranks=1, device="cpu")


def test_a_process_that_the_function_forks_does_not_answer_for_the_rank() -> None:
    def fork() -> str:
        child = os.fork()
        if child == 0:
            return "child"
        os.waitpid(child, 0)
        return "rank"

    assert launch(fork, ranks=1, device="cpu", timeout_s=60) == "rank"


def test_an_exception_without_a_readable_message_is_named() -> None:
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    def fail() -> None:
        raise UnreadableError

    with pytest.raises(RankError, match=r"rank 0 of 1 failed: UnreadableError \("):
        launch(fail, ranks=1, device="cpu", timeout_s=60)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (None, {}, r"None is none: write mw\.launch\(train, 3\), not mw\.launch\(train\(3\)\)"),
        (print, {"ranks": 0}, "ranks=0: write a whole number from 1 on"),
        (print, {"ranks": True}, "ranks=True"),
        (print, {"ranks": 10**6}, "ranks=1000000: this machine starts at most"),
        (print, {"timeout_s": 0}, "timeout_s=0: write a number of seconds above 0"),
        (print, {"device": "gpu"}, "device='gpu': write 'cuda', 'cpu', or None"),
        (print, {"ranks": 3}, "3 ranks need 3 GPUs, and this machine has 2: start fewer ranks, or write device='cpu'"),
        (print, {"ranks": 3, "device": "cuda"}, "3 ranks need 3 GPUs"),
    ],
)
def test_wrong_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, function: Any, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=message):
        launch(function, **options)


def test_a_fork_server_stays_for_the_next_launch_until_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_preloaded", None)
    pids: list[int] = []

    def use() -> None:
        with kept_fork_server("json") as server:
            assert isinstance(server, ForkServer)
            pids.append(server._end.pid)

    use()
    use()
    assert pids[0] == pids[1]
    monkeypatch.setenv("TORCH_LOGS", "all")  # torch reads it when it is imported
    use()
    assert pids[2] != pids[1]
    assert not is_alive(pids[1])
    with pytest.raises(KeyboardInterrupt), kept_fork_server("json"):
        raise KeyboardInterrupt
    assert not is_alive(pids[2])
