"""`SessionAccelerator`: the `Accelerator` of a trainer, with what touches weights, gradients and samples done by a
session and its plan. The rest, such as devices and process groups, stays accelerate's."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from meshwright.compat.transformers.batches import RankBatchSampler, RankStream, divide_loader
from meshwright.compat.transformers.session_model import SessionModel
from meshwright.data.batch import SampleShare
from meshwright.errors import InputError
from meshwright.parallel.clip import clip_values_
from meshwright.plan import Plan
from meshwright.train.session import Session


class SessionAccelerator(Accelerator):
    """An `Accelerator` whose class was replaced by `use_session_accelerator`.

    `plan_for` returns the plan, for which it may need a sample batch of the loader that it is called with.
    `loss_over_ranks` returns the loss of the global batch, of which its argument is this rank's part. `session` is None
    until the trainer has made it. `last_loss` is the loss of the last backward pass, the same on every rank.
    `row_counts` are the numbers of samples that each rank has of the batch that is evaluated; None during training.
    `prepares_evaluation` is True while the trainer makes a loader for an evaluation, which is divided evenly.
    """

    plan_for: Callable[[Any], Plan]
    loss_over_ranks: Callable[[Tensor], Tensor]
    session: Session | None = None
    last_loss: Tensor | None = None
    row_counts: list[int] | None = None
    prepares_evaluation: bool = False

    # ---- gradients

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        assert self.session is not None
        loss = self.loss_over_ranks(loss)
        self.last_loss = loss.detach()
        self.session.backward(loss, **kwargs)

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        assert self.session is not None
        return self.session.no_sync()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Tensor:
        assert self.session is not None
        if self.session.plan.world_size == 1:
            norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)  # the same bits as Trainer
            return norm
        if norm_type != 2:
            raise InputError(f"gradients are clipped by their {norm_type}-norm: several ranks have the 2-norm only")
        return self.session.clip_gradients(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        clip_values_([parameters] if isinstance(parameters, Tensor) else parameters, clip_value)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> nn.Module:
        if isinstance(model, SessionModel):
            return model.module
        unwrapped: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return unwrapped

    # ---- samples

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a loader that yields this rank's share of each global batch, on the device."""
        plan = self.plan_for(data_loader)  # also on one process, because `auto` needs a sample batch
        if self.num_processes == 1 or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        data_rank = self.process_index // plan.axes.tensor
        samples = () if self.prepares_evaluation else plan.shares.samples
        share = SampleShare(data_rank, plan.data_ranks, samples=samples)
        divided = divide_loader(data_loader, self.num_processes, share)
        prepared = prepare_data_loader(
            divided,
            self.device,
            num_processes=1,  # it is divided already
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        self._dataloaders.append(prepared)
        return prepared

    @property
    def divides_loader(self) -> bool:
        """Whether the loader that is iterated over is one that `prepare_data_loader` has divided."""
        loader = self.gradient_state.active_dataloader
        is_stream = isinstance(getattr(loader, "dataset", None), RankStream)
        return is_stream or self._rank_batch_sampler() is not None

    @property
    def borrows_sample(self) -> bool:
        """Whether the last batch that was loaded has no sample of this rank's own, but one of another rank, which must
        have no weight. Only the last batch of an epoch can be so short."""
        sampler = self._rank_batch_sampler()
        if sampler is None or sampler.sizes is None or not self.gradient_state.end_of_dataloader:
            return False
        return sampler.sizes[sampler.share.rank] == 0

    def _rank_batch_sampler(self) -> RankBatchSampler | None:
        loader = self.gradient_state.active_dataloader
        if not isinstance(loader, DataLoaderShard):
            return None
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, RankBatchSampler):  # a resumed epoch skips batches of it
            sampler = getattr(sampler, "batch_sampler", None)
        return sampler if isinstance(sampler, RankBatchSampler) else None

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The tensors of all data ranks, concatenated. In an evaluation, their rows are samples, and each sample of the
        data set is there once."""
        if self.num_processes == 1 or not self.divides_loader or use_gather_object:
            return super().gather_for_metrics(input_data, use_gather_object)
        return recursively_apply(self._gather_of_data_ranks, input_data, error_on_other_type=True)

    def _gather_of_data_ranks(self, tensor: Tensor) -> Tensor:
        assert self.session is not None
        tensor_ranks = self.session.plan.axes.tensor
        if self.row_counts is None or tensor.dim() == 0:
            values: Tensor = self.gather(tensor)
            if tensor_ranks == 1:
                return values
            return values.reshape(self.num_processes, -1, *values.shape[1:])[::tensor_ranks].flatten(0, 1)
        rows = tensor[: self.row_counts[self.process_index]].contiguous()
        padded = self.pad_across_processes(rows, dim=0)
        gathered = self.gather(padded).reshape(self.num_processes, *padded.shape)
        of_ranks = [gathered[rank, :count] for rank, count in enumerate(self.row_counts)]
        return torch.cat(of_ranks[::tensor_ranks])


def use_session_accelerator(
    accelerator: Accelerator, plan_for: Callable[[Any], Plan], loss_over_ranks: Callable[[Tensor], Tensor]
) -> SessionAccelerator:
    """Makes the accelerator that a trainer has built a `SessionAccelerator`, and returns it."""
    accelerator.__class__ = SessionAccelerator
    assert isinstance(accelerator, SessionAccelerator)
    accelerator.plan_for, accelerator.loss_over_ranks = plan_for, loss_over_ranks
    return accelerator
