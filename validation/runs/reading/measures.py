"""The measured values of a row: the seconds of a step and the bytes of memory.

If a row does not state its step time, it follows from a rate:
    step = batch / samples per second = batch · length / tokens per second
    step = batch · s (6 N + 12 L h s) / (ranks · MFU · peak)         nanotron, N parameters (`_nanotron_token_flops`)
    step = 96 B s L h² (1 + s / 6h + V / 16Lh) / (ranks · FLOP/s)    DeepSpeed (`_recomputed_sample_flops`)
"""

from typing import Any

from meshwright.user.call import Call
from validation.runs.case import NotCovered
from validation.runs.reading.flops import decoder_keywords
from validation.runs.rows import PublishedRow

H100_PEAK = 989e12  # FLOP/s in bf16, which nanotron computes its MFU with
UNITS = {"GB": 1e9, "GiB": 2**30}


def step_of(row: PublishedRow, model: Call, length: int, global_batch: int) -> tuple[float | None, tuple[str, ...]]:
    """The seconds of one step of a decoder (None if the run ran out of memory), and the defaults that were used."""
    measured, ranks = row.measured, row.hardware["n_gpus"]
    if measured.get("oom"):
        return None, ()
    stated_s = seconds_of(row, global_batch, length)
    if stated_s is not None:
        return stated_s, ()
    if "mfu_pct" in measured:
        token_flops = _nanotron_token_flops(decoder_keywords(model.arguments), length, row.plan.get("pp", 1))
        flops = token_flops * length * global_batch
        return flops / (ranks * H100_PEAK * measured["mfu_pct"] / 100), ("step time from its share of 989 TFLOP/s",)
    if "tflops_per_gpu" in measured:
        flops = _recomputed_sample_flops(decoder_keywords(model.arguments), length) * global_batch
        return flops / (ranks * measured["tflops_per_gpu"] * 1e12), ("step time from its TFLOP/s",)
    raise NotCovered("the row states no step time, and none follows from what it states")


def seconds_of(row: PublishedRow, global_batch: int, length: int = 0) -> float | None:
    """The seconds of one step as the row states them, or as they follow from its samples or tokens per second. None if
    it states none of these."""
    measured = row.measured
    for name in ("step_time_s", "step_time_s_derived"):
        if name in measured:
            return float(measured[name])
    if "samples_per_s" in measured:
        return global_batch / float(measured["samples_per_s"])
    if length and "tokens_per_s" in measured:
        return global_batch * length / float(measured["tokens_per_s"])
    return None


def memory_of(row: PublishedRow) -> tuple[float | None, str | None]:
    """The bytes of memory, and which bytes they are (allocated, reserved, or all that is used of the device). Both are
    None if the row states no memory; the second is also None if the row does not say which bytes they are."""
    kind = row.measured.get("mem_kind")
    for unit, factor in UNITS.items():
        value = row.measured.get(f"peak_mem_{unit}")
        if value is not None:
            return float(value) * factor, kind
    return None, None


def _nanotron_token_flops(keywords: dict[str, Any], length: int, stages: int) -> float:
    """The FLOPs per token that nanotron's MFU is computed from. Its number of parameters N is summed over ranks: it
    includes the embedding and the head, and a tied embedding counts twice if the first and the last stage each have a
    copy. This was checked against a copy of its table that also states tokens per second and GPU: 38,895, 36,497 and
    33,677 are reproduced within 0.01% (eyao600/Rapid-LLM,
    validation_scripts/huggingface_data/bench_final2_mod_add.csv)."""
    hidden, layers, wide = keywords["hidden"], keywords["layers"], keywords["feedforward"]
    kv_heads = keywords.get("kv_heads") or keywords["heads"]
    block = (2 + 2 * kv_heads / keywords["heads"]) * hidden**2 + 3 * hidden * wide + 2 * hidden
    embeddings = 1 if keywords["tied"] and stages == 1 else 2
    parameters = layers * block + hidden + embeddings * keywords["vocabulary"] * hidden
    return 6 * float(f"{parameters:.3g}") + 12 * layers * hidden * length  # nanotron uses N as it prints it, rounded


def _recomputed_sample_flops(keywords: dict[str, Any], length: int) -> float:
    """The FLOPs of one sample with full recomputation, as DeepSpeed counts them."""
    hidden, layers, vocabulary = keywords["hidden"], keywords["layers"], keywords["vocabulary"]
    terms = 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96.0 * length * layers * hidden**2 * terms
