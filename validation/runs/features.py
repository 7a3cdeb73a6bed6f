"""Features that the first predictions of published runs did not have: experts, context, fp8, and GPUs that were added
to the catalog later. Rows with one of them are judged apart, in predictions/features.py."""

from typing import Literal, get_args

from validation.runs.case import PublishedCase
from validation.runs.reading.flops import MIXTURE
from validation.runs.reading.hardware import device_of

Feature = Literal["experts", "context", "newer GPUs", "fp8", "older GPUs"]
FEATURES: tuple[Feature, ...] = get_args(Feature)
NEWER_GPUS = ("B300", "GB200", "GB300")
OLDER_GPUS = ("GTX1080Ti", "TitanV", "TitanRTX", "RTX8000", "RTX2080Ti", "RTX6000-Ada")


def feature_of(case: PublishedCase) -> Feature | None:
    """The first of these features that a case has; None for a case with none of them."""
    device = device_of(case.cluster).name
    has: dict[Feature, bool] = {
        "experts": case.model.call == MIXTURE,
        "context": case.plan.axes.context > 1,
        "newer GPUs": device in NEWER_GPUS,
        "fp8": case.precision == "fp8",
        "older GPUs": device in OLDER_GPUS,
    }
    return next((feature for feature in FEATURES if has[feature]), None)
