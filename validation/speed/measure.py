"""Steps of seven workloads on one GPU: written by hand in plain PyTorch, and under plans of this package, in turns.

`python -m validation.speed.measure RESULTS.json [NAME ...]` measures the cases of validation/steps/cases.yaml with
these names (all of `WORKLOADS` by default) and adds them to the file. Rows that the file has already are not measured
again, so the measurement can be stopped and taken up later; rows with a `source`, which are single runs, are replaced.
With `--table` it only prints the rows of the file.
"""

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwright.launch.world import World
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
    return [f"hand {way}" for way in ways] + [
        f"ours {way}" for way in MEASURED_PLANS if name not in _LARGE or way in ways
    ]


def measure(name: str, batch: int) -> list[dict[str, Any]]:
    """Measures all variants of a workload, in turns: every round runs a few steps of each. Returns a row for each."""
    case = {**cases()[name], "batch": batch}
    inputs, targets = _data(case)
    rows, steps = {}, {}
    for variant in variants(name):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        steps[variant] = step = _step(case, variant)
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
        }
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(ROUNDS):
        for variant, step in steps.items():
            seconds[variant].append(_round_s(step, inputs, targets))
    for variant, row in rows.items():
        step_s = median(seconds[variant])
        row |= {"step_s": step_s, "spread": (max(seconds[variant]) - min(seconds[variant])) / step_s}
    return list(rows.values())


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


def _step(case: dict[str, Any], variant: str) -> Callable[[Tensor, Tensor], Tensor]:
    side, way = variant.split(" ", 1)
    if side == "hand":
        return train_step(case, MODES[way])
    with torch.device("cuda"):
        model = make_model(case)
    session = Session(
        model,
        lambda parameters: OPTIMIZERS[case["optimizer"]](parameters.values()),
        loss=case_loss,
        plan=plan_of(case, way),
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
    return (torch.randint(_VOCABULARY, inputs.shape, device=device) for _ in range(2))  # type: ignore[return-value]


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
            f"  {row['step_s'] / min(by_hand):5.3f} of the best by hand  spread {row['spread']:.1%}"
            f"  {row['allocated_bytes'] / 2**30:6.2f} GiB  ready after {row['wait_s']:.0f} s"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    results, names = Path(arguments[0]), [name for name in arguments[1:] if name != "--table"]
    rows: list[dict[str, Any]] = json.loads(results.read_text()) if results.exists() else []
    warnings.simplefilter("ignore")
    for name in () if "--table" in arguments else names or WORKLOADS:
        batch = cases()[name]["batch"]
        recorded = [row for row in rows if (row["name"], row["batch"]) == (name, batch)]
        if any("source" not in row for row in recorded):
            continue
        rows = [row for row in rows if row not in recorded] + measure(name, batch)
        results.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
