"""Trainings through each door are killed at random moments, and started again as their users do. They end with the
weights of an undisturbed training, bit for bit, and go on from the newest checkpoint."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.doors.driver import Door, train

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "localhost", "--master-port=PORT")
HOROVODRUN = ("-m", "meshwright", "horovodrun", "-np", "2")
DOORS = {
    "mw.launch": Door((), "through_launch.py"),
    "lightning": Door((), "through_lightning.py", kills_launcher=False),
    "accelerate": Door(TORCHRUN, "through_accelerate.py", kills_launcher=False),
    "transformers": Door(TORCHRUN, "through_transformers.py", kills_launcher=False),
    "deepspeed": Door(("-m", "meshwright.compat.deepspeed", "--num_gpus", "2"), "through_deepspeed.py"),
    "horovodrun": Door(HOROVODRUN, "through_horovod.py"),
    "elastic": Door(
        (*HOROVODRUN, "--min-np", "2", "--max-np", "2"), "through_horovod.py", ("--elastic",), replaces_ranks=True
    ),
}
NEEDS = {"lightning": "lightning", "accelerate": "accelerate", "transformers": "transformers"}
KILLS, CASES = 6, 5


def check(name: str, folder: Path, kills: int, seed: int) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"the package {NEEDS[name]} is not installed")
    undisturbed = train(DOORS[name], folder / "undisturbed")
    killed = train(DOORS[name], folder / "killed", kills, seed)
    print(f"{name}, seed {seed}: {killed}", file=sys.stderr)
    assert undisturbed.problems == killed.problems == []
    assert len(killed.kills) >= kills // 2, "the training had ended before the others"
    assert killed.weights == undisturbed.weights != ""


def test_a_training_that_is_killed_twice_ends_with_the_same_weights(tmp_path: Path) -> None:
    check("mw.launch", tmp_path, 2, 0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, CASES + 1))
@pytest.mark.parametrize("name", DOORS)
def test_kills_at_random_moments_change_no_weight(name: str, seed: int, tmp_path: Path) -> None:
    check(name, tmp_path, KILLS, seed)
