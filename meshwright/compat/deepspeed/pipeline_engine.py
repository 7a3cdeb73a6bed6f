"""`PipelineEngine`: the engine of a `PipelineModule`. A step is one call of `train_batch`, which takes
`gradient_accumulation_steps` micro batches of an iterator.

A plan that cuts the model needs to see a batch. Without `training_data`, the model is divided in the first call of
`train_batch` or `eval_batch`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.compat.deepspeed.api.dataloader import RepeatingLoader
from meshwright.compat.deepspeed.engine import DeepSpeedEngine
from meshwright.compat.deepspeed.errors import CallError
from meshwright.compat.deepspeed.pipe import PipelineModule
from meshwright.compat.deepspeed_config.batch import CompleteSizes
from meshwright.compat.deepspeed_config.config import DeepSpeedConfig
from meshwright.model_io.batch import split_batch
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.train.step.batch import map_tensors, move_to_device, tensors_in


class PipelineEngine(DeepSpeedEngine):
    """Trains a `PipelineModule`. All ranks of a pipeline read the same micro batches, which are pairs of inputs and
    labels. `forward`, `backward` and `step` are refused, as in DeepSpeed."""

    def __init__(
        self,
        make_session: Callable[..., Session],
        model: PipelineModule,
        plan: Plan,
        configuration: DeepSpeedConfig,
        sizes: CompleteSizes,
        world: World,
        optimizer: torch.optim.Optimizer | None,
        schedule: Any,
        collate_fn: Any,
    ) -> None:
        if model.loss_fn is None:
            raise CallError("PipelineModule(loss_fn=…) is missing: train_batch needs a function of output and label")
        torch.nn.Module.__init__(self)
        self._make_session = make_session
        self._model = model
        self._plan = _pipeline_plan(plan, model, sizes)
        self.configuration, self.sizes, self.collate_fn = configuration, sizes, collate_fn
        self.world, self.optimizer, self.basic_optimizer, self.lr_scheduler = world, optimizer, optimizer, schedule
        self.device, self.local_rank, self.global_rank = world.device, world.local_rank, world.rank
        self.num_stages = model.num_stages
        self.world_size, self.dp_world_size = world.size, plan.data_ranks
        self.mp_world_size = 1
        # The mesh has pipeline ranks outermost, and data ranks next to each other.
        self.stage_id, self.data_rank = divmod(world.rank, self.dp_world_size)
        self.training_dataloader = None
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.loaded_checkpoint_tag = None
        self._boundary, self._backward_passes, self._is_stepped = None, 0, False
        self._norm = None
        self._data: Iterator[Any] | None = None
        self._session: Session | None = None

    # ---- the session

    @property
    def session(self) -> Session:  # type: ignore[override]
        if self._session is None:
            raise CallError(
                "the model of this engine is divided in the first train_batch, which shows what its inputs are: call it"
                " first, or give initialize(training_data=…)"
            )
        return self._session

    @property
    def module(self) -> Any:  # type: ignore[override]
        return self._model if self._session is None else self._session.module

    def use_data(self, training_data: Any) -> None:
        """Makes the loader of `initialize(training_data=…)`, and divides the model by its first samples."""
        if training_data is None:
            return
        self.training_dataloader = self.deepspeed_io(training_data)
        self._data = iter(RepeatingLoader(self.training_dataloader))
        loader = self.training_dataloader.dataloader
        collate: Any = loader.collate_fn
        self._divide(collate([training_data[number] for number in range(min(2, len(training_data)))]))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        self._data = iterator

    def set_dataloader(self, loader: Any) -> None:
        self.training_dataloader = loader
        self._data = iter(RepeatingLoader(loader))

    def _divide(self, sample: Any) -> None:
        if self._session is None:
            clip = self.gradient_clipping() or None
            self._session = self._make_session(plan=self._plan, sample=sample, clip_norm=clip)

    # ---- steps

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Makes one optimizer step on the next micro batches. Returns the mean loss of all ranks."""
        self._require_optimizer("train_batch")
        assert self.optimizer is not None
        share = self._next_share(data_iter)
        session = self.session
        session.parallel.train()
        skipped = session.loss_scale.skipped if session.loss_scale else 0
        loss = session.step(share)
        self._is_applied = session.loss_scale is None or session.loss_scale.skipped == skipped
        self.skipped_steps += not self._is_applied
        norm = session.gradient_norm
        self._norm = None if norm is None else float(norm)
        self.global_steps += 1
        self.micro_steps += self.gradient_accumulation_steps()
        self.global_samples += self.train_batch_size()
        every = self.steps_per_print()
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            print(f"steps: {self.global_steps} loss: {float(loss):.4f} lr: {self.get_lr()}", flush=True)
        return loss.detach()

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Returns the mean loss of the next micro batches over all ranks, without training. With `return_logits` also
        the model's outputs, on the ranks of the last stage."""
        if not compute_loss or reduce_output not in ("avg", "mean"):
            raise CallError("eval_batch(compute_loss=False) and other reductions than 'avg' are not offered")
        count = num_micro_batches or self.gradient_accumulation_steps()
        batches = [next(data_iter) for _ in range(count)]
        self._divide(batches[0])
        parallel, total, outputs = self.session.parallel, torch.zeros(2, dtype=torch.float64), []
        parallel.train(False)
        for batch in batches:
            example = split_batch(move_to_device(batch, self.device))
            output = parallel.evaluate(example)
            if output is not None:
                assert self._model.loss_fn is not None
                total += torch.tensor([float(self._model.loss_fn(output, example.target)), 1.0], dtype=torch.float64)
                outputs.append(output)
        parallel.train()
        if dist.is_initialized() and self.world_size > 1:
            total = total.to(self.device)
            dist.all_reduce(total)
        weight = next(self.module.parameters(), None)
        loss = (total[0] / total[1]).to(torch.get_default_dtype() if weight is None else weight.dtype)
        return (loss, torch.cat(outputs) if outputs else None) if return_logits else loss

    def _next_share(self, data_iter: Iterator[Any] | None) -> Any:
        """This rank's samples of the next step: the micro batches of the iterator, joined."""
        source = data_iter if data_iter is not None else self._data
        if source is None:
            raise CallError("train_batch needs an iterator of micro batches: train_batch(data_iter)")
        batches = [next(source) for _ in range(self.gradient_accumulation_steps())]
        self._divide(batches[0])
        return join_batches(batches)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        raise CallError("the batch size of a pipeline is fixed: write train_batch_size in the configuration")

    def forward(self, *_: Any, **__: Any) -> Any:
        raise CallError("a pipeline runs forward and backward passes in turns: call train_batch or eval_batch")

    def backward(self, *_: Any, **__: Any) -> Any:
        raise CallError("a pipeline runs forward and backward passes in turns: call train_batch")

    def step(self, *_: Any, **__: Any) -> None:
        raise CallError("a pipeline runs forward and backward passes in turns: call train_batch")

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def is_pipe_parallel(self) -> bool:
        return self.num_stages > 1


def _pipeline_plan(plan: Plan, model: PipelineModule, sizes: CompleteSizes) -> Plan:
    """The plan of the configuration with the stages of the model, and micro batches that a step runs itself."""
    recompute = "full" if model.recomputes else "none"
    groups = plan.model_dump()
    groups["memory"] |= {"recompute": recompute}
    if model.num_stages == 1:
        groups["memory"]["accumulation"] = sizes.accumulation
        return Plan.model_validate(groups)
    groups["axes"]["pipeline"] = model.num_stages
    groups["pipeline"] = {"microbatches": sizes.accumulation, "cuts": model.cuts(), "schedule": "1f1b"}
    return Plan.model_validate(groups)


def join_batches(batches: list[Any]) -> Any:
    """Joins batches of the same structure along dimension 0 of their tensors."""
    columns = [tensors_in(batch) for batch in batches]
    joined = iter([torch.cat(parts) for parts in zip(*columns, strict=True)])
    return map_tensors(lambda _: next(joined), batches[0])
