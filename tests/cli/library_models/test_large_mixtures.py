"""Plans of large mixtures of experts and of long sequences, from configurations alone, without weights."""

import json
import re
from pathlib import Path

import pytest

from meshwright.cluster.names import cluster_from_name
from meshwright.planner.inputs import MARGIN
from tests.cli.commands import RunCommand
from validation.large_models import CASES, command


@pytest.mark.soak
@pytest.mark.parametrize(("model", "nodes", "length"), CASES)
def test_a_plan_fits_and_has_reasons(
    model: str, nodes: int, length: int, tmp_path: Path, run_command: RunCommand
) -> None:
    result = run_command(*command(model, nodes, length, tmp_path))
    if (model, nodes) == ("DeepSeek-V3", 8):  # 671 billion weights with AdamW: 16 bytes each, 10 TiB
        assert result.exit_code == 2
        assert re.search(r"Without offload, 13\d devices of this kind are needed at least", result.stderr)
        return
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    capacity_bytes = cluster_from_name("H100").nodes[0].device.memory_bytes * (1 - MARGIN)
    assert all(entry["memory_bytes"] <= capacity_bytes for entry in report["ranked"])
    axes = report["best"]["plan"]["axes"]
    explanation = report["explanation"]
    assert "It is the fastest of" in explanation or "candidates" in explanation
    assert report["rejected"]
    assert all(rejected["reason"] for rejected in report["rejected"])
    if length > 100_000:
        assert axes["context"] > 1
        assert f"Context {axes['context']}: activations of 131,072 tokens need" in explanation
    else:
        assert "rows routed evenly to the" in explanation
    if axes["expert"] > 1:
        assert f"Expert {axes['expert']}: the experts have" in explanation
        buffers = report["best"]["dispatch_bytes"]
        assert buffers["worst"] == pytest.approx(axes["expert"] * buffers["expected"])
