"""The modules of a model as a tree of plain values, with what a plan does to each of them. `model_tree.py` draws it.

labels     what a plan does to a module's own weights: replicated, sharded, split, on a stage, ...       _Placement
           A label that holds for all weights inside a module is stated once, at that module             _pull_up
exchanges  what ranks send each other before or after the module                                         _exchanges
folding    consecutive children that are equal in weights, labels and exchanges are one node             _fold
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import nn

from meshwright.blocks.module_names import is_inside
from meshwright.plan import Plan
from meshwright.profile.values import ModelProfile
from meshwright.simulator.tensor.split_profile import split_shares
from meshwright.simulator.tensor.standalone_splits import with_standalone_splits

MOST_NODES = 2000  # of a drawn tree; further modules are counted in their parent
_SPLIT_WORDS = {"column": "columns", "row": "rows", "heads": "heads", "vocabulary": "vocabulary"}

Label = tuple[str, str]  # the kind, which decides the colour, and the words


@dataclass
class ModuleNode:
    """A module, or `copies` equal ones next to each other. `parameters` and `bytes` are those of one of them, with all
    modules inside; a tied weight is counted where it is used first. `hidden` is the number of modules inside that are
    left out."""

    name: str
    class_name: str
    parameters: int = 0
    bytes: int = 0
    copies: int = 1
    labels: list[Label] = field(default_factory=list)
    exchanges: list[str] = field(default_factory=list)
    children: list["ModuleNode"] = field(default_factory=list)
    hidden: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; empty fields are left out."""
        raw = {
            "name": self.name,
            "class": self.class_name,
            "parameters": self.parameters,
            "bytes": self.bytes,
            "copies": self.copies if self.copies > 1 else None,
            "labels": [list(label) for label in self.labels],
            "exchanges": self.exchanges,
            "children": [child.to_dict() for child in self.children],
            "hidden": self.hidden,
        }
        return {key: value for key, value in raw.items() if value or key in ("parameters", "bytes")}


def plan_on_modules(
    model: nn.Module, plan: Plan, profile: ModelProfile | None = None, name: str = ""
) -> dict[str, Any]:
    """Returns the tree of the model's modules under a plan, as plain values. The model may be on the meta device.
    Without a profile, only the splits that the plan names are known, and stages follow the order in which the modules
    are defined."""
    placement = _Placement(plan, profile, tuple(module_name for module_name, _ in model.named_modules()))
    root = _node(model, "", name or type(model).__name__, placement, set())
    root.exchanges = [*_gradient_exchanges(plan), *root.exchanges]
    _pull_up(root)
    _limit([root], MOST_NODES)
    return root.to_dict()


@dataclass
class _Placement:
    """Says what the plan does to each module, by name."""

    plan: Plan
    profile: ModelProfile | None
    modules: tuple[str, ...]

    def __post_init__(self) -> None:
        self.splits = dict(_splits(self.plan, self.profile))
        self.stages = _stages(self.plan, self.profile, self.modules)
        self.blocks = self.profile.blocks if self.profile is not None else ()

    def labels(self, module: str, is_frozen: bool) -> list[Label]:
        """The labels of a module's own weights."""
        axes, memory = self.plan.axes, self.plan.memory
        labels: list[Label] = []
        stage = self.stage(module)
        if stage is not None:
            labels.append(("stage", f"stage {stage}"))
        copies, split = axes.replicate, self.splits.get(module)
        branch = next((rank for name, rank in self.plan.modules.branches.items() if is_inside(module, name)), None)
        if split is not None:
            words = _SPLIT_WORDS.get(split.kind, split.kind)
            labels.append(("split", f"{words} split over {split.ranks} ranks"))
            copies = 1 if split.axis == "replicate" else copies
        elif branch is not None:
            labels.append(("branch", f"on tensor rank {branch}"))
        else:
            copies *= axes.tensor
        if axes.shard > 1:
            what = {"parameters": "sharded", "gradients": "gradients sharded", "optimizer": "optimizer state sharded"}
            labels.append(("sharded", f"{what[memory.sharding]} over {axes.shard} ranks"))
        if copies > 1:
            labels.append(("replicated", f"replicated on {copies} ranks"))
        if memory.recompute != "none" and any(is_inside(module, block) for block in self.blocks):
            labels.append(("recompute", f"{memory.recompute} recomputation"))
        if is_frozen:
            labels.append(("frozen", "frozen"))
        return labels

    def stage(self, module: str) -> int | None:
        """The stage of a module: that of the closest enclosing module that has one."""
        name = module
        while name not in self.stages:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return self.stages[name]

    def exchanges(self, module: str) -> list[str]:
        return list(_exchanges(module, self))


@dataclass(frozen=True)
class _ModuleSplit:
    """How a module's weights are split. `enters`: the module is the first of the layers that are split together.
    `after`: the collective that follows it in the forward pass if values between layers are whole; empty for none."""

    kind: str
    axis: str
    ranks: int
    enters: bool
    after: str


def _splits(plan: Plan, profile: ModelProfile | None) -> Iterator[tuple[str, _ModuleSplit]]:
    if profile is None or profile.structure is None:
        for name, split in plan.modules.splits.items():
            ranks = getattr(plan.axes, split.axis)
            if split.kind != "none" and ranks > 1:
                after = "" if split.kind == "column" else "all_reduce"
                yield name, _ModuleSplit(split.kind, split.axis, ranks, split.kind == "column", after)
        return
    structure = with_standalone_splits(profile, plan).structure
    assert structure is not None
    shares = split_shares(profile, plan)
    for group in structure.splits:
        if (share := shares.get(group.name)) is not None:
            first = next((member.module for member in group.splits if member.kind in ("column", "heads")), None)
            for member in group.splits:
                enters = member.module == first
                yield (
                    member.module,
                    _ModuleSplit(member.kind, share.axis, share.ranks, enters, member.communication),
                )


def _stages(plan: Plan, profile: ModelProfile | None, modules: tuple[str, ...]) -> Mapping[str, int]:
    """The stage of every piece of the model, by the name of its module; empty without a pipeline."""
    if plan.axes.pipeline == 1 or not plan.pipeline.cuts:
        return {}
    has_pieces = profile is not None and profile.structure is not None and profile.structure.pieces
    pieces = profile.structure.pieces if has_pieces else modules  # type: ignore[union-attr]
    ends, stage, stages = set(plan.pipeline.cuts), 0, {}
    ended = ""
    for piece in pieces:
        if ended and not is_inside(piece, ended):  # without a structure, the modules inside of a cut come after it
            stage, ended = stage + 1, ""
        contains_cut = any(cut != piece and is_inside(cut, piece) for cut in ends)
        if piece and not contains_cut:
            stages[piece] = stage
        ended = piece if piece in ends else ended
    return stages


def _exchanges(module: str, placement: _Placement) -> Iterator[str]:
    plan, split = placement.plan, placement.splits.get(module)
    if split is not None:
        ranks = f"over {split.ranks} {split.axis} ranks"
        is_divided = plan.modules.sequence or split.axis == "replicate"  # values between split layers
        if split.enters:
            yield f"all-gather before, {ranks}" if is_divided else f"all-reduce in the backward pass, {ranks}"
        is_head = "loss parallel" in split.after
        if is_head and plan.modules.loss:
            yield f"scores stay divided {ranks}"
        elif split.after:
            collective = "all-gather" if is_head else split.after.replace("_", "-")
            collective = "reduce-scatter" if is_divided and collective == "all-reduce" else collective
            yield f"{collective} after, {ranks}"
    if module in plan.pipeline.cuts and plan.axes.pipeline > 1:
        stage = placement.stage(module)
        yield f"sent to stage {stage + 1}" if stage is not None else "sent to the next stage"


def _gradient_exchanges(plan: Plan) -> Iterator[str]:
    """What is exchanged for the whole model in every step."""
    gradients, axes = plan.gradients, plan.axes
    if gradients.servers:
        yield f"gradients go to {gradients.servers} {gradients.updates} parameter servers"
    elif axes.replicate > 1:
        algorithm = "" if gradients.algorithm == "auto" else f" ({gradients.algorithm.replace('_', ' ')})"
        often = f"every {gradients.local_steps} steps" if gradients.local_steps > 1 else "every step"
        what = "weights are averaged" if gradients.local_steps > 1 else "gradients are combined by all-reduce"
        yield f"{what}{algorithm} over {axes.replicate} replicas, {often}"
    if axes.shard > 1:
        ranks = f"over {axes.shard} shard ranks"
        if plan.memory.sharding == "parameters":
            yield f"weights are gathered and gradients scattered {ranks}, block by block"
        else:
            yield f"gradients are scattered and updated weights gathered {ranks}, every step"


def _node(module: nn.Module, full_name: str, name: str, placement: _Placement, counted: set[int]) -> ModuleNode:
    prefix = f"{full_name}." if full_name else ""
    children = [
        _node(child, f"{prefix}{key}", key, placement, counted) for key, child in module._modules.items() if child
    ]
    weights = [weight for weight in module._parameters.values() if weight is not None]
    new = [weight for weight in weights if id(weight) not in counted]
    counted.update(map(id, new))
    is_frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
    labels = placement.labels(full_name, is_frozen)
    if weights and not new:
        labels.append(("tied", "weights of an earlier module"))
    return ModuleNode(
        name,
        type(module).__name__,
        sum(weight.numel() for weight in new) + sum(child.parameters for child in children),
        sum(weight.numel() * weight.element_size() for weight in new) + sum(child.bytes for child in children),
        labels=labels if weights else [],
        exchanges=placement.exchanges(full_name),
        children=children,
    )


def _pull_up(node: ModuleNode) -> None:
    """Moves labels that all weights inside a module have in common to this module, and folds equal children."""
    for child in node.children:
        _pull_up(child)
    weighted = [child for child in node.children if child.parameters or child.labels]
    groups = [child.labels for child in weighted] + ([node.labels] if node.labels else [])
    if weighted and groups:
        common = [label for label in groups[0] if all(label in labels for labels in groups)]
        for child in weighted:
            child.labels = [label for label in child.labels if label not in common]
        node.labels = common + [label for label in node.labels if label not in common]
    node.children = list(_fold(node.children))


def _fold(children: list[ModuleNode]) -> Iterator[ModuleNode]:
    for _, group in groupby(children, key=_signature):
        members = list(group)
        yield replace(members[0], name=_names([member.name for member in members]), copies=len(members))


def _names(names: list[str]) -> str:
    return (
        f"{names[0]} – {names[-1]}" if len(names) > 4 or (len(names) > 1 and names[0].isdigit()) else ", ".join(names)
    )


def _signature(node: ModuleNode) -> Any:
    inside = tuple((child.name, _signature(child)) for child in node.children)
    return node.class_name, node.parameters, node.bytes, tuple(node.labels), tuple(node.exchanges), node.copies, inside


def _limit(level: list[ModuleNode], room: int) -> None:
    """Leaves out modules beyond the first `room`, from the deepest levels, and counts them in their parents."""
    while level:
        following = [child for node in level for child in node.children]
        room -= len(level)
        if len(following) > room:
            for node in level:
                node.hidden = sum(map(_size, node.children))
                node.children = []
            return
        level = following


def _size(node: ModuleNode) -> int:
    return node.copies * (1 + node.hidden + sum(map(_size, node.children)))
