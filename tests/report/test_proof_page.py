"""The page of a proof has every compared tensor with its error and its tolerance, and the evidence for a difference."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.proof.compare.errors import ComparedKind, ComparedValue, Comparison, Difference, ExaminedCause
from meshwright.proof.proof import Proof, write_proof
from meshwright.report.file_page import file_page
from meshwright.report.page import Table, render, write_page
from meshwright.report.proof_page import MOST_ROWS, proof_page
from tests.report.made_up_run import HOSTILE

TOLERANCE = 1e-11


def made_up_proof(names: list[str], wrong: str | None = None, steps: int = 2) -> Proof:
    """A proof in which the gradient of `wrong` differs in the last step."""
    comparison = Comparison().with_tolerance(TOLERANCE)
    values: list[ComparedValue] = []

    def add(step: int, what: ComparedKind, name: str | None, error: float) -> None:
        nonlocal comparison
        comparison = comparison.with_error(step, what, name, error)
        values.append(ComparedValue(step, what, name, 0, error, TOLERANCE))

    for name in names:
        add(0, "initial weight", name, 0.0)
    for step in range(1, steps + 1):
        add(step, "loss", None, 1e-16)
        for name in names:
            add(step, "gradient", name, float("inf") if name == wrong and step == steps else 2e-15)
        for name in names:
            add(step, "weight", name, 0.5 if name == wrong and step == steps else 1e-16)
    if comparison.first_difference:
        first = replace(
            comparison.first_difference,
            cause="missing_reduction",
            explanation=f"rank 1 has the gradient of its own samples: {HOSTILE}",
            ruled_out=("wrong_samples", "scaled"),
            fitting=(ExaminedCause("missing_reduction", "the gradient of its own samples", 1e-15),),
        )
        comparison = replace(comparison, first_difference=first)
    plan = Plan(axes=Axes(replicate=2))
    return Proof(plan, 2, "cpu", steps, "fp64", comparison, "2 × 4 layers", ("dropout is off",), values=tuple(values))


def table_of(proof: Proof) -> Table:
    section = next(section for section in proof_page(proof.details()).sections if section.title == "Every comparison")
    (table,) = section.parts
    assert isinstance(table, Table)
    return table


def test_every_compared_value_is_a_row_with_its_error_and_tolerance() -> None:
    table = table_of(made_up_proof(["a", "b"]))
    assert len(table.rows) == 2 + 2 * (1 + 2 + 2)
    assert {row[-1].text for row in table.rows} == {"equal"}  # type: ignore[union-attr]
    step, what, name, rank, error, tolerance, share, _ = table.rows[3]
    assert (step, what, name, rank) == (1, "gradient", "a", 0)
    assert (error.value, tolerance.value, share.text) == (2e-15, TOLERANCE, "0.0002")  # type: ignore[union-attr]


def test_a_failed_proof_shows_the_difference_and_its_evidence(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    proof = made_up_proof([HOSTILE, "b", "c"], wrong=HOSTILE)
    file = write_proof(proof, tmp_path / "proof.json")
    write_page(file_page(file), tmp_path / "proof.html")
    opened = open_page(tmp_path / "proof.html", width=390, scheme="dark")
    assert opened.problems == []
    assert not opened.scrolls_sideways()
    page = opened.page
    assert page.locator(".badge").inner_text() == "not equal"
    words = page.locator("#the-first-difference .explanation").inner_text()
    assert f"The gradient of {HOSTILE} in step 2 is infinite off" in words
    assert "Cause: missing reduction." in words
    causes = page.locator("#the-first-difference tbody tr").all_inner_texts()
    assert [row.split("\t")[1].strip() for row in causes] == ["the cause", "ruled out", "ruled out"]
    first_rows = page.locator("#every-comparison tbody tr").all_inner_texts()
    assert sum("differs" in row for row in first_rows[:2]) == 2
    page.locator("#every-comparison input").fill("loss")
    assert page.locator("#every-comparison tbody tr").count() == 2


def test_points_of_exactly_equal_values_are_drawn_below_all_others() -> None:
    ((_, chart),) = proof_page(made_up_proof(["a"]).details()).charts
    errors = {trace["name"]: trace["y"] for trace in chart.figure["data"]}
    assert max(errors["initial weights (1)"]) < min(errors["gradients (2)"])
    assert all(value > 0 for values in errors.values() for value in values)


@pytest.mark.soak
def test_a_proof_of_very_many_tensors_keeps_the_largest_errors() -> None:
    proof = made_up_proof([f"layer{number}" for number in range(8_000)], wrong="layer77")
    table = table_of(proof)
    assert len(table.rows) == MOST_ROWS
    assert [row[2] for row in table.rows[:2]] == ["layer77", "layer77"]
    assert (
        sum(len(trace["x"]) for _, chart in proof_page(proof.details()).charts for trace in chart.figure["data"])
        < 12_000
    )


def test_the_summary_that_prove_prints_has_a_page_without_the_table(tmp_path: Path) -> None:
    (tmp_path / "proof.json").write_text(json.dumps(made_up_proof(["a"]).to_dict()))
    page = file_page(tmp_path / "proof.json")
    assert [section.title for section in page.sections] == ["Result"]
    assert render(page)


def test_the_saved_proof_has_every_compared_value_and_the_fitting_causes() -> None:
    details = json.loads(json.dumps(made_up_proof(["a"], wrong="a").details(), allow_nan=False))
    rows = [dict(zip(details["compared"]["columns"], row, strict=True)) for row in details["compared"]["rows"]]
    assert len(rows) == sum(details["checked"].values())
    assert details["first_difference"]["fitting"][0]["residual"] == 1e-15
    assert isinstance(Difference(1, "loss", None, 0.0).fitting, tuple)
