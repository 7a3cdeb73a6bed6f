"""A run that is saved under one plan and continued under another is the undisturbed run: its losses, weights, moments
of Adam, learning rate and loss scale are those of a run that was never interrupted, within the tolerance of `prove`,
and bit by bit if the plan is the same.

The checkpoint is taken in the middle of an epoch and between two changes of the loss scale, and the five steps after it
cross the end of the epoch with its short last batch. Each test saves under one plan, and continues under all.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.checkpoint.chunks import chunks_of
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.reader import open_checkpoint, plan_transfers, transfer
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.proof.compare.errors import layer_scales, scaled_error
from meshwright.proof.compare.tolerance import count_reductions
from meshwright.proof.run_comparison import RunTolerance
from meshwright.train.session import Session
from meshwright.user.job_sections import LossScaleSettings
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.zoo import BATCH, ZOO, Attention, RandomSamples

SAVED_AT, CONTINUED = 4, 5  # steps; an epoch has three
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, accumulation": {"memory": {"accumulation": 3}},
    "replicate": {"axes": {"replicate": 2}},
    "replicate, accumulation": {"axes": {"replicate": 2}, "memory": {"accumulation": 2}},
    "shard optimizer": {"axes": {"shard": 2}, "memory": {"sharding": "optimizer"}},
    "shard gradients": {"axes": {"shard": 2}, "memory": {"sharding": "gradients", "accumulation": 2}},
    "shard parameters": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}, "modules": {"sequence": True, "loss": True}},
    "pipeline 1f1b": {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 2, "cuts": ["blocks.1"]}},
    "pipeline interleaved": {
        "axes": {"pipeline": 2},
        "pipeline": {
            "schedule": "interleaved_1f1b",
            "microbatches": 2,
            "cuts": ["blocks.0", "blocks.1", "blocks.2"],
        },
    },
    "pipeline zbv": {
        "axes": {"pipeline": 2},
        "pipeline": {"schedule": "zbv", "microbatches": 2, "cuts": ["blocks.0", "blocks.1", "blocks.2"]},
    },
    "replicate × tensor": {"axes": {"replicate": 2, "tensor": 2}, "memory": {"accumulation": 2}},
    "shard × pipeline": {
        "axes": {"shard": 2, "pipeline": 2},
        "pipeline": {"microbatches": 2, "cuts": ["blocks.1"]},
    },
}
# fp64 shows what summation order alone does. fp16 has a loss scale, which grows in steps 3, 6 and 9.
PRECISIONS = ("fp64", "bf16", "fp16")
LOSS_SCALE = LossScaleSettings(start=2.0**8, interval=3)
# Each layout once as the one that saves and once as the one that continues, and one continued under itself.
COVERING: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("fp16", "replicate, accumulation", ("shard parameters", "one rank, accumulation", "replicate, accumulation")),
    ("bf16", "tensor", ("pipeline zbv", "tensor")),
)


def plan_of(layout: str, precision: str) -> Plan:
    numerics = {"numerics": {"precision": "fp32" if precision == "fp64" else precision}}
    return Plan.model_validate({**LAYOUTS[layout], **numerics})


def a_model(precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = ZOO["gpt"].model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # under another plan, it drops other numbers
            module.p = 0.0
        if isinstance(module, Attention):
            # Softmax does not depend on the bias of keys. Its gradient is what rounding leaves, and Adam makes whole
            # steps of it.
            module.qkv = nn.Linear(module.qkv.in_features, module.qkv.out_features, bias=False)
    return model.double() if precision == "fp64" else model


def a_session(rank: int, size: int, layout: str, precision: str) -> Session:
    return Session(
        a_model(precision),
        lambda parameters: torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.1),
        loss=ZOO["gpt"].loss,
        plan=plan_of(layout, precision),
        world=World(rank, rank, size, size, 0, torch.device("cpu"), None),
        make_schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12),
        clip_norm=0.5,
        loss_scale=LOSS_SCALE,
        seed=3,
        sample=torch.utils.data.default_collate([RandomSamples("tokens")[i] for i in range(2)]),
    )


def take_steps(session: Session, steps: int) -> list[float]:
    batches = session.batches(RandomSamples("tokens"), global_batch=BATCH)
    return [float(session.step(batch)) for _, batch in zip(range(steps), batches, strict=False)]


def undisturbed(rank: int, size: int, layout: str, precision: str, folder: Path) -> list[float]:
    """Saves in the middle and at the end. Returns the losses of the steps between."""
    session = a_session(rank, size, layout, precision)
    take_steps(session, SAVED_AT)
    assert session.position == (1, 1), "in the middle of the second epoch"
    session.save(folder / "middle")
    losses = take_steps(session, CONTINUED)
    session.save(folder / "end")
    return losses


def continued(rank: int, size: int, layout: str, precision: str, folder: Path, end: Path) -> list[float]:
    session = a_session(rank, size, layout, precision)
    session.load(folder / "middle")
    losses = take_steps(session, CONTINUED)
    session.save(end)
    return losses


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All whole tensors of a checkpoint, and its objects and position. The order of parameters is that of stages."""
    manifest = read_manifest(path)
    with open_checkpoint(path, manifest) as reader:
        tensors = {key: torch.empty(saved.shape, dtype=saved.torch_dtype) for key, saved in reader.tensors.items()}
        for key, tensor in tensors.items():
            for part in plan_transfers(reader, key, chunks_of(tensor)):
                transfer(reader, part)
        groups = [{**group, "names": sorted(group["names"])} for group in reader.objects["optimizer_groups"]]
        return tensors, {**reader.objects, "optimizer_groups": groups, "about": manifest.about}


def tolerance_of(precision: str) -> RunTolerance:
    """The tolerance of `prove` between two runs, of which neither is the exact one."""
    model, data = a_model(precision), RandomSamples("tokens")
    with count_reductions(model) as counter:
        model(torch.stack([data[i][0] for i in range(BATCH)]))
    dtype = {"fp64": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return RunTolerance(counter.tolerance(1, torch.float64 if dtype is None else torch.float32), dtype)


def assert_within(tolerance: float, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    scales = layer_scales(expected)
    errors = {key: scaled_error(actual[key], value, scales[key]) for key, value in expected.items()}
    assert {key: error for key, error in errors.items() if not error <= tolerance} == {}


class Runs:
    """Runs functions on as many ranks as a layout has."""

    def __init__(self, two: RankPool, four: RankPool) -> None:
        self._pools = {2: two, 4: four}

    def run(self, function: Any, layout: str, *args: Any) -> list[Any]:
        ranks = plan_of(layout, "fp64").world_size
        return self._pools[ranks].run(function, layout, *args) if ranks > 1 else [function(0, 1, layout, *args)]


@pytest.fixture(scope="module")
def runs(two: RankPool, four: RankPool) -> Runs:
    return Runs(two, four)


def check(runs: Runs, folder: Path, precision: str, saved: str, others: tuple[str, ...]) -> None:
    expected_losses = runs.run(undisturbed, saved, precision, folder)[0]
    expected, expected_objects = contents(folder / "end")
    before, objects_before = contents(folder / "middle")
    assert (objects_before["loss_scale"] is None) == (precision != "fp16")
    assert objects_before["loss_scale"] != expected_objects["loss_scale"] or precision != "fp16"
    assert any(not torch.equal(before[key], value) for key, value in expected.items())
    tolerance = tolerance_of(precision).with_drift(0.0)
    for layout in others:
        end = folder / layout
        losses = runs.run(continued, layout, precision, folder, end)[0]
        actual, objects = contents(end)
        assert objects == expected_objects, layout
        if layout == saved:
            assert losses == expected_losses
            assert all(torch.equal(actual[key], value) for key, value in expected.items())
        else:
            assert losses == pytest.approx(expected_losses, rel=tolerance), layout
            assert_within(tolerance, actual, expected)


@pytest.mark.parametrize(("precision", "saved", "others"), all_but(COVERING[:1], COVERING), ids=str)
def test_another_plan_continues_the_run(
    runs: Runs, tmp_path: Path, precision: str, saved: str, others: tuple[str, ...]
) -> None:
    check(runs, tmp_path, precision, saved, others)


@pytest.mark.soak
@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_plan_continues_the_run_of_every_other(runs: Runs, tmp_path: Path, precision: str, saved: str) -> None:
    check(runs, tmp_path, precision, saved, tuple(LAYOUTS))
