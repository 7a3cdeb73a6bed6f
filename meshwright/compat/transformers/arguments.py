"""What `TrainingArguments` ask for: mapped to the plan, or refused with one line."""

from typing import Any, Literal

from transformers import TrainingArguments

from meshwright.compat.plan_argument import PlanArgument, read_plan, with_precision
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_rules.table import refusal

# Arguments that are refused if they are set, and what to do instead.
_NOT_OFFERED = {
    "fsdp": "leave it out, and give a plan with axes.shard",
    "deepspeed": "leave it out, and give a plan with axes.shard",
    "parallelism_config": "leave it out, and give a plan with axes.tensor or axes.shard",
    "torch_compile": "leave it out, and set compute.compile of the plan",
    "fp16": "set bf16=True, or numerics.precision: bf16 in the plan",
    "fp16_full_eval": "leave it out: evaluations compute in the plan's precision",
    "bf16_full_eval": "leave it out: evaluations compute in the plan's precision",
    "auto_find_batch_size": "choose a per_device_train_batch_size that fits",
}


def check_arguments(args: TrainingArguments) -> None:
    """Raises an `InputError` if `MeshwrightTrainer` does not have what one of the arguments asks for."""
    for name, instead in _NOT_OFFERED.items():
        if getattr(args, name):
            raise InputError(f"MeshwrightTrainer: {name} is set, which it does not have: {instead}")
    if any(word in str(args.optim).lower() for word in ("lomo", "layerwise")):
        raise InputError(
            f"MeshwrightTrainer: optim is {args.optim}, which updates weights within the backward pass, before the"
            " ranks' gradients are combined: choose another optimizer"
        )
    if args.world_size > 1:
        _check_for_several_ranks(args)


def _check_for_several_ranks(args: TrainingArguments) -> None:
    config: Any = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name):
            raise InputError(
                f"MeshwrightTrainer: accelerator_config.{name} is set, but every rank loads its own samples of each"
                " batch: leave it out"
            )
    if not args.average_tokens_across_devices:
        raise InputError(
            "MeshwrightTrainer: average_tokens_across_devices is False, but a loss is always the mean over the tokens"
            " of all ranks: leave it out"
        )
    if args.eval_use_gather_object:
        raise InputError(
            "MeshwrightTrainer: eval_use_gather_object is set, but only tensors are gathered from several ranks: let"
            " the model return tensors, or evaluate on one process"
        )
    if "rebalance" in str(args.train_sampling_strategy).lower():
        raise InputError(
            f"MeshwrightTrainer: train_sampling_strategy is {args.train_sampling_strategy}, which divides the samples"
            " among ranks itself: choose another one"
        )


def plan_of_argument(argument: PlanArgument, args: TrainingArguments) -> Plan | Literal["auto"]:
    """Returns the plan that the trainer was given, in the precision that the arguments ask for, or `auto`."""
    if argument == "auto":
        return "auto"
    plan = read_plan(argument, args.world_size, "MeshwrightTrainer")
    return checked_plan(with_arguments_precision(plan, args, plan_decides=argument is not None), args)


def with_arguments_precision(plan: Plan, args: TrainingArguments, *, plan_decides: bool) -> Plan:
    """Returns the plan in the precision that the arguments ask for. `plan_decides`: the user has written the plan, so
    the arguments have to agree with it."""
    wanted: Literal["bf16", "tf32", "fp32"] = "bf16" if args.bf16 else "tf32" if args.tf32 else "fp32"
    return with_precision(plan, wanted, wanted, True, plan_decides=plan_decides)


def checked_plan(plan: Plan, args: TrainingArguments) -> Plan:
    """Returns the plan. Raises an `InputError` if Trainer's loop cannot run it, or not with these arguments."""
    if (reason := refusal(plan, "transformers", arguments=args)) is not None:
        raise InputError(f"MeshwrightTrainer cannot run the plan ({plan.summary()}): {reason}")
    return plan
