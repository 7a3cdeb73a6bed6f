"""`ModelStructure`: the structure and the dataflow of one model, computed once. The profiles of the planner, the check
of plans and the check of a job share it."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from meshwright.blocks.module_names import is_inside
from meshwright.errors import InputError
from meshwright.profile.equal_blocks import find_equal_blocks
from meshwright.profile.structure.dataflow import Dataflow, record_dataflow
from meshwright.profile.structure.head import find_head
from meshwright.profile.structure.split_marks import SplitMarks
from meshwright.profile.structure.structure import Structure, find_structure

_SAMPLES = 2


class ModelStructure:
    """Finds the structure and the dataflow of a model when they are first requested, and caches them. The model may be
    on the meta device; it is not changed. `sample` is a batch with any number of samples."""

    def __init__(self, model: nn.Module, sample: Any, target: str | None = None) -> None:
        self.model = model
        self.sample = sample
        self.target = target
        self._structures: dict[bool, Structure] = {}
        self._dataflows: dict[bool, Dataflow] = {}
        self._takes_derivatives: bool | None = None
        self._head: tuple[str | None] | None = None
        self._split_marks: dict[Hashable, SplitMarks] = {}

    def find(self, merge_equal_blocks: bool = True) -> Structure:
        """Returns the structure of the model. If `merge_equal_blocks` is False, every block is traced."""
        if merge_equal_blocks not in self._structures:
            self._structures[merge_equal_blocks] = find_structure(
                self.model, self.sample, target=self.target, merge_equal_blocks=merge_equal_blocks
            )
        return self._structures[merge_equal_blocks]

    def split_marks(self, step: Hashable, find: Callable[[], SplitMarks]) -> SplitMarks:
        """Returns the marks of a step of the model. `find` computes them, once for equal steps."""
        if step not in self._split_marks:
            self._split_marks[step] = find()
        return self._split_marks[step]

    def forward_pass(self) -> Dataflow:
        """Returns the dataflow of a forward pass in the mode in which the structure was found."""
        return self.dataflow(self.find().found_in_evaluation)

    def dataflow(self, evaluating: bool) -> Dataflow:
        """Returns the dataflow of a forward pass with two samples, in evaluation mode if `evaluating`, else in training
        mode."""
        if evaluating not in self._dataflows:
            flow = record_dataflow(self.model, self.sample, _SAMPLES, target=self.target, evaluating=evaluating)
            self._dataflows[evaluating] = flow
        return self._dataflows[evaluating]

    def takes_derivatives(self) -> bool:
        """Whether the forward pass takes derivatives (`torch.autograd.grad`). Of consecutive equal blocks only three
        are traced. Raises `InputError` if the model cannot be traced."""
        if self._takes_derivatives is None:
            self._takes_derivatives = any(operator.in_backward for operator in self._short_dataflow().operators)
        return self._takes_derivatives

    def head(self) -> str | None:
        """Returns the name of the head (head.py), or None if the model has none. Of consecutive equal blocks only three
        are traced, unless the head lies in one of them."""
        if self._head is None:
            head = find_head(self.model, self._short_dataflow())
            blocks = [block for row in find_equal_blocks(self.model) for block in row.blocks]
            if head and any(is_inside(head, block) for block in blocks):
                head = find_head(self.model, self.forward_pass())
            self._head = (head,)
        return self._head[0]

    def _short_dataflow(self) -> Dataflow:
        """Returns the dataflow with three of consecutive equal blocks, if the model runs without the others."""
        evaluating = self.find().found_in_evaluation
        equal_blocks = find_equal_blocks(self.model)
        if evaluating in self._dataflows or not equal_blocks:
            return self.dataflow(evaluating)
        try:
            return record_dataflow(self.model, self.sample, _SAMPLES, equal_blocks, self.target, evaluating)
        except (IndexError, InputError):
            return self.dataflow(evaluating)
