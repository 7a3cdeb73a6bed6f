"""Switches dropout off in a model. Masks are drawn for the shapes that a rank computes on, so no two plans draw the
same masks, and every comparison would find this difference only."""

from torch import nn

from meshwright.proof.torch_private import AnyDropout


def disable_dropout(model: nn.Module) -> int:
    """Sets every dropout probability in the model to zero, in place. Returns the number of probabilities that were
    above zero."""
    disabled = 0
    for module in model.modules():
        for name in _probability_names(module):
            setattr(module, name, 0.0)
            disabled += 1
    return disabled


def _probability_names(module: nn.Module) -> list[str]:
    """Returns the names of a module's attributes that are dropout probabilities above zero. These are `p` of dropout
    modules, torch's and other libraries' (DropPath, StochasticDepth), and attributes that functional dropout is called
    with (`dropout` of attention and recurrent layers, `attn_drop`, `drop_prob`, `layerdrop`)."""
    class_name = type(module).__name__
    is_dropout = isinstance(module, AnyDropout) or "drop" in class_name.lower() or class_name == "StochasticDepth"
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and ("drop" in name.lower() or (is_dropout and name == "p"))
    ]
