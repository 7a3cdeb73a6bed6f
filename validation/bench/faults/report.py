"""`FaultReport`: what `validation.bench faults` has measured, as JSON and as text."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from validation.bench.faults.run import DisturbedRun, Kill

_PARTS = ("notice", "stop", "start", "join", "build", "load", "evaluate", "step")


@dataclass(frozen=True)
class RunComparison:
    """A run whose ranks were killed, beside the undisturbed run. `planned` is the number of kills that were planned."""

    has_spare: bool
    planned: int
    run: DisturbedRun
    is_bitwise_equal: bool
    leftovers: tuple[str, ...]

    @property
    def lost(self) -> list[Kill]:
        """The kills after which the run went on before the newest checkpoint that it had."""
        return [kill for kill in self.run.kills if kill.resumed is not None and kill.resumed < kill.committed]

    @property
    def is_good(self) -> bool:
        return (
            self.is_bitwise_equal
            and not self.lost
            and not self.leftovers
            and len(self.run.kills) == self.planned == self.run.result["restarts"]
        )

    def summary(self) -> dict[str, Any]:
        seconds = sorted(kill.seconds for kill in self.run.kills if kill.seconds is not None)
        parts = [kill.parts for kill in self.run.kills if kill.parts is not None]
        return {
            "kills": len(self.run.kills),
            "restarts": self.run.result["restarts"],
            "recoveries": len(seconds),
            "recovery_s": median(seconds) if seconds else None,
            "spread": [seconds[0], seconds[-1]] if seconds else None,
            "quartiles": quantiles(seconds)[::2] if len(seconds) > 1 else None,
            "parts_s": {
                part: median(each.get(part, 0.0) for each in parts)
                for part in _PARTS
                if any(part in each for each in parts)
            },
            "lost_steps": sum(kill.committed - (kill.resumed or 0) for kill in self.lost),
            "bitwise_equal": self.is_bitwise_equal,
            "leftovers": list(self.leftovers),
            "spare_memory_bytes": self.run.result["spare_memory_bytes"],
        }


@dataclass(frozen=True)
class FaultReport:
    """The runs of a job, whose plan is described by `plan`, with the spare process and without it."""

    job: str
    plan: str
    ranks: int
    seed: int
    comparisons: tuple[RunComparison, ...]

    @property
    def is_good(self) -> bool:
        """Whether every run made all kills, lost nothing, ended with the weights of the undisturbed one, and left
        nothing behind."""
        return all(comparison.is_good for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"spare": comparison.has_spare, **asdict(kill)}
            for comparison in self.comparisons
            for kill in comparison.run.kills
        ]
        summary = {_name(comparison): comparison.summary() for comparison in self.comparisons}
        about = {"kind": "faults", "job": self.job, "plan": self.plan, "ranks": self.ranks, "seed": self.seed}
        return {**about, "rows": rows, "summary": summary}

    def lines(self) -> Iterator[str]:
        """The report for people."""
        yield f"{self.job} on {self.ranks} ranks ({self.plan}), kills of seed {self.seed}"
        for comparison in self.comparisons:
            yield from _describe(comparison)


def _name(comparison: RunComparison) -> str:
    return "with spare" if comparison.has_spare else "without spare"


def _describe(comparison: RunComparison) -> Iterator[str]:
    summary = comparison.summary()
    yield ""
    yield f"{_name(comparison)}: {summary['kills']} kills of {comparison.planned}, {summary['restarts']} restarts"
    if summary["recovery_s"] is not None:
        low, high = summary["spread"]
        yield (
            f"  from kill to the end of the next step: {summary['recovery_s']:.2f} s (median of"
            f" {summary['recoveries']}, {low:.2f} to {high:.2f} s)"
        )
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in summary["parts_s"].items())
        yield f"  medians of its parts: {parts}"
    memory = summary["spare_memory_bytes"]
    if comparison.has_spare and memory is not None:
        yield f"  memory of the spare process: {memory / 1e6:.0f} MB (train.spare: false does without it)"
    lost = summary["lost_steps"]
    yield f"  committed steps lost: {lost}; final weights: {_equality(comparison)}"
    for line in comparison.leftovers:
        yield f"  left behind: {line}"


def _equality(comparison: RunComparison) -> str:
    return "bitwise those of the undisturbed run" if comparison.is_bitwise_equal else "NOT those of the undisturbed run"
