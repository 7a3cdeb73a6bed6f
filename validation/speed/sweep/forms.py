"""The forms in which a model is trained: the loop that a user of PyTorch writes, eager, compiled, and compiled with
CUDA graphs; and a session under the plan that `mw.best_plan` chooses. Each form is a function that makes one step."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from validation.speed.sweep.case import ModelCase

BY_HAND: dict[str, str | None] = {"eager": None, "compiled": "default", "compiled with graphs": "reduce-overhead"}
OURS = "ours"
FORMS = (*BY_HAND, OURS)
Step = Callable[[], Any]


@dataclass(frozen=True)
class Built:
    """A form that is ready for its first step, and what the results tell about it."""

    step: Step
    facts: dict[str, Any] = field(default_factory=dict)


def build_by_hand(case: ModelCase, tiny: bool, device: torch.device, mode: str | None) -> Callable[[], Built]:
    """Returns the function that makes a loop by hand; the model and its batch are there already. `mode` is that of
    `torch.compile`, None for an eager loop. Tiny models are traced, but no code is generated, which would take a CPU a
    minute for each."""
    model = case.make_model(tiny, device)
    batch = case.make_batch(tiny, device)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = case.make_optimizer(model, fused=True)
    arguments, keywords, target = _arguments(case, batch)

    def build() -> Built:
        forward: Callable[..., Any] = model
        if mode is not None:
            forward = torch.compile(model, backend="aot_eager") if tiny else torch.compile(model, mode=mode)

        def step() -> Tensor:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                output = forward(*arguments, **keywords)
                loss = _own_loss(output) if case.loss is None else case.loss(output, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return Built(step)

    return build


def build_ours(case: ModelCase, tiny: bool, device: torch.device, tune_s: float | None) -> Callable[[], Built]:
    """Returns the function that plans and makes a session. `tune_s` is the budget for measuring variants, None for the
    default one."""
    model = case.make_model(tiny, device)
    batch = case.make_batch(tiny, device)
    optimizer = case.make_optimizer(model)
    samples = case.samples(tiny)

    def build() -> Built:
        plan = mw.best_plan(
            model,
            batch,
            loss=case.loss,
            optimizer=optimizer,
            global_batch=samples,
            allow="changes",
            device=device.type,
            **_budget(mw.best_plan, tune_s),
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # what the search measured is not the step's
        session = mw.parallelize(model, optimizer, loss=case.loss, plan=plan, device=device.type, sample_batch=batch)
        fields = plan.model_dump(mode="json", exclude_defaults=True)
        return Built(lambda: session.step(batch), {"plan": plan.summary(), "plan_fields": fields})

    return build


def _budget(function: Callable[..., Any], tune_s: float | None) -> dict[str, float]:
    """The argument `tune`, for a `best_plan` that has it."""
    return {"tune": tune_s} if tune_s is not None and "tune" in inspect.signature(function).parameters else {}


def _arguments(case: ModelCase, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The positional and keyword arguments of the model, and the target of the loss."""
    if isinstance(batch, Mapping):
        return (), dict(batch), None
    if not isinstance(batch, tuple):
        return (batch,), {}, None
    return (batch, {}, None) if case.loss is None else (batch[:-1], {}, batch[-1])


def _own_loss(output: Any) -> Tensor:
    """The loss of a model that computes it."""
    if isinstance(output, Tensor):
        return output
    loss: Tensor | None = getattr(output, "loss", None)
    return torch.stack(list(output.values())).sum() if loss is None else loss
