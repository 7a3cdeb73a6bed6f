"""Which versions of Python, torch, CUDA, NCCL and the driver this machine has, and which of them do not go together."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwright.cluster.gpus import driver_version
from meshwright.version import NEWEST_TORCH, OLDEST_TORCH, VERSION

OLDEST_PYTHON = (3, 11)  # as pyproject.toml has it


@dataclass(frozen=True)
class Versions:
    """Versions as texts; empty if there is none. `cuda` is the one that torch was built for, `driver_cuda` the newest
    one that the driver can run."""

    meshwright: str
    python: str
    torch: str
    cuda: str = ""
    nccl: str = ""
    driver: str = ""
    driver_cuda: str = ""


def find_versions() -> Versions:
    return Versions(
        meshwright=VERSION,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        driver=driver_version(),
        driver_cuda=_driver_cuda(),
    )


def version_problems(versions: Versions) -> Iterator[str]:
    """Yields one line for each version that is too old, or newer than any that was tried."""
    if _numbers(versions.python) < OLDEST_PYTHON:
        yield f"Python is {versions.python}: install {_text(OLDEST_PYTHON)} or newer"
    if _numbers(versions.torch) < OLDEST_TORCH:
        yield f"torch is {versions.torch}: install {_text(OLDEST_TORCH)} or newer"
    if _numbers(versions.torch) > NEWEST_TORCH:
        yield f"torch is {versions.torch}: the newest that was tried is {_text(NEWEST_TORCH)}"
    if versions.cuda and versions.driver_cuda and _numbers(versions.driver_cuda)[0] < _numbers(versions.cuda)[0]:
        yield (
            f"torch is built for CUDA {versions.cuda}, but the driver {versions.driver} runs CUDA up to"
            f" {versions.driver_cuda}: update the driver, or install a build of torch for CUDA"
            f" {_numbers(versions.driver_cuda)[0]}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _driver_cuda() -> str:
    """The newest CUDA version that the driver can run, as nvidia-smi shows it; empty if that is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        result = subprocess.run([program], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    version = re.search(r"CUDA (?:UMD )?Version: *(\d+\.\d+)", result.stdout)
    return version[1] if version else ""
