"""`join` and `barrier`, which exchange no tensors of the script."""

from meshwright.compat.horovod.engine import requests
from meshwright.compat.horovod.engine.operation import Operation
from meshwright.compat.horovod.engine.requests import GLOBAL_SET, Request
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set, registered_ranks
from meshwright.compat.horovod.state import horovod


def join(device: int = -1) -> int:
    """Says that this rank has no more data. Until all ranks have joined, it contributes zeros to the all-reduces of the
    others; an average is over all ranks, with those that have joined. Returns the rank that joined last. `device` is
    the GPU where the zeros are made, for tensors on GPUs."""
    if device >= 0:
        horovod.engine.gpu = device
    last = horovod.run(Operation(Request(requests.JOIN, "join"))).value
    assert isinstance(last, int)
    horovod.count_join()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the process set are here."""
    registered_ranks(process_set.process_set_id)
    number = process_set.process_set_id or GLOBAL_SET
    horovod.run(Operation(Request(requests.BARRIER, "barrier", number)))
