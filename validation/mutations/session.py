"""The process in which the tests of a room are collected once, and which forks one process for each change.

It runs in a copy of the repository. A change is written to the file, for programs that tests start, and put into the
functions that are imported, for the tests and the ranks that they fork. What is no part of a function is imported
again, by a process that has imported only torch.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import count
from os import utime
from pathlib import Path
from typing import Any

import pytest

from validation.mutations.lines import Cover, LineRecord
from validation.mutations.patch import can_replace, functions_of, replace
from validation.mutations.processes import adopt_orphans, fork, fork_ranks_from_here, wait
from validation.mutations.reports import Reporter, Timer, append, rows_of, watch
from validation.mutations.sites import ROOMS, Mutant

_NEITHER = ["-m", "not soak", "-n", "0", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-q"]
_IMPORT_S = 60  # for a process that imports the package again
_times = count(1_000_000_000)  # of files: Python compiles a file again whose time has changed


@dataclass
class Settings:
    """`tests` are what pytest collects; `cover`, `results` are files; `limit_s` is what the tests of a change may take
    without it."""

    room: str
    tests: list[str]
    mutants: list[Mutant]
    cover: str
    results: str
    limit_s: float

    def remaining(self) -> list[Mutant]:
        """Returns the changes without a row with these tests."""
        tried = {mutant_of(row) for row in rows_of(Path(self.results)) if row["of"] == self.tests}
        return [mutant for mutant in self.mutants if mutant not in tried]


def mutant_of(row: dict[str, Any]) -> Mutant:
    values = {field.name: row[field.name] for field in fields(Mutant)}
    return Mutant(**{**values, "statement": tuple(row["statement"])})


class Session:
    """A plugin of pytest that runs the collected tests for each change instead of once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cover_file, self._results = Path(settings.cover), Path(settings.results)
        self._repository = Path.cwd()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not self._cover_file.exists():
            self._measure(session)
        cover = Cover.read(self._cover_file)
        functions = functions_of(str(self._repository / ROOMS[self._settings.room]))
        items = {item.nodeid: item for item in session.items}
        for mutant in self._settings.remaining():
            tests = [test for test in choose_tests(mutant, cover, self._settings.limit_s) if test in items]
            path = str(self._repository / mutant.file)
            with _written(mutant, Path(path)) as source:
                if not can_replace(functions, mutant, source, path):
                    continue  # for `import_changes`
                report = _new_report(self._results)

                started = time.monotonic()
                change = partial(replace, functions, source, path)
                run = partial(_run, session, Reporter(report), [items[test] for test in tests], change)
                outcome = watch(fork(run), report, cover.seconds)
            _record(self._settings, mutant, tests, outcome, started)
        return True

    def _measure(self, session: pytest.Session) -> None:
        """Writes which test runs which line."""
        files = sorted((self._repository / ROOMS[self._settings.room]).rglob("*.py"))
        record = LineRecord(files, len(session.items))
        numbers = {item.nodeid: number for number, item in enumerate(session.items)}
        outcomes = self._cover_file.with_suffix(".tests")
        outcomes.unlink(missing_ok=True)

        wait(fork(partial(_run, session, Timer(outcomes, numbers, record), session.items, record.start)))
        cover = Cover()
        for test, outcome, seconds in rows_of(outcomes):
            if outcome == "passed":
                cover.add(test, seconds, record.lines_of(numbers[test], self._repository))
            else:
                print(f"{outcome} without a change: {test}", flush=True)
        cover.write(self._cover_file)


def choose_tests(mutant: Mutant, cover: Cover, limit_s: float) -> list[str]:
    return cover.cheapest_first(cover.tests_that_run(mutant.file, mutant.statement), limit_s)


def import_changes(settings: Settings) -> None:
    """Tries the changes that no function of the session has, with one import of the package for each."""
    results = Path(settings.results)
    cover = Cover.read(Path(settings.cover))
    for mutant in settings.remaining():
        tests = choose_tests(mutant, cover, settings.limit_s)
        report = _new_report(results)
        with _written(mutant, Path.cwd() / mutant.file):
            started = time.monotonic()
            process = fork(partial(pytest.main, [*_NEITHER, *tests], [Reporter(report, forks_ranks=True)]))
            outcome = watch(process, report, cover.seconds, _IMPORT_S)
        _record(settings, mutant, tests, outcome, started)


@contextmanager
def _written(mutant: Mutant, path: Path) -> Iterator[str]:
    original = path.read_text()
    source = mutant.apply(original)
    try:
        _write(path, source)
        yield source
    finally:
        _write(path, original)


def _write(path: Path, source: str) -> None:
    path.write_text(source)
    seconds = next(_times)
    utime(path, (seconds, seconds))


def _run(session: pytest.Session, plugin: object, items: Sequence[pytest.Item], prepare: Callable[[], None]) -> None:
    """Runs tests in a process that is forked for it."""
    from _pytest.main import pytest_runtestloop

    prepare()
    session.items[:] = items
    session.config.pluginmanager.register(plugin)
    capture: Any = session.config.pluginmanager.getplugin("capturemanager")
    capture.read_global_capture()  # what a process wrote that was stopped
    fork_ranks_from_here()
    pytest_runtestloop(session)
    session.config.hook.pytest_sessionfinish(session=session, exitstatus=0)


def _new_report(results: Path) -> Path:
    report = results.with_suffix(".report")
    report.unlink(missing_ok=True)
    return report


def _record(settings: Settings, mutant: Mutant, tests: Sequence[str], outcome: dict[str, Any], started: float) -> None:
    seconds = round(time.monotonic() - started, 1)
    row = {"room": settings.room, **asdict(mutant), "of": settings.tests, "tests": len(tests), **outcome}
    append(Path(settings.results), {**row, "seconds": seconds})
    print(f"{row['outcome']} {mutant.file}:{mutant.line} {mutant.kind}: {seconds} s", flush=True)


def main() -> None:
    values = json.loads(Path(sys.argv[1]).read_text())
    settings = Settings(**{**values, "mutants": list(map(mutant_of, values["mutants"]))})
    adopt_orphans()
    import torch  # for all processes that are forked from this one

    torch.set_num_threads(1)
    wait(fork(partial(pytest.main, [*_NEITHER, *settings.tests], [Session(settings)])))
    import_changes(settings)


if __name__ == "__main__":
    main()
