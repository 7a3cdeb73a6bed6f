"""What dividing the experts of a mixture over e ranks changes for a rank (`axes.expert`).

Routing is taken as even: each rank sends its routed rows, of S bytes, to the experts of all ranks, and receives as
many. With W the bytes of all experts' weights and n ranks of the shard axis:

    work         the same rows for fewer experts, whose weights are read: W / e                    divided_profile
    weights      W / e without a shard axis; W / n with one, as without an expert axis            divided_profile
    gathered     W / e while a block runs, if n > e; nothing if n = e                              gathered_share
    gradients    W / e before they are combined                                                    divided_profile
    buffers      2 S, of the rows on their way and of those that come back                         divided_profile
                 at the worst, if all rows go to one rank: e · 2 S                                 worst_buffer_bytes
    loads        with an uneven router, the activations and buffers of the busiest rank's
                 experts are `load` times those of even routing, at the worst e times              at_load
    messages     forward: all-to-all of S and of the weights of the rows, and of S back; the same
                 backward; with recomputation, those of the forward pass once more                 expert_messages
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from meshwright.blocks.module_names import is_inside
from meshwright.cluster.cluster import Cluster
from meshwright.dtypes import ITEM_BYTES
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.plan_rules.table import check_rules
from meshwright.profile.experts import RoutedExperts
from meshwright.profile.values import BatchPolynomial, MemoryChange, ModelProfile, Operator, Parameter, TraceSegment
from meshwright.simulator.communication.placement import RankGroup, group_of_axes
from meshwright.simulator.compute.lookup import group_count
from meshwright.simulator.tensor.messages import TensorMessage


def check_expert_ranks(profile: ModelProfile, plan: Plan) -> None:
    """Raises an `InputError` if the plan divides experts that the model has not, or that its ranks do not divide."""
    ranks = plan.axes.expert
    if ranks == 1:
        return
    check_rules(plan)
    if not profile.experts:
        raise InputError(f"plan.axes.expert is {ranks}, but the model has no experts: set axes.expert to 1")
    numbers = sorted({layer.number for layer in profile.experts if layer.number % ranks})
    if numbers:
        raise InputError(f"plan.axes.expert is {ranks}, which does not divide the model's {numbers[0]} experts")


def expert_group(axes: Axes, cluster: Cluster, context_ranks: int = 1) -> RankGroup:
    """The ranks that share the experts: neighbouring data ranks. `context_ranks` is the size of a context axis that
    `without_context` has joined with the data ranks."""
    data_ranks = axes.replicate * axes.shard // context_ranks
    sizes = {"replicate": data_ranks // axes.expert, "shard": axes.expert, "context": axes.context * context_ranks}
    regrouped = axes.model_copy(update={**sizes, "expert": 1})
    return group_of_axes(regrouped, ("shard",), cluster)


def mesh_sizes(axes: Axes) -> dict[str, int]:
    """The sizes of the mesh's axes whose ranks have different samples. The ranks of the expert axis are taken from the
    shard axis, or if there is none from the replicate axis."""
    sizes = {"replicate": axes.replicate, "shard": axes.shard, "expert": axes.expert}
    sizes["shard" if axes.shard > 1 else "replicate"] //= axes.expert
    return sizes


def joined_axis(axes: Axes, names: Iterable[str]) -> str:
    """The name of the axis of a collective over several of these axes: that of the only one with several ranks, or
    `data`."""
    sizes = mesh_sizes(axes)
    used = [name for name in names if sizes[name] > 1]
    return used[0] if len(used) == 1 else "data"


def expert_names(profile: ModelProfile) -> frozenset[str]:
    """The names of the parameters of all experts."""
    return _parameter_names(profile.experts)


# Predictions of many plans ask for the same model's experts.
@lru_cache(maxsize=8)
def _parameter_names(experts: tuple[RoutedExperts, ...]) -> frozenset[str]:
    return frozenset(name for layer in experts for name in layer.parameters)


@lru_cache(maxsize=8)
def _layers_by_module(experts: tuple[RoutedExperts, ...]) -> dict[str, RoutedExperts]:
    return {name: layer for layer in experts for name in layer.modules}


def gathered_share(axes: Axes) -> float:
    """The share of an expert's weights, of those that a rank counts, that FSDP2 gathers."""
    experts, shard = axes.expert, axes.shard
    if experts == 1 or shard == 1:
        return 1.0
    return 1 / experts if shard > experts else 0.0


def gathered_bytes(parameters: Iterable[Parameter], profile: ModelProfile, plan: Plan) -> float:
    """The bytes of these parameters that are gathered, or whose gradients are scattered, over the shard axis."""
    share = gathered_share(plan.axes)
    names = expert_names(profile) if share < 1 else frozenset()
    return sum(p.bytes * (share if p.names[0] in names else 1.0) for p in parameters)


def divided_profile(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The profile of one rank, of which the given profile has all experts."""
    ranks = plan.axes.expert
    if ranks == 1 or not profile.experts:
        return profile
    names = expert_names(profile)
    parameters = profile.parameters
    if plan.axes.shard == 1:
        parameters = tuple(_divided(p, ranks) if p.names[0] in names else p for p in parameters)
    segments = tuple(_divided_segment(segment, profile, ranks) for segment in profile.segments)
    return replace(profile, parameters=parameters, segments=segments)


def _divided(parameter: Parameter, ranks: int) -> Parameter:
    """An expert's parameter with the bytes of the rank's share. Stacked experts have fewer rows; of a list, each rank
    has some of the modules, which is counted as a share of each."""
    shape = parameter.shape
    if len(shape) > 2 and shape[0] % ranks == 0:
        shape = (shape[0] // ranks, *shape[1:])
    return replace(parameter, shape=shape, bytes=parameter.bytes // ranks)


def _divided_segment(segment: TraceSegment, profile: ModelProfile, ranks: int) -> TraceSegment:
    changes: list[MemoryChange] = []
    operators = _expert_operators(segment, profile)
    if not operators:
        return segment
    modules = _layers_by_module(profile.experts)
    for change in segment.changes:
        is_expert = change.role == "gradient" and _layer_of(change.layer, modules) is not None
        changes.append(replace(change, bytes=change.bytes.scaled(1 / ranks)) if is_expert else change)
    for layer, numbers in operators.items():
        buffer = _row_bytes(segment, layer, numbers).scaled(2.0)
        if buffer.at(1):
            changes.append(MemoryChange(numbers[0], buffer, "temporary", layer.module))
            changes.append(MemoryChange(numbers[0] + 1, buffer.scaled(-1.0), "temporary", layer.module))
    ordered = sorted(changes, key=lambda change: change.after_operators)
    of_experts = {number for numbers in operators.values() for number in numbers}
    divided = tuple(
        _with_fewer_weights(operator, ranks) if number in of_experts and operator.kind == "matmul" else operator
        for number, operator in enumerate(segment.operators)
    )
    return replace(segment, operators=divided, changes=tuple(ordered))


def _with_fewer_weights(operator: Operator, ranks: int) -> Operator:
    """A grouped product that reads, or makes the gradients of, the weights of fewer experts. Of its bytes, those of
    weights do not grow with the batch."""
    size = operator.bytes
    return replace(operator, bytes=replace(size, constant=size.constant / ranks))


def _expert_operators(segment: TraceSegment, profile: ModelProfile) -> dict[RoutedExperts, list[int]]:
    """The numbers of the segment's operators that belong to experts, by mixture."""
    modules, layers = _layers_by_module(profile.experts), dict[str, RoutedExperts | None]()
    numbers: dict[RoutedExperts, list[int]] = {}
    for number, operator in enumerate(segment.operators if modules else ()):
        name = operator.layer
        if name not in layers:
            layers[name] = _layer_of(name, modules)
        if (layer := layers[name]) is not None:
            numbers.setdefault(layer, []).append(number)
    return numbers


def _layer_of(module: str, modules: dict[str, RoutedExperts]) -> RoutedExperts | None:
    """The mixture to whose experts a module belongs; None if it belongs to none."""
    while module:
        if module in modules:
            return modules[module]
        module = module.rpartition(".")[0]
    return None


def _products(segment: TraceSegment, layer: RoutedExperts, numbers: Iterable[int]) -> list[Operator]:
    """The products in this segment whose inputs together are the routed rows: the first one of each expert module of
    the layer. If stacked experts are computed one after the other, the first one of each expert."""
    products: dict[str, list[Operator]] = {}
    for number in numbers:
        operator = segment.operators[number]
        if operator.kind == "matmul" and operator.flops.at(1):
            module = next(name for name in layer.modules if is_inside(operator.layer, name))
            products.setdefault(module, []).append(operator)
    if layer.is_list:
        return [of_module[0] for of_module in products.values()]
    return [product for of_module in products.values() for product in _one_of_each_expert(of_module, layer.number)]


def _one_of_each_expert(products: list[Operator], experts: int) -> list[Operator]:
    """Of the products of stacked experts, the first one, which has the rows of all experts, or one for each expert if
    as many have matrices of the same size. Of a gate and a product next to it, only one counts."""
    same = [product for product in products if product.shape[2:] == products[0].shape[2:]]
    if group_count(products[0]) or len(same) < experts:
        return products[:1]
    return same[:: len(same) // experts][:experts]


def _row_bytes(segment: TraceSegment, layer: RoutedExperts, numbers: Iterable[int]) -> BatchPolynomial:
    """The bytes of the rows that a rank routes, as a function of the batch."""
    rows = BatchPolynomial(0.0, 0.0)
    numbers = list(numbers)
    for product in _products(segment, layer, numbers):
        count, width = product.shape[1], max(1.0, product.shape[3].at(1))
        size = width * _item_bytes(segment, numbers)
        rows = BatchPolynomial(rows.constant + count.constant * size, rows.linear + count.linear * size)
    return rows


def _item_bytes(segment: TraceSegment, numbers: Iterable[int]) -> int:
    """The bytes of one number of the tokens: those of the first floating-point operator, which selects the rows.
    Products may run in another type."""
    dtypes = (segment.operators[number].dtype for number in numbers)
    return ITEM_BYTES.get(next(filter(None, dtypes), "float32"), 4)


def routed_bytes(profile: ModelProfile, batch: float) -> list[tuple[float, float, int]]:
    """For each mixture: the bytes of the rows that a rank routes, the bytes of their weights, and how often the layer
    appears in the model."""
    result = []
    for segment in profile.segments:
        operators = _expert_operators(segment, profile) if segment.phase == "forward" else {}
        for layer, numbers in operators.items():
            products = _products(segment, layer, numbers)
            rows = _row_bytes(segment, layer, numbers).at(batch)
            weights = sum(p.shape[1].at(batch) for p in products) * _item_bytes(segment, numbers)
            result.append((rows, weights, segment.block_count))
    return result


def at_load(profile: ModelProfile, load: float) -> ModelProfile:
    """The profile of a rank whose experts get `load` times their even share of tokens: what they keep and allocate for
    them is larger. `profile` has all experts."""
    modules = _layers_by_module(profile.experts)
    segments = []
    for segment in profile.segments:
        changes = tuple(
            replace(change, bytes=BatchPolynomial(change.bytes.constant, change.bytes.linear * load))
            if change.role != "gradient" and _layer_of(change.layer, modules) is not None
            else change
            for change in segment.changes
        )
        operators = tuple(
            replace(operator, shape=(*operator.shape[:1], operator.shape[1].scaled(load), *operator.shape[2:]))
            if operator.kind == "matmul" and operator.shape[1].linear and _layer_of(operator.layer, modules) is not None
            else operator
            for operator in segment.operators
        )
        segments.append(replace(segment, changes=changes, operators=operators))
    return replace(profile, segments=tuple(segments))


def kept_bytes(profile: ModelProfile, batch: float) -> float:
    """The bytes that all experts of a rank keep from the forward pass of a microbatch, with even routing."""
    modules = _layers_by_module(profile.experts)
    return sum(
        change.bytes.at(batch) * change.tensor_count * segment.block_count
        for segment in profile.segments
        if segment.phase == "forward"
        for change in segment.changes
        if change.role == "saved" and _layer_of(change.layer, modules) is not None
    )


def expert_messages(profile: ModelProfile, plan: Plan, batch: float) -> list[TensorMessage]:
    """The messages of one microbatch over the expert axis. `profile` has all experts."""
    if plan.axes.expert == 1:
        return []
    messages: list[TensorMessage] = []
    recomputed = plan.memory.recompute != "none"
    for rows, weights, times in routed_bytes(profile, batch):
        for size, passes in ((rows, 2), (weights, 1)):
            messages.append(TensorMessage("all_to_all", size, passes * times, True))
            messages.append(TensorMessage("all_to_all", size, passes * times * (2 if recomputed else 1), False))
    return messages


def worst_buffer_bytes(profile: ModelProfile, plan: Plan, batch: float) -> tuple[float, float]:
    """The bytes of the buffers of one mixture with even routing, and if all rows go to the experts of one rank."""
    rows = max((rows for rows, _, _ in routed_bytes(profile, batch)), default=0.0)
    return 2 * rows, 2 * rows * plan.axes.expert
