"""A small mixture of experts on one GPU: `python -m validation.steps.mixture [FILE]` measures its steps in bf16, fp32
and tf32 and compares them with predictions, and times grouped products as a calibration does.

Three figures are printed for each precision: the measured step, the prediction with the calibration of the reference
GPU, and the prediction with the grouped products that were timed here added to it. The timed rows are written to FILE
in the form of `reference_gpu_operators.jsonl`.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from meshwright.calibrate.compute_bound_cases import compute_bound_cases
from meshwright.calibrate.operators import measure_operators
from meshwright.cluster.cluster import Cluster, OperatorTime
from meshwright.workloads.text.decoder import Decoder
from meshwright.workloads.text.decoder_sizes import decoder
from validation.steps.steps import StepRow, measure, predict, recorded_on, trace

GOAL = 0.15
PRECISIONS = ("bf16", "fp32", "tf32")
CASE: dict[str, Any] = {
    "name": "mixture",
    "model": {"call": "validation.steps.mixture:mixture"},
    "input": {"tokens": 1024},
    "words": 50257,
    "batch": 8,
    "optimizer": "adamw",
}


def mixture() -> Decoder:
    """GPT-2 with eight experts in each block, of which two are chosen for a token: 521 million parameters."""
    return decoder(size="gpt2", experts={"number": 8, "top_k": 2})


def grouped_rows() -> list[dict[str, Any]]:
    """Times the grouped products of the calibration on this GPU. Each row has the fields of an `OperatorTime`."""
    cases = [case for case in compute_bound_cases(large=True) if case.operator == "grouped_matmul"]
    rates = recorded_on().nodes[0].device.rates
    return measure_operators(torch.device("cuda"), dict(rates), cases)


def with_rows(cluster: Cluster, rows: list[dict[str, Any]]) -> Cluster:
    """The cluster with these rows in place of other measurements of grouped products."""
    node = cluster.nodes[0]
    others = tuple(row for row in node.device.operators if row.operator != "grouped_matmul")
    device = node.device.model_copy(
        update={"operators": (*others, *(OperatorTime.model_validate(row) for row in rows))}
    )
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


def describe(row: dict[str, Any]) -> str:
    """One line of `reference_gpu_operators.jsonl`."""
    numbers = {name: float(f"{row[name]:.5g}") for name in ("flops", "bytes", "seconds")}
    return json.dumps({name: row[name] for name in ("operator", "direction", "dtype", "shape")} | numbers)


def main(file: str | None = None) -> None:
    rows = grouped_rows()
    lines = [describe(row) for row in rows]
    print("\n".join(lines), flush=True)
    if file is not None:
        Path(file).write_text("\n".join(lines) + "\n")
    for precision in PRECISIONS:
        step = StepRow(CASE, precision)
        traced = trace(step, on_gpu=True)
        measured_s = measure(step, recorded_on())
        for what, cluster in (("recorded", recorded_on()), ("with grouped products", with_rows(recorded_on(), rows))):
            predicted_s = predict(step, cluster, traced).step_s
            error = predicted_s / measured_s - 1
            verdict = "within" if abs(error) <= GOAL else "not within"
            print(
                f"mixture batch {CASE['batch']} {precision}: measured {measured_s * 1e3:.2f} ms, predicted ({what})"
                f" {predicted_s * 1e3:.2f} ms, {error:+.1%}, {verdict} {GOAL:.0%}",
                flush=True,
            )
        print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)
        torch.cuda.reset_peak_memory_stats()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:2])
