"""The tables of a sweep, from rows as it writes them."""

from typing import Any

from documentation.figures import figures_without_commit
from validation.speed.sweep.forms import FORMS
from validation.speed.sweep.results import best_by_hand, ratio
from validation.speed.sweep.table import describe_row, sweep_table


def _row(name: str, *seconds: float | str, **changes: Any) -> dict[str, Any]:
    """A row whose forms take these seconds, or have failed for these reasons."""
    forms = {
        form: {"failure": value}
        if isinstance(value, str)
        else {"step_s": value, "spread": 0.01, "first_step_s": 1000 * value, "peak_bytes": 2**30, "warnings": []}
        for form, value in zip(FORMS, seconds, strict=False)
    }
    return {
        "model": name,
        "sizes": {"samples": 8, "length": 2048},
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "digest": "0123456789ab",
        "commit": "a7351fdaa",
        "tiny": False,
        "cold": False,
        "forms": forms,
        **changes,
    }


def test_ours_is_compared_with_the_fastest_by_hand() -> None:
    row = _row("a", 0.04, 0.02, 0.03, 0.021)
    form, figures = best_by_hand(row) or ("", {})
    assert (form, figures["step_s"]) == ("compiled", 0.02)
    assert abs((ratio(row) or 0) - 1.05) < 1e-9
    assert best_by_hand(_row("b", "x", "x", "x", 0.02)) is None
    assert ratio(_row("c", 0.04, 0.02, 0.03, "x")) is None


def test_the_table_has_a_row_for_each_model_and_all_name_the_commit() -> None:
    rows = [
        _row("a", 0.04, 0.02, 0.03, 0.021, predicted={"step_s": 0.0189, "memory_bytes": 2**30 * 11 // 10}),
        _row("b", 0.04, "ValueError: no", 0.03, "stopped after 150 s | here", predicted={"failure": "no trace"}),
        _row("c", failure="not available: timm is not installed"),
    ]
    text = sweep_table(rows)
    assert (
        "3 models on NVIDIA H200 with torch 2.11.0, at `a7351fdaa`. Digest of the step's files: 0123456789ab." in text
    )
    assert "Ours : best by hand is 1.050 in the median of 1, 1.05 at most." in text
    assert "| a | 8 × 2,048 | 40.00 | 20.00 | 30.00 | 21.00 | 1.05 | 1.0% | -10% | 1.0 | +10% | `a7351fdaa` |" in text
    assert "| b | 8 × 2,048 | 40.00 | failed | 30.00 | failed | – |" in text
    assert "- b, compiled: ValueError: no" in text
    assert "- c: not available: timm is not installed" in text
    assert "- b, prediction: no trace" in text
    assert "first step" not in text
    assert figures_without_commit(text) == [], "so the page passes its check, too"


def test_first_steps_are_compared_only_with_empty_caches() -> None:
    text = sweep_table([_row("a", 0.04, 0.02, 0.03, 0.025, cold=True), _row("b", 0.04, 0.02, 0.03, 0.025)])
    assert "| a | 20.0 | 25.0 | 1.25 | `a7351fdaa` |" in text
    assert text.count("20.0 |") == 1


def test_warnings_and_lost_forms_are_said() -> None:
    row = _row("a", 0.04, 0.02, 0.03, 0.021)
    row["forms"]["ours"]["warnings"] = ["plan.compute.compile: the compiler cannot trace all of the model"]
    row["forms"]["compiled"]["failure_in_turns"] = "OutOfMemoryError: 2 GiB"
    line = describe_row(row)
    assert "- a, ours, warning: plan.compute.compile" in line
    assert "- a, compiled: OutOfMemoryError: 2 GiB" in line
