"""`mw.record`: records the training in a `with` block, as `meshwright audit` records a command from outside."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwright.audit.from_python.with_block import in_audit, is_recording, recording, watch_libraries
from meshwright.audit.recorder.layouts import hold_model
from meshwright.audit.recorder.recorder import Recorder
from meshwright.audit.recorder.settings import Settings
from meshwright.audit.recorder.whole import read_ranks
from meshwright.audit.rounding import eps_of, perturbation
from meshwright.errors import InputError

_WAIT_S = 60.0
_TIMES: dict[str, int] = {}  # how often this process has asked for a folder of this name


@contextmanager
def record(
    folder: str | Path,
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 3,
    reference: str | Path | None = None,
    rounding: bool = False,
    dropout: bool = False,
) -> Iterator[None]:
    """Records what a `with` block trains into a folder, which `mw.compare` compares with another one: the model's
    weights at the start, and for the first `steps` steps of the optimizer every gradient, norm, buffer and weight. It
    is for what `meshwright audit` cannot see from outside: loops of your own, notebooks, models in other objects.

    `optimizer` may be a list of several. Under a process group, every rank records its own part; all call this. The
    folder must be empty. With the folder of another record as `reference`, the model starts from the weights that that
    one started from; with `rounding`, from those changed by one rounding, which shows how much rounding may change
    (`noise` of `mw.compare`). Dropout is off in the block unless `dropout`.

    What a block computes is not changed otherwise, and everything is as before when it ends. It is recorded up to where
    it fails if it does. Inside of `meshwright audit`, which records the process already, this only names the model.

    >>> import tempfile, torch, meshwright as mw
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> folder = tempfile.mkdtemp()
    >>> with mw.record(folder, model, optimizer, steps=2):
    ...     for _ in range(2):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(3, 4)).mean().backward()
    ...         optimizer.step()
    >>> mw.compare(folder, folder).equal
    True
    """
    with record_with(folder, _settings(steps, reference, rounding, dropout), model, optimizer):
        yield


@contextmanager
def record_with(folder: str | Path, settings: Settings, model: nn.Module, optimizer: Any) -> Iterator[None]:
    """As `record`, with any settings of a recorder."""
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    _check_model(model, optimizers)
    outer = in_audit()
    if outer is not None:
        if not outer.started:
            outer.begin([model])
        yield
        return
    _check_optimizers(model, optimizers)
    _prepare(Path(folder), settings)
    own = Recorder(Path(folder), ends_process=False)
    with recording(own, model, optimizers):
        yield


def _check_model(model: object, optimizers: list[Any]) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"mw.record: the model is a {type(model).__name__}: give a torch.nn.Module")
    for optimizer in optimizers:
        if not isinstance(getattr(optimizer, "param_groups", None), Iterable):
            raise InputError(f"mw.record: {type(optimizer).__name__} has no param_groups: give the model's optimizer")


def _check_optimizers(model: nn.Module, optimizers: list[Any]) -> None:
    if is_recording():
        raise InputError("mw.record: another record is being made: leave its with block first")
    watch_libraries()
    parameters, _ = hold_model([model])
    own = {identity for held in parameters.values() for identity in held.ids}
    for optimizer in optimizers:
        stepped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if own.isdisjoint(stepped):
            raise InputError(
                f"mw.record: none of the {len(stepped)} parameters of {type(optimizer).__name__} is one of the model's:"
                " make it from model.parameters(), after the model was wrapped or moved"
            )


def _settings(steps: int, reference: str | Path | None, rounding: bool, dropout: bool) -> Settings:
    if steps < 1:
        raise InputError(f"mw.record: steps={steps}: take at least one")
    if reference is None:
        if rounding:
            raise InputError("mw.record: rounding=True changes the weights of another record: name it by reference=")
        return Settings(steps=steps, start="own", keep_dropout=dropout)
    ranks = read_ranks(Path(reference))
    if not ranks:
        raise InputError(f"mw.record: reference={reference}: there is no record in this folder")
    eps = eps_of({dtype for rank in ranks for dtype in rank.header["dtypes"]})
    size = perturbation(eps) if rounding else 0.0
    place = str(Path(reference).resolve())
    return Settings(steps=steps, start="reference", reference=place, perturb=size, keep_dropout=dropout)


def _prepare(folder: Path, settings: Settings) -> None:
    """Writes the settings into the folder, which has to be empty. The first rank does it for all, and tells them by the
    store of the process group, which no device is needed for."""
    if not (dist.is_available() and dist.is_initialized()):
        _make(folder, settings)
        return
    store = dist.distributed_c10d._get_default_store()
    times = _TIMES[folder.name] = _TIMES.get(folder.name, 0) + 1
    key = f"meshwright-record-{folder.name}-{times}"
    if dist.get_rank() == 0:
        try:
            _make(folder, settings)
        except InputError as error:
            store.set(key, str(error))
            raise
        store.set(key, "")
        return
    try:
        store.wait([key], timedelta(seconds=_WAIT_S))
    except RuntimeError:
        raise InputError(f"mw.record: rank 0 did not record within {_WAIT_S:g} s: every rank has to") from None
    problem = store.get(key).decode()
    if problem:
        raise InputError(problem)


def _make(folder: Path, settings: Settings) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"mw.record: {folder} is not empty: give each record a folder of its own")
    settings.write(folder)
