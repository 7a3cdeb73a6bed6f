"""Eight configurations train to the losses of DeepSpeed itself, where it is installed (`make peers`), and on a GPU
three more in fp16."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.processes.loopback import interface
from tests.compat.deepspeed.tolerances import FP16_TOLERANCES, TOLERANCES

REPOSITORY = Path(__file__).parents[3]
PEERS = REPOSITORY / ".venv-peers"
SCRIPT = Path(__file__).with_name("their_loop.py")
# Runs a script with DeepSpeed, without the all-reduce in shared memory that it would compile first.
WITH_DEEPSPEED = """
import runpy, sys
import deepspeed
deepspeed.ops.__compatible_ops__ = {}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.soak
@pytest.mark.timeout(1200)  # DeepSpeed compiles its Adam when it is first used
@pytest.mark.skipif(not (PEERS / "ready").exists(), reason="DeepSpeed is not installed: make peers")
def test_losses_and_rates_are_those_of_deepspeed(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    _run_deepspeed(theirs, tmp_path / "store")
    command = [sys.executable, "-m", "meshwright.compat.deepspeed", "--num_gpus", "2", str(SCRIPT), str(ours)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        expected, actual = (json.loads(Path(f"{file}.{rank}").read_text()) for file in (theirs, ours))
        _compare(expected, actual, TOLERANCES)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_losses_on_a_gpu_are_those_of_deepspeed(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    commands: dict[Path, tuple[list[str], dict[str, str]]] = {
        theirs: (["-c", WITH_DEEPSPEED, str(SCRIPT), str(theirs)], variables),
        ours: (["-m", "meshwright.compat.deepspeed", "--num_gpus", "1", str(SCRIPT), str(ours)], {}),
    }
    for command, added in commands.values():
        process = subprocess.run(
            [sys.executable, *command], env={**os.environ, **added}, capture_output=True, text=True, timeout=280
        )
        assert process.returncode == 0, process.stderr[-3000:]
    expected, actual = (json.loads(Path(f"{file}.0").read_text()) for file in (theirs, ours))
    _compare(expected, actual, {**TOLERANCES, **FP16_TOLERANCES})
    assert actual["fp16, stage 1, overflow"]["skipped"] > 0


def _compare(expected: dict[str, Any], actual: dict[str, Any], tolerances: dict[str, float]) -> None:
    assert list(actual) == list(expected) == list(tolerances)
    for name, tolerance in tolerances.items():
        assert actual[name]["losses"] == pytest.approx(expected[name]["losses"], rel=tolerance), name
        assert actual[name]["rates"] == pytest.approx(expected[name]["rates"], abs=1e-12), name
        assert actual[name]["skipped"] == expected[name]["skipped"], name


def _run_deepspeed(results: Path, store: Path) -> None:
    """Runs the script in two ranks with DeepSpeed itself, on CPUs over Gloo."""
    variables = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": interface(),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # it would compile some of its own functions, too
        "TORCH_EXTENSIONS_DIR": str(PEERS / "torch_extensions"),  # compiled once, and not in each run of the tests
        "PATH": f"{PEERS / 'bin'}:{os.environ['PATH']}",  # ninja, by which DeepSpeed compiles
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # DeepSpeed wants it to be set; the ranks meet by the file
    }
    variables.pop("PYTHONPATH", None)
    processes = [
        subprocess.Popen(
            [str(PEERS / "bin" / "python"), "-c", WITH_DEEPSPEED, str(SCRIPT), str(results), str(store)],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=1000)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
