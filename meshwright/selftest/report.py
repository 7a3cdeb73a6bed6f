"""The report of a selftest: lines for people, and the same as plain values. Both are in the file that a user may send
to the authors; it has no paths, host names or user names."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.cluster.gpus import driver_version
from meshwright.files.storage import write_atomically
from meshwright.selftest.run import Selftest
from meshwright.version import VERSION

_PLACES = {
    "gpus": "{devices} × {device}, a GPU for each rank, over NCCL",
    "shared": "one {device}, which all ranks share, over Gloo",
    "cpu": "CPU ranks on {devices} cores of {device}, over Gloo",
}


def selftest_report(selftest: Selftest) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "passed": selftest.passed,
        "placement": selftest.placement,
        "device": selftest.device,
        "devices": selftest.devices,
        "versions": _versions(),
        "results": [
            {
                "name": result.case.name,
                "plan": result.case.plan.summary(),
                "ranks": result.case.plan.world_size,
                "parts": list(result.case.parts),
                "state": result.state,
                "words": result.words,
                "seconds": round(result.seconds, 2),
            }
            for result in selftest.results
        ],
        "passed_parts": sorted(selftest.passed_parts),
        "seconds": round(selftest.seconds, 1),
    }


def selftest_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines that print the report."""
    place = _PLACES[report["placement"]].format(**report)
    yield f"selftest of meshwright {report['versions']['meshwright']} on {place}"
    yield ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    width = max(len(result["name"]) for result in report["results"])
    for result in report["results"]:
        seconds = f" ({result['seconds']:.1f} s)" if result["seconds"] else ""
        yield f"{result['state']:8}  {result['name']:{width}}  {result['words']}{seconds}"
    count = {state: sum(r["state"] == state for r in report["results"]) for state in ("passed", "failed", "left out")}
    yield ", ".join(f"{number} {state}" for state, number in count.items()) + f", in {report['seconds']:.0f} s"
    if report["placement"] != "gpus":
        yield "plans for several GPUs stay marked as untested: only a GPU for each rank, over NCCL, proves them"


def write_report(report: dict[str, Any], file: Path) -> None:
    """Writes the lines, and the plain values as JSON in the last line."""
    write_atomically(file, "\n".join((*selftest_lines(report), json.dumps(report))) + "\n")


def _versions() -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""
    return {
        "meshwright": VERSION,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "CUDA": torch.version.cuda or "",
        "NCCL": nccl,
        "driver": driver_version() if torch.cuda.is_available() else "",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
