"""Random damages to job, plan, cluster, manifest and record files and to command lines. Whatever is damaged, a command
succeeds, or ends with one line: with exit code 2 for what the user wrote, and 1 for a damaged checkpoint or the user's
own code. It never shows a traceback of ours, and always ends. The examples are the same in every run."""

import io
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import meshwright.calibrate.doctor
import meshwright.calibrate.probe
import meshwright.proof.prove
import meshwright.train.run
from meshwright.cli import main
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.processes.local import fork_server
from tests.cli.commands import JOB, CommandResult
from tests.cli.damaged.damage import BYTES_DAMAGES, TEXT_DAMAGES, WORDS_DAMAGES, BytesDamage, WordsDamage
from tests.cli.recorded_run import recorded_run

ALARM_S = 120  # far more than any command takes on a busy core: this finds commands that never end

EXPORT = "export run --to safetensors --limit 0 --trust"
AGAINST = "prove --against run run --trust"
TRAIN = "train job.yaml"
PLAN = "plan job.yaml --plan plan.yaml --cluster cluster.yaml"
# The file to damage, and the commands that read it.
TEXT_FILES = {
    "job.yaml": (TRAIN, "prove job.yaml --plan plan.yaml", PLAN),
    "plan.yaml": (f"{TRAIN} --plan plan.yaml", PLAN),
    "cluster.yaml": (f"{TRAIN} --cluster cluster.yaml", PLAN),
    "run/job.yaml": (EXPORT, AGAINST, "export run --to safetensors"),
    "run/plan.yaml": (EXPORT, AGAINST, "prove mine.yaml --against run run"),
    "run/origin.json": ("export run --to safetensors --limit 0",),
    "run/checkpoints/step-00000002/manifest.json": (EXPORT,),
}
BINARY_FILES = {"run/record/step-0000.pt": (AGAINST,), "run/record/step-0001.pt": (AGAINST,)}
COMMAND_LINES = (
    TRAIN,
    f"{TRAIN} --plan plan.yaml --cluster cluster.yaml --resume never --record 2 --set train.epochs=1 --json",
    f"{PLAN} --top 3 --exact --json",
    "prove job.yaml --plan plan.yaml --ranks 2 --steps 2 --dtype fp64 --set train.epochs=1",
    f"{AGAINST} --json",
    f"{EXPORT} --step last --json",
    "doctor --calibrate --output device.yaml --json",
    "data verify run",
)
LINK = {
    "name": "Loopback",
    "bandwidth_bytes_per_s": 1e10,
    "latency_s": 1e-6,
    "curves": {"all_reduce": [{"ranks": 2, "points": [[1024, 1e-5], [1048576, 1e-3]], "source": "here"}]},
    "sources": {},
}
DEVICE = {
    "name": "core",
    "kind": "cpu",
    "memory_bytes": 10**10,
    "bandwidth_bytes_per_s": 1e10,
    "launch_s": 1e-6,
    "rates": {"fp32": 1e11, "bf16": 1e11},
    "instructions": ["avx2-fp32"],
    "sources": {"launch_s": "measured"},
    "operators": [
        {"operator": "matmul", "dtype": "fp32", "shape": [64, 64, 64], "flops": 524288, "bytes": 49152, "seconds": 1e-5}
    ],
}
CLUSTER = {
    "name": "here",
    "nodes": [{"device": DEVICE, "count": 1, "link": LINK, "cores": 1}],
    "based_on": "measured",
    "price_per_hour": 2.5,
}
EXAMPLES = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # shrinking would run hundreds of commands
    suppress_health_check=list(HealthCheck),
)


class RanksWouldStart(MeshwrightError):
    """Raised where a command would start ranks or measure this machine."""

    exit_code = 0


class NeverEnds(BaseException):
    """Raised in a command that has run too long."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the undamaged files."""
    folder = tmp_path_factory.mktemp("undamaged")
    recorded_run(folder / "run")
    job = {
        **JOB,
        "model": {"call": "tests.train.toy:Net", "hidden": 8},
        "train": {"epochs": 1, "global_batch": 10, "seed": 3, "clip_norm": 1.0, "timeout_s": 60, "freeze": []},
        "checkpoint": {"every_steps": 10, "keep": 2, "best": "accuracy"},
        "plan": {"axes": {"replicate": 1}, "gradients": {"bucket_bytes": 1000000}},
        "cluster": "1xcpu",
        "output": "runs",
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    shutil.copy(folder / "run" / "job.yaml", folder / "mine.yaml")
    (folder / "plan.yaml").write_text(Plan().to_yaml())
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshwright.train.run, "launch", _ranks_would_start)
        patch.setattr(meshwright.proof.prove, "prove", _ranks_would_start)
        patch.setattr(meshwright.calibrate.doctor, "diagnose", _ranks_would_start)
        patch.setattr(meshwright.calibrate.doctor, "calibrate_and_diagnose", _ranks_would_start)
        patch.setattr(meshwright.calibrate.probe, "measure_machine", _ranks_would_start)
        patch.setattr(fork_server, "preloaded", lambda module, spare=True: nullcontext())
        yield folder


def _ranks_would_start(*_: Any, **__: Any) -> NoReturn:
    raise RanksWouldStart("ranks would start")


@contextmanager
def copy_of(files: Path) -> Iterator[Path]:
    """A copy of the files, which is the working folder and the home folder of what runs in this context."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(shutil.copytree(files, Path(name) / "work", symlinks=True))
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        yield folder


def run(words: list[str]) -> CommandResult:
    """Runs a command in this process. Raises `NeverEnds` in it when the time is over."""

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise NeverEnds(f"{words} has run for {ALARM_S} s")

    out, error = io.StringIO(), io.StringIO()
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(ALARM_S)
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
            patch.setattr(sys, "argv", ["meshwright", *words])
            with pytest.raises(SystemExit) as end:
                main()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return CommandResult(int(end.value.code or 0), out.getvalue(), error.getvalue())


def check_ends_well(words: list[str]) -> None:
    check_result(run(words))


def check_result(result: CommandResult) -> None:
    assert result.exit_code in (0, 1, 2, 3), result
    assert "Traceback" not in result.stdout + result.stderr, result
    if result.exit_code in (1, 2) and "Usage" not in result.stdout:  # without any arguments, the help is printed
        lines = result.stderr.splitlines()
        assert lines[-1].startswith("meshwright: "), result
        assert len([line for line in lines if line.startswith("meshwright: ")]) == 1, result


def damage_file(files: Path, name: str, command: str, damages: list[BytesDamage]) -> None:
    with copy_of(files) as folder:
        content = (folder / name).read_bytes()
        for damage in damages:
            content = damage(content)
        (folder / name).write_bytes(content)
        check_ends_well(command.split())


def damage_words(files: Path, command: str, damages: list[WordsDamage]) -> None:
    words = command.split()
    for damage in damages:
        words = damage(words)
    with copy_of(files):
        check_ends_well(words)


def _cases(choices: Mapping[str, tuple[str, ...]]) -> st.SearchStrategy[tuple[str, str]]:
    """A file and a command that reads it."""
    return st.sampled_from([(name, command) for name, commands in choices.items() for command in commands])


def _few(damages: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(damages, min_size=1, max_size=3)


def check_text_files(files: Path, examples: int) -> None:
    @settings(EXAMPLES, max_examples=examples)
    @given(_cases(TEXT_FILES), _few(TEXT_DAMAGES))
    def check(case: tuple[str, str], damages: list[BytesDamage]) -> None:
        damage_file(files, *case, damages)

    check()


def check_binary_files(files: Path, examples: int) -> None:
    @settings(EXAMPLES, max_examples=examples)
    @given(_cases(BINARY_FILES), _few(BYTES_DAMAGES))
    def check(case: tuple[str, str], damages: list[BytesDamage]) -> None:
        damage_file(files, *case, damages)

    check()


def check_command_lines(files: Path, examples: int) -> None:
    @settings(EXAMPLES, max_examples=examples)
    @given(st.sampled_from(COMMAND_LINES), _few(WORDS_DAMAGES))
    def check(command: str, damages: list[WordsDamage]) -> None:
        damage_words(files, command, damages)

    check()


@pytest.mark.parametrize("command", sorted({*COMMAND_LINES[:-1], *(c for cs in TEXT_FILES.values() for c in cs)}))
@pytest.mark.soak
def test_every_undamaged_command_succeeds(files: Path, command: str) -> None:
    with copy_of(files):
        result = run(command.split())
    assert result.exit_code == 0 or "--trust" in result.stderr, result


CHECKS: list[tuple[Callable[[Path, int], None], int, int]] = [
    (check_text_files, 35, 300),
    (check_binary_files, 10, 60),
    (check_command_lines, 15, 140),
]


@pytest.mark.parametrize(("check", "examples"), [(check, few) for check, few, _ in CHECKS])
def test_some_damages_end_well(files: Path, check: Callable[[Path, int], None], examples: int) -> None:
    check(files, examples)


@pytest.mark.soak
@pytest.mark.parametrize(("check", "examples"), [(check, many) for check, _, many in CHECKS])
def test_five_hundred_damages_end_well(files: Path, check: Callable[[Path, int], None], examples: int) -> None:
    check(files, examples)
