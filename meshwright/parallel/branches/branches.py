"""Independent branches: towers or heads of a model that run on different ranks of the tensor axis at the same time.

One rank owns and runs a branch. On the other ranks a `RemoteBranch` without parameters takes its place and receives the
result. With x the input and y the output of a branch, which are the same on all ranks:

    forward     y: its owner broadcasts it; other ranks go on at once with a `PendingTensor` and wait at its first use
    backward    y: every rank repeats all computation after the branches, so the owner already has the gradient of y
                x: each rank has the gradient of its own branches; these are summed by all_reduce_gradient(), once for
                   all branches that share x

Every rank calls the branches in the order of the program, and each call begins a broadcast: so all ranks begin the
broadcasts in the same order. The gradients of inputs are summed in the reverse of the order of their first use.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.blocks.recompute import Recompute, find_blocks, recompute_blocks
from meshwright.errors import MeshwrightError
from meshwright.parallel.branches.output_shapes import BranchOutput, FakeBranch, ReturnedTensor
from meshwright.parallel.branches.pending import PendingBroadcast, PendingTensor, resolve_pending
from meshwright.parallel.differentiable_collectives import AxisGroup, all_reduce_gradient
from meshwright.parallel.tensor.randomness import rank_seeded_generator
from meshwright.parallel.tensor.shard_view import gather_shard_views
from meshwright.parallel.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from meshwright.parallel.weights.layout import ParameterLayout, whole_on_one_rank
from meshwright.plan import Plan


@dataclass(frozen=True)
class AssignedBranches:
    """The branches of a model after each was assigned to a rank. `layouts` has the tensors of all branches, also those
    on other ranks; `blocks` are the names of the blocks of the whole model, for recomputing."""

    layouts: dict[str, ParameterLayout]
    local_branches: tuple["LocalBranch", ...]
    exchange: "BranchExchange"
    blocks: frozenset[str]


def assign_branches(module: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device) -> AssignedBranches:
    """Replaces, in place, every branch that another rank owns by a `RemoteBranch`, which has no parameters."""
    group = AxisGroup(mesh.get_group("tensor"), mesh.get_local_rank("tensor"), plan.axes.tensor)
    exchange = BranchExchange(group, device)
    blocks = frozenset(find_blocks(module))
    layouts: dict[str, ParameterLayout] = {}
    local_branches = []
    for name, owner in plan.modules.branches.items():
        branch = module.get_submodule(name)
        layouts |= {f"{name}.{key}": whole_on_one_rank(value, "tensor") for key, value in branch.state_dict().items()}
        fake = FakeBranch(name, branch, device)
        if owner == group.rank:
            local_branches.append(LocalBranch(branch, fake, exchange))
            continue
        parent, _, key = name.rpartition(".")
        module.get_submodule(parent)._modules[key] = RemoteBranch(fake, exchange, owner, branch.training)
    return AssignedBranches(layouts, tuple(local_branches), exchange, blocks)


def recompute_branch_blocks(branches: AssignedBranches, module: nn.Module, kind: Recompute) -> None:
    """Applies `recompute_blocks` to the blocks of the whole model that this rank runs; does nothing if it runs none."""
    blocks = frozenset(find_blocks(module))
    if not branches.blocks or (blocks and blocks <= branches.blocks):
        recompute_blocks(module, kind)


def connect_branches(branches: AssignedBranches, module: nn.Module) -> None:
    """Makes the local branches send their results. It must come after all other hooks: a local branch then exchanges
    its inputs and outputs outside of these hooks, as a remote branch does."""
    for branch in branches.local_branches:
        branch.register_hooks()
    module.register_forward_hook(lambda _, __, output: branches.exchange.finish_forward(output), prepend=True)


# ---- communication between the ranks


class BranchExchange:
    """The broadcasts of one forward pass that have begun, and the inputs that branches share."""

    def __init__(self, group: AxisGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._broadcasts: list[PendingBroadcast] = []
        self._entered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def enter(self, inputs: Any, *, wait: bool) -> Any:
        """Returns the inputs of a branch as full tensors, whose gradients are summed over the ranks. Without `wait`,
        the values of inputs that another rank still computes may be missing."""
        return tree_map(self._with_summed_gradient, gather_shard_views(resolve_pending(inputs, wait=wait)))

    def _with_summed_gradient(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        key = id(leaf), leaf._version
        if key not in self._entered:
            self._entered[key] = leaf, all_reduce_gradient(leaf, self.group)
        return self._entered[key][1]

    def rank_seeded_generator(self) -> AbstractContextManager[None]:
        """Entered around a branch on every rank, also where it does not run, so that the ranks' generators stay in the
        same state."""
        return rank_seeded_generator(self.group.rank, self.device)

    def send(self, expected: BranchOutput, output: Any, inputs: Sequence[Tensor]) -> Any:
        """Begins to broadcast the output, and returns a copy of it: the model may write to it before the broadcast has
        ended."""
        leaves = tree_leaves(output)
        for position, described in expected.tensors:
            self._broadcast(_with_stride(leaves[position].detach(), described), self.group.rank)
        tracked = [position for position, described in expected.tensors if described.requires_grad]
        for position, described in expected.tensors:
            if position not in tracked:
                leaves[position] = described.empty(self.device).copy_(leaves[position].detach())
        if tracked:
            tracked_tensors = [expected.leaves[position] for position in tracked]
            copies = _CopyOutputs.apply(tracked_tensors, *(leaves[position] for position in tracked), *inputs)
            for position, copy in zip(tracked, copies, strict=True):
                leaves[position] = copy
        return tree_unflatten(leaves, expected.tree)

    def receive(self, expected: BranchOutput, owner: int, inputs: Sequence[Tensor]) -> Any:
        """Begins to receive a branch's output from its owner. Returns the output with a `PendingTensor` in the place of
        each tensor."""
        leaves = list(expected.leaves)
        for position, described in expected.tensors:
            received = described.empty(self.device)
            leaves[position] = PendingTensor(received, self._broadcast(received, owner))
        tracked = [position for position, described in expected.tensors if described.requires_grad]
        if tracked:
            # The anchor makes the outputs require gradients also on a rank that trains nothing, so that all ranks have
            # the same graph after the branch.
            anchor = torch.empty(0, requires_grad=True)
            pending = [leaves[position] for position in tracked]
            outputs = _ReceiveOutputs.apply(pending, anchor, *inputs)
            for tensor, received in zip(pending, outputs[len(pending) :], strict=True):
                tensor.received = received
        return tree_unflatten(leaves, expected.tree)

    def finish_forward(self, output: Any) -> Any:
        """Waits for all broadcasts at the end of the forward pass. Returns the output without pending tensors."""
        for broadcast in self._broadcasts:
            broadcast.wait()
        self._broadcasts.clear()
        self._entered.clear()
        return resolve_pending(output)

    def _broadcast(self, tensor: Tensor, owner: int) -> PendingBroadcast:
        # As bytes, in the order of memory: backends know few types, and want contiguous tensors.
        memory = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        work = dist.broadcast(memory, group=self.group.process_group, group_src=owner, async_op=True)
        assert work is not None
        self._broadcasts.append(PendingBroadcast(work, memory))
        return self._broadcasts[-1]


def _with_stride(tensor: Tensor, described: ReturnedTensor) -> Tensor:
    """The tensor, copied if the other ranks expect other strides in memory."""
    if tensor.stride() == described.stride and torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return described.empty(tensor.device).copy_(tensor)


class _CopyOutputs(torch.autograd.Function):
    """Copies a branch's outputs on its owner. `values` are the outputs, and after them the branch's inputs, which get
    no gradient here: with them all ranks have the same graph around the branch, whatever it contains."""

    @staticmethod
    def forward(ctx: Any, described: Sequence[ReturnedTensor], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.input_count = len(values) - len(described)
        outputs = values[: len(described)]
        return tuple(d.empty(output.device).copy_(output) for d, output in zip(described, outputs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads, *(None,) * ctx.input_count


class _ReceiveOutputs(torch.autograd.Function):
    """A branch's outputs on the ranks that do not run it. Their gradients are dropped: the owner computes the same."""

    @staticmethod
    def forward(ctx: Any, pending: Sequence[PendingTensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.input_count = len(inputs)
        return *pending, *(tensor.received for tensor in pending)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * (1 + ctx.input_count)


# ---- in the model


class LocalBranch:
    """Runs a branch on the rank that owns it: hooks sum the gradients of its inputs and broadcast its output."""

    def __init__(self, branch: nn.Module, fake: FakeBranch, exchange: BranchExchange) -> None:
        self._branch = branch
        self._fake = fake
        self._exchange = exchange
        self._running: tuple[BranchOutput, list[Tensor], AbstractContextManager[None]] | None = None

    def register_hooks(self) -> None:
        self._branch.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self._branch.register_forward_hook(self._after)

    def _before(self, branch: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = self._exchange.enter((args, kwargs), wait=True)
        generator = self._exchange.rank_seeded_generator()
        self._running = self._fake.output(inputs, branch.training), _tensors_with_gradient(inputs), generator
        generator.__enter__()
        return inputs

    def _after(self, branch: nn.Module, args: Any, output: Any) -> Any:
        assert self._running is not None
        expected, inputs, generator = self._running
        self._running = None
        generator.__exit__(None, None, None)
        self._check(expected, output)
        return self._exchange.send(expected, output, inputs)

    def _check(self, expected: BranchOutput, output: Any) -> None:
        """Raises an error if the output has another structure, shapes or dtypes than expected, because the other ranks
        have allocated memory for the expected output."""
        leaves, tree = tree_flatten(output)
        is_expected = tree == expected.tree and all(
            isinstance(leaves[position], Tensor)
            and (tuple(leaves[position].shape), leaves[position].dtype) == (described.shape, described.dtype)
            for position, described in expected.tensors
        )
        if not is_expected:
            raise MeshwrightError(
                f"{self._fake.name} returned another structure or other shapes than it does on fake tensors. The"
                " structure and shapes that a branch returns must not depend on values: leave it out of"
                " plan.modules.branches"
            )


class RemoteBranch(nn.Module):
    """Takes the place of a branch that another rank of the tensor axis owns. Attributes of the branch are read from its
    copy on fake tensors."""

    def __init__(self, fake: FakeBranch, exchange: BranchExchange, owner: int, training: bool) -> None:
        super().__init__()
        self.training = training
        # Set without registering a submodule: this rank holds none of the branch's parameters.
        object.__setattr__(self, "_fake", fake)
        object.__setattr__(self, "_exchange", exchange)
        object.__setattr__(self, "_owner", owner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fake: FakeBranch = self.__dict__["_fake"]
        exchange: BranchExchange = self.__dict__["_exchange"]
        inputs = exchange.enter((args, kwargs), wait=False)
        expected = fake.output(inputs, self.training)
        with exchange.rank_seeded_generator():
            return exchange.receive(expected, self.__dict__["_owner"], _tensors_with_gradient(inputs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_fake" not in self.__dict__:
                raise
            return getattr(self.__dict__["_fake"].module, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RemoteBranch":
        return self

    def extra_repr(self) -> str:
        fake: FakeBranch = self.__dict__["_fake"]
        return f"{fake.name}, on rank {self.__dict__['_owner']} of the tensor axis"


def _tensors_with_gradient(inputs: Any) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return tensors if torch.is_grad_enabled() else []
