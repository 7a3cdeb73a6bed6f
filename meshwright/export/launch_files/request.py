"""What a launch file is written from, and which values it may contain."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from meshwright.errors import InputError
from meshwright.export.launch_files.layout import Layout
from meshwright.job import Job

_INTERFACES = re.compile(r"[A-Za-z0-9][\w.:-]{0,31}(,[A-Za-z0-9][\w.:-]{0,31})*", re.ASCII)
_PARTITIONS = re.compile(r"\w[\w.-]*(,\w[\w.-]*)*", re.ASCII)
_TIME = re.compile(r"(?:(\d{1,5})-)?(\d{1,9})(?::(\d{1,6}))?(?::(\d{1,6}))?", re.ASCII)
# For a shell: the token of the environment, or else a random one.
TOKEN_ASSIGNMENT = "MESHWRIGHT_TOKEN=\"${MESHWRIGHT_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}\""


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `meshwright launch`, checked; None or empty if they were not given."""

    interface: str | None = None
    time_s: int | None = None
    partition: str | None = None
    image: str | None = None
    rendezvous: str | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchRequest:
    """A job to start on several machines. `plan` is the summary of its plan, `arguments` are the words after
    `meshwright`, and `folder` is the working folder of the ranks."""

    job: Job
    plan: str
    layout: Layout
    arguments: tuple[str, ...]
    folder: str
    options: LaunchOptions = LaunchOptions()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of the ranks: which network interface Gloo and NCCL use."""
        interface = self.options.interface
        return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}

    @property
    def grace_s(self) -> int:
        """How long the ranks may take to save after a stop signal, in whole seconds."""
        return ceil(self.job.train.grace_s)


@dataclass(frozen=True)
class LaunchFile:
    """The text of a launch file, and how to start the job with it, where FILE stands for the file. `has_secret` means
    that only the user may read it."""

    text: str
    how_to_start: str
    has_secret: bool = False


def python_module(module: str) -> list[str]:
    """Returns the words that run a module with this Python, which need not be the first one in PATH."""
    return [sys.executable or "python3", "-m", module]


def check_printable(option: str, values: Sequence[str]) -> None:
    """Raises an `InputError` for a value with a line break or another control character."""
    for value in values:
        if not value.isprintable():
            raise InputError(
                f"{option} {value!r}: line breaks and control characters cannot be written to a launch file"
            )


def check_interface(text: str) -> str:
    if not _INTERFACES.fullmatch(text):
        raise InputError(
            f"--interface {text!r}: write the name of a network interface, such as eth0, or several with commas"
        )
    return text


def check_partition(text: str) -> str:
    if not _PARTITIONS.fullmatch(text):
        raise InputError(f"--partition {text!r}: write the name of a partition, or several with commas")
    return text


def parse_time(text: str) -> int:
    """Returns the seconds of a time limit as Slurm writes it: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS,
    DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise InputError(f"--time {text!r}: write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS")
    days, *numbers = (int(number) if number else None for number in match.groups())
    given = [number for number in numbers if number is not None]
    if days is not None:
        hours, minutes, seconds = (*given, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, given[0], 0), 2: (0, *given), 3: tuple(given)}[len(given)]
    total = (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise InputError(f"--time {text}: a run of no time trains nothing")
    return total
