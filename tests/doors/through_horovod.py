"""A script of Horovod that rank 0 saves, as Horovod's examples do. With `--elastic`, workers that survive go on
from the last commit."""

import os
import sys
from typing import Any

import torch
from torch.nn import functional as F

import meshwright.compat.horovod as hvd
from tests.doors.training import (
    EPOCH_STEPS,
    GLOBAL_BATCH,
    SAVE_EVERY,
    STEPS,
    Progress,
    adam,
    folder_of_run,
    network,
    samples,
)


def train(state: Any, progress: Progress) -> None:
    folder, share = folder_of_run(), GLOBAL_BATCH // hvd.size()
    progress.began(state.step)
    while state.step < STEPS:
        begin = state.step % EPOCH_STEPS * GLOBAL_BATCH + hvd.rank() * share
        inputs, target = samples()[begin : begin + share]
        state.optimizer.zero_grad()
        F.mse_loss(state.model(inputs), target).backward()
        state.optimizer.step()
        state.step += 1
        progress.step(state.step)
        if state.step % SAVE_EVERY == 0 and hvd.rank() == 0:
            values = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "step": state.step}
            torch.save(values, folder / "draft.pt")
            os.replace(folder / "draft.pt", folder / "checkpoint.pt")
            progress.saved(state.step)
        state.commit()
    progress.ended(state.model.state_dict())


def main() -> None:
    hvd.init()
    model, folder, step = network(), folder_of_run(), 0
    optimizer: Any = hvd.DistributedOptimizer(adam(model), model.named_parameters())
    if hvd.rank() == 0 and (folder / "checkpoint.pt").exists():
        values = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(values["model"])
        optimizer.load_state_dict(values["optimizer"])
        step = values["step"]
    state = hvd.elastic.TorchState(model, optimizer, step=step)
    if "--elastic" in sys.argv:
        hvd.elastic.run(lambda state: train(state, Progress(folder, hvd.rank())))(state)
    else:
        state.sync()
        train(state, Progress(folder, hvd.rank()))


if __name__ == "__main__":
    main()
