"""A test's reference for `execute.py`: runs a schedule on the tensors of all ranks in one process."""

from collections.abc import Sequence

from torch import Tensor

from meshwright.collectives.schedules.schedule import Schedule, bounds


def run_sequentially(schedule: Schedule, flats: Sequence[Tensor]) -> None:
    """Changes the tensor of each rank as the schedule does. For an all-reduce they all become the sum."""
    chunk_bounds = bounds(schedule, flats[0].numel())
    for sends in schedule.rounds:
        for send in sends:
            begin, end = chunk_bounds[send.chunk]
            source, target = flats[send.source][begin:end], flats[send.target][begin:end]
            if send.operation == "copy":
                target.copy_(source)
            else:
                target.add_(source)
