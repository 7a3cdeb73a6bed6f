"""`python -m meshwright.compat.deepspeed` runs scripts on this machine, and says how to start other machines."""

from pathlib import Path

import pytest

from meshwright.compat.deepspeed import launcher
from meshwright.errors import InputError
from tests.forking.forked import start

SCRIPT = """
import argparse
import deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR
import deepspeed.comm as dist
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
deepspeed.init_distributed()
print("rank", dist.get_rank(), "of", dist.get_world_size(), "local", args.local_rank, args.deepspeed_config)
try:
    import deepspeed.inference
except ImportError as error:
    print(error)
"""


def test_a_script_is_run_in_two_ranks_with_the_drop_in(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["--num_gpus", "2", str(script), "--deepspeed_config", "a.json"]
    process = start("tests.forking.forked:run_module", "meshwright.compat.deepspeed", *words)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "rank 0 of 2 local 0 a.json" in output
    assert "[rank 1] rank 1 of 2 local 1 a.json" in output
    assert "has no module deepspeed.inference (docs/deepspeed.md lists what it has)" in output


def test_other_machines_are_answered_with_the_torchrun_command() -> None:
    words = "--num_nodes 2 --num_gpus 4 --master_addr host1 train.py --lr 1"
    with pytest.raises(InputError, match="torchrun --nnodes 2 --nproc-per-node 4") as error:
        launcher.run(launcher.parse(words.split()))
    assert "--rdzv-endpoint host1:29500" in str(error.value)
    assert str(error.value).endswith("-m meshwright.compat.deepspeed train.py --lr 1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hostfile hosts train.py", "on each of the N machines, run torchrun --nnodes N"),
        ("--num_gpus 0 train.py", "--num_gpus 0: start at least 1 rank"),
        ("--num_gpus 2 nowhere.py", r"nowhere\.py: there is no such script"),
    ],
)
def test_wrong_command_lines_are_refused_before_ranks_are_started(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        launcher.run(launcher.parse(words.split()))
