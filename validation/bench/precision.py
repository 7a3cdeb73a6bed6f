"""The step time and the loss of a job in every precision that this machine has, compared with fp32 on one device.
`python -m validation.bench.precision JOB [STEPS] [--set A.B=C ...]` prints the median step time and its spread."""

import gc
import sys
import time
import warnings
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from meshwright.errors import MeshwrightError
from meshwright.job import Job, load_job
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.build import build_data, build_loading
from meshwright.train.job_session import build_session

ROUNDS = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"numerics": {"precision": "tf32"}},
    "bf16": {"numerics": {"precision": "bf16"}},
    "bf16 fused optimizer": {"numerics": {"precision": "bf16"}, "compute": {"fused_optimizer": True}},
    "bf16 CUDA graphs": {"numerics": {"precision": "bf16"}, "compute": {"cuda_graphs": True}},
    "bf16 compiled": {"numerics": {"precision": "bf16"}, "compute": {"compile": "blocks"}},
    "fp16": {"numerics": {"precision": "fp16"}},
    "fp8": {"numerics": {"precision": "fp8"}},
    "fp8 compiled": {"numerics": {"precision": "fp8"}, "compute": {"compile": "blocks"}},
}
_GPU_ONLY = ("tf32", "bf16 CUDA graphs", "fp8", "fp8 compiled")


@dataclass(frozen=True)
class PrecisionRow:
    """The result of one entry of `VARIANTS`. `step_s` is the median step time over the rounds, `spread` is (longest -
    shortest) / median, and `losses` are those of the first and the last step."""

    variant: str
    step_s: float
    spread: float
    losses: tuple[float, float]


def measure(job: Job, variant: str, steps: int) -> PrecisionRow:
    """Trains one entry of `VARIANTS`, and returns its row. After a quarter of the steps as warm-up, `ROUNDS` rounds of
    steps are timed. All entries get the same batches."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = build_session(
        job, Plan.model_validate(VARIANTS[variant]), World(0, 0, 1, 1, 0, device, None), lambda doing: None
    )
    batches = session.batches(build_data(job)[0], None, job.train.global_batch, build_loading(job, device))
    first = float(session.step(next(batches)))
    for _ in range(max(4, steps // 4)):
        session.step(next(batches))
    round_times, last = [], first
    for _ in range(ROUNDS):
        round_batches = [next(batches) for _ in range(max(1, steps // ROUNDS))]
        _wait(device)
        begin = time.perf_counter()
        for batch in round_batches:
            loss = session.step(batch)
        last = float(loss)
        round_times.append((time.perf_counter() - begin) / len(round_batches))
    step_s = median(round_times)
    return PrecisionRow(variant, step_s, (max(round_times) - min(round_times)) / step_s, (first, last))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    settings = [argument for argument in arguments if "=" in argument]
    file, *rest = [argument for argument in arguments if "=" not in argument and argument != "--set"]
    job = load_job(file, settings)
    reference: float | None = None
    for variant in VARIANTS:
        if variant in _GPU_ONLY and not torch.cuda.is_available():
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                row = measure(job, variant, int(rest[0]) if rest else 40)
        except (MeshwrightError, RuntimeError) as error:
            print(f"{variant:22} not run: {(str(error).strip().splitlines() or [''])[0]}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        reference = reference or row.step_s
        ratio = row.step_s / reference
        print(
            f"{variant:22} {row.step_s * 1e3:9.2f} ms  ratio to fp32 {ratio:.3f}  spread {row.spread:.1%}"
            f"  loss {row.losses[0]:.4f} to {row.losses[1]:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
