"""The pipeline axis: microbatches go through the stages of a model by PyTorch's schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.batch import Example, at_least_fp32
from meshwright.parallel.pipeline.runner import Executed, Runner
from meshwright.parallel.pipeline.shape_inference import Rehearsal
from meshwright.parallel.pipeline.stages import Cutting, Stage, places, prepare
from meshwright.parallel.pipeline.tied_gradients import TiedGradients
from meshwright.parallel.pipeline.transport import Line, Room, room_for
from meshwright.parallel.precision import forward_precision
from meshwright.plan import Plan


class Pipeline:
    """Runs this rank's stages. Build it when parameters and hooks of the stages are in place, on all ranks at once.
    `executed` is the order of what ran in the last `run`."""

    def __init__(self, cutting: Cutting, plan: Plan, mesh: DeviceMesh, device: torch.device) -> None:
        self.cutting = cutting
        self.executed: list[Executed] = []
        self._plan = plan
        self._device = device
        self._group = mesh.get_group("pipeline")
        self._places = places(plan)
        self._tied = TiedGradients(cutting, mesh)
        self._rehearsal = Rehearsal(cutting.bare, cutting.wiring, device)
        self._runner: Runner | None = None
        prepare(cutting, self._rehearsal)
        for stage in cutting.stages:
            stage.rehearsal = self._rehearsal
            stage.precision = self._precision

    def run(self, examples: Sequence[tuple[Example, int]], loss_of: Callable[[int, Any], Tensor]) -> None:
        """Forward and backward of all microbatches of a step, accumulation rounds one after another. `loss_of` gets a
        microbatch's place in `examples` and the model's output, where the last stage is."""
        self.executed.clear()
        rounds, size = self._plan.memory.accumulation, self._plan.pipeline.microbatches
        assert len(examples) == rounds * size, f"{len(examples)} microbatches for {rounds} rounds of {size}"
        plain = [example for example, _ in examples]
        runner = self._runner_for(plain)
        for number in range(rounds):
            first = number * size

            def finish(microbatch: int, output: Any, first: int = first) -> Tensor:
                loss = loss_of(first + microbatch, at_least_fp32(output))
                # PyTorch's stages cut it from its graph in place, which a view does not allow.
                return loss.clone() if loss._is_view() or loss.is_leaf else loss

            with self._prepared(plain[first : first + size], finish):
                runner.run(last=number == rounds - 1)
        self.finish()

    def finish(self) -> None:
        """Gives tied parameters their whole gradient."""
        self._tied.combine()

    def train(self, mode: bool = True) -> None:
        """The stages follow the module."""
        self.cutting.module.train(mode)

    @torch.no_grad()
    def evaluate(self, example: Example) -> Any | None:
        """The model's output where the last stage is, None elsewhere; in the mode that the module is in."""
        output = None
        with self._prepared([example], lambda _, result: at_least_fp32(result)):
            lines = self._lines(example)
            local: tuple[Tensor, ...] = ()
            for stage in self.cutting.stages:
                received = local if self._here(stage.index - 1) else self._receive(stage, lines)
                result = stage(*received)
                if stage.last:
                    output = result
                elif self._here(stage.index + 1):
                    local = result
                else:
                    for wire in result:
                        dist.send(wire, group=self._group, group_dst=self._places[stage.index + 1])
        return output

    def _receive(self, stage: Stage, lines: dict[int, Line]) -> tuple[Tensor, ...]:
        found = []
        for port in stage.received:
            line = lines[port.value]
            wire = torch.empty(line.lying, dtype=line.wire_dtype, device=self._device)
            dist.recv(wire, group=self._group, group_src=self._places[stage.index - 1])
            found.append(wire)
        return tuple(found)

    def _here(self, stage: int) -> bool:
        return 0 <= stage < len(self._places) and self._places[stage] == self.cutting.place

    def _precision(self) -> Any:
        return forward_precision(self._plan, self._device.type)

    def _lines(self, example: Example) -> dict[int, Line]:
        return self._rehearsal.notes(example, self.cutting.module.training, self._precision).lines

    @contextmanager
    def _prepared(self, examples: list[Example], finish: Callable[[int, Any], Any]) -> Iterator[None]:
        for stage in self.cutting.stages:
            stage.examples, stage.finish, stage.microbatch, stage.rooms = examples, finish, 0, ()
        try:
            yield
        finally:
            for stage in self.cutting.stages:
                stage.examples = []

    def _runner_for(self, examples: list[Example]) -> Runner:
        """The last one, unless some microbatch is larger than all before it: then one with room for it."""
        each = [self._lines(example) for example in examples]
        ports = self.cutting.wiring.ports
        needed = tuple(tuple(room_for([lines[port.value] for lines in each]) for port in cut) for cut in ports)
        if self._runner is None or needed != _joined(needed, self._runner.rooms, min):
            rooms = needed if self._runner is None else _joined(needed, self._runner.rooms, max)
            self._runner = Runner(
                self.cutting.stages,
                rooms,
                self._plan.pipeline.schedule,
                self._plan.pipeline.microbatches,
                self._group,
                self._device,
                self.executed,
                recomputes=self._plan.memory.recompute != "none",
            )
        return self._runner


_Rooms = tuple[tuple[Room, ...], ...]


def _joined(needed: _Rooms, have: _Rooms, join: Callable[[int, int], int]) -> _Rooms:
    """The larger or the smaller of each, size by size; where another kind of value travels, what is needed."""

    def one(new: Room, old: Room) -> Room:
        if len(new.shape) != len(old.shape) or new.dtype != old.dtype:
            return new if join is max else old
        return Room(tuple(map(join, new.shape, old.shape)), new.dtype)

    return tuple(tuple(map(one, cut, there)) for cut, there in zip(needed, have, strict=True))
