"""Prepares the dropout of cuDNN's recurrent layers for a capture.

torch keeps the state of this dropout per device. Whenever a seed or an offset of the device's generator was set since,
the next recurrent layer draws the state anew, with a seed that is read on the host, which no capture allows. Every step
sets a seed. So a small layer draws the state before the capture, with the seed that the step would have drawn first. In
replays the state goes on by itself.
"""

import torch
from torch import nn


def prepare_recurrent_dropout(module: nn.Module, generator: torch.Generator) -> None:
    """Lets a capture that begins now find the state of the dropout as it is needed, if the module has recurrent layers
    with dropout. The device's generator stays as it is."""
    layers = (layer for layer in module.modules() if isinstance(layer, nn.RNNBase))
    if not any(layer.training and layer.dropout > 0 for layer in layers):
        return
    device = generator.device
    spare = torch.Generator(device)
    spare.manual_seed(generator.initial_seed())
    spare.set_offset(generator.get_offset())
    with torch.random.fork_rng(devices=()):  # the weights of the small layer are drawn on the host
        small = nn.LSTM(1, 1, num_layers=2, dropout=0.5).to(device)
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(spare)  # unlike setting a seed, this does not ask for another state of the dropout
    try:
        with torch.no_grad():
            small(torch.zeros(1, 1, 1, device=device))
    finally:
        generator.graphsafe_set_state(own)
