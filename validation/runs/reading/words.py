"""Translates the rows' words for precision and recomputation into those of a plan."""

import re

from meshwright.cluster.cluster import Device
from validation.runs.case import NotCovered
from validation.runs.reading.layout import Recompute

PRECISIONS = {
    "fp16 mixed": "fp16",
    "fp16": "fp16",
    "amp fp16": "fp16",
    "fp16 (.half())": "fp16",
    "see repo (fp16 flag)": "fp16",
    "bf16": "bf16",
    "BF16": "bf16",
    "amp_bf16": "bf16",
    "bf16 (fp32 grad accum)": "bf16",
    "fp32": "fp32",
    "tf32": "tf32",
    "fp8 (TE, delayed)": "fp8",
    "FP8": "fp8",
    "FP8-CS": "fp8",
    "FP8-CS (25.09 table: first value)": "fp8",
    "FP8-CS (FP8-MX)": "fp8",
    "FP8-MX": "fp8",
    "MXFP8": "fp8",
    "amp_fp8": "fp8",
    "bf16+float8": "fp8",
    "bf16+float8 tensorwise": "fp8",
    "float8 tensorwise": "fp8",
    "float8 rowwise": "fp8",
}
DEFAULTS_BY_WORD = {"see repo (fp16 flag)": "precision fp16", "fp16 (.half())": "weights in fp16 too"}
FOUR_BITS = re.compile(r"fp4", re.IGNORECASE)


def precision_of(word: str, device: Device) -> tuple[str, tuple[str, ...]]:
    """The precision of a plan, and the defaults that were used. `fp32/tf32` is PyTorch's default of the time: tf32 if
    the device supports it."""
    if word == "fp32/tf32":
        precision = "tf32" if "tf32" in device.rates else "fp32"
        return precision, (f"{precision} unasked",)
    if word not in PRECISIONS:
        raise NotCovered("fp4: a plan has no such precision" if FOUR_BITS.search(word) else f"precision '{word}'")
    return PRECISIONS[word], ((DEFAULTS_BY_WORD[word],) if word in DEFAULTS_BY_WORD else ())


def recompute_of(word: str) -> Recompute:
    """The recomputation of a plan."""
    first = word.lower().replace("(", " ").split()[0]
    if first in ("none", "full"):
        return "none" if first == "none" else "full"
    if first in ("selective", "per-op"):
        return "selective"
    raise NotCovered(f"recomputation '{word}'")
