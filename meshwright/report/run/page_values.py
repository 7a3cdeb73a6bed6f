"""What the page of a run shows besides measurements: the prediction, the cluster and the plan on the model. `train`
stores it in the run folder (page.json), because a page is made without executing the job's code."""

from typing import Any

from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.plan import Plan
from meshwright.report.cluster_drawing import cluster_values
from meshwright.report.plan_on_modules import plan_on_modules
from meshwright.simulator.predict import Prediction

_MOST_TIMELINE_EVENTS = 5_000


def page_values(
    cluster: Cluster | None, plan: Plan, model: nn.Module | None = None, prediction: Prediction | None = None
) -> dict[str, Any]:
    """Returns the content of page.json. The model may be on the meta device. What is None is not drawn."""
    values: dict[str, Any] = {}
    if cluster is not None:
        values["cluster"] = cluster_values(cluster, plan)
    if model is not None:
        values["modules"] = plan_on_modules(model, plan)
    if prediction is not None:
        values["prediction"] = prediction_values(prediction)
    return values


def prediction_values(prediction: Prediction) -> dict[str, Any]:
    """Returns a prediction as plain values. A long timeline is left out."""
    memory = prediction.memory
    values: dict[str, Any] = {
        "step_s": prediction.step_s,
        "breakdown": dict(prediction.breakdown),
        "memory_bytes": prediction.memory_bytes,
        "memory": {"breakdown": dict(memory.breakdown), "peak_at": memory.peak_at},
        "based_on": prediction.based_on,
    }
    if prediction.timeline is not None:
        events = [list(event) for event in prediction.timeline.events()]
        if len(events) <= _MOST_TIMELINE_EVENTS:
            values["timeline"] = events
    return values
