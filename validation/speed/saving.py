"""How long training waits for a checkpoint: `python -m validation.speed.saving [--ranks 2]` trains a GPT of 26 million
parameters (310 MB a checkpoint) with `checkpoint.asynchronous: true` and `false`, in turns, and prints the median stall
of each, and their ratio in each round."""

import argparse
import json
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

ROUNDS, STEPS, EVERY = 3, 24, 4
SETTINGS = {
    "data.synthetic": "true",
    "model.layers": 8,
    "model.hidden": 512,
    "model.heads": 8,
    "train.steps": STEPS,
    "train.global_batch": 4,
    "checkpoint.every_steps": EVERY,
    "checkpoint.best": "null",
    "checkpoint.keep": 2,
    "log.tensorboard": "false",
    "log.eval_every_steps": 10_000,
    "tune": "false",
}


def _train(ranks: int, asynchronous: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **SETTINGS,
            "plan.axes.replicate": ranks,
            "checkpoint.asynchronous": str(asynchronous).lower(),
            "output": folder,
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "meshwright", "train", "gpt", "--json", *words]
        process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if process.returncode:
        sys.exit(process.stderr)
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    ratios = []
    for number in range(1, ROUNDS + 1):
        at_once, later = _train(ranks, False), _train(ranks, True)
        ratios.append(later["save_stall_s"] / at_once["save_stall_s"])
        print(
            f"round {number}: stall {at_once['save_stall_s']:.3f} s at once, {later['save_stall_s']:.3f} s asynchronous"
            f" (published after {later['save_s']:.2f} s): {ratios[-1]:.1%}; step {at_once['measured_step_s']:.2f} s and"
            f" {later['measured_step_s']:.2f} s",
            flush=True,
        )
    print(f"median {median(ratios):.1%} of {ROUNDS} rounds, {min(ratios):.1%} to {max(ratios):.1%}")


if __name__ == "__main__":
    main()
