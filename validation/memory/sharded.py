"""Peak memory of ranks that shard their parameters, on one GPU that they share over Gloo: predictions compared with
measurements.

`python -m validation.memory.sharded` compares predictions with the peaks that are recorded in sharded_h200.json. On a
machine with a GPU it measures every row instead and prints one JSON object; with `--carried` it compares with the
recorded peaks there, too. FSDP2 is applied here block by block, as the shard axis of a plan applies it.
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
from validation.memory.peak_comparison import PeakComparison, summary, table_head, table_line

MEASURED = Path(__file__).with_name("sharded_h200.json")


def case_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a case of one_gpu.py, which builds the model and the batch."""
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
    """The predicted peak of a rank, computed without a GPU."""
    plan, case = plan_of(row), case_of(row)
    with torch.device("meta"):
        model = make_model(case)
    batch = make_batch(case, "meta")
    profile = trace_profile(model, batch, case_loss, precision=row["precision"], recompute=plan.memory.recompute)
    return predict_memory(
        profile, plan, row["batch"], measure_optimizer_cost(OPTIMIZERS["adamw"], multi_tensor=True), CUDA_MEMORY
    )


def measure(row: dict[str, Any]) -> int:
    """The measured peak of rank 0 in bytes."""
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
        if step == 0:  # the optimizer state is allocated now
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
    """Predicts every recorded row, and prints the table."""
    comparisons = []
    print(table_head())
    for row in rows():
        name = (
            f"{row['size']} {row['precision']}, {row['ranks']} × {row['batch']}, {row['sharding']}, {row['recompute']}"
        )
        comparisons.append(PeakComparison(name, predict(row).allocated_bytes, row["allocated_bytes"]))
        print(table_line(comparisons[-1]), flush=True)
    print(summary(comparisons))
    return comparisons


def measure_all() -> None:
    measured = rows()
    for row in measured:
        row["allocated_bytes"] = measure(row)
        print(row, file=sys.stderr, flush=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": measured}))


if __name__ == "__main__":
    if torch.cuda.is_available() and "--carried" not in sys.argv:
        measure_all()
    else:
        compare()
