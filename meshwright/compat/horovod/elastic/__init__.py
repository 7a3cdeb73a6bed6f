"""Elastic training, as `horovod.torch.elastic`: workers may die, come and go."""

from meshwright.compat.horovod.elastic.run import run
from meshwright.compat.horovod.elastic.sampler import ElasticSampler
from meshwright.compat.horovod.elastic.state import (
    ObjectState,
    State,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)
from meshwright.compat.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
