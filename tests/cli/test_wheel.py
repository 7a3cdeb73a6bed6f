"""The wheel works in an environment outside the repository, where only the dependencies are installed beside it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.zoo_models.configs import write_config

REPOSITORY = Path(__file__).parents[2]


def run(*command: object, folder: Path) -> str:
    """Runs a command and returns what it prints."""
    words = [str(word) for word in command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # no other package
    process = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def meshwright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a new environment in which the wheel is installed. It finds the dependencies where this Python has
    them, but not the package of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("meshwright", "jobs"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    build = ("pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    run(sys.executable, "-m", *build, folder=source)
    shutil.rmtree(source)
    run(sys.executable, "-m", "venv", folder / "environment", folder=folder)
    binaries = folder / "environment" / "bin"
    (wheel,) = folder.glob("*.whl")
    run(binaries / "pip", "install", "--no-deps", "--no-index", wheel, folder=folder)
    (packages,) = (folder / "environment" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return binaries / "meshwright"


@pytest.mark.soak
def test_an_installed_package_has_its_jobs_and_builds_models(meshwright: Path, tmp_path: Path) -> None:
    file = run(meshwright.parent / "python", "-c", "import meshwright; print(meshwright.__file__)", folder=tmp_path)
    assert Path(file.strip()).is_relative_to(meshwright.parents[1])
    assert run(meshwright, "--version", folder=tmp_path) == "meshwright 0.1.0\n"
    listed = json.loads(run(meshwright, "jobs", "--json", folder=tmp_path))["jobs"]
    assert {job["name"] for job in listed} == {file.stem for file in (REPOSITORY / "jobs").glob("*.yaml")}
    steps = ("--cluster", "2xcpu", "--set", "train.steps=20", "--json")
    result = json.loads(run(meshwright, "train", "mnist", *steps, folder=tmp_path).splitlines()[-1])
    assert result["steps"] == 20
    model = f"hf:{write_config(tmp_path, 'llama').name}"
    run(meshwright, "plan", model, "--cluster", "2xH100", "--output", "plan.yaml", folder=tmp_path)
    assert (tmp_path / "plan.yaml").read_text().startswith("axes:")
    run(meshwright, "init", model, folder=tmp_path)
    run(meshwright, "plan", "job.yaml", "--cluster", "2xH100", "--plan", "plan.yaml", folder=tmp_path)
