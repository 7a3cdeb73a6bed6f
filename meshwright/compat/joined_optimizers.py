"""`JoinedOptimizers`: several optimizers in one checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from meshwright.errors import InputError


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimizers as a single one, with the groups and the states of all of them, for saving and loading. It is
    made anew each time, because loading replaces the groups of an optimizer."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state: Any = {key: entry for optimizer in optimizers for key, entry in optimizer.state.items()}
        parameters = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise InputError(
                "two optimizers train the same parameter, whose states cannot be stored by its name: give each"
                " parameter to one optimizer"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        groups = list(state["param_groups"])
        for optimizer in self._optimizers:
            own = [groups.pop(0) for _ in optimizer.param_groups]
            numbers = {number for group in own for number in group["params"]}
            entries = {number: entry for number, entry in state["state"].items() if number in numbers}
            optimizer.load_state_dict({"state": entries, "param_groups": own})
