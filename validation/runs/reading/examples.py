"""Rows of image models and BERT, trained with data parallelism alone. examples.yaml says how each source is read."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.call import Call
from meshwright.yaml_file import read_mapping
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
LISTED = re.compile(r"^(resnet|resnext|wide_resnet|densenet|squeezenet|vgg|mnasnet|mobilenet|shufflenet|alexnet)\w*$")
CELLS = re.compile(r"batch cell: (\d+) *, *(\d+); accum cell: (\d+) *, *(\d+)")
BY_PRECISION = re.compile(r"batch cell: (\d+) \(FP32\) / (\d+) \(AMP\)")
MIB = 2**20
TORCH_2 = 2023  # the year of its release


@cache
def _settings() -> dict[str, Any]:
    return read_mapping(FILE, "published examples")


def is_example(row: PublishedRow) -> bool:
    return row.source in _settings()["sources"]


def read_example(row: PublishedRow) -> PublishedCase:
    settings = _settings()["sources"][row.source]
    check_in_scope(row)
    model, sample, defaults = _model(row)
    defaults += (settings["beside"],) if "beside" in settings else ()
    cluster, words = cluster_of(row)
    defaults += words
    precision, words = precision_of(row.precision or "", device_of(cluster))
    defaults += words
    ranks = row.hardware["n_gpus"]
    batch, accumulation, words = _batches(row, precision, settings["batch"])
    defaults += words
    images = _layout_of_images(row, sample, precision, settings)
    defaults += (f"{images} images",) if sample.kind == "images" and precision == "fp16" else ()
    engine = _engine(row, settings["engine"])
    optimizer, words = _optimizer(row, settings["optimizer"], sample, engine, precision)
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
        defaults=defaults + words,
    )


def _engine(row: PublishedRow, word: str) -> str:
    """BERT has programs of its own among NVIDIA's examples."""
    first = (row.framework.split() or [""])[0]
    if row.source == "u39kun" and first == "PyTorch":
        return "pytorch"
    engine = str(_settings()["engines"][first]) if word == "framework" else word
    if "bert" not in str(row.model["name"]).lower():
        return engine
    own = "tensorflow-bert" if first == "TensorFlow" else engine
    return "nvidia-bert" if engine == "nvidia-examples" else own


def _model(row: PublishedRow) -> tuple[Call, Sample, tuple[str, ...]]:
    name = str(row.model["name"])
    known = _settings()["models"].get(name)
    if known is None and row.source in TORCHVISION and LISTED.match(name):
        known = {"call": f"torchvision.models.{name}"}
    if known is None:
        raise NotCovered(f"no {name} among the models")
    keywords = dict(known)
    if keywords["call"].endswith(":Bert"):
        return _bert(row, keywords)
    stands_for = keywords.pop("for", None)
    size = tuple(keywords.pop("size", (224, 224)))
    sample = Sample(keywords.pop("kind", "images"), size, keywords.pop("targets", 0))
    words = (f"{keywords['call'].rpartition('.')[2]} for {stands_for}",) if stands_for else ()
    return Call(**keywords), sample, words


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
    row: PublishedRow, word: str, sample: Sample, engine: str, precision: str
) -> tuple[Call | None, tuple[str, ...]]:
    if word == "none":
        return None, ()
    chosen = "adam" if sample.kind in ("words", "spans") else word
    if chosen == "sgd" and row.year < TORCH_2 and row.framework.startswith("PyTorch"):
        chosen = "sgd by tensor"
    if engine == "nvidia-bert" and sample.kind == "spans" and precision in ("fp32", "tf32"):
        chosen = "bert-adam"  # run_squad.py has apex's fused one for fp16 alone
    return Call(**_settings()["optimizers"][chosen]), (f"optimizer {chosen}",)


def _layout_of_images(row: PublishedRow, sample: Sample, precision: str, settings: dict[str, Any]) -> ImageLayout:
    if "Tensor" in row.framework or sample.kind not in ("images", "boxes"):
        return "contiguous"
    told: ImageLayout = settings["layout"] if precision == "fp16" and sample.kind == "images" else "contiguous"
    boxes: ImageLayout = settings.get("boxes", "contiguous")
    return boxes if sample.kind == "boxes" else told


def _batches(row: PublishedRow, precision: str, of: str) -> tuple[int, int, tuple[str, ...]]:
    """A rank's microbatch, how many of them are accumulated, and the defaults that went into them.

    NVIDIA's TensorFlow tables give both for fp16 first and for fp32 second; the collected rows have the latter
    the wrong way round, which the products show: they are the same global batch."""
    cells = CELLS.search(row.notes)
    if row.framework.startswith("TensorFlow") and cells:
        first = precision == "fp16"
        return int(cells[1 if first else 2]), int(cells[3 if first else 4]), ()
    either = BY_PRECISION.search(row.notes)
    if either:
        return int(either[2 if precision == "fp16" else 1]), 1, ()
    if row.batch_per_gpu is None:
        return *_batch_of_lambda(row, precision), (f"batch {_batch_of_lambda(row, precision)[0]} of lambda_v1",)
    parts = row.hardware["n_gpus"] if of == "all" else 1
    if row.batch_per_gpu % parts:
        raise NotCovered("the batch of all GPUs is no multiple of their number")
    return row.batch_per_gpu // parts, row.grad_accum or 1, ()


def _batch_of_lambda(row: PublishedRow, precision: str) -> tuple[int, int]:
    batches = _settings()["lambda_batches"].get(row.model["name"])
    if row.source != "lambda_v2" or batches is None or row.hardware["gpu"] not in _settings()["lambda_gpus"]:
        raise NotCovered("batch not stated")
    return int(batches[precision]), 1


def _bucket_bytes(row: PublishedRow) -> int | None:
    found = re.search(r"bucket (\d+)MB", row.framework)
    return int(found[1]) * MIB if found else None


def _step(row: PublishedRow, global_batch: int) -> float:
    seconds = seconds_of(row, global_batch)
    if seconds is None:
        raise NotCovered("no step time, and none that follows")
    return seconds
