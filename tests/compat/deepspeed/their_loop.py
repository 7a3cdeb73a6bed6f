"""A script for DeepSpeed: trains a small model by each of eight configurations, on a GPU by three more in fp16, and
writes the losses of this rank as JSON. It is run by DeepSpeed itself and by the drop-in.

their_loop.py RESULTS [STORE]   STORE: a file by which the ranks of RANK and WORLD_SIZE find each other"""

import json
import os
import sys
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

ADAM: dict[str, Any] = {"type": "Adam", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.05}}
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1}}
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
ONE_CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 5, "decay_step_size": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 0, accumulation, clipping, WarmupLR": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 5e-3}},
    },
    "stage 1, WarmupDecayLR": {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 1},
        "optimizer": ADAMW,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 3, "total_num_steps": 10, "warmup_max_lr": 5e-3, "warmup_type": "linear"},
        },
    },
    "stage 2, accumulation, OneCycle": {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": False},
        "optimizer": ADAM,
        "scheduler": {"type": "OneCycle", "params": ONE_CYCLE},
    },
    "stage 3, WarmupCosineLR": {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 10}},
    },
    "stage 2, offloaded optimizer": {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": ADAMW,
    },
    "stage 3, offloaded parameters, accumulation": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
        },
        "gradient_clipping": 0.0,
        "optimizer": ADAM,
    },
    "bf16, stage 2, accumulation": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": ADAMW,
    },
    "torch_autocast, LRRangeTest": {
        "train_batch_size": 16,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "optimizer": SGD,
        "scheduler": {
            "type": "LRRangeTest",
            "params": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5},
        },
    },
}
# fp16 needs a GPU. With a scale of 2**22 gradients overflow, and the first steps are left out. The scale does not grow
# here, because DeepSpeed divides the gradients of a step after which it grows by the new scale. Stage 0 is left out,
# because DeepSpeed begins there with a step of its own, which changes the averages of Adam.
FP16_CONFIGS: dict[str, dict[str, Any]] = {
    "fp16, stage 2, dynamic scale": {
        "train_batch_size": 16,
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 1000},
        "zero_optimization": {"stage": 2},
        "optimizer": ADAMW,
    },
    "fp16, stage 1, overflow": {
        "train_batch_size": 16,
        "fp16": {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 1000, "hysteresis": 1},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "optimizer": ADAM,
    },
    "fp16, stage 1, static scale, accumulation": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "loss_scale": 128},
        "zero_optimization": {"stage": 1},
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 5e-3}},
    },
}
STEPS = 10
FEATURES, CLASSES = 12, 5


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.norm = nn.LayerNorm(32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(inputs)))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        output: torch.Tensor = self.head(hidden)
        return output


def configs() -> dict[str, dict[str, Any]]:
    """Returns the configurations of this machine. On a GPU, DeepSpeed uses the optimizers of torch, because it would
    have to compile its own first."""
    if not torch.cuda.is_available():
        return CONFIGS
    values = json.loads(json.dumps({**CONFIGS, **FP16_CONFIGS}))
    for config in values.values():
        config["zero_force_ds_cpu_optimizer"] = False
        if config["optimizer"]["type"] != "SGD":
            config["optimizer"]["params"]["torch_adam"] = True
    return dict(values)


def train(config: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(7)
    model = Network()
    samples = torch.randn(4096, FEATURES)
    data = TensorDataset(samples, (samples[:, :CLASSES] * samples[:, CLASSES : 2 * CLASSES]).argmax(1))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=dict(config)
    )
    engine.train()
    losses, rates = [], []
    batches = iter(loader)
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        inputs, target = next(batches)
        if engine.bfloat16_enabled():
            inputs = inputs.bfloat16()
        elif engine.fp16_enabled():
            inputs = inputs.half()
        loss = nn.functional.cross_entropy(engine(inputs.to(engine.device)).float(), target.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates.append(float(engine.get_lr()[0]))
    return {"losses": losses, "rates": rates, "skipped": engine.skipped_steps}


def main() -> None:
    results, *store = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    if store:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group("gloo", init_method=f"file://{store[0]}", rank=rank, world_size=ranks)
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    values = {}
    for name, config in configs().items():
        values[name] = train(config)
        print(name, values[name]["losses"][-1], flush=True)
    with open(f"{results}.{torch.distributed.get_rank()}", "w") as file:
        json.dump(values, file)


if __name__ == "__main__":
    main()
