"""The public names of `import meshwright`, and that torch is imported only when it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.errors import did_you_mean

MNIST = Path(meshwright.__file__).parent.parent / "jobs" / "mnist.yaml"


@pytest.mark.parametrize(
    "code",
    [
        "import meshwright; meshwright.Plan(); meshwright.Job",
        f"import meshwright; assert meshwright.load_job({str(MNIST)!r}).train.epochs == 3",
        "import sys; sys.argv = ['meshwright', '--help']\n"
        "from meshwright.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code",
        "import sys; sys.argv = ['meshwright', 'train', '--help']\n"
        "from meshwright.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code",
    ],
    ids=["import", "load a job", "--help", "train --help"],
)
def test_torch_and_doors_are_not_imported_before_they_are_needed(code: str) -> None:
    check_imports = "\nimport sys\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    check_imports += "\nassert not [name for name in sys.modules if name.startswith('meshwright.compat.')]"
    process = subprocess.run([sys.executable, "-c", code + check_imports], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr


def test_help_names_the_commands_and_options() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "meshwright", "train", "--help"], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0
    for word in ("JOB", "--plan", "--cluster", "--resume", "--set", "--json"):
        assert word in process.stdout


def test_every_public_name_can_be_loaded() -> None:
    for name in meshwright.__all__:
        assert getattr(meshwright, name) is not None
    with pytest.raises(AttributeError, match="'paralelize'"):
        _ = meshwright.paralelize


def test_the_nearest_known_name_is_offered() -> None:
    assert did_you_mean("epoch", ["steps", "epochs"]) == ": did you mean 'epochs'?"
    assert did_you_mean("Adamw", ["Adam", "AdamW"]) == ": did you mean 'AdamW'?"
    assert did_you_mean("zzz", ["b", "a"]) == ": known are a, b"
    assert did_you_mean("zzz", []) == ""


def test_dir_lists_the_public_names() -> None:
    assert {"best_plan", "parallelize", "prove"} <= set(dir(meshwright))
