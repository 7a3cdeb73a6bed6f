"""A job that is trained by a DeepSpeed configuration: its batch, accumulation, clipping, precision, loss scale,
optimizer and schedule take the place of the job's. This file imports neither DeepSpeed nor the drop-in for it."""

from pathlib import Path
from typing import Any

from meshwright.compat.deepspeed_config.batch import BatchSizes, complete
from meshwright.compat.deepspeed_config.config import DeepSpeedConfig, read_config, warn_about_keys
from meshwright.compat.deepspeed_config.plan_groups import data_ranks_of, plan_groups, refuse_sum
from meshwright.errors import InputError
from meshwright.job import Job, load_plan
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Shares
from meshwright.user.job_sections import LearningRateSchedule, LossScaleSettings, Optimizer


def job_of_config(job: Job, file: Path, ranks: int) -> tuple[Job, Plan]:
    """Returns the job as the configuration changes it, and the plan of the configuration for this number of ranks.
    Values that the configuration leaves out, or that are `auto`, are those of the job; without a clipping norm,
    DeepSpeed's default is used."""
    if isinstance(job.plan, Plan) and job.plan.shares != Shares():
        raise InputError(
            f"the job's plan ({job.plan.summary()}) has shares, but --deepspeed {file} gives the plan, which divides"
            " batches and weights evenly: leave out plan.shares, or --deepspeed"
        )
    config = read_config(file)
    warn_about_keys(config)
    refuse_sum(config)
    data_ranks = data_ranks_of(config, ranks)
    given = config.batch
    train = job.train.global_batch if given.train is None and given.micro is None else given.train
    sizes = complete(BatchSizes(train, given.micro, given.accumulation), data_ranks, config.source)
    groups = plan_groups(config, data_ranks, accumulation=sizes.accumulation, recompute=config.recompute)
    changes: dict[str, Any] = {
        "train": job.train.model_copy(
            update={
                "global_batch": sizes.train,
                "clip_norm": config.gradient_clipping or None,
                "loss_scale": loss_scale_of(config),
            }
        ),
    }
    if config.drop_last:
        changes["data"] = job.data.model_copy(update={"drop_last": True})
    if config.optimizer is not None:
        changes["optimizer"] = _optimizer(config, job)
    if config.scheduler is not None:
        changes["schedule"] = _schedule(config, job)
    return job.model_copy(update=changes), load_plan(groups, config.source)


def _optimizer(config: DeepSpeedConfig, job: Job) -> Optimizer:
    """The configuration's optimizer with the job's parameter groups. Options that are `auto` are the job's."""
    section = config.optimizer
    assert section is not None
    inherited = {
        option: job.optimizer.arguments[option] for option in section.auto if option in job.optimizer.arguments
    }
    return Optimizer(call=section.call, groups=job.optimizer.groups, **{**inherited, **section.options})


def _schedule(config: DeepSpeedConfig, job: Job) -> LearningRateSchedule:
    """The configuration's schedule, which is stepped after each step. Of options that are `auto`, the highest learning
    rate is that of the optimizer, and the number of steps that of the job."""
    section = config.scheduler
    assert section is not None
    options = dict(section.options)
    rate = (config.optimizer.options if config.optimizer else {}).get("lr", job.optimizer.arguments.get("lr"))
    from_job = {"total_num_steps": job.train.steps, "warmup_max_lr": rate, "cycle_max_lr": rate}
    for option in section.auto:
        if option in from_job and from_job[option] is None:
            raise InputError(
                f"{config.source}: scheduler.params.{option} is auto, but the job does not say it: write a number, or"
                f" set {'train.steps' if option == 'total_num_steps' else 'optimizer.lr'} of the job"
            )
        if option in from_job:
            options[option] = from_job[option]
    return LearningRateSchedule(call=section.call, per="step", **options)


def loss_scale_of(config: DeepSpeedConfig) -> LossScaleSettings:
    """The loss scale of fp16 in the form of a job."""
    scaling = config.loss_scaling
    return LossScaleSettings(
        start=scaling.start,
        interval=scaling.window,
        hysteresis=scaling.hysteresis,
        consecutive_hysteresis=scaling.consecutive_hysteresis,
        lowest=scaling.lowest,
        fixed=scaling.fixed,
    )
