"""Every test of the soak is in one of its parts, and the parts take as long as each other."""

import pytest

from tests.selection.parts import PART_S, UNIT_S, UNKNOWN_S, Part, expected_s, parts

pytest_plugins = ["pytester"]
MATRIX = [f"tests/a/test_x.py::test_matrix[{n}]" for n in range(100)]
OTHERS = [f"tests/a/test_y.py::test_{n}" for n in range(20)]
SECONDS = {**dict.fromkeys(MATRIX, 20.0), **{name: float(number) for number, name in enumerate(OTHERS)}}


def test_parts_have_every_test_once_and_take_as_long_as_each_other() -> None:
    dealt = parts([*MATRIX, *OTHERS], SECONDS, part_s=500)
    assert len(dealt) == 5  # 2190 seconds
    assert sorted(name for part in dealt for name in part) == sorted([*MATRIX, *OTHERS])
    taken = [sum(map(SECONDS.__getitem__, part)) for part in dealt]
    assert max(taken) - min(taken) <= UNIT_S
    assert all(set(part) & set(MATRIX) for part in dealt), "the matrix has cases in each"


def test_cases_that_share_what_they_have_started_stay_together() -> None:
    (first, *_) = parts(MATRIX, SECONDS, part_s=60)
    assert first == MATRIX[:3]
    assert parts(["test_long[1]", "test_long[2]"], {"test_long[1]": 90.0, "test_long[2]": 80.0}, part_s=100) == [
        ["test_long[1]"],
        ["test_long[2]"],
    ]


def test_a_test_that_was_not_measured_takes_as_long_as_those_like_it() -> None:
    measured = {"a.py::test_m[1]": 1.0, "a.py::test_m[2]": 3.0, "a.py::test_m[3]": 90.0, "b.py::test_n": 40.0}
    unknown = ["a.py::test_m[4]", "a.py::test_new"]
    assert expected_s(["b.py::test_n", *unknown], measured) == {
        "b.py::test_n": 40.0,
        "a.py::test_m[4]": 3.0,
        "a.py::test_new": UNKNOWN_S,
    }


def test_every_number_is_that_of_a_part(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tests are run by part 0 and by part 3 of three."""
    monkeypatch.setattr("tests.selection.parts.measured_s", lambda: dict.fromkeys(["test_p.py::test_a[0]"], PART_S))
    pytester.makepyfile(test_p="import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_a(n): pass")
    outputs = [
        pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider", "-p", "no:timeout", plugins=[Part(number)])
        for number in range(4)
    ]
    run = [[line for line in output.outlines if "PASSED" in line] for output in outputs]
    assert all(len(lines) == 1 for lines in run)
    assert run[3] == run[0]
    assert len({line for lines in run for line in lines}) == 3
    outputs[3].stdout.fnmatch_lines(["part 0 of 0 to 2: 900 s of processors expected"])
