"""`meshwright report`: one HTML file with charts of a run, and its figures and traces."""

import json
from pathlib import Path
from typing import Annotated, Any

from meshwright.cli.options import AsJson, check_output, path_argument, path_option
from meshwright.report.plotly_script import check_plotly


def report(
    source: Annotated[Path, path_argument("RUN|FILE", "A run folder, or a file that plan, prove or bench wrote.")],
    output: Annotated[
        Path | None,
        path_option("--output", "FILE", "The HTML file to write; by default report.html in the run folder."),
    ] = None,
    figures: Annotated[
        Path | None,
        path_option("--figures", "DIR", "Write every chart as PNG and SVG in this folder; needs Chrome or Chromium."),
    ] = None,
    trace: Annotated[
        Path | None,
        path_option("--trace", "FILE", "Write a trace of profiled steps, or of the predicted step, for Perfetto."),
    ] = None,
    memory_snapshot: Annotated[
        Path | None,
        path_option("--memory-snapshot", "FILE", "Write the memory snapshot of profiled steps on a GPU."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page about a run: loss, throughput, where the time of every rank goes, memory, prediction, plan; or about
    a plan, a proof or a benchmark. It is one file, which opens without a network."""
    from meshwright.report.open import default_output, page_of
    from meshwright.report.page import write_page

    check_plotly()
    file = output or default_output(source)
    for path in (output, trace, memory_snapshot):
        if path is not None:
            check_output(path)
    page = page_of(source)
    written: dict[str, Any] = {}
    if figures is not None:
        from meshwright.report.figures import write_figures

        written["figures"] = [str(path) for path in write_figures(page, figures)]
    if trace is not None:
        from meshwright.report.trace import write_run_trace

        written["trace"] = str(write_run_trace(source, trace))
    if memory_snapshot is not None:
        from meshwright.report.trace import copy_memory_snapshot

        written["memory_snapshot"] = str(copy_memory_snapshot(source, memory_snapshot))
    write_page(page, file)
    if as_json:
        print(json.dumps({"html": str(file.resolve()), **written}), flush=True)
        return
    print(f"{file} ({file.stat().st_size / 1e6:.1f} MB): open it in a browser", flush=True)
    for name, value in written.items():
        paths = value if isinstance(value, list) else [value]
        print("\n".join(f"{name.replace('_', ' ')}: {path}" for path in paths), flush=True)
