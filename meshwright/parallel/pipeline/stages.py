"""A model cut into pipeline stages that run its original modules.

A stage is a copy of the model's outer modules around the original pieces: those that run in it are the very objects of
the model, those of other stages are left out. It runs the model's own forward pass; see `left_out.py` for how.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.batch import Example
from meshwright.blocks.module_names import within
from meshwright.blocks.recompute import Recompute, find_blocks, recompute_blocks
from meshwright.errors import InputError, MeshwrightError
from meshwright.parallel.pipeline.remote_modules import LeftOut, Pass, Script, Traffic, by_call
from meshwright.parallel.pipeline.shape_inference import Rehearsal, bare_copy, forget_caches
from meshwright.parallel.pipeline.transport import Line, Room, arrive, depart
from meshwright.parallel.pipeline.wiring import Port, Wiring, find_wiring
from meshwright.plan import Plan
from meshwright.profile.structure.structure import Structure


@dataclass(frozen=True)
class Tied:
    """A parameter that several pipeline ranks hold: its first name in the untouched model, the one it has here, and
    the coordinates along the pipeline axis that hold it. Its gradient is the sum of theirs."""

    name: str
    local: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Cutting:
    """This rank's part of a model: `module` under the names of the whole, and its `stages`, which share modules and
    parameters with it. `bare` is the whole model on the meta device, `shared` the holders of every tied parameter of
    the model, also of those that are not held here."""

    module: nn.Module
    stages: tuple["Stage", ...]
    tied: tuple[Tied, ...]
    place: int
    wiring: Wiring
    bare: nn.Module
    shared: dict[str, tuple[int, ...]]


def places(plan: Plan) -> tuple[int, ...]:
    """Of each stage, the coordinate along the pipeline axis: in rounds, or for zbv down the ranks and up again."""
    ranks = plan.axes.pipeline
    stages = len(plan.pipeline.cuts) + 1
    if plan.pipeline.schedule == "zbv":
        return tuple(stage if stage < ranks else 2 * ranks - 1 - stage for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


class Stage(nn.Module):
    """One stage: called with what was received, it returns what is to be sent; the last one returns the result of
    `finish` for the model's output. `microbatch` says which example runs."""

    def __init__(self, index: int, model: nn.Module, wiring: Wiring, traffic: Traffic) -> None:
        super().__init__()
        self.index = index
        self.model = model
        self.script = _script(wiring, index)
        self.traffic = traffic
        self.received: tuple[Port, ...] = wiring.ports[index - 1] if index else ()
        self.sent: tuple[Port, ...] = wiring.ports[index] if index < len(wiring.ports) else ()
        self.last = index == len(wiring.ports)
        self.reuses = index in wiring.reuse
        self.followed: tuple[tuple[nn.Module, nn.Module], ...] = ()
        self.counters: tuple[tuple[nn.Module, nn.Module, str], ...] = ()
        self.rehearsal: Rehearsal | None = None
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.examples: list[Example] = []
        self.microbatch = 0
        self.rooms: tuple[Room, ...] = ()  # of what is sent; none: just as large as the values
        self.finish: Callable[[int, Any], Any] = lambda _, output: output

    def forward(self, *wires: Tensor) -> Any:
        assert self.rehearsal is not None, "the stage is no part of a pipeline yet"
        example = self.examples[self.microbatch]
        self._follow()
        notes = self.rehearsal.notes(example, self.model.training, self.precision)
        values: dict[int, Tensor] = {}
        if self.received:
            numbers = [port.value for port in self.received]
            values.update(zip(numbers, arrive([notes.lines[n] for n in numbers], wires), strict=True))
        with self.traffic.running(Pass(self.script, notes.returned, values)), self.precision():
            output = self.model(*example.arguments, **example.keywords)
        if self.last:
            return self.finish(self.microbatch, output)
        del output
        lines = [notes.lines[port.value] for port in self.sent]
        found = [self._checked(port, line, values) for port, line in zip(self.sent, lines, strict=True)]
        return depart(lines, self.rooms or [Room(line.lying, line.wire_dtype) for line in lines], found)

    def _checked(self, port: Port, line: Line, values: dict[int, Tensor]) -> Tensor:
        name = port.made.call[0] if port.made else port.used[0].call[0]
        if port.value not in values:
            raise MeshwrightError(f"pipeline stage {self.index} did not run {name}, whose result the next stage needs")
        value = values[port.value]
        if tuple(value.shape) != line.shape:
            raise MeshwrightError(
                f"the value of {name} that leaves pipeline stage {self.index} has shape {tuple(value.shape)} instead of"
                f" {line.shape}"
            )
        return value

    def follow(self, whole: nn.Module, outer: Iterable[str], shared: Iterable[str], counters: Iterable[str]) -> None:
        """Makes this stage, one of several of its rank, do as the outer modules of the rank's whole part do. Those
        that are `shared` have the same parameters, also after they are replaced in one of them."""
        self.followed = tuple((self.model.get_submodule(name), whole.get_submodule(name)) for name in outer)
        for ours, theirs in self.followed:
            ours._buffers = theirs._buffers
            ours._parameters = dict.fromkeys(theirs._parameters)
        for name in shared:
            self.model.get_submodule(name)._parameters = whole.get_submodule(name)._parameters
        found = [name.rpartition(".") for name in counters]
        self.counters = tuple((self.model.get_submodule(m), whole.get_submodule(m), name) for m, _, name in found)

    def _follow(self) -> None:
        for ours, theirs in self.followed:
            ours.training = theirs.training
        for ours, theirs, name in self.counters:
            # What the forward pass itself counts is counted by each stage; one of them is enough for the whole.
            buffer = theirs._buffers[name]
            ours._buffers = {**theirs._buffers, name: None if buffer is None else buffer.clone()}


def cut_stages(
    module: nn.Module, plan: Plan, structure: Structure, place: int, sample: Any, target: str | None = None
) -> Cutting:
    """The stages at this coordinate of the pipeline axis. The pieces are taken out of `module`, which is of no use
    afterwards; `sample` is a batch like those that the structure was found with."""
    wiring = find_wiring(module, plan, structure, sample, target)
    homes = places(plan)
    mine = tuple(stage for stage, home in enumerate(homes) if home == place)
    bare = bare_copy(module)
    _check_recompute(bare, plan, wiring)
    traffic = Traffic()
    holders = _holders(module, wiring)
    held = {name for name, stages in holders.items() if any(homes[stage] == place for stage in stages)}
    whole = _skeleton(module, wiring, mine, traffic, bare, held)
    outer = tuple(_outer(whole, wiring))
    stages = []
    unused = set(module.parameters())
    for stage in mine:
        used = {parameter for name, parameter in module.named_parameters() if name in wiring.weights[stage]}
        unused -= used
        alone = len(mine) == 1
        made = Stage(stage, whole if alone else _narrowed(whole, wiring, stage, traffic, used), wiring, traffic)
        stages.append((made, used))
    if len(mine) > 1:
        for made, used in stages:
            first = made.index == mine[0]
            made.follow(
                whole, outer, _with(whole, outer, used | unused if first else used), () if first else wiring.rewritten
            )
    shared = {
        name: tuple(sorted({homes[stage] for stage in found}))
        for name, found in holders.items()
        if len({homes[stage] for stage in found}) > 1
    }
    return Cutting(
        module=whole,
        stages=tuple(stage for stage, _ in stages),
        tied=tuple(_tied(module, whole, shared, place)),
        place=place,
        wiring=wiring,
        bare=bare,
        shared=shared,
    )


def _script(wiring: Wiring, stage: int) -> Script:
    before = wiring.ports[stage - 1] if stage else ()
    behind = wiring.ports[stage] if stage < len(wiring.ports) else ()
    return Script(
        own=frozenset(call for call, home in wiring.stage_of.items() if home == stage),
        received=by_call((port.made, port.value) for port in before if port.made),
        given=by_call((spot, port.value) for port in before if not port.made for spot in port.used),
        made=by_call((port.made, port.value) for port in behind if port.made),
        handed=by_call((spot, port.value) for port in behind if not port.made for spot in port.used),
        passed=wiring.passed,
    )


def _runs_in(wiring: Wiring, piece: str, stages: tuple[int, ...]) -> bool:
    return piece in wiring.everywhere or not wiring.stages_of(piece).isdisjoint(stages)


def _outer(model: nn.Module, wiring: Wiring) -> Iterator[str]:
    """The modules that are taken apart."""
    pieces = set(wiring.pieces)
    for name, _ in model.named_modules():
        if not any(within(name, piece) for piece in pieces):
            yield name


def _with(model: nn.Module, names: tuple[str, ...], parameters: set[nn.Parameter]) -> list[str]:
    """Those modules that hold one of the parameters themselves."""
    return [name for name in names if not parameters.isdisjoint(model.get_submodule(name).parameters(recurse=False))]


def _holders(module: nn.Module, wiring: Wiring) -> dict[str, set[int]]:
    """The stages that hold each parameter: their pieces have it, or the forward pass around them uses it there."""
    found: dict[int, set[int]] = {}
    for piece in wiring.pieces:
        for parameter in module.get_submodule(piece).parameters():
            found.setdefault(id(parameter), set()).update(wiring.stages_of(piece))
    holders = {}
    for name, parameter in module.named_parameters():
        used = {stage for stage, weights in enumerate(wiring.weights) if name in weights}
        holders[name] = found.get(id(parameter), set()) | used or {0}
    return holders


def _skeleton(
    module: nn.Module, wiring: Wiring, mine: tuple[int, ...], traffic: Traffic, bare: nn.Module, held: set[str]
) -> nn.Module:
    """All that lies on this rank."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    left_out: dict[str, LeftOut] = {}
    for piece in wiring.pieces:
        original = module.get_submodule(piece)
        if _runs_in(wiring, piece, mine):
            memo[id(original)] = original
        else:
            left_out[piece] = memo[id(original)] = LeftOut(piece, traffic, bare.get_submodule(piece))
    whole = copy.deepcopy(module, memo)
    forget_caches(whole)
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    here = {
        id(parameter)
        for piece in wiring.pieces
        if piece not in left_out
        for parameter in module.get_submodule(piece).parameters()
    }
    outer = set(_outer(whole, wiring))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        holds = first[id(parameter)] in held
        if owner in outer and not holds:
            whole.get_submodule(owner)._parameters[key] = None
        elif owner not in outer and holds and id(parameter) not in here:
            home = next((piece for piece in left_out if within(name, piece)), None)
            if home is not None:
                left_out[home].hold(name.removeprefix(f"{home}."), parameter)
    return whole


def _narrowed(whole: nn.Module, wiring: Wiring, stage: int, traffic: Traffic, used: set[nn.Parameter]) -> nn.Module:
    """One of several stages of a rank, which uses these parameters."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*whole.parameters(), *whole.buffers())}
    for piece in wiring.pieces:
        original = whole.get_submodule(piece)
        memo[id(original)] = original
        if not _runs_in(wiring, piece, (stage,)) and not isinstance(original, LeftOut):
            memo[id(original)] = left_out = LeftOut(piece, traffic, original)
            for name, module in original.named_modules():
                if any(parameter in used for parameter in module.parameters(recurse=False)):
                    left_out.share(name, module)
    return copy.deepcopy(whole, memo)


def _tied(module: nn.Module, whole: nn.Module, shared: dict[str, tuple[int, ...]], place: int) -> Iterator[Tied]:
    local = {id(parameter): name for name, parameter in whole.named_parameters()}
    for name, parameter in module.named_parameters():
        if place in shared.get(name, ()):
            yield Tied(name, local[id(parameter)], shared[name])


def _check_recompute(bare: nn.Module, plan: Plan, wiring: Wiring) -> None:
    if plan.memory.recompute == "none":
        return
    for block in find_blocks(bare):
        inside = [piece for piece in wiring.pieces if piece != block and within(piece, block)]
        homes = {stage for piece in inside if piece not in wiring.everywhere for stage in wiring.stages_of(piece)}
        if len(homes) > 1:
            raise InputError(
                f"plan.pipeline.cuts part {block}, which plan.memory.recompute computes again as a whole: cut behind"
                " it, or set recompute to none"
            )


def recompute_stages(cutting: Cutting, kind: Recompute) -> None:
    """`recompute_blocks` for the blocks of the model that run in these stages."""
    known = set(find_blocks(cutting.bare))
    for stage in cutting.stages:
        if kind != "none" and (found := set(find_blocks(stage.model))) and found <= known:
            recompute_blocks(stage.model, kind)


def prepare(cutting: Cutting, rehearsal: Rehearsal) -> None:
    """Gives every module that is left out, and every parameter that is not held here, a stand-in without memory, and
    has the pieces receive and send. Call it once, when parameters and hooks are in place."""
    twin = rehearsal.twin
    for model in {id(m): m for m in (cutting.module, *(stage.model for stage in cutting.stages))}.values():
        for name in _outer(model, cutting.wiring):
            module, original = model.get_submodule(name), twin.get_submodule(name)
            for key, parameter in original._parameters.items():
                if parameter is not None and module._parameters.get(key) is None:
                    module.__dict__[key] = parameter.detach()
    mine = tuple(stage.index for stage in cutting.stages)
    for piece in cutting.wiring.pieces:
        found = cutting.module.get_submodule(piece)
        if _runs_in(cutting.wiring, piece, mine):
            cutting.stages[0].traffic.watch(piece, found)
            for stage in cutting.stages:
                if not isinstance(stage.model.get_submodule(piece), LeftOut):
                    stage.model.set_submodule(piece, found)  # it may have been replaced in the whole
        else:
            assert isinstance(found, LeftOut)
            found.stand_for(twin.get_submodule(piece))
