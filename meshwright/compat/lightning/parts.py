"""`ModuleParts`: a module whose parts were divided by a plan, for training loops that belong to Lightning.

Usually the whole module is one part: a training step is one call of it, and its backward pass comes after that. Under
manual optimization, backward passes and optimizer steps run within the training step. Then each submodule that the
step calls is a part of its own, because FSDP2 frees and reduces when the call of a unit is over.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.compat.whole_states import load_whole_tensor, whole_tensor
from meshwright.errors import InputError
from meshwright.parallel import shard
from meshwright.parallel.apply import apply
from meshwright.parallel.attention_fastpath import without_attention_fastpath
from meshwright.parallel.clip import clip_
from meshwright.parallel.mesh import build_mesh, data_group
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.precision import forward_precision, fp32_product_precision
from meshwright.parallel.replicate.gradient_averaging import average_once
from meshwright.parallel.replicate.replicate import broadcast_buffers
from meshwright.parallel.torch_private import broadcast_coalesced
from meshwright.plan import Plan
from meshwright.plan_fields.groups import MIB

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # are never called themselves


class ModuleParts:
    """A module with a plan applied to it, in place, as one part or as several. All ranks call its methods together.

    `synchronizes` says whether backward passes combine the gradients of the ranks, or accumulate them.
    """

    def __init__(
        self, module: nn.Module, plan: Plan, device: torch.device, world_size: int, *, in_parts: bool = False
    ) -> None:
        """The module is on the device already. With `in_parts`, each submodule that has parameters is a part of its
        own. All ranks get the weights of rank 0."""
        self.module = module
        self.plan = plan
        self.device = device
        self.synchronizes = True
        self._gathered = False
        self.mesh: DeviceMesh | None = build_mesh(plan, device.type, world_size)
        if self.mesh is not None:
            _broadcast_from_first_rank(module)
        called = list(_called_submodules(module)) if in_parts else [module]
        if in_parts:
            _refuse_shared_weights(called)
        self._parts = [apply(plan, part, device, world_size) for part in called]
        # The parameters of each part. While FSDP2 has gathered weights, `module.parameters()` are other tensors.
        self._parameters = [list(part.parameters().values()) for part in self._parts]
        held = {id(parameter) for parameters in self._parameters for parameter in parameters}
        self._outside_of_parts = [p for p in module.parameters() if id(p) not in held]
        self._part_numbers = {id(p): number for number, ps in enumerate(self._parameters) for p in ps}
        for part in self._parts:
            _ = part.gradient_averager  # now, because later a loop may have frozen some weights for a while
        if plan.axes.shard > 1:
            for owner, parameters in zip(called, self._parameters, strict=True):
                _zero_gradients_of_shards(owner, parameters)
            if in_parts:
                _zero_gradients_of_shards(module, [p for parameters in self._parameters for p in parameters])
            module.register_load_state_dict_pre_hook(self._divide_whole_tensors)

    # ---- passes

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """The context in which a step of the loop runs. Afterwards no gathered weights are left of steps that need no
        gradients."""
        with ExitStack() as stack:
            stack.enter_context(without_attention_fastpath())
            stack.enter_context(fp32_product_precision(self.plan, self.device.type))
            stack.enter_context(forward_precision(self.plan, self.device.type))
            if self.plan.axes.shard > 1 and torch.is_inference_mode_enabled():
                # Weights that FSDP2 has gathered under `inference_mode` could not be trained later.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield
        if not torch.is_grad_enabled() and not self._gathered:
            self.reshard()

    def gather(self) -> None:
        """Gathers the weights of all shards, until `release` is called. In between, ranks may run different numbers of
        steps without gradients. All ranks call this together."""
        if self.plan.axes.shard > 1:
            self._gathered = True
            for part in self._parts:
                shard.gather(part.module)

    def release(self) -> None:
        """Frees what `gather` has gathered, if it was called."""
        if self._gathered:
            self._gathered = False
            for part in self._parts:
                shard.release(part.module)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """The context in which a backward pass runs. If `synchronizes` is true, the gradients are afterwards the mean
        over the data ranks of all that was accumulated in them."""
        with ExitStack() as stack:
            stack.enter_context(fp32_product_precision(self.plan, self.device.type))
            for part, parameters in zip(self._parts, self._parameters, strict=True):
                if any(parameter.requires_grad for parameter in parameters):  # a loop may freeze a part for a while
                    self._enter_backward_pass(stack, part)
            yield
        group = data_group(self.mesh, self.plan)
        outside = [p for p in self._outside_of_parts if p.requires_grad]
        if self.synchronizes and group is not None and outside:
            average_once(outside, [group])

    def _enter_backward_pass(self, stack: ExitStack, part: ParallelModel) -> None:
        if self.plan.axes.shard > 1:
            stack.enter_context(shard.backward_synchronization(part.module, self.plan, self.synchronizes))
        elif part.gradient_averager is not None:
            stack.enter_context(part.gradient_averager.averaging(self.synchronizes))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, backward passes accumulate gradients and do not combine them."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Frees gathered weights of the parts that the optimizer has changed, and makes the buffers equal on all data
        ranks."""
        if self.plan.axes.shard > 1:
            changed = {self._part_numbers.get(id(p)) for group in optimizer.param_groups for p in group["params"]}
            for number in changed - {None}:
                self._parts[number].reshard()  # type: ignore[index]
        if self.mesh is not None:
            broadcast_buffers(self.module, self.mesh)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer trains a parameter of the module."""
        known = self._part_numbers.keys() | {id(parameter) for parameter in self._outside_of_parts}
        return any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"])

    def reshard(self) -> None:
        """Frees gathered weights. The module's parameters are then the shards."""
        self.release()
        if self.plan.axes.shard > 1:
            shard.reshard(self.module)

    # ---- gradients

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradients of these parameters so that their norm over all ranks is at most `max_norm`. Returns the
        norm before."""
        if self.plan.axes.shard == 1:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise InputError(
                f"gradients are clipped by their {norm_type}-norm, but the plan ({self.plan.summary()}) shards them:"
                " use the 2-norm, or a plan with replicas only"
            )
        gradients = [(str(number), parameter.grad) for number, parameter in enumerate(parameters)]
        return clip_(gradients, {}, (), self.mesh, max_norm)

    def clip_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        """Limits every element of the gradients of these parameters to [-limit, limit]."""
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = parameter.grad
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clamp_(-limit, limit)

    # ---- weights

    def whole_state(self) -> dict[str, object]:
        """The `state_dict` of the module with whole tensors, on every rank. Under replicas, the tensors are the
        module's own."""
        self.reshard()
        return {name: whole_tensor(value) for name, value in self.module.state_dict().items()}

    def load_whole_state(self, state: dict[str, object], strict: bool = True) -> None:
        """Loads a `state_dict` with whole tensors, which every rank has."""
        self.module.load_state_dict(state, strict=strict)

    def _divide_whole_tensors(self, module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
        """Replaces whole tensors that `module.load_state_dict` was given by those of this rank's shards."""
        self.reshard()
        held = module.state_dict(prefix=prefix)
        for name in held.keys() & state.keys():
            state[name] = load_whole_tensor(state[name], held[name])


def _called_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the direct submodules that have parameters; of lists and dicts of modules, their elements."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _called_submodules(child)
        elif any(True for _ in child.parameters()):
            yield child


def _refuse_shared_weights(parts: Sequence[nn.Module]) -> None:
    owners: dict[int, nn.Module] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            owner = owners.setdefault(id(parameter), part)
            if owner is not part:
                raise InputError(
                    f"{type(owner).__name__} and {type(part).__name__} share the weight {name}: under manual"
                    " optimization each submodule is divided alone, so put both into one submodule whose forward calls"
                    " them"
                )


def _zero_gradients_of_shards(module: nn.Module, shards: Sequence[nn.Parameter]) -> None:
    """Makes `module.zero_grad` find the gradients of the shards also while FSDP2 has gathered the weights, when the
    module's parameters are other tensors."""
    original = module.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        original(set_to_none)
        for parameter in shards:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    module.zero_grad = zero_grad  # type: ignore[method-assign]


def _broadcast_from_first_rank(module: nn.Module) -> None:
    """Gives all ranks the weights and buffers of rank 0."""
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    assert dist.group.WORLD is not None
    if tensors:
        broadcast_coalesced(dist.group.WORLD, tensors, 25 * MIB)
