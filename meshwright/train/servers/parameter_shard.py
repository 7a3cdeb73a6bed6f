"""`Holding`: what a server holds, its pieces of the parameters with the optimizer and the schedule, and one update.

gradient = Σ pushed sums / Σ pushed counts,  then clipped by the norm over all servers          update()

A job's learning rate is that of a global batch. Where workers' gradients are applied one by one, each is of a share of
it, and makes a step of that part of the rate: together they go as far as one synchronous step does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.parallel.clip import global_norm
from meshwright.parallel.weights.layout import Lodged, lodge
from meshwright.train.servers.assignment import AXIS, Piece, layout_of
from meshwright.train.servers.messages import Do, Frame, Reply, Told, fill, of_tensors
from meshwright.train.servers.momentum import OwnMomentum
from meshwright.train.servers.recipe import Parts, Recipe, parts_of
from meshwright.train.servers.team import Team
from meshwright.train.step.optimizer import fuse

USED = "used"


@dataclass(frozen=True)
class Outcome:
    """Of an update: `stepped` is False where it was left out, since fp16 was too small for a gradient."""

    stepped: bool
    loss: float
    norm: float


class Holding:
    """The first server also keeps what is not divided: frozen parameters and buffers."""

    def __init__(
        self, recipe: Recipe, team: Team, *, fused: bool = False, recorded: bool = False, rate: float = 1.0
    ) -> None:
        """`rate`: the part of the learning rate that an update has; less than all of it where they are asynchronous."""
        parts = parts_of(recipe.model, recipe.make_optimizer, team.size)
        self.pieces = parts.pieces[team.rank]
        self.module = _shell(recipe.model, parts, self.pieces, team.leads)
        held = dict(self.module.named_parameters())
        self.parameters = {piece.name: held[piece.name] for piece in self.pieces}
        self.buffers = {name: b for name, b in self.module.named_buffers() if name in parts.buffers}
        self.optimizer = recipe.make_optimizer(self.parameters)
        if fused:
            fuse(self.optimizer)
        self.schedule = recipe.make_schedule(self.optimizer) if recipe.make_schedule else None
        self.fixed = Frame(of_tensors(dict(parts.fixed) if team.leads else {}))
        self._fixed_names = list(parts.fixed) if team.leads else []
        self._layouts = _layouts(recipe.model, parts, self.pieces) if team.size > 1 else {}
        self._mesh: DeviceMesh | None = None
        self._clip_norm = recipe.clip_norm
        self._team = team
        self._rate = rate
        self._momentum = (
            OwnMomentum(self.optimizer, rate) if rate != 1.0 and OwnMomentum.helps(self.optimizer) else None
        )
        self._recorded = recorded
        self._used = torch.ones(len(self.pieces), dtype=torch.uint8)
        self._gradients: dict[str, Tensor] = {}  # before clipping, where a proof wants them

    def division(self) -> tuple[Mapping[str, Lodged], tuple[()], DeviceMesh | None]:
        """As a checkpoint wants to know it. All servers ask together, and have a process group."""
        if self._team.size > 1 and self._mesh is None:
            assert dist.is_initialized(), "servers that save have a process group of their own"
            self._mesh = init_device_mesh("cpu", (self._team.size,), mesh_dim_names=(AXIS,))
        return self._layouts, (), self._mesh

    def forget(self, worker: int) -> None:
        """It is gone, and what it has moved by."""
        if self._momentum:
            self._momentum.forget(worker)

    # ---- messages

    def push_frame(self, worker: int) -> Frame:
        """What a worker sends to this server: the first worker's buffers are everybody's."""
        return push_frame(self.pieces, self.buffers if worker == 0 else {})

    def reply_frame(self) -> Frame:
        return reply_frame(self.pieces, self.buffers, self._recorded)

    def fill_fixed(self) -> None:
        held = dict(self.module.named_parameters())
        fill(self.fixed.views, {name: held[name].detach() for name in self._fixed_names})

    def fill_reply(self, frame: Frame, reply: Reply) -> None:
        ahead = self._momentum.ahead() if self._momentum and reply.do == Do.STEP else {}
        source = {f"weights/{name}": ahead.get(p, p.detach()) for name, p in self.parameters.items()}
        source |= {f"buffers/{name}": buffer for name, buffer in self.buffers.items()}
        if self._recorded:
            source |= {
                f"gradients/{name}": self._gradients.get(name, torch.zeros_like(p))
                for name, p in self.parameters.items()
            } | {USED: self._used}
        fill(frame.views, source)
        frame.header.copy_(reply.pack())

    # ---- the update

    @torch.no_grad()
    def update(self, pushed: Sequence[tuple[Told, Frame]], worker: int | None = None) -> Outcome:
        """One step of the optimizer on the mean of what was pushed; all servers take it together. `worker`: whose
        gradients it is, where they are of one alone."""
        count = sum(told.count for told, _ in pushed) or 1.0  # no target at all, or a sum that is not divided
        loss = sum(told.loss for told, _ in pushed) / count
        for _, frame in pushed:
            for name, buffer in self.buffers.items():
                if f"buffers/{name}" in frame.views:
                    buffer.copy_(frame.views[f"buffers/{name}"])
        if any(told.unfit for told, _ in pushed):
            return Outcome(False, loss, 0.0)
        self._combine([frame for _, frame in pushed], count)
        norm = self._clip() if self._clip_norm is not None else 0.0
        own = self._momentum.of(worker) if self._momentum and worker is not None else nullcontext()
        with own, self._part_of_rate():
            self.optimizer.step()
        return Outcome(True, loss, norm)

    @contextmanager
    def _part_of_rate(self) -> Iterator[None]:
        """The schedule knows the whole rate only."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * self._rate if self._rate != 1.0 else rate
        yield
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _combine(self, frames: Sequence[Frame], count: float) -> None:
        """Leaves the mean in the parameters. Always in the workers' order, so that a run can be repeated bit by bit."""
        names = [f"gradients/{piece.name}" for piece in self.pieces]
        self._used = torch.stack([frame.views[USED] for frame in frames]).amax(dim=0)
        if not names:
            return
        sums = [frames[0].views[name] for name in names]
        for frame in frames[1:]:
            torch._foreach_add_(sums, [frame.views[name] for name in names])
        torch._foreach_div_(sums, count)
        for parameter, gradient, used in zip(self.parameters.values(), sums, self._used.tolist(), strict=True):
            parameter.grad = gradient if used else None
        if self._recorded:
            self._gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    def _clip(self) -> float:
        assert self._clip_norm is not None
        mine = global_norm(((name, p.grad) for name, p in self.parameters.items()), {}, (), None)
        norm = self._team.total(mine.square().reshape(1)).sqrt()
        factor = float((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        given = [p.grad for p in self.parameters.values() if p.grad is not None]
        if given:
            torch._foreach_mul_(given, factor)
        return float(norm)


def push_frame(pieces: Sequence[Piece], buffers: Mapping[str, Tensor]) -> Frame:
    gradients = [(f"gradients/{piece.name}", piece.shape, piece.dtype) for piece in pieces]
    more = [(f"buffers/{name}", tuple(b.shape), b.dtype) for name, b in buffers.items()]
    return Frame([(USED, (len(pieces),), torch.uint8), *gradients, *more])


def reply_frame(pieces: Sequence[Piece], buffers: Mapping[str, Tensor], recorded: bool) -> Frame:
    weights = [(f"weights/{piece.name}", piece.shape, piece.dtype) for piece in pieces]
    more = [(f"buffers/{name}", tuple(b.shape), b.dtype) for name, b in buffers.items()]
    seen = [(f"gradients/{piece.name}", piece.shape, piece.dtype) for piece in pieces] if recorded else []
    used = [(USED, (len(pieces),), torch.uint8)] if recorded else []
    return Frame([*weights, *more, *seen, *used], header=Reply.size())


def _shell(model: nn.Module, parts: Parts, pieces: Sequence[Piece], leads: bool) -> nn.Module:
    """Modules without code that hold this server's tensors under the model's own names, tied ones under each."""
    root = nn.Module()
    held: dict[int, Any] = {
        id(parts.trained[piece.name]): nn.Parameter(piece.of(parts.trained[piece.name].detach().cpu()).clone())
        for piece in pieces
    }
    if leads:
        held |= {id(p): nn.Parameter(p.detach().cpu().clone(), requires_grad=False) for p in parts.fixed.values()}
        held |= {id(buffer): buffer.detach().cpu().clone() for buffer in parts.buffers.values()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in held:
            inner, (*path, last) = root, name.split(".")
            for word in path:
                if word not in inner._modules:
                    inner.add_module(word, nn.Module())
                inner = inner.get_submodule(word)
            value = held[id(tensor)]
            if isinstance(value, nn.Parameter):
                inner.register_parameter(last, value)
            else:
                inner.register_buffer(last, value)
    return root


def _layouts(model: nn.Module, parts: Parts, pieces: Sequence[Piece]) -> dict[str, Lodged]:
    """Of every tensor by each of its names, also of those that other servers hold."""
    mine = {piece.name: layout_of(piece) for piece in pieces}
    names = {id(p): name for name, p in parts.trained.items()}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        here = mine.get(names.get(id(tensor), ""))
        found[name] = here if here is not None else lodge(tensor, AXIS)
    return found
