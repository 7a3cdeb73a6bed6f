"""Rows of image models and BERT that are out of scope, whatever their model: each rule is one line."""

from validation.runs.case import NotCovered
from validation.runs.rows import PublishedRow

DETECTORS = ("detectron2_zoo", "mmdet_vs_d2")
SHORT_RUN = 2560  # samples in a batch of all GPUs: SQuAD has 34 such batches
RUN_TOGETHER = (42, 63, 128, 7638)  # 4 and 2, 6 and 3, 12 and 8, 76 and 38


def check_in_scope(row: PublishedRow) -> None:
    reason = _reason(row)
    if reason:
        raise NotCovered(reason)


def _reason(row: PublishedRow) -> str | None:
    ranks = row.hardware.get("n_gpus") or 1
    name = row.model["name"]
    if row.source == "mmseg_memory":
        return "memory alone: no step time (bench/published scores it)"
    if row.source in DETECTORS:
        return "a detector of regions: what runs depends on the proposals"
    if row.source == "bilogur_checkpoint":
        return "the time of an unstated number of steps"
    if row.source == "nanogpt":
        return "batch not stated, and the row says not to judge by it"
    if row.source == "horovod_scaling":
        return "an efficiency without a step time"
    if "DataParallel" in row.framework and "Distributed" not in row.framework and ranks > 1:
        return "one process for all GPUs (DataParallel): no plan does that"
    if row.source == "tf_cnn_2017" and ranks > 1 and _has_servers(row):
        return "parameter servers: a plan has none yet"
    if "biobert" in row.framework:
        return "BioBERT is BERT-base: the row has BERT-Large's sizes, and batches run together"
    if name == "BERT-Large" and "Tensor" in row.framework and row.batch_per_gpu in RUN_TOGETHER:
        return "the batch is two numbers run together"
    if name == "BERT-Large" and "Tensor" not in row.framework and row.model.get("seq") == 512:
        return "padding is left out: faster than the GPU's peak allows for 512 tokens a sample"
    if name == "SSD" and "Tensor" in row.framework:
        return "no SSD320 among the models"
    if row.source == "nvidia_dle" and row.batch_per_gpu is None and "batch cell" not in row.notes:
        return "batch not stated"
    if name == "bert_base_squad" and _is_short(row):
        return "faster than eight times one GPU: the run was too short for a steady figure"
    return None


def _has_servers(row: PublishedRow) -> bool:
    """Only VGG16 and AlexNet on the P100s were replicated with NCCL."""
    return "replicated NCCL" not in row.framework or row.model["name"] not in ("VGG16", "Alexnet")


def _is_short(row: PublishedRow) -> bool:
    """lambda_v2 does not state the batch, which was that of lambda_v1."""
    batch = row.batch_per_gpu or SHORT_RUN
    return row.hardware["n_gpus"] == 8 and row.precision == "amp fp16" and batch >= SHORT_RUN
