"""Writes the files that `meshwright plan` can write besides the plan: its page, and what the page shows as JSON."""

import json
from pathlib import Path

from meshwright.files.storage import write_atomically
from meshwright.planner.explanation.report import PlanReport
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import SearchResult
from meshwright.report.page import write_page
from meshwright.report.plans.details import plan_details
from meshwright.report.plans.page import plan_page


def write_plan_files(
    report: PlanReport,
    result: SearchResult | None,
    inputs: PlanningInputs,
    profiles: Profiles,
    *,
    title: str,
    seconds: float,
    html: Path | None,
    details: Path | None,
) -> None:
    """Writes the page to `html` and the JSON to `details`, each unless it is None."""
    values = plan_details(report, result, inputs, profiles, title=title, seconds=seconds)
    if details is not None:
        write_atomically(details, json.dumps(values))
    if html is not None:
        write_page(plan_page(values), html)
