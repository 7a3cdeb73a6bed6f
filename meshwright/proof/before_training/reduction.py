"""`Reduction`: how a training is made small for its check, so that seconds are enough: fewer of the blocks that are
equal, shorter sequences and smaller images, few samples."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from meshwright.blocks.module_names import is_inside
from meshwright.plan import Plan
from meshwright.profile.equal_blocks import EqualBlocks, find_equal_blocks
from meshwright.profile.fake import batch_size
from meshwright.proof.before_training.training import Training
from meshwright.proof.before_training.vocabulary import narrow_tokens, narrow_vocabulary
from meshwright.proof.before_training.widths import narrow_shape, narrow_widths
from meshwright.proof.torch_private import tree_map
from meshwright.train.step.optimizer import rebuild_optimizer


@dataclass(frozen=True)
class Reduction:
    """What a check leaves out. `removed` are the names of blocks that the model is checked without. `lengths` maps the
    sizes of dimensions of the batch to smaller ones, `vocabularies` those of vocabularies, and `widths` those of wide
    layers. `dtype` is the precision of the comparison."""

    removed: tuple[str, ...] = ()
    lengths: Mapping[int, int] = field(default_factory=dict)
    dtype: str = "fp64"
    vocabularies: Mapping[int, int] = field(default_factory=dict)
    widths: Mapping[int, int] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The reduction as plain values, to send it to other ranks."""
        return {
            "removed": list(self.removed),
            "lengths": [list(item) for item in self.lengths.items()],
            "dtype": self.dtype,
            "vocabularies": [list(item) for item in self.vocabularies.items()],
            "widths": [list(item) for item in self.widths.items()],
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Reduction":
        sizes = [dict(values[name]) for name in ("lengths", "vocabularies", "widths")]
        return cls(tuple(values["removed"]), sizes[0], values["dtype"], *sizes[1:])


def series_of(model: nn.Module, removed: tuple[str, ...]) -> tuple[EqualBlocks, ...]:
    """The series of equal blocks of which some are removed."""
    return tuple(series for series in find_equal_blocks(model) if set(series.blocks) & set(removed))


def removable_blocks(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """The names of blocks that a check can do without: of each series of equal blocks all but the first, the last and
    those in or after which the plan cuts the model."""
    return tuple(
        name
        for series in find_equal_blocks(model)
        for name in series.blocks[1:-1]
        if not any(is_inside(cut, name) for cut in plan.pipeline.cuts)
    )


def reduced_training(training: Training, reduction: Reduction) -> Training:
    """Returns a training of its own, whose model has weights and lacks the removed blocks. Nothing of the given
    training is changed."""
    names = renamed_modules(training.model, reduction.removed)
    if training.build is None:
        dropped = {id(training.model.get_submodule(name)): nn.Identity() for name in reduction.removed}
        model = deepcopy(training.model, dict(dropped))
    else:
        model = training.build(reduction.removed)
    remove_blocks(model, series_of(training.model, reduction.removed), reduction.removed)
    narrow_vocabulary(model, reduction.vocabularies)
    narrow_widths(model, reduction.widths)
    for parameter in model.parameters():
        parameter.grad = None
    template_names = {id(p): renamed(name, names) for name, p in training.model.named_parameters()}
    # A template of its own: the given optimizer holds the parameters of the given model.
    optimizer = rebuild_optimizer(training.optimizer, template_names, dict(model.named_parameters()))
    batch = narrow_tokens(shortened(training.sample_batch, reduction.lengths), reduction.vocabularies)
    return replace(training, model=model, optimizer=optimizer, sample_batch=batch, build=None)


def remove_blocks(model: nn.Module, series: tuple[EqualBlocks, ...], removed: tuple[str, ...]) -> None:
    """Removes blocks from the model, in place. Children whose names are numbers are renumbered."""
    for blocks in series:
        container = model.get_submodule(blocks.container)
        prefix = f"{blocks.container}." if blocks.container else ""
        children = [(key, child) for key, child in container._modules.items() if f"{prefix}{key}" not in removed]
        is_numbered = all(key.isdigit() for key, _ in children)
        container._modules.clear()
        for number, (key, child) in enumerate(children):
            container._modules[str(number) if is_numbered else key] = child


def renamed_modules(model: nn.Module, removed: tuple[str, ...]) -> dict[str, str]:
    """Returns, by the name of each block of a series that loses some, its name afterwards; empty for removed ones."""
    names: dict[str, str] = {}
    for series in series_of(model, removed):
        container = model.get_submodule(series.container)
        prefix = f"{series.container}." if series.container else ""
        children = list(container._modules)
        kept = [key for key in children if f"{prefix}{key}" not in removed]
        is_numbered = all(key.isdigit() for key in kept)
        names |= {f"{prefix}{key}": "" for key in children}
        names |= {f"{prefix}{key}": f"{prefix}{number if is_numbered else key}" for number, key in enumerate(kept)}
    return names


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Returns the name of a module or parameter in the reduced model; empty if it is not there."""
    for old, new in names.items():
        if is_inside(name, old):
            return new + name[len(old) :] if new else ""
    return name


def reduced_plan(plan: Plan, model: nn.Module, reduction: Reduction) -> Plan:
    """Returns the plan for the reduced model: its cuts, splits and branches name the same modules."""
    names = renamed_modules(model, reduction.removed)
    if not any(old != new for old, new in names.items()):
        return plan
    cuts = tuple(renamed(cut, names) for cut in plan.pipeline.cuts)
    splits = {renamed(name, names): split for name, split in plan.modules.splits.items()}
    branches = {renamed(name, names): rank for name, rank in plan.modules.branches.items()}
    for entries in (splits, branches):
        entries.pop("", None)
    modules = plan.modules.model_copy(update={"splits": splits, "branches": branches})
    return plan.model_copy(
        update={"modules": modules, "pipeline": plan.pipeline.model_copy(update={"cuts": cuts})},
    )


def shortened(batch: Any, lengths: Mapping[int, int]) -> Any:
    """Returns the batch with dimensions of these sizes cut to the smaller ones. The dimension of samples stays."""
    samples = batch_size(batch)

    def shorten(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        first = 1 if value.dim() and value.shape[0] == samples else 0
        for dim in range(first, value.dim()):
            if (size := lengths.get(value.shape[dim])) is not None:
                value = value.narrow(dim, 0, size)
        return value

    return tree_map(shorten, batch) if lengths else batch


def parameter_count(model: nn.Module, reduction: Reduction | None = None) -> int:
    """The number of weights of the model, made small."""
    item = reduction or Reduction()
    skipped = {id(p) for name in item.removed for p in model.get_submodule(name).parameters()}

    def count(parameter: nn.Parameter) -> int:
        rows, *columns = parameter.shape or (1,)
        rows = item.vocabularies.get(rows, rows) if parameter.dim() == 2 else rows
        return prod(narrow_shape((rows, *columns), item.widths))

    return sum(count(p) for p in model.parameters() if id(p) not in skipped)


def longest_sizes(batch: Any, longer_than: int) -> list[int]:
    """The sizes above `longer_than` of the dimensions of a batch other than that of samples, largest first."""
    samples = batch_size(batch)
    sizes: set[int] = set()

    def note(value: Any) -> None:
        if isinstance(value, Tensor):
            first = 1 if value.dim() and value.shape[0] == samples else 0
            sizes.update(size for size in value.shape[first:] if size > longer_than)

    tree_map(note, batch)
    return sorted(sizes, reverse=True)
