"""The rules by which rows of image models and BERT are out of scope. Each rule gives its reason in one line."""

from validation.runs.case import NotCovered
from validation.runs.rows import PublishedRow

DETECTORS = ("detectron2_zoo", "mmdet_vs_d2")
SHORT_RUN_BATCH = 2560  # samples in the global batch from which a run is too short: SQuAD has only 34 such batches
CONCATENATED_BATCHES = (42, 63, 128, 7638)  # 4 and 2, 6 and 3, 12 and 8, 76 and 38


def check_in_scope(row: PublishedRow) -> None:
    """Raises `NotCovered` with the reason if the row is out of scope."""
    reason = _reason(row)
    if reason:
        raise NotCovered(reason)


def _reason(row: PublishedRow) -> str | None:
    """The reason why the row is out of scope; None if it is in scope."""
    ranks = row.hardware.get("n_gpus") or 1
    name = row.model["name"]
    if row.source == "mmseg_memory":
        return "only memory, no step time: validation/memory/published.py predicts it"
    if row.source in DETECTORS:
        return "a region-based detector: its work depends on the proposals in each image"
    if row.source == "bilogur_checkpoint":
        return "the time of an unstated number of steps"
    if row.source == "nanogpt":
        return "batch not stated, and the row says not to judge by it"
    if row.source == "horovod_scaling":
        return "an efficiency without a step time"
    if "DataParallel" in row.framework and "Distributed" not in row.framework and ranks > 1:
        return "one process for all GPUs (DataParallel), which a plan cannot express"
    if row.source == "tf_cnn_2017" and ranks > 1 and _has_parameter_servers(row):
        return "parameter servers, which a plan cannot express"
    if "biobert" in row.framework:
        return "BioBERT is a BERT-base, but the row has BERT-Large's sizes, and two batches written as one number"
    if name == "BERT-Large" and "Tensor" in row.framework and row.batch_per_gpu in CONCATENATED_BATCHES:
        return "the batch is two numbers written as one"
    if name == "BERT-Large" and "Tensor" not in row.framework and row.model.get("seq") == 512:
        return "padding is not computed: the run is faster than 512 tokens per sample allow at the GPU's peak rate"
    if name == "SSD" and "Tensor" in row.framework:
        return "no SSD320 among the models"
    if row.source == "nvidia_dle" and row.batch_per_gpu is None and "batch cell" not in row.notes:
        return "batch not stated"
    if name == "bert_base_squad" and _is_short(row):
        return "more than eight times as fast as one GPU: the run was too short for a steady figure"
    return None


def _has_parameter_servers(row: PublishedRow) -> bool:
    """Whether the run used parameter servers. Only VGG16 and AlexNet on the P100s were replicated with NCCL."""
    return "replicated NCCL" not in row.framework or row.model["name"] not in ("VGG16", "Alexnet")


def _is_short(row: PublishedRow) -> bool:
    """Whether the run was too short. lambda_v2 does not state its batch, which was that of lambda_v1."""
    batch = row.batch_per_gpu or SHORT_RUN_BATCH
    return row.hardware["n_gpus"] == 8 and row.precision == "amp fp16" and batch >= SHORT_RUN_BATCH
