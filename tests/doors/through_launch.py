"""`mw.launch`, whose ranks train with `mw.parallelize` and save with `session.save`."""

import os
from pathlib import Path

from torch.nn import functional as F

import meshwright as mw
from tests.doors.training import (
    EPOCHS,
    GLOBAL_BATCH,
    REPLICATE,
    SAVE_EVERY,
    Progress,
    adam,
    folder_of_run,
    network,
    numbered,
    samples,
)


def train(folder: Path) -> None:
    model = network()
    session = mw.parallelize(model, adam(model), loss=F.mse_loss, plan=REPLICATE)
    progress = Progress(folder, int(os.environ["RANK"]))
    for newest in numbered(folder / "checkpoints")[:1]:
        session.load(newest)
    progress.began(session.steps)
    for batch in session.batches(samples(), epochs=EPOCHS, global_batch=GLOBAL_BATCH):
        session.step(batch)
        progress.step(session.steps)
        if session.steps % SAVE_EVERY == 0:
            session.save(folder / "checkpoints" / f"step-{session.steps}")
            progress.saved(session.steps)
    progress.ended(session.state_dict())


if __name__ == "__main__":
    mw.launch(train, folder_of_run(), ranks=2, device="cpu")
