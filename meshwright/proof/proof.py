"""`Proof`: the result of a comparison, which the command line prints and saves as JSON."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.files.storage import output_error, write_atomically
from meshwright.plan import Plan
from meshwright.proof.compare.errors import ComparedValue, Comparison, Difference
from meshwright.train.output.metrics_log import finite_or_none


@dataclass(frozen=True)
class Proof:
    """The result of comparing `steps` training steps under a plan with a reference: one device, or another run.

    `plan` is the plan that ran, on `ranks` ranks. If it is a shrunk version of the user's plan, `shrunk` is a sentence
    that says how its axes were changed; otherwise None. `tolerance_is` is the formula of the tolerance with its
    numbers, as text. `against` is the folder of the run that was taken as right, or None if the one-device reference
    was. `values` are all values that were compared, in the order in which they were. `start` says which weights both
    sides started from: those of the `job` (or of the user's model), or `random` ones.
    """

    plan: Plan
    ranks: int
    device: str
    steps: int
    dtype: str
    comparison: Comparison
    tolerance_is: str
    notes: tuple[str, ...]
    shrunk: str | None = None
    against: str | None = None
    values: tuple[ComparedValue, ...] = ()
    start: str = "job"

    @property
    def equal(self) -> bool:
        """Whether no error is above the tolerance."""
        return self.comparison.first_difference is None

    @property
    def exit_code(self) -> int:
        """The exit code of `meshwright prove`: 0 if the plan and the reference are equal, otherwise 3."""
        return 0 if self.equal else 3

    @property
    def max_relative_error(self) -> float:
        return self.comparison.largest_error

    @property
    def tolerance(self) -> float:
        return self.comparison.tolerance

    @property
    def first_difference(self) -> Difference | None:
        return self.comparison.first_difference

    @property
    def checked(self) -> dict[str, int]:
        """The number of losses, gradients, gradient norms, buffers and weights that were compared, over all steps."""
        counts = self.comparison
        return {
            "losses": counts.losses,
            "gradients": counts.gradients,
            "norms": counts.norms,
            "buffers": counts.buffers,
            "weights": counts.weights,
        }

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that docs/prove.md describes."""
        first = self.first_difference
        return {
            "equal": self.equal,
            "ranks": self.ranks,
            "steps": self.steps,
            "start": self.start,
            "checked": self.checked,
            "max_relative_error": finite_or_none(self.max_relative_error),
            "tolerance": self.tolerance,
            "first_difference": first
            and {
                "step": first.step,
                "what": first.what,
                "parameter": first.parameter,
                "error": finite_or_none(first.error),
                "rank": first.rank,
                "cause": first.cause,
                "explanation": first.explanation,
                "ruled_out": list(first.ruled_out),
                "fitting": [
                    {"cause": item.cause, "explanation": item.explanation, "residual": finite_or_none(item.residual)}
                    for item in first.fitting
                ],
            },
            "tolerance_is": self.tolerance_is,
            "dtype": self.dtype,
            "device": self.device,
            "plan": self.plan.model_dump(mode="json"),
            "summary": self.plan.summary(),
            "shrunk": self.shrunk,
            "against": self.against,
            "notes": list(self.notes),
        }

    def details(self) -> dict[str, Any]:
        """The JSON object that is saved: that of `to_dict`, and every compared value as a row of `compared`."""
        rows = [
            [value.step, value.what, value.parameter, value.rank, finite_or_none(value.error), value.tolerance]
            for value in self.values
        ]
        columns = ["step", "what", "parameter", "rank", "error", "tolerance"]
        return {**self.to_dict(), "kind": "proof", "compared": {"columns": columns, "rows": rows}}


def write_proof(proof: Proof, path: Path) -> Path:
    """Writes the proof with every compared value to a file. Returns the path."""
    write_atomically(path, json.dumps(proof.details(), allow_nan=False))
    return path


def save_proof(proof: Proof, output: Path, name: str) -> Path:
    """Writes the proof to a new numbered file in the folder `output`, such as `runs/mnist-proof-0001.json`. Returns the
    path of the file."""
    number = 1
    try:
        output.mkdir(parents=True, exist_ok=True)
        while True:
            path = output / f"{name}-proof-{number:04d}.json"
            try:
                path.open("x").close()  # takes the name
                break
            except FileExistsError:
                number += 1
    except OSError as error:
        raise output_error(error, output) from None
    try:
        write_proof(proof, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path
