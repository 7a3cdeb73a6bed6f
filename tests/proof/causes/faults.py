"""Faults to inject into a training: at least one for each cause that a proof names, and some without a name."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from meshwright.data.batch import Batch, Microbatch, SampleShare
from meshwright.parallel.replicate.batch_norm import synchronize_batch_norm
from meshwright.parallel.weights.layout import local_tensor
from meshwright.train.output.observation import local_gradient_norm
from meshwright.train.session import Session
from tests.proof.injected_fault import InjectedFault


def find_parameter(session: Session, name: str) -> nn.Parameter | None:
    """The parameter as this rank holds it; None if it holds none of it."""
    return session.parallel.parameters().get(name)


def local_gradient(session: Session, name: str) -> Tensor:
    """This rank's part of a gradient."""
    parameter = find_parameter(session, name)
    assert parameter is not None
    assert parameter.grad is not None
    return local_tensor(parameter.grad)


def ddp_module(session: Session) -> DistributedDataParallel:
    assert isinstance(session.parallel.runner, DistributedDataParallel)
    return session.parallel.runner


def unsplit_gradients(session: Session) -> list[Tensor]:
    """The gradients of which every rank of the tensor axis has a copy."""
    parallel = session.parallel
    gradients = [p.grad for name, p in parallel.module.named_parameters() if name not in parallel.layouts]
    return [gradient for gradient in gradients if gradient is not None]


# ---- before the first step


@dataclass(frozen=True)
class DifferentInitialWeight(InjectedFault):
    """One rank starts with a different weight."""

    name: str = "head.weight"
    rank: int = 1

    @torch.no_grad()
    def before(self, session: Session) -> None:
        parameter = find_parameter(session, self.name)
        if session.world.rank == self.rank and parameter is not None:
            local_tensor(parameter).mul_(1.001)


@dataclass(frozen=True)
class MissingInOptimizer(InjectedFault):
    """A parameter is missing in the optimizer of one rank, or of every rank where `rank` is None."""

    name: str = "head.weight"
    rank: int | None = None

    def before(self, session: Session) -> None:
        if self.rank in (None, session.world.rank):
            missing = find_parameter(session, self.name)
            for group in session.optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter is not missing]


# ---- samples


@dataclass(frozen=True)
class SamplesOfRank0(InjectedFault):
    """A sampler that ignores ranks: all of them get the samples of rank 0."""

    def before(self, session: Session) -> None:
        share = SampleShare(0, session.plan.data_ranks)
        session._share = lambda: share  # type: ignore[method-assign]


@dataclass(frozen=True)
class ReorderedSamples(InjectedFault):
    """One rank has its samples in another order than the ranks that compute on the same ones."""

    rank: int = 1

    def on_batch(self, batch: Batch, session: Session, step: int) -> Batch:
        if session.world.rank != self.rank:
            return batch
        parts = tuple(Microbatch(tree_map(_flipped, part.data), part.samples) for part in batch.microbatches)
        return Batch(parts, batch.samples, batch.epoch, batch.index, batch.last)


def _flipped(value: Any) -> Any:
    return value.flip(0) if isinstance(value, Tensor) else value


# ---- how gradients are combined


@dataclass(frozen=True)
class NoReplicaReduction(InjectedFault):
    """DDP never all-reduces gradients."""

    def before(self, session: Session) -> None:
        ddp_module(session).require_backward_grad_sync = False


@dataclass(frozen=True)
class NoAveragerReduction(InjectedFault):
    """Replicas of a plan with another axis never average their gradients."""

    def before(self, session: Session) -> None:
        combiner = session.parallel.gradient_averager
        assert combiner is not None
        combiner._reducer = _NoReducer()


class _NoReducer:
    """A reducer that does nothing."""

    awaited = None

    def start(self, flat: Tensor, bucket: int) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class _KeepOwnRows:
    """Replaces FSDP2's reduce-scatter: each rank keeps its rows of its own gradients."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


@dataclass(frozen=True)
class NoShardReduction(InjectedFault):
    """FSDP2 never reduces gradients over the shard axis."""

    def before(self, session: Session) -> None:
        for unit in session.module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_reduce_scatter(_KeepOwnRows())  # type: ignore[arg-type]


@dataclass(frozen=True)
class PartialTensorSums(InjectedFault):
    """Ranks of the tensor axis have parts of the gradients of which they should have copies."""

    def on_gradients(self, session: Session, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for gradient in unsplit_gradients(session):
            part = torch.rand(gradient.shape, dtype=gradient.dtype, generator=generator)
            gradient.mul_(part if session.world.rank % 2 else 1 - part)


@dataclass(frozen=True)
class NoTiedReduction(InjectedFault):
    """The gradients of a tied parameter are not summed over the stages that hold it."""

    def before(self, session: Session) -> None:
        assert session.parallel.pipeline is not None
        session.parallel.pipeline._tied_gradients.combine = lambda: None  # type: ignore[method-assign]


@dataclass(frozen=True)
class TiedReducedTwice(InjectedFault):
    """The gradients of a tied parameter are summed twice over the stages that hold it."""

    def on_gradients(self, session: Session, step: int) -> None:
        assert session.parallel.pipeline is not None
        session.parallel.pipeline._tied_gradients.combine()


@dataclass(frozen=True)
class TensorReducedTwice(InjectedFault):
    """The gradients that are copies on all ranks of the tensor axis are summed over it, as if they were parts."""

    def on_gradients(self, session: Session, step: int) -> None:
        assert session.parallel.mesh is not None
        for gradient in unsplit_gradients(session):
            dist.all_reduce(gradient, group=session.parallel.mesh.get_group("tensor"))


@dataclass(frozen=True)
class MeanOfRankMeans(InjectedFault):
    """Every rank takes the mean over its own targets, and gradients are the mean of these means."""

    def before(self, session: Session) -> None:
        def local_total(examples: Any, samples: Any, divide: bool) -> Any:
            local_count = sum(session._loss.count(example.target, count) for example, count in examples)
            return lambda: local_count * session.plan.data_ranks

        session._forward_backward._start_total = local_total  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class NoLossReduction(InjectedFault):
    """Every rank reports the loss of its own samples; gradients are right."""

    def before(self, session: Session) -> None:
        def local_sums(sums: list[Tensor]) -> Any:
            return lambda: (sums[0] * session.plan.data_ranks, sums[-1], torch.zeros(()))

        session._forward_backward._start_reducing = local_sums  # type: ignore[method-assign]


# ---- clipping


@dataclass(frozen=True)
class ClippedByLocalNorm(InjectedFault):
    """Each rank clips by the norm of its own part of the gradients."""

    def before(self, session: Session) -> None:
        def clip(limit: float) -> Tensor:
            norm = torch.tensor(local_gradient_norm(session.module), dtype=torch.float64)
            for parameter in session.module.parameters():
                if parameter.grad is not None:
                    local_tensor(parameter.grad).mul_((limit / (norm + 1e-6)).clamp(max=1.0))
            return norm

        object.__setattr__(session.parallel, "clip_", clip)


@dataclass(frozen=True)
class ClippedBeforeAveraging(InjectedFault):
    """Each rank clips its own gradients before they are averaged."""

    limit: float

    def before(self, session: Session) -> None:
        ddp_module(session).require_backward_grad_sync = False

    def on_gradients(self, session: Session, step: int) -> None:
        nn.utils.clip_grad_norm_(session.module.parameters(), self.limit)
        for parameter in session.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(session.world.size)


# ---- layers


@dataclass(frozen=True)
class UnsynchronizedBatchNorm(InjectedFault):
    """BatchNorm is local although the plan says synchronized."""

    def before(self, session: Session) -> None:
        for layer in session.module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.__dict__.pop("forward")


@dataclass(frozen=True)
class SynchronizedBatchNorm(InjectedFault):
    """BatchNorm is synchronized although the plan says local."""

    def before(self, session: Session) -> None:
        assert dist.group.WORLD is not None
        synchronize_batch_norm(session.module, dist.group.WORLD)


@dataclass(frozen=True)
class ScaledRunningMean(InjectedFault):
    """The running mean is multiplied by 1.1 after each step."""

    @torch.no_grad()
    def after_step(self, session: Session, step: int) -> None:
        for layer in session.module.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None:
                layer.running_mean.mul_(1.1)


@dataclass(frozen=True)
class StatisticsOfLastRank(InjectedFault):
    """Running statistics are taken over from the last rank instead of the first."""

    def after_step(self, session: Session, step: int) -> None:
        for buffer in session.module.buffers():
            dist.broadcast(buffer, src=session.world.size - 1)


@dataclass(frozen=True)
class DropoutOn(InjectedFault):
    """Dropout is on in one rank, or in every rank where `rank` is None."""

    rank: int | None = None

    def before(self, session: Session) -> None:
        for layer in session.module.modules():
            if isinstance(layer, nn.Dropout) and self.rank in (None, session.world.rank):
                layer.p = 0.5


@dataclass(frozen=True)
class RoundedLayer(InjectedFault):
    """The output of a layer is rounded to a shorter type."""

    layer: str
    dtype: torch.dtype = torch.bfloat16

    def before(self, session: Session) -> None:
        for name, layer in session.module.named_modules():
            if name == self.layer:
                layer.register_forward_hook(lambda _, arguments, output: output.to(self.dtype).to(output.dtype))


@dataclass(frozen=True)
class RoundedGradients(InjectedFault):
    """Gradients are rounded to a shorter type when they are combined."""

    dtype: torch.dtype = torch.bfloat16

    def on_gradients(self, session: Session, step: int) -> None:
        for parameter in session.module.parameters():
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                gradient.copy_(gradient.to(self.dtype))


@dataclass(frozen=True)
class DriftingTiedCopy(InjectedFault):
    """The last rank's copy of a tied parameter changes by itself after each step."""

    @torch.no_grad()
    def after_step(self, session: Session, step: int) -> None:
        if session.world.rank == session.world.size - 1:
            parameters = dict(session.module.named_parameters())
            for tied in session.parallel.tied:
                local_tensor(parameters[tied.local_name]).mul_(1.001)


# ---- faults whose cause has no name


@dataclass(frozen=True)
class NoisyGradient(InjectedFault):
    """One gradient has noise of about 1 %, different in every element but equal on all ranks."""

    name: str = "head.weight"

    def on_gradients(self, session: Session, step: int) -> None:
        if find_parameter(session, self.name) is not None:
            gradient = local_gradient(session, self.name)
            generator = torch.Generator().manual_seed(step)
            gradient.mul_(1 + 0.01 * torch.randn(gradient.shape, dtype=gradient.dtype, generator=generator))


@dataclass(frozen=True)
class TransposedGradient(InjectedFault):
    """The gradient of a square weight is transposed."""

    name: str

    def on_gradients(self, session: Session, step: int) -> None:
        gradient = local_gradient(session, self.name)
        gradient.copy_(gradient.t().clone())


@dataclass(frozen=True)
class SwappedGradients(InjectedFault):
    """Two layers have each other's gradient."""

    first: str
    second: str

    def on_gradients(self, session: Session, step: int) -> None:
        first, second = local_gradient(session, self.first), local_gradient(session, self.second)
        copy = first.clone()
        first.copy_(second)
        second.copy_(copy)


@dataclass
class StaleGradient(InjectedFault):
    """From the second step on, a layer has the gradient of the step before."""

    name: str = "head.weight"
    history: list[Tensor] = field(default_factory=list)

    def on_gradients(self, session: Session, step: int) -> None:
        gradient = local_gradient(session, self.name)
        self.history.append(gradient.clone())
        if step > 1:
            gradient.copy_(self.history[-2])
