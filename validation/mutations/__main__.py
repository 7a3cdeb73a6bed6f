"""`python -m validation.mutations --room parallel --count 50 --seed 1 --results FILE` changes a room of the package in
50 places, one at a time in a copy of the repository, and writes whether a test that runs the line fails.

Changes that have a row in FILE are not tried again, so that a call that was stopped is continued by the next one.
`--again` tries those again that survived, with the `--tests` that are given. `--table` prints the rows, counted.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from validation.mutations.reports import rows_of
from validation.mutations.session import Settings, mutant_of
from validation.mutations.sites import ROOMS, draw

REPOSITORY = Path(__file__).parents[2]
TESTS = {
    "parallel": ["tests/parallel"],
    "step": ["tests/train/step", "tests/train/test_session.py"],
    "planner": ["tests/planner"],
    "collectives": ["tests/collectives"],
}


def main() -> None:
    options = _parse()
    results = Path(options.results).resolve()
    if options.table:
        print(table(rows_of(results)))
        return
    mutants = draw(REPOSITORY, options.room, options.count, options.seed)
    if options.again:
        rows = last_rows(rows_of(results))
        mutants = [mutant_of(row) for row in rows if row["room"] == options.room and row["outcome"] == "survived"]
    tests = options.tests or TESTS[options.room]
    name = "-".join(test.removeprefix("tests/").replace("/", ".") for test in tests)
    cover = results.with_name(f"{results.stem}.{options.room}.{name}"[:200] + ".cover")
    settings = Settings(options.room, tests, mutants, str(cover), str(results), options.limit)
    sys.exit(run(settings))


def run(settings: Settings) -> int:
    """Runs the session in a copy of the repository, whose temporary files end with it."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder, copy = Path(name), Path(name) / "copy"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        for file in filter(None, listed.stdout.split("\0")):
            if (REPOSITORY / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / file, copy / file)
        (folder / "settings.json").write_text(json.dumps(asdict(settings)))
        (folder / "temporary").mkdir()
        variables = {**os.environ, "PYTHONPATH": str(copy), "TMPDIR": str(folder / "temporary")}
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "validation.mutations.session", str(folder / "settings.json")]
        return subprocess.run(command, cwd=copy, env=variables, check=False).returncode


def last_rows(rows: Iterable[Any]) -> list[Any]:
    """Returns the last row of each change."""
    return list({mutant_of(row): row for row in rows}.values())


def table(rows: Iterable[Any]) -> str:
    """Returns a line for each room and each change that survived."""
    last = last_rows(rows)
    lines = []
    for room in ROOMS:
        mine = [row for row in last if row["room"] == room]
        survived = [row for row in mine if row["outcome"] == "survived"]
        lines.append(f"{room:12} {len(mine):4} tried, {len(mine) - len(survived):4} noticed")
        for row in survived:
            lines.append(f"    {row['file']}:{row['line']} {row['kind']}: {row['old']!r} -> {row['new']!r}")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m validation.mutations", description=__doc__)
    parser.add_argument("--room", choices=ROOMS, default="collectives")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", default="mutations.jsonl")
    parser.add_argument("--tests", nargs="+", help="files and folders of tests, instead of those of the room")
    parser.add_argument("--again", action="store_true", help="only changes that survived")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of the tests of one change, without it")
    parser.add_argument("--table", action="store_true", help="print the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
