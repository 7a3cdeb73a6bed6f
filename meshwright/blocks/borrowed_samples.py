"""Forward passes with borrowed samples: a rank for which a short batch has no sample runs the model with a sample of
another rank, because ranks may exchange something in every pass. Such a sample has no weight in the loss, and must not
enter the statistics that layers take of a batch either."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_MARK = "_runs_borrowed_samples"  # set on layers during a forward pass with borrowed samples
_KEEPS_OWN = "_counts_samples_itself"  # set on layers that update their statistics rightly with borrowed samples


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether a module takes statistics of a batch in training: BatchNorm, or any other with a running mean."""
    return isinstance(module, _BatchNorm) or isinstance(getattr(module, "running_mean", None), Tensor)


def counts_samples_itself(layer: nn.Module) -> None:
    """Declares that a layer asks `is_borrowed` in its forward pass, and that its running statistics are then right."""
    setattr(layer, _KEEPS_OWN, True)


def is_borrowed(layer: nn.Module) -> bool:
    """Whether the samples that a layer gets now are borrowed."""
    return bool(getattr(layer, _MARK, False))


@contextmanager
def borrowed_samples(module: nn.Module) -> Iterator[None]:
    """Within this context, the samples that the module gets have no weight: its layers keep their running statistics,
    except those that combine statistics over ranks, which add no sample of this rank."""
    layers = [layer for layer in module.modules() if has_batch_statistics(layer)]
    local = [layer for layer in layers if not getattr(layer, _KEEPS_OWN, False)]
    kept = [(buffer, buffer.clone()) for layer in local for buffer in layer.buffers(recurse=False)]
    outer = [layer for layer in layers if not is_borrowed(layer)]  # contexts may be nested by recomputation
    for layer in outer:
        setattr(layer, _MARK, True)
    try:
        yield
    finally:
        for layer in outer:
            setattr(layer, _MARK, False)
        for buffer, value in kept:
            # Not counted as a change by autograd, which may have saved the buffer for a backward pass with weight 0.
            buffer.data.copy_(value)
