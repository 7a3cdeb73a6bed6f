"""The loops of the README and of docs/loops.md run: alone, and on two ranks."""

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.auto import choose, tuned
from meshwright.cluster.names import cluster_from_name
from meshwright.processes.loopback import interface
from tests.ranks import RankPool
from tests.train.loops.models import model, pairs, shuffled
from tests.train.toy import points

REPOSITORY = Path(__file__).parents[3]


def code_blocks(file: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / file).read_text(), re.DOTALL)


def scripts() -> tuple[str, str, int]:
    """The plain script and ours, and the number of lines that are new in ours."""
    (diff,) = code_blocks("README.md", "diff")
    lines = diff.splitlines()
    plain = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    ours = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return plain, ours, sum(line.startswith("+") for line in lines)


def printed(script: str, names: dict[str, Any] | None = None) -> list[str]:
    """Returns the lines that a script prints in this process. `names` gets the script's variables."""
    with redirect_stdout(StringIO()) as output:
        exec(compile(script, "script.py", "exec"), {} if names is None else names)
    return output.getvalue().splitlines()


def printed_on_rank(rank: int, size: int, script: str) -> list[str]:
    names: dict[str, Any] = {}
    lines = printed(script, names)
    assert names["session"].world.size == size
    return lines


def test_the_plain_script_and_ours_print_the_same_alone_and_on_two_ranks(two: RankPool) -> None:
    plain, ours, new_lines = scripts()
    assert new_lines <= 5
    expected = printed(plain)
    assert len(expected) == 3
    assert printed(ours) == expected
    assert two.run(printed_on_rank, ours) == [expected, expected]


@pytest.mark.soak
def test_our_script_prints_the_same_in_the_ranks_of_torchrun(tmp_path: Path) -> None:
    plain, ours, _ = scripts()
    file = tmp_path / "script.py"
    file.write_text(ours)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": interface(),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    run = subprocess.run(
        [*command, "--log-dir", str(tmp_path / "elastic"), str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr
    found = re.findall(r"epoch \d: loss \d+\.\d{4}", run.stdout)  # ranks may print into the same line
    assert sorted(found) == sorted(2 * printed(plain))
    assert "find_unused_parameters" not in run.stderr


def run_planned_loop(rank: int, size: int, folder: Path) -> tuple[int, int]:
    """Runs the README's loop with `best_plan`. Returns its number of steps, and the ranks of its plan."""
    (script,) = [block for block in code_blocks("README.md", "python") if "best_plan" in block]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 5))
    names: dict[str, Any] = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "loss_function": F.cross_entropy,
        "sample_batch": points(4)[:],
        "dataset": points(510),
    }
    script = script.replace("checkpoints/last", str(folder / "last"))
    with (
        patch.object(choose, "find_cluster", lambda name, _: cluster_from_name(name.replace("cpu", "H100"))),
        patch.object(tuned, "LONGEST_BUDGET_S", 0.0),
    ):
        exec(compile(script, "README.md", "exec"), names)
    return names["session"].steps, names["plan"].world_size


@pytest.mark.soak
def test_the_loop_with_the_best_plan_alone_and_on_two_ranks(two: RankPool, tmp_path: Path) -> None:
    assert run_planned_loop(0, 1, tmp_path / "alone") == (6, 1)
    assert two.run(run_planned_loop, tmp_path / "two") == [(6, 2), (6, 2)]


@pytest.mark.parametrize("number", range(4))
def test_the_loops_of_the_page_run(number: int) -> None:
    blocks = code_blocks("docs/loops.md", "python")
    assert len(blocks) == 4
    generator, discriminator = model(4, 5), model(5, 1, seed=1)
    names: dict[str, Any] = {
        "mw": mw,
        "torch": torch,
        "loader": shuffled(pairs()),
        "my_loss": F.mse_loss,
        "generator": generator,
        "discriminator": discriminator,
        "optimizer_g": torch.optim.SGD(generator.parameters(), lr=0.1),
        "optimizer_d": torch.optim.SGD(discriminator.parameters(), lr=0.1),
        "loss_real": lambda output: F.softplus(-output).mean(),
        "loss_fake": lambda output: F.softplus(output).mean(),
    }
    net = model(5, 4)
    names["session"] = mw.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1), loss=F.mse_loss, device="cpu")
    exec(compile(blocks[number], "docs/loops.md", "exec"), names)
