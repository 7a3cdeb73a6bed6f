"""The example scripts print the same with Accelerate's own `Accelerator`, and under any plan."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks import RankPool

accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")
pytest.importorskip("transformers", reason="the package transformers is not installed")

import meshwright.compat.accelerate as compat  # noqa: E402
from meshwright.user.torchvision_import import mend_torchvision  # noqa: E402
from tests.compat.accelerate.loops import accelerate_process  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"
SHARDED = json.dumps({"axes": {"shard": 2}})


def _run(rank: int, world_size: int, name: str, theirs: bool, *options: str) -> list[str]:
    """Runs an example with these options, with Accelerate's own class if `theirs`. Returns what it prints."""
    mend_torchvision()  # transformers imports it
    output = io.StringIO()
    own: Any = accelerate.Accelerator if theirs else compat.Accelerator
    with (
        accelerate_process(rank, world_size),
        patch.object(compat, "Accelerator", own),
        patch.object(accelerate.state.PartialState, "destroy_process_group"),  # the pool of ranks needs it
        patch.object(sys, "argv", [name, *options]),
        contextlib.redirect_stdout(output),
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return [line for line in output.getvalue().splitlines() if line.startswith("epoch")]


def _numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"[\d.]+", line.replace(",", " "))]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("accelerate_vision.py", ()),
        pytest.param("accelerate_language.py", ("--plan", SHARDED), marks=pytest.mark.soak),
        pytest.param("accelerate_vision.py", ("--plan", SHARDED), marks=pytest.mark.soak),
        pytest.param("accelerate_language.py", (), marks=pytest.mark.soak),
    ],
)
def test_an_example_prints_the_same_as_under_accelerate_itself(
    two: RankPool, tmp_path: Path, name: str, plan: tuple[str, ...]
) -> None:
    theirs = two.run(_run, name, True, "--output_dir", str(tmp_path / "theirs"))
    ours = two.run(_run, name, False, "--output_dir", str(tmp_path / "ours"), *plan)
    assert len(theirs[0]) == 2
    assert theirs[1] == ours[1] == []  # the main process prints
    assert _numbers(ours[0]) == pytest.approx(_numbers(theirs[0]), rel=1e-4)
    assert {path.name for path in (tmp_path / "ours" / "model").iterdir()} == {
        path.name for path in (tmp_path / "theirs" / "model").iterdir()
    }


def test_the_vision_example_is_resumed(two: RankPool, tmp_path: Path) -> None:
    options = ("--output_dir", str(tmp_path), "--epochs", "3")
    whole = two.run(_run, "accelerate_vision.py", False, *options)
    resumed = two.run(
        _run, "accelerate_vision.py", False, *options, "--resume_from_checkpoint", str(tmp_path / "epoch_1")
    )
    assert resumed[0] == whole[0][2:]


def test_the_language_example_logs_on_one_process(tmp_path: Path) -> None:
    lines = _run(0, 1, "accelerate_language.py", False, "--output_dir", str(tmp_path), "--with_tracking")
    assert len(lines) == 2
    assert list((tmp_path / "language").glob("events*"))
    from transformers import LlamaForCausalLM

    assert LlamaForCausalLM.from_pretrained(tmp_path / "model").config.hidden_size == 32
