"""What a step costs inside of other libraries' loops, besides a session's own step: `python -m validation.speed.doors`
trains one net by `parallelize` alone and by Lightning's Trainer and Fabric, Accelerate's loop and transformers' Trainer
with Meshwright's strategy, Accelerator and Trainer, all under one plan.

Each loop runs in a thread and waits in its loader until it may go on, so that the loops take turns: the time of a turn
is that from its first batch until the loop asks for the next batch after its last one, with all that the loop does. The
processor time of a rank is given, too, because other programs on the machine hardly change it.
"""

import argparse
import json
import logging
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.processes.world import World, join
from meshwright.user.torchvision_import import mend_torchvision

mend_torchvision()  # Lightning and transformers import torchvision where it is installed
REFERENCE = "parallelize"
CLIP_NORM = 1.0  # transformers' Trainer computes the norm of the gradients in any case


@dataclass(frozen=True)
class Size:
    """The net has `layers` layers of `width` × `width` weights; `batch` samples are those of a rank."""

    layers: int
    width: int
    batch: int
    precision: str


SIZES = {"cpu": Size(4, 1024, 48, "fp32"), "cuda": Size(4, 8192, 16384, "bf16")}


class Net(nn.Module):
    """Returns its loss if it gets labels, as transformers' Trainer needs it, and scores otherwise."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layers = [layer for _ in range(size.layers) for layer in (nn.Linear(size.width, size.width), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(size.width, 10))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.layers(inputs)
        return scores if labels is None else {"loss": F.cross_entropy(scores, labels), "logits": scores}


class Batches:
    """An endless loader. `allow` lets the loop that reads it take so many batches, and returns when it asks for one
    more."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._allowed = 0
        self._changed = threading.Condition()
        self._is_waiting = False
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._is_waiting = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._allowed > 0)
                self._allowed -= 1
                self._is_waiting = False
            yield self._batch

    def allow(self, batches: int) -> None:
        with self._changed:
            self._changed.wait_for(self._can_go_on)
            if self.error is not None:
                raise self.error
            self._allowed = batches
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._can_go_on() and self._allowed == 0)
        if self.error is not None:
            raise self.error

    def _can_go_on(self) -> bool:
        return self._is_waiting or self.error is not None

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.error, self._allowed = error, 0
            self._changed.notify_all()


@dataclass(frozen=True)
class Setting:
    """What all loops are given."""

    size: Size
    plan: mw.Plan
    world: World
    batch: tuple[Tensor, Tensor]

    def net(self) -> Net:
        torch.manual_seed(0)
        return Net(self.size)

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


Loop = Callable[[Setting, Batches], None]
Times = tuple[float, float]  # seconds, and seconds of processor time


def parallelize(setting: Setting, batches: Batches) -> None:
    net = setting.net()
    device = setting.world.device.type
    session = mw.parallelize(
        net, setting.optimizer(net), loss=F.cross_entropy, plan=setting.plan, device=device, clip_norm=CLIP_NORM
    )
    for batch in batches:
        session.step(batch)


def lightning_trainer(setting: Setting, batches: Batches) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from meshwright.compat.lightning import MeshwrightStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = setting.net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, labels = batch
            return F.cross_entropy(self.net(inputs), labels)

        def configure_optimizers(self) -> Any:
            return setting.optimizer(self)

    trainer = Trainer(
        strategy=MeshwrightStrategy(plan=setting.plan, cluster_environment=_environment(setting)),
        max_steps=-1,
        max_epochs=1,
        gradient_clip_val=CLIP_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **_devices(setting),
    )
    trainer.fit(Module(), batches)


def lightning_fabric(setting: Setting, batches: Batches) -> None:
    from lightning.fabric import Fabric

    from meshwright.compat.lightning import MeshwrightFabricStrategy

    strategy = MeshwrightFabricStrategy(plan=setting.plan, cluster_environment=_environment(setting))
    fabric = Fabric(strategy=strategy, **_devices(setting))
    fabric.launch()
    net = setting.net()
    model, optimizer = fabric.setup(net, setting.optimizer(net))
    for inputs, labels in batches:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(inputs), labels))
        fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
        optimizer.step()


def accelerate(setting: Setting, batches: Batches) -> None:
    from meshwright.compat.accelerate import Accelerator

    accelerator = Accelerator(plan=setting.plan, cpu=setting.world.device.type == "cpu")
    net = setting.net()
    model, optimizer = accelerator.prepare(net, setting.optimizer(net))
    for inputs, labels in batches:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()


def transformers_trainer(setting: Setting, batches: Batches) -> None:
    from transformers import TrainingArguments

    from meshwright.compat.transformers import MeshwrightTrainer

    class LoaderOfBatches(MeshwrightTrainer):
        def get_train_dataloader(self) -> Any:
            return ({"inputs": inputs, "labels": labels} for inputs, labels in batches)

    net = setting.net()
    optimizer = setting.optimizer(net)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=10**9,
            max_grad_norm=CLIP_NORM,
            logging_steps=10**9,
            save_strategy="no",
            use_cpu=setting.world.device.type == "cpu",
            disable_tqdm=True,
            report_to=[],
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = LoaderOfBatches(
            model=net,
            args=arguments,
            train_dataset=[],
            optimizers=(optimizer, schedule),
            plan=setting.plan,
        )
        trainer.train()


LOOPS: dict[str, Loop] = {
    REFERENCE: parallelize,
    "Lightning Trainer": lightning_trainer,
    "Lightning Fabric": lightning_fabric,
    "Accelerate": accelerate,
    "transformers Trainer": transformers_trainer,
}


def _environment(setting: Setting) -> Any:
    from meshwright.compat.lightning.rank import RunEnvironment

    return RunEnvironment(setting.world)


def _devices(setting: Setting) -> dict[str, Any]:
    accelerator = "gpu" if setting.world.device.type == "cuda" else "cpu"
    return {"accelerator": accelerator, "devices": setting.world.local_size}


def measure(device: str, rounds: int, steps: int, sharded: bool, names: list[str]) -> dict[str, list[Times]]:
    """Returns the times of a step of each loop, by rounds. All ranks call this together."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for library in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(library).setLevel(logging.ERROR)
    size, world = SIZES[device], join(device, 600)
    axis = "shard" if sharded else "replicate"
    plan = mw.Plan.model_validate({"axes": {axis: world.size}, "numerics": {"precision": size.precision}})
    torch.manual_seed(world.rank)
    batch = (torch.randn(size.batch, size.width), torch.randint(0, 10, (size.batch,)))
    setting = Setting(size, plan, world, (batch[0].to(world.device), batch[1].to(world.device)))
    loaders = {name: _start(LOOPS[name], setting) for name in names}
    times: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else names[::-1]:
            loaders[name].allow(1)
            _wait_for_device(device)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            loaders[name].allow(steps)
            _wait_for_device(device)
            end, cpu_end = time.perf_counter(), time.process_time()
            times[name].append(((end - begin) / steps, (cpu_end - cpu_begin) / steps))
    return times


def _start(loop: Loop, setting: Setting) -> Batches:
    """Starts the loop, and lets it make its first steps, before the next loop is started: the ranks make their process
    groups in the same order."""
    batches = Batches(setting.batch)

    def run() -> None:
        try:
            loop(setting, batches)
            raise RuntimeError("the loop has ended")
        except BaseException as error:
            batches.fail(error)

    threading.Thread(target=run, daemon=True).start()
    batches.allow(3)
    return batches


def _wait_for_device(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps of a loop in a round")
    parser.add_argument("--shard", action="store_true", help="shard the weights instead of replicating them")
    parser.add_argument("--only", nargs="*", default=list(LOOPS), help="names of loops")
    options = parser.parse_args()
    names = [REFERENCE, *(name for name in options.only if name != REFERENCE)]
    arguments = (options.device, options.rounds, options.steps, options.shard, names)
    times = mw.launch(measure, *arguments, ranks=options.ranks, device=options.device)
    rows = [_row(name, times[name], times[REFERENCE]) for name in names]
    print(f"{'':22} {'ms a step':>10} {'ratio':>7} {'middle half':>16} {'ratio of processor times':>26}")
    for row in rows:
        low, high = row["middle_half"]
        spread = f"{low:.3f} to {high:.3f}"
        print(f"{row['loop']:22} {row['step_ms']:10.2f} {row['ratio']:7.3f} {spread:>16} {row['cpu_ratio']:26.3f}")
    print(json.dumps({"device": options.device, "ranks": options.ranks, "rounds": options.rounds, "rows": rows}))


def _row(name: str, times: list[Times], reference: list[Times]) -> dict[str, Any]:
    """The median ratios against the reference in the same round, and where the middle half of the ratios lies."""
    ratios = sorted(one[0] / other[0] for one, other in zip(times, reference, strict=True))
    quarter = len(ratios) // 4
    return {
        "loop": name,
        "step_ms": median(wall for wall, _ in times) * 1e3,
        "ratio": median(ratios),
        "middle_half": [ratios[quarter], ratios[-1 - quarter]],
        "cpu_ratio": median(one[1] / other[1] for one, other in zip(times, reference, strict=True)),
    }


if __name__ == "__main__":
    from validation.speed import doors  # ranks import it by this name, which `__main__` has not

    doors.main()
