"""`doctor` on several machines names those that differ from the others."""

from dataclasses import replace

import pytest

from meshwright.calibrate.machines import Machine, Machines
from meshwright.calibrate.machines_report import machines_lines, machines_report, odd_ones
from meshwright.cluster.detect import detect_cpu

USUAL = Machine("a", (0, 1), "H100", 64, "2.13.0", "580.1")
OTHERS = [
    replace(USUAL, host=host, ranks=(first, first + 1), bandwidth_bytes_per_s=40e9, latency_s=2e-5, clock_s=0.01)
    for host, first in (("b", 2), ("c", 4), ("d", 6))
]


def test_equal_machines_are_not_odd() -> None:
    assert list(odd_ones([USUAL, *OTHERS])) == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"device": "A100"}, "c (ranks 4–5) has A100, the others have H100"),
        ({"cores": 32}, "c (ranks 4–5) has 32 cores, the others have 64"),
        ({"torch": "2.12.0"}, "c (ranks 4–5) has torch 2.12.0, the others have 2.13.0: install the same version"),
        ({"driver": "550.2"}, "c (ranks 4–5) has the driver 550.2, the others have 580.1"),
        ({"ranks": (4,)}, "c (rank 4) runs 1 ranks, the others run 2"),
        ({"clock_s": -61.5}, "the clock of c (ranks 4–5) is 61.5 s behind that of a (ranks 0–1): synchronize"),
        ({"bandwidth_bytes_per_s": 5e9}, "the link to c (ranks 4–5) has 5 GB/s, the others have 40 GB/s"),
    ],
)
def test_the_machine_that_differs_is_named(values: dict[str, object], line: str) -> None:
    odd = replace(OTHERS[1], **values)  # type: ignore[arg-type]
    (said,) = odd_ones([USUAL, OTHERS[0], odd, OTHERS[2]])
    assert said.startswith(line)


def test_the_report_shows_machines_links_and_problems() -> None:
    report = machines_report(Machines((USUAL, OTHERS[0]), detect_cpu()), {"problems": ["no compiler"]})
    lines = list(machines_lines(report))
    assert lines[:2] == [
        "a (ranks 0–1): H100, 64 cores, torch 2.13.0, driver 580.1",
        "b (ranks 2–3): H100, 64 cores, torch 2.13.0, driver 580.1",
    ]
    assert "  to the first machine 40 GB/s, 20 µs; clock +0.010 s" in lines
    assert lines[-1] == "problem: no compiler"
