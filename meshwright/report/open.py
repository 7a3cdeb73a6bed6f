"""`page_of`: the page of whatever a path names."""

from pathlib import Path

from meshwright.errors import InputError
from meshwright.report.file_page import file_page
from meshwright.report.page import Page
from meshwright.report.run.page import run_page


def page_of(path: Path) -> Page:
    """Returns the page of a run folder, or of a file with a plan, a proof or a benchmark. Raises an `InputError` for
    other paths."""
    if path.is_dir():
        return run_page(path)
    if not path.exists():
        raise InputError(f"{path}: there is no such file or folder: name a run folder that `train` wrote")
    return file_page(path)


def default_output(path: Path) -> Path:
    """Returns the file that a page is written to if the user names none."""
    return path / "report.html" if path.is_dir() else path.with_suffix(".html")
