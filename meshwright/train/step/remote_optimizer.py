"""`RemoteOptimizer`: the optimizer of a session whose weights are updated in another process, a parameter server."""

from typing import Any, Protocol

from torch import Tensor

from meshwright.data.batch import SampleShare


class RemoteOptimizer(Protocol):
    """An optimizer in another process, which the session uses instead of its own. `share` is this session's share of
    each global batch."""

    share: SampleShare

    def update(self, session: Any, loss_sum: Tensor) -> tuple[bool, Tensor]:
        """Sends the session's gradients and copies the new weights into its model. Gradients and `loss_sum` are sums
        over the session's samples; the optimizer divides their sum over all sessions by the sum of
        `session.target_count`. Returns whether the optimizer made a step, and the mean loss."""
        ...
