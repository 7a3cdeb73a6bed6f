"""Tensor-parallel messages: what ranks of split layers send each other in every microbatch (`tensor_messages`).

There are n ranks. X is the bytes of a layer's whole input, or of its gradient; Y those of its whole output. A value is
whole if every rank has all of it. Between layers that are split over the tensor axis, values are whole:

                                forward                       backward
    first column of a group                                   all_reduce X                    _of_whole_values
    row of a group              all_reduce Y
    standalone column           all_gather Y                  all_reduce X
    standalone row              all_reduce Y                  all_gather X
    embedding by vocabulary     all_reduce Y
    head by vocabulary          all_gather Y                  all_reduce X
    head, with `loss`           all_reduce of 1 and of 3 numbers per target    all_reduce X

With `sequence`, values are divided along the sequence from the first split embedding or row layer on. Before it, also
after a pipeline cut, they are whole. If a whole value (a residual, the output of a standalone layer) is combined with
divided values, it is divided as well, and its gradient is gathered in the backward pass:

    first column of a group     all_gather X                  reduce_scatter X                _of_divided_sequence
    row of a group              reduce_scatter Y              all_gather Y; the first: 2 all_gather Y
    standalone column, head     all_gather X, all_gather Y    reduce_scatter X; but the head: all_gather Y
    standalone row              all_gather X, reduce_scatter Y    all_gather Y, all_gather X
    embedding                   reduce_scatter Y              all_gather Y
    weights that stay whole                                   all_reduce of their bytes       _whole_weights
        and have a number a token                             all_gather of their bytes
    experts that stay whole     all_gather X and of the choices' weights    all_gather X      _of_experts

Over the replicate axis, each rank has its own samples. X and Y are the bytes of the samples of all n ranks:

    first column of a group     all_gather X                  reduce_scatter X                _of_own_samples
    row of a group              reduce_scatter Y              all_gather Y
    standalone column, head     all_gather X, all_to_all Y/n  all_to_all Y/n, reduce_scatter X
    standalone row              all_to_all X/n, reduce_scatter Y   all_gather Y, all_to_all X/n
    embedding                   reduce_scatter Y              all_gather Y

Sizes that n does not divide (vocabulary, tokens) are padded, as if each rank had as much as the first. If a layer's
input needs no gradient, none is sent. The backward pass of a recomputed block sends the messages of its forward pass
again. If groups share an input, the messages of each group are counted, although the runtime sums their gradients
before it sends them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.blocks.module_names import enclosing_modules, is_inside
from meshwright.cluster.cluster import Collective
from meshwright.dtypes import ITEM_BYTES
from meshwright.plan import Plan
from meshwright.profile.structure.splits import SplitGroup, SplitKind
from meshwright.profile.values import ModelProfile, Operator, Parameter, TraceSegment
from meshwright.simulator.profile_cache import ProfileCache
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime
from meshwright.simulator.tensor.split_profile import SplitShare, rows_of_sample, split_shares
from meshwright.simulator.tensor.standalone_splits import is_standalone, with_standalone_splits

_LayerKind = Literal["column", "row", "embedding", "head"]


@dataclass(frozen=True)
class TensorMessage:
    """A collective on a tensor of `bytes`, which runs `times` times in the forward pass (or, if `forward` is False, in
    the backward pass) of one microbatch."""

    collective: Collective
    bytes: float
    times: int
    forward: bool


@dataclass(frozen=True)
class _SplitOperator:
    """An operator of a split layer that may need messages. `enters`: its input is the input of its group. `standalone`:
    its layer is not part of a group of several layers. `has_input_gradient`: the backward pass computes the gradient of
    its input. `tokens` is the number of tokens (rows of its input) per sample."""

    operator: Operator
    share: SplitShare
    kind: _LayerKind
    enters: bool
    standalone: bool
    has_input_gradient: bool
    tokens: int


_MESSAGES: ProfileCache[tuple[list[TensorMessage], list[TensorMessage]]] = ProfileCache(512)


def tensor_messages(
    profile: ModelProfile, plan: Plan, batch: float, runtime: Runtime = OUR_RUNTIME
) -> tuple[list[TensorMessage], list[TensorMessage]]:
    """The messages of a microbatch along the tensor axis, and those along the replicate axis, which are sent for layers
    that are split over it. `profile` is that of the whole model, or of a pipeline stage that was cut from the result of
    `with_standalone_splits`."""
    named = tuple((name, split.kind, split.axis) for name, split in plan.modules.splits.items())
    sizes = (plan.axes.tensor, plan.axes.replicate if named else 1)
    key = (sizes, plan.modules.sequence, plan.modules.loss, named, runtime.resends_messages(plan), batch, runtime)
    along_tensor, along_replicate = _MESSAGES.get(profile, key, lambda: _tensor_messages(profile, plan, batch, runtime))
    return list(along_tensor), list(along_replicate)


def _tensor_messages(
    profile: ModelProfile, plan: Plan, batch: float, runtime: Runtime
) -> tuple[list[TensorMessage], list[TensorMessage]]:
    profile = runtime.weights_on_tensor_ranks(with_standalone_splits(profile, plan))
    shares = split_shares(profile, plan)
    along_tensor: list[TensorMessage] = []
    along_replicate: list[TensorMessage] = []
    if not shares:
        return along_tensor, along_replicate
    walk = _ForwardWalk(profile, plan, shares)
    resends = runtime.resends_messages(plan)
    for segment in profile.segments:
        blocks_left = segment.block_count if segment.phase == "forward" else 0
        while blocks_left:
            before = walk.divided
            messages = list(walk.messages_of(segment, batch))
            # The block in which values become divided sends other messages than the equal blocks after it.
            times = blocks_left if walk.divided == before else 1
            blocks_left -= times
            for axis, layer, message in messages:
                axis_messages = along_replicate if axis == "replicate" else along_tensor
                axis_messages.append(replace(message, times=times))
                if message.forward and resends and any(is_inside(layer, block) for block in profile.blocks):
                    axis_messages.append(replace(message, times=times, forward=False))
    return along_tensor, along_replicate


class _ForwardWalk:
    """Goes through the operators of a forward pass and derives their messages. `divided` says whether the values
    between split layers are divided along the sequence at the current operator."""

    def __init__(self, profile: ModelProfile, plan: Plan, shares: Mapping[str, SplitShare]) -> None:
        groups = profile.structure.splits if profile.structure else ()
        self.divided = False
        self._plan = plan
        self._shares = shares
        self._split_of_module = {split.module: (split.kind, group) for group in groups for split in group.splits}
        self._tokens = 0
        self._layers_with_input_gradient = _layers_with_input_gradient(profile)
        self._widths = {name: p.shape[-1] for p in profile.parameters for name in p.names if p.shape}
        self._whole = _whole_weights(profile, self._split_of_module, shares) if plan.modules.sequence else {}
        self._experts = {module for layer in profile.experts for module in layer.modules}

    def messages_of(self, segment: TraceSegment, batch: float) -> Iterator[tuple[str, str, TensorMessage]]:
        """Yields the messages of the segment's operators in one run of the segment, each with its axis and layer."""
        visited: set[str] = set()
        split_operators = {id(split.operator): split for split in self._split_operators(segment)}
        for operator in segment.operators:
            layer = operator.layer
            if split := split_operators.get(id(operator)):
                for message in _operator_messages(split, batch, self._plan, self.divided):
                    yield split.share.axis, layer, message
                if split.kind in ("row", "embedding") and _is_divided_along_sequence(split, self._plan):
                    self.divided, self._tokens = True, split.tokens
            experts = self._experts_of(layer) if self.divided else None
            owner = layer if experts is None else experts
            if not self.divided or owner in visited or (experts is not None and operator.kind != "matmul"):
                continue
            visited.add(owner)
            of_layer = self._weight_messages(operator) if experts is None else self._of_experts(operator, batch)
            yield from (("tensor", layer, message) for message in of_layer)

    def _experts_of(self, layer: str) -> str | None:
        """The module of experts in which a layer computes; None for others."""
        return next(filter(self._experts.__contains__, enclosing_modules(layer)), None) if self._experts else None

    def _of_experts(self, operator: Operator, batch: float) -> Iterator[TensorMessage]:
        """Every rank gathers the tokens of all, with the weights of their choices, and its experts compute all rows.
        The gradient of what they return is gathered. `operator` is their first product."""
        tokens, item = self._tokens, ITEM_BYTES.get(operator.dtype, 4)
        size = batch * tokens * operator.shape[3].constant * item * _padding(tokens, self._plan.axes.tensor)
        choices = size / operator.shape[3].constant * rows_of_sample(operator) / tokens
        yield TensorMessage("all_gather", size, 1, True)
        yield TensorMessage("all_gather", choices, 1, True)
        yield TensorMessage("all_gather", size, 1, False)

    def _weight_messages(self, operator: Operator) -> Iterator[TensorMessage]:
        tokens = self._tokens
        for parameter in self._whole.get(operator.layer, ()):
            # Products sum over their tokens; all other weights with two dimensions have one row for each token.
            if len(parameter.shape) > 1 and parameter.shape[-2] == tokens and operator.kind != "matmul":
                yield TensorMessage("all_gather", parameter.bytes * _padding(tokens, self._plan.axes.tensor), 1, False)
            else:
                yield TensorMessage("all_reduce", float(parameter.bytes), 1, False)

    def _split_operators(self, segment: TraceSegment) -> Iterator[_SplitOperator]:
        entered: set[str] = set()
        for operator in segment.operators:
            if operator.layer not in self._split_of_module or operator.kind not in ("matmul", "embedding"):
                continue
            kind, group = self._split_of_module[operator.layer]
            has_gradient, tokens = operator.layer in self._layers_with_input_gradient, self._tokens_of(operator)
            if kind == "vocabulary":
                if share := self._shares.get(group.name):
                    layer_kind: _LayerKind = "embedding" if operator.kind == "embedding" else "head"
                    yield _SplitOperator(operator, share, layer_kind, True, True, has_gradient, tokens)
                continue
            name = operator.split.group if operator.split else ""
            if operator.kind == "matmul" and (share := self._shares.get(name)):
                enters = kind != "row" and (is_standalone(group) or name not in entered)
                entered |= {name} if enters else set()
                side: _LayerKind = "row" if kind == "row" else "column"
                yield _SplitOperator(operator, share, side, enters, is_standalone(group), has_gradient, tokens)

    def _tokens_of(self, operator: Operator) -> int:
        """The rows of a product, or the tokens that an embedding looks up, for one sample."""
        if operator.kind == "embedding":
            return round(operator.shape[0].linear / self._widths.get(f"{operator.layer}.weight", 1))
        return rows_of_sample(operator)


def _whole_weights(
    profile: ModelProfile, split_of_module: Mapping[str, tuple[SplitKind, SplitGroup]], shares: Mapping[str, SplitShare]
) -> dict[str, list[Parameter]]:
    """The trained weights that no group divides, by the module that has them."""
    divided = {
        name
        for kind, group in split_of_module.values()
        if group.name in shares
        for split in group.splits
        for name in (split.parameter, *([] if split.kind == "row" else [f"{split.module}.bias"]))
    }
    whole: dict[str, list[Parameter]] = {}
    for parameter in profile.parameters:
        if parameter.trainable and divided.isdisjoint(parameter.names):
            whole.setdefault(parameter.names[0].rpartition(".")[0], []).append(parameter)
    return whole


def _layers_with_input_gradient(profile: ModelProfile) -> set[str]:
    """The layers whose backward pass computes the gradient of their input. They are recognized by a product in the
    backward pass that does not sum over samples, unlike the gradient of a weight. Recomputed layers have such a product
    in any case, so they are assumed to compute this gradient."""
    return {
        operator.layer
        for segment in profile.segments
        for operator in segment.operators
        if segment.phase == "backward" and operator.kind == "matmul"
        if not operator.shape[3].linear and not operator.shape[3].square
    }


def _operator_messages(layer: _SplitOperator, batch: float, plan: Plan, divided: bool) -> list[TensorMessage]:
    over_samples = layer.share.axis == "replicate"
    gathered_ranks = layer.share.ranks if over_samples else 1
    output_bytes = _output_bytes(layer.operator, batch) * gathered_ranks
    input_bytes = _input_bytes(layer.operator, batch) * gathered_ranks if layer.operator.kind == "matmul" else 0.0
    if over_samples:
        forward, backward = _of_own_samples(layer, input_bytes, output_bytes)
    elif _is_divided_along_sequence(layer, plan):
        forward, backward = _of_divided_sequence(layer, input_bytes, output_bytes, plan.modules.loss, divided)
    else:
        forward, backward = _of_whole_values(layer, input_bytes, output_bytes, plan.modules.loss)
    return [
        TensorMessage(collective, size, 1, is_forward)
        for is_forward, collectives in ((True, forward), (False, backward))
        for collective, size in collectives
    ]


_Collectives = list[tuple[Collective, float]]


def _of_whole_values(
    layer: _SplitOperator, input_bytes: float, output_bytes: float, loss: bool
) -> tuple[_Collectives, _Collectives]:
    """The forward and the backward collectives of a layer if every rank has the whole input and needs the whole
    output."""
    forward: _Collectives = []
    backward: _Collectives = []
    if layer.kind in ("row", "embedding"):
        forward.append(("all_reduce", output_bytes))
    elif layer.standalone:
        forward += _output_messages(layer, output_bytes, loss)
    if layer.has_input_gradient and layer.enters and layer.kind != "embedding":
        backward.append(("all_reduce", input_bytes))
    if layer.has_input_gradient and layer.kind == "row" and layer.standalone:
        backward.append(("all_gather", input_bytes))
    return forward, backward


def _of_divided_sequence(
    layer: _SplitOperator, input_bytes: float, output_bytes: float, loss: bool, divided: bool
) -> tuple[_Collectives, _Collectives]:
    """The forward and the backward collectives of a layer if each rank needs its part of the sequence of the output. Of
    the input it has its part of the sequence if values are `divided`, else the whole."""
    forward: _Collectives = []
    backward: _Collectives = []
    padding = _padding(layer.tokens, layer.share.ranks)
    if layer.kind in ("row", "embedding"):
        if layer.kind == "row" and layer.standalone:
            forward += [("all_gather", input_bytes * padding)] if divided else []
            backward += [("all_gather", input_bytes)] if layer.has_input_gradient else []
        forward.append(("reduce_scatter", output_bytes * padding))
        gathers = 2 if layer.kind == "row" and not divided else 1
        backward += [("all_gather", output_bytes * padding)] * gathers
        return forward, backward
    if layer.enters and divided:
        forward.append(("all_gather", input_bytes * padding))
        backward += [("reduce_scatter", input_bytes * padding)] if layer.has_input_gradient else []
    elif layer.enters:
        backward += [("all_reduce", input_bytes)] if layer.has_input_gradient else []
    if layer.standalone:
        forward += _output_messages(layer, output_bytes, loss)
        backward += [("all_gather", output_bytes * padding)] if layer.kind == "column" else []
    return forward, backward


def _output_messages(layer: _SplitOperator, output_bytes: float, loss: bool) -> _Collectives:
    """The forward collectives for the output of a standalone layer. The output is all-gathered. With `loss`, the output
    of a head stays divided, and only a few numbers per target are summed for the loss."""
    operator, ranks = layer.operator, layer.share.ranks
    features = int(operator.shape[2].constant)
    if layer.kind == "head" and loss:
        number = output_bytes / features * max(1.0, 4 / ITEM_BYTES.get(operator.dtype, 4))
        return [("all_reduce", number), ("all_reduce", 3 * number)]
    return [("all_gather", output_bytes * _padding(features, ranks))]


def _is_divided_along_sequence(layer: _SplitOperator, plan: Plan) -> bool:
    """Whether the plan divides the layer's values along the sequence. If samples have one token only, there is none."""
    return plan.modules.sequence and layer.share.axis == "tensor" and layer.tokens > 1


def _padding(size: int, ranks: int) -> float:
    """The factor by which a size grows when it is padded so that every rank has as much as the first."""
    return -(-size // ranks) * ranks / size if size else 1.0


def _of_own_samples(
    layer: _SplitOperator, input_bytes: float, output_bytes: float
) -> tuple[_Collectives, _Collectives]:
    """The forward and the backward collectives of a layer if each rank has the input of its own samples and needs the
    output of its own samples."""
    forward: _Collectives = []
    backward: _Collectives = []
    part = 1 / layer.share.ranks
    if layer.kind in ("row", "embedding"):
        forward.append(("reduce_scatter", output_bytes))
        backward.append(("all_gather", output_bytes))
        if layer.kind == "row" and layer.standalone:
            forward.append(("all_to_all", input_bytes * part))
            backward += [("all_to_all", input_bytes * part)] if layer.has_input_gradient else []
        return forward, backward
    if layer.enters:
        forward.append(("all_gather", input_bytes))
        backward += [("reduce_scatter", input_bytes)] if layer.has_input_gradient else []
    if layer.standalone:
        forward.append(("all_to_all", output_bytes * part))
        backward.append(("all_to_all", output_bytes * part))
    return forward, backward


def _output_bytes(operator: Operator, batch: float) -> float:
    item = ITEM_BYTES.get(operator.dtype, 4)
    if operator.kind == "embedding":
        return operator.shape[0].at(batch) * item
    count, m, n, _ = (size.at(batch) for size in operator.shape)
    return count * m * n * item


def _input_bytes(operator: Operator, batch: float) -> float:
    count, m, _, k = (size.at(batch) for size in operator.shape)
    return count * m * k * ITEM_BYTES.get(operator.dtype, 4)
