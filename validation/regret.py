"""`python -m validation.regret RESULTS.json`: on two CPU ranks of this machine, how much slower the plan that `train`
takes is than the fastest of the plans beside it, for ready jobs with synthetic data.

    beside it   replicas with each way to exchange and with the fused optimizer, shards at two levels, the tensor axis,
                pipelines, and accumulation in two parts, each where the model can be divided so
    a round     each plan makes steps for about a second, every second round in the opposite order; all plans are built
                once, in the same two processes
    regret      the median step of the chosen plan over the shortest median, minus one

Cores have to be idle; the row of a job says what other programs use just before it. Jobs whose rows are in the file are
not measured again, and the table of all rows is printed at the end."""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.auto.decide import plan_of_job
from meshwright.bench.strategies.loops import session_steps
from meshwright.bench.strategies.plans import StrategyPlanner
from meshwright.calibrate.probe import measure_machine
from meshwright.cli.ready_jobs import find_job
from meshwright.cluster.busy import OtherPrograms
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.job import Job, load_job
from meshwright.messages.exchange import broadcast_value
from meshwright.plan import Plan
from meshwright.processes.world import join
from meshwright.train.job_parts import JobParts

JOBS = ("mnist", "gpt", "bert", "resnet18", "linear", "recommender", "two_tower", "physics")
STRATEGIES = (
    "replicate native",
    "replicate ring",
    "replicate shared_memory",
    "shard optimizer",
    "shard parameters",
    "tensor",
    "pipeline 1f1b",
    "pipeline zero_bubble",
)
RANKS, ROUNDS, ROUND_S = 2, 5, 1.0
_WARM_UP, _MOST_STEPS = 2, 30
_LOOK_S = 1.0
Row = dict[str, Any]


def synthetic_job(name: str) -> Job:
    """The ready job with the settings that it has for synthetic data."""
    return load_job(find_job(name), ["data.synthetic=true", "log.tensorboard=false"])


def plans_of(job: Job) -> tuple[list[Plan], dict[str, float]]:
    """The chosen plan, then others that can run; and the predicted steps by the summary of a plan."""
    cluster, parts = find_cluster(f"{RANKS}xcpu", measure_machine), JobParts(job)
    chosen = plan_of_job(parts, cluster, "auto")
    planner = StrategyPlanner(parts, cluster, max(1, cluster.cores // RANKS))
    inputs, profiles = planner.planning
    needs_one_microbatch = inputs.compares_samples or profiles.compares_samples
    plans = [chosen.plan]
    for strategy in STRATEGIES:
        try:
            plans.append(planner.plan(strategy, "fp32"))
        except InputError:  # the model cannot be divided so
            continue
    replicas = plans[1]
    plans.append(_changed(replicas, "compute", fused_optimizer=True))
    plans.append(_changed(replicas, "memory", accumulation=2))
    plans = [plan for plan in plans if plan.microbatches == 1 or not needs_one_microbatch]
    distinct = list({plan.summary(): plan for plan in plans}.values())
    predicted = {plan.summary(): made.step_s for plan in distinct if (made := planner.predict(plan)) is not None}
    return distinct, predicted


def _changed(plan: Plan, group: str, **fields: Any) -> Plan:
    return plan.model_copy(update={group: getattr(plan, group).model_copy(update=fields)})


def measure(job: Job, plans: list[Plan], rounds: int = ROUNDS, round_s: float = ROUND_S) -> dict[str, list[float]]:
    """Runs in each rank. Returns the seconds of a step by the summary of a plan, one for each round."""
    world = join("cpu", 600)
    built = {plan.summary(): _Steps(job, plan, world, rounds, round_s) for plan in plans}
    seconds: dict[str, list[float]] = {name: [] for name in built}
    for number in range(rounds):
        for name in list(built) if number % 2 == 0 else list(built)[::-1]:
            seconds[name].append(built[name].seconds())
    return seconds


class _Steps:
    """The steps of one plan: as many in a round as take about `round_s`."""

    def __init__(self, job: Job, plan: Plan, world: Any, rounds: int, round_s: float) -> None:
        self._step = session_steps(job, plan, world, _WARM_UP + 1 + rounds * _MOST_STEPS)
        for _ in range(_WARM_UP):
            self._step()
        self._count = 1
        self._count = broadcast_value(max(1, min(_MOST_STEPS, round(round_s / self.seconds()))))

    def seconds(self) -> float:
        dist.barrier()
        begin = time.perf_counter()
        loss: Tensor | None = None
        for _ in range(self._count):
            loss = self._step()
        assert loss is not None
        float(loss)
        dist.barrier()
        return (time.perf_counter() - begin) / self._count


def row_of(name: str) -> Row:
    job = synthetic_job(name)
    plans, predicted = plans_of(job)
    others = OtherPrograms()  # looked at before the launch, whose ranks would count as others
    time.sleep(_LOOK_S)
    busy_cores = others.cores()
    seconds = mw.launch(measure, job, plans, ranks=RANKS, device="cpu")
    return compared(name, plans[0], seconds, predicted, busy_cores)


def compared(
    name: str, plan: Plan, seconds: dict[str, list[float]], predicted: dict[str, float], busy_cores: float
) -> Row:
    """The row of a job whose chosen plan is `plan`."""
    medians = {summary: median(times) for summary, times in seconds.items()}
    chosen, fastest = plan.summary(), min(medians, key=medians.__getitem__)
    spread = (max(seconds[fastest]) - min(seconds[fastest])) / medians[fastest]
    return {
        "job": name,
        "chosen": chosen,
        "fastest": fastest,
        "regret": medians[chosen] / medians[fastest] - 1,
        "spread": spread,
        "busy_cores": busy_cores,
        "step_s": medians,
        "predicted_s": predicted,
    }


def table(rows: list[Row]) -> str:
    lines = [f"{'job':<12} {'regret':>7} {'spread':>7}  chosen; the fastest"]
    for row in rows:
        busy = f" (other programs used {row['busy_cores']:.2g} cores)" if row["busy_cores"] else ""
        lines.append(
            f"{row['job']:<12} {row['regret']:7.1%} {row['spread']:7.1%}  {row['chosen']}; {row['fastest']}, of"
            f" {len(row['step_s'])}{busy}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m validation.regret", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--jobs", default=",".join(JOBS))
    options = parser.parse_args()
    rows: list[Row] = json.loads(options.results.read_text()) if options.results.exists() else []
    for name in options.jobs.split(","):
        if name not in [row["job"] for row in rows]:
            rows.append(row_of(name))
            options.results.write_text(json.dumps(rows, indent=1) + "\n")
            print(table(rows[-1:]), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
