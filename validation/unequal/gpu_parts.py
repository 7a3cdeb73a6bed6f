"""`python -m validation.unequal.gpu_parts [PERCENT PERCENT [ROUNDS]]`: trains a convolutional network on two ranks that
have different parts of the multiprocessors of one GPU, as MPS divides them, with even, adaptive and proportional shares
in turns. Prints the samples/s of each. The ranks exchange gradients over Gloo, because NCCL takes one rank for each
GPU. The proportional shares are those that the adaptive ones before them ended with."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import meshwright as mw

BATCH, IMAGE, WIDTH, LAYERS = 256, 64, 128, 8
STEPS, MEASURED = 80, 20


def main(percents: tuple[int, int], rounds: int) -> int:
    if not shutil.which("nvidia-cuda-mps-control"):
        raise SystemExit("this needs nvidia-cuda-mps-control, which is a part of the NVIDIA driver")
    with tempfile.TemporaryDirectory() as folder, _mps(folder) as environment:
        ranks = []
        for rank, percent in enumerate(percents):
            # LOCAL_RANK is the number of the GPU, which is the same for both.
            of_rank = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
            part = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
            words = [sys.executable, "-m", "validation.unequal.gpu_parts", "rank", f"{folder}/ranks", str(rounds)]
            ranks.append(subprocess.Popen(words, env={**environment, **of_rank, **part}))
        return max(process.wait() for process in ranks)


@contextmanager
def _mps(folder: str) -> Iterator[dict[str, str]]:
    """Runs the MPS daemon; yields the environment of its clients."""
    environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
    try:
        yield environment
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], env=environment, input=b"quit\n", check=True)


def run_rank(meeting_file: str, rounds: int) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", f"file://{meeting_file}", rank=int(os.environ["RANK"]), world_size=2)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"rank {dist.get_rank()} has {multiprocessors} multiprocessors", flush=True)
    for precision in ("fp32", "bf16"):
        for number in range(rounds):
            even, _ = train([BATCH // 2, BATCH // 2], precision)
            adaptive, changes = train("adaptive", precision)
            proportional, _ = train(changes[-1][1], precision)
            if dist.get_rank() == 0:
                found = "; ".join(f"{shares[0]}, {shares[1]} from step {step + 1}" for step, shares in changes[1:])
                print(
                    f"{precision} round {number}: even {even:.0f}, adaptive {adaptive:.0f} ({adaptive / even:.2f}),"
                    f" proportional {proportional:.0f} ({proportional / even:.2f}) samples/s; {found}",
                    flush=True,
                )
    dist.destroy_process_group()


def train(shares: Any, precision: str) -> tuple[float, list[tuple[int, list[int]]]]:
    """Returns the samples/s of the last steps, and the steps with which the shares changed, with the new ones."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU()]
    for _ in range(LAYERS - 1):
        layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)).cuda()
    data = TensorDataset(torch.randn(4 * BATCH, 3, IMAGE, IMAGE), torch.randint(0, 10, (4 * BATCH,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = {"axes": {"replicate": 2}, "shares": shares, "numerics": {"precision": precision}}
    session = mw.parallelize(model, optimizer, loss=F.cross_entropy, plan=plan, device="cuda")
    changes = [(0, [BATCH // 2, BATCH // 2])]
    began = 0.0
    for batch in session.batches(data, STEPS // 4, BATCH):
        if session.steps == STEPS - MEASURED:
            torch.cuda.synchronize()
            began = time.perf_counter()
        if session.shares is not None:
            now = list(session.shares.table.at(session.steps))
            if sum(now) == BATCH and now != changes[-1][1]:
                changes.append((session.steps, now))
        session.step(batch)
    torch.cuda.synchronize()
    return MEASURED * BATCH / (time.perf_counter() - began), changes


if __name__ == "__main__":
    first, *others = sys.argv[1:] or ["60", "30"]
    if first == "rank":
        run_rank(others[0], int(others[1]))
    else:
        sys.exit(main((int(first), int(others[0])), int(others[1]) if len(others) > 1 else 3))
