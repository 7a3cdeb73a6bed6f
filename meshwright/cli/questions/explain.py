"""`meshwright explain`: why a run was slower than predicted."""

from pathlib import Path
from time import perf_counter
from typing import Annotated

from meshwright.cli.options import AsJson, check_page, path_argument, path_option
from meshwright.cli.questions.plan_questions import print_answer


def explain(
    run: Annotated[Path, path_argument("RUN", "A run folder that train wrote.")],
    html: Annotated[Path | None, path_option("--html", "FILE", "Write a page with a chart to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain why a run was slower than predicted, rank by rank, from the times that it has recorded: computing,
    exchanging, waiting for other ranks, waiting for data, logging. Nothing of the run is executed."""
    from meshwright.report.run.slower import explain_run

    if html:
        check_page(html)
    begin = perf_counter()
    answer = explain_run(run)
    print_answer(answer, html, run.name, round(perf_counter() - begin, 3), as_json)
