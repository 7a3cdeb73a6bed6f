"""`Audit`: the result of an audit, which the command line prints and saves as JSON."""

import math
from dataclasses import dataclass
from typing import Any

from meshwright.audit.compare import ComparedTensor, RecordComparison
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
