"""transformers' `Trainer`, which resumes from its newest checkpoint. One that a kill has left unfinished is refused,
and the one before is used, as the message says."""

from typing import Any

from meshwright.user.torchvision_import import mend_torchvision

mend_torchvision()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402
from transformers import TrainerCallback, TrainingArguments  # noqa: E402

from meshwright.compat.transformers import MeshwrightTrainer  # noqa: E402
from meshwright.errors import CheckpointError  # noqa: E402
from tests.doors.training import (  # noqa: E402
    GLOBAL_BATCH,
    REPLICATE,
    SAVE_EVERY,
    STEPS,
    Progress,
    folder_of_run,
    network,
    numbered,
    samples,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.network(inputs)
        return {"loss": F.mse_loss(output, labels), "logits": output}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.pairs = samples()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self.pairs[index]
        return {"inputs": inputs, "labels": labels}


class Report(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress = Progress(folder_of_run(), torch.distributed.get_rank())
        self.progress.began(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.saved(state.global_step)


def main() -> None:
    folder, report = folder_of_run() / "checkpoints", Report()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // 2,
        save_steps=SAVE_EVERY,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    for newest in [*numbered(folder, "checkpoint-*"), None]:
        trainer = MeshwrightTrainer(
            model=Model(), args=arguments, train_dataset=Samples(), callbacks=[report], plan=REPLICATE
        )
        try:
            trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
            break
        except CheckpointError as error:
            print(error, flush=True)
    assert trainer.session is not None
    report.progress.ended(trainer.session.state_dict())


if __name__ == "__main__":
    main()
