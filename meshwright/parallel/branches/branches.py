"""Independent branches: towers or heads that live on different ranks of the tensor axis and run at the same time.

The rank that a branch lives on runs it; on the others stands `Elsewhere`, without parameters, which is handed the
result. With x what goes into a branch and y what comes out of it, the same on all ranks:

    forward     y: broadcast by its owner; the others go on at once with a `Pending` and wait where they use it
    backward    y: every rank computes all behind the branches alike, so the owner has the gradient already
                x: each rank knows what its own branches add, the sum goes on: copy_in(), once for all that share x

Every rank calls the branches in the program's order, and at each call a broadcast begins: all ranks begin them in one
order, on one group. The gradients of inputs are summed in the reverse of the order in which they were first used.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.blocks.recompute import Recompute, find_blocks, recompute_blocks
from meshwright.errors import MeshwrightError
from meshwright.parallel.branches.output_shapes import Note, Notes, Outline
from meshwright.parallel.branches.pending import Delivery, Pending, plain
from meshwright.parallel.exchange import Team, copy_in
from meshwright.parallel.tensor.randomness import own_chance
from meshwright.parallel.tensor.shard_view import gathered
from meshwright.parallel.weights.layout import Layout, lodge
from meshwright.plan import Plan


@dataclass(frozen=True)
class Apart:
    """A model whose branches lie on different ranks: `layouts` of all their tensors, also of those that lie elsewhere,
    and `blocks`, the whole model's, for recomputing."""

    layouts: dict[str, Layout]
    residents: tuple["Resident", ...]
    meeting: "Meeting"
    blocks: frozenset[str]


def set_apart(module: nn.Module, plan: Plan, mesh: DeviceMesh, device: torch.device) -> Apart:
    """Puts something without parameters in the place of every branch that lives on another rank."""
    team = Team(mesh.get_group("tensor"), mesh.get_local_rank("tensor"), plan.axes.tensor)
    meeting = Meeting(team, device)
    blocks = frozenset(find_blocks(module))
    layouts: dict[str, Layout] = {}
    residents = []
    for name, home in plan.modules.branches.items():
        branch = module.get_submodule(name)
        layouts |= {f"{name}.{key}": lodge(value, "tensor") for key, value in branch.state_dict().items()}
        outline = Outline(name, branch, device)
        if home == team.rank:
            residents.append(Resident(branch, outline, meeting))
            continue
        owner, _, key = name.rpartition(".")
        module.get_submodule(owner)._modules[key] = Elsewhere(outline, meeting, home, branch.training)
    return Apart(layouts, tuple(residents), meeting, blocks)


def recompute_apart(apart: Apart, module: nn.Module, kind: Recompute) -> None:
    """`recompute_blocks` for those blocks of the whole model that run here."""
    found = frozenset(find_blocks(module))
    if not apart.blocks or (found and found <= apart.blocks):
        recompute_blocks(module, kind)


def connect(apart: Apart, module: nn.Module) -> None:
    """Has the branches receive and send. Call it when all other hooks are in place: what a branch is given and gives
    is exchanged around them, as on the ranks where it does not run."""
    for resident in apart.residents:
        resident.watch()
    module.register_forward_hook(lambda _, __, output: apart.meeting.settle(output), prepend=True)


# ---- the ranks' exchange


class Meeting:
    """What is under way between the ranks in one forward pass, and the inputs that branches share."""

    def __init__(self, team: Team, device: torch.device) -> None:
        self.team = team
        self.device = device
        self._under_way: list[Delivery] = []
        self._entered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def entered(self, given: Any, *, wait: bool) -> Any:
        """What a branch is given, as it goes into work that only one rank does."""
        return tree_map(self._copied, gathered(plain(given, wait=wait)))

    def _copied(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()):
            return leaf
        key = id(leaf), leaf._version
        if key not in self._entered:
            self._entered[key] = leaf, copy_in(leaf, self.team)
        return self._entered[key][1]

    def chance(self) -> AbstractContextManager[None]:
        """Around a branch; where it does not run too, so that the ranks' generators stay in step."""
        return own_chance(self.team.rank, self.device)

    def send(self, notes: Notes, output: Any, inputs: Sequence[Tensor]) -> Any:
        """Hands the others a result, and returns a copy of it: that may be written to while this is still being
        sent."""
        leaves = tree_leaves(output)
        for place, note in notes.tensors:
            self._broadcast(_lying(leaves[place].detach(), note), self.team.rank)
        tracked = [place for place, note in notes.tensors if note.requires_grad]
        for place, note in notes.tensors:
            if place not in tracked:
                leaves[place] = note.empty(self.device).copy_(leaves[place].detach())
        if tracked:
            made = _Leave.apply([notes.leaves[p] for p in tracked], *(leaves[p] for p in tracked), *inputs)
            for place, leaf in zip(tracked, made, strict=True):
                leaves[place] = leaf
        return tree_unflatten(leaves, notes.form)

    def receive(self, notes: Notes, home: int, inputs: Sequence[Tensor]) -> Any:
        leaves = list(notes.leaves)
        for place, note in notes.tensors:
            held = note.empty(self.device)
            leaves[place] = Pending(held, self._broadcast(held, home))
        tracked = [place for place, note in notes.tensors if note.requires_grad]
        if tracked:
            # Behind it, all ranks have the same graph: also where this one holds nothing that is trained.
            anchor = torch.empty(0, requires_grad=True)
            pending = [leaves[place] for place in tracked]
            made = _Arrive.apply(pending, anchor, *inputs)
            for one, held in zip(pending, made[len(pending) :], strict=True):
                one.held = held
        return tree_unflatten(leaves, notes.form)

    def settle(self, output: Any) -> Any:
        """At the end of the forward pass: nothing is under way any more, and nobody outside meets a `Pending`."""
        for delivery in self._under_way:
            delivery.wait()
        self._under_way.clear()
        self._entered.clear()
        return plain(output)

    def _broadcast(self, tensor: Tensor, home: int) -> Delivery:
        # As bytes in the order they lie in: backends know few types, and want no gaps.
        memory = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        work = dist.broadcast(memory, group=self.team.group, group_src=home, async_op=True)
        assert work is not None
        self._under_way.append(Delivery(work, memory))
        return self._under_way[-1]


def _lying(tensor: Tensor, note: Note) -> Tensor:
    """The tensor as the others expect it in memory."""
    if tensor.stride() == note.stride and torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return note.empty(tensor.device).copy_(tensor)


class _Leave(torch.autograd.Function):
    """A branch's results on its owner. `values` are these, and behind them the branch's inputs, which are given
    nothing here: with them all ranks have the same graph around the branch, whatever happens inside it."""

    @staticmethod
    def forward(ctx: Any, notes: Sequence[Note], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.unused = len(values) - len(notes)
        results = values[: len(notes)]
        return tuple(note.empty(value.device).copy_(value) for note, value in zip(notes, results, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads, *(None,) * ctx.unused


class _Arrive(torch.autograd.Function):
    """A branch's results on the other ranks: their gradients are the owner's matter."""

    @staticmethod
    def forward(ctx: Any, pending: Sequence[Pending], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inputs = len(inputs)
        return *pending, *(one.held for one in pending)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None,) * (1 + ctx.inputs)


# ---- in the model


class Resident:
    """A branch on the rank that it lives on."""

    def __init__(self, branch: nn.Module, outline: Outline, meeting: Meeting) -> None:
        self._branch = branch
        self._outline = outline
        self._meeting = meeting
        self._running: tuple[Notes, list[Tensor], AbstractContextManager[None]] | None = None

    def watch(self) -> None:
        self._branch.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        self._branch.register_forward_hook(self._after)

    def _before(self, branch: nn.Module, args: Any, kwargs: Any) -> Any:
        given = self._meeting.entered((args, kwargs), wait=True)
        chance = self._meeting.chance()
        self._running = self._outline.notes(given, branch.training), _with_gradients(given), chance
        chance.__enter__()
        return given

    def _after(self, branch: nn.Module, args: Any, output: Any) -> Any:
        assert self._running is not None
        notes, inputs, chance = self._running
        self._running = None
        chance.__exit__(None, None, None)
        self._check(notes, output)
        return self._meeting.send(notes, output, inputs)

    def _check(self, notes: Notes, output: Any) -> None:
        """The others have made room for what the branch was to return."""
        leaves, form = tree_flatten(output)
        same = form == notes.form and all(
            isinstance(leaves[place], Tensor)
            and (tuple(leaves[place].shape), leaves[place].dtype) == (n.shape, n.dtype)
            for place, n in notes.tensors
        )
        if not same:
            raise MeshwrightError(
                f"{self._outline.name} returned another structure or other shapes than it does on tensors without"
                " memory: what its result looks like must not depend on the numbers, or it cannot be a branch of its"
                " own: leave it out of plan.modules.branches"
            )


class Elsewhere(nn.Module):
    """In the place of a branch that lives on another rank of the tensor axis. What else is asked of it, a copy of the
    branch without memory answers."""

    def __init__(self, outline: Outline, meeting: Meeting, home: int, training: bool) -> None:
        super().__init__()
        self.training = training
        # Not registered: nothing of it lies on this rank.
        object.__setattr__(self, "_outline", outline)
        object.__setattr__(self, "_meeting", meeting)
        object.__setattr__(self, "_home", home)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outline: Outline = self.__dict__["_outline"]
        meeting: Meeting = self.__dict__["_meeting"]
        given = meeting.entered((args, kwargs), wait=False)
        notes = outline.notes(given, self.training)
        with meeting.chance():
            return meeting.receive(notes, self.__dict__["_home"], _with_gradients(given))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_outline" not in self.__dict__:
                raise
            return getattr(self.__dict__["_outline"].twin, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Elsewhere":
        return self

    def extra_repr(self) -> str:
        outline: Outline = self.__dict__["_outline"]
        return f"{outline.name}, on rank {self.__dict__['_home']} of the tensor axis"


def _with_gradients(given: Any) -> list[Tensor]:
    found = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return found if torch.is_grad_enabled() else []
