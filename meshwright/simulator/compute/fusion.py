"""Finds the kernels that `torch.compile` makes of the operators of a step, and the tensors that these kernels move.

Inductor keeps matrix products, convolutions and attention as they are. It combines operators that only move memory into
kernels which read every input once and write every output once; values between the operators of a kernel are never
written. This module repeats its rules as far as they decide how many bytes are moved:

    same kernel   an operator joins the kernel of an operator whose result it reads, unless a product or another kernel
                  has to run between the two                                                            _stages
    rows          norms, softmax and losses reduce rows, and are fused with what is before and behind them
    columns       sums over the batch (gradients of biases) are kernels of their own                    _is_sum
    statistics    BatchNorm reads its inputs once more, for its statistics                       computes_statistics
    windows       pooling and interpolation read windows of a tensor that was written                   _reads_windows
    saved         for the backward pass: values that products of the backward pass read. Other values are computed
                  again within the kernel that needs them, if the values from which they are computed are smaller, or
                  are saved anyway (the partitioner of torch/_functorch/partitioners.py)                recomputed_for

Only the last rule depends on the batch, so the others are applied once for all batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.profile.values import BatchPolynomial, Operator

_FUSED_KINDS = ("elementwise", "copy", "norm", "reduction")
_OWN_KERNEL = ("sort", "topk", "cumsum", "index", "gather", "scatter", "nonzero", "unique")
_WINDOWS = ("pool", "upsample", "interpolate")
_SUMS = ("sum", "mean", "var", "var_mean")
_OFFSET_BYTES = 1 / 8  # compiled max pooling stores positions in a window in 8 bits, not indices in 64 bits


@dataclass
class StepOperator:
    """An operator of a step and its place: `segment` is the index of its segment, `position` its index there. `unit`
    names the function that it is compiled with; None if it is not compiled. `stage` numbers kernels: operators of
    different stages are in different kernels."""

    operator: Operator
    segment: int
    position: int
    backward: bool
    unit: str | None
    stage: int = 0
    kernel: int = -1

    @cached_property
    def is_fused(self) -> bool:
        """Whether the operator becomes part of a kernel that the compiler writes."""
        operator = self.operator
        return self.unit is not None and operator.kind in _FUSED_KINDS and not _has_own_kernel(operator)

    @property
    def unit_and_pass(self) -> tuple[str | None, bool]:
        return self.unit, self.backward


@dataclass
class Kernel:
    """Operators that one kernel computes, by their index in the step, and the values that it reads and writes."""

    members: list[int] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)  # value -> the first member that reads it
    writes: dict[int, int] = field(default_factory=dict)  # value -> the member that computes it


@dataclass
class FusedStep:
    """The kernels of a compiled step. `sizes` are the bytes of all values, `producers` the operators that compute them
    (values that exist before the step have none). Of the values of the forward pass that the backward pass reads,
    `saved` are saved with every batch, and `optional` could be computed again from the values that are named there.
    `recomputed` are those that are, and `readers`, for each value in memory, the operators that read it there: these
    two, and what kernels read and write, are filled by `with_recomputed`."""

    operators: list[StepOperator]
    sizes: dict[int, BatchPolynomial]
    producers: dict[int, int]
    kernels: list[Kernel] = field(default_factory=list)
    saved: frozenset[int] = frozenset()
    optional: dict[int, frozenset[int]] = field(default_factory=dict)
    recomputed: dict[int, frozenset[int]] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)

    def recomputed_for(self, batch: float) -> tuple[int, ...]:
        """The values that the backward pass of a batch of this many samples computes again."""
        saved, recomputed = set(self.saved), []
        for value, sources in self.optional.items():
            added = {source for source in sources - saved if source in self.producers}
            # Other values that are computed from the same ones need not be saved either.
            replaced = [
                other for other, needed in self.optional.items() if needed <= sources | saved and other not in saved
            ]
            if self.total_bytes(added).at(batch) < self.total_bytes({value, *replaced}).at(batch):
                saved |= added
                recomputed.append(value)
            else:
                saved.add(value)
        return tuple(recomputed)

    def with_recomputed(self, values: Sequence[int]) -> "FusedStep":
        """The step whose backward pass computes these values again."""
        step = replace(
            self,
            kernels=[Kernel(kernel.members) for kernel in self.kernels],
            recomputed={value: self.optional[value] for value in values},
            readers={},
        )
        _find_memory_traffic(step)
        return step

    def sources(self, number: int) -> set[int]:
        """The values in memory from which the kernel of an operator computes what this operator reads."""
        found: set[int] = set()
        visited, waiting = {number}, [number]
        while waiting:
            reader = waiting.pop()
            for use in self.operators[reader].operator.reads:
                producer = self.producers.get(use.value)
                if producer is None or self.operators[producer].kernel != self.operators[number].kernel:
                    found |= self.memory_values(use.value, reader)
                elif producer not in visited:
                    visited.add(producer)
                    waiting.append(producer)
        return found

    def total_bytes(self, values: Iterable[int]) -> BatchPolynomial:
        """The sum of the bytes of these values."""
        sizes = [self.sizes[value] for value in values]
        return BatchPolynomial(
            sum(s.constant for s in sizes), sum(s.linear for s in sizes), sum(s.square for s in sizes)
        )

    def memory_values(self, value: int, reader: int) -> frozenset[int]:
        """The values that an operator reads from memory to have this value: the value itself, or those from which the
        backward pass computes it again."""
        if self.operators[reader].backward and self.operators[reader].is_fused and value in self.recomputed:
            return self.recomputed[value]
        return frozenset((value,))


def fuse(operators: list[StepOperator]) -> FusedStep:
    """The kernels of a step whose operators run in this order, as far as they are the same for every batch."""
    sizes: dict[int, BatchPolynomial] = {}
    producers: dict[int, int] = {}
    for number, step in enumerate(operators):
        for use in step.operator.reads:
            sizes.setdefault(use.value, use.bytes)
        is_max_pool = step.is_fused and step.operator.name.startswith("max_pool") and len(step.operator.writes) > 1
        for place, use in enumerate(step.operator.writes):
            producers[use.value] = number
            sizes[use.value] = use.bytes.scaled(_OFFSET_BYTES) if is_max_pool and place else use.bytes
    fused = FusedStep(operators, sizes, producers)
    _stages(fused)
    _assign_kernels(fused)
    _divide_passes(fused)
    return fused


def _has_own_kernel(operator: Operator) -> bool:
    return any(word in operator.name for word in _OWN_KERNEL)


def _reads_windows(operator: Operator) -> bool:
    return any(word in operator.name for word in _WINDOWS)


def _is_sum(operator: Operator) -> bool:
    """Whether the operator sums over the batch, so that its result does not grow with it."""
    return operator.name in _SUMS and all(not size.linear and not size.square for size in operator.shape)


def reduces(operator: Operator) -> bool:
    """Whether the operator reduces rows or columns of a tensor."""
    return operator.kind == "norm" or (operator.kind == "reduction" and not _reads_windows(operator))


def computes_statistics(operator: Operator) -> bool:
    """Whether the operator is a BatchNorm, whose statistics a kernel before it computes."""
    return operator.kind == "norm" and "batch_norm" in operator.name


# ---- which operators are in one kernel


def _joins(first: StepOperator, second: StepOperator) -> bool:
    """Whether the second operator, which reads a result of the first, could run in the same kernel."""
    return (
        first.is_fused
        and second.is_fused
        and first.unit_and_pass == second.unit_and_pass
        and not _is_sum(first.operator)
        and not _is_sum(second.operator)
        and not _reads_windows(second.operator)
    )


def _stages(fused: FusedStep) -> None:
    """Numbers the operators: an operator has the stage of those whose results it reads, or a later one if it cannot
    join their kernel. An operator whose results only one later stage reads is computed there."""
    operators, consumers = fused.operators, _consumers(fused)
    for second in operators:
        for use in second.operator.reads:
            number = fused.producers.get(use.value)
            if number is not None and operators[number] is not second:
                first = operators[number]
                second.stage = max(second.stage, first.stage + (not _joins(first, second)))
    for number in reversed(range(len(operators))):
        first, later = operators[number], consumers[number]
        if later and all(_joins(first, operators[n]) for n in later) and len({operators[n].stage for n in later}) == 1:
            first.stage = operators[later[0]].stage


def _consumers(fused: FusedStep) -> list[list[int]]:
    """For each operator, the operators of the same pass that read its results."""
    consumers: list[list[int]] = [[] for _ in fused.operators]
    for number, step in enumerate(fused.operators):
        for use in step.operator.reads:
            producer = fused.producers.get(use.value)
            if producer is not None and producer < number and fused.operators[producer].backward == step.backward:
                consumers[producer].append(number)
    return consumers


def _assign_kernels(fused: FusedStep) -> None:
    """Sets the kernel of every operator: operators of the same stage that are connected share one."""
    operators = fused.operators
    parent = list(range(len(operators)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for number, second in enumerate(operators):
        for use in second.operator.reads:
            producer = fused.producers.get(use.value)
            if producer is not None and producer != number:
                first = operators[producer]
                if first.stage == second.stage and _joins(first, second):
                    parent[root(number)] = root(producer)
    kernels: dict[int, Kernel] = {}
    for number, step in enumerate(operators):
        kernel = kernels.setdefault(root(number), Kernel())
        kernel.members.append(number)
        step.kernel = root(number)
    fused.kernels = list(kernels.values())


# ---- what the backward pass keeps, and what it computes again


def _divide_passes(fused: FusedStep) -> None:
    """Finds the values of the forward pass that the backward pass reads, and those of them that it could compute
    again."""
    readers: dict[int, list[StepOperator]] = {}
    for step in fused.operators:
        for use in step.operator.reads if step.backward else ():
            producer = fused.producers.get(use.value)
            if producer is not None and not fused.operators[producer].backward:
                readers.setdefault(use.value, []).append(step)
    fused.optional = {
        value: frozenset(sources)
        for value, steps in readers.items()
        if all(step.is_fused for step in steps) and (sources := _recompute_sources(fused, value))
    }
    fused.saved = frozenset(readers.keys() - fused.optional.keys())


def _recompute_sources(fused: FusedStep, value: int) -> set[int]:
    """The values from which a fused kernel of the backward pass could compute this value again; empty if it is saved in
    any case: a result of a product, or of an operator that reads the result of an earlier kernel, which the partitioner
    does not compute again (`ban_recompute_used_far_apart`)."""
    producer = fused.producers[value]
    if not fused.operators[producer].is_fused or _is_sum(fused.operators[producer].operator):
        return set()
    sources = fused.sources(producer)
    written = [fused.operators[fused.producers[source]] for source in sources if source in fused.producers]
    return set() if any(step.is_fused for step in written) else sources


# ---- what kernels read and write


def _find_memory_traffic(fused: FusedStep) -> None:
    operators = fused.operators
    for kernel in fused.kernels:
        kernel_number = operators[kernel.members[0]].kernel
        for number in kernel.members:
            for use in operators[number].operator.reads:
                producer = fused.producers.get(use.value)
                if producer is not None and producer != number and operators[producer].kernel == kernel_number:
                    continue
                for value in fused.memory_values(use.value, number):
                    kernel.reads.setdefault(value, number)
                    fused.readers.setdefault(value, []).append(number)
    for kernel in fused.kernels:
        for number in kernel.members:
            for use in operators[number].operator.writes:
                if use.value in fused.readers or use.is_gradient:
                    kernel.writes[use.value] = number
