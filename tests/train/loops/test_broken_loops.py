"""Loops whose own code breaks the promise that ranks train one model: weights that one rank changes, and ranks that
leave the loop after different numbers of steps."""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import meshwright as mw
from meshwright.errors import CollectiveError, InputError
from meshwright.train.loop_checks.copies import EVERY_STEPS
from meshwright.train.session import Session
from tests.forking.forked import start as start_process
from tests.ranks import RankFailure, RankPool

PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "shard": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}, "modules": {"splits": {"0": {"kind": "column"}, "2": {"kind": "row"}}}},
}

COPIES = ("replicate", "tensor")  # plans whose ranks hold copies of weights


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def new_session(plan: str | None) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mw.parallelize(
        model, optimizer, loss=F.mse_loss, plan=PLANS[plan] if plan else None, device="cpu", sample_batch=batch(0, 0)
    )


def change_weights(session: Session) -> None:
    with torch.no_grad():
        session.module.get_parameter("3.weight")[0] += 0.01


def change_rate(session: Session) -> None:
    session.optimizer.param_groups[0]["lr"] *= 0.5


def change_nothing(session: Session) -> None:
    pass


def train(rank: int, size: int, plan: str, change: Callable[[Session], None], at: int, steps: int) -> str:
    """Trains, with a change on rank 1 after step `at`. Returns the message of the error, which ends with the number of
    steps that were made."""
    session = new_session(plan)
    place = session.parallel.position.data_rank
    try:
        for step in range(steps):
            session.step(batch(step, place))
            if rank == 1 and session.steps == at:
                change(session)
        session.state_dict()
    except InputError as error:
        return f"{error} [{session.steps}]"
    return ""


@pytest.mark.parametrize("plan", COPIES)
def test_weights_that_one_rank_changes_are_named(two: RankPool, plan: str) -> None:
    for message in two.run(train, plan, change_weights, 5, 20):
        assert message.startswith("3.weight"), "the one that differs most"
        assert "of rank 1 differ from those of rank 0, at step 8: the loop or a callback" in message
        assert message.endswith("[7]"), "in the eighth step"


# ---- what is set on one rank only


def change_momentum(session: Session) -> None:
    session.optimizer.param_groups[0]["momentum"] = 0.5


def put_to_eval(session: Session) -> None:
    session.module.get_submodule("3").eval()


def freeze(session: Session) -> None:
    session.module.get_parameter("3.bias").requires_grad_(False)


def double_output(session: Session) -> None:
    session.module.get_submodule("0").register_forward_hook(lambda module, inputs, output: output * 2)


def write_to_output(session: Session) -> None:
    def double(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.mul_(2)

    session.module.get_submodule("0").register_forward_hook(double)


def drop_gradient(session: Session) -> None:
    session.module.get_parameter("3.bias").register_hook(lambda gradient: gradient * 0)


def only_look(session: Session) -> None:
    """What a callback that logs does on rank 0 only."""
    seen: list[float] = []
    session.module.get_submodule("0").register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    session.module.get_parameter("3.bias").register_hook(lambda gradient: seen.append(float(gradient.sum())))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_rate, "lr of the optimizer's group 0 is 0.1 on rank 0 and 0.05 on rank 1, at step 4: the loop"),
        (change_momentum, "momentum of the optimizer's group 0 is 0.9 on rank 0 and 0.5 on rank 1"),
        (put_to_eval, "the mode of 3 is train() on rank 0 and eval() on rank 1, at step 4"),
        (freeze, "requires_grad of 3.bias is True on rank 0 and False on rank 1"),
        (double_output, "the hook on 0 is none on rank 0 and <lambda> (/"),
        (write_to_output, "the hook on 0 is none on rank 0 and double (/"),
    ],
)
def test_what_is_set_on_one_rank_only_is_named(two: RankPool, change: Callable[[Session], None], line: str) -> None:
    for message in two.run(train, "replicate", change, 2, 20):
        assert line in message
        assert message.endswith("and the ranks train different models: make the same change on all ranks [3]")


def test_settings_are_compared_where_each_rank_has_a_part_of_the_weights(two: RankPool) -> None:
    for message in two.run(train, "shard", put_to_eval, 2, 20):
        assert "the mode of 3 is train() on rank 0 and eval() on rank 1" in message


def test_a_gradient_hook_on_one_rank_is_named(two: RankPool) -> None:
    for message in two.run(train, "replicate", drop_gradient, 2, 20):
        assert "the hook on the gradient of 3.bias is none on rank 0 and drop_gradient.<locals>.<lambda> (/" in message


@pytest.mark.parametrize("plan", ["replicate", "tensor"])
def test_hooks_that_only_look_may_be_on_one_rank(two: RankPool, plan: str) -> None:
    assert two.run(train, plan, only_look, 2, 10) == ["", ""]


def register_on_all_ranks(rank: int, size: int, plan: str) -> str:
    session = new_session(plan)
    double_output(session)
    try:
        session.step(batch(0, session.parallel.position.data_rank))
    except InputError as error:
        return str(error)
    return ""


def test_a_late_hook_that_changes_what_a_plan_divides_is_refused(two: RankPool) -> None:
    assert two.run(register_on_all_ranks, "replicate") == ["", ""]
    for message in two.run(register_on_all_ranks, "tensor"):
        assert "was registered with 0 after parallelize and changes what it is called with" in message


def look_before_training(rank: int, size: int) -> str:
    session = new_session("tensor")
    double_output(session)
    inputs, _ = batch(0, 0)
    with torch.no_grad():
        session.model(inputs)
    try:
        session.step(batch(0, 0))
    except InputError as error:
        return str(error)
    return ""


def test_a_late_hook_is_found_if_a_pass_without_gradients_comes_first(two: RankPool) -> None:
    for message in two.run(look_before_training):
        assert "was registered with 0 after parallelize" in message


class RegistersItsOwn(nn.Sequential):
    """Registers a hook that changes values in its first forward pass."""

    has_registered = False

    def forward(self, x: Any) -> Any:
        if not self.has_registered:
            self[1].register_forward_hook(lambda module, inputs, output: output * 2)
            self.has_registered = True
        return super().forward(x)


def train_with_own_hook(rank: int, size: int, plan: str | None) -> list[float]:
    torch.manual_seed(0)
    model = RegistersItsOwn(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [tuple(value.double() for value in batch(step, 0)) for step in range(3)]
    session = mw.parallelize(
        model, optimizer, loss=F.mse_loss, plan=PLANS[plan] if plan else None, device="cpu", sample_batch=batches[0]
    )
    return [float(session.step(each)) for each in batches]


def test_a_hook_that_the_forward_pass_registers_is_the_models_own(two: RankPool) -> None:
    alone = train_with_own_hook(0, 1, None)
    for losses in two.run(train_with_own_hook, "tensor"):
        assert losses == pytest.approx(alone, rel=1e-12)


def test_weights_are_compared_before_they_are_saved(two: RankPool) -> None:
    for message in two.run(train, "replicate", change_weights, 11, 11):
        assert "3.weight of rank 1 differ" in message
        assert message.endswith("[11]")


@pytest.mark.parametrize("plan", PLANS)
def test_equal_weights_stay_equal(two: RankPool, plan: str) -> None:
    assert two.run(train, plan, change_nothing, 0, EVERY_STEPS + 2) == ["", ""]


def own_loop(rank: int, size: int) -> str:
    session = new_session("replicate")
    try:
        for step in range(20):
            session.optimizer.zero_grad()
            session.backward(session.forward(batch(step, rank)))
            session.optimizer.step()
            if rank == 1 and session.steps == 3:
                change_weights(session)
    except InputError as error:
        return str(error)
    return ""


def test_loops_that_call_backward(two: RankPool) -> None:
    for message in two.run(own_loop):
        assert message.startswith("3.weight")
        assert "of rank 1 differ from those of rank 0, at step 4" in message


# ---- ranks that make different numbers of steps


class Endless(IterableDataset[Any]):
    """A stream that ends after 20 samples on rank 1."""

    def __init__(self, rank: int) -> None:
        self.samples = 20 if rank == 1 else 40

    def __iter__(self) -> Iterator[Any]:
        rows = batch(0, 0)
        return ((rows[0][0], rows[1][0]) for _ in range(self.samples))


def leave_early(rank: int, size: int, plan: str, cause: str, folder: Path) -> None:
    """Rank 1 makes 5 steps, and rank 0 waits for it in the sixth. Writes the message of rank 0."""
    session = new_session(plan)
    place = session.parallel.position.data_rank
    if cause == "stream":
        batches: Any = session.batches(Endless(rank), 1, 4)
    elif cause == "prepared stream":
        batches = session.prepare(DataLoader(Endless(rank), batch_size=4))
    else:
        batches = (batch(step, place) for step in range(10))
    try:
        for item in batches:
            if cause == "break" and rank == 1 and session.steps == 5:
                break
            session.step(item)
    except CollectiveError as error:
        (folder / str(rank)).write_text(str(error))
    del session, batches
    gc.collect()  # as at the end of a program


def message_of_rank_0(folder: Path, plan: str, cause: str) -> str:
    pool = RankPool(2, timeout_s=30)  # whose ranks are of no use afterwards
    try:
        with suppress(RankFailure):
            pool.run(leave_early, plan, cause, folder)
    finally:
        pool.close()
    return (folder / "0").read_text()


@pytest.mark.parametrize(
    ("plan", "cause"),
    [("replicate", "stream"), ("replicate", "prepared stream"), ("replicate", "break")],
)
def test_a_rank_that_leaves_early_is_named_with_its_steps(tmp_path: Path, plan: str, cause: str) -> None:
    message = message_of_rank_0(tmp_path, plan, cause)
    line = r"rank 1 has left its loop after 5 steps, and rank 0 waits for it in step 6 \(\w+\): all ranks must make"
    assert re.match(line, message), message


# ---- exit codes


def program(rank: str, store: str, cause: str) -> None:
    """A program of a user, as a rank of two."""
    torch.distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2)
    session = new_session("replicate")
    place = session.parallel.position.data_rank
    for step in range(6):
        if step == 3 and place == 1 and cause == "break":
            break
        session.step(batch(step, place))
    if cause == "save" and place == 0:
        session.state_dict()


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        ("break", "rank 1 has left its loop after 3 steps, and rank 0 waits for it in step 4"),
        ("save", "rank 1 has left its loop after 6 steps, and rank 0 waits for it in a call that all ranks must make"),
        ("nothing", ""),
    ],
)
def test_no_rank_of_a_broken_loop_ends_with_success(tmp_path: Path, cause: str, line: str) -> None:
    store = f"file://{tmp_path / 'store'}"
    processes = [start_process(f"{__name__}:program", str(rank), store, cause) for rank in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == ([1, 1] if line else [0, 0]), errors
    for error in errors:
        assert error.count(line) == 1 if line else "waits" not in error
