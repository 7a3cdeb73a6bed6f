"""How long ranks take to combine tensors, by algorithm and size, beside the backend's own all-reduce; and how well that
was predicted from single messages that were measured before."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.bench.collectives.rank import MEMORY_LIMIT, TIMEOUT_S, Asked, Found, from_json, measure
from meshwright.cluster.cores import usable_cores
from meshwright.errors import InputError
from meshwright.launch.local.launch import Ranks, launch
from meshwright.launch.rank import run_rank
from meshwright.launch.world import World
from meshwright.simulator.communication.schedules import prices

SIZES = tuple(2**power for power in range(10, 27, 2))
REFERENCE = "native"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Row:
    """`time_s` is the median of the rounds, `spread` their least and most. `bandwidth_bytes_per_s` is the tensor's
    bytes by that time. `ratio_to_native` and `predicted_s` are None where there is nothing to compare with."""

    algorithm: str
    ranks: int
    bytes: int
    time_s: float
    spread: tuple[float, float]
    bandwidth_bytes_per_s: float
    ratio_to_native: float | None
    predicted_s: float | None


def parse_sizes(text: str | None) -> tuple[int, ...]:
    """`1K,256K,4M`, or plain bytes; the default ones without it."""
    if text is None:
        return SIZES
    sizes = []
    for word in text.split(","):
        digits = word.strip().upper().removesuffix("IB").removesuffix("B")
        number, unit = digits.rstrip("KMG"), digits[len(digits.rstrip("KMG")) :]
        if not number.isdigit() or unit not in _UNITS or int(number) * _UNITS[unit] < 4:
            raise InputError(f"--sizes {text}: '{word.strip()}' is no number of bytes such as 4096, 256K or 16M")
        sizes.append(int(number) * _UNITS[unit])
    return tuple(sorted(set(sizes)))


def measured_here(asked: Asked, ranks: int) -> Found:
    """By ranks that are started on this machine."""
    if ranks < 2:
        raise InputError(f"--ranks {ranks}: one rank has nobody to combine with, start two at least")
    if asked.nodes and ranks % asked.nodes:
        raise InputError(f"--ranks {ranks} are no {asked.nodes} nodes of equal size: choose --nodes that divides it")
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        file = Path(folder, "found.json")
        launch(
            "meshwright.bench.collectives.rank",
            [json.dumps(asdict(asked)), str(file)],
            Ranks(ranks, "cpu", max(1, usable_cores() // ranks), 0),
            Path(folder, "ranks"),
        )
        return from_json(file.read_text())


def measured_joined(asked: Asked) -> Found | None:
    """As a rank of a world that is there already; None on all but its first one."""
    found: list[Found] = []

    def work(world: World, place: object) -> None:
        result = measure(asked, world)
        if world.rank == 0:
            found.append(result)

    run_rank(work, "cpu", TIMEOUT_S)
    return found[0] if found else None


def rows_of(found: Found) -> list[Row]:
    """By size, and within a size as they were measured."""
    ranks = sum(found.nodes)
    rows = []
    for size in found.times[REFERENCE]:
        predicted = predictions(found, size)
        native = median(found.times[REFERENCE][size])
        for name, by_size in found.times.items():
            if not by_size.get(size):
                continue
            time_s = median(by_size[size])
            rows.append(
                Row(
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


def predictions(found: Found, size: int) -> dict[str, float]:
    """Seconds by algorithm; `auto` as what it picked."""
    ranks = sum(found.nodes)
    known = prices(size, ranks, found.nodes, found.wires)
    if found.picked in known:
        known["auto"] = known[found.picked]
    return known


# ---- what the rows say


def summary(rows: Sequence[Row], found: Found) -> dict[str, Any]:
    """Of the algorithms that could be chosen here: nodes that are on one machine count as several, where no memory is
    shared."""
    choices = [row for row in rows if row.algorithm in _choices(rows, found)]
    sizes = sorted({row.bytes for row in choices})
    by_size = {size: [row for row in choices if row.bytes == size] for size in sizes}
    autos = {row.bytes: row for row in rows if row.algorithm == "auto"}
    errors = [abs(row.predicted_s / row.time_s - 1) for row in choices if row.predicted_s is not None]
    fastest = {size: min(of_size, key=lambda row: row.time_s) for size, of_size in by_size.items()}
    chosen = {size: min(of_size, key=_predicted) for size, of_size in by_size.items()}
    wrong = {size: _ranked_wrongly(of_size) for size, of_size in by_size.items()}
    return {
        "auto": found.picked,
        "auto_regret": {size: _regret(autos[size], fastest[size]) for size in sizes if size in autos},
        "chosen": {size: row.algorithm for size, row in chosen.items()},
        "chosen_regret": {size: _regret(chosen[size], fastest[size]) for size in sizes},
        "fastest": {size: row.algorithm for size, row in fastest.items()},
        "crossovers_measured": _crossovers(by_size, lambda row: row.time_s, lambda row: row.spread),
        "crossovers_predicted": _crossovers(by_size, _predicted, lambda row: (_predicted(row), _predicted(row))),
        "pairs_apart": sum(len(_apart(of_size)) for of_size in by_size.values()),
        "ranked_wrongly": [{"bytes": size, "pair": pair} for size, pairs in wrong.items() for pair in pairs],
        "prediction_error_median": round(median(errors), 4) if errors else None,
        "prediction_error_worst": round(max(errors), 4) if errors else None,
        "error_by_algorithm": _errors(choices),
    }


def _choices(rows: Sequence[Row], found: Found) -> list[str]:
    names = list(dict.fromkeys(row.algorithm for row in rows if row.predicted_s is not None))
    return [name for name in names if name != "auto" and not (name == "shared_memory" and len(found.nodes) > 1)]


def _predicted(row: Row) -> float:
    assert row.predicted_s is not None
    return row.predicted_s


def _regret(taken: Row, fastest: Row) -> float:
    """How much longer it took than the fastest, as a part of that."""
    return round(max(0.0, taken.time_s / fastest.time_s - 1), 4)


def _crossovers(
    by_size: dict[int, list[Row]], seconds: Callable[[Row], float], spread: Callable[[Row], tuple[float, float]]
) -> list[dict[str, Any]]:
    """From which size on another algorithm is the fastest, and not only by chance: rounds of the one before it are all
    slower."""
    changes: list[dict[str, Any]] = []
    before = None
    for size, rows in by_size.items():
        of_name, best = {row.algorithm: row for row in rows}, min(rows, key=seconds)
        if before is not None and before in of_name and spread(best)[1] >= spread(of_name[before])[0]:
            continue
        if before is not None:
            changes.append({"bytes": size, "from": before, "to": best.algorithm})
        before = best.algorithm
    return changes


def _ranked_wrongly(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Pairs predicted the wrong way round though they are apart."""
    wrong = [(one, other) for one, other in _apart(rows) if _predicted(one) > _predicted(other)]
    return [(one.algorithm, other.algorithm) for one, other in wrong]


def _apart(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs whose rounds do not even touch: (faster, slower) as measured."""
    pairs = combinations(sorted(rows, key=lambda row: row.time_s), 2)
    return [(one, other) for one, other in pairs if one.spread[1] < other.spread[0]]


def _errors(rows: Sequence[Row]) -> dict[str, float]:
    """Median of the absolute error, as a part of what was measured."""
    names = dict.fromkeys(row.algorithm for row in rows)
    errors = {name: [abs(_predicted(row) / row.time_s - 1) for row in rows if row.algorithm == name] for name in names}
    return {name: round(median(found), 4) for name, found in errors.items()}


def told(rows: Sequence[Row], found: Found) -> dict[str, Any]:
    """What `--json` prints."""
    said: dict[str, Any] = {
        "rows": [asdict(row) for row in rows],
        "summary": summary(rows, found),
        "ranks": sum(found.nodes),
        "nodes": found.nodes,
        "machines": found.machines,
        "cores": found.cores,
        "rounds": len(next(iter(found.times[REFERENCE].values()))),
        "load": found.load,
        "stolen": found.stolen,
        "wires": asdict(found.wires),
        "skipped": [{"algorithm": name, "reason": reason} for name, reason in found.refused.items()],
    }
    return said | ({"in_training": found.training} if found.training else {})
