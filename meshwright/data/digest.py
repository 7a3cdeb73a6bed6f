"""Short digests of samples and batches, by which ranks find out whether they have the same data."""

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from meshwright.data.randomness import preserve_generators, seed_generators
from meshwright.data.samples import dataset_size, name_of, read_first_samples, read_sample
from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values


def digest(value: Any) -> str:
    """Returns a digest of the tensors, arrays, numbers and texts in a sample or batch. Other objects count by their
    bytes if they have a method `tobytes`, as pictures do, and otherwise by their class only."""
    state = blake2b(digest_size=8)
    for leaf in tree_leaves(value):
        for part in _contents(leaf):
            state.update(part)
    return state.hexdigest()


def digest_samples(samples: Sequence[Any]) -> str:
    """Returns a digest of a list of samples. It is faster than `digest` for long lists of numbers."""
    state = blake2b(digest_size=8)
    for sample in samples:
        try:
            state.update(json.dumps(sample, default=digest).encode())
        except (TypeError, ValueError):  # a dict whose keys are no texts, for example
            state.update(digest(sample).encode())
    return state.hexdigest()


_CAUSE = (
    "each rank builds the data set, and its code probably draws random numbers without a seed (seed them, for example"
    " with torch.Generator().manual_seed(0)), or divides it among ranks already (leave that to Meshwright)"
)


def check_same_stream(dataset: Any, seed: int) -> None:
    """Raises an `InputError` on every rank if the first two samples of a stream are not the same on all ranks. All
    ranks call this together. The stream must begin anew with every `iter()`."""
    with preserve_generators():
        seed_generators(seed, "sample stream", 0)
        found = digest_samples(read_first_samples(dataset, 2))
    of_ranks = all_gather_values(found)
    for rank, rank_digest in enumerate(of_ranks):
        if rank_digest != of_ranks[0]:
            raise InputError(
                f"the first samples of the stream {name_of(dataset)} are not the same on ranks 0 and {rank}: {_CAUSE}"
            )


def check_same_samples(dataset: Any, seed: int) -> None:
    """Raises an `InputError` on every rank if the first, the middle or the last sample of the data set, or their
    number, is not the same on all ranks. A sample that is different each time it is read is not compared. All ranks
    call this together. The data set must have random access."""
    size = dataset_size(dataset)
    indices = sorted({0, size // 2, size - 1})
    digests = _sample_digests(dataset, seed, indices)
    of_ranks = all_gather_values((size, digests))
    if all(of_rank == of_ranks[0] for of_rank in of_ranks):
        return
    name, first_size = name_of(dataset), of_ranks[0][0]
    for rank, (rank_size, _) in enumerate(of_ranks):
        if rank_size != first_size:
            raise InputError(f"{name} has {first_size} samples on rank 0 and {rank_size} on rank {rank}: {_CAUSE}")
    repeated_of_ranks = all_gather_values(_sample_digests(dataset, seed, indices))
    for position, index in enumerate(indices):
        sample_digests = [rank_digests[position] for _, rank_digests in of_ranks]
        if sample_digests != [rank_digests[position] for rank_digests in repeated_of_ranks]:
            continue  # the sample is another one each time it is read
        for rank, rank_digest in enumerate(sample_digests):
            if rank_digest != sample_digests[0]:
                raise InputError(f"sample {index} of {name} is not the same on ranks 0 and {rank}: {_CAUSE}")


def check_same_weights(weights: np.ndarray) -> None:
    """Raises an `InputError` on every rank if the weights of samples are not the same on all ranks. All ranks call this
    together."""
    of_ranks = all_gather_values(digest(weights))
    for rank, rank_digest in enumerate(of_ranks):
        if rank_digest != of_ranks[0]:
            raise InputError(
                f"the weights of the samples are not the same on ranks 0 and {rank}: each rank computes them, and the"
                " code probably draws random numbers without a seed: seed them"
            )


def _sample_digests(dataset: Any, seed: int, indices: Sequence[int]) -> list[str]:
    """Returns the digests of these samples, read with random generators that are seeded alike on all ranks."""
    digests = []
    with preserve_generators():
        for index in indices:
            seed_generators(seed, "sample", 0, index)
            digests.append(digest(read_sample(dataset, index)))
    return digests


def check_shares(batch: Any, data_rank: int) -> None:
    """Raises an `InputError` on every rank if the ranks' batches cannot be their shares of a global batch: all data
    ranks have the same batch, or ranks of one data rank have different ones. All ranks call this together."""
    of_ranks = all_gather_values((data_rank, digest(batch)))
    instead = (
        "loop over session.prepare(loader), which divides the loader's batches among ranks, or session.batches(dataset)"
    )
    by_data_rank: dict[int, str] = {}
    for rank, (rank_place, rank_digest) in enumerate(of_ranks):
        if by_data_rank.setdefault(rank_place, rank_digest) != rank_digest:
            raise InputError(
                f"rank {rank} has another batch than a rank that has to train on the same samples: {instead}"
            )
    if len(by_data_rank) > 1 and len(set(by_data_rank.values())) == 1 and _has_different_samples(batch):
        raise InputError(
            f"all {len(by_data_rank)} data ranks were given the same first batch and would train on the same samples:"
            f" {instead}"
        )


def _has_different_samples(batch: Any) -> bool:
    """Whether a tensor of the batch has different rows. Batches of equal samples, such as zeros for a try, say nothing
    about whether ranks have different samples. A batch of one sample counts as different."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    return not tensors or any(len(tensor) == 1 or bool((tensor != tensor[:1]).any()) for tensor in tensors)


def _contents(leaf: Any) -> Iterator[bytes]:
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_quantized:
        yield f"{leaf.dtype} {tuple(leaf.shape)}".encode()
        yield leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
        yield f"{leaf.dtype} {leaf.shape}".encode()
        yield leaf.tobytes()
    elif isinstance(leaf, int | float | complex | str | bytes | None):
        yield repr(leaf).encode()
    else:
        yield type(leaf).__name__.encode()
        if not isinstance(leaf, torch.Tensor) and callable(getattr(leaf, "tobytes", None)):
            yield bytes(leaf.tobytes())
