"""VGG16 with its classifier split over the replicas: the bytes that a rank sends in a step, compared with data
parallelism."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Modules, Split
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.workloads.vision import vgg16
from tests.proof.traffic.counter import bytes_by_collective, count_traffic
from tests.ranks import run_ranks

CLASSIFIER = {"classifier.0": "column", "classifier.3": "row", "classifier.6": "column"}
SAMPLES_PER_RANK = 4
SENT_TWICE = ("all_reduce",)  # a rank sends the others their parts of it, and then its reduced part to the others


def _plan(ranks: int, split: bool) -> Plan:
    splits = {name: Split.model_validate({"kind": kind, "axis": "replicate"}) for name, kind in CLASSIFIER.items()}
    return Plan(axes=Axes(replicate=ranks), modules=Modules(splits=splits if split else {}))


def _sent_bytes(rank: int, ranks: int) -> tuple[float, float]:
    """The bytes that this rank sends in a step with data parallelism, and with the classifier split."""
    torch.manual_seed(0)
    data = TensorDataset(
        torch.randn(SAMPLES_PER_RANK * ranks, 3, 32, 32), torch.randint(1000, (SAMPLES_PER_RANK * ranks,))
    )
    sent = []
    for split in (False, True):
        session = Session(
            vgg16(),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=0.01),
            loss=nn.functional.cross_entropy,
            plan=_plan(ranks, split),
            world=World(rank, rank, ranks, ranks, 0, torch.device("cpu"), None),
            sample=list(data[:2]),
        )
        batch = next(session.batches(data, 1, SAMPLES_PER_RANK * ranks))
        with count_traffic(session.parallel.mesh) as counter:
            session.step(batch)
        bytes_of = bytes_by_collective(counter.collectives)
        sent.append(
            sum((2 if kind in SENT_TWICE else 1) * size for (_, kind), size in bytes_of.items()) * (1 - 1 / ranks)
        )
        del session, batch
    return sent[0], sent[1]


LARGE = pytest.mark.skipif((os.cpu_count() or 1) < 8, reason="eight copies of VGG16 need as many cores, and 16 GiB")


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "most"), [(2, 1 / 2), pytest.param(8, 1 / 5, marks=LARGE)])
def test_a_split_classifier_saves_most_of_the_communication(ranks: int, most: float) -> None:
    for plain, split in run_ranks(_sent_bytes, ranks, timeout_s=280):
        assert plain > 4 * 138_000_000 * 2 * (1 - 1 / ranks)
        print(f"{ranks} ranks: {plain / 1e6:.0f} MB plain, {split / 1e6:.0f} MB split: {split / plain:.3f}")
        assert 4 * 14_000_000 < split < most * plain
