"""`run_recorded`: runs a command of the user's, in which every process that trains is recorded."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.audit.recorder.settings import FOLDER_VARIABLE, Settings
from meshwright.errors import InputError

_START_UP = Path(__file__).parent / "recorder" / "start_up"
_KEPT_LINES = 30


@dataclass(frozen=True)
class FinishedCommand:
    """A command that was run: its exit code, and the file of its output. `timed_out` says that it was ended."""

    command: str
    exit_code: int
    output: Path
    timed_out: bool = False

    @property
    def last_lines(self) -> list[str]:
        lines = self.output.read_text(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-_KEPT_LINES:]


def run_recorded(
    command: str, folder: Path, settings: Settings, *, timeout_s: float, cpu: bool = False, threads: int | None = None
) -> FinishedCommand:
    """Runs the command with the recorder on the path of its Python processes, until it ends or `timeout_s` have
    passed. Its output goes to a file beside the record. Nothing of it is left running."""
    settings.write(folder)
    environment = dict(os.environ)
    environment[FOLDER_VARIABLE] = str(folder.resolve())
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_START_UP), environment.get("PYTHONPATH", "")]))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    if cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    output = folder / "output.txt"
    arguments = split_command(command)
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                arguments, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise InputError(f"{command}: cannot be started: {error.strerror or error}") from None
    timer = threading.Timer(timeout_s, _end, [process])
    timer.start()
    try:
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    finally:
        timed_out = not timer.is_alive()
        timer.cancel()
        _end_group(process.pid)
    return FinishedCommand(command, code, output, timed_out)


def split_command(command: str) -> list[str]:
    """The arguments of a command as a shell divides them. `python` is this interpreter, and a program that is not on
    the path is looked for beside it, as torchrun in a virtual environment that is not active."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise InputError(f"{command!r} is no command: {error}") from None
    if not arguments:
        raise InputError('the command is empty: name the script, for example "python train.py"')
    if arguments[0] == "python":
        arguments[0] = sys.executable
    beside = Path(sys.executable).parent / arguments[0]
    if shutil.which(arguments[0]) is None and beside.exists():
        arguments[0] = str(beside)
    return arguments


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _end_group(process.pid)


def _end_group(group: int) -> None:
    """Ends the processes of a command that are still running: it is the leader of a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
