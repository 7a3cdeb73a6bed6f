"""Reads rows of image models and BERT, which were trained with data parallelism alone. examples.yaml says how the rows
of each source are read."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.files.yaml_file import read_mapping
from meshwright.user.call import Call
from validation.runs.case import NotCovered, PublishedCase, Sample
from validation.runs.families import family_of
from validation.runs.reading.hardware import cluster_of, device_of
from validation.runs.reading.layout import ImageLayout, RunLayout, make_plan
from validation.runs.reading.measures import memory_of, seconds_of
from validation.runs.reading.out_of_scope import check_in_scope
from validation.runs.reading.words import precision_of
from validation.runs.rows import PublishedRow

FILE = Path(__file__).with_name("examples.yaml")
TORCHVISION = ("ryujaehun_cnn", "u39kun", "pytorch_ddp_bench", "nvidia_dle", "lambda_v1", "lambda_v2")
TORCHVISION_NAME = re.compile(
    r"^(resnet|resnext|wide_resnet|densenet|squeezenet|vgg|mnasnet|mobilenet|shufflenet|alexnet)\w*$"
)
BATCH_AND_ACCUMULATION = re.compile(r"batch cell: (\d+) *, *(\d+); accum cell: (\d+) *, *(\d+)")
BATCH_BY_PRECISION = re.compile(r"batch cell: (\d+) \(FP32\) / (\d+) \(AMP\)")
MIB = 2**20
TORCH_2_YEAR = 2023  # the year in which torch 2.0 was released


@cache
def _settings() -> dict[str, Any]:
    return read_mapping(FILE, "published examples")


def is_example(row: PublishedRow) -> bool:
    return row.source in _settings()["sources"]


def read_example(row: PublishedRow) -> PublishedCase:
    """The case that the row describes. Raises `NotCovered` with the reason if the row cannot be predicted."""
    settings = _settings()["sources"][row.source]
    check_in_scope(row)
    model, sample, defaults = _model(row)
    defaults += (settings["beside"],) if "beside" in settings else ()
    cluster, more_defaults = cluster_of(row)
    defaults += more_defaults
    precision, more_defaults = precision_of(row.precision or "", device_of(cluster))
    defaults += more_defaults
    ranks = row.hardware["n_gpus"]
    batch, accumulation, more_defaults = _batches(row, precision, settings["batch"])
    defaults += more_defaults
    images = _layout_of_images(row, sample, precision, settings)
    defaults += (f"{images} images",) if sample.kind == "images" and precision == "fp16" else ()
    engine = _engine(row, settings["engine"])
    optimizer, more_defaults = _optimizer(row, settings["optimizer"], sample, engine, precision)
    plan = make_plan(
        RunLayout(ranks),
        accumulation,
        precision,
        bucket_bytes=_bucket_bytes(row),
        layout_of_images=images,
    )
    global_batch = batch * accumulation * ranks
    measured_as = f"{engine}, {row.measured['stat']}" if "stat" in row.measured else engine
    memory_bytes, memory_kind = memory_of(row)
    return PublishedCase(
        id=row.id,
        source=row.source,
        family=family_of(row.source, measured_as, model, cluster, precision, global_batch),
        model=model,
        sample=sample,
        loss=Call(**_settings()["losses"][sample.kind]),
        optimizer=optimizer,
        cluster=cluster,
        plan=plan,
        global_batch=global_batch,
        micro_batch=batch,
        engine=engine,
        precision=precision,
        attention="scores",
        compiled=False,
        step_s=_step(row, global_batch),
        memory_bytes=memory_bytes,
        memory_kind=memory_kind,
        oom=False,
        defaults=defaults + more_defaults,
    )


def _engine(row: PublishedRow, setting: str) -> str:
    """The name of the engine in engines.yaml. BERT has programs of its own among NVIDIA's examples."""
    framework = (row.framework.split() or [""])[0]
    if row.source == "u39kun" and framework == "PyTorch":
        return "pytorch"
    engine = str(_settings()["engines"][framework]) if setting == "framework" else setting
    if "bert" not in str(row.model["name"]).lower():
        return engine
    if engine == "nvidia-examples":
        return "nvidia-bert"
    return "tensorflow-bert" if framework == "TensorFlow" else engine


def _model(row: PublishedRow) -> tuple[Call, Sample, tuple[str, ...]]:
    """The model, the shape of its samples, and the defaults that were used."""
    name = str(row.model["name"])
    settings = _settings()["models"].get(name)
    if settings is None and row.source in TORCHVISION and TORCHVISION_NAME.match(name):
        settings = {"call": f"torchvision.models.{name}"}
    if settings is None:
        raise NotCovered(f"no {name} among the models")
    keywords = dict(settings)
    if keywords["call"].endswith(":Bert"):
        return _bert(row, keywords)
    stands_for = keywords.pop("for", None)
    size = tuple(keywords.pop("size", (224, 224)))
    sample = Sample(keywords.pop("kind", "images"), size, keywords.pop("targets", 0))
    defaults = (f"{keywords['call'].rpartition('.')[2]} for {stands_for}",) if stands_for else ()
    return Call(**keywords), sample, defaults


def _bert(row: PublishedRow, keywords: dict[str, Any]) -> tuple[Call, Sample, tuple[str, ...]]:
    settings, length = _settings()["bert"], row.model.get("seq")
    if length is None:
        length = settings["spans_length"]
        call = Call(**{**keywords, "task": "spans"})
        return call, Sample("spans", (length,)), (f"length {length}",)
    targets = settings["targets"][length]
    call = Call(**{**keywords, "task": "words", "targets": targets})
    return call, Sample("words", (length,), targets), (f"{targets} words of a sample predicted", "AdamW for LAMB")


def _optimizer(
    row: PublishedRow, setting: str, sample: Sample, engine: str, precision: str
) -> tuple[Call | None, tuple[str, ...]]:
    """The optimizer, and the default that was used. None if a measured step is the forward and backward pass alone."""
    if setting == "none":
        return None, ()
    name = "adam" if sample.kind in ("words", "spans") else setting
    if name == "sgd" and row.year < TORCH_2_YEAR and row.framework.startswith("PyTorch"):
        name = "sgd by tensor"
    if engine == "nvidia-bert" and sample.kind == "spans" and precision in ("fp32", "tf32"):
        name = "bert-adam"  # run_squad.py uses apex's fused Adam for fp16 alone
    return Call(**_settings()["optimizers"][name]), (f"optimizer {name}",)


def _layout_of_images(row: PublishedRow, sample: Sample, precision: str, settings: dict[str, Any]) -> ImageLayout:
    layout: ImageLayout = "contiguous"
    if "Tensor" in row.framework:
        return layout
    if sample.kind == "boxes":
        layout = settings.get("boxes", "contiguous")
    elif sample.kind == "images" and precision == "fp16":
        layout = settings["layout"]
    return layout


def _batches(row: PublishedRow, precision: str, batch_of: str) -> tuple[int, int, tuple[str, ...]]:
    """The microbatch of a rank, the number of microbatches that are accumulated, and the defaults that were used.
    `batch_of` says whether the stated batch is that of one rank or of `all` ranks.

    NVIDIA's TensorFlow tables state both for fp16 first and for fp32 second. The collected rows have the fp32 values
    in the wrong order: only in the order used here do both precisions have the same global batch."""
    both = BATCH_AND_ACCUMULATION.search(row.notes)
    if row.framework.startswith("TensorFlow") and both:
        is_fp16 = precision == "fp16"
        return int(both[1 if is_fp16 else 2]), int(both[3 if is_fp16 else 4]), ()
    by_precision = BATCH_BY_PRECISION.search(row.notes)
    if by_precision:
        return int(by_precision[2 if precision == "fp16" else 1]), 1, ()
    if row.batch_per_gpu is None:
        return *_batch_of_lambda(row, precision), (f"batch {_batch_of_lambda(row, precision)[0]} of lambda_v1",)
    ranks = row.hardware["n_gpus"] if batch_of == "all" else 1
    if row.batch_per_gpu % ranks:
        raise NotCovered("the batch of all GPUs is no multiple of their number")
    return row.batch_per_gpu // ranks, row.grad_accum or 1, ()


def _batch_of_lambda(row: PublishedRow, precision: str) -> tuple[int, int]:
    """The microbatch and the accumulation of a lambda_v2 row, which does not state them, from the rows of lambda_v1."""
    batches = _settings()["lambda_batches"].get(row.model["name"])
    if row.source != "lambda_v2" or batches is None or row.hardware["gpu"] not in _settings()["lambda_gpus"]:
        raise NotCovered("batch not stated")
    return int(batches[precision]), 1


def _bucket_bytes(row: PublishedRow) -> int | None:
    """The size of DDP's gradient buckets; None if the row does not state it."""
    megabytes = re.search(r"bucket (\d+)MB", row.framework)
    return int(megabytes[1]) * MIB if megabytes else None


def _step(row: PublishedRow, global_batch: int) -> float:
    seconds = seconds_of(row, global_batch)
    if seconds is None:
        raise NotCovered("the row states no step time, and none follows from what it states")
    return seconds
