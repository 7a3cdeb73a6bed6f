"""What a row measured, in seconds a step and in bytes.

Where a step time is not given it follows from a rate:
    step = batch / samples per second = batch · length / tokens per second
    step = batch · s (6 N + 12 L h s) / (ranks · MFU · peak)                    nanotron, of N parameters, `_counted`
    step = 96 B s L h² (1 + s / 6h + V / 16Lh) / (ranks · FLOP/s)               DeepSpeed, with recomputation
"""

from typing import Any

from meshwright.call import Call
from validation.runs.case import NotCovered
from validation.runs.reading.flops import decoder_keywords
from validation.runs.rows import PublishedRow

H100_PEAK = 989e12  # that nanotron divides by, FLOP/s in bf16
UNITS = {"GB": 1e9, "GiB": 2**30}


def step_of(row: PublishedRow, model: Call, length: int, global_batch: int) -> tuple[float | None, tuple[str, ...]]:
    """Seconds a step of a decoder, None where it was out of memory, and the defaults that went into it."""
    measured, ranks = row.measured, row.hardware["n_gpus"]
    if measured.get("oom"):
        return None, ()
    known = seconds_of(row, global_batch, length)
    if known is not None:
        return known, ()
    if "mfu_pct" in measured:
        work = _counted(decoder_keywords(model.arguments), length, row.plan.get("pp", 1)) * length * global_batch
        return work / (ranks * H100_PEAK * measured["mfu_pct"] / 100), ("step time from its share of 989 TFLOP/s",)
    if "tflops_per_gpu" in measured:
        work = _with_recomputation(decoder_keywords(model.arguments), length) * global_batch
        return work / (ranks * measured["tflops_per_gpu"] * 1e12), ("step time from its TFLOP/s",)
    raise NotCovered("no step time, and none that follows")


def seconds_of(row: PublishedRow, global_batch: int, length: int = 0) -> float | None:
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
    """Bytes, and what they are: allocated, reserved, or all of a device's, where the row says."""
    kind = row.measured.get("mem_kind")
    for unit, factor in UNITS.items():
        value = row.measured.get(f"peak_mem_{unit}")
        if value is not None:
            return float(value) * factor, kind
    return None, None


def _counted(keywords: dict[str, Any], length: int, stages: int) -> float:
    """FLOPs a token. Nanotron's N is summed over ranks: a table of words counts, also beside a head, and one that is
    tied counts twice where first and last stage have a copy each. Checked against its throughput of 38,895, 36,497 and
    33,677 tokens a second and GPU beside its MFU, in a copy of its table (eyao600/Rapid-LLM, validation_scripts/
    huggingface_data/bench_final2_mod_add.csv): 0.01% apart."""
    hidden, layers, wide = keywords["hidden"], keywords["layers"], keywords["feedforward"]
    kv_heads = keywords.get("kv_heads") or keywords["heads"]
    block = (2 + 2 * kv_heads / keywords["heads"]) * hidden**2 + 3 * hidden * wide + 2 * hidden
    tables = 1 if keywords["tied"] and stages == 1 else 2
    parameters = layers * block + hidden + tables * keywords["vocabulary"] * hidden
    return 6 * float(f"{parameters:.3g}") + 12 * layers * hidden * length  # it rounds N as it prints it


def _with_recomputation(keywords: dict[str, Any], length: int) -> float:
    hidden, layers, vocabulary = keywords["hidden"], keywords["layers"], keywords["vocabulary"]
    shares = 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96.0 * length * layers * hidden**2 * shares
