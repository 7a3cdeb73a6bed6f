"""Floating-point operations of a published run.

    decoder, forward, one sample of s tokens:
        blocks = L (2 s (2 + 2 kv/heads) h² + 2 s (2 or 3) h f + 4 s² h)        `decoder_forward`
        head   = 2 s h V
    step = 3 forward (the backward pass costs two), + blocks if they are recomputed  `step_flops`

Attention is counted in full, also if its kernel skips the masked half. Counted like this, the published runs are nearer
to a constant rate, which makes the guess harder to beat. The FLOPs of other models are counted on the meta device, in
the forward pass alone (`counted_flops`): torch's counter is wrong about the backward pass of grouped convolutions.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.user.call import Call
from meshwright.workloads.text.decoder import default_feedforward
from meshwright.workloads.text.decoder_sizes import decoder, published_keywords
from validation.runs.case import PublishedCase, Sample
from validation.runs.models.build import make_batch, make_loss, make_model
from validation.runs.models.mixtures import mixture_forward

DECODER = "meshwright.workloads.text.decoder_sizes:decoder"
MIXTURE = "validation.runs.models.mixtures:MixtureDecoder"


@dataclass(frozen=True)
class ForwardFlops:
    """The FLOPs of one sample in the forward pass: of all blocks, and of the head. `pairs` are those of the blocks that
    multiply pairs of tokens, counted in full."""

    blocks: float
    head: float
    pairs: float


def step_flops(case: PublishedCase) -> float:
    """The FLOPs of one step over the global batch, including recomputation."""
    if case.model.call not in (DECODER, MIXTURE):
        return counted_flops(case)
    forward = decoder_forward(case.model.arguments, case.sample.size[0])
    recomputed = forward.blocks if case.plan.memory.recompute == "full" else 0.0
    return case.global_batch * (3 * (forward.blocks + forward.head) + recomputed)


def decoder_forward(arguments: dict[str, Any], length: int) -> ForwardFlops:
    """The forward FLOPs of a decoder that is built with these arguments, for one sample of `length` tokens."""
    if "experts" in arguments:
        return ForwardFlops(*mixture_forward(arguments, length))
    keywords = decoder_keywords(arguments)
    hidden, layers, heads = keywords["hidden"], keywords["layers"], keywords["heads"]
    kv_heads = keywords.get("kv_heads") or heads
    activation = keywords.get("activation", "gelu")
    inner = keywords.get("feedforward") or default_feedforward(hidden, activation)
    weights = (2 + 2 * kv_heads / heads) * hidden**2 + (2 if activation == "gelu" else 3) * hidden * inner
    pairs = 4.0 * length**2 * hidden
    block = 2 * length * weights + pairs
    head = 2 * length * hidden * keywords["vocabulary"] if keywords.get("head", True) else 0.0
    return ForwardFlops(layers * block, head, layers * pairs)


def decoder_keywords(arguments: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a decoder. A `size` among the arguments is replaced by the keywords of that published size."""
    size = arguments.get("size")
    rest = {key: value for key, value in arguments.items() if key != "size"}
    return {**(published_keywords(size) if size else {}), **rest}


def counted_flops(case: PublishedCase) -> float:
    """The FLOPs of one step over the global batch, counted on the meta device."""
    calls = [case.model.model_dump(), case.loss.model_dump(), asdict(case.sample)]
    return case.global_batch * _sample_flops(json.dumps(calls, sort_keys=True))


@cache
def _sample_flops(calls: str) -> float:
    model, loss, sample = json.loads(calls)
    samples = 2  # BatchNorm refuses a single value per channel
    with torch.device("meta"):
        network = make_model(Call(**model))
        criterion = make_loss(Call(**loss))
        inputs, target = make_batch(Sample(**{**sample, "size": tuple(sample["size"])}), samples)
        with FlopCounterMode(display=False) as counter:
            criterion(network(inputs), target)
    return 3.0 * counter.get_total_flops() / samples


@cache
def decoder_parameters(arguments: str) -> int:
    """The number of parameters, from decoders of one and of two layers on the meta device. `arguments` is JSON."""
    keywords = decoder_keywords(json.loads(arguments))
    with torch.device("meta"):
        one, two = (
            sum(parameter.numel() for parameter in decoder(**{**keywords, "layers": layers}).parameters())
            for layers in (1, 2)
        )
    return one + (two - one) * (keywords["layers"] - 1)
