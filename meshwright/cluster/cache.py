"""Stores measurements between runs in the user's cache folder: one file per machine, or group of machines, that was
measured, one file per device that was calibrated, and one file per model whose operators were measured."""

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from meshwright.cluster.cluster import Cluster, Device
from meshwright.errors import InputError, StorageError
from meshwright.files.cache import cache_folder
from meshwright.files.storage import write_atomically, writing
from meshwright.files.yaml_file import read_mapping, validate

# A part of the fingerprint: change this text when other things are measured.
MEASURED = "rates, curves, operators, busy cores"


def fingerprint(cluster: Cluster) -> str:
    """Returns a hash of everything that invalidates old measurements when it changes: processor, cores, GPUs, the
    version of torch, and what is measured."""
    (node,) = cluster.nodes
    inputs = [node.device.kind, node.device.name, node.count, node.cores, node.device.instructions, torch.__version__]
    inputs.append(MEASURED)
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def load_measured(detected: Cluster) -> Cluster | None:
    """Returns the measurements of this machine from an earlier run. None if there are none, if the file is not valid,
    or if it has another number or kind of devices than were detected."""
    file = _machine_file(detected)
    try:
        measured = validate(Cluster, read_mapping(file, "cluster"), str(file))
    except InputError:
        return None
    return measured if measured.device_count == detected.device_count and measured.kind == detected.kind else None


def save_measured(detected: Cluster, measured: Cluster) -> None:
    """Stores the measurements of this machine. If the cache cannot take them, the next run measures again."""
    try:
        _write(_machine_file(detected), measured.to_yaml())
    except StorageError as error:
        warnings.warn(f"{error}; until then this machine is measured in every run", stacklevel=2)


def load_machines(identity: Sequence[object]) -> Cluster | None:
    """Returns the cluster of several machines that was measured before; None if there is none or its file is not
    valid."""
    file = _machines_file(identity)
    try:
        return validate(Cluster, read_mapping(file, "cluster"), str(file))
    except InputError:
        return None


def save_machines(identity: Sequence[object], cluster: Cluster) -> Path:
    """Stores the measurements of several machines."""
    return _write(_machines_file(identity), cluster.to_yaml())


def calibrated_file(device: str) -> Path:
    return cache_folder() / "devices" / (re.sub(r"[^\w.-]+", "-", device) + ".yaml")


def calibrated_device(name: str) -> Device | None:
    """Returns the device with this name that `doctor --calibrate` saved; None if there is none or its file is not
    valid."""
    file = calibrated_file(name)
    if not file.exists():
        return None
    try:
        return validate(Device, read_mapping(file, "device"), str(file))
    except InputError:
        return None


def save_device(device: Device, file: Path) -> Path:
    return _write(file, device.to_yaml())


@dataclass(frozen=True)
class OperatorSeconds:
    """The measured seconds of operators, None for one that failed, and how many cores other programs used meanwhile."""

    seconds: list[float | None]
    busy_cores: float


def load_operator_seconds(inputs: Sequence[object], count: int) -> OperatorSeconds | None:
    """Returns the seconds of `count` operators that were measured before with the same `inputs`; None if there are
    none. Then the same question gets the same answer, although no two measurements are equal."""
    try:
        raw = json.loads(_operators_file(inputs).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict):
        return None
    seconds, busy_cores = raw.get("seconds"), raw.get("busy_cores")
    if not isinstance(seconds, list) or len(seconds) != count or not isinstance(busy_cores, float):
        return None
    is_valid = all(value is None or (isinstance(value, float) and 0 < value < 1e9) for value in seconds)
    return OperatorSeconds(seconds, busy_cores) if is_valid and 0 <= busy_cores < 1e6 else None


def save_operator_seconds(inputs: Sequence[object], measured: OperatorSeconds) -> None:
    """Stores the seconds of operators. If the cache cannot take them, the next planning measures again."""
    try:
        _write(_operators_file(inputs), json.dumps(asdict(measured)))
    except StorageError as error:
        warnings.warn(f"{error}; until then operators are measured in every planning", stacklevel=2)


def _operators_file(inputs: Sequence[object]) -> Path:
    text = json.dumps([str(value) for value in (*inputs, torch.__version__)])
    return cache_folder() / "operators" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _machines_file(identity: Sequence[object]) -> Path:
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return cache_folder() / f"machines-{digest}.yaml"


def _machine_file(detected: Cluster) -> Path:
    return cache_folder() / f"machine-{fingerprint(detected)}.yaml"


def _write(file: Path, text: str) -> Path:
    """Writes the file atomically, because two processes may measure at the same time."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)
    return file
