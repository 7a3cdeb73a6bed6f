"""The digest of the files that decide how a step on one device runs. A figure of a step carries it, so that a reader
sees whether the step is still the one that was measured.

Among them is what builds, compiles, captures and runs the step: precision, the loss and its chunks, the optimizer, CUDA
graphs, blocks that replace modules, and what chooses among these (`best_plan` and tuning). Left out is what a step on
one device does not run: folders of `parallel/` that divide the model or the batch over ranks, and the servers. The
simulator is left out, too: it changes a step only through the plan that is chosen, and a row has its plan.
"""

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "meshwright"
STEP_FILES = (
    "batch.py",
    "dtypes.py",
    "output_trees.py",
    "auto/choose.py",
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
