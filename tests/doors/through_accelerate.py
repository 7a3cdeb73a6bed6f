"""A loop of Accelerate, which saves within epochs and resumes with `skip_first_batches`."""

from typing import Any

from torch.nn import functional as F
from torch.utils.data import DataLoader

from meshwright.compat.accelerate import Accelerator
from tests.doors.training import (
    EPOCH_STEPS,
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


def main() -> None:
    accelerator: Any = Accelerator(cpu=True, plan=REPLICATE)
    folder = folder_of_run()
    model: Any = network()
    loader: Any = DataLoader(samples(), batch_size=GLOBAL_BATCH // 2)
    model, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    progress = Progress(folder, accelerator.process_index)
    done = 0
    for newest in [path for path in numbered(folder / "checkpoints") if (path / "meshwright").exists()][:1]:
        accelerator.load_state(str(newest))
        done = int(newest.name.rpartition("-")[2])
    progress.began(done)
    for epoch in range(done // EPOCH_STEPS, EPOCHS):
        skipped = max(0, done - epoch * EPOCH_STEPS)
        for inputs, target in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            accelerator.backward(F.mse_loss(model(inputs), target))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            progress.step(done)
            if done % SAVE_EVERY == 0:
                accelerator.save_state(str(folder / "checkpoints" / f"step-{done}"))
                progress.saved(done)
    progress.ended(accelerator.get_state_dict(model))


if __name__ == "__main__":
    main()
