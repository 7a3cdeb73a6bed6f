"""Floating-point operations of a published run.

    decoder, forward, one sample of s tokens:
        blocks = L (2 s (2 + 2 kv/heads) h² + 2 s (2 or 3) h f + 4 s² h)        `decoder_forward`
        head   = 2 s h V
    step = 3 forward (backward costs twice), + blocks where they are computed again  `step_flops`

Attention is counted in full, also where a kernel leaves out the masked half: so counted, the published runs lie nearer
to a constant rate, and the guess is harder to beat. Other models are counted on the meta device (`counted`), by their
forward pass: torch's counter is wrong about the backward pass of grouped convolutions.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.call import Call
from meshwright.workloads.text.decoder import default_feedforward
from meshwright.workloads.text.decoder_sizes import decoder, keywords_of
from validation.runs.case import PublishedCase, Sample
from validation.runs.models.build import make_batch, make_loss, make_model

DECODER = "meshwright.workloads.text.decoder_sizes:decoder"


@dataclass(frozen=True)
class ForwardFlops:
    """Of one sample."""

    blocks: float
    head: float


def step_flops(case: PublishedCase) -> float:
    """Of one step over the global batch, with what is computed again."""
    if case.model.call != DECODER:
        return counted(case)
    forward = decoder_forward(case.model.arguments, case.sample.size[0])
    again = forward.blocks if case.plan.memory.recompute == "full" else 0.0
    return case.global_batch * (3 * (forward.blocks + forward.head) + again)


def decoder_forward(arguments: dict[str, Any], length: int) -> ForwardFlops:
    keywords = decoder_keywords(arguments)
    hidden, layers, heads = keywords["hidden"], keywords["layers"], keywords["heads"]
    kv_heads = keywords.get("kv_heads") or heads
    activation = keywords.get("activation", "gelu")
    wide = keywords.get("feedforward") or default_feedforward(hidden, activation)
    weights = (2 + 2 * kv_heads / heads) * hidden**2 + (2 if activation == "gelu" else 3) * hidden * wide
    block = 2 * length * weights + 4 * length**2 * hidden
    head = 2 * length * hidden * keywords["vocabulary"] if keywords.get("head", True) else 0.0
    return ForwardFlops(layers * block, head)


def decoder_keywords(arguments: dict[str, Any]) -> dict[str, Any]:
    """With those of a published size filled in."""
    size = arguments.get("size")
    rest = {key: value for key, value in arguments.items() if key != "size"}
    return {**(keywords_of(size) if size else {}), **rest}


def counted(case: PublishedCase) -> float:
    what = [case.model.model_dump(), case.loss.model_dump(), asdict(case.sample)]
    return case.global_batch * _per_sample(json.dumps(what, sort_keys=True))


@cache
def _per_sample(text: str) -> float:
    model, loss, sample = json.loads(text)
    samples = 2  # BatchNorm refuses one value a channel
    with torch.device("meta"):
        output = make_model(Call(**model))
        criterion = make_loss(Call(**loss))
        inputs, target = make_batch(Sample(**{**sample, "size": tuple(sample["size"])}), samples)
        with FlopCounterMode(display=False) as counter:
            criterion(output(inputs), target)
    return 3.0 * counter.get_total_flops() / samples


@cache
def decoder_parameters(text: str) -> int:
    """Counted on the meta device, on decoders of one and of two layers; `text` are the arguments as JSON."""
    keywords = decoder_keywords(json.loads(text))
    with torch.device("meta"):
        one, two = (
            sum(parameter.numel() for parameter in decoder(**{**keywords, "layers": layers}).parameters())
            for layers in (1, 2)
        )
    return one + (two - one) * (keywords["layers"] - 1)
