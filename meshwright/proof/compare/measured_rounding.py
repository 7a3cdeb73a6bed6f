"""`MeasuredRounding`: how far rounding changes the gradients and buffers of the step at hand.

The reference computes each step in a second precision, from the same weights and with the same samples: in fp32 beside
a comparison in fp64, and in fp64 beside one in fp32. The difference of both is the rounding of fp32, with everything
that the model's operators do to it, also inside of them. In fp64 the same roundings are smaller by eps64 / eps32, as
long as they are small.
"""

from dataclasses import replace

import torch
from torch import Tensor

from meshwright.parallel.precision import fp32_product_precision
from meshwright.proof.compare.row_scales import RoundingErrors
from meshwright.proof.reference.groups import GlobalBatch, Grouping
from meshwright.proof.reference.reference import Reference
from meshwright.proof.reference.reference_setup import build_setup, data_in_dtype
from meshwright.proof.request import COMPARISON_DTYPES, ProofRequest

Tensors = dict[str, Tensor]
_OTHER = {"fp64": "fp32", "fp32": "fp64"}


class MeasuredRounding:
    """Holds the reference of the second precision. `failure` is the error with which a step failed in it, or None."""

    def __init__(self, request: ProofRequest, grouping: Grouping, device: torch.device) -> None:
        self._request = replace(request, dtype=_OTHER[request.dtype])
        self._grouping, self._device = grouping, device
        self._reference: Reference | None = None
        eps = [torch.finfo(COMPARISON_DTYPES[dtype]).eps for dtype in (request.dtype, "fp32")]
        self._share = eps[0] / eps[1]
        self.failure: str | None = None

    def measure(
        self, batch: GlobalBatch, before: Tensors, gradients: Tensors, buffers: Tensors
    ) -> RoundingErrors | None:
        """Computes the step that starts from the weights and buffers `before`, and returns how far rounding changes its
        results `gradients` and `buffers`. Returns None if the model does not run in the second precision."""
        if self.failure:
            return None
        try:
            reference = self._reference = self._reference or self._make_reference()
            reference.model.load_state_dict(before, strict=False)
            with fp32_product_precision(self._request.executed_plan, self._device.type):
                reference.compute(self._convert(batch))
        except Exception as error:  # whatever a user's code raises for numbers of another type
            self.failure = " ".join(f"{type(error).__name__}: {error}".split())
            return None
        reference.steps += 1
        state = reference.model.state_dict()
        return RoundingErrors(
            self._errors(gradients, reference.gradients()),
            self._errors(buffers, {name: value for name, value in state.items() if name in buffers}),
        )

    def _make_reference(self) -> Reference:
        setup = build_setup(self._request)
        setup.model.train()
        return Reference(setup, self._request, self._grouping, self._device)

    def _convert(self, batch: GlobalBatch) -> GlobalBatch:
        dtype = COMPARISON_DTYPES[self._request.dtype]
        return replace(batch, groups=tuple(replace(g, data=data_in_dtype(g.data, dtype)) for g in batch.groups))

    def _errors(self, values: Tensors, others: Tensors) -> Tensors:
        """The differences of tensors of numbers that both have, in units of the comparison's own rounding."""
        return {
            name: (_wide(value) - _wide(others[name].cpu())).abs() * self._share
            for name, value in values.items()
            if name in others and not _is_integer(value) and others[name].shape == value.shape
        }


def _is_integer(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
