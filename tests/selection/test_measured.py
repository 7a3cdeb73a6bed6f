"""Seconds of tests are kept from one measurement to the next."""

import json
from pathlib import Path

from tests.selection.measured import LEAST_S, MEASURED, keep_s, measured_s
from tests.selection.parts import PART_S


def test_seconds_are_kept_in_place_of_those_of_the_same_tests(tmp_path: Path) -> None:
    file = tmp_path / "seconds.json"
    keep_s(file, {"a.py::f": 1.0, "a.py::g[x::y]": 2.04, "b.py::h": 3.0})
    keep_s(file, {"a.py::g[x::y]": 3.26, "b.py::h": LEAST_S / 2, "b.py::i": LEAST_S / 2})
    assert json.loads(file.read_text()) == {"a.py": {"f": 1.0, "g[x::y]": 3.3}}


def test_no_test_takes_longer_than_a_part_of_the_soak() -> None:
    assert len(measured_s()) > 100
    assert [name for name, seconds in measured_s().items() if seconds > PART_S] == []


def test_the_files_that_were_measured_exist() -> None:
    """Tests of files that were moved or deleted are left out of the measurements, too."""
    assert [path for path in json.loads(MEASURED.read_text()) if not (MEASURED.parents[2] / path).exists()] == []
