"""A script that imports DeepSpeed, under the launcher of the drop-in."""

from typing import Any

import deepspeed
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

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


def main() -> None:
    deepspeed.init_distributed()
    folder, model = folder_of_run(), network()
    config = {"train_batch_size": GLOBAL_BATCH, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)
    if (folder / "checkpoints" / "latest").exists():
        engine.load_checkpoint(str(folder / "checkpoints"))
    progress = Progress(folder, engine.global_rank)
    progress.began(engine.global_steps)
    sampler: Any = DistributedSampler(samples(), engine.world_size, engine.global_rank, shuffle=False)
    batches = list(DataLoader(samples(), batch_size=GLOBAL_BATCH // 2, sampler=sampler))
    while engine.global_steps < STEPS:
        inputs, target = batches[engine.global_steps % EPOCH_STEPS]
        engine.backward(F.mse_loss(engine(inputs), target))
        engine.step()
        progress.step(engine.global_steps)
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(str(folder / "checkpoints"))
            progress.saved(engine.global_steps)
    progress.ended(engine.module_state_dict())


if __name__ == "__main__":
    main()
