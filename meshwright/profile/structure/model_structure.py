"""`ModelStructure`: the structure and the dataflow of one model, found when they are first needed and kept for the next
reader: the profiles that a planner traces, the check of many plans, and the check of a job."""

from typing import Any

from torch import nn

from meshwright.profile.structure.dataflow import Dataflow, record_dataflow
from meshwright.profile.structure.structure import Structure, find_structure

_SAMPLES = 2


class ModelStructure:
    """The model may lie on the meta device; it is left as it is. `sample` is a batch of any size."""

    def __init__(self, model: nn.Module, sample: Any, target: str | None = None) -> None:
        self.model = model
        self.sample = sample
        self.target = target
        self._structures: dict[bool, Structure] = {}
        self._dataflows: dict[bool, Dataflow] = {}

    def find(self, merge_equal_blocks: bool = True) -> Structure:
        """The structure of the model. Without `merge_equal_blocks`, every block is traced."""
        if merge_equal_blocks not in self._structures:
            self._structures[merge_equal_blocks] = find_structure(
                self.model, self.sample, target=self.target, merge_equal_blocks=merge_equal_blocks
            )
        return self._structures[merge_equal_blocks]

    def dataflow(self, evaluating: bool) -> Dataflow:
        """The dataflow of a forward pass of two samples, in training or in evaluation."""
        if evaluating not in self._dataflows:
            flow = record_dataflow(self.model, self.sample, _SAMPLES, target=self.target, evaluating=evaluating)
            self._dataflows[evaluating] = flow
        return self._dataflows[evaluating]
