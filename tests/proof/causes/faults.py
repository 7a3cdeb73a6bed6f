"""Trainings broken on purpose, one for each cause that a proof names, and some for which it has no name."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from meshwright.data.batch import Batch, Microbatch, Share
from meshwright.parallel.replicate.batch_norm import synchronize_batch_norm
from meshwright.parallel.weights.layout import local_of
from meshwright.proof.fault import Fault
from meshwright.train.output.witness import local_norm
from meshwright.train.session import Session


def named(session: Session, name: str) -> nn.Parameter | None:
    return session.parallel.parameters().get(name)


def gradient(session: Session, name: str) -> Tensor:
    parameter = named(session, name)
    assert parameter is not None
    assert parameter.grad is not None
    return local_of(parameter.grad)


def wrapped(session: Session) -> DistributedDataParallel:
    assert isinstance(session.parallel.runner, DistributedDataParallel)
    return session.parallel.runner


def undivided(session: Session) -> list[Tensor]:
    """The gradients that ranks of the tensor axis have in common."""
    parallel = session.parallel
    found = [p.grad for name, p in parallel.module.named_parameters() if name not in parallel.layouts]
    return [gradient for gradient in found if gradient is not None]


# ---- before the first step


@dataclass(frozen=True)
class OtherStart(Fault):
    """One rank begins with another weight."""

    name: str = "head.weight"
    rank: int = 1

    @torch.no_grad()
    def before(self, session: Session) -> None:
        parameter = named(session, self.name)
        if session.world.rank == self.rank and parameter is not None:
            local_of(parameter).mul_(1.001)


@dataclass(frozen=True)
class NotHeld(Fault):
    """A weight is not handed to the optimizer; `rank` null: of no rank."""

    name: str = "head.weight"
    rank: int | None = None

    def before(self, session: Session) -> None:
        if self.rank in (None, session.world.rank):
            left = named(session, self.name)
            for group in session.optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter is not left]


# ---- samples


@dataclass(frozen=True)
class SamplesOfTheFirst(Fault):
    """A sampler that does not know of ranks: all of them get the first one's samples."""

    def before(self, session: Session) -> None:
        share = Share(0, session.plan.data_ranks)
        session._share = lambda: share  # type: ignore[method-assign]


@dataclass(frozen=True)
class Shuffled(Fault):
    """One rank has its samples in another order than those that share them with it."""

    rank: int = 1

    def on_batch(self, batch: Batch, session: Session, step: int) -> Batch:
        if session.world.rank != self.rank:
            return batch
        parts = tuple(Microbatch(tree_map(_flipped, part.data), part.samples) for part in batch.parts)
        return Batch(parts, batch.samples, batch.epoch, batch.index, batch.last)


def _flipped(value: Any) -> Any:
    return value.flip(0) if isinstance(value, Tensor) else value


# ---- how gradients are combined


@dataclass(frozen=True)
class NotReplicated(Fault):
    """DDP never exchanges anything."""

    def before(self, session: Session) -> None:
        wrapped(session).require_backward_grad_sync = False


@dataclass(frozen=True)
class NotCombined(Fault):
    """Replicas beside another axis never exchange anything."""

    def before(self, session: Session) -> None:
        combiner = session.parallel.combiner
        assert combiner is not None
        combiner._reducer = _Nobody()


class _Nobody:
    """In place of a reducer."""

    def start(self, flat: Tensor, bucket: int) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class _OwnRows:
    """In place of FSDP2's reduce-scatter: a rank keeps its rows of its own gradients."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **how: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


@dataclass(frozen=True)
class NotScattered(Fault):
    def before(self, session: Session) -> None:
        for unit in session.module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_reduce_scatter(_OwnRows())  # type: ignore[arg-type]


@dataclass(frozen=True)
class PartsOfASum(Fault):
    """Ranks of the tensor axis are left with parts of the gradients that they have in common."""

    def on_gradients(self, session: Session, step: int) -> None:
        own = torch.Generator().manual_seed(step)
        for common in undivided(session):
            part = torch.rand(common.shape, dtype=common.dtype, generator=own)
            common.mul_(part if session.world.rank % 2 else 1 - part)


@dataclass(frozen=True)
class TiedNotSummed(Fault):
    def before(self, session: Session) -> None:
        assert session.parallel.pipeline is not None
        session.parallel.pipeline._tied.combine = lambda: None  # type: ignore[method-assign]


@dataclass(frozen=True)
class TiedSummedTwice(Fault):
    def on_gradients(self, session: Session, step: int) -> None:
        assert session.parallel.pipeline is not None
        session.parallel.pipeline._tied.combine()


@dataclass(frozen=True)
class CommonSummedTwice(Fault):
    """What ranks of the tensor axis have in common is summed over it as if it were parts."""

    def on_gradients(self, session: Session, step: int) -> None:
        assert session.parallel.mesh is not None
        for common in undivided(session):
            dist.all_reduce(common, group=session.parallel.mesh.get_group("tensor"))


@dataclass(frozen=True)
class OwnMeans(Fault):
    """Every rank takes the mean over its own targets, and ranks take the mean of these."""

    def before(self, session: Session) -> None:
        def total(examples: Any, samples: Any, served: bool) -> Any:
            own = sum(session._loss.count(example.target, count) for example, count in examples)
            return lambda: own * session.plan.data_ranks

        session._mean._start_total = total  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class LossNotReduced(Fault):
    """Every rank reports the loss of its own samples; gradients know nothing of it."""

    def before(self, session: Session) -> None:
        def own(told: list[Tensor]) -> Any:
            return lambda: (told[0] * session.plan.data_ranks, told[-1], torch.zeros(()))

        session._mean._start_sum = own  # type: ignore[method-assign]


# ---- clipping


@dataclass(frozen=True)
class ClippedApart(Fault):
    """A rank clips by the norm of what it holds."""

    def before(self, session: Session) -> None:
        def clip(limit: float) -> Tensor:
            norm = torch.tensor(local_norm(session.module), dtype=torch.float64)
            for parameter in session.module.parameters():
                if parameter.grad is not None:
                    local_of(parameter.grad).mul_((limit / (norm + 1e-6)).clamp(max=1.0))
            return norm

        object.__setattr__(session.parallel, "clip_", clip)


@dataclass(frozen=True)
class ClippedBefore(Fault):
    """A rank clips its own gradients, and what is left of them is averaged."""

    limit: float

    def before(self, session: Session) -> None:
        wrapped(session).require_backward_grad_sync = False

    def on_gradients(self, session: Session, step: int) -> None:
        nn.utils.clip_grad_norm_(session.module.parameters(), self.limit)
        for parameter in session.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(session.world.size)


# ---- layers


@dataclass(frozen=True)
class NormalizedAlone(Fault):
    """Synchronized BatchNorm that is not."""

    def before(self, session: Session) -> None:
        for layer in session.module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.__dict__.pop("forward")


@dataclass(frozen=True)
class NormalizedTogether(Fault):
    """Local BatchNorm that is not."""

    def before(self, session: Session) -> None:
        assert dist.group.WORLD is not None
        synchronize_batch_norm(session.module, dist.group.WORLD)


@dataclass(frozen=True)
class StatisticsOff(Fault):
    """Running statistics learn once more than they should."""

    @torch.no_grad()
    def after_step(self, session: Session, step: int) -> None:
        for layer in session.module.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None:
                layer.running_mean.mul_(1.1)


@dataclass(frozen=True)
class StatisticsOfTheLast(Fault):
    """Running statistics are taken over from another rank than the first."""

    def after_step(self, session: Session, step: int) -> None:
        for buffer in session.module.buffers():
            dist.broadcast(buffer, src=session.world.size - 1)


@dataclass(frozen=True)
class DropoutOn(Fault):
    """`rank` null: on every rank."""

    rank: int | None = None

    def before(self, session: Session) -> None:
        for layer in session.module.modules():
            if isinstance(layer, nn.Dropout) and self.rank in (None, session.world.rank):
                layer.p = 0.5


@dataclass(frozen=True)
class Rounded(Fault):
    """A layer computes in a shorter type."""

    layer: str
    dtype: torch.dtype = torch.bfloat16

    def before(self, session: Session) -> None:
        for name, layer in session.module.named_modules():
            if name == self.layer:
                layer.register_forward_hook(lambda _, arguments, output: output.to(self.dtype).to(output.dtype))


@dataclass(frozen=True)
class RoundedOnTheWay(Fault):
    """Gradients are combined in a shorter type."""

    dtype: torch.dtype = torch.bfloat16

    def on_gradients(self, session: Session, step: int) -> None:
        for parameter in session.module.parameters():
            if parameter.grad is not None:
                own = local_of(parameter.grad)
                own.copy_(own.to(self.dtype))


@dataclass(frozen=True)
class TiedDrifts(Fault):
    """The last rank's copy of a tied weight goes its own way."""

    @torch.no_grad()
    def after_step(self, session: Session, step: int) -> None:
        if session.world.rank == session.world.size - 1:
            held = dict(session.module.named_parameters())
            for tie in session.parallel.tied:
                local_of(held[tie.local]).mul_(1.001)


# ---- without a name


@dataclass(frozen=True)
class Noise(Fault):
    """One gradient is off by about 1 %, otherwise in every element, and on all ranks alike."""

    name: str = "head.weight"

    def on_gradients(self, session: Session, step: int) -> None:
        if named(session, self.name) is not None:
            found = gradient(session, self.name)
            own = torch.Generator().manual_seed(step)
            found.mul_(1 + 0.01 * torch.randn(found.shape, dtype=found.dtype, generator=own))


@dataclass(frozen=True)
class Transposed(Fault):
    """Of a square weight."""

    name: str

    def on_gradients(self, session: Session, step: int) -> None:
        found = gradient(session, self.name)
        found.copy_(found.t().clone())


@dataclass(frozen=True)
class Swapped(Fault):
    """Two layers have each other's gradient."""

    one: str
    other: str

    def on_gradients(self, session: Session, step: int) -> None:
        one, other = gradient(session, self.one), gradient(session, self.other)
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


@dataclass
class Stale(Fault):
    """From the second step on, a layer has the gradient of the step before."""

    name: str = "head.weight"
    kept: list[Tensor] = field(default_factory=list)

    def on_gradients(self, session: Session, step: int) -> None:
        found = gradient(session, self.name)
        self.kept.append(found.clone())
        if step > 1:
            found.copy_(self.kept[-2])
