"""Dropout taken out of a model: its masks are drawn for the shapes that a rank computes on, so no two plans draw the
same ones, and a comparison would only find that."""

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def without_dropout(model: nn.Module) -> int:
    """Sets every probability of dropping something to zero, in place; returns how many there were."""
    found = 0
    for module in model.modules():
        for name in _probabilities(module):
            setattr(module, name, 0.0)
            found += 1
    return found


def _probabilities(module: nn.Module) -> list[str]:
    """`p` of dropout modules, torch's and other libraries' (DropPath, StochasticDepth), and attributes that functional
    dropout is called with: `dropout` of attention and recurrent layers, `attn_drop`, `drop_prob`, `layerdrop`."""
    kind = type(module).__name__
    drops = isinstance(module, _DropoutNd) or "drop" in kind.lower() or kind == "StochasticDepth"
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and ("drop" in name.lower() or (drops and name == "p"))
    ]
