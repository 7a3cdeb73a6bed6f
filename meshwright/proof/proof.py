"""`Proof`: what a comparison found, as the command line's JSON has it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.compare.errors import Comparison, Difference
from meshwright.train.output.metrics_log import finite


@dataclass(frozen=True)
class Proof:
    """`plan` is what ran, on `ranks` ranks; `shrunk` says what it was made smaller from. `derived` is how the tolerance
    came about, `against` the run that it was held against instead of one device. Equal is: no difference above the
    tolerance."""

    plan: Plan
    ranks: int
    device: str
    steps: int
    dtype: str
    comparison: Comparison
    derived: str
    notes: tuple[str, ...]
    shrunk: str | None = None
    against: str | None = None

    @property
    def equal(self) -> bool:
        return self.comparison.first is None

    @property
    def exit_code(self) -> int:
        """Of the command line."""
        return 0 if self.equal else 3

    @property
    def max_relative_error(self) -> float:
        return self.comparison.worst

    @property
    def tolerance(self) -> float:
        return self.comparison.tolerance

    @property
    def first_difference(self) -> Difference | None:
        return self.comparison.first

    @property
    def checked(self) -> dict[str, int]:
        """How many losses and tensors were compared, over all steps."""
        seen = self.comparison
        return {
            "losses": seen.losses,
            "gradients": seen.gradients,
            "norms": seen.norms,
            "buffers": seen.buffers,
            "weights": seen.weights,
        }

    def to_dict(self) -> dict[str, Any]:
        first = self.first_difference
        return {
            "equal": self.equal,
            "ranks": self.ranks,
            "steps": self.steps,
            "checked": self.checked,
            "max_relative_error": finite(self.max_relative_error),
            "tolerance": self.tolerance,
            "first_difference": first
            and {
                "step": first.step,
                "what": first.what,
                "parameter": first.parameter,
                "error": finite(first.error),
                "rank": first.rank,
                "cause": first.cause,
                "explanation": first.explanation,
                "ruled_out": list(first.ruled_out),
            },
            "tolerance_is": self.derived,
            "dtype": self.dtype,
            "device": self.device,
            "plan": self.plan.model_dump(mode="json"),
            "summary": self.plan.summary(),
            "shrunk": self.shrunk,
            "against": self.against,
            "notes": list(self.notes),
        }


def save(proof: Proof, output: Path, name: str) -> Path:
    """Beside the runs of that name, each proof a file of its own: `runs/mnist-proof-0001.json`."""
    text = json.dumps(proof.to_dict(), indent=1)
    number = 1
    try:
        output.mkdir(parents=True, exist_ok=True)
        while True:
            path = output / f"{name}-proof-{number:04d}.json"
            try:
                with path.open("x") as file:
                    file.write(text)
                return path
            except FileExistsError:
                number += 1
    except OSError as error:
        raise InputError(f"output: cannot write in '{output}': {error.strerror}") from None
