"""The lists in Slurm's variables: hosts with brackets, tasks by node; and the port of a step's store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.processes.launchers.slurm_variables import expand_counts, expand_hosts, store_port


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("vm", ["vm"]),
        ("node[01-03,7],gpu-a", ["node01", "node02", "node03", "node7", "gpu-a"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[0-1].example.org", ["r1n0.example.org", "r1n1.example.org", "r2n0.example.org", "r2n1.example.org"]),
        ("a,b-[3]", ["a", "b-3"]),
    ],
)
def test_a_list_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "n[1-", "n[3-1]", "n[a-b]", "n]1[", "n[[1]]", "n[1-99999999]"])
def test_a_text_that_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(InputError) as error:
        expand_hosts(text)
    assert f"{text!r} is no list of hosts" in str(error.value)


def test_tasks_by_node() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("8") == [8]
    for text in ("", "2(x)", "2x3", "2(x3),", "1(x9999999)"):
        with pytest.raises(InputError):
            expand_counts(text)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_counts_are_read_as_slurm_compresses_them(counts: list[int]) -> None:
    groups: list[list[int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1][1] += 1
        else:
            groups.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    assert expand_counts(text) == counts


def test_the_port_of_a_step() -> None:
    ports = {store_port(job, step) for job in range(100_000, 100_100) for step in range(4)}
    assert len(ports) == 400
    assert all(16384 <= store_port(job, 0) < 28672 for job in range(0, 2**26, 99_991))
