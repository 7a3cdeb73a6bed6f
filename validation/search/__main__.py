"""`python -m validation.search --searches N --seed S --results FILE` draws problems, searches for plans, and prints
where another plan is predicted to be faster than the answer by more than 3%, or where a better cluster makes the answer
slower. Problems whose rows are in FILE are not searched again, so that a call that was stopped is continued by the next
one."""

import argparse
import json
import logging
import sys
from pathlib import Path

import torch

from validation.search.compare import Row, check_search, is_failure
from validation.search.problems import draw_problem


def main() -> None:
    options = _parse()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    results = Path(options.results)
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(row["seed"], row["number"]) for row in rows}
    for number in range(options.first, options.first + options.searches):
        if (options.seed, number) in done:
            continue
        problem = draw_problem(options.seed, number, ready=not options.own, large=not options.small)
        row = check_search(problem, options.seed, number, options.plans)
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if is_failure(row):
            print(json.dumps(row, indent=1), flush=True)
    print(summary(rows))
    sys.exit(any(map(is_failure, rows)))


def summary(rows: list[Row]) -> str:
    """How many searches there were, how many of them were beaten, and by how much at most."""
    compared = [row for row in rows if "plans" in row]
    beaten = [row["beaten"] for row in compared if "beaten" in row]
    slower = [row["relaxed"] for row in compared if "relaxed" in row]
    return (
        f"{len(rows)} searches, {sum(row['plans'] for row in compared):,} plans;"
        f" {sum(map(is_failure, rows))} failures, {len(rows) - len(compared)} refused;"
        f" a plan was faster by at most {max(beaten, default=0):.1%},"
        f" a relaxed answer slower by at most {max(slower, default=0):.1%};"
        f" {sum(row.get('search_s', 0.0) for row in rows):.0f} s of searches"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m validation.search", description=__doc__)
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--plans", type=int, default=200, help="random plans for each problem")
    parser.add_argument("--own", action="store_true", help="only our own small models, which are traced fastest")
    parser.add_argument("--small", action="store_true", help="at most 64 devices")
    parser.add_argument("--results", default="search.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
