"""The simplest way to run a schedule: one process holds every rank's tensor. What `execute` does is bitwise this."""

from collections.abc import Sequence

from torch import Tensor

from meshwright.collectives.schedules.schedule import Schedule, bounds


def rehearse(schedule: Schedule, flats: Sequence[Tensor]) -> None:
    """Leaves in each rank's tensor what the schedule would: the sum, if it is an all-reduce."""
    places = bounds(schedule, flats[0].numel())
    for sends in schedule.rounds:
        for send in sends:
            begin, end = places[send.chunk]
            source, target = flats[send.source][begin:end], flats[send.target][begin:end]
            if send.operation == "copy":
                target.copy_(source)
            else:
                target.add_(source)
