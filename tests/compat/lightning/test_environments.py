"""The Trainer with our strategy where a cluster starts the processes: Lightning's environments for Slurm and Kubeflow
say which rank a process is, and nothing of ours overwrites it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

import torch
from lightning.fabric.plugins.environments import KubeflowEnvironment, SLURMEnvironment
from lightning.pytorch import Trainer
from torch import Tensor

from meshwright.processes.environment import environment_variables
from meshwright.processes.loopback import interface, serve_store
from tests.compat.lightning.modules import Regression, Samples, largest_difference, plain
from tests.compat.lightning.trainers import fit
from tests.ranks import RankPool, ranks
from tests.soaked import all_but

SHARD = {"axes": {"shard": 2}}


def slurm(rank: int, size: int, nodes: int) -> dict[str, str]:
    """What `srun` sets for a task of `size` on so many nodes."""
    per_node = size // nodes
    return {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(size),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_NNODES": str(nodes),
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
    }


def kubeflow(rank: int, size: int) -> dict[str, str]:
    """What a PyTorchJob of Kubeflow sets in a pod, which has one process."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23456", "WORLD_SIZE": str(size), "RANK": str(rank)}


def train(rank: int, size: int, cluster: str, nodes: int, plan: Any, folder: str) -> dict[str, Any]:
    """Trains where the environment variables of the cluster say which rank this is."""
    from meshwright.compat.lightning import MeshwrightStrategy

    variables = slurm(rank, size, nodes) if cluster == "slurm" else kubeflow(rank, size)
    with environment_variables(variables):
        trainer = Trainer(
            accelerator="cpu",
            devices=size // nodes,
            num_nodes=nodes,
            strategy=MeshwrightStrategy(plan=plan),
            plugins=[KubeflowEnvironment()] if cluster == "kubeflow" else None,
            gradient_clip_val=0.3,
            max_epochs=5,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        strategy: Any = trainer.strategy
        environment = type(strategy.cluster_environment)
        trainer.fit(Regression(), datamodule=Samples(size, rank))
        overwritten = {name for name, value in variables.items() if os.environ.get(name) != value}
        return {
            "environment": environment,
            "place": (trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.node_rank),
            "overwritten": overwritten,
            "weights": plain(strategy.full_state_dict()),
        }


@pytest.mark.parametrize(("cluster", "nodes"), all_but([("slurm", 2)], [("slurm", 1), ("slurm", 2), ("kubeflow", 2)]))
def test_the_cluster_says_which_rank_a_process_is(cluster: str, nodes: int, two: RankPool, tmp_path: Path) -> None:
    expected = two.run(fit, "regression", "ddp", str(tmp_path))[0]["weights"]
    results = two.run(train, cluster, nodes, SHARD, str(tmp_path))
    for rank, result in enumerate(results):
        assert result["environment"] is (SLURMEnvironment if cluster == "slurm" else KubeflowEnvironment)
        assert result["place"] == (rank, 2, rank * (nodes == 1), rank * (nodes == 2))
        assert result["overwritten"] == set()
        assert largest_difference(expected, result["weights"]) < 1e-9


def wrong_devices(rank: int, size: int) -> str:
    from meshwright.compat.lightning import MeshwrightStrategy

    with environment_variables(slurm(rank, size, 1)):
        trainer = Trainer(accelerator="cpu", devices=4, strategy=MeshwrightStrategy(), logger=False)
        with pytest.raises(ValueError, match="SLURM") as error:
            trainer.fit(Regression(), datamodule=Samples(size, rank))
    return str(error.value)


def test_devices_that_the_cluster_does_not_have_are_refused_by_lightning(two: RankPool) -> None:
    assert "ntasks-per-node=2" in two.run(wrong_devices)[0]


# ---- processes that find each other by themselves


def run_script(environments: list[dict[str, str]], settings: dict[str, Any]) -> list[int]:
    """Starts a process for each environment. Returns their exit codes. Their store is that of this process, because
    one that Lightning's DDP makes listens on every interface."""
    store, port = serve_store()
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": interface(),
    }
    command = [sys.executable, "-m", "tests.compat.lightning.script", json.dumps(settings)]
    started = [
        subprocess.Popen(command, env={**os.environ, **environment, **shared}, stderr=subprocess.DEVNULL)
        for environment in environments
    ]
    try:
        return [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
        del store


def weights_of_script(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(folder / "weights.pt")
    return weights


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    with ranks(1) as one:
        weights: dict[str, Tensor] = one.run(fit, "regression", "ddp", str(tmp_path_factory.mktemp("ddp")))[0][
            "weights"
        ]
    return weights


@pytest.mark.soak
@pytest.mark.parametrize("cluster", ["slurm", "kubeflow"])
def test_processes_of_a_cluster_train(cluster: str, of_one_rank: dict[str, Tensor], tmp_path: Path) -> None:
    settings = {"module": "regression", "plan": SHARD, "folder": str(tmp_path), "devices": 1, "num_nodes": 2}
    variables = [slurm(rank, 2, 2) if cluster == "slurm" else kubeflow(rank, 2) for rank in range(2)]
    assert run_script(variables, {**settings, "environment": cluster}) == [0, 0]
    assert largest_difference(of_one_rank, weights_of_script(tmp_path)) < 1e-9


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", ["ddp", {"axes": {"replicate": 2}}, SHARD], ids=["ddp", "replicate", "shard"])
def test_a_script_whose_rank_was_killed_continues(plan: Any, of_one_rank: dict[str, Tensor], tmp_path: Path) -> None:
    """The ranks are those that Lightning's launcher starts."""
    settings = {"module": "regression", "plan": plan, "folder": str(tmp_path), "devices": 2, "num_nodes": 1}
    assert run_script([{}], {**settings, "dies": True}) != [0]
    assert (tmp_path / "killed").exists()
    assert run_script([{}], {**settings, "loads": "last"}) == [0]
    assert largest_difference(of_one_rank, weights_of_script(tmp_path)) < 1e-9
