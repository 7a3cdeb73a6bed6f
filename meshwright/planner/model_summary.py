"""`ModelSummary`: the properties of a model from which bounds.py computes the bounds of plans without a simulation: for
every piece the bytes of its weights and of the activations that it saves for the backward pass, which layers can be
split, and where the model can be cut. The summary is computed from a profile."""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Literal, NamedTuple

from meshwright.blocks.module_names import is_inside
from meshwright.cluster.cluster import Device, Node
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Modules, Split
from meshwright.planner.cuts import balanced
from meshwright.profile.structure.splits import SplitGroup
from meshwright.profile.structure.structure import Structure
from meshwright.profile.values import ModelProfile, TraceSegment
from meshwright.simulator.compute.chunked_loss import chunked_profile
from meshwright.simulator.compute.float8 import float8_profile, linear_layers
from meshwright.simulator.compute.operator_time import DeviceSpeeds, device_speeds, operator_s
from meshwright.simulator.compute.passes import product_dtype
from meshwright.simulator.experts import expert_names
from meshwright.simulator.tensor.split_profile import split_profile

_SIXTEEN_BITS = ("bf16", "fp16", "fp8")  # of activations
_NOT_RECOMPUTED = ("matmul", "convolution", "attention")  # selective recomputation saves the results of these


@dataclass(frozen=True)
class PieceSummary:
    """One piece of the model: a module that a pipeline stage contains as a whole.

    weight_bytes  the piece's weights
    trained_bytes those of them that are not frozen
    expert_bytes  those of them that belong to experts of a mixture, in trained pieces
    saved_bytes   activations of one sample that are kept for the backward pass
    sent_bytes    activations of one sample that the next piece receives
    cuttable      the model can be cut behind the piece
    recomputable  the piece lies in a block whose activations can be recomputed
    """

    name: str
    weight_bytes: int
    trained_bytes: int
    saved_bytes: float
    sent_bytes: float
    cuttable: bool
    recomputable: bool
    expert_bytes: int = 0


class WeightBytes(NamedTuple):
    """The bytes of a rank's weights, of those of them that are trained, and of those that belong to experts which the
    plan divides and shards."""

    all: float
    trained: float
    experts: float = 0.0


def weight_bytes(pieces: tuple[PieceSummary, ...]) -> WeightBytes:
    """The bytes of a rank that holds these pieces."""
    return WeightBytes(
        float(sum(piece.weight_bytes for piece in pieces)), float(sum(piece.trained_bytes for piece in pieces))
    )


@dataclass(frozen=True)
class WideLayers:
    """Fully connected layers that hold a large share of the weights and do a small share of the multiplications. A plan
    can split them over the replicate axis."""

    modules: tuple[str, ...]
    weight_share: float
    work_share: float


@dataclass(frozen=True)
class BranchGroup:
    """Branches of one kind that can be placed on different ranks. Each branch is a tuple of the modules that have its
    weights."""

    kind: Literal["towers", "heads"]
    branches: tuple[tuple[str, ...], ...]


@dataclass
class ModelSummary:
    """The properties of a model on one kind of device that the planner needs. `profile` is the profile without
    recomputation. Seconds are those of a piece that is not split, on one device (on a CPU, with `cores` cores).
    `memory_layout` is the layout of image tensors. `fixed_cuts` are the modules after which every pipeline is cut, if
    the user names them. `branch_ranks` caches the placements that branch_placement.py
    computes."""

    profile: ModelProfile
    device: Device
    cores: int = 1
    memory_layout: Literal["contiguous", "channels_last"] = "contiguous"
    branch_groups: tuple[BranchGroup, ...] = ()
    fixed_cuts: tuple[str, ...] | None = None
    branch_ranks: dict[tuple[Axes, str], dict[str, int]] = field(default_factory=dict)
    _piece_seconds: dict[float, list[tuple[float, float]]] = field(default_factory=dict)
    _rank_pieces: dict[tuple[int, str, bool], tuple[PieceSummary, ...]] = field(default_factory=dict)
    trace: Callable[[Literal["none", "selective", "full"]], ModelProfile] | None = None
    _recompute_profiles: dict[str, ModelProfile] = field(default_factory=dict)
    _cuts: dict[tuple[int, str], tuple[int, ...] | None] = field(default_factory=dict)
    _on_nodes: "list[tuple[Node, ModelSummary]]" = field(default_factory=list)

    @property
    def structure(self) -> Structure | None:
        return self.profile.structure

    @cached_property
    def pieces(self) -> tuple[PieceSummary, ...]:
        return _summarize_pieces(self.profile)

    def rank_pieces(self, tensor: int, recompute: str) -> tuple[PieceSummary, ...]:
        """The pieces of the model with the bytes that one rank of the tensor axis has of each. Until a profile with
        this level of recomputation is added (`add_profile`), a recomputed piece is assumed to save no more than the
        activations that it sends to the next piece."""
        is_added = recompute != "none" and recompute in self._recompute_profiles
        key = (tensor, recompute, is_added)
        if key not in self._rank_pieces:
            profile = self._recompute_profiles.get(recompute, self.profile)
            if tensor > 1:
                modules = Modules(sequence=self.has_sequence, loss=self.has_vocabulary)
                profile = split_profile(profile, Plan(axes=Axes(tensor=tensor), modules=modules))
            pieces = _summarize_pieces(profile)
            if recompute != "none" and not is_added:
                pieces = tuple(replace(p, saved_bytes=p.sent_bytes / tensor) if p.recomputable else p for p in pieces)
            self._rank_pieces[key] = pieces
        return self._rank_pieces[key]

    def add_profile(self, recompute: str, profile: ModelProfile) -> None:
        """Adds the profile with this level of recomputation after it has been traced. It replaces the assumption of
        `rank_pieces`."""
        self._recompute_profiles.setdefault(recompute, profile)

    def for_another_search(self) -> "ModelSummary":
        """The same summary without the profiles that `add_profile` has added, and without placements, which depend on
        the batch and the cluster: every search of a question finds what it would find alone. The rest is shared."""
        other = copy(self)  # with the values of cached properties
        other._recompute_profiles, other.branch_ranks = {}, {}
        return other

    @cached_property
    def has_sequence(self) -> bool:
        """Whether activations between split layers can be divided along the sequence. True for models with
        attention."""
        return any(group.heads for group in self._groups)

    @cached_property
    def sequence_length(self) -> int:
        """The number of tokens of the longest input that ranks of the context axis can divide; 0 if there is none."""
        return max((sequence.length for sequence in self.structure.sequences), default=0) if self.structure else 0

    @cached_property
    def has_vocabulary(self) -> bool:
        return any(split.kind == "vocabulary" for group in self._groups for split in group.splits)

    @cached_property
    def has_convolutions(self) -> bool:
        return self.profile.has_convolutions

    @cached_property
    def tensor_degree(self) -> int:
        """The largest possible size of the tensor axis. Every divisor of it can split every group, groups split by
        vocabulary aside, which any size can split. It is 1 if no group can be split."""
        return gcd(*(group.degree for group in self._groups if not _by_vocabulary(group)), 0) or 1

    @cached_property
    def expert_degree(self) -> int:
        """The largest number of ranks that can share the experts; 1 if the model has none."""
        return gcd(*(layer.number for layer in self.profile.experts), 0) or 1

    @property
    def has_listed_experts(self) -> bool:
        """Whether experts are modules of a list, of which ranks hold different ones."""
        return any(layer.is_list for layer in self.profile.experts)

    @cached_property
    def split_flop_share(self) -> float:
        """The share of the model's FLOPs in operators that the tensor axis divides."""
        total = split = 0.0
        for segment in self.profile.segments:
            for operator in segment.operators:
                flops = segment.block_count * operator.flops.at(1)
                total += flops
                split += flops if operator.split else 0.0
        return split / total if total else 0.0

    @property
    def split_group_count(self) -> int:
        """The number of split groups. Each of them needs one all-reduce in the forward pass and one in the backward
        pass."""
        return len(self._groups)

    @property
    def _groups(self) -> tuple[SplitGroup, ...]:
        return self.structure.splits if self.structure else ()

    @cached_property
    def wide_layers(self) -> WideLayers | None:
        """The layers that a plan can split over the replicate axis; None if the model has none."""
        chains = self.structure.wide_chains if self.structure else ()
        split = {split.module for group in self._groups for split in group.splits}
        chains = tuple(chain for chain in chains if split & set(chain.modules))
        if not chains:
            return None
        return WideLayers(
            tuple(module for chain in chains for module in chain.modules),
            sum(chain.parameter_share for chain in chains),
            sum(chain.flop_share for chain in chains),
        )

    def wide_splits(self, ranks: int) -> dict[str, Split]:
        """Returns how a plan splits the wide layers over `ranks` ranks, by module. Modules in a split group are split
        as in the group. Other modules are split by columns if `ranks` divides their number of output features. A chain
        of wide layers is left out if `ranks` does not divide the degree of one of its groups."""
        assert self.structure is not None
        splits: dict[str, Split] = {}
        shapes = {name: parameter.shape for parameter in self.profile.parameters for name in parameter.names}
        for chain in self.structure.wide_chains:
            groups = [g for g in self._groups if {s.module for s in g.splits} & set(chain.modules)]
            if not groups or any(group.degree % ranks for group in groups):
                continue
            rows = {split.module for group in groups for split in group.splits if split.kind == "row"}
            grouped = {split.module for group in groups for split in group.splits}
            for module in chain.modules:
                if module in grouped or shapes[f"{module}.weight"][0] % ranks == 0:
                    splits[module] = Split(kind="row" if module in rows else "column", axis="replicate")
        return splits

    def piece_seconds(self, batch: float) -> list[tuple[float, float]]:
        """The seconds of every piece for a microbatch of `batch` samples, as pairs (forward, backward)."""
        if batch not in self._piece_seconds:
            self._piece_seconds[batch] = _piece_seconds(self.profile, self.pieces, batch, self.speeds)
        return self._piece_seconds[batch]

    @property
    def speeds(self) -> DeviceSpeeds:
        return device_speeds(self.device, product_dtype(self.profile.precision), self.cores, self.memory_layout)

    @cached_property
    def selective_share(self) -> float:
        """The share of a forward pass, in seconds, that selective recomputation repeats, which is everything except
        matrix products, convolutions and attention."""
        device_speeds = self.speeds
        total = recomputed = 0.0
        for segment in self.profile.segments:
            if segment.phase == "forward":
                for operator in segment.operators:
                    seconds = segment.block_count * operator_s(
                        operator, 1, device_speeds, False, self.profile.precision == "tf32"
                    )
                    total += seconds
                    recomputed += seconds if operator.kind not in _NOT_RECOMPUTED else 0.0
        return recomputed / total if total else 0.0

    def recomputed_share(self, recompute: str) -> float:
        """The share of a block's forward pass that its backward pass repeats at this level of recomputation."""
        return {"none": 0.0, "selective": self.selective_share, "full": 1.0}[recompute]

    def cuts(self, stages: int, recompute: str) -> tuple[int, ...] | None:
        """The indices of the pieces that end a stage (except the last stage) if the slowest stage is to be as fast as
        possible. None if the model cannot be cut into so many stages."""
        key = (stages, recompute)
        if self.fixed_cuts is not None and key not in self._cuts:
            indices = {piece.name: index for index, piece in enumerate(self.pieces)}
            fits = len(self.fixed_cuts) == stages - 1
            self._cuts[key] = tuple(indices[name] for name in self.fixed_cuts) if fits else None
        if key not in self._cuts:
            self._cuts[key] = balanced(
                self.piece_costs(recompute, 1), [piece.cuttable for piece in self.pieces], stages
            )
        return self._cuts[key]

    def piece_costs(self, recompute: str, batch: float) -> list[float]:
        """The seconds of both passes of every piece, at this level of recomputation."""
        recomputed = self.recomputed_share(recompute)
        return [
            forward + backward + (recomputed * forward if piece.recomputable else 0.0)
            for piece, (forward, backward) in zip(self.pieces, self.piece_seconds(batch), strict=True)
        ]

    def on(self, node: Node) -> "ModelSummary":
        """The summary of the same model on the device of another node, with the cores of one of its ranks."""
        for known, summary in self._on_nodes:
            if known.is_alike(node):
                return summary
        cores = max(1, node.cores // node.count) if node.device.kind == "cpu" else 1
        summary = ModelSummary(self.profile, node.device, cores, self.memory_layout)
        self._on_nodes.append((node, summary))
        return summary


def _piece_seconds(
    profile: ModelProfile, pieces: tuple[PieceSummary, ...], batch: float, device_speeds: DeviceSpeeds
) -> list[tuple[float, float]]:
    """The seconds of every piece as pairs (forward, backward). Equal blocks are priced once. Operators outside of all
    pieces count as part of the first piece."""
    piece_index = _PieceIndex({piece.name: index for index, piece in enumerate(pieces)})
    pass_seconds = [[0.0, 0.0] for _ in pieces]
    tf32 = profile.precision == "tf32"
    if profile.precision == "fp8":
        profile = float8_profile(profile, linear_layers(profile))
    for segment in profile.segments:
        backward = segment.phase == "backward"
        layers: dict[str, float] = {}
        for operator in segment.operators:
            seconds = operator_s(operator, batch, device_speeds, backward, tf32)
            layers[operator.layer] = layers.get(operator.layer, 0.0) + seconds
        for block in segment.blocks or ("",):
            for layer, seconds in layers.items():
                index = piece_index.of(_renamed(layer, segment.unit, block) if block else layer)
                pass_seconds[index][backward] += seconds
    return [(forward, backward) for forward, backward in pass_seconds]


def _by_vocabulary(group: SplitGroup) -> bool:
    return all(split.kind == "vocabulary" for split in group.splits)


def _summarize_pieces(profile: ModelProfile) -> tuple[PieceSummary, ...]:
    structure = profile.structure
    names = structure.pieces if structure and structure.pieces else ("",)
    piece_index = _PieceIndex({name: index for index, name in enumerate(names)})
    weights, trained, of_experts = [0] * len(names), [0] * len(names), [0] * len(names)
    experts = expert_names(profile)
    for parameter in profile.parameters:
        # A tied weight counts in every piece that has one of its names.
        for index in {piece_index.of(name.rpartition(".")[0]) for name in parameter.names}:
            weights[index] += parameter.bytes
            trained[index] += parameter.bytes if parameter.trainable else 0
            of_experts[index] += parameter.bytes if parameter.names[0] in experts else 0
    saved = [0.0] * len(names)
    # The fewest bytes of any plan: with a loss in chunks, no scores are saved.
    for segment in chunked_profile(profile, 2).segments:
        if segment.phase == "forward":
            for block in segment.blocks or ("",):
                for layer, size in _saved(segment):
                    saved[piece_index.of(_renamed(layer, segment.unit, block) if block else layer)] += size
    sixteen = profile.precision in _SIXTEEN_BITS
    sent = {}
    for cut in structure.cuts if structure else ():
        sent[cut.after] = sum(
            value.bytes_per_sample / (2 if sixteen and value.dtype == "float32" else 1) for value in cut.crossing
        )
    blocks = profile.blocks
    return tuple(
        PieceSummary(
            name=name,
            weight_bytes=weights[index],
            trained_bytes=trained[index],
            saved_bytes=saved[index],
            sent_bytes=sent.get(name, 0.0),
            cuttable=name in sent,
            recomputable=any(is_inside(name, block) for block in blocks),
            expert_bytes=of_experts[index],
        )
        for index, name in enumerate(names)
    )


class _PieceIndex:
    """Maps a module's name to the index of the piece that contains it. A module outside of all pieces counts as part of
    the first piece."""

    def __init__(self, indices: dict[str, int]) -> None:
        self._indices = dict(indices)

    def of(self, module: str) -> int:
        if module not in self._indices:
            parent = module.rpartition(".")[0]
            self._indices[module] = self.of(parent) if module else 0
        return self._indices[module]


def _saved(segment: TraceSegment) -> Iterable[tuple[str, float]]:
    """For each tensor that the segment saves for the backward pass, a pair of its layer and its bytes per sample."""
    return [
        (change.layer, change.bytes.linear * change.tensor_count)
        for change in segment.changes
        if change.role == "saved"
    ]


def _renamed(layer: str, unit: str, block: str) -> str:
    """The name of a layer in `block`, given its name in the equal block `unit`, which was traced."""
    return block + layer[len(unit) :] if is_inside(layer, unit) else layer
