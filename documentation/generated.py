"""All generated files of `docs/`."""

from collections.abc import Mapping
from pathlib import Path

from documentation.drawings.files import drawing_files
from documentation.reference.command_line import command_line_page
from documentation.reference.fields import cluster_page, job_page, plan_page
from documentation.reference.python_api import python_page
from documentation.reference.rules import rules_page


def generated_files() -> dict[str, str]:
    """The text of each generated file, by its path in `docs/`."""
    return {
        "reference/command_line.md": command_line_page(),
        "reference/job.md": job_page(),
        "reference/plan.md": plan_page(),
        "reference/cluster.md": cluster_page(),
        "reference/rules.md": rules_page(),
        "reference/python.md": python_page(),
        **drawing_files(),
    }


def stale_files(docs: Path, files: Mapping[str, str]) -> list[str]:
    """The names of generated files that are missing, differ from `files`, or are made no longer."""
    stale = [name for name, text in files.items() if not (docs / name).is_file() or (docs / name).read_text() != text]
    folders = {Path(name).parent for name in files}
    present = {str(file.relative_to(docs)) for folder in folders for file in (docs / folder).iterdir()}
    return sorted([*stale, *(present - set(files))])
