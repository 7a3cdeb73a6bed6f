"""How large the page of a long run is and how long a browser takes to open it: `python -m validation.speed.page`.

The run is made up: 100,000 steps on 64 ranks. The time counts from the beginning of the navigation, until the charts
that are in view are drawn, and until all charts are drawn. A new window is opened for each of several rounds; the
median and the spread are printed. It needs Chromium and Playwright's Python client.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.report.figures import find_browser
from meshwright.report.page import write_page
from meshwright.report.run.page import run_page
from tests.report.made_up_run import make_run

_FIRST_CHART = ".plot[data-drawn]"
_ALL_CHARTS = "html[data-charts=drawn]"


def open_once(browser: Any, file: Path) -> tuple[float, float]:
    """Returns the seconds until the first chart and until all charts are drawn."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    began = time.perf_counter()
    page.goto(file.as_uri())
    page.wait_for_selector(_FIRST_CHART, state="attached", timeout=120_000)
    first = time.perf_counter() - began
    page.wait_for_selector(_ALL_CHARTS, state="attached", timeout=120_000)
    drawn = time.perf_counter() - began
    page.close()
    return first, drawn


def _text(seconds: list[float]) -> str:
    return f"{median(seconds):.2f} s (from {min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run, file = make_run(Path(folder) / "run", options.ranks, options.steps), Path(folder) / "page.html"
        began = time.perf_counter()
        write_page(run_page(run), file)
        print(
            f"{options.steps:,} steps on {options.ranks} ranks: written in {time.perf_counter() - began:.1f} s,",
            end=" ",
        )
        print(f"{file.stat().st_size / 1e6:.2f} MB")
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        rounds = [open_once(browser, file) for _ in range(options.rounds)]
        browser.close()
    print(f"charts in view are drawn after {_text([first for first, _ in rounds])}, {options.rounds} rounds")
    print(f"all charts are drawn after {_text([drawn for _, drawn in rounds])}")


if __name__ == "__main__":
    main()
