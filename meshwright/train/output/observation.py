"""`RankObservation`: what one rank observed of one step: the samples that it computed on, the precision of its layers'
outputs, and digests of its gradients and weights. It is small enough to be stored for every rank. recording.py writes
it.

Tensors are compared by a digest of their bytes. Tensors that a collective has made are bitwise equal on all its ranks.
Tensors that each rank has computed by itself may differ in the last bits. If the digests of such tensors differ, their
numbers must be compared.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.data.batch import Batch
from meshwright.messages.plain_values import tensor_bytes
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.weights.layout import gather_parameter, local_tensor
from meshwright.train.step.batch import samples_in
from meshwright.train.torch_private import DisableTorchFunction, tree_leaves

# Bits of each dtype's mantissa, including the implicit leading one, from the shortest to the longest. If a shorter
# dtype represents a tensor's values exactly, the tensor carries no more bits than that dtype has.
MANTISSA_BITS = {
    torch.float8_e4m3fn: 4,
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float32: 24,
    torch.float64: 53,
}


@dataclass(frozen=True)
class RankObservation:
    """What one rank observed of one step.

    `coordinates`: the rank's coordinate along every axis of the mesh. `sample_digests`: a digest of each sample, by
    microbatch. `counted_samples`: for each microbatch, how many of its samples have weight. `gradients` and `state`:
    digests of the full tensors as this rank has them. `split_axes` and `split_dims`: for each divided weight, the mesh
    axis whose ranks divide it, and the dimension that they divide. `tied_stages`: for each tied weight, the stages that
    hold a copy. `local_parameters`: the weights of which this rank holds all or a part. `optimizer_parameters`: the
    weights in its optimizer. `gradient_norm` and `clipped_norm`: the norm of the gradients that this rank holds, before
    and after clipping. `drew_random_numbers`: whether the step drew random numbers. `output_bits`: for each layer, the
    most bits of mantissa that its output carried. `expert_rows`: for each mixture whose experts are divided, the rows
    that this rank sent to experts, and those that its experts computed.
    """

    rank: int
    coordinates: dict[str, int]
    data_rank: int
    device: str
    gradients: dict[str, str]
    state: dict[str, str]
    split_axes: dict[str, str]
    tied_stages: dict[str, tuple[int, ...]]
    local_parameters: tuple[str, ...]
    optimizer_parameters: tuple[str, ...]
    loss: float = 0.0
    sample_digests: tuple[tuple[str, ...], ...] = ()
    counted_samples: tuple[int, ...] = ()
    gradient_norm: float = 0.0
    clipped_norm: float = 0.0
    seed: int = 0
    drew_random_numbers: bool = False
    output_bits: Mapping[str, int] | None = None
    split_dims: Mapping[str, int] | None = None
    expert_rows: Mapping[str, tuple[int, int]] | None = None

    def to_stored(self) -> dict[str, Any]:
        """Returns the fields as a dict with the names that recording files use."""
        return {_STORED_NAMES.get(name, name): value for name, value in asdict(self).items()}

    @staticmethod
    def with_field_names(stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a dict that `to_stored` returned, with the names of this class's fields."""
        return {_FIELD_NAMES.get(name, name): value for name, value in stored.items()}


# Names of fields in recording files, where they differ from those above. They are fixed, so old files stay readable.
_STORED_NAMES = {
    "coordinates": "place",
    "split_axes": "divided",
    "split_dims": "dims",
    "tied_stages": "tied",
    "local_parameters": "holds",
    "optimizer_parameters": "held",
    "sample_digests": "samples",
    "counted_samples": "counted",
    "gradient_norm": "norm",
    "clipped_norm": "clipped",
    "drew_random_numbers": "drew",
    "output_bits": "bits",
}
_FIELD_NAMES = {stored: name for name, stored in _STORED_NAMES.items()}


# ---- digests


def digest(tensor: Tensor) -> str:
    """A digest of the tensor's shape, dtype and values."""
    digest_of_bytes = blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    digest_of_bytes.update(tensor_bytes(tensor).numpy().tobytes())
    return digest_of_bytes.hexdigest()


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def digest_samples(batch: Batch) -> tuple[tuple[str, ...], ...]:
    """For each microbatch, a digest of every sample."""
    return tuple(_digest_rows(microbatch.data) for microbatch in batch.microbatches)


def _digest_rows(data: Any) -> tuple[str, ...]:
    size = samples_in(data)
    columns: list[list[str]] = []
    for leaf in tree_leaves(data):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size:
            columns.append([digest(row) for row in leaf])
        else:
            columns.append([digest(leaf) if isinstance(leaf, Tensor) else repr(leaf)] * size)
    return tuple(blake2b(" ".join(row).encode(), digest_size=8).hexdigest() for row in zip(*columns, strict=True))


# ---- precision and randomness


def mantissa_bits(tensor: Tensor) -> int:
    """How many bits of mantissa the tensor's values carry: those of the shortest dtype that represents all of them. 0
    if all values are zero or the tensor is not floating-point."""
    if not tensor.is_floating_point() or tensor.dtype not in MANTISSA_BITS or not bool(tensor.any()):
        return 0
    for dtype, bits in MANTISSA_BITS.items():
        if bits >= MANTISSA_BITS[tensor.dtype]:
            break
        if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
            return bits
    return MANTISSA_BITS[tensor.dtype]


def record_output_bits(module: nn.Module, bits: dict[str, int]) -> Callable[[], None]:
    """Starts to record in `bits`, by the name of each layer (module without children), the most bits of mantissa that
    its outputs carry; layers in compiled code are left out. Returns a function that ends the recording."""

    def make_hook(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, arguments: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return  # reading values would divide compiled code, and the divided code would be proved
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return  # reading values is not allowed while a CUDA graph is captured
            # Subclasses of Tensor are left out: their values may be on other ranks, and reading them would communicate.
            with DisableTorchFunction():  # a proof in fp64 runs in a mode that changes conversions to fp32
                output_bits = [mantissa_bits(leaf.detach()) for leaf in tree_leaves(output) if type(leaf) is Tensor]
            bits[name] = max([bits.get(name, 0), *output_bits])

        return hook

    layers = [(name, layer) for name, layer in module.named_modules() if not any(True for _ in layer.children())]
    handles = [layer.register_forward_hook(make_hook(name)) for name, layer in layers]

    def remove_hooks() -> None:
        for handle in handles:
            handle.remove()

    return remove_hooks


def drew_random_numbers(device: torch.device) -> bool:
    """Whether a generator of torch, `random` or NumPy has drawn a number since `Session.step` seeded them all."""
    seed = torch.default_generator.initial_seed()
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    if any(not torch.equal(_reseeded(generator).get_state(), generator.get_state()) for generator in generators):
        return True
    if random.getstate() != random.Random(seed).getstate():
        return True
    now, fresh = np.random.get_state(legacy=False), np.random.RandomState(seed % 2**32).get_state(legacy=False)
    return bool(now["state"]["pos"] != fresh["state"]["pos"]) or bool(
        (now["state"]["key"] != fresh["state"]["key"]).any()
    )


def _reseeded(generator: torch.Generator) -> torch.Generator:
    """Returns a new generator in the state that this one had just after it was seeded."""
    return torch.Generator(generator.device).manual_seed(generator.initial_seed())


# ---- copies


def gather_tied_copies(
    parallel: ParallelModel, pick: Callable[[nn.Parameter], Tensor | None], names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns, by name, this pipeline stage's copy of each tied weight that is in `names`. A copy is the full tensor,
    on the CPU, of what `pick` returns for the parameter, such as its gradient; if `pick` returns None, it is left out.
    All ranks that hold parts of the weight must call this together."""
    parameters = dict(parallel.module.named_parameters())
    copies = {}
    for tie in parallel.tied:
        value = pick(parameters[tie.local_name])
        if value is not None and tie.name in names:
            full = gather_parameter(value.detach(), parallel.layouts.get(tie.local_name), parallel.mesh)
            copies[tie.name] = full.to("cpu", copy=True)
    return copies


def local_gradient_norm(module: nn.Module) -> float:
    """The norm of the gradients, or shards of gradients, that this rank holds; 0 if it has none."""
    squares = [local_tensor(p.grad).double().square().sum() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
