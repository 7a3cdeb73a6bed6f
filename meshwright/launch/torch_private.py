"""The private functions of torch that launching calls. They were seen to work on torch 2.11 and 2.13.

`local/agent.py` and `local/replacing_agent.py` also override private methods of torch elastic's agent; they name them.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a Gloo process group that is not registered with torch.distributed. Its type is `Any` because the type
    stubs of torch lack the send and receive methods of this class."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def set_default_timeout(group: Any, timeout: timedelta) -> None:
    """Sets the timeout of the operations that the group starts from now on."""
    group._set_default_timeout(timeout)
