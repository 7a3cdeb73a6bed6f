"""Predicted and measured peaks of memory are compared and printed without a GPU."""

import pytest

from validation.memory import one_gpu as memory
from validation.memory import sharded as memory_sharded
from validation.memory.peak_comparison import PeakComparison, summary, table_head, table_line


def test_the_table_names_errors_and_the_summary_their_worst() -> None:
    comparisons = [
        PeakComparison("one", 99.0, 100.0),
        PeakComparison("two", 104.0, 100.0),
        PeakComparison("three", 100.0, 100.0),
    ]
    assert "predicted" in table_head()
    assert "-1.0%" in table_line(comparisons[0])
    assert summary(comparisons) == "3 rows: median error 1.0%, worst 4.0%"


@pytest.mark.soak
def test_recorded_peaks_are_compared_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [case for case in memory.cases() if case["name"] == "resnet18-128-bf16"]
    monkeypatch.setattr(memory, "cases", lambda: cases)
    first = memory_sharded.rows()[:1]
    monkeypatch.setattr(memory_sharded, "rows", lambda: first)
    for comparisons in (memory.compare(), memory_sharded.compare()):
        assert abs(comparisons[0].error) < 0.03
    assert capsys.readouterr().out.count("1 rows: median error") == 2
