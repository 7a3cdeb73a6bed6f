"""The profile of a model whose head is joined with its loss (`compute.loss_chunks`): the operators of the scores and of
their gradients are replaced by those that parallel/chunked_loss runs.

    each of k chunks   scores = hidden · weight           the head's product, for 1/k of the tokens
                       cast, log softmax, losses          as before, for 1/k of the tokens
                       gradient of the scores             one operator in place, and a cast
                       gradients of hidden and weight     the products of the backward pass, for 1/k of the tokens
                       sum of the weight's gradients      reads and writes the whole gradient, but for the first chunk
    backward pass      both gradients are multiplied by that of the loss

In memory are the scores of one chunk, and from the forward to the backward pass the two gradients.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from meshwright.profile.values import (
    BatchPolynomial,
    MemoryChange,
    ModelProfile,
    Operator,
    TensorUse,
    TraceSegment,
)

_LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
_SOFTMAX = "_log_softmax"
_CASTS = ("_to_copy", "clone")
_OF_SCORES = (*_LOSSES, *_CASTS, _SOFTMAX, "sum", "neg", "mul", "div")  # what may read scores that are chunked
# Operators on one number for each token or on the hidden states of a chunk, which only cost their launch: views are not
# counted. Counted in parallel/chunked_loss/cross_entropy.py.
_SMALL_OPERATORS = 13
_Place = tuple[int, int]  # a segment and the position of an operator in it


@dataclass(frozen=True)
class HeadLoss:
    """The operators of a profile that compute scores with a linear head, their cross entropy and the gradients of both,
    by place. `forward` and `backward` are the operators that a loss in chunks replaces, `product` the first of them.
    `casts` are casts of hidden states and weight before the product. `hidden` and `weight` are the products that
    compute the gradients (None for a frozen weight), `results` the gradients that later operators read."""

    product: _Place
    forward: tuple[_Place, ...]
    backward: tuple[_Place, ...]
    casts: tuple[_Place, ...]
    hidden: _Place | None
    weight: _Place | None
    results: tuple[TensorUse, ...]


def chunked_profile(profile: ModelProfile, chunk_count: int) -> ModelProfile:
    """The profile with the loss in this many chunks; the profile itself for one chunk, or if the loss is no cross
    entropy of the scores of a linear head."""
    loss = find_head_loss(profile) if chunk_count > 1 else None
    if loss is None:
        return profile
    chunks = _Chunks(profile, loss, chunk_count)
    segments = _without_scores(profile, loss)
    for places, (operators, changes) in ((loss.forward, chunks.forward()), (loss.backward, chunks.backward())):
        number = places[0][0]
        positions = [position for _, position in places]
        segments[number] = _replaced(segments[number], positions, operators, changes)
    return replace(profile, segments=tuple(segments))


def scored_tokens(profile: ModelProfile) -> float:
    """The number of tokens of one sample whose loss can be computed in chunks; 0 if it cannot."""
    loss = find_head_loss(profile)
    if loss is None:
        return 0.0
    segment, position = loss.product
    return profile.segments[segment].operators[position].shape[1].at(1)


# ---- which operators are replaced


def find_head_loss(profile: ModelProfile) -> HeadLoss | None:
    """Finds the loss with the most scores. None if the model's loss is no cross entropy of the scores of a linear head,
    if other operators use the scores, or if the trace does not say which tensors operators read."""
    operators = {
        (number, position): operator
        for number, segment in enumerate(profile.segments)
        if not segment.blocks
        for position, operator in enumerate(segment.operators)
    }
    passes = [
        {place: op for place, op in operators.items() if profile.segments[place[0]].phase == phase}
        for phase in ("forward", "backward")
    ]
    producers = {use.value: place for place, operator in passes[0].items() for use in operator.writes}
    products = [
        product
        for place, operator in passes[0].items()
        if operator.name in _LOSSES and (product := _product_of(operator, passes[0], producers)) is not None
    ]
    if not products:
        return None
    product = max(products, key=lambda place: operators[place].writes[0].bytes.at(1))
    return _loss_of_product(product, passes[0], passes[1], producers)


def _product_of(loss: Operator, forward: dict[_Place, Operator], producers: dict[int, _Place]) -> _Place | None:
    """The product with a weight whose result the loss reads, possibly cast or copied; None if it reads another one."""
    operator, has_softmax = loss, False
    while operator.reads:
        place = producers.get(operator.reads[0].value)
        if place is None:
            return None
        operator = forward[place]
        if operator.kind == "matmul":
            is_weight = len(operator.reads) > 1 and not _grows(operator.reads[-1].bytes)
            return place if has_softmax and is_weight else None
        if operator.name not in (*_CASTS, _SOFTMAX):
            return None
        has_softmax |= operator.name == _SOFTMAX
    return None


def _loss_of_product(
    product: _Place,
    forward: dict[_Place, Operator],
    backward: dict[_Place, Operator],
    producers: dict[int, _Place],
) -> HeadLoss | None:
    head = forward[product]
    values = {head.writes[0].value}
    # Slices may leave out some of the tokens, and half-precision scores have half the bytes.
    large = head.writes[0].bytes.at(1) / 4
    members = [product]
    for place, operator in forward.items():
        if place > product and values & {use.value for use in operator.reads}:
            if operator.name not in _OF_SCORES:
                return None
            members.append(place)
            values |= {use.value for use in operator.writes if use.bytes.at(1) > large}
    of_backward: list[_Place] = []
    gradients = set(values)
    hidden: _Place | None = None
    weight: _Place | None = None
    for place, operator in backward.items():
        writes_scores = any(use.bytes.at(1) > large for use in operator.writes)
        if not gradients & {use.value for use in operator.reads}:
            continue
        of_backward.append(place)
        if operator.kind == "matmul":
            if _grows(operator.writes[0].bytes):
                hidden = place
            else:
                weight = place
        elif writes_scores:
            gradients |= {use.value for use in operator.writes}
    if not of_backward or len({place[0] for place in members}) > 1 or len({place[0] for place in of_backward}) > 1:
        return None
    results: list[TensorUse] = []
    for found in (hidden, weight):
        if found is None:
            continue
        result = backward[found].writes[0]
        cast = next(
            (p for p, op in backward.items() if op.name == "_to_copy" and op.reads[0].value == result.value), None
        )
        if cast is not None and cast[0] == found[0]:
            of_backward.append(cast)
            result = backward[cast].writes[0]
        results.append(result)
    casts = [producers[use.value] for use in head.reads if use.value in producers]
    casts = [place for place in casts if forward[place].name == "_to_copy" and forward[place].layer == head.layer]
    return HeadLoss(product, tuple(members), tuple(sorted(of_backward)), tuple(casts), hidden, weight, tuple(results))


# ---- what runs instead


class _Chunks:
    """The operators of a loss in `number` chunks, with their changes of memory. The values of the tensors that the
    chunks use have new numbers. Operators that are added stand for `_chunks` chunks."""

    def __init__(self, profile: ModelProfile, loss: HeadLoss, number: int) -> None:
        self._profile = profile
        self._loss = loss
        self._number = number
        used = (
            use.value for segment in profile.segments for op in segment.operators for use in (*op.reads, *op.writes)
        )
        self._values = count(max(used) + 1)
        self._head = self._operators(loss.product)
        self._saved = {use.value: replace(use, value=next(self._values), is_gradient=False) for use in loss.results}
        self._list: list[Operator] = []
        self._changes: list[MemoryChange] = []
        self._chunks = 1

    def _operators(self, place: _Place) -> Operator:
        return self._profile.segments[place[0]].operators[place[1]]

    def forward(self) -> tuple[list[Operator], list[MemoryChange]]:
        self._list, self._changes = [], []
        for use in self._saved.values():
            self._allocate(use.bytes, "saved")
        self._chunk(is_first=True)
        self._chunks = self._number - 1  # the second chunk stands for all others, which are equal
        self._chunk(is_first=False)
        self._chunks = 1
        for place in self._loss.casts:  # freed when the last chunk is done
            self._allocate(self._operators(place).writes[0].bytes.scaled(-1.0), "temporary")
        return self._list, self._changes

    def backward(self) -> tuple[list[Operator], list[MemoryChange]]:
        self._list, self._changes = [], []
        for result in self._loss.results:
            saved = self._saved[result.value]
            self._add(self._small("mul", saved.bytes.scaled(2.0)), (saved,), (result,))
            self._allocate(saved.bytes.scaled(-1.0), "saved")
        return self._list, self._changes

    def _chunk(self, *, is_first: bool) -> None:
        loss, get = self._loss, self._operators
        scores = self._step(self._head, self._head.reads, ())
        cast = next((get(p) for p in loss.forward if get(p).name == "_to_copy"), None)
        if cast is not None:
            scores = self._step(cast, (scores,), (scores,))
        softmax = next(get(place) for place in loss.forward if get(place).name == _SOFTMAX)
        probabilities = self._step(softmax, (scores,), (scores,))
        for _ in range(_SMALL_OPERATORS):
            self._add(self._small("where", self._part(self._head.shape[1].scaled(8.0))), (), ())
        in_place = replace(softmax, name="exp", kind="elementwise", computes_gradient=False)
        self._add(self._of_chunk(in_place), (probabilities,), ())
        gradient = probabilities
        back = next((get(place) for place in loss.backward if get(place).name == "_to_copy"), None)
        if cast is not None and back is not None:
            gradient = self._step(replace(back, computes_gradient=False), (probabilities,), (probabilities,))
        for place in (loss.hidden, loss.weight):
            if place is not None:
                self._gradient(get(place), gradient, is_sum=place == loss.weight and not is_first)
        self._allocate(gradient.bytes.scaled(-1.0), "temporary")

    def _gradient(self, product: Operator, gradient: TensorUse, is_sum: bool) -> None:
        """The product that computes the gradient of hidden states or weight for a chunk, and what adds it to the
        gradient of the whole."""
        product = replace(product, computes_gradient=False)
        reads, grows = (gradient, *product.reads[1:]), _grows(product.writes[0].bytes)
        saved = list(self._saved.values())[0 if grows else -1]
        if not grows and product.writes[0].bytes == saved.bytes:  # it is computed where it is summed
            self._add(self._of_chunk(product), reads, (saved,))
            return
        result = self._step(product, reads, ())
        moved = result.bytes.scaled(2.0 if grows else 1.0)
        if not grows:
            moved = BatchPolynomial(moved.constant + (2.0 if is_sum else 1.0) * saved.bytes.constant, 0.0)
        self._add(self._small("copy_" if grows else "add", moved), (result,), (saved,))
        self._allocate(result.bytes.scaled(-1.0), "temporary")

    def _step(self, like: Operator, reads: tuple[TensorUse, ...], freed: Iterable[TensorUse]) -> TensorUse:
        """Adds an operator for one chunk. Returns the tensor that it writes. The tensors `freed` are freed then."""
        result = TensorUse(next(self._values), self._part(like.writes[0].bytes))
        self._add(self._of_chunk(like), reads, (result,))
        self._allocate(result.bytes, "temporary")
        for use in freed:
            self._allocate(use.bytes.scaled(-1.0), "temporary")
        return result

    def _add(self, operator: Operator, reads: tuple[TensorUse, ...], writes: tuple[TensorUse, ...]) -> None:
        self._list.append(replace(operator, reads=reads, writes=writes, chunks=self._chunks))

    def _allocate(self, size: BatchPolynomial, role: str) -> None:
        self._changes.append(MemoryChange(len(self._list), size, role, self._head.layer))  # type: ignore[arg-type]

    def _part(self, quantity: BatchPolynomial) -> BatchPolynomial:
        """What one chunk has of a quantity: the part that grows with the batch is divided."""
        return BatchPolynomial(quantity.constant, quantity.linear / self._number, quantity.square / self._number)

    def _of_chunk(self, operator: Operator) -> Operator:
        return replace(
            operator,
            flops=self._part(operator.flops),
            bytes=self._part(operator.bytes),
            shape=tuple(map(self._part, operator.shape)),
            split=None,
        )

    def _small(self, name: str, size: BatchPolynomial) -> Operator:
        """An element-wise operator that moves so many bytes."""
        nothing, item_bytes = BatchPolynomial(0.0, 0.0), 4
        kind = "copy" if name == "copy_" else "elementwise"
        shape = (size.scaled(0.5 / item_bytes),)
        return Operator(self._head.layer, name, kind, "float32", nothing, size, shape)  # type: ignore[arg-type]


def _replaced(
    segment: TraceSegment, leaves_out: Sequence[int], operators: list[Operator], changes: list[MemoryChange]
) -> TraceSegment:
    """The segment with other operators, which change memory as `changes` says, in place of those at the positions
    `leaves_out`."""
    first = leaves_out[0]
    kept = [position for position in range(len(segment.operators)) if position not in leaves_out]
    before, behind = ([position for position in kept if (position > first) == later] for later in (False, True))

    def moved(change: MemoryChange) -> MemoryChange:
        after = sum(position < change.after_operators for position in kept)
        return replace(change, after_operators=after + (len(operators) if change.after_operators > first else 0))

    earlier, later = (
        [moved(change) for change in segment.changes if (change.after_operators > first) == is_later]
        for is_later in (False, True)
    )
    inserted = [replace(change, after_operators=change.after_operators + len(before)) for change in changes]
    return replace(
        segment,
        operators=(
            *(segment.operators[position] for position in before),
            *operators,
            *(segment.operators[position] for position in behind),
        ),
        changes=(*earlier, *inserted, *later),
    )


def _without_scores(profile: ModelProfile, loss: HeadLoss) -> list[TraceSegment]:
    """The segments without the memory of the operators that are replaced, except for their results. Casts of hidden
    states and weight are temporary."""
    replaced, results = {*loss.forward, *loss.backward}, {use.value for use in loss.results}
    to_free: list[tuple[float, str, str]] = []  # bytes, role and layer of the tensors that are left out
    segments: list[TraceSegment] = []
    for number, segment in enumerate(profile.segments):
        changes: list[MemoryChange] = []
        for change in segment.changes:
            place = (number, change.after_operators - 1)
            key = (change.bytes.at(1), change.role, change.layer)
            if key[0] > 0 and place in replaced:
                writes = segment.operators[place[1]].writes
                if not any(use.value in results and use.bytes == change.bytes for use in writes):
                    to_free.append(key)
                    continue
            elif key[0] > 0 and place in loss.casts:
                to_free.append(key)
                change = replace(change, role="temporary")
            elif (freed := (-key[0], *key[1:])) in to_free:
                to_free.remove(freed)
                continue
            changes.append(change)
        segments.append(replace(segment, changes=tuple(changes)))
    return segments


def _grows(size: BatchPolynomial) -> bool:
    return bool(size.linear or size.square)
