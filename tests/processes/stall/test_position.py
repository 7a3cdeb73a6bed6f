"""Where a thread is, from its stack: modules by name, the data loader, collectives, the line of the user's code."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from meshwright.processes.stall.position import Position, find_position, stack_of, stack_of_error
from tests.forking.environment import REPOSITORY
from tests.processes.stall.running_thread import LOOKS, WAYS


class Waiting(nn.Module):
    """Calls a function in its forward pass."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._call()
        return x


class Samples(Dataset[Any]):
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self._call()
        return index


def position_in(run: Callable[[Callable[[], None]], Any]) -> Position:
    """Returns the position of a thread that is in the function which `run` is given, as another thread sees it."""
    entered, leave = threading.Event(), threading.Event()

    def wait_here() -> None:
        entered.set()
        leave.wait(60)

    thread = threading.Thread(target=run, args=(wait_here,))
    thread.start()
    assert entered.wait(60)
    assert thread.ident is not None
    try:
        return find_position(stack_of(sys._current_frames()[thread.ident])[:-1])  # without Event.wait
    finally:
        leave.set()
        thread.join()


def test_the_module_that_runs_is_named_as_in_the_model() -> None:
    def run(call: Callable[[], None]) -> None:
        model = nn.ModuleDict({"blocks": nn.Sequential(nn.Identity(), Waiting(call))})
        model.forward = lambda x: model["blocks"](x)
        model(torch.ones(1))

    position = position_in(run)
    assert position.module == "blocks.1"
    assert position.place.endswith(", in the forward pass of blocks.1")
    assert "wait_here (test_position.py, line" in position.place


def test_data_loading_is_named() -> None:
    def run(call: Callable[[], None]) -> None:
        list(DataLoader(Samples(call)))

    position = position_in(run)
    assert position.module == ""
    assert position.place.endswith(", called by DataLoader.__next__")


def test_the_position_of_an_error_is_where_it_was_raised() -> None:
    def fail() -> None:
        raise RuntimeError("Timed out")

    try:
        nn.Sequential(Waiting(fail))(torch.ones(1))
    except RuntimeError as error:
        position = find_position(stack_of_error(error.__traceback__))
    assert position.module == "0"
    assert "fail (test_position.py, line" in position.place


@pytest.mark.parametrize("way", WAYS)
def test_a_stack_is_read_while_its_thread_runs_on(way: str) -> None:
    """In another process, because the interpreter crashed."""
    command = [sys.executable, "-m", "tests.processes.stall.running_thread", way]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (run.returncode, run.stdout) == (0, f"{LOOKS}\n"), run.stderr
