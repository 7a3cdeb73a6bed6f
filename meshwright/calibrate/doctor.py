"""What `meshwright doctor` shows: this machine's devices and links as measured, and what hinders training on it."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.calibrate.probe import calibrate, measure
from meshwright.cluster.cache import calibrated_file, save_device, save_measured
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.cores import usable_cores
from meshwright.cluster.detect import detect, find
from meshwright.cluster.graphics import list_gpus

SHARED_MEMORY_BYTES = 2**30  # loader workers and ranks hand tensors to each other through it


@dataclass(frozen=True)
class Surroundings:
    """What problems are looked for in; gathered apart so that each can be told without the machine that has it."""

    compiler: bool
    nvidia_smi: bool
    gpu_names: tuple[str, ...]
    torch_cuda: str | None
    visible_gpus: int
    cores: int
    load: float
    shared_memory_bytes: int | None


def examine(measuring: Callable[[Cluster], Cluster] = measure) -> dict[str, Any]:
    """`devices`, `links` and `problems` of this machine, measured where it has not been yet."""
    return _told(find("local", measuring))


def examine_thoroughly(output: Path | None, measuring: Callable[[Cluster], Cluster] = calibrate) -> dict[str, Any]:
    """Measures anew and per operator, writes the device's file, and tells of it as `examine` does."""
    detected = detect()
    cluster = measuring(detected)
    (node,) = cluster.nodes
    file = save_device(node.device, output or calibrated_file(node.device.name))
    bare = node.model_copy(update={"device": node.device.model_copy(update={"operators": ()})})
    save_measured(detected, cluster.model_copy(update={"nodes": (bare,)}))
    return {**_told(cluster.model_copy(update={"based_on": "calibrated"})), "file": str(file)}


def _told(cluster: Cluster) -> dict[str, Any]:
    devices, links = [], []
    for node in cluster.nodes:
        shown = node.device.model_dump(mode="json", exclude={"operators"})
        extra = {"count": node.count, "cores": node.cores, "operators_measured": len(node.device.operators)}
        devices.append({**shown, **extra, "based_on": cluster.based_on})
        links.append({**node.link.model_dump(mode="json"), "within": "node"})
    return {"devices": devices, "links": links, "problems": list(problems(look_around()))}


def look_around() -> Surroundings:
    shared = Path("/dev/shm")
    return Surroundings(
        compiler=any(shutil.which(name) for name in ("c++", "g++", "clang++")),
        nvidia_smi=shutil.which("nvidia-smi") is not None,
        gpu_names=tuple(gpu.name for gpu in list_gpus()),
        torch_cuda=torch.version.cuda,
        visible_gpus=torch.cuda.device_count(),
        cores=usable_cores(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
    )


def problems(seen: Surroundings) -> Iterator[str]:
    """One line each: what is wrong, and what to do."""
    if not seen.compiler:
        yield "no C++ compiler (c++, g++ or clang++) on the PATH: torch.compile needs one, install g++"
    if seen.nvidia_smi and seen.torch_cuda is None:
        yield (
            f"nvidia-smi is here, but torch {torch.__version__} is built without CUDA: install a CUDA build to use the"
            " GPUs"
        )
    elif seen.nvidia_smi and not seen.visible_gpus:
        yield (
            f"torch is built for CUDA {seen.torch_cuda} but sees no GPU: look at the driver (nvidia-smi) and at"
            " CUDA_VISIBLE_DEVICES"
        )
    if len(set(seen.gpu_names)) > 1:
        yield (
            f"GPUs differ ({', '.join(sorted(set(seen.gpu_names)))}): the one with least memory stands for all, choose"
            " equal ones with CUDA_VISIBLE_DEVICES"
        )
    if seen.load > seen.cores + 0.5:
        yield (
            f"{seen.load:.1f} processes want to run on {seen.cores} cores: measurements are slower than the machine is"
        )
    if seen.shared_memory_bytes is not None and seen.shared_memory_bytes < SHARED_MEMORY_BYTES:
        yield (
            f"/dev/shm has {seen.shared_memory_bytes / 2**20:,.0f} MiB free, where loader workers and ranks share"
            " memory: give it 1 GiB or more (docker run --shm-size=1g)"
        )


def lines(told: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    for device in told["devices"]:
        yield f"{device['count']} × {device['name']} ({device['kind']}, {device['cores']} cores), {device['based_on']}"
        yield f"  memory        {device['memory_bytes'] / 2**30:,.1f} GiB, {_rate(device['bandwidth_bytes_per_s'])}B/s"
        rates = "  ".join(f"{dtype} {_rate(rate)}FLOP/s" for dtype, rate in device["rates"].items())
        yield f"  rates         {rates or 'not measured'}"
        yield f"  launch        {device['launch_s'] * 1e6:.2f} µs, context {device['context_bytes'] / 2**20:,.0f} MiB"
        yield f"  instructions  {', '.join(device['instructions']) or 'none known'}"
        if device["operators_measured"]:
            yield f"  operators     {device['operators_measured']} measured"
    for link in told["links"]:
        yield f"{link['name']}: {_rate(link['bandwidth_bytes_per_s'])}B/s, {link['latency_s'] * 1e6:,.1f} µs"
        for collective, curves in link["curves"].items():
            for curve in curves:
                points = "  ".join(f"{_size(size)} {taken * 1e6:,.0f} µs" for size, taken in curve["points"])
                yield f"  {collective}, {curve['ranks']} ranks: {points}"
    for problem in told["problems"]:
        yield f"problem: {problem}"
    if not told["problems"]:
        yield "no problems found"
    if "file" in told:
        yield f"calibrated: {told['file']}"


def _rate(number: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} "


def _size(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.0f} {unit}"
    return f"{number} B"
