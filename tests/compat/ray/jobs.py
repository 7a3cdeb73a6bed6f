"""What the tests of Ray train: a callback that kills a rank, and a user's own loop in Ray Train's workers."""

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 5


class KillOnce:
    """Kills this rank after a step, unless the file says that it was killed before."""

    every_rank = True

    def __init__(self, rank: int, step: int, file: str) -> None:
        self.rank, self.at_step, self.file = rank, step, Path(file)

    def step(self, run: Any, step: int, loss: float) -> None:
        if run.rank == self.rank and step == self.at_step and not self.file.exists():
            self.file.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)


def users_loop(settings: dict[str, Any]) -> str:
    """Trains a small model on generated points, and returns the digest of its weights."""
    import meshwright as mw

    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = mw.parallelize(model, optimizer, loss=nn.functional.cross_entropy, plan={"axes": {"replicate": 2}})
    points = torch.utils.data.TensorDataset(torch.randn(16 * STEPS, 8), torch.randint(4, (16 * STEPS,)))
    for batch in session.batches(points, epochs=1, global_batch=16):
        session.step(batch)
    weights = session.state_dict()
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Runs the loop in Ray Train's workers, then in ranks of meshwright, and prints both digests. The argument is
    a folder for Ray."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    import meshwright as mw

    ray.init(address="auto", runtime_env={"env_vars": {"PYTHONPATH": sys.path[0]}})
    trainer = TorchTrainer(
        users_loop,
        train_loop_config={"seed": 3},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=sys.argv[1]),
    )
    print(trainer.fit().return_value, flush=True)
    ray.shutdown()
    print(mw.launch(users_loop, {"seed": 3}, ranks=2), flush=True)


if __name__ == "__main__":
    main()
