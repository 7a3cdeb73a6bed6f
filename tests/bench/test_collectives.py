"""The collectives benchmark: its rows and their summary. No test depends on how fast this machine is."""

import json
from dataclasses import asdict, replace
from os import sysconf
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.collectives.schedules.builders import SCHEDULES
from meshwright.collectives.schedules.ring import ring
from meshwright.errors import InputError
from meshwright.simulator.communication.schedules import native_s, schedule_s
from tests.ranks import run_ranks
from tests.simulator.communication.test_schedules import LATENCY
from validation.bench.collectives import timing as collectives_time
from validation.bench.collectives.compare import (
    SIZES,
    CollectiveRow,
    json_report,
    make_rows,
    measure_in_new_ranks,
    parse_sizes,
    summary,
)
from validation.bench.collectives.network import (
    LARGE_BYTES,
    MEDIUM_BYTES,
    MEMORY_BYTES,
    SMALL_BYTES,
    fit_message_cost,
    fit_native_latency,
)
from validation.bench.collectives.openmpi import is_installed, openmpi_rows
from validation.bench.collectives.rank import (
    MEMORY_LIMIT,
    CollectiveMeasurements,
    MeasurementRequest,
    from_json,
    measure,
    to_json,
)
from validation.bench.collectives.show import show, summary_lines
from validation.bench.collectives.timing import RunTime, stolen_s, undisturbed_rounds
from validation.bench.commands import bench


def _measurements(times: dict[str, dict[int, list[float]]], nodes: tuple[int, ...] = (2,)) -> CollectiveMeasurements:
    auto_algorithm = "shared_memory" if len(nodes) == 1 else "two_level_memory"
    return CollectiveMeasurements(
        nodes, 1, 2, 1, LATENCY, auto_algorithm, {**times, "auto": times[auto_algorithm]}, {}, (0.0, 0.0)
    )


def _measure_in_rank(rank: int, world_size: int, nodes: int | None, in_training: bool) -> str:
    import torch

    from meshwright.processes.world import World

    world = World(rank, rank, world_size, world_size, 0, torch.device("cpu"), None)
    return to_json(measure(MeasurementRequest(nodes, (1024, 4096), 1, 0.0, in_training), world))


def test_the_network_is_measured_at_other_sizes_than_the_rows() -> None:
    assert not {SMALL_BYTES, MEDIUM_BYTES, LARGE_BYTES, *MEMORY_BYTES} & set(SIZES)


@pytest.mark.parametrize(("latency_s", "call_s"), [(1e-4, 0.0), (0.0, 6e-4)])
def test_a_small_all_reduce_of_the_backend_is_predicted_as_it_was_measured(latency_s: float, call_s: float) -> None:
    """The latency of its rounds explains the time, and where there is none, its call does."""
    network = replace(LATENCY, within=replace(LATENCY.within, latency_s=latency_s))
    measured = fit_native_latency(network, 6e-4, (2,))
    assert native_s(32, 2, measured) == pytest.approx(6e-4)
    assert measured.host.call_s == pytest.approx(call_s, abs=1e-12)


def test_a_small_ring_is_predicted_as_it_was_measured() -> None:
    measured = fit_message_cost(LATENCY, RunTime(1e-3, 6e-4), 64, (4,))
    assert schedule_s(ring(4), 64, measured) == pytest.approx(1e-3, rel=0.01)
    # Where the ring waited, the cores were busy for 0.1 ms of each round, and a message takes no more than that.
    waited = fit_message_cost(LATENCY, RunTime(1.0, 6e-4), 64, (4,))
    assert waited.host.message_s == pytest.approx(1e-4)


def test_rounds_in_which_cores_were_taken_away_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    stolen, made = [0.0], iter(range(100))

    def run() -> int:
        number = next(made)
        stolen[0] += 1.0 if number in taken else 0.0
        return number

    monkeypatch.setattr(collectives_time, "stolen_s", lambda: stolen[0])
    monkeypatch.setattr(collectives_time, "slowest_rank", lambda group, seconds: seconds)
    group: Any = None
    taken: set[int] = {1, 2}
    assert undisturbed_rounds(group, run, 3) == [0, 3, 4]
    made, taken = iter(range(100)), set(range(1, 100))
    assert undisturbed_rounds(group, run, 3)[0] == 0
    assert next(made) == 6  # twice as many, and no more


def test_stolen_seconds_are_read_from_the_kernel(tmp_path: Path) -> None:
    stat_file = tmp_path / "stat"
    stat_file.write_text("cpu  10 0 5 100 3 0 2 250 0 0\ncpu0 1 1 1 1\n")
    assert stolen_s(stat_file) == pytest.approx(250 / sysconf("SC_CLK_TCK"))
    assert stolen_s(tmp_path / "none") == 0.0


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "nodes"), [(2, None), (4, 2)])
def test_every_algorithm_has_a_row_of_every_size(ranks: int, nodes: int | None) -> None:
    measured = from_json(run_ranks(_measure_in_rank, ranks, nodes, False)[0])
    rows = make_rows(measured)
    expected = {"native", *SCHEDULES, "shared_memory", "auto", MEMORY_LIMIT}
    expected = expected | {"two_level_memory"} if nodes else expected - {"two_level"}
    assert {row.algorithm for row in rows} == expected
    assert {(row.bytes, row.ranks) for row in rows} == {(1024, ranks), (4096, ranks)}
    assert len(rows) == 2 * len(expected)
    for row in rows:
        assert row.spread[0] <= row.time_s <= row.spread[1]
        assert row.bandwidth_bytes_per_s == pytest.approx(row.bytes / row.time_s)
        across = row.algorithm == "shared_memory" and nodes  # nodes have no memory in common
        assert (row.predicted_s is None) == bool(row.algorithm == MEMORY_LIMIT or across)
    assert measured.auto_algorithm == ("two_level_memory" if nodes else "shared_memory")
    report = json.loads(json.dumps(json_report(rows, measured)))
    assert len(report["rows"]) == len(rows)
    assert {"auto_regret", "crossovers_measured", "crossovers_predicted", "ranked_wrongly"} <= set(report["summary"])
    assert report["wires"]["host"]["message_s"] > 0


@pytest.mark.soak
def test_in_training_each_hook_is_compared_with_no_communication() -> None:
    measured = from_json(run_ranks(_measure_in_rank, 2, None, True, timeout_s=600)[0])
    assert measured.training is not None
    names = [row["algorithm"] for row in measured.training["rows"]]
    assert names == ["native", "ring", "tree", "halving_doubling", "shared_memory"]
    for row in measured.training["rows"]:
        assert row["spread"][0] <= row["time_s"] <= row["spread"][1]
        assert row["spread_lost_s"][0] <= row["lost_s"] <= row["spread_lost_s"][1]
    assert [one["algorithm"] for one in measured.training["sessions"]] == ["native", "auto"]


def test_regret_crossovers_and_wrong_pairs() -> None:
    times: dict[str, dict[int, list[float]]] = {
        "native": {1024: [1.0, 1.1], 4096: [1.0, 1.1]},
        "shared_memory": {1024: [0.5, 0.6], 4096: [3.0, 3.1]},
        "ring": {1024: [9.0, 9.1], 4096: [1.05, 9.0]},
    }
    measured = _measurements(times)
    report = summary(make_rows(measured), measured)
    assert report["auto"] == "shared_memory"
    assert report["auto_regret"][1024] == 0
    assert report["auto_regret"][4096] == pytest.approx(3.05 / 1.05 - 1, abs=1e-3)
    assert report["crossovers_measured"] == [{"bytes": 4096, "from": "shared_memory", "to": "native"}]
    assert report["crossovers_predicted"] == []
    # Shared memory was predicted to be the fastest; the ring's rounds overlap with everybody's.
    assert report["pairs_apart"] == 4
    assert report["ranked_wrongly"] == [{"bytes": 4096, "pair": ("native", "shared_memory")}]
    assert any("native from 4 KiB on" in line for line in summary_lines(report))


def test_rounds_that_overlap_are_no_crossover() -> None:
    times: dict[str, dict[int, list[float]]] = {
        "native": {1024: [1.0, 1.1], 4096: [0.4, 0.5, 0.6]},
        "shared_memory": {1024: [0.5, 0.6], 4096: [0.5, 0.7, 0.8]},
    }
    report = summary(make_rows(_measurements(times)), _measurements(times))
    assert report["fastest"][4096] == "native"
    assert report["crossovers_measured"] == []


def test_nodes_of_one_machine_share_no_memory() -> None:
    times = {
        name: {MB: [second]} for name, second in (("native", 2.0), ("shared_memory", 0.1), ("two_level_memory", 1.0))
    }
    measured = _measurements(times, (2, 2))
    report = summary(make_rows(measured), measured)
    assert report["fastest"] == {MB: "two_level_memory"}
    assert report["auto_regret"] == {MB: 0}


MB = 2**20


def test_measurements_survive_json() -> None:
    measured = _measurements({"native": {1024: [1.0]}, "shared_memory": {1024: [0.5]}})
    assert from_json(to_json(measured)) == measured


def test_people_see_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    measured = _measurements({"native": {1024: [1.0, 2.0]}, "shared_memory": {1024: [0.5, 0.6]}})
    show(make_rows(measured), measured, Console(width=200))
    printed = capsys.readouterr().out
    assert "auto is shared_memory" in printed
    assert "1 KiB  shared memory" in printed
    assert "500–600 ms" in printed


def test_the_table_breaks_between_words_on_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    slow = {1024: [12.34e-3, 56.78e-3]}
    times = {"native": {1024: [1e-3, 2e-3]}, "halving_doubling": slow, "shared_memory": {1024: [1e-6, 2e-6]}}
    measured = _measurements(times)
    show(make_rows(measured), measured, Console(width=80))
    printed = capsys.readouterr().out
    assert "12.3–56.8 ms" in printed, "rounds are on one line"
    assert "halving " in printed
    assert "doubling" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_sizes_are_read_with_their_units() -> None:
    assert parse_sizes("1K, 4M,100, 2kib") == (100, 1024, 2048, 4 * 2**20)
    assert parse_sizes(None) == SIZES
    for wrong in ("1X", "", "-4", "2"):
        with pytest.raises(InputError, match="--sizes"):
            parse_sizes(wrong)


def test_ranks_that_cannot_form_equal_nodes_are_refused() -> None:
    with pytest.raises(InputError, match="choose --nodes"):
        measure_in_new_ranks(MeasurementRequest(2, (1024,)), 3)
    with pytest.raises(InputError, match="at least two"):
        measure_in_new_ranks(MeasurementRequest(None, (1024,)), 1)


@pytest.mark.soak
def test_the_command_ends_with_one_line_of_json() -> None:
    words = ["collectives", "--sizes", "1K", "--rounds", "1", "--no-openmpi", "--json"]
    done = CliRunner().invoke(bench, words, catch_exceptions=False)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert {row["algorithm"] for row in report["rows"]} >= {"native", "ring", "shared_memory", "auto"}
    assert set(report["rows"][0]) == {
        *("algorithm", "ranks", "bytes", "time_s", "spread", "bandwidth_bytes_per_s", "ratio_to_native"),
        "predicted_s",
    }


def test_openmpi_says_what_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    from validation.bench.collectives import openmpi as collectives_openmpi

    row = CollectiveRow("native", 2, 1024, 1.0, (1.0, 1.0), 1024.0, 1.0, None)
    monkeypatch.setattr(collectives_openmpi, "_mpirun", lambda: None)
    assert not is_installed()
    with pytest.raises(InputError, match="mpirun and mpi4py"):
        openmpi_rows([row], 1)
    monkeypatch.setattr(collectives_openmpi, "_measure", lambda ranks, sizes, rounds: {1024: [0.5]})
    assert openmpi_rows([row], 1) == [row, CollectiveRow("openmpi", 2, 1024, 0.5, (0.5, 0.5), 2048.0, 0.5, None)]
    assert asdict(row)["algorithm"] == "native"
