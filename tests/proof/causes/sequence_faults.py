"""Faults of ranks that divide sequences over the context axis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.parallel.context import dispatch, rules
from meshwright.parallel.context.attention import AttentionCall
from meshwright.parallel.context.exchange import KeyValueShard
from meshwright.parallel.context.sequence_view import SequenceSpec, local_part
from meshwright.parallel.context.tiles import Tile, full_tiles
from meshwright.train.session import Session
from tests.proof.injected_fault import InjectedFault


def replace_in_steps(session: Session, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a function of the package while steps of the session run. Ranks are used for other tests, too."""
    step = session.step

    def faulty_step(batch: Any) -> Tensor:
        with patch.object(owner, name, replacement):
            return step(batch)

    setattr(session, "step", faulty_step)  # noqa: B010 - mypy refuses to assign to a method


@dataclass(frozen=True)
class OwnKeysOnly(InjectedFault):
    """Queries attend to the keys of their own rank only."""

    def before(self, session: Session) -> None:
        tiles = AttentionCall.tiles

        def faulty(call: AttentionCall, shard: KeyValueShard, mask: Tensor | None) -> list[Tile]:
            return tiles(call, shard, mask) if shard.positions == call.query_tokens else []

        replace_in_steps(session, AttentionCall, "tiles", faulty)


@dataclass(frozen=True)
class FutureKeys(InjectedFault):
    """Queries attend to all keys of other ranks."""

    def before(self, session: Session) -> None:
        tiles = AttentionCall.tiles

        def faulty(call: AttentionCall, shard: KeyValueShard, mask: Tensor | None) -> list[Tile]:
            is_own = shard.positions == call.query_tokens
            return tiles(call, shard, mask) if is_own else full_tiles(call.query_tokens, shard.positions)

        replace_in_steps(session, AttentionCall, "tiles", faulty)


@dataclass(frozen=True)
class PositionsFromZero(InjectedFault):
    """A rank takes the first rows of what every rank has for all positions, instead of the rows of its positions."""

    def before(self, session: Session) -> None:
        def faulty(x: Tensor, spec: SequenceSpec) -> Tensor:
            return x.narrow(spec.shard.dim, 0, spec.ranges.length(spec.group.rank))

        replace_in_steps(session, dispatch, "local_part", faulty)


@dataclass(frozen=True)
class NoTargetAtBorders(InjectedFault):
    """The last token of each piece of a sequence has no target, except at the end of the sequence."""

    def before(self, session: Session) -> None:
        def faulty(x: Tensor, spec: SequenceSpec) -> Tensor:
            local = local_part(x, spec).clone()
            ends = [first + length for first, length in spec.ranges.by_rank[spec.group.rank]]
            edges = torch.cumsum(torch.tensor([length for _, length in spec.ranges.by_rank[spec.group.rank]]), 0)
            for end, edge in zip(ends, edges.tolist(), strict=True):
                if end % spec.length:
                    local[edge - 1] = -100
            return local

        replace_in_steps(session, rules, "local_part", faulty)
