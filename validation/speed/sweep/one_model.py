"""Measures one model in all its forms.

Forms by hand are measured first, each in three rounds in a row. The fastest, and those within a tenth of it, then take
turns with ours in three rounds, whose medians replace theirs; the others end before ours begins, so that their memory
is free. A form that does not fit beside the others is measured alone.

With `cold`, by hand and ours begin with empty caches, one after the other, so that the times to the first steps can
be compared. Otherwise the forms by hand compile at the same time, and ours finds their kernels in the cache.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from validation.speed.sweep.case import ModelCase
from validation.speed.sweep.form_process import Failure, FormOptions, FormProcess, is_out_of_memory
from validation.speed.sweep.forms import BY_HAND, OURS

ROUNDS = 3
CONTENDER = 1.1  # forms by hand up to this factor slower than the fastest are measured in turns with ours
_ROUND_LIMIT_S = 60.0


@dataclass(frozen=True)
class Limits:
    """`form_s` is the time that a form has until it is ready, beyond `tune_s` for ours. `until`, a time of
    `time.monotonic`, ends the whole call."""

    form_s: float
    until: float

    def of_form(self, more_s: float = 0.0) -> float:
        return min(self.until, time.monotonic() + self.form_s + more_s)

    def of_round(self) -> float:
        return min(self.until, time.monotonic() + _ROUND_LIMIT_S)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until


def measure_model(
    case: ModelCase, options: FormOptions, limits: Limits, *, cold: bool
) -> dict[str, dict[str, Any]] | None:
    """The figures of each form, or the reason why it has none. None if the call's time was over before the end."""
    measured: dict[str, dict[str, Any]] = {}
    alive: dict[str, FormProcess] = {}
    with tempfile.TemporaryDirectory(prefix="sweep-hand-") as hand, tempfile.TemporaryDirectory(prefix="sweep-") as own:
        try:
            hand_options = replace(options, cache=Path(hand)) if cold else options
            _measure_by_hand(case, hand_options, limits, measured, alive, one_by_one=cold or options.device == "cpu")
            _end_losers(measured, alive)
            ours_options = replace(options, cache=Path(own)) if cold else options
            _measure_ours(case, ours_options, limits, measured, alive)
        finally:
            _end_all(alive)
    return None if limits.is_over else measured


def _measure_by_hand(
    case: ModelCase,
    options: FormOptions,
    limits: Limits,
    measured: dict[str, dict[str, Any]],
    alive: dict[str, FormProcess],
    *,
    one_by_one: bool,
) -> None:
    groups = [[form] for form in BY_HAND] if one_by_one else [list(BY_HAND)]
    for group in groups:
        started = {form: FormProcess(case, form, options) for form in group}
        until = limits.of_form()
        for form, process in started.items():
            _note_ready(form, process, until, measured, alive)
        for form in group:
            if form in alive:
                _take_turns([form], limits, measured, alive)
    for form in [form for form in BY_HAND if is_out_of_memory(measured[form].get("failure", ""))]:
        _end_all(alive)
        _note_ready(form, FormProcess(case, form, options), limits.of_form(), measured, alive)
        if form in alive:
            _take_turns([form], limits, measured, alive)


def _note_ready(
    form: str, process: FormProcess, until: float, measured: dict[str, dict[str, Any]], alive: dict[str, FormProcess]
) -> None:
    """Waits for a form, and writes its facts or its failure."""
    answer = process.wait(until)
    if isinstance(answer, Failure):
        measured[form] = {"failure": answer.reason}
    else:
        measured[form], alive[form] = answer, process


def _end_all(alive: dict[str, FormProcess]) -> None:
    for form in list(alive):
        alive.pop(form).end()


def _end_losers(measured: Mapping[str, dict[str, Any]], alive: dict[str, FormProcess]) -> None:
    fastest = min((measured[form]["step_s"] for form in alive), default=0.0)
    for form in [form for form in alive if measured[form]["step_s"] > CONTENDER * fastest]:
        alive.pop(form).end()


def _measure_ours(
    case: ModelCase,
    options: FormOptions,
    limits: Limits,
    measured: dict[str, dict[str, Any]],
    alive: dict[str, FormProcess],
) -> None:
    tune_s = 60.0 if options.tune_s is None else options.tune_s
    _note_ready(OURS, FormProcess(case, OURS, options), limits.of_form(tune_s), measured, alive)
    if alive and is_out_of_memory(measured[OURS].get("failure", "")):
        _end_all(alive)
        _note_ready(OURS, FormProcess(case, OURS, options), limits.of_form(tune_s), measured, alive)
    if OURS in alive:
        _take_turns(list(alive), limits, measured, alive)


def _take_turns(
    forms: list[str], limits: Limits, measured: dict[str, dict[str, Any]], alive: dict[str, FormProcess]
) -> None:
    """Times rounds of the forms in turns, and writes their medians and spreads. A form by hand whose process ends keeps
    the figures of its earlier rounds."""
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for number in range(ROUNDS):
        for form in forms if number % 2 == 0 else forms[::-1]:
            if form not in alive:
                continue
            answer = alive[form].round(limits.of_round())
            if isinstance(answer, Failure):
                del alive[form]
                if "spread" in measured[form]:
                    measured[form]["failure_in_turns"] = answer.reason
                else:
                    measured[form] = {"failure": answer.reason}
            else:
                seconds[form].append(answer["step_s"])
    for form, times in seconds.items():
        if len(times) == ROUNDS:
            step_s = median(times)
            measured[form] |= {"step_s": step_s, "spread": (max(times) - min(times)) / step_s}
