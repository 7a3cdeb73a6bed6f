"""The operators that the programs of published measurements execute."""

from dataclasses import replace

import pytest

from meshwright.profile.values import BatchPolynomial
from meshwright.simulator.compute.lookup import classify_operator
from tests.simulator.test_step import traced
from validation.engines.engine import Engine, engine_named
from validation.engines.engine_profile import engine_profile


@pytest.mark.parametrize("fused", [False, True])
def test_casts_of_activations_are_part_of_fused_kernels(fused: bool) -> None:
    """Those of weights are not; what was computed in fp32 between casts moves half as many bytes."""

    def found(engine: Engine) -> tuple[set[bool], float]:
        operators = [o for s in engine_profile(traced(), engine).segments if s.blocks for o in s.operators]
        casts = {bool(o.shape[0].linear) for o in operators if o.name == "_to_copy"}
        return casts, sum(o.bytes.linear for o in operators if o.kind == "norm" and o.dtype == "float32")

    casts, norms = found(Engine(name="one", fused=fused))
    assert casts == ({False} if fused else {False, True})
    assert norms == pytest.approx(found(Engine(name="eager"))[1] / (2 if fused else 1))
    assert norms


def test_a_vocabulary_is_padded_and_attention_is_not() -> None:
    def sides(many: float) -> list[float]:
        segment = traced().segments[0]
        product = next(o for s in traced().segments for o in s.operators if o.kind == "matmul")
        odd = replace(product, shape=tuple(BatchPolynomial(size, 0.0) for size in (many, 2048.0, 225.0, 64.0)))
        made = replace(traced(), segments=(replace(segment, operators=(odd,)),))
        return [size.constant for size in engine_named("megatron").padded_profile(made).segments[0].operators[0].shape]

    assert sides(1.0) == [1.0, 2048.0, 256.0, 64.0]
    assert sides(16.0) == [16.0, 2048.0, 225.0, 64.0]


@pytest.mark.parametrize(
    ("fused", "drops", "between"),
    [
        (True, True, {"fused_log_softmax", "native_dropout"}),
        (False, True, {"masked_fill", "softmax", "native_dropout"}),
        (False, False, {"masked_fill", "softmax"}),
    ],
)
def test_scores_are_gone_over_as_the_engine_does_it(fused: bool, drops: bool, between: set[str]) -> None:
    found = traced()
    only = tuple(replace(s, operators=tuple(o for o in s.operators if o.kind == "attention")) for s in found.segments)
    engine = Engine(name="scores", writes_scores=True, fused=fused, drops_scores=drops)
    run = engine_profile(replace(found, segments=only), engine)
    assert {o.name for s in run.segments for o in s.operators} == between | {"bmm"}


@pytest.mark.parametrize(("views", "moved"), [(False, 2 + 3), (True, 2 + 3 + 1 + 5 * 2)])
def test_a_mask_in_a_view_copies_the_gradient_of_all_scores(views: bool, moved: int) -> None:
    """Counted by the profiler beside PyTorch's own softmax: one buffer zeroed, five copies."""
    found = traced()
    only = tuple(
        replace(s, operators=tuple(replace(o, dtype="float32") for o in s.operators if o.kind == "attention"))
        for s in found.segments
        if s.phase == "backward"
    )
    engine = Engine(name="scores", writes_scores=True, drops_scores=False, masks_scores_in_place=views)
    run = engine_profile(replace(found, segments=only), engine)
    between = [o for s in run.segments for o in s.operators if o.name != "bmm"]
    pairs = next(o.shape[0].at(1) for o in between)
    attentions = sum(o.name == "softmax" for o in between)
    looked = [classify_operator(operator, 1, 1.0, True, 1.0) for operator in between]
    assert sum(one.bytes for one in looked if one) == pytest.approx(4 * moved * pairs * attentions)


@pytest.mark.parametrize(("plain", "moved"), [(False, 8 + 4 + 8 + 12), (True, 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6)])
def test_a_loss_line_by_line_goes_over_all_scores_with_each(plain: bool, moved: int) -> None:
    found = traced()
    names = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")
    only = tuple(replace(s, operators=tuple(o for o in s.operators if o.name in names)) for s in found.segments)
    run = engine_profile(replace(found, segments=only), Engine(name="loss", unfused_loss=plain, half_weights=plain))
    looked = [
        classify_operator(operator, 1, 1.0, segment.phase == "backward", 1.0)
        for segment in run.segments
        for operator in segment.operators
    ]
    assert sum(one.bytes for one in looked if one) == pytest.approx(moved * 512 * 4096, rel=0.01)


def test_scores_of_wider_numbers_move_more_bytes() -> None:
    def moved(dtype: str) -> float:
        found = traced()
        segments = tuple(
            replace(s, operators=tuple(replace(o, dtype=dtype) for o in s.operators if o.kind == "attention"))
            for s in found.segments
        )
        run = engine_profile(replace(found, segments=segments), Engine(name="scores", writes_scores=True))
        return sum(s.block_count * o.bytes.at(1) for s in run.segments for o in s.operators)

    assert moved("float32") == pytest.approx(2 * moved("bfloat16"), rel=0.1)
