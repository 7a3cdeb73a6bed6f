"""A GPT-2 with one sequence of 65,536 tokens on one GPU: its step and its peak memory, predicted and measured.

`python -m validation.steps.long_sequence [TOKENS] [--calibrate]` measures on a GPU, and predicts the step as that of an
H200 that nobody has calibrated, and with the calibration of the reference GPU. With `--calibrate` this GPU is
calibrated, too, and the model's own operators are measured on it (calibrate/model_operators.py). Without a GPU it only
predicts. The last line is one JSON object.
"""

import json
import sys
from typing import Any

import torch

from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from validation.steps.steps import StepRow, measure, predict, recorded_on, trace

GOAL = 0.15  # the largest relative error of a step


def row_of(tokens: int) -> StepRow:
    model = {"call": "meshwright.workloads.text.decoder_sizes:decoder", "size": "gpt2", "sequence": tokens}
    case = {"name": f"gpt2-{tokens}", "model": model, "input": {"tokens": tokens}, "batch": 1, "optimizer": "adamw"}
    return StepRow(case, "bf16")


def clusters(calibrate: bool) -> dict[str, Cluster]:
    """The GPU, by how it is known."""
    known = {"catalog": find_cluster("H200"), "reference": recorded_on()}
    return known | ({"calibrated here": find_cluster("local", measure_machine)} if calibrate else {})


def main(arguments: list[str]) -> None:
    sizes = [int(argument) for argument in arguments if argument.isdigit()]
    row = row_of(sizes[0] if sizes else 65_536)
    has_gpu = torch.cuda.is_available()
    traced = trace(row, on_gpu=True)
    report: dict[str, Any] = {"name": row.case["name"], "precision": row.precision, "goal": GOAL, "predicted": {}}
    if has_gpu:
        report |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        torch.cuda.reset_peak_memory_stats()
        report["measured_step_s"] = measure(row, find_cluster("H200"))
        report["measured_peak_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
    for name, cluster in clusters(has_gpu and "--calibrate" in arguments).items():
        prediction = predict(row, cluster, traced)
        entry: dict[str, Any] = {"step_s": prediction.step_s, "peak_bytes": prediction.memory.allocated_bytes}
        if has_gpu:
            entry["step_error"] = prediction.step_s / report["measured_step_s"] - 1
            entry["peak_error"] = entry["peak_bytes"] / report["measured_peak_bytes"] - 1
        report["predicted"][name] = entry
        print(name, {key: round(value, 4) for key, value in entry.items()}, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
