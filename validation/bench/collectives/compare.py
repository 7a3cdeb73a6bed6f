"""`validation.bench collectives`: how long an all-reduce takes, by algorithm and size, compared with the backend's own
all-reduce. It also shows how well these times are predicted from the cost of single messages, which is measured
first."""

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.cluster.cores import usable_cores
from meshwright.errors import InputError
from meshwright.processes.local.launch import RankSettings, launch
from meshwright.processes.rank import run_rank
from meshwright.processes.world import World
from meshwright.simulator.communication.schedules import algorithm_prices
from validation.bench.collectives.rank import (
    MEMORY_LIMIT,
    TIMEOUT_S,
    CollectiveMeasurements,
    MeasurementRequest,
    from_json,
    measure,
)

SIZES = tuple(2**power for power in range(10, 27, 2))
REFERENCE = "native"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LARGEST_SIZE = 64 * 2**30


@dataclass(frozen=True)
class CollectiveRow:
    """The time of one algorithm at one size.

    time_s                 the median of the rounds
    spread                 the shortest and the longest round
    bandwidth_bytes_per_s  the bytes of the tensor divided by `time_s`
    ratio_to_native        `time_s` divided by that of the backend; None for `memory_limit`, which is no all-reduce
    predicted_s            the predicted time; None if there is no prediction
    """

    algorithm: str
    ranks: int
    bytes: int
    time_s: float
    spread: tuple[float, float]
    bandwidth_bytes_per_s: float
    ratio_to_native: float | None
    predicted_s: float | None


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """Returns the sizes in bytes that a text such as `1K,256K,4M` or `4096` names; the default sizes if the text is
    None."""
    if text is None:
        return SIZES
    sizes = []
    for word in text.split(","):
        digits = word.strip().upper().removesuffix("IB").removesuffix("B")
        number, unit = digits.rstrip("KMG"), digits[len(digits.rstrip("KMG")) :]
        is_number = re.fullmatch(r"[0-9]{1,15}", number) and unit in _UNITS
        if not is_number or int(number) * _UNITS[unit] < 4:
            raise InputError(f"--sizes {text}: '{word.strip()}' is no number of bytes such as 4096, 256K or 16M")
        if int(number) * _UNITS[unit] > _LARGEST_SIZE:
            raise InputError(f"--sizes {text}: '{word.strip()}' is too large for a message: at most 64G")
        sizes.append(int(number) * _UNITS[unit])
    return tuple(sorted(set(sizes)))


def measure_in_new_ranks(request: MeasurementRequest, ranks: int) -> CollectiveMeasurements:
    """Starts `ranks` ranks on this machine, and returns what they measured."""
    if ranks < 2:
        raise InputError(f"--ranks {ranks}: an all-reduce needs several ranks, start at least two")
    if request.nodes and ranks % request.nodes:
        raise InputError(
            f"--ranks {ranks} cannot form {request.nodes} nodes of equal size: choose --nodes that divides it"
        )
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        file = Path(folder, "measured.json")
        launch(
            "validation.bench.collectives.rank",
            [json.dumps(asdict(request)), str(file)],
            RankSettings(ranks, "cpu", max(1, usable_cores() // ranks), 0),
            Path(folder, "ranks"),
        )
        return from_json(file.read_text())


def measure_in_launched_ranks(request: MeasurementRequest) -> CollectiveMeasurements | None:
    """Measures in the ranks that a launcher has started; each of them calls this function. Returns the measurements on
    rank 0, and None on all other ranks."""
    results: list[CollectiveMeasurements] = []

    def measure_as_rank(world: World, _: object) -> None:
        measured = measure(request, world)
        if world.rank == 0:
            results.append(measured)

    run_rank(measure_as_rank, "cpu", TIMEOUT_S)
    return results[0] if results else None


def make_rows(measured: CollectiveMeasurements) -> list[CollectiveRow]:
    """Returns the rows, ordered by size, and within a size in the order in which the algorithms were measured."""
    ranks = sum(measured.nodes)
    rows = []
    for size in measured.times[REFERENCE]:
        predicted = predictions(measured, size)
        native = median(measured.times[REFERENCE][size])
        for name, by_size in measured.times.items():
            if not by_size.get(size):
                continue
            time_s = median(by_size[size])
            rows.append(
                CollectiveRow(
                    algorithm=name,
                    ranks=ranks,
                    bytes=size,
                    time_s=time_s,
                    spread=(min(by_size[size]), max(by_size[size])),
                    bandwidth_bytes_per_s=size / time_s,
                    ratio_to_native=None if name == MEMORY_LIMIT else time_s / native,
                    predicted_s=predicted.get(name),
                )
            )
    return rows


def predictions(measured: CollectiveMeasurements, size: int) -> dict[str, float]:
    """Returns the predicted seconds of an all-reduce of `size` bytes, by algorithm. `auto` gets the prediction of the
    algorithm that `auto` selects on these ranks."""
    ranks = sum(measured.nodes)
    seconds = algorithm_prices(size, ranks, measured.nodes, measured.network)
    if measured.auto_algorithm in seconds:
        seconds["auto"] = seconds[measured.auto_algorithm]
    return seconds


# ---- the summary of the rows


def summary(rows: Sequence[CollectiveRow], measured: CollectiveMeasurements) -> dict[str, Any]:
    """Returns how good the predictions are, and how much slower than the fastest algorithm two choices are: `auto`, and
    the algorithm that is predicted to be the fastest (`chosen`). Only algorithms that could be chosen on these nodes
    count; several nodes do not share memory, even if they are simulated on one machine."""
    selectable = [row for row in rows if row.algorithm in _selectable_algorithms(rows, measured)]
    sizes = sorted({row.bytes for row in selectable})
    by_size = {size: [row for row in selectable if row.bytes == size] for size in sizes}
    auto_rows = {row.bytes: row for row in rows if row.algorithm == "auto"}
    errors = [abs(row.predicted_s / row.time_s - 1) for row in selectable if row.predicted_s is not None]
    fastest = {size: min(size_rows, key=lambda row: row.time_s) for size, size_rows in by_size.items()}
    predicted_best = {size: min(size_rows, key=_predicted) for size, size_rows in by_size.items()}
    wrong_pairs = {size: _ranked_wrongly(size_rows) for size, size_rows in by_size.items()}
    return {
        "auto": measured.auto_algorithm,
        "auto_regret": {size: _regret(auto_rows[size], fastest[size]) for size in sizes if size in auto_rows},
        "chosen": {size: row.algorithm for size, row in predicted_best.items()},
        "chosen_regret": {size: _regret(predicted_best[size], fastest[size]) for size in sizes},
        "fastest": {size: row.algorithm for size, row in fastest.items()},
        "crossovers_measured": _crossovers(by_size, lambda row: row.time_s, lambda row: row.spread),
        "crossovers_predicted": _crossovers(by_size, _predicted, lambda row: (_predicted(row), _predicted(row))),
        "pairs_apart": sum(len(_separate_pairs(size_rows)) for size_rows in by_size.values()),
        "ranked_wrongly": [{"bytes": size, "pair": pair} for size, pairs in wrong_pairs.items() for pair in pairs],
        "prediction_error_median": round(median(errors), 4) if errors else None,
        "prediction_error_worst": round(max(errors), 4) if errors else None,
        "error_by_algorithm": _median_errors(selectable),
    }


def _selectable_algorithms(rows: Sequence[CollectiveRow], measured: CollectiveMeasurements) -> list[str]:
    names = list(dict.fromkeys(row.algorithm for row in rows if row.predicted_s is not None))
    return [name for name in names if name != "auto" and not (name == "shared_memory" and len(measured.nodes) > 1)]


def _predicted(row: CollectiveRow) -> float:
    assert row.predicted_s is not None
    return row.predicted_s


def _regret(row: CollectiveRow, fastest: CollectiveRow) -> float:
    """Returns how much longer a row took than the fastest row, as a share of the fastest row's time."""
    return round(max(0.0, row.time_s / fastest.time_s - 1), 4)


def _crossovers(
    by_size: dict[int, list[CollectiveRow]],
    seconds: Callable[[CollectiveRow], float],
    spread: Callable[[CollectiveRow], tuple[float, float]],
) -> list[dict[str, Any]]:
    """Returns the sizes from which on another algorithm is the fastest, as dicts with `bytes`, `from` and `to`. A
    change counts only if all rounds of the previous fastest algorithm were slower than all rounds of the new one, to
    exclude chance."""
    crossovers: list[dict[str, Any]] = []
    previous = None
    for size, rows in by_size.items():
        by_name, best = {row.algorithm: row for row in rows}, min(rows, key=seconds)
        if previous is not None and previous in by_name and spread(best)[1] >= spread(by_name[previous])[0]:
            continue
        if previous is not None:
            crossovers.append({"bytes": size, "from": previous, "to": best.algorithm})
        previous = best.algorithm
    return crossovers


def _ranked_wrongly(rows: Sequence[CollectiveRow]) -> list[tuple[str, str]]:
    """Returns the pairs (faster, slower) of algorithms whose rounds do not overlap, but whose order is predicted
    wrongly."""
    wrong = [(faster, slower) for faster, slower in _separate_pairs(rows) if _predicted(faster) > _predicted(slower)]
    return [(faster.algorithm, slower.algorithm) for faster, slower in wrong]


def _separate_pairs(rows: Sequence[CollectiveRow]) -> list[tuple[CollectiveRow, CollectiveRow]]:
    """Returns the pairs (faster, slower) of rows whose rounds do not overlap."""
    pairs = combinations(sorted(rows, key=lambda row: row.time_s), 2)
    return [(faster, slower) for faster, slower in pairs if faster.spread[1] < slower.spread[0]]


def _median_errors(rows: Sequence[CollectiveRow]) -> dict[str, float]:
    """Returns the median absolute error of each algorithm's predictions, as a share of the measured time."""
    names = dict.fromkeys(row.algorithm for row in rows)
    errors = {name: [abs(_predicted(row) / row.time_s - 1) for row in rows if row.algorithm == name] for name in names}
    return {name: round(median(values), 4) for name, values in errors.items()}


def json_report(rows: Sequence[CollectiveRow], measured: CollectiveMeasurements) -> dict[str, Any]:
    """Returns the JSON object that `--json` prints."""
    report: dict[str, Any] = {
        "rows": [asdict(row) for row in rows],
        "summary": summary(rows, measured),
        "ranks": sum(measured.nodes),
        "nodes": measured.nodes,
        "machines": measured.machines,
        "cores": measured.cores,
        "rounds": len(next(iter(measured.times[REFERENCE].values()))),
        "load": measured.load,
        "stolen": measured.stolen_cores,
        "wires": asdict(measured.network),
        "skipped": [{"algorithm": name, "reason": reason} for name, reason in measured.unavailable.items()],
    }
    return report | ({"in_training": measured.training} if measured.training else {})
