"""A model as a torch.export program: a file that runs with torch alone, on batches of any size."""

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

from meshwright.batch import Example, split
from meshwright.data.loading import Loading, Share, eval_batches
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.parallel.plain_attention import plain_attention
from meshwright.train.build import build_loading

TRACED, COMPARED, TRIED = 2, 3, 5  # batch sizes; one of 1 would be taken for a size that never changes
LONGEST = 300  # of what torch says when it cannot


class Program(nn.Module):
    """A program that was read back. It has no modules and no modes, only what it computes."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        with quiet():
            self._call = torch.export.load(file).module().__call__

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call(*arguments, **keywords)


def write_program(model: nn.Module, job: Job, dataset: Any, file: Path) -> None:
    """`dataset` shows what batches look like: sizes that differ between two of them are left open in the program,
    which is then tried on a third."""
    model.eval()
    traced, compared, tried = (example(job, dataset, samples) for samples in (TRACED, COMPARED, TRIED))
    sizes: Any = torch.export.AdditionalInputs()  # Any: torch's own annotation leaves it out
    sizes.add(compared.arguments, compared.keywords)
    with quiet(), torch.no_grad(), plain_attention():
        try:
            program = torch.export.export(model, traced.arguments, traced.keywords, dynamic_shapes=sizes)
            torch.export.save(program, file)
            Program(file)(*tried.arguments, **tried.keywords)
        except Exception as error:  # of any kind: the model's own code runs in here
            file.unlink(missing_ok=True)
            raise InputError(f"torch.export cannot make a program of this model: {_reason(error)}") from error


def example(job: Job, dataset: Any, samples: int) -> Example:
    """A batch of so many samples as the model gets it; a small data set gives some of them twice."""
    if hasattr(dataset, "__getitem__"):
        dataset = Subset(dataset, [index % len(dataset) for index in range(samples)])
    loading = Loading(collate=build_loading(job, torch.device("cpu")).collate)
    batch = next(eval_batches(dataset, batch=samples, share=Share(), loading=loading))
    return split(batch.data, job.data.target)


@contextmanager
def quiet() -> Iterator[None]:
    """torch and torchao tell users at length of what they will change in their own code one day, and print the graph
    of a model that they cannot export."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _reason(error: Exception) -> str:
    """In one line, without advice that is not for users, and with the line of the model's code where it is known."""
    said = re.sub(r"For more information, run with \S+", "", str(error) or type(error).__name__)
    said = " ".join(said.split())
    said = said if len(said) <= LONGEST else f"{said[:LONGEST]}…"
    ours = (str(Path(torch.__file__).parent), __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f"{said} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else said
