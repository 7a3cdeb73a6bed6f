"""Predicted against published peaks of allocated memory: `python -m validation.memory.published [FAMILY ...]`.

published.json holds every published row that states allocated memory. A row names the model that is built for
it (validation/segmentation/, written anew from the papers and the published settings), or the reason it is left out. No
number is fitted to the rows. What was added to `predict_memory` is what the software of the time did:

    gradients and buckets    DDP kept both, a second copy of every gradient (no `gradient_as_bucket_view`)
    softmax                  kept its input too, until torch 1.11 (published/era.py)
    convolutions             Winograd's workspace for 3×3 ones in fp32 (published/workspaces.py)
    cuBLAS                   took its workspace from the driver: torch did not count it

Some of it was learned from rows, whose errors are therefore not blind: the unit and that convolutions go by Winograd
from FCN, PSPNet, DeepLabV3 and V3+, the product in softmax from Non-local and DANet, ReLU6 from MobileNetV2, one
tensor less from EncNet, the later torch of one DeepLabV3+ row from its figure. All other families were predicted as
first written (not in `LOOKED_AT`; the summary gives them apart).

The rows' GB are GiB: so say those whose peak lies in the loss, where shapes alone decide; most agree to 1%. They are
counted as they stand, also where they do not:

- ISANet's, ViT's and DeepLabV3's COCO-Stuff rows lie 2.0% to 2.8% above throughout, as thousands of MiB would;
  PSPNet's COCO-Stuff rows repeat DeepLabV3's figures.
- One of two DeepLabV3+ D16 rows of the same model (9.9 beside 5.8) and ConvNeXt-XL's row (26.2, its next smaller
  sister 12.1) must be of other settings.
- HRNet's rows lie 2% to 6% above, by about the size of its enlarged branches, and SETR's and ConvNeXt's up to 9%:
  not explained. UNet's smallest rows lie up to 12% below: their convolutions borrow less than Winograd's workspace.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from meshwright.call import Call, build
from meshwright.plan import Axes, Plan
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.memory.device_memory import MIB, DeviceMemory
from meshwright.simulator.memory.peak import MemoryPrediction, predict_memory
from validation.memory.one_gpu import OPTIMIZERS
from validation.segmentation.workspaces import with_workspaces

ROWS = Path(__file__).with_name("published.json")
GIB = 2**30
ALLOCATOR = DeviceMemory(granule=512, segment=2 * MIB)
TF32_CONVOLUTIONS = ("A100",)  # their fp32 convolutions run on tensor cores, without Winograd
PRECISIONS = {"fp32": "fp32", "amp fp16": "bf16"}  # autocast takes the same bytes in either half

LOOKED_AT = ("fcn", "pspnet", "deeplabv3", "deeplabv3plus", "nonlocal_net", "danet", "dnlnet", "mobilenet_v2", "encnet")


@dataclass(frozen=True)
class MemoryRow:
    """One published figure. `model` is what is built for it; where it is None, `left_out` says why."""

    id: str
    family: str
    name: str
    measured_gib: float
    left_out: str | None = None
    model: dict[str, Any] | None = None
    optimizer: str = "sgd"
    size: tuple[int, int] = (0, 0)
    batch: int = 0
    gpus: int = 0
    gpu: str = ""
    precision: str = "fp32"


@dataclass(frozen=True)
class PredictedPeak:
    row: MemoryRow
    predicted_gib: float

    @property
    def error(self) -> float:
        return self.predicted_gib / self.row.measured_gib - 1


def rows() -> list[MemoryRow]:
    found: dict[str, Any] = json.loads(ROWS.read_text())
    return [_row(values, found["reasons"]) for values in found["rows"]]


def _row(values: dict[str, Any], told: dict[str, str]) -> MemoryRow:
    known: dict[str, Any] = {key: value for key, value in values.items() if key in MemoryRow.__dataclass_fields__}
    reason = told[values["left_out"]] if "left_out" in values else None
    return MemoryRow(**{**known, "size": tuple(values.get("size", (0, 0))), "left_out": reason})


def predict(row: MemoryRow) -> MemoryPrediction:
    """One rank of a replicate plan, without a GPU."""
    assert row.model is not None
    found = _profile(json.dumps(row.model), row.size, PRECISIONS[row.precision], row.gpu not in TF32_CONVOLUTIONS)
    cost = measure_optimizer_cost(OPTIMIZERS[row.optimizer], multi_tensor=False)
    if row.gpus > 1:  # DDP's buckets lay beside the gradients, for as long as the optimizer's state did
        cost = replace(cost, state_ratio=cost.state_ratio + 1)
    return predict_memory(found, Plan(axes=Axes(replicate=row.gpus)), row.batch, cost, ALLOCATOR)


@cache
def _profile(model: str, size: tuple[int, int], precision: str, workspaces: bool) -> ModelProfile:
    with torch.device("meta"):
        made: nn.Module = build(Call(**json.loads(model)), role="a published row")
        batch = {"images": torch.zeros(2, 3, *size), "masks": torch.zeros(2, *size, dtype=torch.long)}
    found = trace_profile(made, batch, None, precision=precision)
    return with_workspaces(found, made) if workspaces else found


def outcomes(chosen: list[MemoryRow]) -> list[PredictedPeak]:
    return [PredictedPeak(row, predict(row).allocated_bytes / GIB) for row in chosen if row.model is not None]


def reasons(chosen: list[MemoryRow]) -> Counter[str]:
    return Counter(row.left_out for row in chosen if row.left_out is not None)


def summary(found: list[PredictedPeak]) -> dict[str, float]:
    """Of the errors' sizes, as shares of what was measured."""
    errors = sorted(abs(outcome.error) for outcome in found)
    p90 = quantiles(errors, n=10)[-1] if len(errors) > 1 else errors[0]
    return {"rows": len(errors), "median": median(errors), "p90": p90, "worst": errors[-1]}


def main(families: list[str]) -> None:
    chosen = [row for row in rows() if not families or row.family in families]
    found: list[PredictedPeak] = []
    print(f"{'family':18}{'rows':>6}{'median':>9}{'worst':>9}  the worst row")
    for family in sorted({row.family for row in chosen if row.model is not None}):
        own = outcomes([row for row in chosen if row.family == family])
        worst = max(own, key=lambda outcome: abs(outcome.error))
        told = summary(own)
        row = f"{worst.row.name} {worst.row.size[0]}×{worst.row.size[1]}: {worst.row.measured_gib:.2f} GiB"
        print(
            f"{family:18}{len(own):6}{told['median']:9.1%}{told['worst']:9.1%}"
            f"  {row}, predicted {worst.predicted_gib:.2f}",
            flush=True,
        )
        found += own
    blind = [outcome for outcome in found if outcome.row.family not in LOOKED_AT]
    for name, part in (("all", found), ("predicted blind", blind)):
        if part:
            told = summary(part)
            print(f"{name:18}{len(part):6}{told['median']:9.1%}{told['worst']:9.1%}  p90 {told['p90']:.1%}")
    left = reasons(chosen)
    print(f"\nleft out: {left.total()} rows")
    for reason, count in left.most_common():
        whose = sorted({row.family for row in chosen if row.left_out == reason})
        print(f"{count:6}  {reason} ({', '.join(whose)})")


if __name__ == "__main__":
    main(sys.argv[1:])
