"""What the rows' words for precision and recomputation mean in a plan."""

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
}
DEFAULTS = {"see repo (fp16 flag)": "precision fp16", "fp16 (.half())": "weights in fp16 too"}
SHORT = re.compile(r"fp8|float8|fp4", re.IGNORECASE)


def precision_of(word: str, device: Device) -> tuple[str, tuple[str, ...]]:
    """`fp32/tf32` is what PyTorch did unasked: tf32 where the device has it."""
    if word == "fp32/tf32":
        found = "tf32" if "tf32" in device.rates else "fp32"
        return found, (f"{found} unasked",)
    if word not in PRECISIONS:
        raise NotCovered("fp8 or fp4: a plan has no such precision" if SHORT.search(word) else f"precision '{word}'")
    return PRECISIONS[word], ((DEFAULTS[word],) if word in DEFAULTS else ())


def recompute_of(word: str) -> Recompute:
    first = word.lower().replace("(", " ").split()[0]
    if first in ("none", "full"):
        return "none" if first == "none" else "full"
    if first in ("selective", "per-op"):
        return "selective"
    raise NotCovered(f"recomputation '{word}'")
