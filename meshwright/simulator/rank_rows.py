"""The timeline of a step on machines that are not alike: one row for each kind of data rank or, with a pipeline, for
each pipeline rank, named after its devices."""

from meshwright.plan import Plan
from meshwright.simulator.pipeline.order import Action
from meshwright.simulator.pipeline.timeline import Timeline
from meshwright.simulator.predict import Prediction

_MOST_MICROBATCHES = 64  # that are drawn; the others repeat the same pattern


def step_timeline(prediction: Prediction, plan: Plan) -> Timeline | None:
    """The timeline of the prediction: of its pipeline or, if data ranks are not alike, of the passes of each group of
    them. None if there is one rank to draw."""
    if prediction.timeline is not None or len(prediction.groups) < 2:
        return prediction.timeline
    order, starts, ends, busy_s = [], [], [], []
    for group in prediction.groups:
        forward_s, backward_s = group.step.passes_s
        actions, begins, stops, now = [], [], [], 0.0
        for microbatch in range(min(plan.microbatches, _MOST_MICROBATCHES)):
            actions += [Action(0, microbatch, "forward"), Action(0, microbatch, "backward")]
            begins += [now, now + forward_s]
            stops += [now + forward_s, now + forward_s + backward_s]
            now = stops[-1]
        order.append(tuple(actions))
        starts.append(tuple(begins))
        ends.append(tuple(stops))
        busy_s.append(now)
    return Timeline(tuple(order), tuple(starts), tuple(ends), tuple(busy_s))


def row_names(prediction: Prediction) -> list[str]:
    """The names of the timeline's rows; empty if all ranks are alike."""
    groups = [group.group for group in prediction.groups]
    if prediction.timeline is None:
        return [f"{group.devices}, {group.numbers}: {group.samples:.4g} samples" for group in groups]
    if not groups:
        return []
    slowest = max(prediction.groups, key=lambda group: group.step.step_s).group
    return [f"rank {rank}: {node.device.name}" for rank, node in enumerate(slowest.nodes)]
