"""Steps of seven workloads on one GPU: written by hand in plain PyTorch, and under plans of this package, in turns.

`python -m validation.speed.measure RESULTS.json [NAME[:BATCH] ...]` measures the cases of validation/steps/cases.yaml
with these names (all of `WORKLOADS` by default) and adds them to the file. Cases that the file has already are not
measured again, so the measurement can be stopped and taken up later; rows with a `source`, which are single runs, are
replaced. `--variants A,B` measures only these variants: `hand WAY` for a way of `MODES`, `ours WAY` for one of `PLANS`,
and `ours auto` for the plan that `best_plan` chooses. `--compile-only` fills the compiler's cache, which several
processes can do at the same time, and measures nothing. `--table` only prints the rows of the file.
"""

import gc
import json
import sys
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.train.session import Session
from validation.memory.one_gpu import OPTIMIZERS, case_loss, make_batch, make_model
from validation.speed.by_hand import MODES, train_step
from validation.speed.plans import MEASURED_PLANS, plan_of
from validation.steps.steps import cases

WORKLOADS = ("mnist", "vgg16", "vgg16-256", "resnet50", "deeplab", "gpt2", "gpt2-xl")
ROUNDS, WARM_UP_STEPS = 5, 8
_VOCABULARY = 50257
_LARGE = ("gpt2-xl",)  # measured without graphs, whose memory cannot be shared between the variants of a round


def variants(name: str) -> list[str]:
    """What is measured of a workload: `hand` and `ours`, each in several ways."""
    ways = [way for way in MODES if name not in _LARGE or "graphs" not in way]
    return [
        *(f"hand {way}" for way in ways),
        *(f"ours {way}" for way in MEASURED_PLANS if name not in _LARGE or way in ways),
        "ours auto",
    ]


def measure(name: str, batch: int, measured_variants: list[str]) -> list[dict[str, Any]]:
    """Measures variants of a workload, in turns: every round runs a few steps of each. Returns a row for each."""
    case, (inputs, targets) = case_of(f"{name}:{batch}")
    rows, steps = {}, {}
    for variant in measured_variants:
        plan = _plan(case, variant, (inputs, targets))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        steps[variant] = step = _step(case, variant, plan)
        for number in range(WARM_UP_STEPS):
            step(inputs, targets)
            if number == 1:
                torch.cuda.synchronize()
                wait_s = time.perf_counter() - begin
        torch.cuda.synchronize()
        rows[variant] = {
            "name": name,
            "batch": batch,
            "variant": variant,
            "wait_s": wait_s,
            "allocated_bytes": torch.cuda.max_memory_allocated() - before,
        } | ({} if plan is None else {"plan": plan.summary()})
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(ROUNDS):
        for variant, step in steps.items():
            seconds[variant].append(_round_s(step, inputs, targets))
    for variant, row in rows.items():
        step_s = median(seconds[variant])
        row |= {"step_s": step_s, "spread": (max(seconds[variant]) - min(seconds[variant])) / step_s}
    return list(rows.values())


def case_of(text: str) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    """The case of `NAME` or `NAME:BATCH`, and a batch of it on the GPU."""
    name, _, number = text.partition(":")
    case = cases()[name]
    case = {**case, "batch": int(number)} if number else case
    return case, _data(case)


def step_of(case: dict[str, Any], variant: str, batch: tuple[Tensor, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that runs one step of a variant."""
    return _step(case, variant, _plan(case, variant, batch))


def _round_s(step: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> float:
    """Seconds of a step: of as many steps as take about a quarter of a second."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step(inputs, targets)
    torch.cuda.synchronize()
    count = max(4, min(200, int(0.25 / (time.perf_counter() - begin))))
    begin = time.perf_counter()
    for _ in range(count):
        step(inputs, targets)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def compile_once(name: str, batch: int, compiled_variants: list[str]) -> None:
    """Runs two steps of each variant, so that the compiler's cache has its kernels."""
    case, batch_of_tensors = case_of(f"{name}:{batch}")
    for variant in compiled_variants:
        begin = time.perf_counter()
        step = step_of(case, variant, batch_of_tensors)
        for _ in range(2):
            step(*batch_of_tensors)
        torch.cuda.synchronize()
        print(f"{name} {batch} {variant}: {time.perf_counter() - begin:.0f} s", flush=True)
        del step
        _release_memory()


def _release_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _plan(case: dict[str, Any], variant: str, batch: tuple[Tensor, Tensor]) -> Plan | None:
    """The plan of a variant; None for a loop written by hand."""
    side, way = variant.split(" ", 1)
    if side == "hand":
        return None
    if way != "auto":
        return plan_of(case, way)
    with torch.device("meta"):
        model = make_model(case)
    return mw.best_plan(
        model,
        tuple(tensor.to("meta") for tensor in batch),
        loss=case_loss,
        optimizer=OPTIMIZERS[case["optimizer"]](model.parameters()),
        global_batch=case["batch"],
        allow="changes",
    )


def _step(case: dict[str, Any], variant: str, plan: Plan | None) -> Callable[[Tensor, Tensor], Tensor]:
    if plan is None:
        return train_step(case, MODES[variant.removeprefix("hand ")])
    with torch.device("cuda"):
        model = make_model(case)
    session = Session(
        model,
        lambda parameters: OPTIMIZERS[case["optimizer"]](parameters.values()),
        loss=case_loss,
        plan=plan,
        world=World(0, 0, 1, 1, 0, torch.device("cuda", 0), None),
    )
    return lambda inputs, targets: session.step((inputs, targets))


def _data(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    device = torch.device("cuda", 0)
    if "digits" in case["input"]:
        side = case["input"]["digits"]
        images = torch.randn(case["batch"], 1, side, side, device=device)
        return images, torch.randint(10, (case["batch"],), device=device)
    inputs, targets = make_batch(case, "cuda")
    if inputs.is_floating_point():
        return torch.randn_like(inputs).to(memory_format=torch.channels_last), targets
    tokens = torch.randint(_VOCABULARY, (2, *inputs.shape), device=device)
    return tokens[0], tokens[1]


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row that is not a single run, with its ratio to the fastest step by hand of its workload."""
    lines = []
    for row in (row for row in rows if "source" not in row):
        by_hand = [
            other["step_s"]
            for other in rows
            if (other["name"], other["batch"]) == (row["name"], row["batch"]) and other["variant"].startswith("hand")
        ]
        lines.append(
            f"{row['name']:10} {row['batch']:4} {row['variant']:26} {row['step_s'] * 1e3:8.2f} ms"
            f"  {row['step_s'] / min(by_hand, default=nan):5.3f} of the best by hand  spread {row['spread']:.1%}"
            f"  {row['allocated_bytes'] / 2**30:6.2f} GiB  ready after {row['wait_s']:.0f} s"
            f"  {row.get('plan', '')}"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("cases", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--variants", type=lambda text: text.split(","))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    rows: list[dict[str, Any]] = json.loads(options.results.read_text()) if options.results.exists() else []
    warnings.simplefilter("ignore")
    for text in () if options.table else options.cases:
        name, _, number = text.partition(":")
        batch = int(number) if number else cases()[name]["batch"]
        wanted = options.variants or variants(name)
        if options.compile_only:
            compile_once(name, batch, wanted)
            continue
        recorded = [row for row in rows if (row["name"], row["batch"]) == (name, batch)]
        if {row["variant"] for row in recorded if "source" not in row} >= set(wanted):
            continue
        kept = [row for row in rows if row not in recorded or ("source" not in row and row["variant"] not in wanted)]
        rows = kept + measure(name, batch, wanted)
        options.results.write_text(json.dumps(rows, indent=1) + "\n")
        _release_memory()
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
