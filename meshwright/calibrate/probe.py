"""Measures this machine in separate processes, so that the calling process keeps its threads, memory and CUDA state.

Rank 0 measures the device while the other ranks wait. Then all ranks measure collectives together: two CPU ranks over
Gloo on the loopback interface, or every GPU over NCCL.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate.device_rates import context_bytes, copy_bandwidth, launch_latency, matrix_rates
from meshwright.calibrate.link_curves import measure_curves
from meshwright.calibrate.operators import measure_operators
from meshwright.cluster.busy import OtherPrograms
from meshwright.cluster.cluster import COLLECTIVES, Cluster, Collective, Curve, Device, Link, Node
from meshwright.cluster.curves import rising
from meshwright.cluster.gpus import list_gpus
from meshwright.errors import MeshwrightError
from meshwright.files.storage import write_atomically
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.progress import phase

TIME_LIMIT_S = 600.0


@dataclass(frozen=True)
class _ProbeRequest:
    """The arguments of one process (`rank`) of the probe. `count` and `cores` are the devices and CPU cores of the
    node. With `thorough` every collective and operator is measured. `used_bytes` is the GPU memory that was in use
    before the probe started. `folder` is where the processes write their store, logs and results."""

    kind: str
    world_size: int
    count: int
    cores: int
    thorough: bool
    used_bytes: int
    folder: str
    rank: int = 0

    @property
    def results_file(self) -> Path:
        return Path(self.folder, "measurements.json")


def measure_machine(detected: Cluster) -> Cluster:
    """Returns the detected machine with measured constants and, if its devices are CPU cores, measured operators. This
    takes about ten seconds."""
    with phase("measuring this machine for the first time", 10):
        return _measure(detected, thorough=False)


def calibrate_machine(detected: Cluster) -> Cluster:
    """Returns the detected machine with measured constants, and with every collective and every class of operators
    measured for many shapes and dtypes. This takes a minute or two."""
    with phase("calibrating: measuring every class of operators", 90):
        return _measure(detected, thorough=True)


def _measure(detected: Cluster, thorough: bool) -> Cluster:
    (node,) = detected.nodes
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        request = _ProbeRequest(
            kind=node.device.kind,
            world_size=node.count if node.device.kind == "cuda" else 2,
            count=node.count,
            cores=node.cores,
            thorough=thorough,
            used_bytes=next((gpu.used_bytes for gpu in list_gpus()), 0),
            folder=folder,
        )
        others = OtherPrograms()
        _run_ranks(request)
        busy_cores = others.cores()
        measurements = json.loads(request.results_file.read_text())
    device, link = _device(node, measurements), _link(node.link, measurements["curves"])
    measured = node.model_copy(update={"device": device, "link": link})
    return detected.model_copy(update={"nodes": (measured,), "based_on": "measured", "busy_cores": busy_cores})


def _source() -> str:
    return f"measured: torch {torch.__version__}, {date.today().isoformat()}"


def _device(node: Node, measurements: dict[str, Any]) -> Device:
    """Returns the node's device with the measured rates, bandwidth, memory, latency and operators. Instructions,
    multiprocessors and clock are replaced only if they were unknown."""
    measured_fields = ["memory_bytes", "bandwidth_bytes_per_s", "rates", "launch_s", "context_bytes"]
    values = {name: measurements[name] for name in measured_fields if measurements.get(name)}
    sources = {**node.device.sources, **dict.fromkeys(values, _source())}
    fields = node.device.model_dump(exclude={"sources", "operators", *values})
    if measurements["instructions"] and not fields["instructions"]:
        fields["instructions"] = measurements["instructions"]
        sources["instructions"] = f"measured: products of these dtypes ran faster than fp32, torch {torch.__version__}"
    for name in ("multiprocessors", "clock_hz"):
        if measurements.get(name) and not fields[name]:
            fields[name], sources[name] = measurements[name], f"the driver, by torch {torch.__version__}"
    return Device.model_validate({**fields, **values, "operators": measurements["operators"], "sources": sources})


def _link(detected: Link, curves: dict[Collective, dict[str, list[tuple[int, float]]]]) -> Link:
    """Returns the link with the measured curves, or the detected link if nothing was measured. Bandwidth and latency
    are derived from an all-reduce between two ranks, in which each rank sends half of the tensor twice."""
    if not curves:
        return detected
    source = _source()
    link_curves = {
        collective: tuple(
            Curve(ranks=int(ranks), points=rising((size, seconds) for size, seconds in points), source=source)
            for ranks, points in by_ranks.items()
        )
        for collective, by_ranks in curves.items()
    }
    points = link_curves["all_reduce"][0].points
    is_named = detected.name == "Loopback" or detected.bandwidth_bytes_per_s
    return Link(
        name=detected.name if is_named else "measured",
        bandwidth_bytes_per_s=points[-1][0] / points[-1][1],
        latency_s=points[0][1] / 2,
        curves=link_curves,
        sources={"bandwidth_bytes_per_s": source, "latency_s": source},
    )


def _run_ranks(request: _ProbeRequest) -> None:
    """Starts the ranks and waits for them. When a rank fails, the other ranks are killed, and the last line of the
    failed rank's log becomes the error message."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    # On the loopback interface no other machine can join. Libraries with thread pools start with one thread, as in a
    # rank that has one core.
    environment = ["env", f"GLOO_SOCKET_IFNAME={loopback}", f"NCCL_SOCKET_IFNAME={loopback}", "OMP_NUM_THREADS=1"]
    logs = [Path(request.folder, f"rank{rank}.log") for rank in range(request.world_size)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            argument = json.dumps(asdict(replace(request, rank=rank)))
            command = [*environment, sys.executable, "-m", "meshwright.calibrate.probe", argument]
            with log.open("wb") as output:
                processes.append(subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL))
        deadline = time.monotonic() + TIME_LIMIT_S
        while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                raise MeshwrightError(f"this machine could not be measured within {TIME_LIMIT_S:.0f} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode > 0:
            lines = log.read_text(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"the probe exited with code {process.returncode} and printed nothing"
            raise MeshwrightError(f"this machine could not be measured: {reason}")


def _run_probe(request: _ProbeRequest) -> None:
    """Runs one rank of the probe. Rank 0 writes the results to `results_file`."""
    rank, world_size = request.rank, request.world_size
    device = torch.device("cuda", rank) if request.kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(request.folder, "store")), world_size)
    measurements: dict[str, Any] = {}
    if rank == 0:
        measurements = _measure_device(device, request)
        store.set("device", "measured")
    else:
        store.wait(["device"], timedelta(seconds=TIME_LIMIT_S))
    curves: Any = {}
    if world_size > 1:
        torch.set_num_threads(1)
        backend = "nccl" if device.type == "cuda" else "gloo"
        admit_own_user_only()
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        collectives: list[Collective] = list(COLLECTIVES) if request.thorough else ["all_reduce"]
        curves = measure_curves(collectives, device)
        dist.destroy_process_group()
    if rank == 0:
        write_atomically(request.results_file, json.dumps({**measurements, "curves": curves}))


def _measure_device(device: torch.device, request: _ProbeRequest) -> dict[str, Any]:
    process_bytes = context_bytes(device, request.used_bytes)
    torch.set_num_threads(1)
    launch_s = launch_latency(device)
    rates = matrix_rates(device)
    # The operators of a CPU core are few and small; those of a GPU take a minute.
    operators = measure_operators(device, rates) if request.thorough or device.type == "cpu" else []
    torch.set_num_threads(request.cores)
    bandwidth = copy_bandwidth(device)
    if device.type == "cpu":
        return {
            "bandwidth_bytes_per_s": bandwidth / request.count,
            "rates": rates,
            "launch_s": launch_s,
            "context_bytes": process_bytes,
            "operators": operators,
            "instructions": [],  # detected from the processor's flags instead
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "clock_hz": 1e3 * getattr(properties, "clock_rate", 0),  # in kHz, and only in newer versions of torch
        "bandwidth_bytes_per_s": bandwidth,
        "rates": rates,
        "launch_s": launch_s,
        "context_bytes": process_bytes,
        "operators": operators,
        # Tensor cores are several times faster than fp32 arithmetic; a factor of 1.5 is far above measuring errors.
        "instructions": [f"tensor-{dtype}" for dtype, rate in rates.items() if rate > 1.5 * rates["fp32"]],
    }


if __name__ == "__main__":
    _run_probe(_ProbeRequest(**json.loads(sys.argv[1])))
