"""Writes a model as a torch.export program: a file that runs with torch alone, on batches of any size."""

import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from meshwright.data.loading import LoadingOptions, SampleShare, eval_batches
from meshwright.errors import InputError, StorageError
from meshwright.files.storage import writing
from meshwright.job import Job
from meshwright.model_io.batch import ModelBatch, split_batch
from meshwright.parallel.attention_fastpath import without_attention_fastpath
from meshwright.train.build import build_loading

# Batch sizes. Not 1, because torch.export treats a size of 1 as constant.
TRACED_SAMPLES, COMPARED_SAMPLES, CHECKED_SAMPLES = 2, 3, 5
LONGEST_REASON = 300  # characters of torch's error message that are shown


class LoadedProgram(nn.Module):
    """An exported program that was read from a file. It has no submodules, and `train` and `eval` do not affect it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        with quiet():
            self._call = torch.export.load(file).module().__call__

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call(*arguments, **keywords)


def write_program(model: nn.Module, job: Job, dataset: Any, file: Path) -> None:
    """Exports the model to a file. Sizes that differ between two batches of `dataset` are dynamic in the program. The
    program is then run on a third batch as a check. Raises an `InputError` if torch cannot export the model."""
    model.eval()
    sample_counts = (TRACED_SAMPLES, COMPARED_SAMPLES, CHECKED_SAMPLES)
    traced, compared, checked = (example_batch(job, dataset, samples) for samples in sample_counts)
    sizes: Any = torch.export.AdditionalInputs()  # Any, since torch's annotation of dynamic_shapes omits this class
    sizes.add(compared.arguments, compared.keywords)
    with quiet(), torch.no_grad(), without_attention_fastpath():
        try:
            program = torch.export.export(model, traced.arguments, traced.keywords, dynamic_shapes=sizes)
            with writing(file):
                torch.export.save(program, file)
            LoadedProgram(file)(*checked.arguments, **checked.keywords)
        except StorageError:
            raise
        except Exception as error:  # any class, because the model's own code runs here
            raise InputError(f"torch.export cannot make a program of this model: {_reason(error)}") from error


def example_batch(job: Job, dataset: Any, samples: int) -> ModelBatch:
    """Returns a batch of `samples` samples in the form in which the model receives it. Samples of a small data set are
    repeated."""
    if hasattr(dataset, "__getitem__"):
        dataset = Subset(dataset, [index % len(dataset) for index in range(samples)])
    loading = LoadingOptions(collate=build_loading(job, torch.device("cpu")).collate)
    batch = next(eval_batches(dataset, batch=samples, share=SampleShare(), loading=loading))
    return split_batch(batch.data, job.data.target)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses the deprecation warnings of torch and torchao, and the graph that torch prints of a model that it
    cannot export."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _reason(error: Exception) -> str:
    """Returns torch's error message in one line, without its advice for torch developers. If the line of the model's
    code is known, it is added."""
    message = re.sub(r"For more information, run with \S+", "", str(error) or type(error).__name__)
    message = " ".join(message.split())
    message = message if len(message) <= LONGEST_REASON else f"{message[:LONGEST_REASON]}…"
    not_the_model = (str(Path(torch.__file__).parent), __file__)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(not_the_model)
    ]
    return f"{message} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else message
