"""`Driver`: runs a model under a plan in a training loop that calls backward passes and the optimizer itself. A session
has one for a user's own loop, and so has each model that a loop of another library trains.

    forward, forward_pass      in the plan's precision; frees gathered weights after passes without gradients
    backward, backward_pass    combine the gradients of the data ranks; within `no_sync` they accumulate them only
    clip_norm                  of gradients that may be shards
    after_optimizer_step       frees gathered weights, and makes the buffers of the data ranks equal
    whole_state, …             convert between this rank's parts and whole tensors (whole_states.py)
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import InputError
from meshwright.model_io.batch import at_least_fp32
from meshwright.parallel import shard
from meshwright.parallel.attention_fastpath import without_attention_fastpath
from meshwright.parallel.clip import clip_
from meshwright.parallel.context.sequence_view import gather_sequence_views
from meshwright.parallel.mesh import data_group
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.precision import forward_precision, fp32_product_precision
from meshwright.parallel.replicate.gradient_averaging import average_once
from meshwright.parallel.replicate.replicate import broadcast_buffers
from meshwright.parallel.tensor.memory.shared_memory import refuse_lost_writes
from meshwright.parallel.tensor.shard_view import gather_shard_views
from meshwright.parallel.weights.layout import ParameterLayout
from meshwright.parallel.weights.state import full_state
from meshwright.plan import Plan
from meshwright.train.drive import whole_states
from meshwright.train.loop_checks.own_backward import describe_loss


def check_loss(loss: Any, method: str, remedy: str = "", error: type[InputError] = InputError) -> None:
    """Raises an `error` if `method` was called with what has no gradient, or is not one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise error(f"{method} takes a loss with a gradient, one number, and this is {describe_loss(loss)}{remedy}")


def loss_weight(samples: float, global_samples: float, ranks: int) -> float:
    """The factor of a rank's loss, the mean over its samples (or targets), with which the mean of the ranks' gradients
    is that of the mean over all samples."""
    return ranks * samples / (global_samples or 1)


class Driver:
    """Runs a module that consists of one or several parts which the same plan has divided. All ranks call its methods
    together. `synchronizes` says whether backward passes combine the gradients of the ranks, or accumulate them."""

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[ParallelModel],
        plan: Plan,
        device: torch.device,
        mesh: DeviceMesh | None,
    ) -> None:
        """`module` is the only part, or has all parts and maybe parameters of its own."""
        self.module, self.plan, self.device, self.mesh = module, plan, device, mesh
        self.synchronizes = True
        self._parts = parts
        self._gathered = False
        # The parameters of each part. While FSDP2 has gathered weights, `module.parameters()` are other tensors.
        self._parameters = [list(part.parameters().values()) for part in parts]
        self._part_numbers = {id(p): number for number, ps in enumerate(self._parameters) for p in ps}
        self._outside_of_parts = [p for p in self.module.parameters() if id(p) not in self._part_numbers]

        is_whole = any(part.module is module for part in parts)
        self._layouts = parts[0].layouts if is_whole else {}  # several parts have no split layers

    @classmethod
    def of(cls, parallel: ParallelModel) -> "Driver":
        """The driver of a module that is divided as a whole."""
        return cls(parallel.module, [parallel], parallel.plan, parallel.device, parallel.mesh)

    @property
    def is_sharded(self) -> bool:
        return self.plan.axes.shard > 1

    def lay_out_gradients(self) -> None:
        """Chooses which gradients are averaged together: those of all parameters that are trained now. Otherwise the
        first backward pass does this, when a loop may have frozen some weights for a while."""
        for part in self._parts:
            _ = part.gradient_averager

    # ---- forward passes

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the module, without DDP: any number of forward passes may come before a backward pass. Not for
        pipelines."""
        with self._without_inference_mode():
            with self.forward_pass():
                output = self.module(*arguments, **keywords)
            refuse_lost_writes(at_end=True)
            output = at_least_fp32(output)
            return output if torch.is_grad_enabled() else gather_shard_views(gather_sequence_views(output))

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """The context in which the module, or a function that calls it, runs. Afterwards no gathered weights are left
        of passes that need no gradients."""
        with self._without_inference_mode():
            device_type = self.device.type
            with (
                without_attention_fastpath(),
                fp32_product_precision(self.plan, device_type),
                forward_precision(self.plan, device_type),
            ):
                yield
            if not torch.is_grad_enabled() and not self._gathered:
                for part in self._parts:
                    part.reshard()

    @contextmanager
    def _without_inference_mode(self) -> Iterator[None]:
        """Under `inference_mode`, a context without gradients in its place if the plan shards weights: those that FSDP2
        has gathered under it could not be trained later."""
        with ExitStack() as stack:
            if self.is_sharded and torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield

    def gather(self) -> None:
        """Gathers the weights of all shards, until `release` is called. In between, ranks may run different numbers of
        forward passes without gradients."""
        if self.is_sharded:
            self._gathered = True
            for part in self._parts:
                shard.gather(part.module)

    def release(self) -> None:
        """Frees what `gather` has gathered, if it was called."""
        if self._gathered:
            self._gathered = False
            for part in self._parts:
                shard.release(part.module)

    # ---- backward passes

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Runs the backward pass of a loss that this module alone has computed."""
        with self.backward_pass():
            loss.backward(retain_graph=retain_graph)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """The context in which a backward pass runs. If `synchronizes` is true, the gradients are afterwards the mean
        over the data ranks of all that was accumulated in them; otherwise they may be this rank's own."""
        with self.product_precision(), self.synchronization(self.synchronizes):
            yield

    def product_precision(self) -> Any:
        """The context of the precision of products in backward passes."""
        return fp32_product_precision(self.plan, self.device.type)

    @contextmanager
    def synchronization(self, combines: bool) -> Iterator[None]:
        """Within this context, a backward pass combines or accumulates the gradients."""
        with ExitStack() as stack:
            for part, parameters in zip(self._parts, self._parameters, strict=True):
                if any(parameter.requires_grad for parameter in parameters):  # a loop may freeze a part for a while
                    self._enter_synchronization(stack, part, combines)
            yield
        outside = [p for p in self._outside_of_parts if p.requires_grad]
        group = data_group(self.mesh, self.plan) if outside else None
        if combines and group is not None:
            average_once(outside, [group])

    def _enter_synchronization(self, stack: ExitStack, part: ParallelModel, combines: bool) -> None:
        if self.is_sharded:
            stack.enter_context(shard.backward_synchronization(part.module, self.plan, combines))
        elif part.gradient_averager is not None:
            stack.enter_context(part.gradient_averager.averaging(combines))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, backward passes accumulate gradients and do not combine them."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    # ---- optimizer steps

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of these parameters so that their norm over all ranks is at most `max_norm`. Returns the
        norm before. Not for plans that split layers."""
        if not self.is_sharded:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise InputError(
                f"gradients are clipped by their {norm_type}-norm, but the plan ({self.plan.summary()}) shards them:"
                " use the 2-norm, or a plan with replicas only"
            )
        gradients = [(str(number), parameter.grad) for number, parameter in enumerate(parameters)]
        return clip_(gradients, {}, (), self.mesh, max_norm)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer trains a parameter of the module."""
        known = self._part_numbers.keys() | {id(parameter) for parameter in self._outside_of_parts}
        return any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None, *, aligns: bool = True) -> None:
        """Frees gathered weights of the parts that the optimizer has changed (None: all), and makes the buffers equal
        on all data ranks if it `aligns` them."""
        changed = set(range(len(self._parts)))
        if optimizer is not None:
            changed &= {self._part_numbers.get(id(p), -1) for group in optimizer.param_groups for p in group["params"]}
        for number in changed:
            self._parts[number].reshard()
        if aligns:
            self.align_buffers()

    def align_buffers(self) -> None:
        if self.mesh is not None:
            broadcast_buffers(self.module, self.mesh)

    def reshard(self) -> None:
        """Frees gathered weights. The module's parameters are then the shards."""
        self.release()
        for part in self._parts:
            part.reshard()

    # ---- weights

    def whole_state(self) -> dict[str, Any]:
        """The `state_dict` of the module with whole tensors, on every rank. Under replicas, the tensors are the
        module's own; otherwise they are copies on the CPU."""
        self.reshard()
        if not self.is_sharded:
            state: dict[str, Any] = self.module.state_dict()
            return state
        return full_state(self.module, {}, self.mesh)

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer, *, keeps: bool = True) -> dict[str, Any]:
        """The optimizer's `state_dict` with whole tensors, without entries if it is not kept (`keeps`)."""
        self.reshard()
        return whole_states.whole_optimizer_state(optimizer, self._layouts_by_id(), self.mesh, keeps=keeps)

    def take_whole_tensors(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """From now on, `load_state_dict` of the module and of the optimizer also takes whole tensors."""
        self.module.register_load_state_dict_pre_hook(self._divide_loaded_weights)
        if optimizer is not None:
            layouts = self._layouts_by_id()
            optimizer.register_load_state_dict_pre_hook(
                lambda loading, state: whole_states.divide_loaded_state(loading, state, layouts)
            )

    def _divide_loaded_weights(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.reshard()
        held, layouts = module.state_dict(prefix=prefix), self._layouts
        for name in held.keys() & state.keys():
            state[name] = whole_states.part_of_tensor(state[name], held[name], layouts.get(name.removeprefix(prefix)))

    def _layouts_by_id(self) -> dict[int, ParameterLayout]:
        named = self._parts[0].parameters() if self._layouts else {}
        return {id(parameter): self._layouts[name] for name, parameter in named.items() if name in self._layouts}
