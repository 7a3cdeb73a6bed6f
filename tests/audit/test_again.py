"""A difference that rounding may have caused counts if it is seen from two starts."""

from dataclasses import replace

import pytest

from meshwright.audit.comparison.again import decide
from meshwright.audit.evidence import Difference
from meshwright.audit.result import Audit

EQUAL = Audit((1, 2), 3, "cpu", ("float32",), (), None, (), None, None, (), (), (), (), ())


def _differing(*differences: Difference) -> Audit:
    return replace(EQUAL, first_difference=differences[0], differences=differences)


def _gradient(name: str, rows: tuple[int, ...] = (), share: float = 0.01) -> Difference:
    return Difference(1, "gradient", name, 0.1, 1e-6, (0,), rows, share)


def test_an_equal_training_needs_one_start() -> None:
    assert decide([EQUAL]) == EQUAL


@pytest.mark.parametrize("change", [{"share": 0.5}, {"share": float("inf")}, {"step": 0}])
def test_a_large_difference_needs_one_start(change: dict[str, float]) -> None:
    audit = _differing(replace(_gradient("a"), **change))  # type: ignore[arg-type]
    assert decide([audit]) == audit


def test_a_small_difference_is_looked_for_again() -> None:
    assert decide([_differing(_gradient("a", (3,)))]) is None


def test_what_is_seen_again_is_a_difference() -> None:
    first, again = _differing(_gradient("a", (3,))), _differing(_gradient("b"), _gradient("a", (3, 4)))
    assert decide([first, again]) == first


def test_what_is_not_seen_again_is_a_note() -> None:
    result = decide([_differing(_gradient("a", (3,))), EQUAL])
    assert result is not None
    assert result.equal
    assert "gradient of a in step 1 is 1.0e-01 off" in result.notes[0]


@pytest.mark.parametrize("second", [_gradient("a", (4,)), _gradient("b", (3,))])
def test_another_row_or_tensor_is_not_the_same(second: Difference) -> None:
    first = _differing(_gradient("a", (3,)))
    assert decide([first, _differing(second)]) is None
    last = decide([first, _differing(second), _differing(_gradient("c"))])
    assert last is not None
    assert not last.equal
    assert "each of 3 starts" in last.notes[0]
    assert decide([first, _differing(second), first]) == first
