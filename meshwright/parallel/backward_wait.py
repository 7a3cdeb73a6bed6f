"""Runs a backward pass on CPU ranks and counts how long it is blocked in exchanges of gradients after its own
computation: DDP and FSDP2 wait for them in callbacks at the end of the backward pass, which torch calls in the order in
which they were queued."""

import time

from torch import Tensor

from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.parallel.replicate.bucket_names import GRADIENT_EXCHANGE
from meshwright.parallel.torch_private import queue_backward_callback


def run_backward(loss: Tensor) -> None:
    """Calls `loss.backward()`. A callback that is queued when it begins is called before those of DDP and FSDP2."""
    computed: list[tuple[float, float]] = []  # when the gradients were computed, and the wait clock then

    def note_end() -> None:
        computed.append((time.perf_counter(), WAIT_CLOCK.seconds))
        WAIT_CLOCK.exchange = GRADIENT_EXCHANGE

    loss.register_hook(lambda _: queue_backward_callback(note_end))
    loss.backward()
    WAIT_CLOCK.exchange = None
    if computed:
        computed_at, blocked = computed[0]
        WAIT_CLOCK.seconds += time.perf_counter() - computed_at - (WAIT_CLOCK.seconds - blocked)
