"""The operators and the memory of a loss in chunks are predicted as they are when a step is recorded."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.parallel.chunked_loss.head import join_head_with_loss
from meshwright.plan import Plan
from meshwright.profile.tracing.recorder import record_step
from meshwright.profile.tracing.step import compute_loss
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.chunked_loss import chunked_profile, scored_tokens
from meshwright.simulator.compute.compiled_profile import compiled_profile
from meshwright.simulator.memory.replay import replay
from tests.parallel.chunked_loss.chunked_models import LENGTH, LOSSES, MODELS, SAMPLES, batch, plan_of

CHUNKS = 6


def predicted_peaks(profile: ModelProfile) -> tuple[float, float]:
    peaks = replay(profile, SAMPLES, lambda size: 0.0, adds_gradients=False)
    return peaks.forward.live.total(), peaks.backward.live.total()


def recorded_peaks(model: nn.Module, loss: str, precision: str) -> tuple[tuple[float, float], int]:
    """Returns the peaks of both passes of a step that is run, and the number of its operators."""
    data, names = batch(0, loss), {module: name for name, module in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of processors without bf16 instructions
        trace = record_step(model, lambda m: compute_loss(m, data, LOSSES[loss], precision, None), data, names)
    # Tensors of the meta device, from which shapes are found, are freed before the next operator.
    pairs = [(e.allocation, number) for number, e in enumerate(trace.memory) if e.allocation is not None]
    short = [pair for pair in pairs if len({trace.memory[n].after_operators for n in pair}) == 1]
    now, peaks = 0, [0, 0]
    for number, event in enumerate(trace.memory):
        if any(number in pair for pair in short):
            continue
        now += event.bytes
        in_backward = int(event.after_operators > trace.backward_begin)
        peaks[in_backward] = max(peaks[in_backward], now)
    return (peaks[0], peaks[1]), len(trace.operators)


def operator_count(profile: ModelProfile) -> int:
    return sum(
        segment.block_count * sum(operator.runs for operator in segment.operators) for segment in profile.segments
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model", "loss"), [("plain", "mean"), ("tied", "mean"), ("bias", "smoothed"), ("frozen", "mean")]
)
def test_operators_and_memory_are_those_of_a_recorded_step(model: str, loss: str, precision: str) -> None:
    whole = trace_profile(
        MODELS[model](), batch(0), LOSSES[loss], precision=precision, on_gpu=False, merge_equal_blocks=False
    )
    chunked = chunked_profile(whole, CHUNKS)
    assert chunked.flops(SAMPLES) == pytest.approx(whole.flops(SAMPLES))
    executed = MODELS[model]()
    join_head_with_loss(executed.head, Plan.model_validate({"compute": {"loss_chunks": CHUNKS}}))
    peaks, operators = recorded_peaks(executed, loss, precision)
    assert predicted_peaks(chunked) == pytest.approx(peaks, rel=0.06)
    assert max(peaks) < 0.7 * max(predicted_peaks(whole))
    assert operator_count(chunked) == pytest.approx(operators, rel=0.2)


def test_memory_that_is_allocated_is_freed() -> None:
    for compiled in ("none", "model"):
        plan = plan_of(CHUNKS, compute={"compile": compiled})
        profile = trace_profile(MODELS["plain"](), batch(0), LOSSES["mean"], precision="bf16")
        profile = compiled_profile(chunked_profile(profile, CHUNKS), plan, SAMPLES)
        left = sum(
            segment.block_count * change.bytes.at(SAMPLES) * change.tensor_count
            for segment in profile.segments
            for change in segment.changes
            if change.role != "gradient"
        )
        assert abs(left) <= 8  # the loss and its gradient are referenced to the end


def test_scores_are_found_where_only_a_cross_entropy_reads_them() -> None:
    def tokens_of(model: str, loss: str) -> float:
        return scored_tokens(trace_profile(MODELS[model](), batch(0, loss), LOSSES[loss]))

    assert tokens_of("tied", "mean") == LENGTH
    assert tokens_of("tied", "scores too") == 0
    regression = nn.Sequential(nn.Linear(4, 8))
    profile = trace_profile(regression, (torch.randn(2, 4), torch.randn(2)), regression_loss)
    assert scored_tokens(profile) == 0
    assert chunked_profile(profile, 4) is profile
    assert chunked_profile(profile, 1) is profile


def regression_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.mean(1), target)
