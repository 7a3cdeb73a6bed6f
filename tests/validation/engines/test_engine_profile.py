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
    """Casts of weights are not. Operators that computed in fp32 between two casts move half as many bytes."""

    def casts_and_norm_bytes(engine: Engine) -> tuple[set[bool], float]:
        operators = [o for s in engine_profile(traced(), engine).segments if s.blocks for o in s.operators]
        casts = {bool(o.shape[0].linear) for o in operators if o.name == "_to_copy"}
        return casts, sum(o.bytes.linear for o in operators if o.kind == "norm" and o.dtype == "float32")

    casts, norm_bytes = casts_and_norm_bytes(Engine(name="one", fused=fused))
    assert casts == ({False} if fused else {False, True})
    assert norm_bytes == pytest.approx(casts_and_norm_bytes(Engine(name="eager"))[1] / (2 if fused else 1))
    assert norm_bytes


def test_a_vocabulary_is_padded_and_attention_is_not() -> None:
    def padded_shape(products: float) -> list[float]:
        segment = traced().segments[0]
        product = next(o for s in traced().segments for o in s.operators if o.kind == "matmul")
        odd = replace(product, shape=tuple(BatchPolynomial(size, 0.0) for size in (products, 2048.0, 225.0, 64.0)))
        profile = replace(traced(), segments=(replace(segment, operators=(odd,)),))
        return [
            size.constant for size in engine_named("megatron").padded_profile(profile).segments[0].operators[0].shape
        ]

    assert padded_shape(1.0) == [1.0, 2048.0, 256.0, 64.0]
    assert padded_shape(16.0) == [16.0, 2048.0, 225.0, 64.0]


@pytest.mark.parametrize(
    ("fused", "drops", "between"),
    [
        (True, True, {"fused_log_softmax", "native_dropout"}),
        (False, True, {"masked_fill", "softmax", "native_dropout"}),
        (False, False, {"masked_fill", "softmax"}),
    ],
)
def test_attention_that_writes_its_scores_has_the_operators_of_its_engine(
    fused: bool, drops: bool, between: set[str]
) -> None:
    profile = traced()
    only = tuple(replace(s, operators=tuple(o for o in s.operators if o.kind == "attention")) for s in profile.segments)
    engine = Engine(name="scores", writes_scores=True, fused=fused, drops_scores=drops)
    executed = engine_profile(replace(profile, segments=only), engine)
    assert {o.name for s in executed.segments for o in s.operators} == between | {"bmm"}


@pytest.mark.parametrize(("views", "moved"), [(False, 2 + 3), (True, 2 + 3 + 1 + 5 * 2)])
def test_a_mask_in_a_view_copies_the_gradient_of_all_scores(views: bool, moved: int) -> None:
    """torch's profiler counted, besides the gradient of softmax, one buffer that is zeroed and five copies."""
    profile = traced()
    only = tuple(
        replace(s, operators=tuple(replace(o, dtype="float32") for o in s.operators if o.kind == "attention"))
        for s in profile.segments
        if s.phase == "backward"
    )
    engine = Engine(name="scores", writes_scores=True, drops_scores=False, masks_scores_in_place=views)
    executed = engine_profile(replace(profile, segments=only), engine)
    between = [o for s in executed.segments for o in s.operators if o.name != "bmm"]
    pairs = next(o.shape[0].at(1) for o in between)
    attentions = sum(o.name == "softmax" for o in between)
    classes = [classify_operator(operator, 1, 1.0, True, 1.0) for operator in between]
    assert sum(operator_class.bytes for operator_class in classes if operator_class) == pytest.approx(
        4 * moved * pairs * attentions
    )


@pytest.mark.parametrize(("plain", "moved"), [(False, 8 + 4 + 8 + 12), (True, 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6)])
def test_an_unfused_loss_moves_all_scores_in_each_of_its_lines(plain: bool, moved: int) -> None:
    profile = traced()
    names = ("_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")
    only = tuple(replace(s, operators=tuple(o for o in s.operators if o.name in names)) for s in profile.segments)
    executed = engine_profile(
        replace(profile, segments=only), Engine(name="loss", unfused_loss=plain, half_weights=plain)
    )
    classes = [
        classify_operator(operator, 1, 1.0, segment.phase == "backward", 1.0)
        for segment in executed.segments
        for operator in segment.operators
    ]
    assert sum(operator_class.bytes for operator_class in classes if operator_class) == pytest.approx(
        moved * 512 * 4096, rel=0.01
    )


def test_scores_of_a_wider_dtype_move_more_bytes() -> None:
    def moved_bytes(dtype: str) -> float:
        profile = traced()
        segments = tuple(
            replace(s, operators=tuple(replace(o, dtype=dtype) for o in s.operators if o.kind == "attention"))
            for s in profile.segments
        )
        executed = engine_profile(replace(profile, segments=segments), Engine(name="scores", writes_scores=True))
        return sum(s.block_count * o.bytes.at(1) for s in executed.segments for o in s.operators)

    assert moved_bytes("float32") == pytest.approx(2 * moved_bytes("bfloat16"), rel=0.1)
