"""Reads rows of decoder models (GPT, Llama and similar ones) that state their plan. decoders.yaml says how the rows of
each source are read."""

import re
from functools import cache, partial
from math import gcd
from pathlib import Path
from typing import Any

from meshwright.files.yaml_file import read_mapping
from meshwright.user.call import Call
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
from validation.runs.reading.mixtures import is_mixture, read_mixture
from validation.runs.reading.words import precision_of, recompute_of
from validation.runs.rows import PublishedRow

FILE = Path(__file__).with_name("decoders.yaml")
LOSS = Call(call="meshwright.workloads.text.decoder:NextTokenLoss")
ADAM = Call.model_validate({"call": "torch.optim:AdamW", "lr": 1e-4, "fused": True})
ZERO: dict[int, ShardingLevel | None] = {0: None, 1: "optimizer", 2: "gradients", 3: "parameters"}
OTHER_SELECTIVE = {"megatron": "that of attention alone", "fms-fsdp": "that of some blocks"}
# Nanotron cuts the model into stages of equal cost: a block costs 4h² + 3hf, the head Vh (models/llama.py,
# get_block_compute_costs). The parameters per rank in its table confirm this: ten and six blocks on two stages, and
# five on the first of four.
CUT_BY_COST = ("nanotron_ultrascale",)
# torchtitan's pipelines have microbatches of one sample by default (pipeline_parallel_microbatch_size: 1).
ONE_SAMPLE_STAGES = ("torchtitan_h100",)
SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "ffn": "feedforward"}


@cache
def _settings() -> dict[str, Any]:
    return read_mapping(FILE, "published decoders")


def is_decoder(row: PublishedRow) -> bool:
    return row.source in _settings()["sources"]


def read_decoder(row: PublishedRow) -> PublishedCase:
    """The case that the row describes. Raises `NotCovered` with the reason if the row cannot be predicted."""
    settings = _settings()["sources"][row.source]
    settings = {**settings, **settings.get("frameworks", {}).get(row.framework, {})}
    assumed = Assumptions(settings["assumed"])
    assumed.used.extend([settings["beside"]] if "beside" in settings else [])
    _check_in_scope(row)
    model, length = _model(row, assumed)
    cluster, defaults = cluster_of(row)
    assumed.used.extend(defaults)
    precision, defaults = precision_of(_precision(row, settings, assumed), device_of(cluster))
    assumed.used.extend(defaults)
    layout = _layout(row, decoder_keywords(model.arguments), assumed)
    settings = {**settings, **(settings.get("sharded", {}) if layout.sharding else {})}
    settings = {**settings, **settings.get("devices", {}).get(device_of(cluster).name, {})}
    global_batch, micro_batch = _batches(row, layout.data, assumed)
    recompute = recompute_of(row.recompute or _recompute_word(row, assumed))
    if recompute == "selective" and settings["engine"] in OTHER_SELECTIVE:
        assumed.used.append(f"a plan's selective recomputation for {OTHER_SELECTIVE[settings['engine']]}")
    plan = make_plan(
        layout,
        microbatches_of(global_batch, layout.data, micro_batch),
        precision,
        recompute,
        sequence=_sequence(row, layout, assumed),
        loss=True,
        attention_exchange=settings.get("attention_exchange", "ring"),
    )
    compiled = bool(row.plan.get("compile")) or row.plan.get("technique", "")[1:] in COMPILED
    engine = settings["engine"]
    step_s, defaults = step_of(row, model, length, global_batch)
    assumed.used.extend(defaults)
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
    """The values that decoders.yaml assumes for rows of a source that do not state them. `used` describes those that
    one row needed."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.used: list[str] = []

    def take(self, name: str, description: str) -> Any:
        """The assumed value. `description` is added to `used`, with `{}` replaced by the value. Raises `NotCovered` if
        nothing is assumed."""
        if name not in self.values:
            raise NotCovered(f"{name.replace('_', ' ')} not stated")
        self.used.append(description.format(self.values[name]))
        return self.values[name]

    def has(self, name: str) -> bool:
        return name in self.values


# ---- rows that are out of scope

# torchtune adds one technique after another; "compile" and all that follow it are compiled.
COMPILED = ("compile", "chunked CE", "activation checkpointing")
TECHNIQUES = ("+packed", *(f"+{technique}" for technique in COMPILED))


def _check_in_scope(row: PublishedRow) -> None:
    """Raises `NotCovered` with the reason if the row is out of scope."""
    plan, contradicted = row.plan, _settings()["contradicted"]
    if row.id in contradicted:
        raise NotCovered(contradicted[row.id])
    if row.notes.startswith("SFT"):
        raise NotCovered("fine-tuning, of which the row does not state how samples are packed")
    if plan.get("lora") or "LoRA" in f"{plan.get('finetune')} {plan.get('technique')} {row.notes}":
        raise NotCovered("LoRA: most weights are frozen")
    if row.source == "torchtune" and plan.get("technique") not in TECHNIQUES:
        raise NotCovered(
            "unpacked samples, offloading, an 8-bit optimizer or an optimizer step within the backward pass"
        )
    if row.source == "bigscience_v100_gpt2" and plan["pp"] == 1:
        raise NotCovered("the row does not state ZeRO and offloading, without which the model does not fit")


# ---- the model


def _model(row: PublishedRow, assumed: Assumptions) -> tuple[Call, int]:
    """The model, and the length of its sequences."""
    if is_mixture(row):
        return read_mixture(row, assumed.used)
    by_name = dict(_settings()["named"].get(row.model["name"], {}))
    stands_for = by_name.pop("for", None)
    length = row.model["seq"]
    keywords = {ours: row.model[theirs] for theirs, ours in SIZES.items() if row.model.get(theirs)}
    if "size" not in by_name:
        keywords = {**_settings()["kinds"][_kind(row)], **keywords}
    keywords |= by_name
    if "heads" not in keywords and "size" not in keywords and "hidden" in keywords:
        keywords["heads"] = assumed.take("heads", "{} heads")
    if "size" not in keywords and not {"layers", "hidden", "heads"} <= set(keywords):
        raise NotCovered("layers and hidden size not stated")
    if row.model.get("vocab"):
        keywords.setdefault("vocabulary", row.model["vocab"])
    elif not {"size", "vocabulary"} & set(keywords):
        keywords["vocabulary"] = assumed.take("vocabulary", "vocabulary {}")
    if assumed.has("dropout") and "dropout" not in by_name:
        keywords["dropout"] = assumed.take("dropout", "dropout {}")
    if stands_for:
        choice = ", ".join(f"{key} {value}" for key, value in by_name.items()) or keywords["activation"]
        assumed.used.append(f"{choice} for {stands_for}")
    return Call(call=DECODER, **{**keywords, "sequence": length}), length


def _kind(row: PublishedRow) -> str:
    kind = row.model.get("family", "")
    if kind not in _settings()["kinds"]:
        raise NotCovered(f"a model of family '{kind}'")
    return str(kind)


def _precision(row: PublishedRow, settings: dict[str, Any], assumed: Assumptions) -> str:
    """The row's word for its precision."""
    if "precision" in settings:
        assumed.used.append(f"precision {settings['precision']}, as the repository's scripts have it")
        return str(settings["precision"])
    return str(row.precision or assumed.take("precision", "{}"))


# ---- the plan


def _layout(row: PublishedRow, model: dict[str, Any], assumed: Assumptions) -> RunLayout:
    plan, layers = _plan_keywords(row), model["layers"]
    tensor, pipeline, ranks = plan.get("tp", 1), plan.get("pp", 1), row.hardware["n_gpus"]
    context = plan.get("cp", 1)
    data = plan.get("dp") or ranks // (tensor * pipeline * context)
    if data * tensor * pipeline * context != ranks:
        raise NotCovered("the product of the stated axes is not the number of GPUs")
    sharding, shard = _sharding(row, plan, data, assumed)
    divided = partial(RunLayout, context=context, expert=_expert_ranks(plan, shard, data, assumed))
    chunks = _chunks(row, plan, layers, assumed)
    if row.source in CUT_BY_COST and pipeline > 1:
        block = 4 * model["hidden"] ** 2 + 3 * model["hidden"] * model["feedforward"]
        blocks = blocks_by_cost(layers, pipeline, model["vocabulary"] * model["hidden"] / block)
        return divided(data, tensor, pipeline, chunks, sharding, shard, blocks)
    blocks = _blocks(plan, layers, pipeline * chunks) if pipeline > 1 else ()
    if len(set(blocks)) > 1 and "stage_layers" not in plan:
        assumed.used.append(f"{layers} blocks over {len(blocks)} stages as evenly as can be")
    return divided(data, tensor, pipeline, chunks, sharding, shard, blocks)


def _expert_ranks(plan: dict[str, Any], shard: int, data: int, assumed: Assumptions) -> int:
    """The data ranks that share experts. Megatron counts tensor ranks among them, on which a plan of ours divides each
    expert instead."""
    stated = plan.get("ep", 1)
    ranks = gcd(stated, shard if shard > 1 else data)
    if ranks < stated:
        assumed.used.append(f"experts over {ranks} data ranks, and divided by tensor or context ranks, for {stated}")
    return ranks


def _plan_keywords(row: PublishedRow) -> dict[str, Any]:
    """The keywords of the row's plan. Colossal-AI's notation, such as `zero1(dp2)+tp2+pp4`, is parsed."""
    notation = row.plan.get("parallelism")
    if notation is None:
        return row.plan
    return {name: int(value) for name, value in re.findall(r"(zero|dp|tp|pp)(\d+)", notation)}


def _sharding(
    row: PublishedRow, plan: dict[str, Any], data: int, assumed: Assumptions
) -> tuple[ShardingLevel | None, int]:
    """What is sharded (None: nothing), and over how many ranks."""
    fsdp = plan.get("fsdp")
    if isinstance(fsdp, int):
        return "parameters", fsdp
    if fsdp == "SHARD_GRAD_OP":
        return "gradients", data
    if fsdp == "HSDP":
        ranks_per_node = int(row.hardware["gpus_per_node"])
        assumed.used.append("sharded within nodes, replicated between them")
        return "parameters", ranks_per_node
    if fsdp:
        return "parameters", data
    if "zero" in plan:
        return ZERO[plan["zero"]], data if plan["zero"] else 1
    if data > 1 and assumed.has("sharding"):
        return assumed.take("sharding", "sharded: {}"), data
    return None, 1


def _chunks(row: PublishedRow, plan: dict[str, Any], layers: int, assumed: Assumptions) -> int:
    """The number of stages per rank. If an interleaved schedule does not state it, it is the smallest number above 1
    that divides the blocks of a rank."""
    pipeline = plan.get("pp", 1)
    if pipeline == 1:
        return 1
    if "vpp" in plan or "interleaved" not in plan.get("schedule", ""):
        return int(plan.get("vpp", 1))
    blocks_per_rank = layers // pipeline
    stages = next((count for count in range(2, blocks_per_rank + 1) if blocks_per_rank % count == 0), 1)
    assumed.used.append(f"interleaved schedule with {stages} stages a rank")
    return stages


def _blocks(plan: dict[str, Any], layers: int, stages: int) -> tuple[int, ...]:
    """The number of blocks of each stage. Sailor counts the embedding as a layer of the first stage, and the head as a
    layer of the last."""
    stage_layers = plan.get("stage_layers")
    if stage_layers is None:
        return even_blocks(layers, stages)
    if sum(stage_layers) != layers + 2 or len(stage_layers) != stages:
        raise NotCovered("the stated stages are not those of the model")
    return (stage_layers[0] - 1, *stage_layers[1:-1], stage_layers[-1] - 1)


def _batches(row: PublishedRow, data: int, assumed: Assumptions) -> tuple[int, int]:
    """The global batch and the microbatch."""
    batch_per_rank = re.search(r'"Batch Size per DP" = (\d+)', row.notes)
    if row.source == "deepspeed_azure_z3" and row.micro_batch:
        return row.micro_batch * data, row.micro_batch
    if batch_per_rank:
        global_batch = int(batch_per_rank[1]) * data
    elif row.global_batch or row.batch_per_gpu:
        global_batch = row.global_batch or (row.batch_per_gpu or 0) * data
    else:
        raise NotCovered("batch not stated")
    if row.micro_batch:
        return global_batch, row.micro_batch
    if row.source in ONE_SAMPLE_STAGES and row.plan.get("pp", 1) > 1:
        assumed.used.append("microbatches of one sample in a pipeline")
        return global_batch, 1
    micro = assumed.take("micro_batch", "microbatch: {}")
    return global_batch, global_batch // data if micro == "whole" else micro


def _recompute_word(row: PublishedRow, assumed: Assumptions) -> str:
    """The word for recomputation that follows from torchtune's technique; of other sources, the assumed one."""
    technique = row.plan.get("technique")
    if technique:
        return "full" if technique == "+activation checkpointing" else "none"
    return str(assumed.take("recompute", "recompute {}"))


def _sequence(row: PublishedRow, layout: RunLayout, assumed: Assumptions) -> bool:
    """Whether tensor ranks divide the activations between split layers along the sequence."""
    if layout.tensor == 1:
        return False
    if "sp" in row.plan:
        return bool(row.plan["sp"])
    if row.plan.get("async_tp"):
        assumed.used.append("asynchronous tensor parallelism as the plain one")
    return bool(assumed.take("sequence", "sequence parallel {}")) if assumed.has("sequence") else False
