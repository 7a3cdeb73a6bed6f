"""The rank that the others wait for is named, with what it spends its time on."""

import json
from pathlib import Path

from meshwright.train.output.activity_times import times_file
from meshwright.train.output.times.stragglers import StragglerWatch, find_straggler

USUAL = {"data": 0.01, "forward": 0.2, "backward": 0.3, "exchange": 0.49}
LOADING = {"data": 0.62, "forward": 0.15, "backward": 0.23}
LINE = "rank 1 is 2.0 times slower than the median of the other ranks: 62% of its step is loading data"


def write(folder: Path, rank: int, step: int, seconds: dict[str, float]) -> None:
    with times_file(folder, rank).open("a") as file:
        file.write(json.dumps({"step": step, "steps": 10, "time": 0.0, "seconds": seconds}) + "\n")


def test_the_slow_rank_and_its_activity_are_named() -> None:
    straggler = find_straggler([USUAL, LOADING, USUAL])
    assert straggler is not None
    assert (straggler.rank, straggler.activity) == (1, "data")
    assert straggler.describe() == LINE


def test_equal_ranks_and_a_single_rank_are_not_slow() -> None:
    assert find_straggler([USUAL, USUAL]) is None
    assert find_straggler([LOADING]) is None


def test_a_slow_activity_is_the_one_that_takes_longer_than_elsewhere() -> None:
    """Its backward pass takes most of its time, as that of the others does; its forward pass is slow."""
    straggler = find_straggler([{"forward": 0.1, "backward": 0.3}, {"forward": 0.4, "backward": 0.5}])
    assert straggler is not None
    assert straggler.describe().endswith("44% of its step is the forward pass")


def test_a_rank_is_named_once_and_only_after_two_slow_windows(tmp_path: Path) -> None:
    told: list[str] = []
    watch = StragglerWatch(tmp_path, 2, told.append)
    watch.look()  # nothing is written yet
    counts = []
    for step in (10, 20, 30):
        write(tmp_path, 0, step, USUAL)
        write(tmp_path, 1, step, LOADING)
        watch.look()
        watch.look()  # at the same window
        counts.append(len(told))
    assert (counts, told) == ([0, 1, 1], [f"warning: {LINE}"])
    assert watch.result() == {"straggler": LINE}


def test_windows_that_a_rank_has_not_written_are_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    watch = StragglerWatch(tmp_path, 2, told.append)
    for step in (10, 20, 30):
        write(tmp_path, 0, step, USUAL)
    write(tmp_path, 1, 10, LOADING)
    write(tmp_path, 1, 30, USUAL)
    watch.look()
    watch.look()
    assert told == []
