"""`Audit`: the result of an audit, which the command line prints and saves as JSON."""

import math
from dataclasses import dataclass
from typing import Any

from meshwright.audit.comparison.compare import ComparedTensor, RecordComparison
from meshwright.audit.evidence import Difference, Explained
from meshwright.audit.recorded_run import RecordedRun

NOT_COMPARABLE = 4


@dataclass(frozen=True)
class Audit:
    """The comparison of two recorded trainings.

    `samples` says in which way both did not see the same samples, or None: then they are comparable. `explained` is the
    cause of the first difference. `only_reference` and `only_candidate` are parameters without a counterpart,
    `not_compared` those of which no rank recorded some part."""

    ranks: tuple[int, int]
    steps: int
    device: str
    dtypes: tuple[str, ...]
    values: tuple[ComparedTensor, ...]
    first_difference: Difference | None
    differences: tuple[Difference, ...]
    explained: Explained | None
    samples: str | None
    only_reference: tuple[str, ...]
    only_candidate: tuple[str, ...]
    not_compared: tuple[str, ...]
    notes: tuple[str, ...]
    layouts: tuple[str, ...]
    reference: str = ""
    candidate: str = ""
    start: str = "own"
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        reference: RecordedRun,
        candidate: RecordedRun,
        comparison: RecordComparison,
        samples: str | None,
        explained: Explained | None,
    ) -> "Audit":
        names = reference.parameters.keys(), candidate.parameters.keys()
        first = comparison.first
        return cls(
            ranks=(reference.world_size, candidate.world_size),
            steps=comparison.steps,
            device=candidate.ranks[0].header["device"],
            dtypes=tuple(sorted(reference.dtypes | candidate.dtypes)),
            values=tuple(comparison.values),
            first_difference=first,
            differences=tuple(comparison.differences),
            explained=explained,
            samples=samples,
            only_reference=tuple(name for name in names[0] if name not in names[1]),
            only_candidate=tuple(name for name in names[1] if name not in names[0]),
            not_compared=tuple(comparison.not_compared),
            notes=(*reference.notes(), *candidate.notes()),
            layouts=_layouts(candidate),
        )

    @property
    def comparable(self) -> bool:
        return self.samples is None

    @property
    def equal(self) -> bool:
        return self.comparable and self.first_difference is None and not (self.only_reference or self.not_compared)

    @property
    def exit_code(self) -> int:
        """0 if both trained the same, 3 if they differ, 4 if they did not see the same samples."""
        if not self.comparable:
            return NOT_COMPARABLE
        return 0 if self.equal else 3

    @property
    def checked(self) -> dict[str, int]:
        """How many gradients, norms, buffers and weights were compared, over all steps."""
        kinds = {"gradient": "gradients", "norm": "norms", "clipped gradient": "clipped_gradients"}
        kinds |= {"buffer": "buffers", "weight": "weights", "start": "initial_weights"}
        counts = dict.fromkeys(kinds.values(), 0)
        for value in self.values:
            if value.what in kinds:
                counts[kinds[value.what]] += 1
        return counts

    @property
    def max_relative_error(self) -> float:
        return max((value.error for value in self.values if value.what == "gradient"), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that docs/how_to/audit.md describes."""
        first = self.first_difference
        return {
            "equal": self.equal,
            "comparable": self.comparable,
            "samples": self.samples,
            "ranks": {"reference": self.ranks[0], "candidate": self.ranks[1]},
            "steps": self.steps,
            "start": self.start,
            "checked": self.checked,
            "max_relative_error": _finite(self.max_relative_error),
            "first_difference": first and self._described(first),
            "only_reference": list(self.only_reference),
            "only_candidate": list(self.only_candidate),
            "not_compared": list(self.not_compared),
            "notes": list(self.notes),
            "layouts": list(self.layouts),
            "dtypes": list(self.dtypes),
            "device": self.device,
            "reference": self.reference,
            "candidate": self.candidate,
            "seconds": round(self.seconds, 1),
        }

    def __str__(self) -> str:
        rows = self.readable_rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.headline, *(f"{name:{width}}  {text}" for name, text in rows)])

    @property
    def headline(self) -> str:
        """One line: whether both train the same, and the first difference."""
        if not self.comparable:
            return "Not comparable: the two commands did not train on the same samples"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        ranks = "1 rank" if self.ranks[1] == 1 else f"{self.ranks[1]} ranks"
        if self.equal:
            return f"Equal: the candidate on {ranks} trains as the reference does, {steps} compared"
        first = self.first_difference
        if first is None:
            return "Not equal: some parameters could not be compared"
        value = f"{first.what} of {first.name}" if first.name else f"gradient {first.what}"
        when = f"after step {first.step}" if first.what in ("weight", "buffer") else f"in step {first.step}"
        when = "before the first step" if first.step == 0 else when
        places = _places("row", first.rows) + _places("rank", first.ranks if self.ranks[1] > 1 else ())
        return f"Not equal: the {value}{places} {when} is {first.error:.2e} off"

    def readable_rows(self) -> list[tuple[str, str]]:
        """What stands below the headline: pairs of a title and a text."""
        checked = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in self.checked.items() if count)
        rows = [
            ("compared", checked),
            ("computed in", ", ".join(self.dtypes)),
            ("largest relative error of a gradient", f"{self.max_relative_error:.2e}"),
        ]
        if self.samples:
            rows.append(("samples", self.samples))
        if self.explained:
            cause = self.explained.cause.replace("_", " ")
            rows.append(("cause", f"{cause}: {self.explained.explanation}"))
        if self.comparable and len(self.differences) > 1:
            first = self.differences[0]
            same = [item.name for item in self.differences[1:] if item.what == first.what and item.name]
            rows.append(("also differ", _list(same) if same else f"{len(self.differences) - 1} later values"))
        for title, names in (
            ("only in the reference", self.only_reference),
            ("only in the candidate", self.only_candidate),
            ("recorded only in part", self.not_compared),
        ):
            if names:
                rows.append((title, _list(list(names))))
        rows.append(("layouts", ", ".join(self.layouts)))
        return rows + [("note" if number == 0 else "", note) for number, note in enumerate(self.notes)]

    def _described(self, first: Difference) -> dict[str, Any]:
        explained = self.explained
        return {
            "step": first.step,
            "what": first.what,
            "parameter": first.name,
            "error": _finite(first.error),
            "allowed": _finite(first.allowed),
            "ranks": list(first.ranks),
            "rows": list(first.rows),
            "cause": explained and explained.cause,
            "explanation": explained and explained.explanation,
            "ruled_out": list(explained.ruled_out) if explained else [],
        }

    def details(self) -> dict[str, Any]:
        """The JSON object that is saved: that of `to_dict`, and every compared value as a row of `compared`."""
        rows = [
            [value.step, value.what, value.name, _finite(value.error), _finite(value.ratio)] for value in self.values
        ]
        columns = ["step", "what", "parameter", "error", "of_allowed"]
        return {**self.to_dict(), "kind": "audit", "compared": {"columns": columns, "rows": rows}}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _layouts(run: RecordedRun) -> tuple[str, ...]:
    """How the layouts of the candidate's parameters are known, with how many there are of each kind."""
    counts: dict[str, int] = {}
    for entry in run.parameters.values():
        counts[entry["layout"]] = counts.get(entry["layout"], 0) + 1
    return tuple(f"{layout}: {count}" for layout, count in counts.items())


def _places(word: str, numbers: tuple[int, ...], most: int = 6) -> str:
    if not numbers:
        return ""
    listed = ", ".join(map(str, numbers[:most])) + (", …" if len(numbers) > most else "")
    return f" on {word}{'s' if len(numbers) > 1 else ''} {listed}"


def _list(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
