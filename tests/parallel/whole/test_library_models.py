"""What our step adds to a compiled model breaks no graph and compiles nothing again: models of libraries are compiled
with at most the graph breaks and later compilations that `torch.compile` of the bare model has."""

from collections.abc import Sequence
from functools import cache, partial

import pytest

from meshwright.errors import InputError
from tests.parallel.whole.counting import count_by_hand, count_ours
from tests.parallel.whole.library_models import LONG, QUICK

CASES = QUICK | LONG
Variant = tuple[str, str, int]  # precision, what is compiled, chunks of the loss
_IN_MAKE_TEST: list[Variant] = [("bf16", "model", 1), ("bf16", "model", 2), ("fp32", "blocks", 1)]
_VARIANTS: list[Variant] = [(p, what, n) for p in ("fp32", "bf16") for what in ("model", "blocks") for n in (1, 2)]


def check(name: str, variants: Sequence[Variant]) -> None:
    case, by_hand = CASES[name], cache(partial(count_by_hand, CASES[name]))
    for precision, compiled, chunks in variants:
        try:
            ours = count_ours(case, precision, compiled, chunks)
        except InputError as error:
            if chunks > 1 and "loss_chunks" in str(error):  # its head cannot be joined with the loss
                continue
            raise
        what = f"{precision}, {compiled}, {chunks} chunks: {ours}"
        assert ours.graphs > 0, what
        if ours.warnings:  # only that the model itself cannot be traced as a whole
            assert all("cannot trace all of the model" in text for text in ours.warnings), what
            assert by_hand(precision).breaks > 0, f"{what}, by hand {by_hand(precision)}"
        if ours.is_apart:  # only if the model has a break of its own
            assert by_hand(precision).breaks > 0, f"{what}, by hand {by_hand(precision)}"
        if ours.breaks or ours.late_graphs:
            assert ours.breaks <= by_hand(precision).breaks, f"{what}, by hand {by_hand(precision)}"
            assert ours.late_graphs <= by_hand(precision).late_graphs, f"{what}, by hand {by_hand(precision)}"


@pytest.mark.parametrize("name", list(QUICK))
def test_models_are_compiled_as_bare_ones_are(name: str) -> None:
    # One variant each, in turn among the models of text and among those of pictures. The chunks of large vocabularies
    # only: the soak has all of them.
    is_text = isinstance(QUICK[name].batch, dict)
    alike = [other for other, case in QUICK.items() if isinstance(case.batch, dict) == is_text]
    variants = [variant for variant in _IN_MAKE_TEST if variant[2] == 1 or is_text]
    check(name, [variants[alike.index(name) % len(variants)]])


@pytest.mark.soak
@pytest.mark.parametrize("name", list(CASES))
def test_all_models_are_compiled_as_bare_ones_are_in_all_variants(name: str) -> None:
    check(name, _VARIANTS)


def test_there_are_sixty_models() -> None:
    assert len(QUICK) == 12
    assert len(CASES) >= 60
