"""`ParameterShard`: the rows of the parameters that one server holds, with the optimizer and the schedule, and one
update.

gradient = Σ pushed sums / Σ pushed counts,  then clipped by the norm over all servers          update()

A job's learning rate is meant for the gradients of a global batch. If the gradients of each worker are applied
separately (asynchronous updates), each comes from one share of a batch, and its update uses only that fraction of the
learning rate. Together these updates then move the weights about as far as one synchronous step.
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
from meshwright.parallel.weights.layout import WholeOnOneRank, whole_on_one_rank
from meshwright.train.servers.assignment import AXIS, ParameterRows, checkpoint_layout
from meshwright.train.servers.messages import (
    USED,
    Instruction,
    MessageBuffer,
    ServerReply,
    TensorKey,
    WorkerReport,
    frozen_buffer,
    push_buffer,
    reply_buffer,
)
from meshwright.train.servers.momentum import PerWorkerMomentum
from meshwright.train.servers.server_group import ServerGroup
from meshwright.train.servers.training_spec import ModelTensors, TrainingSpec, model_tensors
from meshwright.train.step.optimizer import use_fused_kernels
from meshwright.train.torch_private import foreach_add_, foreach_div_, foreach_mul_


@dataclass(frozen=True)
class UpdateResult:
    """The mean loss and the gradient norm of an update; the norm is 0 without clipping. `stepped` is False if the
    update was left out, because some gradient was not finite in fp16, or because the loss or some gradient was not
    finite and the job leaves out such updates (`nonfinite`)."""

    stepped: bool
    loss: float
    norm: float
    nonfinite: bool = False


class ParameterShard:
    """Holds and updates the parameters (or rows of them) of one server. The first server also holds the frozen
    parameters and the model's buffers, which are not divided."""

    def __init__(
        self, spec: TrainingSpec, group: ServerGroup, *, fused: bool = False, recorded: bool = False, rate: float = 1.0
    ) -> None:
        """`rate` is the fraction of the learning rate that one update uses; it is below 1 for asynchronous updates.
        `recorded`: replies also carry the combined gradients, for a proof."""
        tensors = model_tensors(spec.model, spec.make_optimizer, group.size)
        self.rows = tensors.rows[group.rank]
        self.module = _module_of_shard(spec.model, tensors, self.rows, group.is_coordinator)
        parameters = dict(self.module.named_parameters())
        self.parameters = {part.name: parameters[part.name] for part in self.rows}
        self.buffers = {name: b for name, b in self.module.named_buffers() if name in tensors.buffers}
        self.optimizer = spec.make_optimizer(self.parameters)
        if fused:
            use_fused_kernels(self.optimizer)
        self.schedule = spec.make_schedule(self.optimizer) if spec.make_schedule else None
        self._frozen_names = list(tensors.frozen) if group.is_coordinator else []
        self.frozen = frozen_buffer({name: tensors.frozen[name] for name in self._frozen_names})
        self._layouts = _layouts(spec.model, tensors, self.rows) if group.size > 1 else {}
        self._mesh: DeviceMesh | None = None
        self._clip_norm = spec.clip_norm
        self._group = group
        self._rate = rate
        needs_momentum = rate != 1.0 and PerWorkerMomentum.applies_to(self.optimizer)
        self._momentum = PerWorkerMomentum(self.optimizer, rate) if needs_momentum else None
        self._recorded = recorded
        self._used = torch.ones(len(self.rows), dtype=torch.uint8)
        self._gradients: dict[str, Tensor] = {}  # before clipping; kept only when steps are recorded

    def weight_division(self) -> tuple[Mapping[str, WholeOnOneRank], tuple[()], DeviceMesh | None]:
        """Returns how the servers divide the model, as checkpoint functions take it: layouts, tied weights (none), and
        the mesh of servers. All servers call this together, inside a default process group."""
        if self._group.size > 1 and self._mesh is None:
            assert dist.is_initialized(), "servers that save need a default process group"
            self._mesh = init_device_mesh("cpu", (self._group.size,), mesh_dim_names=(AXIS,))
        return self._layouts, (), self._mesh

    def forget(self, worker: int) -> None:
        """Drops the momentum of a worker that is gone."""
        if self._momentum:
            self._momentum.forget(worker)

    # ---- messages

    def push_buffer(self, worker: int) -> MessageBuffer:
        """Returns a message buffer for the gradients of a worker. Only worker 0 also sends its model buffers, such as
        running statistics; the servers send these to all workers."""
        return push_buffer(self.rows, self.buffers if worker == 0 else {})

    def reply_buffer(self) -> MessageBuffer:
        return reply_buffer(self.rows, self.buffers, self._recorded)

    def fill_frozen(self) -> None:
        """Copies the frozen parameters into the message `frozen`."""
        parameters = dict(self.module.named_parameters())
        self.frozen.fill({TensorKey("frozen", name): parameters[name].detach() for name in self._frozen_names})

    def fill_reply(self, message: MessageBuffer, reply: ServerReply) -> None:
        """Writes a reply with the current weights into `message`. With momentum per worker, a worker that is told to
        compute gradients gets the weights that momentum will have reached when they are applied."""
        ahead = self._momentum.look_ahead() if self._momentum and reply.instruction == Instruction.STEP else {}
        source = {TensorKey("weights", name): ahead.get(p, p.detach()) for name, p in self.parameters.items()}
        source |= {TensorKey("buffers", name): buffer for name, buffer in self.buffers.items()}
        if self._recorded:
            source |= {
                TensorKey("gradients", name): self._gradients.get(name, torch.zeros_like(p))
                for name, p in self.parameters.items()
            } | {USED: self._used}
        message.fill(source)
        message.header.copy_(reply.pack())

    # ---- the update

    @torch.no_grad()
    def update(self, pushes: Sequence[tuple[WorkerReport, MessageBuffer]], worker: int | None = None) -> UpdateResult:
        """Makes one optimizer step on the mean of the pushed gradients. All servers call this together. `worker` is the
        worker that pushed them, or None if the update combines all workers."""
        count = sum(report.count for report, _ in pushes) or 1.0  # 0: no target at all, or a sum that is not divided
        loss = sum(report.loss for report, _ in pushes) / count
        if any(report.nonfinite for report, _ in pushes):  # the buffers of such a step are not used either
            return UpdateResult(False, loss, 0.0, nonfinite=True)
        for _, message in pushes:
            for name, buffer in self.buffers.items():
                if TensorKey("buffers", name) in message.views:
                    buffer.copy_(message.views[TensorKey("buffers", name)])
        if any(report.overflow for report, _ in pushes):
            return UpdateResult(False, loss, 0.0)
        self._combine([message for _, message in pushes], count)
        norm = self._clip() if self._clip_norm is not None else 0.0
        momentum = self._momentum.of_worker(worker) if self._momentum and worker is not None else nullcontext()
        with momentum, self._fraction_of_rate():
            self.optimizer.step()
        return UpdateResult(True, loss, norm)

    @contextmanager
    def _fraction_of_rate(self) -> Iterator[None]:
        """Within this context, the optimizer has its fraction of the learning rate. Outside of it the optimizer has the
        full learning rate, which the schedule changes."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * self._rate if self._rate != 1.0 else rate
        yield
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _combine(self, messages: Sequence[MessageBuffer], count: float) -> None:
        """Leaves the mean gradients in the parameters. Gradients are added in the order of `messages`, so that a run
        can be repeated bitwise."""
        keys = [TensorKey("gradients", part.name) for part in self.rows]
        self._used = torch.stack([message.views[USED] for message in messages]).amax(dim=0)
        if not keys:
            return
        sums = [messages[0].views[key] for key in keys]
        for message in messages[1:]:
            foreach_add_(sums, [message.views[key] for key in keys])
        foreach_div_(sums, count)
        for parameter, gradient, used in zip(self.parameters.values(), sums, self._used.tolist(), strict=True):
            parameter.grad = gradient if used else None
        if self._recorded:
            self._gradients = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    def _clip(self) -> float:
        """Clips the gradients by their norm over all servers, and returns that norm."""
        assert self._clip_norm is not None
        local_norm = global_norm(((name, p.grad) for name, p in self.parameters.items()), {}, (), None)
        norm = self._group.sum(local_norm.square().reshape(1)).sqrt()
        factor = float((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if gradients:
            foreach_mul_(gradients, factor)
        return float(norm)


def _module_of_shard(
    model: nn.Module, tensors: ModelTensors, rows: Sequence[ParameterRows], is_coordinator: bool
) -> nn.Module:
    """A tree of empty modules that holds this server's tensors under the model's names. A tied tensor is there under
    each of its names."""
    root = nn.Module()
    by_id: dict[int, Any] = {
        id(tensors.trained[part.name]): nn.Parameter(part.view(tensors.trained[part.name].detach().cpu()).clone())
        for part in rows
    }
    if is_coordinator:
        by_id |= {id(p): nn.Parameter(p.detach().cpu().clone(), requires_grad=False) for p in tensors.frozen.values()}
        by_id |= {id(buffer): buffer.detach().cpu().clone() for buffer in tensors.buffers.values()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in by_id:
            continue
        module, (*path, last) = root, name.split(".")
        for component in path:
            if component not in dict(module.named_children()):
                module.add_module(component, nn.Module())
            module = module.get_submodule(component)
        value = by_id[id(tensor)]
        if isinstance(value, nn.Parameter):
            module.register_parameter(last, value)
        else:
            module.register_buffer(last, value)
    return root


def _layouts(model: nn.Module, tensors: ModelTensors, rows: Sequence[ParameterRows]) -> dict[str, WholeOnOneRank]:
    """Returns the layout of every tensor of the model under each of its names, also of tensors that other servers
    hold."""
    local = {part.name: checkpoint_layout(part) for part in rows}
    names = {id(p): name for name, p in tensors.trained.items()}
    layouts = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        layout = local.get(names.get(id(tensor), ""))
        layouts[name] = layout if layout is not None else whole_on_one_rank(tensor, AXIS)
    return layouts
