"""Rows of GPT, Llama and their relatives, whose plan is stated. decoders.yaml says how each source is read."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.call import Call
from meshwright.yaml_file import read_mapping
from validation.runs.case import NotCovered, PublishedCase, Sample
from validation.runs.families import family_of
from validation.runs.reading.flops import DECODER, decoder_keywords
from validation.runs.reading.hardware import cluster_of, device_of
from validation.runs.reading.layout import (
    RunLayout,
    ShardingLevel,
    blocks_by_cost,
    even_blocks,
    make_plan,
    microbatches_of,
)
from validation.runs.reading.measures import memory_of, step_of
from validation.runs.reading.words import precision_of, recompute_of
from validation.runs.rows import PublishedRow

FILE = Path(__file__).with_name("decoders.yaml")
LOSS = Call(call="meshwright.workloads.text.decoder:NextTokenLoss")
ADAM = Call.model_validate({"call": "torch.optim:AdamW", "lr": 1e-4, "fused": True})
ZERO: dict[int, ShardingLevel | None] = {0: None, 1: "optimizer", 2: "gradients", 3: "parameters"}
OTHER_SELECTIVE = {"megatron": "that of attention alone", "fms-fsdp": "that of some blocks"}
# Nanotron cuts at equal costs: a block's are 4h² + 3hf, its head's are Vh (models/llama.py, get_block_compute_costs);
# ten blocks and six, and five on the first of four stages, as the parameters a rank has in its table say.
BY_COST = ("nanotron_ultrascale",)
SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "ffn": "feedforward"}


@cache
def _settings() -> dict[str, Any]:
    return read_mapping(FILE, "published decoders")


def is_decoder(row: PublishedRow) -> bool:
    return row.source in _settings()["sources"]


def read_decoder(row: PublishedRow) -> PublishedCase:
    settings = _settings()["sources"][row.source]
    settings = {**settings, **settings.get("frameworks", {}).get(row.framework, {})}
    assumed = Assumptions(settings["assumed"])
    assumed.used.extend([settings["beside"]] if "beside" in settings else [])
    _refuse(row)
    model, length = _model(row, assumed)
    cluster, words = cluster_of(row)
    assumed.used.extend(words)
    precision, words = precision_of(_precision(row, settings, assumed), device_of(cluster))
    assumed.used.extend(words)
    layout = _layout(row, decoder_keywords(model.arguments), assumed)
    settings = {**settings, **(settings.get("sharded", {}) if layout.sharding else {})}
    global_batch, micro_batch = _batches(row, layout.data, assumed)
    recompute = recompute_of(row.recompute or _technique(row, assumed))
    if recompute == "selective" and settings["engine"] in OTHER_SELECTIVE:
        assumed.used.append(f"a plan's selective recomputation for {OTHER_SELECTIVE[settings['engine']]}")
    plan = make_plan(
        layout,
        microbatches_of(global_batch, layout.data, micro_batch),
        precision,
        recompute,
        sequence=_sequence(row, layout, assumed),
        loss=True,
    )
    compiled = bool(row.plan.get("compile")) or row.plan.get("technique", "")[1:] in COMPILED
    engine = settings["engine"]
    step_s, words = step_of(row, model, length, global_batch)
    assumed.used.extend(words)
    memory_bytes, memory_kind = memory_of(row)
    return PublishedCase(
        id=row.id,
        source=row.source,
        family=family_of(
            row.source, f"{engine}, compiled" if compiled else engine, model, cluster, precision, global_batch
        ),
        model=model,
        sample=Sample("tokens", (length,)),
        loss=LOSS,
        optimizer=ADAM,
        cluster=cluster,
        plan=plan,
        global_batch=global_batch,
        micro_batch=micro_batch,
        engine=engine,
        precision=precision,
        attention=settings["attention"],
        compiled=compiled,
        step_s=step_s,
        memory_bytes=memory_bytes,
        memory_kind=memory_kind,
        oom=bool(row.measured.get("oom")),
        defaults=tuple(assumed.used),
    )


class Assumptions:
    """The assumptions of a source; `used` collects those that one row needed, as words."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.used: list[str] = []

    def take(self, name: str, words: str) -> Any:
        if name not in self.values:
            raise NotCovered(f"{name.replace('_', ' ')} not stated")
        self.used.append(words.format(self.values[name]))
        return self.values[name]

    def has(self, name: str) -> bool:
        return name in self.values


# ---- what is out of scope

COMPILED = ("compile", "chunked CE", "activation checkpointing")  # torchtune's ladder is cumulative
LADDER = ("+packed", *(f"+{step}" for step in COMPILED))


def _refuse(row: PublishedRow) -> None:
    plan, contradicted = row.plan, _settings()["contradicted"]
    if row.id in contradicted:
        raise NotCovered(contradicted[row.id])
    if str(row.model.get("family", "")).startswith("moe"):
        raise NotCovered("mixture of experts")
    if plan.get("cp", 1) > 1:
        raise NotCovered("context parallel")
    if plan.get("lora") or "LoRA" in f"{plan.get('finetune')} {plan.get('technique')} {row.notes}":
        raise NotCovered("LoRA: most weights are frozen")
    if row.source == "torchtune" and plan.get("technique") not in LADDER:
        raise NotCovered("unpacked samples, offloading, an 8-bit optimizer or one that steps within backward")
    if row.source == "bigscience_v100_gpt2" and plan["pp"] == 1:
        raise NotCovered("the row leaves out ZeRO and offloading, without which the model does not fit")


# ---- the model


def _model(row: PublishedRow, assumed: Assumptions) -> tuple[Call, int]:
    named = dict(_settings()["named"].get(row.model["name"], {}))
    stands_for = named.pop("for", None)
    length = row.model["seq"]
    keywords = {ours: row.model[theirs] for theirs, ours in SIZES.items() if row.model.get(theirs)}
    if "size" not in named:
        keywords = {**_settings()["kinds"][_kind(row)], **keywords}
    keywords |= named
    if "heads" not in keywords and "size" not in keywords and "hidden" in keywords:
        keywords["heads"] = assumed.take("heads", "{} heads")
    if "size" not in keywords and not {"layers", "hidden", "heads"} <= set(keywords):
        raise NotCovered("layers and hidden size not stated")
    if row.model.get("vocab"):
        keywords.setdefault("vocabulary", row.model["vocab"])
    elif not {"size", "vocabulary"} & set(keywords):
        keywords["vocabulary"] = assumed.take("vocabulary", "vocabulary {}")
    if assumed.has("dropout") and "dropout" not in named:
        keywords["dropout"] = assumed.take("dropout", "dropout {}")
    if stands_for:
        chosen = ", ".join(f"{key} {value}" for key, value in named.items()) or keywords["activation"]
        assumed.used.append(f"{chosen} for {stands_for}")
    return Call(call=DECODER, **{**keywords, "sequence": length}), length


def _kind(row: PublishedRow) -> str:
    kind = row.model.get("family", "")
    if kind not in _settings()["kinds"]:
        raise NotCovered(f"a model of family '{kind}'")
    return str(kind)


def _precision(row: PublishedRow, settings: dict[str, Any], assumed: Assumptions) -> str:
    if "precision" in settings:
        assumed.used.append(f"precision {settings['precision']}, as the repository's scripts have it")
        return str(settings["precision"])
    return str(row.precision or assumed.take("precision", "{}"))


# ---- the plan


def _layout(row: PublishedRow, model: dict[str, Any], assumed: Assumptions) -> RunLayout:
    plan, layers = _stated(row), model["layers"]
    tensor, pipeline, ranks = plan.get("tp", 1), plan.get("pp", 1), row.hardware["n_gpus"]
    data = plan.get("dp") or ranks // (tensor * pipeline)
    if data * tensor * pipeline != ranks:
        raise NotCovered("the product of the stated axes is not the number of GPUs")
    sharding, shard = _sharding(row, plan, data, assumed)
    chunks = _chunks(row, plan, layers, assumed)
    if row.source in BY_COST and pipeline > 1:
        block = 4 * model["hidden"] ** 2 + 3 * model["hidden"] * model["feedforward"]
        blocks = blocks_by_cost(layers, pipeline, model["vocabulary"] * model["hidden"] / block)
        return RunLayout(data, tensor, pipeline, chunks, sharding, shard, blocks)
    blocks = _blocks(plan, layers, pipeline * chunks) if pipeline > 1 else ()
    if len(set(blocks)) > 1 and "stage_layers" not in plan:
        assumed.used.append(f"{layers} blocks over {len(blocks)} stages as evenly as can be")
    return RunLayout(data, tensor, pipeline, chunks, sharding, shard, blocks)


def _stated(row: PublishedRow) -> dict[str, Any]:
    """With Colossal-AI's words, `zero1(dp2)+tp2+pp4`, as numbers."""
    words = row.plan.get("parallelism")
    if words is None:
        return row.plan
    return {name: int(value) for name, value in re.findall(r"(zero|dp|tp|pp)(\d+)", words)}


def _sharding(
    row: PublishedRow, plan: dict[str, Any], data: int, assumed: Assumptions
) -> tuple[ShardingLevel | None, int]:
    fsdp = plan.get("fsdp")
    if isinstance(fsdp, int):
        return "parameters", fsdp
    if fsdp == "SHARD_GRAD_OP":
        return "gradients", data
    if fsdp == "HSDP":
        a_node = int(row.hardware["gpus_per_node"])
        assumed.used.append("sharded within nodes, replicated between them")
        return "parameters", a_node
    if fsdp:
        return "parameters", data
    if "zero" in plan:
        return ZERO[plan["zero"]], data if plan["zero"] else 1
    if data > 1 and assumed.has("sharding"):
        return assumed.take("sharding", "sharded: {}"), data
    return None, 1


def _chunks(row: PublishedRow, plan: dict[str, Any], layers: int, assumed: Assumptions) -> int:
    """Stages a rank. An interleaved schedule that does not say how many has as few as divide a rank's blocks."""
    pipeline = plan.get("pp", 1)
    if pipeline == 1:
        return 1
    if "vpp" in plan or "interleaved" not in plan.get("schedule", ""):
        return int(plan.get("vpp", 1))
    a_rank = layers // pipeline
    few = next((count for count in range(2, a_rank + 1) if a_rank % count == 0), 1)
    assumed.used.append(f"interleaved schedule with {few} stages a rank")
    return few


def _blocks(plan: dict[str, Any], layers: int, stages: int) -> tuple[int, ...]:
    """Sailor counts the embedding as a layer of the first stage, and the head as one of the last."""
    counted = plan.get("stage_layers")
    if counted is None:
        return even_blocks(layers, stages)
    if sum(counted) != layers + 2 or len(counted) != stages:
        raise NotCovered("the stated stages are not those of the model")
    return (counted[0] - 1, *counted[1:-1], counted[-1] - 1)


def _batches(row: PublishedRow, data: int, assumed: Assumptions) -> tuple[int, int]:
    """The global batch and the microbatch."""
    a_rank = re.search(r'"Batch Size per DP" = (\d+)', row.notes)
    if row.source == "deepspeed_azure_z3" and row.micro_batch:
        return row.micro_batch * data, row.micro_batch
    if a_rank:
        whole = int(a_rank[1]) * data
    elif row.global_batch or row.batch_per_gpu:
        whole = row.global_batch or (row.batch_per_gpu or 0) * data
    else:
        raise NotCovered("batch not stated")
    if row.micro_batch:
        return whole, row.micro_batch
    micro = assumed.take("micro_batch", "microbatch: {}")
    return whole, whole // data if micro == "whole" else micro


def _technique(row: PublishedRow, assumed: Assumptions) -> str:
    """What torchtune's cumulative ladder says of recomputation; else the source's assumption."""
    technique = row.plan.get("technique")
    if technique:
        return "full" if technique == "+activation checkpointing" else "none"
    return str(assumed.take("recompute", "recompute {}"))


def _sequence(row: PublishedRow, layout: RunLayout, assumed: Assumptions) -> bool:
    if layout.tensor == 1:
        return False
    if "sp" in row.plan:
        return bool(row.plan["sp"])
    if row.plan.get("async_tp"):
        assumed.used.append("asynchronous tensor parallelism as the plain one")
    return bool(assumed.take("sequence", "sequence parallel {}")) if assumed.has("sequence") else False
