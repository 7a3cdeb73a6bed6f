"""Compiles the forward pass of a pipeline stage as a whole.

The compiler cannot trace fake tensors. In compiled code, `RemoteTensor`s stand for the outputs of modules of other
stages (remote_modules.py), and tensors that are NaN for the parameters of other ranks that the model uses between
modules. Nothing that a stage returns is computed from them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.pipeline.remote_modules import without_fake_tensors
from meshwright.parallel.pipeline.stage import Stage
from meshwright.parallel.pipeline.stage_dataflow import CallKey
from meshwright.parallel.torch_private import FakeTensor


class CompiledStage:
    """Runs `Stage.run_model`, compiled. `compile_function` is given a function and returns the compiled one."""

    def __init__(self, stage: Stage, compile_function: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._stage = stage
        self._run_model = compile_function(stage.run_model)
        self._described: dict[int, tuple[Mapping[CallKey, Any], dict[CallKey, Any]]] = {}

    def __call__(
        self,
        received: tuple[Tensor, ...],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        fake_outputs: Mapping[CallKey, Any],
    ) -> Any:
        with self._without_fake_parameters():
            return self._run_model(received, arguments, keywords, self._describe(fake_outputs))

    def _describe(self, fake_outputs: Mapping[CallKey, Any]) -> dict[CallKey, Any]:
        """The outputs without fake tensors. They are described once for each shape of inputs."""
        if id(fake_outputs) not in self._described:
            described = {call: without_fake_tensors(output) for call, output in fake_outputs.items()}
            self._described[id(fake_outputs)] = (fake_outputs, described)
        return self._described[id(fake_outputs)][1]

    @contextmanager
    def _without_fake_parameters(self) -> Iterator[None]:
        """Within this context, modules have tensors that the compiler can trace in the place of the fake tensors that
        stand for the parameters of other stages. Those are attributes of modules, not registered parameters."""
        replaced = [
            (module.__dict__, name, value)
            for module in self._stage.model.modules()
            for name, value in module.__dict__.items()
            if isinstance(value, FakeTensor)
        ]
        for attributes, name, value in replaced:
            attributes[name] = _stand_in(value)
        try:
            yield
        finally:
            for attributes, name, value in replaced:
                attributes[name] = value


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same shape that needs no memory. Its numbers are NaN, so that no wrong result stays unnoticed."""
    value = torch.nan if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
