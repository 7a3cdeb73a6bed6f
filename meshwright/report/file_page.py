"""The page of a file: a plan, a proof, an audit or a benchmark, which is recognized by what the file contains."""

from pathlib import Path
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.files.foreign import UNREADABLE, describe_unreadable, parse_json, read_bytes
from meshwright.job import load_plan
from meshwright.report.audit_page import audit_page
from meshwright.report.benches.page import bench_page, is_bench
from meshwright.report.page import Page
from meshwright.report.plans.page import plan_file_page, plan_page
from meshwright.report.proof_page import proof_page
from meshwright.report.question_page import question_page

_LARGEST_BYTES = 64 * 2**20
_ACCEPTED = (
    "name a run folder, a plan (YAML, or the JSON of `meshwright plan`), or the JSON of `meshwright prove`,"
    " `meshwright audit` or `meshwright bench`"
)


def file_page(path: Path) -> Page:
    """Returns the page of a file. If a command printed it, the JSON object is its last line. Raises an `InputError` if
    the file is none of these."""
    try:
        text = read_bytes(path, _LARGEST_BYTES, follow_link=True).decode()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: this file cannot be read as text ({error}): {_ACCEPTED}") from None
    value = _json_object(text)
    if value is None or "axes" in value:
        try:
            return plan_file_page(load_plan(path, text=text), path.stem)
        except MeshwrightError as error:
            raise InputError(f"{path}: this is no plan ({error}): {_ACCEPTED}") from None
    try:
        return _page(value, path)
    except UNREADABLE as error:
        problem = describe_unreadable(error)
        raise InputError(f"{path}: the JSON is not complete ({problem}): write it again with this version") from None


def _page(value: dict[str, Any], path: Path) -> Page:
    if "comparable" in value and "checked" in value:
        return audit_page(value)
    if "equal" in value and "checked" in value:
        return proof_page(value, path.stem)
    if "question" in value:
        return question_page(value)
    if "best" in value and "ranked" in value:
        return plan_page(value)
    if is_bench(value):
        return bench_page(value, path.stem)
    fields = ", ".join(list(value)[:8]) or "no fields"
    raise InputError(
        f"{path}: this JSON has {fields}, which is neither a plan nor a proof, audit or benchmark: {_ACCEPTED}"
    )


def _json_object(text: str) -> dict[str, Any] | None:
    """The object that the text, or its last line, is; None if neither is one."""
    lines = text.strip().splitlines()
    for candidate in (text, lines[-1] if lines else ""):
        try:
            value = parse_json(candidate)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None
