"""The seconds of processors that tests have used when they were last measured (seconds.json).

`pytest --keep-costs tests/selection/seconds.json` measures again the tests that it runs. Those that use less than
`LEAST_S` are not in the file, as new ones are not."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

MEASURED = Path(__file__).with_name("seconds.json")
LEAST_S = 0.3


@cache
def measured_s() -> dict[str, float]:
    """The seconds by test, with the names that pytest gives them."""
    return _read(MEASURED)


def keep_s(file: Path, seconds: Mapping[str, float]) -> None:
    """Writes the seconds of tests into a file, in place of those of the same tests that are in it."""
    kept = {**(_read(file) if file.exists() else {}), **seconds}
    by_file: dict[str, dict[str, float]] = {}
    for name, used in sorted(kept.items()):
        path, _, function = name.partition("::")
        if used >= LEAST_S:
            by_file.setdefault(path, {})[function] = round(used, 1)
    file.write_text(json.dumps(by_file, indent=0) + "\n")


def _read(file: Path) -> dict[str, float]:
    by_file = json.loads(file.read_text())
    return {f"{path}::{name}": seconds for path, names in by_file.items() for name, seconds in names.items()}
