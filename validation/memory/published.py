"""Published peaks of allocated memory compared with predictions: `python -m validation.memory.published [FAMILY ...]`.

published.json has every published row that states allocated memory. A row names the model that is built for it
(validation/segmentation/, written from the papers and the published settings), or the reason why it is left out. No
number is fitted to the rows. To `predict_memory` is added how the software of that time behaved:

    gradients and buckets    DDP kept both, so every gradient existed twice (no `gradient_as_bucket_view`)
    softmax                  also saved its input for the backward pass, until torch 1.11 (segmentation/era.py)
    convolutions             3×3 convolutions in fp32 used Winograd's workspace (segmentation/workspaces.py)
    cuBLAS                   allocated its workspace outside torch's allocator, which therefore did not count it

Some of this was learned from rows, so the predictions of these families are not blind (`LOOKED_AT`; the summary lists
the others separately): the unit and the use of Winograd from FCN, PSPNet, DeepLabV3 and V3+, the product in the
gradient of softmax from Non-local and DANet, ReLU6 from MobileNetV2, one tensor less from EncNet, and the later torch
version of one DeepLabV3+ row from its figure. All other families were predicted as they were first written.

The GB of the rows are GiB. This follows from rows whose peak is in the loss, where shapes alone decide; most of them
agree to 1%. Rows that disagree are counted as they are published:

- The rows of ISANet and ViT, and DeepLabV3's rows on COCO-Stuff, are all 2.0% to 2.8% above the prediction, as they
  would be in thousands of MiB; PSPNet's rows on COCO-Stuff repeat DeepLabV3's figures.
- One of two DeepLabV3+ D16 rows of the same model (9.9, the other is 5.8) and ConvNeXt-XL's row (26.2, the next smaller
  model has 12.1) must have been measured with other settings.
- HRNet's rows are 2% to 6% above the prediction, by about the size of its enlarged branches, and those of SETR and
  ConvNeXt up to 9%; the cause is not known. UNet's smallest rows are up to 12% below: their convolutions use less than
  Winograd's workspace.
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

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.memory.device_memory import MIB, DeviceMemory
from meshwright.simulator.memory.peak import MemoryPrediction, predict_memory
from meshwright.user.call import Call, build
from validation.memory.one_gpu import OPTIMIZERS
from validation.segmentation.workspaces import with_workspaces

ROWS = Path(__file__).with_name("published.json")
GIB = 2**30
ALLOCATOR = DeviceMemory(granule=512, segment=2 * MIB)
TF32_CONVOLUTIONS = ("A100",)  # GPUs whose fp32 convolutions run on tensor cores, without Winograd
PRECISIONS = {"fp32": "fp32", "amp fp16": "bf16"}  # under autocast, fp16 and bf16 need the same bytes

LOOKED_AT = ("fcn", "pspnet", "deeplabv3", "deeplabv3plus", "nonlocal_net", "danet", "dnlnet", "mobilenet_v2", "encnet")


@dataclass(frozen=True)
class MemoryRow:
    """One published figure. `model` is the call that builds its model; if it is None, `left_out` says why."""

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
    """A published figure and its prediction."""

    row: MemoryRow
    predicted_gib: float

    @property
    def error(self) -> float:
        """The relative error; positive if more was predicted than published."""
        return self.predicted_gib / self.row.measured_gib - 1


def rows() -> list[MemoryRow]:
    content: dict[str, Any] = json.loads(ROWS.read_text())
    return [_row(values, content["reasons"]) for values in content["rows"]]


def _row(values: dict[str, Any], reasons: dict[str, str]) -> MemoryRow:
    fields: dict[str, Any] = {key: value for key, value in values.items() if key in MemoryRow.__dataclass_fields__}
    reason = reasons[values["left_out"]] if "left_out" in values else None
    return MemoryRow(**{**fields, "size": tuple(values.get("size", (0, 0))), "left_out": reason})


def predict(row: MemoryRow) -> MemoryPrediction:
    """The predicted peak of one rank of a plan that replicates the model, computed without a GPU."""
    assert row.model is not None
    profile = _profile(json.dumps(row.model), row.size, PRECISIONS[row.precision], row.gpu not in TF32_CONVOLUTIONS)
    cost = measure_optimizer_cost(OPTIMIZERS[row.optimizer], multi_tensor=False)
    if row.gpus > 1:  # DDP's buckets were a second copy of the gradients, allocated as long as the optimizer state
        cost = replace(cost, state_ratio=cost.state_ratio + 1)
    return predict_memory(profile, Plan(axes=Axes(replicate=row.gpus)), row.batch, cost, ALLOCATOR)


@cache
def _profile(model: str, size: tuple[int, int], precision: str, workspaces: bool) -> ModelProfile:
    with torch.device("meta"):
        network: nn.Module = build(Call(**json.loads(model)), role="a published row")
        batch = {"images": torch.zeros(2, 3, *size), "masks": torch.zeros(2, *size, dtype=torch.long)}
    profile = trace_profile(network, batch, None, precision=precision)
    return with_workspaces(profile, network) if workspaces else profile


def predict_rows(rows: list[MemoryRow]) -> list[PredictedPeak]:
    """The predictions of the rows that have a model."""
    return [PredictedPeak(row, predict(row).allocated_bytes / GIB) for row in rows if row.model is not None]


def count_reasons(rows: list[MemoryRow]) -> Counter[str]:
    """The number of rows that are left out for each reason."""
    return Counter(row.left_out for row in rows if row.left_out is not None)


def summary(predictions: list[PredictedPeak]) -> dict[str, float]:
    """The number of rows, and the median, the 90th percentile and the largest of their relative errors."""
    errors = sorted(abs(prediction.error) for prediction in predictions)
    p90 = quantiles(errors, n=10)[-1] if len(errors) > 1 else errors[0]
    return {"rows": len(errors), "median": median(errors), "p90": p90, "worst": errors[-1]}


def main(families: list[str]) -> None:
    rows_of_families = [row for row in rows() if not families or row.family in families]
    predictions: list[PredictedPeak] = []
    print(f"{'family':18}{'rows':>6}{'median':>9}{'worst':>9}  the worst row")
    for family in sorted({row.family for row in rows_of_families if row.model is not None}):
        of_family = predict_rows([row for row in rows_of_families if row.family == family])
        worst = max(of_family, key=lambda prediction: abs(prediction.error))
        errors = summary(of_family)
        row = f"{worst.row.name} {worst.row.size[0]}×{worst.row.size[1]}: {worst.row.measured_gib:.2f} GiB"
        print(
            f"{family:18}{len(of_family):6}{errors['median']:9.1%}{errors['worst']:9.1%}"
            f"  {row}, predicted {worst.predicted_gib:.2f}",
            flush=True,
        )
        predictions += of_family
    blind = [prediction for prediction in predictions if prediction.row.family not in LOOKED_AT]
    for name, part in (("all", predictions), ("predicted blind", blind)):
        if part:
            errors = summary(part)
            print(f"{name:18}{len(part):6}{errors['median']:9.1%}{errors['worst']:9.1%}  p90 {errors['p90']:.1%}")
    reasons = count_reasons(rows_of_families)
    print(f"\nleft out: {reasons.total()} rows")
    for reason, count in reasons.most_common():
        families_left_out = sorted({row.family for row in rows_of_families if row.left_out == reason})
        print(f"{count:6}  {reason} ({', '.join(families_left_out)})")


if __name__ == "__main__":
    main(sys.argv[1:])
