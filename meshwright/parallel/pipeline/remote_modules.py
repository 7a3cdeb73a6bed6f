"""What stands in a stage for the modules of other stages, and what a forward pass of a stage receives and sends.

The original forward pass runs from its beginning to its end in every stage. A module that is left out returns what was
received in its place, or tensors without memory of the shapes that it would have returned; what the forward pass makes
of these has no memory either, costs nothing and is thrown away.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.errors import MeshwrightError
from meshwright.parallel.pipeline.wiring import Call, Spot
from meshwright.parallel.tensor.shard_view import gathered


@dataclass(frozen=True)
class Script:
    """What one stage does at which spot: values that were `received` as output or `given` as argument are put there,
    those that are to be sent are taken from what a call returns (`made`) or is given (`handed`). What a call hands on
    just as it was given (`passed`) needs neither."""

    own: frozenset[Call]
    received: Mapping[Call, Mapping[int, int]]
    given: Mapping[Call, Mapping[int, int]]
    made: Mapping[Call, Mapping[int, int]]
    handed: Mapping[Call, Mapping[int, int]]
    passed: Mapping[Call, Mapping[int, int]]


def by_call(spots: Iterator[tuple[Spot, int]]) -> dict[Call, dict[int, int]]:
    found: dict[Call, dict[int, int]] = {}
    for spot, value in spots:
        found.setdefault(spot.call, {})[spot.leaf] = value
    return found


@dataclass
class Pass:
    """State of one forward pass of a stage: `values` holds what was received, and collects what is to be sent.
    `returned` is what each call returns for inputs of these shapes, without memory."""

    script: Script
    returned: Mapping[Call, Any]
    values: dict[int, Tensor]
    calls: Counter[str] = field(default_factory=Counter)

    def next_call(self, name: str) -> Call:
        self.calls[name] += 1
        return name, self.calls[name] - 1

    def call(self, name: str) -> Call:
        """The one that runs."""
        return name, self.calls[name] - 1

    def take(self, spots: Mapping[int, int], tree: Any) -> None:
        if spots:
            leaves = tensors_in(tree)
            for leaf, value in spots.items():
                if value not in self.values and not isinstance(leaves[leaf], FakeTensor):
                    self.values[value] = gathered(leaves[leaf])

    def put(self, spots: Mapping[int, int], tree: Any) -> Any:
        """The tree with received values in their places."""
        return replaced(tree, {leaf: self.values[value] for leaf, value in spots.items()})


def replaced(tree: Any, tensors: Mapping[int, Tensor]) -> Any:
    """The tree with other tensors in some places."""
    if not tensors:
        return tree
    leaves, form = tree_flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for leaf, tensor in tensors.items():
        leaves[places[leaf]] = tensor
    return tree_unflatten(leaves, form)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Traffic:
    """The pass that runs on this rank, if any: backward passes that compute a block again run without one."""

    def __init__(self) -> None:
        self.current: Pass | None = None

    @contextmanager
    def running(self, one: Pass) -> Iterator[None]:
        self.current = one
        try:
            yield
        finally:
            self.current = None

    def watch(self, name: str, piece: nn.Module) -> None:
        """Has a piece that runs here receive and send. Call it when all other hooks are in place: what is sent is what
        the forward pass sees."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            now = self.current
            if now is None:
                return None
            call = now.next_call(name)
            args, kwargs = now.put(now.script.given.get(call, {}), (args, kwargs))
            if call in now.script.own and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
                raise MeshwrightError(
                    f"{name} needs a value that an earlier pipeline stage computes and that is not sent to this one:"
                    " put the cut somewhere else"
                )
            now.take(now.script.handed.get(call, {}), (args, kwargs))
            return args, kwargs

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            now = self.current
            if now is None:
                return None
            call = now.call(name)
            if call in now.script.made:
                # Behind the cut no rank has the other parts of what the tensor axis divides.
                output = gathered(output)
                now.take(now.script.made[call], output)
            return now.put(now.script.received.get(call, {}), output)

        piece.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        piece.register_forward_hook(after)


class LeftOut(nn.Module):
    """In the place of a piece that runs in another stage. It holds no parameters but those that the forward pass
    around the pieces uses here; what else is asked of it, `original` answers."""

    def __init__(self, name: str, traffic: Traffic, original: nn.Module) -> None:
        super().__init__()
        self.piece = name
        self.training = original.training
        # Not registered: it is not part of this stage.
        object.__setattr__(self, "_traffic", traffic)
        object.__setattr__(self, "_original", original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        traffic: Traffic = self.__dict__["_traffic"]
        now = traffic.current
        if now is None:
            raise MeshwrightError(f"{self.piece} runs in another pipeline stage")
        call = now.next_call(self.piece)
        now.take(now.script.handed.get(call, {}), (args, kwargs))
        if call not in now.returned:
            raise MeshwrightError(f"{self.piece} runs more often than in the batch that the stages were found with")
        given = tensors_in((args, kwargs)) if call in now.script.passed else []
        output = replaced(
            now.returned[call], {leaf: given[source] for leaf, source in now.script.passed.get(call, {}).items()}
        )
        return now.put(now.script.received.get(call, {}), output)

    def hold(self, path: str, parameter: nn.Parameter) -> None:
        """Has a parameter of the original under its name in it."""
        owner, _, name = path.rpartition(".")
        self._inner(owner)._parameters[name] = parameter

    def share(self, owner: str, original: nn.Module) -> None:
        """Has the parameters of a module of the original, which lies on this rank: also those that replace them."""
        self._inner(owner)._parameters = original._parameters

    def _inner(self, path: str) -> "LeftOut":
        if not path:
            return self
        child, _, rest = path.partition(".")
        if child not in self._modules:
            inner = LeftOut(f"{self.piece}.{child}", self.__dict__["_traffic"], getattr(self.original, child))
            self._modules[child] = inner
        held = self._modules[child]
        assert isinstance(held, LeftOut)
        return held._inner(rest)

    @property
    def original(self) -> Any:
        return self.__dict__["_original"]

    def stand_for(self, original: nn.Module) -> None:
        object.__setattr__(self, "_original", original)
        for name, child in self._modules.items():
            assert isinstance(child, LeftOut)
            child.stand_for(getattr(original, name))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_original" not in self.__dict__:
                raise
            return getattr(self.__dict__["_original"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LeftOut":
        return self

    def extra_repr(self) -> str:
        return self.piece
