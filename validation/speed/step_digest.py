"""The digest of the files that decide how a step on one device runs. A figure of a step carries it, so that a reader
sees whether the step is still the one that was measured.

Among them is what builds, compiles, captures and runs the step: precision, the loss and its chunks, the optimizer, CUDA
graphs, blocks that replace modules, and what chooses among these (`best_plan` and tuning). Left out is what a step on
one device does not run: folders of `parallel/` that divide the model or the batch over ranks, and the servers. The
simulator is left out, too: it changes a step only through the plan that is chosen, and a row has its plan.
"""

import hashlib
import json
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "meshwright"
STEP_FILES = (
    "model_io/batch.py",
    "dtypes.py",
    "model_io/output_trees.py",
    "auto/choose.py",
    "auto/decide.py",
    "blocks/**/*.py",
    "parallel/*.py",
    "parallel/chunked_loss/**/*.py",
    "parallel/weights/**/*.py",
    "planner/compute_variants.py",
    "planner/measured_search.py",
    "profile/grouped_products.py",
    "train/session.py",
    "train/parallelize.py",
    "train/step_runner.py",
    "train/torch_private.py",
    "train/loss/**/*.py",
    "train/step/**/*.py",
    "train/tuning/**/*.py",
)
LENGTH = 12
TABLE = Path(__file__).with_name("sweep") / "h200.json"


def step_files(package: Path = PACKAGE) -> list[Path]:
    """The files, in the order of their paths."""
    return sorted({file for pattern in STEP_FILES for file in package.glob(pattern)})


def step_digest(package: Path = PACKAGE) -> str:
    """The beginning of the SHA-256 digest over the paths and the contents of the files."""
    digest = hashlib.sha256()
    for file in step_files(package):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:LENGTH]


def table_state(table: Path = TABLE, package: Path = PACKAGE) -> str | None:
    """A line that says which models of the table were measured with other files of the step; None if there are none."""
    present = step_digest(package)
    rows = json.loads(table.read_text()) if table.exists() else []
    old = [row for row in rows if row["digest"] != present]
    if rows and not old:
        return None
    state = (
        "has no rows yet"
        if not rows
        else f"was measured with other files of the step ({len(old)} of {len(rows)} models)"
    )
    return (
        f"The digest of the step's files is {present}; the table of docs/performance.md {state}: see CONTRIBUTING.md."
    )
