"""What `meshwright doctor` shows when a launcher has started it on several machines: the machines, the links between
them, and which machine differs from the others."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from meshwright.calibrate.doctor import report_lines
from meshwright.calibrate.machines import Machine, Machines
from meshwright.numbers.units import bandwidth_text

_SLOW = 0.7  # a link with less than this share of the others' bandwidth is named
_SKEW_S = 1.0  # clocks that differ by more confuse logs and the ages of heartbeats


def machines_report(measured: Machines, system: dict[str, Any]) -> dict[str, Any]:
    """`machines`, `odd` (a line for each machine that differs from the others in something) and `links`, as plain
    values; and `system`, which `system_report` returned on the first machine."""
    link = measured.cluster.link
    return {
        "machines": [asdict(machine) for machine in measured.machines],
        "odd": list(odd_ones(measured.machines)),
        "links": [] if link is None else [{**link.model_dump(mode="json"), "within": "machines"}],
        **system,
    }


def odd_ones(machines: Sequence[Machine]) -> Iterator[str]:
    """Yields a line for each value of a machine that differs from that of most machines; of two machines, for the
    second."""
    values = {
        "device": "has {value}, the others have {usual}",
        "cores": "has {value} cores, the others have {usual}",
        "torch": "has torch {value}, the others have {usual}: install the same version everywhere",
        "driver": "has the driver {value}, the others have {usual}",
        "ranks": "runs {value} ranks, the others run {usual}",
    }
    for name, text in values.items():
        seen = [len(machine.ranks) if name == "ranks" else getattr(machine, name) for machine in machines]
        usual = Counter(seen).most_common(1)[0][0]
        for machine, value in zip(machines, seen, strict=True):
            if value != usual:
                yield f"{_name(machine)} {text.format(value=value or 'none', usual=usual or 'none')}"
    for machine in machines:
        if abs(machine.clock_s) > _SKEW_S:
            direction = "ahead of" if machine.clock_s > 0 else "behind"
            yield (
                f"the clock of {_name(machine)} is {abs(machine.clock_s):,.1f} s {direction} that of"
                f" {_name(machines[0])}: synchronize the clocks (NTP)"
            )
    others = machines[1:]
    if len(others) > 1:
        usual_bandwidth = median(machine.bandwidth_bytes_per_s for machine in others)
        for machine in others:
            if machine.bandwidth_bytes_per_s < _SLOW * usual_bandwidth:
                yield (
                    f"the link to {_name(machine)} has {bandwidth_text(machine.bandwidth_bytes_per_s)}, the others have"
                    f" {bandwidth_text(usual_bandwidth)}"
                )


def machines_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines that print the report in the terminal."""
    for raw in report["machines"]:
        machine = Machine(**{**raw, "ranks": tuple(raw["ranks"])})
        driver = f", driver {machine.driver}" if machine.driver else ""
        yield f"{_name(machine)}: {machine.device}, {machine.cores} cores, torch {machine.torch}{driver}"
        if machine.bandwidth_bytes_per_s:
            yield (
                f"  to the first machine {bandwidth_text(machine.bandwidth_bytes_per_s)},"
                f" {machine.latency_s * 1e6:,.0f} µs; clock {machine.clock_s:+.3f} s"
            )
    for line in report["odd"]:
        yield f"odd: {line}"
    yield from report_lines({**report, "devices": []})


def _name(machine: Machine) -> str:
    ranks = machine.ranks
    return f"{machine.host} (rank{'s' if len(ranks) > 1 else ''} {ranks[0]}{f'–{ranks[-1]}' if len(ranks) > 1 else ''})"
