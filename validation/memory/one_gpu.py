"""Peak memory of training steps on one GPU: predictions compared with measurements.

`python -m validation.memory.one_gpu` compares predictions with the peaks that are recorded in one_gpu_h200.json. On a
machine with a GPU it measures every case of cases.yaml instead and prints one JSON object; with `--carried` it compares
with the recorded peaks there, too.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.memory.device_memory import CUDA_MEMORY
from meshwright.simulator.memory.peak import MemoryPrediction, predict_memory
from meshwright.train.session import Session
from meshwright.user.call import Call, build, load
from validation.memory.peak_comparison import PeakComparison, summary, table_head, table_line

CASES = Path(__file__).with_name("cases.yaml")
MEASURED = Path(__file__).with_name("one_gpu_h200.json")
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adam-decay": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
}


def cases() -> list[dict[str, Any]]:
    return list(yaml.safe_load(CASES.read_text()))


def make_model(case: dict[str, Any]) -> nn.Module:
    model: nn.Module = build(Call(**case["model"]), role=case["name"])
    return model


def make_batch(case: dict[str, Any], device: str) -> tuple[Tensor, Tensor]:
    (kind, size), count = next(iter(case["input"].items())), case["batch"]
    with torch.device(device):
        if kind == "tokens":
            tokens = torch.zeros(count, size, dtype=torch.long)
            return tokens, tokens
        images = torch.zeros(count, 3, size, size)
        if kind == "masks":
            return images, torch.zeros(count, size, size, dtype=torch.long)
        return images, torch.zeros(count, dtype=torch.long)


def case_loss(output: Any, target: Tensor) -> Tensor:
    """The cross entropy of class scores, of class scores for each pixel, or of next-token scores."""
    scores = output["out"] if isinstance(output, dict) and "out" in output else getattr(output, "logits", output)
    if scores.dim() == 3:
        return F.cross_entropy(scores.flatten(0, 1), target.flatten())
    return F.cross_entropy(scores, target)


def hf_gpt2(layers: int = 12, hidden: int = 768, heads: int = 12, dropout: float = 0.0) -> nn.Module:
    """GPT-2 of the transformers library, whose GELU consists of several small operators."""
    config = load("transformers.GPT2Config")(
        n_layer=layers,
        n_embd=hidden,
        n_head=heads,
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    model: nn.Module = load("transformers.GPT2LMHeadModel")(config)
    return model


def plan_of(case: dict[str, Any]) -> Plan:
    return Plan.model_validate(
        {
            "numerics": {"precision": case["precision"]},
            "memory": {"recompute": case.get("recompute", "none"), "accumulation": case.get("accumulation", 1)},
        }
    )


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The measured peak of the second and third step, when the optimizer state is already allocated."""
    device = torch.device("cuda", 0)
    with device:
        model = make_model(case)
    session = Session(
        model,
        lambda parameters: OPTIMIZERS[case["optimizer"]](parameters.values()),
        loss=case_loss,
        plan=plan_of(case),
        world=World(0, 0, 1, 1, 0, device, None),
    )
    batch = make_batch(case, "cuda")
    session.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        session.step(batch)
    torch.cuda.synchronize()
    return {
        "name": case["name"],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
    }


def predict(case: dict[str, Any]) -> MemoryPrediction:
    """The predicted peak, computed without a GPU."""
    with torch.device("meta"):
        model = make_model(case)
    plan = plan_of(case)
    profile = trace_profile(
        model,
        make_batch(case, "meta"),
        case_loss,
        precision=plan.numerics.precision,
        recompute=plan.memory.recompute,
    )
    optimizer = measure_optimizer_cost(OPTIMIZERS[case["optimizer"]], multi_tensor=True)
    return predict_memory(profile, plan, case["batch"] // plan.memory.accumulation, optimizer, CUDA_MEMORY)


def compare() -> list[PeakComparison]:
    """Predicts every recorded case, and prints the table."""
    recorded = {row["name"]: row for row in json.loads(MEASURED.read_text())["rows"]}
    comparisons = []
    print(table_head())
    for case in cases():
        measured = recorded.get(case["name"], {}).get("allocated_bytes")
        if measured is None:
            print(f"{case['name']:44} not measured")
            continue
        comparisons.append(PeakComparison(case["name"], predict(case).allocated_bytes, measured))
        print(table_line(comparisons[-1]), flush=True)
    print(summary(comparisons))
    return comparisons


def measure_all() -> None:
    rows = []
    for case in cases():
        try:
            rows.append(measure(case))
        except torch.OutOfMemoryError:
            rows.append({"name": case["name"], "out_of_memory": True})
        except Exception as error:  # if one case fails, the others are still measured
            rows.append({"name": case["name"], "error": f"{type(error).__name__}: {str(error)[:200]}"})
        print(rows[-1], file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "driver_free": torch.cuda.mem_get_info()}
    print(json.dumps({"about": about, "rows": rows}))


if __name__ == "__main__":
    if torch.cuda.is_available() and "--carried" not in sys.argv:
        measure_all()
    else:
        compare()
