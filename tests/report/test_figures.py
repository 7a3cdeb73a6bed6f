"""Charts as PNG and SVG, drawn by an installed browser."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.report.charts import axis, figure, line
from meshwright.report.figures import write_figures
from meshwright.report.page import Chart, KeyFigures, Page, Section


def page_with(*parts: Any) -> Page:
    return Page("Page", "", [Section("Loss", "", parts)])


CHART = Chart("Loss of <b>", figure([line("loss", [1, 2], [3.0, 4.0])], axis("step"), axis("loss", "nats")))


@pytest.mark.usefixtures("browser")
def test_every_chart_becomes_a_png_and_an_svg(tmp_path: Path) -> None:
    png, svg = write_figures(page_with(CHART), tmp_path / "figures")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text().startswith("<svg")
    assert "loss (nats)" in svg.read_text()


def test_without_a_browser_it_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="needs Chrome or Chromium"):
        write_figures(page_with(CHART), tmp_path)


def test_a_page_without_charts_has_no_figures(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no charts"):
        write_figures(page_with(KeyFigures([])), tmp_path)
