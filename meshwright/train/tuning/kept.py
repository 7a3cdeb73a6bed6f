"""Keeps which variant was the fastest in the user's cache folder, for the next start with the same model, shapes, plan,
device, ranks and versions."""

import hashlib
import inspect
import json
import platform
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from meshwright.errors import StorageError
from meshwright.files.cache import cache_folder
from meshwright.files.storage import write_atomically, writing
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Compute
from meshwright.train.step.batch import tensors_in
from meshwright.version import VERSION

_PACKAGE = Path(__file__).parents[2]
# The folders and files whose code decides how a step runs and how it is timed.
_OF_THE_STEP = ("blocks", "collectives", "parallel", "profile/grouped_products.py", "train")
_MORE_BUDGET = 2.0  # the budget of a run depends on predictions, which differ a little from one start to the next


@dataclass(frozen=True)
class KeptChoice:
    """The `compute` fields that were the fastest, the line that said so, and the budget within which they were found;
    None if a larger one would have shown nothing more."""

    compute: Compute
    line: str
    budget_s: float | None


def choice_file(plan: Plan, model: nn.Module, batch: Any, others: Mapping[str, Any]) -> Path:
    """Returns the file that keeps which `compute` fields were the fastest for a plan and a model. Its name depends on
    the model's code, modules and weights' shapes, on the shapes of a batch, on the plan without its `compute` fields
    (except `threads`, which is not tuned), on versions, and on `others`, which are plain values."""
    untuned = plan.model_dump(mode="json", exclude={"compute": set(Compute.model_fields) - {"threads"}})
    tensors = (*model.named_parameters(), *model.named_buffers())
    parts = {
        "model": [str(model), sorted({_code_digest(type(module)) for module in model.modules()})],
        "weights": [[name, str(t.dtype), list(t.shape), t.requires_grad] for name, t in tensors],
        "batch": [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors_in(batch)],
        "plan": untuned,
        "others": dict(others),
        "versions": [torch.__version__, platform.python_version(), VERSION, step_digest()],
    }
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "tuning" / f"{name}.json"


def load_choice(file: Path, budget_s: float) -> KeptChoice | None:
    """Returns the kept choice; None if there is none, if the file is damaged, or if this budget is so much
    larger that more can be measured."""
    try:
        raw = json.loads(file.read_text())
        kept_budget_s = None if raw["budget_s"] is None else float(raw["budget_s"])
        choice = KeptChoice(Compute.model_validate(raw["compute"]), str(raw["line"]), kept_budget_s)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    is_enough = choice.budget_s is None or budget_s <= _MORE_BUDGET * choice.budget_s
    return choice if is_enough else None


def save_choice(file: Path, choice: KeptChoice) -> None:
    """Writes the choice. If the cache folder cannot take it, a warning says so."""
    values = {"compute": choice.compute.model_dump(mode="json"), "line": choice.line, "budget_s": choice.budget_s}
    try:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(values))
    except StorageError as error:
        warnings.warn(f"{error}; until then the steps are timed at every start", stacklevel=2)


def code_of(value: Any) -> str:
    """Returns a digest of the code of a function, class or object, such as a loss; of an object with its attributes if
    it is a module."""
    if isinstance(value, nn.Module):
        return f"{value} {_code_digest(type(value))}"
    is_code = inspect.isroutine(value) or inspect.isclass(value)
    return _code_digest(value if is_code else type(value))


@cache
def step_digest() -> str:
    """The digest of the files of this package that decide how a step runs."""
    digest = hashlib.sha256()
    for place in _OF_THE_STEP:
        path = _PACKAGE / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(_PACKAGE).as_posix().encode())
            digest.update(file.read_bytes() if file.exists() else b"")
    return digest.hexdigest()


def _code_digest(value: Any) -> str:
    """The name of a function or class, and the digest of the file that it was defined in; or, without a file, as in a
    notebook, of its functions."""
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if name.startswith("torch."):
        return name  # the version of torch says more
    try:
        content = Path(inspect.getsourcefile(value) or "").read_bytes()
    except (OSError, TypeError):
        content = "\n".join(_code_texts(value)).encode()
    return f"{name} {hashlib.sha256(content).hexdigest()}"


def _code_texts(value: Any) -> Iterator[str]:
    functions = [value, *vars(value).values()] if inspect.isclass(value) else [value]
    for function in functions:
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield from _texts_of_code(code)


def _texts_of_code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts_of_code(constant)
        else:
            yield repr(constant)
