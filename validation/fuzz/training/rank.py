"""Trains a case under its plan, as one of several ranks."""

import gc
import json
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.before_training.mixing.check import check_mixing
from meshwright.proof.before_training.training import Training
from meshwright.train.parallelize import parallelize
from meshwright.train.session import Session
from validation.fuzz.losses import LOSSES
from validation.fuzz.program import Case
from validation.fuzz.training.data import Batch, batches
from validation.fuzz.training.faults import plant
from validation.fuzz.training.optimizers import OPTIMIZERS
from validation.fuzz.training.plain import build, halves

_COLLECT_EVERY = 20  # cases between collections of cyclic garbage, which sessions are part of
_cases_run = 0


@dataclass(frozen=True)
class RankResult:
    """What a rank has to say: `trained` with losses and weights (as lists and arrays), or `refused` with the message,
    where `when` is `parallelize` or the number of the step."""

    outcome: str
    losses: tuple[float, ...] = ()
    state: Any = None
    message: str = ""
    when: str = ""


def run_case(rank: int, world_size: int, values: dict[str, Any], folder: str, fault: str | None) -> RankResult:
    """Trains the case and returns the result. Other exceptions than refusals are raised, and also written to a file of
    the folder, since a rank that waits for this one may be the first to be seen."""
    global _cases_run
    _cases_run += 1
    if _cases_run % _COLLECT_EVERY == 0:
        gc.collect()
    case = Case.from_json(values)
    warnings.simplefilter("ignore")
    when = "parallelize"
    try:
        with plant(fault) if fault else nullcontext():
            session, plan = _session(case, rank, Path(folder))
            losses = []
            for number, loss in enumerate(_losses(case, session, plan)):
                when = f"step {number + 1}"
                losses.append(loss)
            state = {name: value.detach().clone().numpy() for name, value in session.state_dict().items()}
        return RankResult("trained", tuple(losses), state)
    except InputError as error:
        result = RankResult("refused", message=str(error), when=when)
        (Path(folder) / f"refused_{rank}.json").write_text(json.dumps([when, str(error)]))
        return result
    except BaseException:
        (Path(folder) / f"crash_{rank}.txt").write_text(f"{when}\n{traceback.format_exc()}")
        raise


def _session(case: Case, rank: int, folder: Path) -> tuple[Session, Plan]:
    model, source = build(case, folder / f"program_{rank}.py")
    plan = Plan.model_validate(case.plan)
    optimizer, sample = OPTIMIZERS[case.optimizer](model), tuple(part[:4] for part in batches(case)[0])
    loss = None if LOSSES[case.loss].is_own else source.loss
    training = Training(model, optimizer, loss, sample, None, case.clip_norm)
    session = parallelize(
        model,
        optimizer,
        loss=loss,
        plan=plan,
        clip_norm=case.clip_norm,
        sample_batch=sample,
        device="cpu",
        # Of what users' sessions check, only what no rule can see: the others would hide a wrong rule.
        check_plan=lambda plan, world: check_mixing(training, plan, "check=False", world, world.device),
    )
    return session, plan


def _losses(case: Case, session: Session, plan: Plan) -> Any:
    """Makes the steps, and yields the loss of each."""
    if case.door == "prepare":
        for batch in session.prepare(DataLoader(_Samples(case), batch_size=case.batch)):
            yield session.step(batch).item()
        return
    for batch in batches(case):
        if case.door == "share":
            yield session.step(_share(batch, session, plan)).item()
        else:
            yield _own_step(case, session, plan, batch)


def _own_step(case: Case, session: Session, plan: Plan, batch: Batch) -> float:
    """A step of a loop that calls backward itself, once or twice."""
    passes = halves(batch) if case.door == "two passes" else [batch]
    session.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for number, part in enumerate(passes):
        is_last = number == len(passes) - 1
        with nullcontext() if is_last else session.no_sync():
            loss = session.forward(_share(part, session, plan))
            session.backward(loss / len(passes))
        total += loss.item() / len(passes)
    if case.clip_norm is not None:
        session.clip_gradients(case.clip_norm)
    session.optimizer.step()
    return total


def _share(batch: Batch, session: Session, plan: Plan) -> Batch:
    """This rank's samples of a global batch."""
    sizes = plan.share_sizes(len(batch[0]))
    data_rank = session.parallel.position.data_rank
    start = sum(sizes[:data_rank])
    return tuple(part[start : start + sizes[data_rank]] for part in batch)  # type: ignore[return-value]


class _Samples(Dataset[Batch]):
    """The samples of all global batches, one after the other."""

    def __init__(self, case: Case) -> None:
        parts = list(zip(*batches(case), strict=True))
        self.inputs, self.targets = (torch.cat(list(part)) for part in parts)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.targets[index]
