"""The generated pages and drawings are those that the code gives now, and what is drawn is what the schedules say."""

import math
from pathlib import Path

import pytest

from documentation.drawings import all_reduce, pipelines, servers
from documentation.drawings.files import PIPELINES, drawing_files
from documentation.generated import generated_files, stale_files
from documentation.reference.fields import field_comments
from documentation.reference.markdown import table
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.user.job_sections import Data

DOCS = Path(__file__).parents[2] / "docs"


def test_generated_files_are_fresh(tmp_path: Path) -> None:
    files = generated_files()
    assert stale_files(DOCS, files) == [], "run `make reference`"
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    (tmp_path / "reference" / "job.md").write_text("old")
    (tmp_path / "drawings" / "left.svg").write_text("")
    assert stale_files(tmp_path, files) == ["drawings/left.svg", "reference/job.md"]


def test_the_reference_has_every_command_option_and_public_name() -> None:
    pages = generated_files()
    commands = pages["reference/command_line.md"]
    assert "## `meshwright train`" in commands
    assert "| `--plan FILE` |  | Train with this plan. |" in commands
    assert "- `all cores`: one process whose operators use all cores (CPUs only)" in commands, "lines become a list"
    assert "| `train.global_batch` | whole number (> 0) | `128` |" in pages["reference/job.md"]
    assert "| `gradients.staleness` |" in pages["reference/plan.md"]
    assert "| `H100` | cuda | 79.6 | 3,350 |" in pages["reference/cluster.md"]
    python = pages["reference/python.md"]
    for name in ("mw.best_plan", "mw.launch", "mw.Session", "Session.step", "Session.backward", "Prediction", "Proof"):
        assert f"# `{name}`" in python


def test_comments_of_fields_are_those_beside_and_above() -> None:
    comments = field_comments(Data)
    assert comments["workers"] == "loader processes per rank"
    assert comments["partition"].startswith("What the ranks divide:")
    assert comments["train"] == ""


def test_cells_of_tables_have_no_line_breaks_and_no_bars() -> None:
    assert table(("a",), [("x |\n y",)]) == "| a |\n| --- |\n| x \\| y |"


@pytest.mark.parametrize("name", SCHEDULES)
def test_drawn_sums_end_with_the_sum_of_all_ranks(name: str) -> None:
    states = all_reduce.sums_after_rounds(build(name, 4, (2, 2)))
    assert all(chunk == {rank} for rank, chunks in enumerate(states[0]) for chunk in chunks)
    assert all(chunk == {0, 1, 2, 3} for chunks in states[-1] for chunk in chunks)


def test_counted_costs_are_those_of_the_formulas() -> None:
    for ranks in (2, 8, 32):
        assert all_reduce.costs("ring", ranks) == (2 * (ranks - 1), pytest.approx(2 * (ranks - 1) / ranks))
        assert all_reduce.costs("halving_doubling", ranks) == (
            2 * math.log2(ranks),
            pytest.approx(2 * (ranks - 1) / ranks),
        )


def test_drawn_bubbles_are_those_of_the_schedules() -> None:
    shares = {name: pipelines.bubble(pipelines.schedule_timeline(name, stages)) for name, stages in PIPELINES.items()}
    ranks, microbatches = pipelines.RANKS, pipelines.MICROBATCHES
    assert shares["gpipe"] == shares["1f1b"] == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert shares["interleaved_1f1b"] < shares["1f1b"]
    assert shares["zero_bubble"] < shares["interleaved_1f1b"]


def test_drawn_workers_wait_as_their_mode_says() -> None:
    batches = {mode: servers.simulate(mode) for mode in servers.MODES}
    count = {mode: len(done) for mode, done in batches.items()}
    assert count["synchronous"] < count["bounded"] < count["asynchronous"]
    for mode, lead in (("synchronous", 1), ("bounded", 2), ("asynchronous", 6)):
        ends = [[batch.end for batch in batches[mode] if batch.worker == worker] for worker in (0, 2)]
        leads = [number + 1 - sum(slow <= end for slow in ends[1]) for number, end in enumerate(ends[0])]
        assert max(leads) == lead, mode


def test_drawings_follow_the_theme_and_load_nothing() -> None:
    for name, text in drawing_files().items():
        assert "prefers-color-scheme: dark" in text, name
        assert text.count("http") == 1, f"{name} has only the name of SVG itself"
        assert "<script" not in text
