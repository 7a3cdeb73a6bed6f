"""The weights that a recorded training starts from: drawn at a healthy scale, or loaded from the reference's record.

A usual initialization hides faults: behind a gradient that is a thousandth of its neighbours' nothing is seen. Weights
are drawn uniformly around 0, or around 1 where the script's own values are (norms), with standard deviation 1 / √fan-in
for matrices and 0.3 for vectors. Each is a function of its name and its place in the whole tensor, so all ranks draw
the same ones. The generators of the script are not touched."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .model.matching import fits, match_names
from .parts import Held, Part, Region
from .whole import WholeTensors

_VECTOR_DEVIATION = 0.3
_MOST_BLOCKS = 8


def draw_start(parameters: Mapping[str, Held], buffers: Mapping[str, Held], seed: int) -> None:
    """Draws the weights that are trained, and running statistics, in place."""
    for held in parameters.values():
        if held.trained and held.dtype.is_floating_point and held.same_as is None:
            _write(held, _drawn(held, seed))
    for held in buffers.values():
        own = held.name.rpartition(".")[2]
        if own == "running_mean":
            _write(held, 0.3 * _numbers(held, seed))
        elif own == "running_var":
            _write(held, 1 + 0.3 * _numbers(held, seed).clamp(-1, 1))


def _drawn(held: Held, seed: int) -> Tensor:
    values = [value for part in held.parts if (value := part.weight()) is not None and value.numel()]
    size = sum(value.numel() for value in values)
    mean = sum(float(value.double().sum()) for value in values) / size if size else 0.0
    if len(held.shape) < 2:
        center = 1.0 if held.name.endswith("weight") and mean > 0.5 else 0.0
        return center + _VECTOR_DEVIATION * _numbers(held, seed)
    fan_in = max(1, math.prod(held.shape[1:])) if len(held.shape) != 3 else max(held.shape[-2:])
    return _numbers(held, seed) / math.sqrt(fan_in)


def _numbers(held: Held, seed: int) -> Tensor:
    """Numbers between -√3 and √3 with standard deviation 1, in fp32 and on the CPU."""
    digest = hashlib.blake2b(f"{seed} {held.reference_name or held.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return (2 * torch.rand(held.shape, generator=generator, dtype=torch.float32, device="cpu") - 1) * math.sqrt(3)


def _write(held: Held, whole: Tensor) -> None:
    with torch.no_grad():
        for part in held.parts:
            target = part.weight()
            if target is not None:
                source = part.region.of(whole)
                target.copy_(source.reshape(target.shape).to(target.dtype))


def perturb(parameters: Mapping[str, Held], size: float, seed: int) -> None:
    """Changes each trained weight by a random factor of 1 ± `size`."""
    with torch.no_grad():
        for held in parameters.values():
            if not held.trained or not held.dtype.is_floating_point or held.same_as is not None:
                continue
            factor = 1 + size * _numbers(held, seed + 1).sign()
            for part in held.parts:
                target = part.weight()
                if target is not None:
                    target.mul_(part.region.of(factor).reshape(target.shape).to(target))


# ---- the start of the reference


def name_after_reference(held: Mapping[str, Held], reference: WholeTensors) -> None:
    """Notes the reference's name of each tensor that has a counterpart."""
    shapes = {name: entry.shape for name, entry in held.items()}
    for own, other in match_names(shapes, reference.shapes).items():
        held[own].reference_name = other


def find_divisions(held: Mapping[str, Held], reference: WholeTensors, rank: int) -> list[str]:
    """Finds out which part of the reference's tensor a smaller one of this rank is, from the values that both scripts
    made: it is a contiguous share, or one share of each of several blocks (fused weights). Where the values agree with
    none, a contiguous share by rank is assumed; the names of those are returned."""
    assumed = []
    for entry in held.values():
        shape = reference.shapes.get(entry.reference_name or "")
        if shape is None or entry.shape == shape or entry.layout != "whole" or not fits(entry.shape, shape):
            continue
        whole = reference.whole(entry.reference_name or "")
        value = entry.parts[0].weight()
        regions = list(_possible_regions(entry.shape, shape))
        found = None
        if whole is not None and value is not None:
            found = next((region for region in regions if torch.equal(region.of(whole).to(value), value)), None)
        count = math.prod(shape) // max(1, math.prod(entry.shape))
        if found is None:
            assumed.append(entry.reference_name or entry.name)
        region = found or regions[rank % count]
        entry.parts = (replace(entry.parts[0], region=region),)
        entry.shape, entry.layout = shape, "found by its values" if found else "assumed from its shape"
    return assumed


def _possible_regions(part: tuple[int, ...], whole: tuple[int, ...]) -> list[Region]:
    dim = next(dim for dim in range(len(whole)) if part[dim] != whole[dim])
    count = whole[dim] // part[dim]
    regions = []
    for blocks in range(1, _MOST_BLOCKS + 1):
        if part[dim] % blocks:
            continue
        size = part[dim] // blocks
        for index in range(count):
            box = tuple((index * size, size) if d == dim else (0, length) for d, length in enumerate(whole))
            regions.append(Region(box=box, dim=dim, blocks=blocks))
    return regions


def load_start(held: Mapping[str, Held], reference: WholeTensors) -> list[str]:
    """Writes the reference's values into the tensors that have a counterpart. Returns the names of those that have
    none, or whose shape does not agree."""
    without = []
    for entry in held.values():
        whole = reference.whole(entry.reference_name) if entry.reference_name else None
        if whole is None or tuple(whole.shape) != entry.shape:
            without.append(entry.name)
        else:
            _write(entry, whole)
    return without


def read_parts(parts: tuple[Part, ...], gradient: bool) -> list[Tensor | None]:
    return [part.gradient() if gradient else part.weight() for part in parts]
