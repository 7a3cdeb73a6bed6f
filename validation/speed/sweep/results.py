"""The results file of a sweep: a row for each model, with the digest of the step's files, the commit, the device and
the version of torch it was measured with."""

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.speed.sweep.forms import BY_HAND, OURS

REPOSITORY = Path(__file__).parents[3]
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What rows have to agree in so that a model is not measured again."""

    device: str
    torch: str
    digest: str
    tiny: bool
    cold: bool

    def covers(self, row: Row) -> bool:
        """Whether the row was measured in this setting. A row with cold caches also stands for one without."""
        same = all(row.get(name) == getattr(self, name) for name in ("device", "torch", "digest", "tiny"))
        return same and (row.get("cold", False) or not self.cold)


def read_rows(file: Path) -> list[Row]:
    return list(json.loads(file.read_text())) if file.exists() else []


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Replaces the file at once, so that an interruption leaves the earlier rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(list(rows), indent=1) + "\n")
    new.replace(file)


def with_row(rows: Iterable[Row], row: Row) -> list[Row]:
    """The rows with this one, which replaces that of the same model on the same device."""
    key = ("model", "device", "tiny")
    return [*(one for one in rows if [one.get(name) for name in key] != [row.get(name) for name in key]), row]


def best_by_hand(row: Row) -> tuple[str, Row] | None:
    """The fastest form by hand and its figures; None if all have failed."""
    forms = {form: row["forms"][form] for form in BY_HAND if "step_s" in row.get("forms", {}).get(form, {})}
    return min(forms.items(), key=lambda item: item[1]["step_s"]) if forms else None


def ours(row: Row) -> Row | None:
    """The figures of ours; None if it has failed."""
    figures: Row = row.get("forms", {}).get(OURS, {})
    return figures if "step_s" in figures else None


def ratio(row: Row) -> float | None:
    """Ours : best by hand."""
    hand, own = best_by_hand(row), ours(row)
    return own["step_s"] / hand[1]["step_s"] if hand and own else None


def current_commit() -> str | None:
    """The commit of the working tree; None without git, or if files of the package are changed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return None if git("status", "--porcelain", "--", "meshwright") else git("rev-parse", "--short=9", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
