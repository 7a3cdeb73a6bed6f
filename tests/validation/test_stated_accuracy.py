"""Predictions are not worse than the documentation states (validation/stated_accuracy.yaml), apart from a margin."""

from functools import cache
from pathlib import Path
from statistics import median

import pytest

from validation.memory import convolution_workspaces, one_gpu, published, sharded
from validation.memory.peak_comparison import PeakComparison
from validation.predictions.features import cases_of, predicted_seconds
from validation.predictions.predict import PredictedCase, predict_case, traced
from validation.predictions.report import Report, make_report
from validation.predictions.score import errors_of
from validation.runs.cover import cover
from validation.runs.features import Feature
from validation.stated_accuracy import StatedAccuracy, StatedFigure, stated_accuracies
from validation.steps.steps import recorded_errors

STATED = stated_accuracies()
FAST_MEMORY_CASES = ("resnet18-128-bf16", "gpt2-4-fp32")


@cache
def predictions_of_source(source: str) -> tuple[PredictedCase, ...]:
    """The predictions of a source whose steps hardly depend on the launch factor, which is 1 here."""
    return tuple(predict_case(case, traced) for case in cover().cases if case.source == source and case.step_s)


def median_error(predictions: tuple[PredictedCase, ...], factor: float = 1.0) -> float:
    predicted_s = {prediction.case.id: factor * prediction.step_s for prediction in predictions}
    return errors_of([prediction.case for prediction in predictions], predicted_s).median


def errors_of_peaks(comparisons: list[PeakComparison]) -> dict[str, float]:
    errors = [abs(comparison.error) for comparison in comparisons]
    return {"median": median(errors), "worst": max(errors)}


@pytest.mark.parametrize("name", STATED)
def test_documents_state_these_figures(name: str) -> None:
    accuracy = STATED[name]
    assert accuracy.missing_words() == []
    assert accuracy.documents
    words = " ".join(statement for statements in accuracy.documents.values() for statement in statements)
    for figure_name, figure in accuracy.figures.items():
        assert any(text in words for text in formatted(figure)), f"{name}: no document states {figure_name}"


def formatted(figure: StatedFigure) -> tuple[str, ...]:
    return f"{figure.stated:.1%}", f"{figure.stated:.0%}", f"{figure.stated:g}"


def test_every_comparison_has_a_test_that_computes_it() -> None:
    source = Path(__file__).read_text()
    assert all(f'STATED["{name}"]' in source or f'"{name}",' in source for name in STATED)


@pytest.mark.parametrize("name", STATED)
def test_a_figure_that_becomes_worse_is_reported(name: str) -> None:
    accuracy = STATED[name]
    for figure_name, figure in accuracy.figures.items():
        sign = 1 if figure.better == "lower" else -1
        as_stated = {figure_name: figure.stated + sign * figure.margin * 0.99}
        worse = {figure_name: figure.stated + sign * (figure.margin * 1.01 + 1e-6)}
        assert accuracy.worse_figures(as_stated) == []
        assert [line.split(":")[0] for line in accuracy.worse_figures(worse)] == [figure_name]


def test_words_that_a_document_does_not_contain_are_reported() -> None:
    accuracy = StatedAccuracy(command="", figures={}, documents={"README.md": ("within 0.01% of everything",)})
    assert accuracy.missing_words() == ["README.md does not say: within 0.01% of everything"]


@pytest.mark.soak
def test_steps_on_b200_and_that_worse_predictions_would_fail() -> None:
    """All rows of one source. Their predicted steps are too short, so shorter ones must fail."""
    accuracy, predictions = STATED["published steps on B200"], predictions_of_source("simumax_b200")
    assert accuracy.worse_figures({"median": median_error(predictions)}) == []
    assert accuracy.worse_figures({"median": median_error(predictions, factor=0.9)})


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("published steps with experts", "experts"),
        ("published steps with context", "context"),
        ("published steps on newer GPUs", "newer GPUs"),
        ("published steps in fp8", "fp8"),
    ],
)
def test_published_steps_that_are_judged_apart(name: str, feature: Feature) -> None:
    cases = cases_of((feature,))
    errors = errors_of(cases, predicted_seconds(cases))
    assert STATED[name].worse_figures({"median": errors.median, "p90": errors.p90}) == []


@pytest.mark.parametrize(
    ("name", "channels_last"),
    [
        ("workspaces of convolutions on contiguous images", False),
        ("workspaces of convolutions on channels-last images", True),
    ],
)
def test_workspaces_of_convolutions(name: str, channels_last: bool) -> None:
    rows = [row for row in convolution_workspaces.rows() if row["channels_last"] == channels_last]
    comparisons = [comparison for row in rows for comparison in convolution_workspaces.compare(row)]
    errors = [abs(comparison.rule - comparison.measured) / comparison.tensors for comparison in comparisons]
    agreeing = sum(comparison.agrees for comparison in comparisons)
    assert STATED[name].worse_figures({"median": median(errors), "agreeing": agreeing}) == []


@pytest.mark.soak
def test_some_peaks_of_memory_on_one_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in one_gpu.cases() if case["name"] in FAST_MEMORY_CASES]
    monkeypatch.setattr(one_gpu, "cases", lambda: cases)
    computed = {"worst": errors_of_peaks(one_gpu.compare())["worst"]}
    assert STATED["peak memory on one H200"].worse_figures(computed) == []


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_peaks_of_memory_on_one_h200() -> None:
    assert STATED["peak memory on one H200"].worse_figures(errors_of_peaks(one_gpu.compare())) == []


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_peaks_of_memory_of_sharded_ranks() -> None:
    assert STATED["peak memory of sharded ranks"].worse_figures(errors_of_peaks(sharded.compare())) == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_published_peaks_of_memory() -> None:
    """Every eighth row: all of them take 25 minutes."""
    computed = published.summary(published.predict_rows(published.rows()[::8]))
    assert STATED["published peak memory"].worse_figures(computed) == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_steps_on_one_h200() -> None:
    errors: dict[str, list[float]] = {}
    for row, error in recorded_errors():
        errors.setdefault(row.precision, []).append(abs(error))
    computed = {precision: median(values) for precision, values in errors.items()}
    assert STATED["steps on one H200"].worse_figures(computed) == []


@cache
def published_steps(every_row: bool) -> Report:
    """Every row first: the models that a short run needs are then traced already."""
    return make_report(every_row)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "every_row"),
    [
        ("published steps, every row", True),
        ("published steps, short run", False),
    ],
)
def test_published_steps(name: str, every_row: bool) -> None:
    assert STATED[name].worse_figures(published_steps(every_row).overall()) == []
