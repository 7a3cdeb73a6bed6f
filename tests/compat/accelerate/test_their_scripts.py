"""Accelerate's own test scripts, with its `Accelerator` replaced by that of Meshwright, on two CPU processes."""

import contextlib
import io
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks import RankPool

pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from accelerate.state import PartialState
from accelerate.test_utils.scripts import test_script as their_script
from accelerate.test_utils.scripts import test_sync as their_sync

from meshwright.compat.accelerate import Accelerator
from meshwright.compat.accelerate.prepared_model import PreparedModel
from tests.compat.accelerate.loops import accelerate_process


@contextmanager
def _counted(calls: Counter[str]) -> Iterator[None]:
    """Counts the calls of methods that Meshwright defines."""
    with contextlib.ExitStack() as stack:
        for owner in (Accelerator, PreparedModel):
            for name, method in vars(owner).items():
                if callable(method) and not isinstance(method, staticmethod):
                    stack.enter_context(patch.object(owner, name, _counting(method, name, calls)))
        yield


def _counting(method: Any, name: str, calls: Counter[str]) -> Any:
    @wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        calls[name] += 1
        return method(*args, **keywords)

    return call


def _run(rank: int, world_size: int, name: str, folder: Path) -> Counter[str]:
    script: Any = {"script": their_script, "sync": their_sync}[name]
    calls: Counter[str] = Counter()
    with accelerate_process(rank, world_size), _counted(calls):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        before = Path.cwd()
        os.chdir(folder)  # one check writes a file
        try:
            with (
                patch.object(script, "Accelerator", Accelerator),
                patch.object(PartialState, "destroy_process_group"),  # the pool needs it
                contextlib.redirect_stdout(io.StringIO()),
            ):
                script.main()
                if name == "sync":
                    _combinations_of_accumulation()
        finally:
            os.chdir(before)
    return calls


def _combinations_of_accumulation() -> None:
    """What the script itself runs on GPUs only."""
    for split, dispatch, each in itertools.product((True, False), repeat=3):
        their_sync.test_gradient_accumulation(split, dispatch, each)
        their_sync.test_gradient_accumulation_with_opt_and_scheduler(split, dispatch, each)


@pytest.mark.filterwarnings("ignore:mixed_precision is fp16")
def test_their_script_passes_on_two_ranks(two: RankPool, tmp_path: Path) -> None:
    for calls in two.run(_run, "script", tmp_path):
        assert calls["prepare_model"] == 8
        assert calls["forward"] == calls["backward"] == calls["after_optimizer_step"] == 96


@pytest.mark.soak
def test_their_sync_script_passes_on_two_ranks(two: RankPool, tmp_path: Path) -> None:
    for calls in two.run(_run, "sync", tmp_path):
        assert calls["prepare_model"] == 3 + 16
        assert calls["forward"] == 9 + 64
        assert calls["no_sync"] > 0
        assert calls["combining"] == 1
