"""What `meshwright doctor` shows: the measured devices and links of this machine, its versions, network and disk, and
problems that hinder training."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.calibrate.probe import calibrate_machine, measure_machine
from meshwright.calibrate.system.disk import OutputDisk, disk_problems, inspect_disk
from meshwright.calibrate.system.network import Network, inspect_network, network_problems
from meshwright.calibrate.system.versions import Versions, find_versions, version_problems
from meshwright.cluster.cache import calibrated_file, save_device, save_measured
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.cores import usable_cores
from meshwright.cluster.detect import detect, find_cluster
from meshwright.cluster.gpus import list_gpus
from meshwright.numbers.units import bandwidth_text, bytes_text, count_text
from meshwright.progress import NO_BREAK

RUNS = Path("runs")  # a job's default output
SHARED_MEMORY_BYTES = 2**30  # loader workers and ranks pass tensors to each other through it


@dataclass(frozen=True)
class SystemState:
    """The facts about a machine from which `problems` derives its problems. Tests construct the state of a machine that
    has a problem, because the machine that runs the tests may not have it.

    `torch_cuda` is the CUDA version that torch was built for, None if it was built without CUDA. `load` is the average
    number of processes that want to run. `shared_memory_bytes` is the free space of /dev/shm, None if there is none."""

    compiler: bool
    nvidia_smi: bool
    gpu_names: tuple[str, ...]
    torch_cuda: str | None
    visible_gpus: int
    cores: int
    load: float
    shared_memory_bytes: int | None
    versions: Versions
    network: Network
    disk: OutputDisk


def diagnose(output: Path = RUNS, measuring: Callable[[Cluster], Cluster] = measure_machine) -> dict[str, Any]:
    """Returns a report about this machine with the keys `devices`, `links`, `versions`, `network`, `disk` and
    `problems`. The machine is measured if the cache has no earlier measurement. `output` is the folder of runs."""
    return _report(find_cluster("local", measuring), output)


def calibrate_and_diagnose(
    output: Path | None, measuring: Callable[[Cluster], Cluster] = calibrate_machine
) -> dict[str, Any]:
    """Measures this machine again, with every class of operators, and writes the device to the file `output`, or to the
    cache if that is None. Returns the report of `diagnose` with the path of the written file as `file`."""
    detected = detect()
    cluster = measuring(detected)
    (node,) = cluster.nodes
    file = save_device(node.device, output or calibrated_file(node.device.name))
    without_operators = node.model_copy(update={"device": node.device.model_copy(update={"operators": ()})})
    save_measured(detected, cluster.model_copy(update={"nodes": (without_operators,)}))
    return {**_report(cluster.model_copy(update={"based_on": "calibrated"}), RUNS), "file": str(file)}


def _report(cluster: Cluster, output: Path) -> dict[str, Any]:
    devices, links = [], []
    for node in cluster.nodes:
        device = node.device.model_dump(mode="json", exclude={"operators"})
        counts = {"count": node.count, "cores": node.cores, "operators_measured": len(node.device.operators)}
        devices.append({**device, **counts, "based_on": cluster.based_on})
        links.append({**node.link.model_dump(mode="json"), "within": "node"})
    return {"devices": devices, "links": links, **system_report(output)}


def system_report(output: Path) -> dict[str, Any]:
    """The keys `versions`, `network`, `disk` and `problems` of a report. `output` is the folder of runs."""
    system = inspect_system(output)
    parts = {name: asdict(getattr(system, name)) for name in ("versions", "network", "disk")}
    return {**json.loads(json.dumps(parts)), "problems": list(problems(system))}


def inspect_system(output: Path) -> SystemState:
    shared = Path("/dev/shm")
    return SystemState(
        compiler=any(shutil.which(name) for name in ("c++", "g++", "clang++")),
        nvidia_smi=shutil.which("nvidia-smi") is not None,
        gpu_names=tuple(gpu.name for gpu in list_gpus()),
        torch_cuda=torch.version.cuda,
        visible_gpus=torch.cuda.device_count(),
        cores=usable_cores(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        versions=find_versions(),
        network=inspect_network(),
        disk=inspect_disk(output),
    )


def problems(system: SystemState) -> Iterator[str]:
    """Yields one line for each problem: what is wrong, and what to do."""
    if not system.compiler:
        yield "no C++ compiler (c++, g++ or clang++) on the PATH: torch.compile needs one, install g++"
    if system.nvidia_smi and system.torch_cuda is None:
        yield (
            f"nvidia-smi is here, but torch {torch.__version__} is built without CUDA: install a CUDA build to use the"
            " GPUs"
        )
    elif system.nvidia_smi and not system.visible_gpus:
        yield (
            f"torch is built for CUDA {system.torch_cuda} but sees no GPU: look at the driver (nvidia-smi) and at"
            " CUDA_VISIBLE_DEVICES"
        )
    if len(set(system.gpu_names)) > 1:
        yield (
            f"GPUs differ ({', '.join(sorted(set(system.gpu_names)))}): predictions use the one with the least memory"
            " for all, choose equal ones with CUDA_VISIBLE_DEVICES"
        )
    if system.load > system.cores + 0.5:
        yield (
            f"{system.load:.1f} processes compete for {system.cores} cores, so measurements are slower than the machine"
            " is; stop other programs and measure again"
        )
    if system.shared_memory_bytes is not None and system.shared_memory_bytes < SHARED_MEMORY_BYTES:
        yield (
            f"/dev/shm has {bytes_text(system.shared_memory_bytes)} free, where loader workers and ranks share"
            " memory: give it 1 GiB or more (docker run --shm-size=1g)"
        )
    yield from version_problems(system.versions)
    yield from network_problems(system.network)
    yield from disk_problems(system.disk)


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines that print the report of `diagnose` in the terminal."""
    for device in report["devices"]:
        yield f"{device['count']} × {device['name']} ({device['kind']}, {device['cores']} cores), {device['based_on']}"
        bandwidth = bandwidth_text(device["bandwidth_bytes_per_s"])
        yield f"  memory        {bytes_text(device['memory_bytes'])}, {bandwidth}"
        rates = "  ".join(_whole(f"{dtype} {count_text(rate)}FLOP/s") for dtype, rate in device["rates"].items())
        yield f"  rates         {rates or 'not measured'}"
        yield f"  start         {device['launch_s'] * 1e6:.3g} µs for each operator"
        yield f"  process       {bytes_text(device['context_bytes'])} before it has any tensor"
        yield f"  instructions  {', '.join(device['instructions']) or 'none known'}"
        if device["operators_measured"]:
            yield f"  operators     {device['operators_measured']} measured"
    for link in report["links"]:
        yield f"{link['name']}: {bandwidth_text(link['bandwidth_bytes_per_s'])}, {link['latency_s'] * 1e6:,.1f} µs"
        for collective, curves in link["curves"].items():
            for curve in curves:
                points = (_whole(f"{bytes_text(size)} {seconds * 1e6:,.0f} µs") for size, seconds in curve["points"])
                yield f"  {collective}, {curve['ranks']} ranks: {'  '.join(points)}"
    yield from _system_lines(report)
    for problem in report["problems"]:
        yield f"problem: {problem}"
    if not report["problems"]:
        yield "no problems found"
    if "file" in report:
        yield f"calibrated: {report['file']}"


def _system_lines(report: dict[str, Any]) -> Iterator[str]:
    if "versions" in report:
        yield "versions: " + ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in report["versions"].items() if value
        )
    if "network" in report:
        network = report["network"]
        yield (
            f"network: ranks of this machine use {network['local']}, ranks of several machines"
            f" {network['between'] or 'nothing: there is no default route'}"
        )
    if "disk" in report:
        disk = report["disk"]
        speed = "" if disk["bytes_per_s"] is None else f", writes {bandwidth_text(disk['bytes_per_s'])}"
        yield (
            f"disk of {disk['folder']}: {disk['kind'] or 'unknown'} mounted at {disk['mount_point']},"
            f" {bytes_text(disk['free_bytes'])} free{speed}"
        )


def _whole(text: str) -> str:
    """The text as one that is not wrapped on a terminal."""
    return text.replace(" ", NO_BREAK)
