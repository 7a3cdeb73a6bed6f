"""The peak memory of a process is in bytes on every system."""

import resource
import sys
from types import SimpleNamespace

import pytest
import torch

from meshwright.train.output.peak_memory import peak_memory_bytes


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_unit_of_the_system_is_known(monkeypatch: pytest.MonkeyPatch, system: str, unit: int) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=5_000))
    assert peak_memory_bytes(torch.device("cpu")) == 5_000 * unit
