"""Lists the GPUs of this machine with nvidia-smi, so that CUDA is not initialized in this process."""

import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    used_bytes: int


def list_gpus() -> list[Gpu]:
    """Returns the GPUs in the order of nvidia-smi; an empty list if nvidia-smi is missing or reaches no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_listing(result.stdout)


def driver_version() -> str:
    """The version of the driver; empty if nvidia-smi is missing or reaches no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.partition("\n")[0].strip()


def parse_listing(text: str) -> list[Gpu]:
    """Parses lines of `name, total MiB, used MiB`; a figure that the driver does not report counts as 0."""
    gpus = []
    for line in text.splitlines():
        name, total, used = ([word.strip() for word in line.split(",")] + ["", ""])[:3]
        if name:
            gpus.append(Gpu(name, _mib(total), _mib(used)))
    return gpus


def _mib(word: str) -> int:
    return int(word) * 2**20 if word.isdigit() else 0
