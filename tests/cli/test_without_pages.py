"""What `pip install meshwright` brings is enough to plan, prove and train. Pages and the events of TensorBoard need the
extra `pages`, and one line says so."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HIDDEN = ("plotly", "narwhals", "tensorboard")
MNIST = ("mnist", "--set", "data.train.limit=64", "--set", "data.eval.limit=64", "--set", "train.global_batch=16")
TWO_REPLICAS = ("--set", "plan={axes: {replicate: 2}}", "--cluster", "2xcpu")
NO_PAGE = "meshwright: pages need the package plotly (No module named 'plotly'): pip install \"meshwright[pages]\"\n"
NO_EVENTS = "log.tensorboard: no events are written (No module named 'tensorboard'): pip install"
HIDE = f"""
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
hidden = lambda name, *others: None if name.partition(".")[0] in {HIDDEN} else find_spec(name, *others)
PathFinder.find_spec = staticmethod(hidden)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in whose commands, and in the processes that they start, these packages are not installed."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text(HIDE)
    return folder


def run(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}
    command = [sys.executable, "-m", "meshwright", *words]
    ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=250)
    assert ended.returncode == code, ended.stderr
    return ended


def test_a_model_is_planned(folder: Path) -> None:
    planned = run(folder, "plan", "linear", "--cluster", "2xcpu", "--json", "--output", "plan.yaml")
    assert json.loads(planned.stdout.splitlines()[-1])["best"]["summary"]
    assert (folder / "plan.yaml").is_file()


def test_a_plan_is_proved(folder: Path) -> None:
    proved = run(folder, "prove", *MNIST, *TWO_REPLICAS[:2], "--ranks", "2", "--steps", "2", "--json")
    assert json.loads(proved.stdout.splitlines()[-1])["equal"]


@pytest.mark.core
def test_a_run_says_once_that_it_writes_no_events_and_its_page_what_it_needs(folder: Path) -> None:
    trained = run(folder, "train", *MNIST, *TWO_REPLICAS, "--set", "train.steps=2", "--json")
    result = json.loads(trained.stdout.splitlines()[-1])
    assert result["steps"] == 2
    assert trained.stderr.count(NO_EVENTS) == 1
    assert '"meshwright[pages]"' in trained.stderr
    for command in (("report", result["run"]), ("watch", result["run"])):
        assert run(folder, *command, code=2).stderr == NO_PAGE
    explained = run(folder, "explain", result["run"])
    assert explained.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "mnist", "--cluster", "8xH100"),
        ("prove", "mnist"),
        ("ask", "batch", "mnist", "--cluster", "8xH100"),
        ("doctor", "--job", "mnist"),
    ],
    ids=lambda words: words[0],
)
def test_a_page_is_refused_before_the_work_that_it_would_show(folder: Path, words: tuple[str, ...]) -> None:
    assert run(folder, *words, "--html", "page.html", code=2).stderr == NO_PAGE


def test_what_is_hidden_here_is_what_the_extra_brings() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extra = {text.partition(">")[0] for text in project["optional-dependencies"]["pages"]}
    assert extra == {"plotly", "tensorboard"} <= set(HIDDEN)
    assert not extra & {text.partition(">")[0] for text in project["dependencies"]}
