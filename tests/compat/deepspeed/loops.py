"""Training loops for the drop-in, which ranks of a pool run, and the same steps in plain PyTorch."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright.compat.deepspeed as deepspeed
from meshwright.compat.deepspeed_config.schedules import WarmupLR

STEPS, ACCUMULATION, MICRO = 4, 2, 4
RATE, DECAY, CLIP = 1e-2, 0.1, 0.3
CONFIG: dict[str, Any] = {
    "train_batch_size": 2 * MICRO * ACCUMULATION,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIP,
    "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.02}},
}


def network(rank: int = 0) -> nn.Module:
    """The model. Ranks other than 0 begin with other weights, which `initialize` replaces."""
    torch.manual_seed(rank)
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double()


def batches(count: int, size: int = 2 * MICRO) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=torch.double),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def train_alone(steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Returns the weights and the norms of gradients of the same training on one process, in plain PyTorch."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = WarmupLR(optimizer, warmup_num_steps=3, warmup_max_lr=0.02)
    norms = []
    data = iter(batches(steps * ACCUMULATION))
    for _ in range(steps):
        for _ in range(ACCUMULATION):
            inputs, target = next(data)
            (nn.functional.cross_entropy(model(inputs), target) / ACCUMULATION).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norms


def run_steps(engine: Any, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Trains on this rank's half of each batch. Returns the norm of the gradient after each optimizer step."""
    norms = []
    for inputs, target in data:
        mine = slice(engine.data_rank * len(inputs) // engine.dp_world_size, None)
        mine = slice(mine.start, mine.start + len(inputs) // engine.dp_world_size)
        loss = nn.functional.cross_entropy(engine(inputs[mine]), target[mine])
        engine.backward(loss)
        is_last = engine.is_gradient_accumulation_boundary()
        engine.step()
        assert engine.was_step_applied() is is_last
        if is_last:
            norms.append(engine.get_global_grad_norm())
    return norms


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def train_with_stage(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], list[float]]:
    model = network(rank)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    assert optimizer is engine.optimizer
    assert schedule is engine.lr_scheduler
    norms = run_steps(engine, batches(STEPS * ACCUMULATION))
    assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * ACCUMULATION)
    assert engine.global_samples == STEPS * engine.train_batch_size()
    return whole(engine), norms


def train_with_split_layers(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Tensor], list[float], int]:
    """Trains with layers that are split over both ranks, in two engines: the second one loads the first one's
    checkpoint. Returns also the number of weights on this rank."""
    data, half = batches(STEPS * ACCUMULATION), STEPS * ACCUMULATION // 2
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
    first = deepspeed.initialize(model=network(rank), config=config, training_data=Pairs())[0]
    assert (first.dp_world_size, first.mp_world_size, first.get_tensor_parallel_rank()) == (1, 2, rank)
    norms = run_steps(first, data[:half])
    first.save_checkpoint(folder)
    second = deepspeed.initialize(model=network(7), config=config, training_data=Pairs())[0]
    second.load_checkpoint(folder)
    norms += run_steps(second, data[half:])
    return whole(second), norms, sum(parameter.numel() for parameter in second.module.parameters())


def resume(rank: int, world_size: int, folder: Path, saved_stage: int, loaded_stage: int) -> dict[str, Tensor]:
    """Trains half of the steps with one stage, saves, and continues with another one in a new engine."""
    data, half = batches(STEPS * ACCUMULATION), STEPS * ACCUMULATION // 2
    first = deepspeed.initialize(model=network(), config={**CONFIG, "zero_optimization": {"stage": saved_stage}})[0]
    run_steps(first, data[:half])
    first.save_checkpoint(folder, client_state={"epoch": 3})
    second = deepspeed.initialize(model=network(7), config={**CONFIG, "zero_optimization": {"stage": loaded_stage}})[0]
    path, client_state = second.load_checkpoint(folder)
    assert path == str(folder / f"global_step{STEPS // 2}")
    assert client_state == {"epoch": 3}
    assert (folder / "latest").read_text() == f"global_step{STEPS // 2}"
    assert second.global_steps == STEPS // 2
    assert second.load_checkpoint(folder / "nothing") == (None, None)
    run_steps(second, data[half:])
    second.save_16bit_model(folder / "model")
    return whole(second)


def no_sync_and_boundaries(rank: int, world_size: int) -> dict[str, Tensor]:
    """Accumulates by hand: within `no_sync`, and with boundaries that the loop sets."""
    model = network()
    config = {**CONFIG, "zero_optimization": {"stage": 1}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    for number, (inputs, target) in enumerate(batches(STEPS * ACCUMULATION)):
        mine = slice(rank * MICRO, (rank + 1) * MICRO)
        is_last = number % ACCUMULATION == ACCUMULATION - 1
        engine.set_gradient_accumulation_boundary(is_last)
        if is_last:
            engine.backward(nn.functional.cross_entropy(engine(inputs[mine]), target[mine]))
            engine.step()
        else:
            with engine.no_sync():
                engine.backward(nn.functional.cross_entropy(engine(inputs[mine]), target[mine]))
    return whole(engine)


def gathered(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Returns a weight that is looked at while it is whole, and the same one after rank 1 has changed it."""
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = network()
    engine = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": 3}})[0]
    first: Any = engine.module.get_submodule("0")
    weight = first.weight
    with deepspeed.zero.GatheredParameters(weight):
        before = first.weight.detach().clone()
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1), torch.no_grad():
        if rank == 1:
            first.weight.fill_(2.0)
    run_steps(engine, batches(1))  # the shards can be trained after that
    return before, whole(engine)["0.weight"]


def mean_and_sum(rank: int, world_size: int) -> tuple[float, float]:
    """The norms of the gradient if ranks average it, and if they add it up."""
    norms = []
    for operation in ("mean", "sum"):
        config = {**CONFIG, "gradient_allreduce_op": operation, "zero_optimization": {"stage": 1}}
        engine = deepspeed.initialize(model=network(), config=config)[0]
        norms += run_steps(engine, batches(ACCUMULATION))
    return norms[0], norms[1]


def client_objects(rank: int, world_size: int) -> dict[str, Tensor]:
    """The script's own optimizer and schedule are the ones that are returned, and train the shards."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = WarmupLR(optimizer, warmup_num_steps=3, warmup_max_lr=0.02)
    config = {key: value for key, value in CONFIG.items() if key not in ("optimizer", "scheduler")}
    engine, returned, _, returned_schedule = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={**config, "zero_optimization": {"stage": 3}},
    )
    assert returned is optimizer
    assert returned_schedule is schedule
    run_steps(engine, batches(STEPS * ACCUMULATION))
    return whole(engine)


def _same(layer: nn.Module) -> nn.Module:
    return layer


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The samples of all batches, one by one."""

    def __init__(self) -> None:
        pairs = batches(STEPS * ACCUMULATION)
        self.inputs, self.target = (torch.cat(part) for part in zip(*pairs, strict=True))

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.target[index]


def pipeline(rank: int, world_size: int, stages: int) -> tuple[dict[str, Tensor], list[float], float]:
    """Trains the same layers as a pipeline. Each data rank reads its part of the batches."""
    from meshwright.compat.deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(partial(_same, layer)) for layer in network().children()]
    model = PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.cross_entropy, partition_method="uniform")
    engine = deepspeed.initialize(model=model, config=CONFIG | {"train_batch_size": 2 * MICRO * ACCUMULATION})[0]
    part = len(batches(1)[0][0]) // engine.dp_world_size
    mine = slice(engine.data_rank * part, (engine.data_rank + 1) * part)
    data = iter([(inputs[mine], target[mine]) for inputs, target in batches(STEPS * ACCUMULATION)])
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    assert engine.global_steps == STEPS
    evaluation = iter([(inputs[mine], target[mine]) for inputs, target in batches(ACCUMULATION)])
    return whole(engine), losses, float(engine.eval_batch(evaluation))
