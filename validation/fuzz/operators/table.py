"""All operators by name."""

from validation.fuzz.operators import (
    attention,
    contractions,
    convolutions,
    functions,
    in_place,
    indexing,
    layers,
    modules,
    norms,
    pointwise,
    reductions,
    views,
)
from validation.fuzz.operators.operator import Operator

_FILES = (
    *(views, indexing, in_place, reductions, contractions, attention, convolutions, norms, layers, modules),
    *(functions, pointwise),
)
OPERATORS: dict[str, Operator] = {operator.name: operator for file in _FILES for operator in file.FAMILY.operators}
assert len(OPERATORS) == sum(len(file.FAMILY.operators) for file in _FILES), "two operators have one name"
