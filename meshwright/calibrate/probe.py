"""What this machine reaches, measured in some seconds by processes of their own, which leave no trace in the caller.

The first rank measures the device while the others wait, then all of them measure how they exchange data: two CPU
ranks over Gloo on the loopback interface, or every GPU over NCCL.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate.device_rates import context_bytes, copy_bandwidth, launch_latency, matrix_rates
from meshwright.calibrate.link_curves import measure_curves
from meshwright.calibrate.operators import measure_operators
from meshwright.cluster.cluster import COLLECTIVES, Cluster, Collective, Curve, Device, Link, Node
from meshwright.cluster.curves import rising
from meshwright.cluster.graphics import list_gpus
from meshwright.errors import MeshwrightError

TIME_LIMIT_S = 600.0


def measure(detected: Cluster) -> Cluster:
    """This machine with measured constants, and operators of a CPU core, in some ten seconds."""
    return _measure(detected, thorough=False)


def calibrate(detected: Cluster) -> Cluster:
    """Every collective and every class of operators over shapes and dtypes too, in a minute or two."""
    return _measure(detected, thorough=True)


def _measure(detected: Cluster, thorough: bool) -> Cluster:
    (node,) = detected.nodes
    world = node.count if node.device.kind == "cuda" else 2
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        asked = {
            "kind": node.device.kind,
            "world": world,
            "count": node.count,
            "cores": node.cores,
            "thorough": thorough,
            "used_bytes": next((gpu.used_bytes for gpu in list_gpus()), 0),
            "folder": folder,
        }
        _run_ranks(asked, world)
        found = json.loads(Path(folder, "found.json").read_text())
    measured = node.model_copy(update={"device": _device(node, found), "link": _link(node.link, found["curves"])})
    return detected.model_copy(update={"nodes": (measured,), "based_on": "measured"})


def _device(node: Node, found: dict[str, Any]) -> Device:
    told = f"measured: torch {torch.__version__}, {date.today().isoformat()}"
    fields = ["memory_bytes", "bandwidth_bytes_per_s", "rates", "launch_s", "context_bytes"]
    values = {name: found[name] for name in fields if found.get(name)}
    sources = {**node.device.sources, **dict.fromkeys(values, told)}
    known = node.device.model_dump(exclude={"sources", "operators", *values})
    if found["instructions"] and not known["instructions"]:
        known["instructions"] = found["instructions"]
        sources["instructions"] = f"measured: products of these dtypes ran faster than fp32, torch {torch.__version__}"
    for name in ("multiprocessors", "clock_hz"):
        if found.get(name) and not known[name]:
            known[name], sources[name] = found[name], f"the driver, by torch {torch.__version__}"
    return Device.model_validate({**known, **values, "operators": found["operators"], "sources": sources})


def _link(before: Link, curves: dict[Collective, dict[str, list[tuple[int, float]]]]) -> Link:
    """Bandwidth and latency as two ranks saw them in an all-reduce, which is two rounds of half the tensor."""
    if not curves:
        return before
    told = f"measured: torch {torch.__version__}, {date.today().isoformat()}"
    made = {
        collective: tuple(
            Curve(ranks=int(ranks), points=rising((size, taken) for size, taken in points), source=told)
            for ranks, points in by_ranks.items()
        )
        for collective, by_ranks in curves.items()
    }
    points = made["all_reduce"][0].points
    name = "Loopback" if before.name == "Loopback" else before.name if before.bandwidth_bytes_per_s else "measured"
    return Link(
        name=name,
        bandwidth_bytes_per_s=points[-1][0] / points[-1][1],
        latency_s=points[0][1] / 2,
        curves=made,
        sources={"bandwidth_bytes_per_s": told, "latency_s": told},
    )


def _run_ranks(asked: dict[str, Any], world: int) -> None:
    """Starts the ranks and waits; the first that fails ends the others and lends its last words to the error."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    # Nobody outside can join; and libraries with threads of their own start with one, as a rank on a core does.
    told = ["env", f"GLOO_SOCKET_IFNAME={loopback}", f"NCCL_SOCKET_IFNAME={loopback}", "OMP_NUM_THREADS=1"]
    logs = [Path(asked["folder"], f"rank{rank}.log") for rank in range(world)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            command = [*told, sys.executable, "-m", "meshwright.calibrate.probe", json.dumps({**asked, "rank": rank})]
            with logs[rank].open("wb") as log:
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        deadline = time.monotonic() + TIME_LIMIT_S
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > deadline:
                raise MeshwrightError(f"this machine could not be measured within {TIME_LIMIT_S:.0f} s")
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, file in zip(ranks, logs, strict=True):
        if process.returncode > 0:
            words = file.read_text(errors="replace").strip().splitlines() or ["it left no word"]
            raise MeshwrightError(f"this machine could not be measured: {words[-1]}")


def _rank(asked: dict[str, Any]) -> None:
    rank, world, thorough = asked["rank"], asked["world"], asked["thorough"]
    device = torch.device("cuda", rank) if asked["kind"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(Path(asked["folder"], "store")), world)
    found: dict[str, Any] = {}
    if rank == 0:
        found = _measure_device(device, asked)
        store.set("device", "measured")
    else:
        store.wait(["device"], timedelta(seconds=TIME_LIMIT_S))
    curves: Any = {}
    if world > 1:
        torch.set_num_threads(1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world)
        collectives: list[Collective] = list(COLLECTIVES) if thorough else ["all_reduce"]
        curves = measure_curves(collectives, device)
        dist.destroy_process_group()
    if rank == 0:
        Path(asked["folder"], "found.json").write_text(json.dumps({**found, "curves": curves}))


def _measure_device(device: torch.device, asked: dict[str, Any]) -> dict[str, Any]:
    taken = context_bytes(device, asked["used_bytes"])
    torch.set_num_threads(1)
    launch = launch_latency(device)
    rates = matrix_rates(device)
    # A core's shapes are few and small; a GPU's take a minute.
    operators = measure_operators(device, rates) if asked["thorough"] or device.type == "cpu" else []
    torch.set_num_threads(asked["cores"])
    bandwidth = copy_bandwidth(device)
    if device.type == "cpu":
        return {
            "bandwidth_bytes_per_s": bandwidth / asked["count"],
            "rates": rates,
            "launch_s": launch,
            "context_bytes": taken,
            "operators": operators,
            "instructions": [],  # the flags of the processor tell
        }
    told = torch.cuda.get_device_properties(device)
    return {
        "memory_bytes": told.total_memory,
        "multiprocessors": told.multi_processor_count,
        "clock_hz": 1e3 * getattr(told, "clock_rate", 0),  # kHz, by newer versions of torch
        "bandwidth_bytes_per_s": bandwidth,
        "rates": rates,
        "launch_s": launch,
        "context_bytes": taken,
        "operators": operators,
        "instructions": [f"tensor-{dtype}" for dtype, rate in rates.items() if rate > 1.5 * rates["fp32"]],
    }


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
