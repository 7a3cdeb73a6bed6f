"""Predicted beside measured memory: what the benchmarks print without a GPU."""

import pytest

from validation.memory import one_gpu as memory
from validation.memory import sharded as memory_sharded
from validation.memory.peak_comparison import PeakComparison, head, line, summary


def test_the_table_names_errors_and_the_summary_their_worst() -> None:
    found = [
        PeakComparison("one", 99.0, 100.0),
        PeakComparison("two", 104.0, 100.0),
        PeakComparison("three", 100.0, 100.0),
    ]
    assert "predicted" in head()
    assert "-1.0%" in line(found[0])
    assert summary(found) == "3 rows: median error 1.0%, worst 4.0%"


def test_carried_peaks_are_compared_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [case for case in memory.cases() if case["name"] == "resnet18-128-bf16"]
    monkeypatch.setattr(memory, "cases", lambda: chosen)
    first = memory_sharded.rows()[:1]
    monkeypatch.setattr(memory_sharded, "rows", lambda: first)
    for found in (memory.compare(), memory_sharded.compare()):
        assert abs(found[0].error) < 0.03
    assert capsys.readouterr().out.count("1 rows: median error") == 2
