"""Whether a checkpoint of transformers needs tensors of other ranks, and the model's weights from all of them."""

from typing import Any

from meshwright.parallel.weights.state import full_state
from meshwright.train.session import Session


def divides_weights(session: Session) -> bool:
    """Whether a rank holds only parts of some weights, gradients or optimizer states."""
    return session.plan.world_size > session.plan.axes.replicate or bool(session.parallel.layouts)


def whole_weights(session: Session) -> dict[str, Any]:
    """The model's `state_dict` with whole tensors on rank 0, empty on the other ranks. All ranks call this together."""
    parallel = session.parallel
    return full_state(parallel.module, parallel.layouts, parallel.mesh, order=parallel.state_names, everywhere=False)
