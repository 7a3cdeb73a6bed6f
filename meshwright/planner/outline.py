"""`Outline`: what bounds need of a model, piece by piece: its weights, what it keeps for the backward pass, what can be
divided, where it can be cut. Read off one profile, so that nothing has to be replayed for a plan that cannot win."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Literal

from meshwright.blocks.module_names import within
from meshwright.cluster.cluster import Device
from meshwright.plan import Axes, Modules, Plan, Split
from meshwright.planner.cuts import balanced
from meshwright.profile.structure.splits import SplitGroup
from meshwright.profile.structure.structure import Structure
from meshwright.profile.values import ModelProfile, Stretch
from meshwright.simulator.compute.operator_time import Speeds, operator_s, speeds
from meshwright.simulator.compute.passes import products_in
from meshwright.simulator.tensor.split_profile import split_profile

_SIXTEEN_BITS = ("bf16", "fp16")
_KEPT = ("matmul", "convolution", "attention")  # by selective recomputation


@dataclass(frozen=True)
class Piece:
    """Bytes: `weights`; kept for the backward pass of a sample (`saved`); handed on to the next piece (`sent`).
    `again`: it lies in a block that can be computed again."""

    name: str
    weights: int
    saved: float
    sent: float
    cuttable: bool
    again: bool


@dataclass(frozen=True)
class Wide:
    """Layers that hold much and compute little, to be divided over the replicate axis."""

    modules: tuple[str, ...]
    weight_share: float
    work_share: float


@dataclass(frozen=True)
class Placeable:
    """Branches that can live on different ranks: of each the modules that hold its weights."""

    kind: Literal["towers", "heads"]
    branches: tuple[tuple[str, ...], ...]


@dataclass
class Outline:
    """`profile` keeps all activations. Seconds are those of an undivided piece on one device, of a CPU on so many
    `cores`."""

    profile: ModelProfile
    device: Device
    cores: int = 1
    layout: str = "contiguous"
    placeable: tuple[Placeable, ...] = ()
    homes: dict[tuple[Axes, str], dict[str, int]] = field(default_factory=dict)  # that were found so far (placing.py)
    _seconds: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    _pieces: dict[tuple[int, str], tuple[Piece, ...]] = field(default_factory=dict)
    _traced: dict[str, ModelProfile] = field(default_factory=dict)
    _cuts: dict[tuple[int, str], tuple[int, ...] | None] = field(default_factory=dict)

    @property
    def structure(self) -> Structure | None:
        return self.profile.structure

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return _pieces(self.profile)

    def rank_pieces(self, tensor: int, recompute: str) -> tuple[Piece, ...]:
        """What one rank of the tensor axis has of each. Until a profile that computes again is traced (`learn`), its
        blocks are taken to keep their inputs only, which is the least there can be."""
        key = (tensor, recompute)
        if key not in self._pieces:
            profile = self._traced.get(recompute, self.profile)
            if tensor > 1:
                modules = Modules(sequence=self.has_sequence, loss=self.has_vocabulary)
                profile = split_profile(profile, Plan(axes=Axes(tensor=tensor), modules=modules))
            found = _pieces(profile)
            if recompute != "none" and recompute not in self._traced:
                found = tuple(replace(p, saved=p.sent / tensor) if p.again else p for p in found)
            self._pieces[key] = found
        return self._pieces[key]

    def learn(self, recompute: str, profile: ModelProfile) -> None:
        """A profile that was traced meanwhile."""
        if recompute not in self._traced:
            self._traced[recompute] = profile
            self._pieces = {key: found for key, found in self._pieces.items() if key[1] != recompute}

    @cached_property
    def has_sequence(self) -> bool:
        """Whether activations between the split layers can be divided along the sequence: models with attention."""
        return any(group.heads for group in self._groups)

    @cached_property
    def has_vocabulary(self) -> bool:
        return any(split.kind == "vocabulary" for group in self._groups for split in group.splits)

    @cached_property
    def has_convolutions(self) -> bool:
        return any(o.kind == "convolution" for stretch in self.profile.stretches for o in stretch.operators)

    @cached_property
    def degree(self) -> int:
        """Every number of ranks that divides it can split every group; 1 where there is none."""
        return gcd(*(group.degree for group in self._groups if not _by_vocabulary(group)), 0) or 1

    @cached_property
    def divided_work(self) -> float:
        """The part of the FLOPs that the tensor axis divides."""
        whole = divided = 0.0
        for stretch in self.profile.stretches:
            for operator in stretch.operators:
                flops = stretch.count * operator.flops.at(1)
                whole += flops
                divided += flops if operator.split else 0.0
        return divided / whole if whole else 0.0

    @property
    def splits(self) -> int:
        """How many groups cross ranks in each pass."""
        return len(self._groups)

    @property
    def _groups(self) -> tuple[SplitGroup, ...]:
        return self.structure.splits if self.structure else ()

    @cached_property
    def wide(self) -> Wide | None:
        chains = self.structure.wide if self.structure else ()
        split = {split.module for group in self._groups for split in group.splits}
        chains = tuple(chain for chain in chains if split & set(chain.modules))
        if not chains:
            return None
        return Wide(
            tuple(module for chain in chains for module in chain.modules),
            sum(chain.parameter_share for chain in chains),
            sum(chain.flop_share for chain in chains),
        )

    def wide_splits(self, ranks: int) -> dict[str, Split]:
        """Of each chain the groups, as they are split, and by columns what is in none, if so many ranks divide it;
        nothing of a chain with a group that they do not."""
        assert self.structure is not None
        found: dict[str, Split] = {}
        shapes = {name: parameter.shape for parameter in self.profile.parameters for name in parameter.names}
        for chain in self.structure.wide:
            groups = [g for g in self._groups if {s.module for s in g.splits} & set(chain.modules)]
            if not groups or any(group.degree % ranks for group in groups):
                continue
            rows = {split.module for group in groups for split in group.splits if split.kind == "row"}
            grouped = {split.module for group in groups for split in group.splits}
            for module in chain.modules:
                if module in grouped or shapes[f"{module}.weight"][0] % ranks == 0:
                    found[module] = Split(kind="row" if module in rows else "column", axis="replicate")
        return found

    def seconds(self, batch: int) -> list[tuple[float, float]]:
        """Of each piece, for one microbatch: (forward, backward)."""
        if batch not in self._seconds:
            prices = speeds(self.device, products_in(self.profile.precision), self.cores, self.layout)
            self._seconds[batch] = _piece_seconds(self.profile, self.pieces, batch, prices)
        return self._seconds[batch]

    @cached_property
    def light_work(self) -> float:
        """Of a forward pass, the seconds that `selective` computes again: all but products and attention."""
        prices = speeds(self.device, products_in(self.profile.precision), self.cores, self.layout)
        whole = light = 0.0
        for stretch in self.profile.stretches:
            if stretch.phase == "forward":
                for operator in stretch.operators:
                    seconds = stretch.count * operator_s(operator, 1, prices, False, self.profile.precision == "tf32")
                    whole += seconds
                    light += seconds if operator.kind not in _KEPT else 0.0
        return light / whole if whole else 0.0

    def again(self, recompute: str) -> float:
        """Of the forward pass of a block, what its backward pass computes again."""
        return {"none": 0.0, "selective": self.light_work, "full": 1.0}[recompute]

    def cuts(self, stages: int, recompute: str) -> tuple[int, ...] | None:
        """The pieces that end a stage, balanced by their seconds."""
        key = (stages, recompute)
        if key not in self._cuts:
            part = self.again(recompute)
            costs = [
                forward + backward + (part * forward if piece.again else 0.0)
                for piece, (forward, backward) in zip(self.pieces, self.seconds(1), strict=True)
            ]
            self._cuts[key] = balanced(costs, [piece.cuttable for piece in self.pieces], stages)
        return self._cuts[key]


def _piece_seconds(
    profile: ModelProfile, pieces: tuple[Piece, ...], batch: int, prices: Speeds
) -> list[tuple[float, float]]:
    """Equal blocks are priced once. What runs between pieces counts with the first."""
    home = _Home({piece.name: place for place, piece in enumerate(pieces)})
    found = [[0.0, 0.0] for _ in pieces]
    tf32 = profile.precision == "tf32"
    for stretch in profile.stretches:
        backward = stretch.phase == "backward"
        layers: dict[str, float] = {}
        for operator in stretch.operators:
            seconds = operator_s(operator, batch, prices, backward, tf32)
            layers[operator.layer] = layers.get(operator.layer, 0.0) + seconds
        for block in stretch.blocks or ("",):
            for layer, seconds in layers.items():
                found[home.of(_renamed(layer, stretch.unit, block) if block else layer)][backward] += seconds
    return [(forward, backward) for forward, backward in found]


def _by_vocabulary(group: SplitGroup) -> bool:
    return all(split.kind == "vocabulary" for split in group.splits)


def _pieces(profile: ModelProfile) -> tuple[Piece, ...]:
    structure = profile.structure
    names = structure.pieces if structure and structure.pieces else ("",)
    places = {name: place for place, name in enumerate(names)}
    home = _Home(places)
    weights = [0] * len(names)
    for parameter in profile.parameters:
        # tied weights lie where each of their users is
        for place in {home.of(name.rpartition(".")[0]) for name in parameter.names}:
            weights[place] += parameter.bytes
    saved = [0.0] * len(names)
    for stretch in profile.stretches:
        if stretch.phase == "forward":
            for block in stretch.blocks or ("",):
                for layer, size in _saved(stretch):
                    saved[home.of(_renamed(layer, stretch.unit, block) if block else layer)] += size
    sixteen = profile.precision in _SIXTEEN_BITS
    sent = {}
    for cut in structure.cuts if structure else ():
        sent[cut.after] = sum(
            value.bytes_per_sample / (2 if sixteen and value.dtype == "float32" else 1) for value in cut.crossing
        )
    blocks = profile.blocks
    return tuple(
        Piece(
            name=name,
            weights=weights[place],
            saved=saved[place],
            sent=sent.get(name, 0.0),
            cuttable=name in sent,
            again=any(within(name, block) for block in blocks),
        )
        for place, name in enumerate(names)
    )


class _Home:
    """The place of the piece that a module lies in; what is outside of pieces counts with the first."""

    def __init__(self, places: dict[str, int]) -> None:
        self._known = dict(places)

    def of(self, module: str) -> int:
        if module not in self._known:
            above = module.rpartition(".")[0]
            self._known[module] = self.of(above) if module else 0
        return self._known[module]


def _saved(stretch: Stretch) -> Iterable[tuple[str, float]]:
    return [(change.layer, change.bytes.linear * change.times) for change in stretch.changes if change.role == "saved"]


def _renamed(layer: str, unit: str, block: str) -> str:
    return block + layer[len(unit) :] if within(layer, unit) else layer
