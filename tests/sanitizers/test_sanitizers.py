"""The C code of the package under gcc's sanitizers of addresses, undefined behavior and threads: random exchanges of 2
to 5 ranks in shared memory, with ranks that are killed at random points, and connections of several users.

`make sanitize` runs all of it, about a million exchanges."""

from pathlib import Path

import pytest

from tests.sanitizers.programs import ACCEPTS, EXCHANGES, NO_FP16, build, changed, missing, run

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

RANKS = (2, 3, 4, 5)
OF_THREADS = 40_000
OF_PROCESSES = 40_000
UNCHECKED = 100_000  # by a program without a sanitizer; the results are compared
ROUNDS = 100


def finished(program: Path, *words: object) -> int:
    """Returns how many exchanges a program has finished without any report."""
    result = run(program, *words)
    assert (result.returncode, result.stderr) == (0, "")
    return int(result.stdout.split()[0])


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_a_few_exchanges_are_clean(sanitizer: str, tmp_path: Path) -> None:
    program = build("exchange", sanitizer, tmp_path, EXCHANGES)
    assert finished(program, "threads", 3, 500, 1) == 500


@pytest.mark.soak
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("fp16", ["of the compiler", "of our own"])
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_many_exchanges_of_threads_are_clean(sanitizer: str, fp16: str, ranks: int, tmp_path: Path) -> None:
    program = build("exchange", sanitizer, tmp_path, EXCHANGES, [] if fp16 == "of the compiler" else [NO_FP16])
    assert finished(program, "threads", ranks, OF_THREADS, ranks) == OF_THREADS


@pytest.mark.soak
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("sanitizer", "exchanges"), [("address", OF_PROCESSES), ("none", UNCHECKED)])
def test_many_exchanges_of_processes_are_clean(sanitizer: str, exchanges: int, ranks: int, tmp_path: Path) -> None:
    program = build("exchange", sanitizer, tmp_path, EXCHANGES)
    assert finished(program, "processes", ranks, exchanges, ranks) == exchanges


@pytest.mark.soak
@pytest.mark.parametrize("ranks", RANKS)
def test_killed_ranks_and_other_tensors_harm_no_rank(ranks: int, tmp_path: Path) -> None:
    assert finished(build("exchange", "address", tmp_path, EXCHANGES), "kills", ranks, ROUNDS, ranks) > ROUNDS


FAULTS = {
    "an integer overflows": ("address", "sums.h", "(int64, uint64_t, uint64_t", "(int64, int64_t, int64_t"),
    "nothing is copied from nowhere": ("address", "shared_memory.c", "d->staged && d->count", "d->staged"),
    "a slice is too long": (
        "address",
        "shared_memory.c",
        "return begin < d->count ? begin : d->count;",
        "return begin;",
    ),
    "a counter has no order": (
        "thread",
        "shared_memory.c",
        "__atomic_store_n(&g->segments[g->rank]->done, sequence, __ATOMIC_RELEASE);",
        "__atomic_store_n(&g->segments[g->rank]->done, sequence, __ATOMIC_RELAXED);",
    ),
    "a peer is not waited for": ("thread", "shared_memory.c", "state = await(g, 1, sequence);", "state = 0;"),
}


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path) -> None:
    """Otherwise the other tests would prove nothing."""
    sanitizer, file, before, after = FAULTS[fault]
    sources = changed(EXCHANGES, file, before, after, tmp_path)
    result = run(build("exchange", sanitizer, tmp_path, sources), "threads", 3, 2000, 1)
    assert result.returncode != 0
    assert "runtime error" in result.stderr or "Sanitizer" in result.stderr


@pytest.mark.soak
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_connections_of_several_users_are_clean(sanitizer: str, tmp_path: Path) -> None:
    result = run(build("accept", sanitizer, tmp_path, ACCEPTS), 20_000, 1)
    assert result.returncode == 0, result.stderr
    assert set(result.stderr.splitlines()) <= {
        "refused: a process of another user of this machine tried to connect to a process of this run"
    }
    assert int(result.stdout.split()[0]) > 20_000
