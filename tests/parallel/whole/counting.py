"""Counts what the compiler does in a few steps: of a plain loop with `torch.compile`, and of a session."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from meshwright.plan import Plan
from meshwright.train.session import Session
from tests.parallel.compiler import compiling_with
from tests.parallel.whole.library_models import Case
from tests.train.one_process import world

STEPS = 3
_RATE = 1e-3


@dataclass
class Counted:
    """`breaks` are the graph breaks, `late_graphs` the graphs that were compiled after the first step, and `graphs`
    all of them. `is_apart`: model and loss could not be compiled as one graph. `warnings` are the texts of those that
    the steps gave."""

    breaks: int = 0
    late_graphs: int = 0
    is_apart: bool = False
    graphs: int = 0
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@contextmanager
def _counting(counted: Counted) -> Iterator[Callable[[], None]]:
    """Yields a function to be called after each step."""
    graphs: list[int] = []
    with compiling_with("eager"), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        yield lambda: graphs.append(counters["stats"]["unique_graphs"])
        counted.breaks = sum(counters["graph_break"].values())
        counted.reasons = [reason.strip().splitlines()[0] for reason in counters["graph_break"]]
    counted.graphs, counted.late_graphs = graphs[-1], graphs[-1] - graphs[0]
    counted.warnings = [str(item.message) for item in raised if "plan.compute" in str(item.message)]


def count_by_hand(case: Case, precision: str) -> Counted:
    """A loop as a user writes it: the model is compiled, and the user's loss is not."""
    torch.manual_seed(0)
    model, counted = case.model(), Counted()
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    with _counting(counted) as after_step:
        compiled = torch.compile(model)
        for _ in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = _loss_by_hand(case, compiled)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after_step()
    return counted


def _loss_by_hand(case: Case, model: Callable[..., Any]) -> Tensor:
    if case.loss is None:
        loss: Tensor = model(**case.batch).loss
        return loss
    if isinstance(case.batch, Mapping):
        inputs = {name: value for name, value in case.batch.items() if name != "labels"}
        return case.loss(model(**inputs), case.batch["labels"])
    return case.loss(model(case.batch[0]), case.batch[1])


def count_ours(case: Case, precision: str, compiled: str, chunks: int) -> Counted:
    torch.manual_seed(0)
    counted, compute = Counted(), {"compile": compiled, "loss_chunks": chunks}
    model: nn.Module = case.model()
    with _counting(counted) as after_step:
        session = Session(
            model,
            lambda parameters: torch.optim.SGD(parameters.values(), lr=_RATE),
            loss=case.loss,
            plan=Plan.model_validate({"numerics": {"precision": precision}, "compute": compute}),
            world=world(),
            sample=case.batch,
        )
        for _ in range(STEPS):
            session.step(case.batch)
            after_step()
    counted.is_apart = session.parallel.compilation.apart
    return counted
