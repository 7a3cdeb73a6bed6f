"""The peers: which script trains with each of them, which package it needs, and which of them an interpreter has."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError, did_you_mean

DEFAULT_PYTHON = Path(".venv-peers/bin/python")
SETTINGS = ("defaults", "best")
_PRINT_VERSIONS = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


@dataclass(frozen=True)
class Peer:
    """A library, or a way to use torch, that we are compared with. `package` is what has to be installed for it, and
    `module` its script in this package."""

    name: str
    title: str
    package: str
    module: str


PEERS = (
    Peer("ddp", "plain DDP", "torch", "ddp"),
    Peer("accelerate", "Accelerate", "accelerate", "accelerate_loop"),
    Peer("fabric", "Lightning Fabric", "lightning", "fabric"),
    Peer("trainer", "Lightning Trainer", "lightning", "lightning_trainer"),
    Peer("deepspeed", "DeepSpeed", "deepspeed", "deepspeed_engine"),
    Peer("fsdp2", "FSDP2 + compile", "torch", "fsdp2"),
)
REFERENCE = PEERS[0]


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter, and the versions of the peers' packages that are installed for it, by name."""

    python: Path
    versions: Mapping[str, str]

    def missing(self, peer: Peer) -> str | None:
        """Returns why this peer is left out, with the command that installs it; None if it is installed."""
        if peer.package in self.versions:
            return None
        is_default = self.python in (DEFAULT_PYTHON, Path(sys.executable))
        command = "make peers" if is_default else f"{self.python} -m pip install {peer.package}"
        return f"{peer.package} is not installed for {self.python}; install it with: {command}"


def selected_peers(only: str | None) -> tuple[Peer, ...]:
    """Returns the peers that `--only A,B` names, in the order of `PEERS` and always with plain DDP; all peers if `only`
    is None."""
    if only is None:
        return PEERS
    known, names = {peer.name for peer in PEERS}, [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"--only {only}: there is no peer '{name}'{did_you_mean(name, known)}")
    return tuple(peer for peer in PEERS if peer is REFERENCE or peer.name in names)


def find_interpreter(python: Path | None) -> Interpreter:
    """Returns the interpreter that runs the peers: `python`, or else that of `make peers`, or else our own, which has
    at least torch. Raises an `InputError` if `python` cannot be run or has no torch."""
    chosen = python or (DEFAULT_PYTHON if DEFAULT_PYTHON.exists() else Path(sys.executable))
    packages = sorted({peer.package for peer in PEERS})
    versions = _installed_versions(chosen, packages)
    if "torch" not in versions:
        raise InputError(f"--python {chosen}: torch is not installed for it: {chosen} -m pip install torch")
    return Interpreter(chosen, versions)


def _installed_versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    try:
        process = subprocess.run(
            [str(python), "-c", _PRINT_VERSIONS, *packages], capture_output=True, text=True, check=True
        )
        versions = json.loads(process.stdout)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
        raise InputError(f"--python {python}: this is no Python interpreter that can be run: {error}") from None
    return {name: version for name, version in versions.items() if version is not None}
