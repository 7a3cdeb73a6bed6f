"""`meshwright train --nodes` and `--on`: which values are refused before anything is started."""

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from meshwright.compat import versions
from tests.cli.commands import RefusalOf

HERE = ("--rendezvous", "127.0.0.1:29500")
FIRST = ("--nodes", "2", "--node-rank", "0")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ("--nodes", "2", "--node-rank", "2", *HERE),
            "--node-rank 2: with --nodes 2, machines are numbered",
        ),
        (("--nodes", "2", *HERE), "say which of the machines this is"),
        (FIRST, "say where the machines meet"),
        ((*FIRST, "--rendezvous", "a:b"), "the port is 'b'"),
        (("--nodes", "4:2", "--node-rank", "0", *HERE), "--nodes 4:2: 4 is more than 2"),
        (("--nodes", "1"), "one machine needs neither"),
        (("--node-rank", "1"), "--node-rank 1: say on how many machines"),
        (HERE, "say on how many machines"),
        (
            (*FIRST, *HERE, "--set", "plan.axes.replicate=3"),
            "has 3 ranks, but --nodes 2 × 2",
        ),
        (
            (*FIRST, *HERE, "--set", "plan.axes.replicate=2"),
            "has 2 ranks, but --nodes 2 × 2",
        ),
        (("--nodes", "1:2", "--node-rank", "0", *HERE, "--set", "plan.axes.replicate=4"), "a single number"),
        (
            ("--nodes", "1:2", "--node-rank", "0", *HERE, "--set", "train.timeout_s=20"),
            "--nodes 1:2 with train.timeout_s 20: it takes 25 s until a lost machine is noticed",
        ),
        ((*FIRST, *HERE, "--cluster", "3x8xH100"), "'3x8xH100' has 3 machines"),
        ((*FIRST, *HERE, "--cluster", "2x8xH100"), "has 8 GPUs, this machine has 0"),
        ((*FIRST, "--rendezvous", "192.0.2.1:29500"), "has no address 192.0.2.1"),
    ],
)
def test_wrong_values_are_refused(refusal_of: RefusalOf, words: tuple[str, ...], complaint: str) -> None:
    assert complaint in refusal_of("train", "job.yaml", *words)


def test_a_rank_of_another_launcher_starts_no_machines(refusal_of: RefusalOf, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    line = refusal_of("train", "job.yaml", *FIRST, *HERE)
    assert "--nodes 2: another launcher has started this rank: leave out --nodes" in line


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--workers", "2"), "--workers 2: say where the workers are, with --on ray"),
        (("--on", "slurm"), "--on slurm: write ray for the Ray cluster of this machine, or ray://HOST:PORT"),
        (("--on", "ray://"), "--on ray://: write ray"),
        (("--on", "ray", "--nodes", "2"), "--nodes 2 with --on ray: leave out one of them"),
    ],
)
def test_wrong_values_of_on_are_refused_before_ray_is_looked_for(
    refusal_of: RefusalOf, words: tuple[str, ...], complaint: str
) -> None:
    assert complaint in refusal_of("train", "job.yaml", *words)


def test_without_ray_the_package_is_named(refusal_of: RefusalOf, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(versions, "version", missing)
    monkeypatch.delitem(sys.modules, "meshwright.compat.ray.run", raising=False)
    refusal = refusal_of("train", "job.yaml", "--on", "ray")
    assert "--on ray: meshwright.compat.ray needs the package ray: pip install ray==2.60.0" in refusal
