"""Checks whether the expert axis of a plan can run on a given model. Errors say what can run instead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.experts import ExpertLayer, find_expert_layers, parameter_names


@dataclass(frozen=True)
class ExpertFacts:
    """The mixtures of a model, and why its experts cannot be divided, whatever the plan; None if they can."""

    layers: tuple[ExpertLayer, ...]
    reason: str | None


def expert_facts(model: nn.Module) -> ExpertFacts:
    """What `check_experts` needs to know of a model. To check many plans of one model, find it once."""
    layers = find_expert_layers(model)
    return ExpertFacts(layers, _tied_experts(model, layers))


def check_experts(plan: Plan, model: nn.Module, facts: Callable[[], ExpertFacts] | None = None) -> None:
    """Raises an `InputError` if the plan's expert axis cannot divide the experts of the model. `facts` returns those of
    the model; by default they are found."""
    ranks = plan.axes.expert
    if ranks == 1:
        return
    found = facts() if facts else expert_facts(model)
    layers = found.layers
    if not layers:
        raise InputError(
            f"plan.axes.expert is {ranks}, but the model has no experts: a module with weights of shape (experts, …, …)"
            " and a number num_experts that is called with tokens, expert numbers and weights, or a list of equal"
            " modules that has 'expert' in its name: set axes.expert to 1"
        )
    for layer in layers:
        if layer.experts % ranks:
            divisors = [str(size) for size in range(1, layer.experts + 1) if layer.experts % size == 0]
            raise InputError(
                f"plan.axes.expert is {ranks}, but {layer.module or 'the model'} has {layer.experts} experts: choose"
                f" {', '.join(divisors[:12])}"
            )
        if layer.kind == "list":
            _check_list(plan, layer)
    if found.reason:
        raise InputError(found.reason)


def _check_list(plan: Plan, layer: ExpertLayer) -> None:
    axes, ranks = plan.axes, plan.axes.expert
    if axes.pipeline > 1:
        field, instead = "pipeline", 1
    elif axes.shard > ranks:
        field, instead = "shard", ranks
    elif axes.shard > 1 and axes.context > 1:  # FSDP2 would shard the experts of a rank over its context ranks
        field, instead = "context", 1
    else:
        return
    raise InputError(
        f"the experts of {layer.module or 'the model'} are a list of modules, of which each rank holds other ones,"
        f" which does not go together with axes.{field} {getattr(axes, field)}"
        f"{' and a shard axis' * (field == 'context')}: set it to {instead}, or axes.expert to 1"
    )


def _tied_experts(model: nn.Module, layers: Sequence[ExpertLayer]) -> str | None:
    """The reason why experts that share a weight with another module cannot be divided; None if none does."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False) if layers else ():
        names.setdefault(id(parameter), []).append(name)
    tied = {name: group for group in names.values() if len(group) > 1 for name in group}
    for layer in layers if tied else ():
        for name in parameter_names(model, layer):
            if name in tied:
                return (
                    f"{name} is the same weight as {next(other for other in tied[name] if other != name)}, and experts"
                    " with shared weights cannot be divided: set axes.expert to 1"
                )
    return None
