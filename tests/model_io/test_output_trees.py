from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.model_io.batch import at_least_fp32


@dataclass(frozen=True)
class Inner:
    logits: Tensor
    name: str
    derived: Any = field(init=False, default=None)


@dataclass
class Outer:
    inner: list[Inner]
    hidden: Tensor | None = None


def test_half_tensors_in_dataclasses_become_fp32() -> None:
    logits = torch.ones(2, dtype=torch.bfloat16)
    output = at_least_fp32(Outer([Inner(logits, "scores")]))
    assert isinstance(output, Outer)
    assert output.inner[0].logits.dtype == torch.float32
    assert output.inner[0].name == "scores"
    assert output.inner[0].derived is None
    assert output.hidden is None


def test_half_tensors_in_a_mapping_of_a_library_become_fp32() -> None:
    output = at_least_fp32(UserDict(logits=torch.ones(2, dtype=torch.bfloat16), name="scores"))
    assert isinstance(output, UserDict)
    assert output["logits"].dtype == torch.float32
    assert output["name"] == "scores"
