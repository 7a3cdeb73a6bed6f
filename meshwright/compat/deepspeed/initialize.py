"""`initialize`: builds the engine from a model and a configuration, as DeepSpeed's function of this name does."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from meshwright.compat.deepspeed.api.comm import init_distributed
from meshwright.compat.deepspeed.api.optimizers import DeepSpeedCPUAdam, FusedAdam
from meshwright.compat.deepspeed.engine import DeepSpeedEngine
from meshwright.compat.deepspeed.errors import CallError
from meshwright.compat.deepspeed.pipe import PipelineModule
from meshwright.compat.deepspeed.pipeline_engine import PipelineEngine
from meshwright.compat.deepspeed_config.batch import complete
from meshwright.compat.deepspeed_config.config import DeepSpeedConfig, read_config, warn_about_keys
from meshwright.compat.deepspeed_config.plan_groups import data_ranks_of, plan_groups
from meshwright.compat.deepspeed_config.sections import OptimizerSection, SchedulerSection
from meshwright.compat.deepspeed_job import loss_scale_of
from meshwright.job import load_plan
from meshwright.plan import Plan
from meshwright.processes.torch_private import add_gloo_for_cpu_tensors
from meshwright.processes.world import join
from meshwright.train.session import Parameters, Session
from meshwright.user.call import load

_TIMEOUT_S = 1800  # DeepSpeed's
Groups = list[Any]  # parameters, or groups of them


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, Any, Any]:
    """Returns the engine, its optimizer, the loader of `training_data` and the schedule of the learning rate, with None
    for those that there are not. Arguments mean the same as in DeepSpeed. All ranks call this together.

    An optimizer or a schedule that was given is the one that is returned, and its groups get the parameters that this
    rank holds. Weights are those of rank 0. `mpu` and `mesh_param` are refused."""
    if not isinstance(model, nn.Module):
        raise CallError(f"initialize(model=…) needs an nn.Module, and this is {model!r:.60}: name the argument")
    if mpu is not None or mesh_param is not None:
        name = "mpu" if mpu is not None else "mesh_param"
        raise CallError(f"initialize({name}=…) is not offered: write tensor_parallel.autotp_size in the configuration")
    configuration = read_config(_config_argument(args, config if config is not None else config_params))
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    world = join("cuda" if torch.cuda.is_available() else "cpu", _TIMEOUT_S)
    if world.size > 1:
        add_gloo_for_cpu_tensors()
    if world.rank == 0:
        warn_about_keys(configuration)
    _use_local_rank(args, world.local_rank)
    _prepare_weights(model, configuration)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    client = _optimizer(configuration, optimizer, _groups(model, model_parameters))
    schedule = _schedule(configuration, lr_scheduler, client, optimizer)
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    data_ranks = data_ranks_of(configuration, world.size, stages)
    sizes = complete(configuration.batch, data_ranks, configuration.source)
    make_session = partial(
        Session,
        model,
        partial(_with_parameters, client, names),
        loss=model.loss_fn if isinstance(model, PipelineModule) else None,
        world=world,
        make_schedule=None if schedule is None else lambda _: schedule,
        loss_scale=loss_scale_of(configuration),
    )
    trains = client is not None
    engine: DeepSpeedEngine
    if isinstance(model, PipelineModule):
        plan = _plan(configuration, data_ranks)
        engine = PipelineEngine(make_session, model, plan, configuration, sizes, world, client, schedule, collate_fn)
        engine.use_data(training_data)
    else:
        sample = _sample(model, training_data, collate_fn) if configuration.tensor > 1 else None
        session = make_session(plan=_plan(configuration, data_ranks), sample=sample)
        session.seeds_passes = False
        engine = DeepSpeedEngine(session, configuration, sizes, trains=trains, collate_fn=collate_fn)
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _config_argument(args: Any, config: Any) -> Any:
    """The configuration of the argument `config`, or of `--deepspeed_config`."""
    in_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if in_args is not None and config is not None:
        raise CallError(
            f"both initialize(config=…) and --deepspeed_config {in_args} give a configuration: leave out one of them"
        )
    if in_args is None and config is None:
        raise CallError("initialize needs a configuration: give config=…, or --deepspeed_config on the command line")
    return in_args if config is None else config


def _use_local_rank(args: Any, local_rank: int) -> None:
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank


def _prepare_weights(model: nn.Module, configuration: DeepSpeedConfig) -> None:
    """Gives all ranks the weights and buffers of rank 0. Weights that the script has rounded to 16 bits become fp32
    again if the configuration trains in 16 bits: the optimizer needs them, and passes round them themselves."""
    if configuration.precision != "fp32":
        for parameter in model.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
    if dist.is_initialized() and dist.get_world_size() > 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, 0)


def _plan(configuration: DeepSpeedConfig, data_ranks: int) -> Plan:
    """The plan of the configuration. The engine accumulates itself, and scripts recompute by `deepspeed.checkpointing`.
    A configuration for one rank shards nothing."""
    groups = plan_groups(configuration, data_ranks, accumulation=1, recompute=False)
    return load_plan(groups, "initialize")


def _groups(model: nn.Module, model_parameters: Iterable[Any] | None) -> Groups:
    if model_parameters is None:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(model_parameters)


def _optimizer(configuration: DeepSpeedConfig, given: Any, groups: Groups) -> torch.optim.Optimizer | None:
    """The optimizer that was given, or that of the configuration; None without either."""
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is not None:
        if not callable(given):
            raise CallError(f"initialize(optimizer=…) takes a torch optimizer or a function, not {given!r:.60}")
        return given(groups)
    section = configuration.optimizer
    if section is None:
        return None
    try:
        return _make_optimizer(section, groups, offloaded=configuration.zero.offload != "none")
    except (TypeError, ValueError) as error:
        raise _misfit(configuration, "optimizer", section, error) from error


def _make_optimizer(section: OptimizerSection, groups: Groups, *, offloaded: bool) -> torch.optim.Optimizer:
    if not section.is_adam:
        made: torch.optim.Optimizer = load(section.call)(groups, **section.options)
        return made
    is_decoupled = section.call.endswith("AdamW")
    if offloaded:
        return DeepSpeedCPUAdam(groups, adamw_mode=is_decoupled, **section.options)
    return FusedAdam(groups, adam_w_mode=is_decoupled, **section.options)


def _schedule(configuration: DeepSpeedConfig, given: Any, optimizer: torch.optim.Optimizer | None, source: Any) -> Any:
    """The schedule that was given, or that of the configuration; None without either. `source` is the argument
    `optimizer` of `initialize`."""
    if given is not None and hasattr(given, "step"):
        if not isinstance(source, torch.optim.Optimizer):
            raise CallError(
                "initialize(lr_scheduler=…) is a schedule of another optimizer than the engine's: give that optimizer,"
                " too, or a function that makes the schedule"
            )
        return given
    if optimizer is None:
        return None
    if given is not None:
        return given(optimizer)
    section = configuration.scheduler
    if section is None:
        return None
    if section.auto:
        option = section.auto[0]
        raise CallError(f"{configuration.source}: scheduler.params.{option} is auto: write a number")
    try:
        return load(section.call)(optimizer, **section.options)
    except (TypeError, ValueError) as error:
        raise _misfit(configuration, "scheduler", section, error) from error


def _misfit(
    configuration: DeepSpeedConfig, name: str, section: OptimizerSection | SchedulerSection, error: Exception
) -> CallError:
    options = ", ".join(f"{option} {value!r:.40}" for option, value in section.options.items())
    return CallError(f"{configuration.source}: {name} {section.name} refuses its params ({options}): {error}")


def _with_parameters(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str], parameters: Parameters
) -> torch.optim.Optimizer:
    """Puts the parameters that this rank holds into the groups of the optimizer, in the place of the model's."""
    if optimizer is None:
        return torch.optim.SGD([{"params": []}], lr=0.0)
    for group in optimizer.param_groups:
        unknown = [parameter for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            shape = tuple(unknown[0].shape)
            raise CallError(f"the optimizer holds a parameter of shape {shape} that the model does not have")
        held = [names[id(parameter)] for parameter in group["params"] if names[id(parameter)] in parameters]
        if optimizer.state and any(id(parameters[name]) not in names for name in held):
            raise CallError(
                "the optimizer has made steps before initialize, and its state cannot be divided: make it anew"
            )
        group["params"] = [parameters[name] for name in held]
    return optimizer


def _sample(model: nn.Module, training_data: Any, collate_fn: Callable[..., Any] | None) -> Any:
    """A batch as the model gets it, which a plan that splits layers needs: what its forward pass takes of a batch of
    the training data."""
    if training_data is not None:
        collate = collate_fn or default_collate
        batch = collate([training_data[number] for number in range(min(2, len(training_data)))])
        return _model_inputs(batch, signature(model.forward))
    inputs = getattr(model, "dummy_inputs", None)  # of models of transformers
    if inputs is None:
        raise CallError(
            "tensor_parallel.autotp_size needs a sample to find out how the model can be split: give"
            " initialize(training_data=…)"
        )
    return dict(inputs)


def _model_inputs(batch: Any, forward: Signature) -> Any:
    """The items of a batch that are inputs and no targets: of a dict those that the forward pass has names for, of a
    tuple or list as many as the forward pass needs, or all but the last one if it needs none or any number."""
    parameters = forward.parameters.values()
    if isinstance(batch, Mapping):
        takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        return dict(batch) if takes_all else {key: batch[key] for key in batch if key in forward.parameters}
    if not isinstance(batch, tuple | list):
        return batch
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    needed = [item for item in parameters if item.kind in positional and item.default is Parameter.empty]
    takes_any = any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters)
    count = len(needed) if needed and not takes_any else max(1, len(batch) - 1)
    return tuple(batch[:count])
