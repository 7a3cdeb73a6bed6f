"""The command line: draws programs, runs them, keeps their outcomes in a file, and prints a summary."""

import argparse
import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.forking import environment
from validation.fuzz.counts import add_rows, page_tables, read_counts, write_counts
from validation.fuzz.draw import draw_case
from validation.fuzz.fault_search import search_faults
from validation.fuzz.operators.table import OPERATORS
from validation.fuzz.plans import PLANS, axes_of
from validation.fuzz.program import Case
from validation.fuzz.rare import Rarity, rarity_of
from validation.fuzz.render import render
from validation.fuzz.shrink import shrink
from validation.fuzz.summary import summary_lines
from validation.fuzz.training.outcome import Outcome, Pools, outcome_of

_ATTEMPTS = 20  # draws of one number, since some programs do not run in plain PyTorch
Row = dict[str, Any]  # a line of the file of results


def main() -> None:
    options = _parse()
    torch.set_num_threads(1)
    environment.AT_START.update(os.environ)  # ranks get these variables; without PATH they could not compile
    if options.replay:
        _replay([Path(name) for name in options.replay], options.shrink)
    elif options.count:
        _count([Path(name) for name in options.count])
    elif options.faults is not None:
        search_faults(options.faults, options.seed, lambda line: print(line, flush=True))
    else:
        _run(options)


def _run(options: argparse.Namespace) -> None:
    results = Path(options.results) if options.results else None
    rows = read_rows(results)
    done = {(row["seed"], row["number"]) for row in rows}
    numbers = [n for n in range(options.first, options.first + options.programs) if (options.seed, n) not in done]
    plans = [name for name in PLANS if _is_chosen(name, options.plans, options.ranks)]
    operators = options.only_operators.split(",") if options.only_operators else ()
    unknown = set(operators) - set(OPERATORS)
    if unknown or not plans:
        sys.exit(f"unknown operators: {sorted(unknown)}" if unknown else f"no plan fits --plans {options.plans}")
    rarity = None if options.even else rarity_of(read_counts())
    pools, start = Pools(), time.monotonic()
    drawn = fuzz(options.seed, numbers, plans, operators, pools, options.fault, rarity)
    try:
        for count, (case, row) in enumerate(drawn, 1):
            rows.append(row)
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if row["outcome"] in ("wrong", "crash"):
                _report(case, row, options.failures)
            if count % 50 == 0:
                print(f"{count} programs in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            if options.limit is not None and time.monotonic() - start > options.limit:
                break
    finally:
        pools.close()
    print("\n".join(summary_lines(rows)))


def _replay(files: list[Path], shrinks: bool) -> None:
    """Runs kept cases again, and prints their outcomes; if `shrinks`, writes the smallest ones beside them."""
    pools = Pools()
    try:
        for file in files:
            case = Case.from_json(json.loads(file.read_text())["case"])
            outcome = outcome_of(case, pools)
            if shrinks and outcome.kind in ("wrong", "crash"):
                case, outcome = shrink(case, outcome, lambda smaller: outcome_of(smaller, pools))
                small = file.with_name(f"{file.stem}.small.json")
                small.write_text(json.dumps({"case": case.as_json(), "outcome": outcome.kind}, indent=1) + "\n")
                small.with_suffix(".py").write_text(render(case))
            print(
                f"{file.name}: {outcome.kind}: {case.plan_kind}, {case.loss}, {case.optimizer}, {case.door}", flush=True
            )
            print(f"    {', '.join(case.program.operators)}\n    {outcome.reason[-1500:]}", flush=True)
    finally:
        pools.close()


def _count(files: list[Path]) -> None:
    """Adds the results of these files to the counts of the repository. Programs that were wrong or crashed are run
    again, and count as they end now."""
    if missing := [str(file) for file in files if not file.is_file()]:
        sys.exit(f"there is no file {', '.join(missing)}")
    rows, pools = distinct_rows(row for file in files for row in read_rows(file)), Pools()
    try:
        for number, row in enumerate(rows):
            if row["outcome"] in ("wrong", "crash"):
                outcome = outcome_of(drawn_again(row), pools)
                rows[number] = {**row, "outcome": outcome.kind}
                print(
                    f"{row['seed']}/{row['number']}: {row['outcome']}, now {outcome.kind}", file=sys.stderr, flush=True
                )
    finally:
        pools.close()
    counts = add_rows(read_counts(), (row for row in rows if row["outcome"] != "invalid"))
    write_counts(counts)
    print("\n".join(page_tables(counts)))


def fuzz(
    seed: int,
    numbers: Collection[int],
    plans: Collection[str],
    operators: Collection[str],
    pools: Pools,
    fault: str | None = None,
    rarity: Rarity | None = None,
) -> Iterator[tuple[Case, Row]]:
    """Yields the case of each number with its row of results. With `rarity`, and unless there are `operators` to draw
    from, each program has an operator that few programs had before."""
    for number in numbers:
        rare = rarity.operator(number) if rarity and not operators else None
        chosen = [rare] if rare else operators
        for attempt in range(_ATTEMPTS):
            case = draw_case(seed, number, attempt, plans, chosen, rarity.plan_weights if rarity else None)
            begin = time.monotonic()
            outcome = outcome_of(case, pools, fault)
            if outcome.kind != "invalid":
                row = _row(seed, number, attempt, case, outcome, time.monotonic() - begin)
                yield case, {**row, "drawn_from": sorted(chosen)}
                break


def drawn_again(row: Row) -> Case:
    """The case of a row of results. Rows without `drawn_from` are of programs that had any operator."""
    return draw_case(row["seed"], row["number"], row["attempt"], [row["plan"]], row.get("drawn_from", ()))


def distinct_rows(rows: Iterable[Row]) -> list[Row]:
    """One row for each program."""
    what_decides = ("seed", "number", "attempt", "plan")
    return list({(*(row[key] for key in what_decides), *row.get("drawn_from", ())): row for row in rows}.values())


def read_rows(file: Path | None) -> list[Row]:
    """The results of earlier runs."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.exists() else []


def _row(seed: int, number: int, attempt: int, case: Case, outcome: Outcome, seconds: float) -> Row:
    return {
        "seed": seed,
        "number": number,
        "attempt": attempt,
        "plan": case.plan_kind,
        "axes": axes_of(case.plan_kind),
        "model": case.program.kind,
        "operators": list(case.program.operators),
        "loss": case.loss,
        "optimizer": case.optimizer,
        "door": case.door,
        "outcome": outcome.kind,
        "reason": outcome.reason,
        "error": outcome.error,
        "when": outcome.when,
        "names_line": outcome.names_line,
        "seconds": round(seconds, 2),
    }


def _report(case: Case, row: Row, folder: str | None) -> None:
    line = row["reason"].strip().splitlines()[-1][:200]
    print(f"{row['outcome']}: {row['seed']}/{row['number']} {row['plan']}: {line}", file=sys.stderr, flush=True)
    if folder is not None:
        file = Path(folder) / f"{row['seed']}_{row['number']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"case": case.as_json(), "row": row}, indent=1))
        file.with_suffix(".py").write_text(render(case))


def _is_chosen(name: str, plans: str, ranks: str) -> bool:
    chosen = not plans or any(name.startswith(start) for start in plans.split(","))
    return chosen and str(PLANS[name].ranks) in ranks.split(",")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m validation.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100, help="how many programs to run")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--even", action="store_true", help="do not prefer operators and axes that few programs had")
    parser.add_argument("--limit", type=float, help="draw no more programs after this many seconds")
    parser.add_argument("--results", help="a file of JSON lines; programs that it has are left out")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks, such as 2,3")
    parser.add_argument("--plans", default="", help="beginnings of the names of plans, such as 'tensor,context 2'")
    parser.add_argument("--only-operators", default="", help="each program has one of these operators")
    parser.add_argument("--failures", help="a folder for the programs that are wrong or crash")
    parser.add_argument("--count", nargs="+", help="add these files of results to the counts of the repository instead")
    parser.add_argument("--replay", nargs="+", help="run these kept cases instead")
    parser.add_argument("--shrink", action="store_true", help="with --replay: find the smallest cases that fail alike")
    parser.add_argument(
        "--faults", nargs="*", help="plant these faults, or all, and count programs until each is found"
    )
    parser.add_argument("--fault", help="plant a fault of faults.py in the ranks")
    return parser.parse_args()
