"""DeepSpeed's configurations are read completely: what has no effect is listed, what is wrong is explained."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from meshwright.compat.deepspeed_config.batch import BatchSizes, CompleteSizes, complete
from meshwright.compat.deepspeed_config.config import LossScaling, read_config, warn_about_keys
from meshwright.compat.deepspeed_config.keys import EFFECTS, known_keys
from meshwright.errors import InputError
from meshwright.plan import Plan

BATCH = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
DOCUMENT = Path(__file__).parents[3] / "docs" / "deepspeed.md"


@pytest.mark.parametrize(
    ("given", "ranks", "sizes"),
    [
        ((32, 4, 4), 2, (32, 4, 4)),
        ((32, 4, None), 2, (32, 4, 4)),
        ((32, None, 4), 2, (32, 4, 4)),
        ((None, 4, 4), 2, (32, 4, 4)),
        ((32, None, None), 2, (32, 16, 1)),
        ((None, 16, None), 2, (32, 16, 1)),
    ],
)
def test_missing_batch_sizes_are_computed(given: Any, ranks: int, sizes: Any) -> None:
    assert complete(BatchSizes(*given), ranks, "config") == CompleteSizes(sizes[0], sizes[1], sizes[2], ranks)


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        ((33, 17, 2), 2, "33 is not 17 × 2 × 2: write train_batch_size: 68"),
        ((32, 18, None), 2, "32 cannot be 18 × a whole number × 2: write train_batch_size: 36"),
        ((32, None, 3), 2, "32 cannot be a whole number × 3 × 2: write train_batch_size: 30"),
        ((3, None, None), 4, "3 cannot be a whole number × a whole number × 4: write train_batch_size: 4"),
        ((None, None, 2), 2, "neither train_batch_size nor train_micro_batch_size_per_gpu is there"),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_explained(given: Any, ranks: int, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        complete(BatchSizes(*given), ranks, "config")


@pytest.mark.parametrize(
    ("zero", "summary"),
    [
        ({}, "replicate 2 · fp32 · accumulate 4"),
        ({"stage": 1}, "shard 2 · fp32 · shard optimizer · accumulate 4"),
        ({"stage": 2}, "shard 2 · fp32 · shard gradients · accumulate 4"),
        ({"stage": 3}, "shard 2 · fp32 · accumulate 4"),
    ],
)
def test_stages_are_plans(tmp_path: Path, zero: dict[str, Any], summary: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({**BATCH, "zero_optimization": zero}))
    assert Plan.from_deepspeed(file).summary() == summary
    assert Plan.from_deepspeed({**BATCH, "zero_optimization": zero}).summary() == summary


def test_other_sections_are_fields_of_the_plan() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
        "communication_data_type": "bf16",
        "activation_checkpointing": {"partition_activations": True},
        "tensor_parallel": {"autotp_size": 2},
    }
    plan = Plan.from_deepspeed(config, ranks=8)
    assert (plan.axes.replicate, plan.axes.shard, plan.axes.tensor) == (2, 2, 2)
    assert (plan.numerics.precision, plan.numerics.cast, plan.gradients.precision) == ("bf16", "weights", "bf16")
    assert plan.memory.recompute == "full"
    autocast = {"train_batch_size": 8, "torch_autocast": {"enabled": True, "dtype": "float16"}}
    assert Plan.from_deepspeed(autocast, ranks=2).numerics.precision == "fp16"


@pytest.mark.parametrize(
    ("stage", "keys", "ranks", "offload"),
    [
        (2, {"offload_optimizer": {"device": "cpu"}}, 2, "optimizer"),
        (2, {"offload_optimizer": {"device": "cpu"}}, 1, "optimizer"),
        (3, {"offload_param": {"device": "cpu"}}, 2, "parameters"),
        (3, {"offload_param": {"device": "cpu"}}, 1, "optimizer"),  # one rank has no shards that could be offloaded
        (2, {"offload_param": {"device": "cpu"}}, 2, "none"),  # DeepSpeed has it with stage 3 only
        (1, {"cpu_offload": True}, 2, "optimizer"),
        (0, {"offload_optimizer": {"device": "cpu"}}, 2, "none"),
    ],
)
def test_offloading_is_a_field_of_the_plan(stage: int, keys: dict[str, Any], ranks: int, offload: str) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": stage, **keys}}
    assert Plan.from_deepspeed(config, ranks).memory.offload == offload


def test_options_of_the_loss_scale_are_read() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 3, "min_loss_scale": 2}
    config = read_config({"fp16": fp16})
    assert config.loss_scaling == LossScaling(None, 256.0, 50, 3, False, 2.0)
    assert read_config({"fp16": {"enabled": True, "loss_scale": 128}}).loss_scaling.fixed == 128.0
    assert (config.precision, config.autocast, config.gradient_clipping) == ("fp16", False, 1.0)


def test_adam_is_that_of_deepspeed() -> None:
    adam = read_config({"optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.95]}}}).optimizer
    assert adam is not None
    assert adam.call == "torch.optim:AdamW"  # DeepSpeed's Adam has the weight decay of AdamW
    assert adam.options == {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    assert adam.auto == ("lr",)
    plain = read_config({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}).optimizer
    assert plain is not None
    assert plain.call == "torch.optim:Adam"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type Lamb is not offered, because torch has no Lamb"),
        ({"optimizer": {"type": "Adm"}}, "optimizer.type is Adm: did you mean 'Adam'?"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 2}}}, "write gradient_clipping: 2"),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type is WarmupLr: did you mean 'WarmupLR'?"),
        ({"zero_optimization": {"stagee": 1}}, "zero_optimization has no key 'stagee': did you mean 'stage'?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: write 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device is 'nvme': only the memory of the CPU is offered",
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights is True"),
        ({"amp": {"enabled": True}}, "amp is {'enabled': True}, which is not offered"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"train_batch_size": 0}, "train_batch_size is 0: write a whole number above 0"),
        ({"gradient_clipping": "much"}, "gradient_clipping is 'much': write a number from 0 to 1.8e+308"),
        ({"train_batch_size": float("nan")}, "train_batch_size is nan: write a whole number above 0"),
        ({"gradient_accumulation_steps": float("inf")}, "gradient_accumulation_steps is inf: write a whole number"),
        ({"gradient_clipping": 10**400}, "write a number from 0 to 1.8e+308"),
        ({"fp16": {"initial_scale_power": 5000}}, "fp16.initial_scale_power is 5000: write a number from 0 to 127"),
        ({"tensor_parallel": {"autotp_size": 1.5}}, "autotp_size is 1.5: write a whole number of ranks"),
        ({"zero_optimization": {"mics_shard_size": float("inf")}}, "mics_shard_size is inf: write a whole number"),
        ({"optimizer": {"type": "SGD", "params": {"lr": float("nan")}}}, "optimizer.params.lr is nan: write a finite"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "x"}}}, "optimizer.params.lr is 'x': write a number from 0"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [1]}}}, "params.betas is [1]: write two numbers"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer needs a type"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            "scheduler.params has no option warmup_steps for WarmupLR: did you mean 'warmup_num_steps'?",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "x"}}}, "warmup_max_lr is 'x': write a number"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "OneCycle needs cycle_min_lr and cycle_max_lr"),
    ],
)
def test_wrong_and_refused_values_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read_config(config)


def test_keys_without_effect_are_listed_once() -> None:
    config = {
        **BATCH,
        "gradient_acumulation_steps": 2,
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": False},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
    }
    with pytest.warns(UserWarning, match="these keys have no effect") as caught:
        warn_about_keys(read_config(config))
    assert len(caught) == 1
    text = str(caught[0].message)
    for name in ("wall_clock_breakdown", "zero_optimization.overlap_comm", "zero_optimization.reduce_bucket_size"):
        assert text.count(f"{name} (") == 1
    assert "'gradient_acumulation_steps': did you mean 'gradient_accumulation_steps'?" in text
    assert "flops_profiler" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_keys(read_config(BATCH))


def test_a_file_with_a_key_twice_or_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 8, "train_batch_size": 9}')
    with pytest.raises(InputError, match="the key 'train_batch_size' is there twice"):
        read_config(file)
    file.write_text("[1]")
    with pytest.raises(InputError, match="is a JSON object, and this is a list"):
        read_config(file)
    with pytest.raises(InputError, match=r"missing\.json: this DeepSpeed configuration cannot be read"):
        read_config(tmp_path / "missing.json")


def test_the_number_of_ranks_is_needed_unless_the_batch_sizes_give_it() -> None:
    assert Plan.from_deepspeed(BATCH).world_size == 2
    with pytest.raises(InputError, match="does not say for how many ranks it is"):
        Plan.from_deepspeed({"train_batch_size": 32})
    with pytest.raises(InputError, match="3 ranks cannot be divided into groups of 2 tensor ranks"):
        Plan.from_deepspeed({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}, ranks=3)


@pytest.mark.core
def test_the_document_has_every_key() -> None:
    """docs/deepspeed.md has the table of keys.yaml, word for word."""
    text = DOCUMENT.read_text()
    for effect in EFFECTS:
        for key in known_keys().values():
            if key.effect == effect:
                assert f"| `{key.name}` | {effect} | {key.text} |" in text
