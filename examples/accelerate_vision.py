"""An image classifier in a loop of Hugging Face's Accelerate. Only the import of `Accelerator` is Meshwright's.

accelerate launch examples/accelerate_vision.py --output_dir run
torchrun --nproc_per_node 2 examples/accelerate_vision.py --output_dir run --plan '{"axes": {"shard": 2}}'
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from meshwright.compat.accelerate import Accelerator


def images(count, seed):
    """Images of a bright square, whose quarter of the image is the class."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(4, (count,), generator=generator)
    pictures = 0.3 * torch.randn(count, 1, 12, 12, generator=generator)
    for picture, label in zip(pictures, classes.tolist(), strict=True):
        row, column = 6 * (label // 2), 6 * (label % 2)
        picture[:, row + 1 : row + 5, column + 1 : column + 5] += 1
    return TensorDataset(pictures, classes)


def main(arguments):
    accelerator = Accelerator(mixed_precision=arguments.mixed_precision, **plan_options(arguments))
    set_seed(arguments.seed)
    train_loader = DataLoader(images(256, seed=1), batch_size=16, shuffle=True)
    eval_loader = DataLoader(images(70, seed=2), batch_size=16)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(64, 4)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    steps = arguments.epochs * len(train_loader)
    scheduler = OneCycleLR(optimizer, max_lr=0.005, total_steps=steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    first_epoch = 0
    if arguments.resume_from_checkpoint:
        accelerator.load_state(arguments.resume_from_checkpoint)
        first_epoch = int(Path(arguments.resume_from_checkpoint).name.removeprefix("epoch_")) + 1

    for epoch in range(first_epoch, arguments.epochs):
        model.train()
        total = 0.0
        for pictures, classes in train_loader:
            loss = nn.functional.cross_entropy(model(pictures), classes)
            total += loss.detach()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        right = seen = 0
        for pictures, classes in eval_loader:
            with torch.no_grad():
                predictions = model(pictures).argmax(dim=-1)
            predictions, classes = accelerator.gather_for_metrics((predictions, classes))
            right += int((predictions == classes).sum())
            seen += len(classes)
        loss = accelerator.reduce(total / len(train_loader), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {loss.item():.6f}, {right} of {seen} right")
        accelerator.save_state(Path(arguments.output_dir) / f"epoch_{epoch}")
    accelerator.save_model(model, Path(arguments.output_dir) / "model")
    accelerator.end_training()


def plan_options(arguments):
    return {"plan": json.loads(arguments.plan)} if arguments.plan else {}


def read_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--plan", help="the groups of a plan as JSON")
    parser.add_argument("--resume_from_checkpoint", help="a folder of save_state")
    return parser.parse_args()


if __name__ == "__main__":
    main(read_arguments())
