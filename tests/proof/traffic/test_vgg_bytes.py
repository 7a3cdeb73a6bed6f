"""VGG16 with its classifier split over the replicas: what a rank sends in a step, beside plain data parallelism."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from meshwright.launch.world import World
from meshwright.plan import Axes, Modules, Plan, Split
from meshwright.train.session import Session
from meshwright.workloads.vision import vgg16
from tests.proof.counted import counting, total
from tests.ranks import run_ranks

CLASSIFIER = {"classifier.0": "column", "classifier.3": "row", "classifier.6": "column"}
BATCH = 4  # of a rank
TWICE = ("all_reduce",)  # a rank sends the others' share of it, and then its own to the others


def _plan(ranks: int, split: bool) -> Plan:
    splits = {name: Split.model_validate({"kind": kind, "axis": "replicate"}) for name, kind in CLASSIFIER.items()}
    return Plan(axes=Axes(replicate=ranks), modules=Modules(splits=splits if split else {}))


def _sent(rank: int, ranks: int) -> tuple[float, float]:
    """Bytes that this rank sends in a step, plain and with the classifier split."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * ranks, 3, 32, 32), torch.randint(1000, (BATCH * ranks,)))
    found = []
    for split in (False, True):
        session = Session(
            vgg16(),
            lambda held: torch.optim.SGD(held.values(), lr=0.01),
            loss=nn.functional.cross_entropy,
            plan=_plan(ranks, split),
            world=World(rank, rank, ranks, ranks, 0, torch.device("cpu"), None),
            sample=list(data[:2]),
        )
        batch = next(session.batches(data, 1, BATCH * ranks))
        with counting(session.parallel.mesh) as count:
            session.step(batch)
        bytes_of = total(count.exchanges)
        found.append(sum((2 if kind in TWICE else 1) * size for (_, kind), size in bytes_of.items()) * (1 - 1 / ranks))
        del session, batch
    return found[0], found[1]


LARGE = pytest.mark.skipif((os.cpu_count() or 1) < 8, reason="eight copies of VGG16 want as many cores, and 16 GiB")


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "most"), [(2, 1 / 2), pytest.param(8, 1 / 5, marks=LARGE)])
def test_a_split_classifier_spares_most_of_the_exchange(ranks: int, most: float) -> None:
    for plain, split in run_ranks(_sent, ranks, timeout_s=280):
        assert plain > 4 * 138_000_000 * 2 * (1 - 1 / ranks)
        print(f"{ranks} ranks: {plain / 1e6:.0f} MB plain, {split / 1e6:.0f} MB split: {split / plain:.3f}")
        assert 4 * 14_000_000 < split < most * plain
