"""Where measurements of this machine are kept between runs: the user's cache folder (XDG), a file a machine."""

import hashlib
import json
import os
import re
from pathlib import Path

import torch

from meshwright.cache import cache_folder
from meshwright.cluster.cluster import Cluster, Device
from meshwright.errors import InputError
from meshwright.yaml_file import read_mapping, validated

MEASURED = "rates, curves, operators"


def fingerprint(cluster: Cluster) -> str:
    """Changes with whatever makes old measurements wrong: processor, cores, GPUs, torch, what we measure."""
    (node,) = cluster.nodes
    words = [node.device.kind, node.device.name, node.count, node.cores, node.device.instructions, torch.__version__]
    words.append(MEASURED)
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def load_measured(detected: Cluster) -> Cluster | None:
    """What was measured on this machine before; None where nothing was, or where the file is no good."""
    file = _machine_file(detected)
    try:
        found = validated(Cluster, read_mapping(file, "cluster"), str(file))
    except InputError:
        return None
    return found if found.devices == detected.devices and found.kind == detected.kind else None


def save_measured(detected: Cluster, measured: Cluster) -> Path:
    return _write(_machine_file(detected), measured.to_yaml())


def calibrated_file(device: str) -> Path:
    return cache_folder() / "devices" / (re.sub(r"[^\w.-]+", "-", device) + ".yaml")


def calibrated_device(name: str) -> Device | None:
    """The device as `doctor --calibrate` measured it here; None where it did not, or where the file is no good."""
    file = calibrated_file(name)
    if not file.exists():
        return None
    try:
        return validated(Device, read_mapping(file, "device"), str(file))
    except InputError:
        return None


def save_device(device: Device, file: Path) -> Path:
    return _write(file, device.to_yaml())


def _machine_file(detected: Cluster) -> Path:
    return cache_folder() / f"machine-{fingerprint(detected)}.yaml"


def _write(file: Path, text: str) -> Path:
    """Whole or not at all: two processes may measure at once."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text)
        aside.replace(file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror}") from None
    return file
