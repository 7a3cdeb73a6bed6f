"""An exported configuration says what the plan says, in the words of the program, and lists what it cannot say."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli.export import export as command
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.export.configurations.write import ExportedPlan, export_plan
from meshwright.job import Job, parse_job
from meshwright.plan import Plan
from tests.train.one_process import TOY

HALF = {"mixed_precision": "fp16"}
EVERYTHING: dict[str, Any] = {
    "axes": {"replicate": 2, "shard": 2, "tensor": 2, "pipeline": 2},
    "modules": {"splits": {"a": {"kind": "row"}}, "sequence": True, "loss": True},
    "pipeline": {"schedule": "gpipe", "microbatches": 4, "cuts": ["b"]},
    "memory": {"sharding": "gradients", "recompute": "selective", "accumulation": 3, "offload": "optimizer"},
    "numerics": {"precision": "tf32", "batch_norm": "synchronized"},
    "gradients": {"bucket_bytes": 1000, "precision": "bf16"},
    "compute": {
        "layout": "channels_last",
        "compile": "blocks",
        "compile_mode": "max-autotune",
        "cuda_graphs": True,
        "fused_optimizer": True,
        "loss_chunks": 4,
        "threads": 3,
    },
}


def job_of(**sections: Any) -> Job:
    train = {"steps": 10, "global_batch": 16, "clip_norm": 0.5}
    schedule = {"call": "torch.optim.lr_scheduler:StepLR", "step_size": 3}
    return parse_job({**TOY, "train": train, "schedule": schedule, **sections})


def export(
    folder: Path, plan: dict[str, Any], to: str, job: Job | None = None, cluster: str | Cluster | None = "8xH100"
) -> tuple[ExportedPlan, Any]:
    """The export, and the content of its file."""
    Plan.model_validate(plan).save(folder / "plan.yaml")
    machines = find_cluster(cluster) if isinstance(cluster, str) else cluster
    exported = export_plan(folder / "plan.yaml", to, job, machines, folder / "exported")
    text = exported.file.read_text()
    return exported, yaml.safe_load(text) if to != "torchrun" else text


def fields(exported: ExportedPlan) -> set[str]:
    return {entry.field for entry in exported.cannot_say}


@pytest.mark.parametrize(
    ("plan", "stage", "others"),
    [
        ({"axes": {"replicate": 2}}, 0, {}),
        ({"axes": {"shard": 2}, "memory": {"sharding": "optimizer"}}, 1, {}),
        ({"axes": {"shard": 2}, "memory": {"sharding": "gradients"}}, 2, {}),
        ({"axes": {"shard": 2}}, 3, {}),
        ({"memory": {"offload": "optimizer"}}, 1, {"offload_optimizer"}),
        ({"axes": {"shard": 2}, "memory": {"offload": "parameters"}}, 3, {"offload_optimizer", "offload_param"}),
    ],
)
def test_deepspeed_has_the_stage_of_the_plan(
    tmp_path: Path, plan: dict[str, Any], stage: int, others: set[str]
) -> None:
    exported, config = export(tmp_path, plan, "deepspeed", job_of())
    zero = config["zero_optimization"]
    assert zero["stage"] == stage
    assert {name for name in zero if name.startswith("offload")} == set(others)
    assert exported.cannot_say == ()


def test_deepspeed_has_batch_precision_clipping_optimizer_and_schedule(tmp_path: Path) -> None:
    plan = {"axes": {"replicate": 2}, "memory": {"accumulation": 4}, "numerics": {"precision": "bf16"}}
    exported, config = export(tmp_path, plan, "deepspeed", job_of())
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (16, 2)
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    assert config["torch_autocast"] == {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert config["optimizer"] == {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    assert config["scheduler"] == {"type": "StepLR", "params": {"step_size": 3}}
    assert exported.command == f"deepspeed --num_gpus 2 SCRIPT --deepspeed_config {exported.file}"
    assert exported.cannot_say == ()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_deepspeed_casts_weights(tmp_path: Path, precision: str) -> None:
    plan = {"axes": {"shard": 2}, "numerics": {"precision": precision, "cast": "weights"}}
    _, config = export(tmp_path, plan, "deepspeed", job_of())
    assert config[precision]["enabled"] is True
    assert config["communication_data_type"] == "fp32"
    assert "torch_autocast" not in config


def test_what_deepspeed_takes_from_the_script_is_listed(tmp_path: Path) -> None:
    job = job_of(
        optimizer={"call": "torch.optim:AdamW", "lr": 0.01, "groups": "no_decay"},
        schedule={"call": "torch.optim.lr_scheduler:StepLR", "step_size": 3, "per": "epoch"},
    )
    exported, config = export(tmp_path, {"axes": {"replicate": 2}}, "deepspeed", job)
    assert fields(exported) == {"optimizer", "schedule"}
    assert "optimizer" not in config
    without_job, config = export(tmp_path, {"axes": {"replicate": 2}}, "deepspeed")
    assert fields(without_job) == {"train.global_batch", "train.clip_norm", "optimizer", "schedule"}
    assert config["train_batch_size"] == config["gradient_clipping"] == "auto"


@pytest.mark.parametrize(
    ("plan", "cluster", "kind", "entries"),
    [
        ({"axes": {"replicate": 8}}, "8xH100", "MULTI_GPU", {}),
        ({"axes": {"replicate": 2}}, "2xcpu", "MULTI_CPU", {"use_cpu": True}),
        ({}, "8xH100", "NO", {"num_processes": 1}),
        ({"axes": {"replicate": 16}}, "2x8xH100", "MULTI_GPU", {"num_machines": 2, "num_processes": 16}),
        (
            {"axes": {"replicate": 2}, "numerics": {"precision": "fp16"}},
            "8xH100",
            "MULTI_GPU",
            {"mixed_precision": "fp16"},
        ),
    ],
)
def test_accelerate_has_the_kind_of_the_plan(
    tmp_path: Path, plan: dict[str, Any], cluster: str, kind: str, entries: dict[str, Any]
) -> None:
    exported, config = export(tmp_path, plan, "accelerate", job_of(), cluster)
    assert config["distributed_type"] == kind
    assert {name: config[name] for name in entries} == entries
    assert fields(exported) == {"train.global_batch", "train.clip_norm", "optimizer", "schedule"}
    assert exported.command.endswith(f"accelerate launch --config_file {exported.file} SCRIPT")


def test_accelerate_shards_with_fsdp2(tmp_path: Path) -> None:
    plan = {
        "axes": {"shard": 4, "replicate": 2},
        "memory": {"recompute": "full", "offload": "parameters", "accumulation": 2},
        "compute": {"compile": "blocks"},
    }
    exported, config = export(tmp_path, plan, "accelerate", job_of())
    fsdp = config["fsdp_config"]
    assert config["distributed_type"] == "FSDP"
    assert (fsdp["fsdp_version"], fsdp["fsdp_reshard_after_forward"], fsdp["fsdp_offload_params"]) == (2, True, True)
    assert fsdp["fsdp_activation_checkpointing"] is True
    assert config["parallelism_config"]["parallelism_config_dp_shard_size"] == 4
    assert config["dynamo_config"]["dynamo_use_regional_compilation"] is True
    assert exported.command.startswith("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2 accelerate launch")
    assert not any(field.startswith(("axes", "memory", "compute")) for field in fields(exported))
    on_cpus, config = export(tmp_path, {"axes": {"shard": 2}}, "accelerate", job_of(), "2xcpu")
    assert config["distributed_type"] == "MULTI_CPU"
    assert "axes.shard" in fields(on_cpus)


def test_torchrun_starts_the_ranks_and_says_what_the_script_does(tmp_path: Path) -> None:
    plan = {"axes": {"replicate": 2}, "numerics": {"precision": "bf16"}, "compute": {"threads": 2}}
    exported, text = export(tmp_path, plan, "torchrun", job_of())
    assert "exec env OMP_NUM_THREADS=2 torchrun --standalone --nproc-per-node 2" in text
    assert fields(exported) >= {"axes.replicate", "numerics.precision", "optimizer"}
    assert all(f"#   {entry.field}: {entry.value}: {entry.instead}" in text for entry in exported.cannot_say)
    assert subprocess.run(["sh", "-n", exported.file], check=False).returncode == 0
    _, text = export(tmp_path, {"axes": {"replicate": 16}}, "torchrun", job_of(), "2x8xH100")
    assert "--nnodes 2 " in text
    assert "--nproc-per-node 8" in text


@pytest.mark.parametrize("program", ["deepspeed", "accelerate", "torchrun"])
def test_no_choice_of_a_plan_is_dropped_without_a_word(tmp_path: Path, program: str) -> None:
    """A field that differs from its default is in the list of what cannot be said, or changes the configuration."""
    plan = Plan.model_validate(EVERYTHING)
    exported, _ = export(tmp_path, EVERYTHING, program, cluster="2x8xH100")
    for group_name, group in plan:
        for name, field in type(group).model_fields.items():
            if getattr(group, name) == field.default or f"{group_name}.{name}" in fields(exported):
                continue
            reduced = plan.model_dump()
            reduced[group_name][name] = field.default
            if name in ("pipeline", "cuts", "schedule"):
                continue  # these depend on each other, and are in the list of every program
            other, _ = export(tmp_path, reduced, program, cluster="2x8xH100")
            differs = exported.command != other.command or _text(tmp_path, EVERYTHING, program) != _text(
                tmp_path, reduced, program
            )
            assert differs, f"{program} drops {group_name}.{name}"
    assert {"axes.pipeline", "axes.tensor", "pipeline.cuts", "pipeline.schedule"} <= fields(exported)


def _text(folder: Path, plan: dict[str, Any], program: str) -> str:
    return export(folder, plan, program, cluster="2x8xH100")[0].file.read_text()


def test_a_plan_of_the_planner_and_of_a_run_is_read(tmp_path: Path) -> None:
    plan = Plan.model_validate({"axes": {"replicate": 2}})
    (tmp_path / "plans.json").write_text(json.dumps({"best": {"plan": plan.model_dump(mode="json"), "step_s": 1.0}}))
    (tmp_path / "run").mkdir()
    plan.save(tmp_path / "run" / "plan.yaml")
    for source in (tmp_path / "plans.json", tmp_path / "run"):
        assert export_plan(source, "deepspeed", None, None, tmp_path / "exported").plan == plan
    with pytest.raises(InputError, match=r"this folder has no plan\.yaml"):
        export_plan(tmp_path, "deepspeed", None, None, tmp_path / "exported")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"axes": {"replicate": 3}},
            r"is 16, which 3 data ranks × 1 microbatches do not divide.*15 or 18",
        ),
        ({"axes": {"replicate": 16}}, r"is for 16 ranks, but the cluster '8xH100' has 8 devices"),
        ({"axes": {"replicate": 2}, "gradients": {"servers": 1}}, r"has parameter servers, which no other program has"),
    ],
)
def test_a_plan_that_no_configuration_fits_is_refused(tmp_path: Path, plan: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(tmp_path, plan, "deepspeed", job_of())


def test_an_unknown_program_is_named_before_anything_else(tmp_path: Path) -> None:
    Plan.model_validate({"axes": {"replicate": 2}}).save(tmp_path / "plan.yaml")
    with pytest.raises(InputError, match=r"--to deepsped: did you mean 'deepspeed'\?"):
        command(tmp_path / "plan.yaml", "deepsped", cluster="2xcpu")
    with pytest.raises(InputError, match="--to int8 writes weights, and --job and --cluster are for plans"):
        command(tmp_path / "plan.yaml", "int8", cluster="2xcpu")
