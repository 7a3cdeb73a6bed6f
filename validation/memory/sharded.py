"""Peak memory of sharded ranks, measured on one GPU that they share over Gloo: what predictions are held against.

`python -m validation.memory.sharded` compares predictions with the peaks that sharded_h200.json carries.
On a GPU it measures every row anew and prints one JSON object; `--carried` compares there, too. The model is given to
FSDP2 by hand, block by block, as a plan's shard axis does.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from meshwright.blocks.recompute import find_blocks, recompute_blocks
from meshwright.plan import Plan
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.memory.device_memory import CUDA_MEMORY
from meshwright.simulator.memory.peak import MemoryPrediction, predict_memory
from validation.memory.one_gpu import OPTIMIZERS, case_loss, make_batch, make_model
from validation.memory.peak_comparison import PeakComparison, head, line, summary

MEASURED = Path(__file__).with_name("sharded_h200.json")


def case_of(row: dict[str, Any]) -> dict[str, Any]:
    """What `bench.memory` builds models and batches from."""
    return {
        "name": row["size"],
        "model": {"call": "meshwright.workloads.text.decoder_sizes:decoder", "size": row["size"]},
        "input": {"tokens": 1024},
        "batch": row["batch"],
    }


def plan_of(row: dict[str, Any]) -> Plan:
    return Plan.model_validate(
        {
            "axes": {"shard": row["ranks"]},
            "memory": {"sharding": row["sharding"], "recompute": row["recompute"]},
            "numerics": {"precision": row["precision"]},
        }
    )


def predict(row: dict[str, Any]) -> MemoryPrediction:
    plan, case = plan_of(row), case_of(row)
    with torch.device("meta"):
        model = make_model(case)
    batch = make_batch(case, "meta")
    found = trace_profile(model, batch, case_loss, precision=row["precision"], recompute=plan.memory.recompute)
    return predict_memory(
        found, plan, row["batch"], measure_optimizer_cost(OPTIMIZERS["adamw"], multi_tensor=True), CUDA_MEMORY
    )


def measure(row: dict[str, Any]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (row, folder), row["ranks"])
        return int((Path(folder) / "bytes").read_text())


def _rank(rank: int, row: dict[str, Any], folder: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=row["ranks"])
    mesh, plan, case = init_device_mesh("cuda", (row["ranks"],)), plan_of(row), case_of(row)
    with torch.device("cuda"):
        model = make_model(case)
    recompute_blocks(model, plan.memory.recompute)
    for block in find_blocks(model):
        fully_shard(model.get_submodule(block), mesh=mesh, reshard_after_forward=plan.memory.sharding == "parameters")
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    tokens, targets = make_batch(case, "cuda")
    for step in range(3):
        with torch.autocast("cuda", torch.bfloat16, enabled=row["precision"] == "bf16"):
            output = model(tokens)
        loss = case_loss(output.float(), targets)
        del output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # optimizer state is there by now
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    if rank == 0:
        (Path(folder) / "bytes").write_text(str(torch.cuda.max_memory_allocated()))
    dist.barrier()
    dist.destroy_process_group()


def rows() -> list[dict[str, Any]]:
    return list(json.loads(MEASURED.read_text())["rows"])


def compare() -> list[PeakComparison]:
    """Every carried row, as it is predicted here."""
    found = []
    print(head())
    for row in rows():
        name = (
            f"{row['size']} {row['precision']}, {row['ranks']} × {row['batch']}, {row['sharding']}, {row['recompute']}"
        )
        found.append(PeakComparison(name, predict(row).allocated_bytes, row["allocated_bytes"]))
        print(line(found[-1]), flush=True)
    print(summary(found))
    return found


def measure_all() -> None:
    found = rows()
    for row in found:
        row["allocated_bytes"] = measure(row)
        print(row, file=sys.stderr, flush=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}))


if __name__ == "__main__":
    if torch.cuda.is_available() and "--carried" not in sys.argv:
        measure_all()
    else:
        compare()
