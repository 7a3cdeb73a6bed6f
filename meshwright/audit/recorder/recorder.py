"""`Recorder`: finds the model and the optimizers of the process it is in, and writes what they compute.

It waits for the first call of a module that trains. Then it names the model's tensors, writes the start, and from there
on each optimizer step: gradients before it, and weights and buffers at the next call of the model, because sharded
optimizers gather weights after their step."""

import atexit
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import dropout, samples
from .layouts import hold_model, local, partial_sum
from .model.roots import called_modules, find_roots, pipeline_stage
from .parts import Held, Part
from .record_files import EventFile, write_tensors
from .settings import Settings, rank_and_world, record_folder
from .sketches import sketch_of, sketch_part, square_of
from .start import draw_start, find_divisions, load_start, name_after_reference, perturb
from .whole import WholeTensors, read_ranks

_WAIT_FOR_OTHER_RANKS_S = 30.0

# Called after a new start was written: libraries copy it to the weights that their optimizers hold.
AFTER_START: list[Callable[[list[nn.Module]], None]] = []


class Recorder:
    """Records the training of this process. There is one; `patches.py` calls it. `ends_process` says that the process
    is ended after the last step that is asked for; otherwise it goes on and is no longer recorded."""

    def __init__(self, folder: Path, ends_process: bool = True) -> None:
        self.root = folder
        self.ends_process = ends_process
        self.settings = Settings.read(folder)
        self.roots: list[nn.Module] = []
        self.handles: list[Any] = []  # of hooks
        self.parameters: dict[str, Held] = {}
        self.buffers: dict[str, Held] = {}
        self.names_of: dict[int, list[str]] = {}  # the id of a parameter → names
        self.steps_of: dict[int, int] = {}  # the id of an optimizer → its completed steps
        self.kinds_written: dict[tuple[int, str], int] = {}
        self.pending: set[str] = set()  # the parameters that were updated since weights were last written
        self.finished: set[str] = set()  # the parameters of which all steps were recorded
        self.dtypes: set[str] = set()
        self.unclipped: set[str] = set()
        self.backward_depth = self.step_depth = 0
        self.stepping: int | None = None  # the step that an optimizer is taking, once its gradients were written
        self.started = self.ended = self.paused = False
        self.process = os.getpid()
        self.samplers: set[tuple[str, str]] = set()  # of those that shuffle, the class and the package that made it
        self.notes: list[str] = []

    # ---- start

    @property
    def step(self) -> int:
        """The number of the step that is being computed."""
        if self.stepping is not None:
            return self.stepping
        return max(self.steps_of.values(), default=0) + 1

    @property
    def is_recording(self) -> bool:
        return self.started and not self.ended and not self.paused and os.getpid() == self.process

    def concerns(self, module: nn.Module) -> bool:
        """Whether a module belongs to the training that is recorded."""
        return not self.roots or any(child is module for root in self.roots for child in root.modules())

    def first_call(self, module: nn.Module) -> None:
        """Listens to the calls of the model, and starts recording where it has not begun."""
        if self.started or self.begin(find_roots(module)):
            for called in called_modules(self.roots, module):
                before = _untraced(self._before_call)
                self.handles.append(called.register_forward_pre_hook(before, with_kwargs=True, prepend=True))

    def begin(self, roots: list[nn.Module]) -> bool:
        """Starts recording these models. Returns False if another process has the same rank."""
        self.started, self.process = True, os.getpid()
        self.rank, self.world_size = rank_and_world()
        self.folder = self.root / f"rank-{self.rank:05d}"
        try:
            self.folder.mkdir()
        except FileExistsError:
            (self.root / f"second-{self.rank}-{os.getpid()}.json").write_text(json.dumps(sys.argv))
            self.ended = True
            return False
        self.events = EventFile(self.folder / "events.jsonl")
        self.roots = roots
        self.parameters, self.buffers = hold_model(self.roots)
        self._make_start()
        self._index()
        self.dtypes |= {str(held.dtype).removeprefix("torch.") for held in self.parameters.values()}
        self.write_header()
        atexit.register(self.end, "exit")
        return True

    def _make_start(self) -> None:
        settings, everything = self.settings, {**self.parameters, **self.buffers}
        self._write_held("own", 0, everything)
        if settings.reference is not None:
            ranks = read_ranks(Path(settings.reference))
            own = WholeTensors(ranks, 0, "own", own_names=True)
            name_after_reference(everything, own)
            assumed = find_divisions(everything, own, self.rank)
            if assumed:
                listed = ", ".join(assumed[:3])
                self.notes.append(f"which part of the whole a rank holds is assumed from shapes and ranks: {listed}")
            if settings.start != "own":
                without = load_start(everything, WholeTensors(ranks, 0, "start", own_names=True))
                draw_start({name: held for name, held in self.parameters.items() if name in without}, {}, settings.seed)
        elif settings.start == "random":
            draw_start(self.parameters, self.buffers, settings.seed)
        if settings.shift and (settings.reference is None or settings.start == "own"):
            perturb(self.parameters, settings.shift, settings.seed)
        if settings.perturb:
            perturb(self.parameters, settings.perturb, settings.seed + 1)
        for after_start in AFTER_START:
            after_start(self.roots)
        if not settings.keep_dropout:
            dropout.turn_off_modules(self.roots)
        self._write_held("start", 0, everything)

    def _index(self) -> None:
        self.names_of = {}
        for name, held in self.parameters.items():
            for identity in held.ids:
                self.names_of.setdefault(identity, []).append(name)

    def write_header(self) -> None:
        device = next((str(value.device) for value in self._weights()), "cpu")
        header = {
            "rank": self.rank,
            "world_size": self.world_size,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": device,
            "arguments": sys.argv,
            "stage": pipeline_stage(self.roots),
            "dtypes": sorted(self.dtypes),
            "parameters": {name: held.to_json() for name, held in self.parameters.items()},
            "buffers": {name: held.to_json() for name, held in self.buffers.items()},
            "samplers": sorted(self.samplers),
            "notes": self.notes,
        }
        unfinished = self.folder / "header.unfinished"
        unfinished.write_text(json.dumps(header))
        unfinished.replace(self.folder / "header.json")

    def _weights(self) -> Iterable[Tensor]:
        for held in self.parameters.values():
            for part in held.parts:
                value = part.weight()
                if value is not None:
                    yield value

    # ---- what happens in a step

    def _before_call(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before a call of the model: writes the weights after the last step, and the digests of what comes in."""
        if not self.is_recording or not module.training or not torch.is_grad_enabled() or self.backward_depth:
            return
        if not self.step_depth:  # LBFGS calls the model in its step
            self.flush()
            if self._is_done():
                self.stop()
                return
        called = type(module).__name__
        for leaf, tensor in [*samples.tensors_of(arguments), *samples.tensors_of(named)]:
            self.events.write(
                "inputs",
                self.step,
                module=called,
                leaf=leaf,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                rows=samples.digest_rows(tensor),
                elements=samples.digest_elements(tensor),
            )

    def loss(self, value: Tensor) -> None:
        if value.numel() == 1 and value.dtype.is_floating_point:
            number = local(value)
            self.events.write("loss", self.step, value=float(number), dtype=str(value.dtype))  # type: ignore[arg-type]

    def targets(self, valid: int, total: int, summed: float | None) -> None:
        if not self.backward_depth:
            self.events.write("targets", self.step, valid=valid, total=total, summed=summed)

    def scale(self, value: float) -> None:
        self.events.write("scale", self.step, value=value)

    def before_clipping(self, parameters: Iterable[Tensor]) -> list[str]:
        """Writes the gradients from which a norm is computed. Returns their names."""
        names = self.known_names(parameters)
        if self._has_finished(names):
            return names
        new = [name for name in names if name not in self.unclipped]
        self.write_gradients("unclipped", new)
        self.unclipped.update(new)
        return names

    def norm(self, value: Any, limit: float | None, names: list[str]) -> None:
        partial, counted = partial_sum(value)
        number = float(local(value)) if isinstance(value, Tensor) else float(value)  # type: ignore[arg-type]
        self.events.write("norm", self.step, value=number, limit=limit, names=names, partial=partial, counted=counted)

    def before_optimizer_step(self) -> int:
        """Returns 1, or more for a step inside of others."""
        self.step_depth += 1
        if self.step_depth == 1 and self.is_recording:
            self.flush()
        return self.step_depth

    def before_closure(self) -> None:
        """Pauses from the second call of a closure in one step to the end of the step."""
        self.paused = self.stepping is not None

    def gradients_computed(self, optimizer: Any, depth: int) -> None:
        """Writes the gradients that an optimizer steps with: called before its step, or where that has a closure, which
        computes them, after this. Where a step calls another optimizer's, perhaps that of its base class, they are
        written again, because they may have been reduced in between, as Horovod's are. What was written last counts."""
        if not self.is_recording:
            return
        names = self.known_names(parameter for group in optimizer.param_groups for parameter in group["params"])
        if self.stepping is not None:
            self.write_gradients("gradient", names, self.stepping)
        elif names and depth == 1 and not self._has_finished(names):
            self._begin_step(optimizer, names)

    def _begin_step(self, optimizer: Any, names: list[str]) -> None:
        if id(optimizer) not in self.steps_of:
            self.steps_of[id(optimizer)] = 0
            self._write_options(optimizer)
        if type(optimizer).__name__ == "LBFGS" and not self.notes:
            self.notes.append("LBFGS computes several gradients in each step: the first of them is compared")
        self.write_step(type(optimizer).__name__, id(optimizer), names)
        self.stepping = self.steps_of[id(optimizer)]

    def write_step(self, optimizer: str, identity: int, names: list[str]) -> None:
        """Writes the gradients that an optimizer steps with."""
        number = self.steps_of.get(identity, 0) + 1
        self.write_gradients("gradient", names, number)
        self.events.write("step", number, optimizer=optimizer, names=len(names))
        self.steps_of[identity] = number
        self.pending.update(names)
        self.unclipped.clear()
        if number >= self.settings.steps:
            self.finished.update(names)

    def after_optimizer_step(self) -> None:
        self.step_depth = max(0, self.step_depth - 1)
        if not self.step_depth:
            self.stepping, self.paused = None, False
            self.unclipped.clear()

    def _write_options(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            values = {
                key: value for key, value in group.items() if isinstance(value, int | float | bool | tuple | list)
            }
            values = {key: value for key, value in values.items() if key != "params" and "name" not in key}
            names = self.known_names(group["params"])
            plain = {key: value for key, value in values.items() if _is_plain(value)}
            self.events.write("options", 1, optimizer=type(optimizer).__name__, names=names, values=plain)

    def known_names(self, parameters: Iterable[Tensor]) -> list[str]:
        names: dict[str, None] = {}
        for parameter in parameters:
            for name in self.names_of.get(id(parameter), ()):
                names.setdefault(name)
        return list(names)

    # ---- writing

    def write_gradients(self, kind: str, names: list[str], step: int | None = None) -> None:
        held = {name: self.parameters[name] for name in names}
        self._write_held(kind, self.step if step is None else step, held, Part.read_gradient)

    def flush(self) -> None:
        """Writes the weights that were updated, and the buffers, as they are after the last step."""
        if not self.pending:
            return
        step = max(self.steps_of.values())
        self._write_held(
            "weight", step, {name: self.parameters[name] for name in self.parameters if name in self.pending}
        )
        self._write_held("buffer", step, self.buffers)
        self.pending.clear()

    def _write_held(
        self, kind: str, step: int, held: dict[str, Held], read: Callable[[Part], Tensor | None] = Part.read_weight
    ) -> None:
        tensors: dict[str, Tensor] = {}
        above = self._sketch_above(step)
        for name, entry in held.items():
            if entry.same_as is not None:
                continue
            sketch = sketch_of(entry.shape, above) if entry.dtype.is_floating_point else None
            for index, part in enumerate(entry.parts):
                value = read(part)
                if value is None:
                    continue
                if sketch is None:
                    tensors[f"{name}#{index}"] = value
                else:
                    tensors[f"{name}#{index}.sketch"] = sketch_part(sketch, part.region, value).to("cpu")
                    tensors[f"{name}#{index}.square"] = square_of(value)
        if not tensors:
            return
        number = self.kinds_written[step, kind] = self.kinds_written.get((step, kind), -1) + 1
        write_tensors(self.folder / f"{step:04d}-{kind}-{number}.safetensors", tensors)

    def _sketch_above(self, step: int) -> int | None:
        """The start of the reference is written whole, because other trainings start from it."""
        return None if step == 0 and self.settings.reference is None else self.settings.sketch_above

    # ---- end

    def _is_done(self) -> bool:
        done = list(self.steps_of.values())
        wanted = self.settings.steps
        return bool(done) and (min(done) >= wanted or max(done) > 2 * wanted)

    def _has_finished(self, names: list[str]) -> bool:
        """Stops recording where these parameters are in a step that is not asked for: of loops that call no module."""
        if names and self.is_recording and self.stepping is None and self.finished.issuperset(names):
            self.flush()
            self.stop()
            return True
        return False

    def stop(self) -> None:
        """Ends the record, because the steps that are asked for were recorded, and the process. It waits for the other
        ranks, which may still need this one for their last step."""
        self.end("steps")
        if not self.ends_process:
            return
        until = time.monotonic() + _WAIT_FOR_OTHER_RANKS_S
        while time.monotonic() < until and len(list(self.root.glob("rank-*/ended"))) < self.world_size:
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def end_if_done(self) -> None:
        """Ends the record if the steps that are asked for were recorded."""
        if self.is_recording and self._is_done():
            self.end("exit")

    def end(self, reason: str, message: str = "") -> None:
        """Writes what is left. Only the first call counts."""
        self.paused = False
        if not self.is_recording:
            return
        if reason != "error" or not self.step_depth:
            self.flush()
        self.ended = True
        atexit.unregister(self.end)
        self.write_header()
        self.events.write("end", self.step - 1, reason=reason, message=message)
        (self.folder / "ended").touch()


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook as `torch.compile` leaves it alone."""
    disable = getattr(getattr(torch, "compiler", None), "disable", None)
    return disable(hook) if disable else hook


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, int | float | bool)


RECORDERS: list[Recorder] = []  # that of this process, if there is one


def recorder() -> Recorder:
    """The recorder of this process."""
    if not RECORDERS:
        folder = record_folder()
        assert folder is not None
        RECORDERS.append(Recorder(folder))
    return RECORDERS[0]


def use_recorder(own: Recorder) -> None:
    """Makes a recorder that of this process. One that ended stays, for functions of others that still call it."""
    RECORDERS[:] = [own]
