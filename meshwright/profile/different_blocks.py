"""Whether ranks with different samples may run different blocks of a model."""

from typing import Any

from torch import nn

from meshwright.blocks.module_names import is_inside
from meshwright.blocks.recompute import find_blocks
from meshwright.errors import InputError
from meshwright.profile.equal_blocks import find_equal_blocks
from meshwright.profile.experts import find_expert_layers
from meshwright.profile.structure.dataflow import ControlFlowError, record_dataflow
from meshwright.profile.structure.structure import Structure


def may_run_different_blocks(module: nn.Module, structure: Structure | None, sample: Any, target: str | None) -> bool:
    """Whether random numbers or the values of tensors decide which blocks of the model run, so that ranks with
    different samples may run different ones. Code within a block decides nothing about other blocks. Without a sample
    batch this is not known, and the result is False. Experts of a list may be blocks, and tracing calls all of them."""
    blocks = find_blocks(module)
    experts = [name for layer in find_expert_layers(module) if layer.kind == "list" for name in layer.weights]
    if any(is_inside(block, expert) for block in blocks for expert in experts):
        return True
    if structure is not None and structure.pieces:
        return structure.found_in_evaluation
    if sample is None or not blocks:
        return False
    for equal_blocks in dict.fromkeys((find_equal_blocks(module), ())):
        try:
            record_dataflow(module, sample, 2, equal_blocks, target)
            return False
        except ControlFlowError as error:
            return not any(is_inside(error.module, block) for block in blocks)
        except (IndexError, InputError):  # a model may fail without the skipped blocks
            continue
    return False
