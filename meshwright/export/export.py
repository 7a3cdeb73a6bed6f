"""`meshwright export`: writes the weights of a run to a file or folder that can be used without Meshwright, and
measures how the size and the metrics change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from meshwright.errors import InputError, did_you_mean
from meshwright.export.huggingface import check_folder, check_model, folder_bytes, read_folder, write_folder
from meshwright.export.measure import MetricChange, first_samples, measure, metric_changes
from meshwright.export.program import LoadedProgram, write_program
from meshwright.export.quantize import Width, quantizable_parameters, quantize, quantized_state, read_quantized_state
from meshwright.export.run import TrainedModel, read_run
from meshwright.export.weights import copy_in_bf16, read_weights, size_bytes, write_weights
from meshwright.files.pt_file import read_pt_file
from meshwright.files.regular_file import find_unsafe_entry
from meshwright.files.storage import output_error, replacing
from meshwright.progress import phase
from meshwright.train.build import build_data

SUFFIXES = {
    "safetensors": ".safetensors",
    "bf16": ".safetensors",
    "int8": ".pt2",
    "int16": ".pt2",
    "program": ".pt2",
    "huggingface": "",  # a folder
}


@dataclass(frozen=True)
class ExportResult:
    """The file or folder that was written, and how size and metrics changed. `bytes` is its size, `bytes_before` that
    of the model's weights before the export. `metrics` is empty if nothing was evaluated."""

    run: Path
    format: str
    step: int
    file: Path
    bytes: int
    bytes_before: int
    metrics: dict[str, MetricChange]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object that `meshwright export --json` prints."""
        return {
            "file": str(self.file),
            "bytes": self.bytes,
            "metrics": {name: change.to_dict() for name, change in self.metrics.items()},
            "bytes_before": self.bytes_before,
            "format": self.format,
            "run": str(self.run),
            "step": self.step,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Written:
    """A file that was written, the model read back from it, and notes for the user."""

    file: Path
    model: nn.Module
    notes: tuple[str, ...] = ()


def export(
    run: Path,
    to: str,
    output: Path | None = None,
    dynamic: bool = False,
    step: str | None = None,
    limit: int | None = None,
    settings: Sequence[str] = (),
    trust: bool = False,
) -> ExportResult:
    """Writes a run's model in the format `to` (a key of `SUFFIXES`), evaluates the model before and after, and returns
    the sizes and metrics.

    `limit` is the largest number of samples to evaluate; None means all samples, 0 means none. `step` selects the
    checkpoint as in `read_run`, `settings` override fields of the job (`data.root=...`), and `trust` allows a run that
    this user did not write.
    """
    if to not in SUFFIXES:
        raise InputError(f"--to {to}{did_you_mean(to, SUFFIXES)}")
    if dynamic and to != "int8":
        raise InputError(f"--dynamic quantizes activations, which --to {to} does not: use it with --to int8")
    if output and to == "huggingface":
        check_folder(output)
    elif output and output.suffix != SUFFIXES[to]:
        raise InputError(f"--output {output}: a file of --to {to} ends in {SUFFIXES[to]}")
    problem = None if output else find_unsafe_entry(run, "export")
    if problem:
        raise InputError(f"{problem}, or choose a file with --output")
    with phase("exporting: reading the run's checkpoint"):
        trained = read_run(run, step, settings, trust)
    if to == "huggingface":
        check_model(trained.model)
    file = output or run / "export" / _file_name(trained.job.name, to, dynamic)
    eval_set, example_set = _data_sets(trained, to, limit)
    with phase("exporting: evaluating the trained model"):
        before = measure(trained.model, trained.job, eval_set) if eval_set is not None else {}
    _create_folder(file)
    with phase(f"exporting: writing {file.name}"):
        written = _write(trained, to, dynamic, example_set, file)
    with phase("exporting: evaluating what was written"):
        after = measure(written.model, trained.job, eval_set) if eval_set is not None else {}
    unmeasured = () if eval_set is not None else (_why_unmeasured(limit),)
    return ExportResult(
        run=run,
        format=f"{to}, dynamic" if dynamic else to,
        step=trained.step,
        file=written.file,
        bytes=folder_bytes(written.file) if to == "huggingface" else written.file.stat().st_size,
        bytes_before=size_bytes(trained.model),
        metrics=metric_changes(before, after),
        notes=(*trained.notes, *written.notes, *unmeasured),
    )


def _write(trained: TrainedModel, to: str, dynamic: bool, example_set: Any, file: Path) -> _Written:
    """Writes the model in the format `to`. The file or folder is complete, or it does not exist. A quantized model that
    torch.export cannot export is written as a state dict."""
    if to in ("safetensors", "bf16"):
        metadata = {"format": "pt", "job": trained.job.name, "step": str(trained.step)}
        model = copy_in_bf16(trained.model) if to == "bf16" else trained.model
        with replacing(file, size_bytes(model)) as draft:
            write_weights(model, draft, metadata)
        return _Written(file, read_weights(trained.initial_model(), file))
    if to == "huggingface":
        write_folder(trained.model, trained.job, file, size_bytes(trained.model))
        return _Written(file, read_folder(trained.model, file))
    if to == "program":
        with replacing(file, size_bytes(trained.model)) as draft:
            write_program(trained.model, trained.job, example_set, draft)
        return _Written(file, LoadedProgram(file))
    width = cast(Width, to)
    notes: tuple[str, ...] = ()
    if not quantizable_parameters(trained.model, width):
        notes = (f"the model has no weights that {width} quantizes: no weight changed",)
    quantized_model = quantize(trained.model, width, dynamic)
    try:
        with replacing(file) as draft:
            write_program(quantized_model, trained.job, example_set, draft)
    except InputError as error:
        written = _write_state(trained, width, file.with_suffix(".pt"))
        lost = "; its activations are not quantized" if dynamic else ""
        return replace(written, notes=(*notes, f"{error}; so this is a quantized state dict{lost}"))
    return _Written(file, LoadedProgram(file), notes)


def _write_state(trained: TrainedModel, width: Width, file: Path) -> _Written:
    """Writes a quantized state dict, for models that torch.export cannot export."""
    with replacing(file) as draft:
        torch.save(quantized_state(trained.model, width), draft)
    return _Written(file, read_quantized_state(trained.initial_model(), read_pt_file(file)))


def _data_sets(trained: TrainedModel, to: str, limit: int | None) -> tuple[Any, Any]:
    """Returns two data sets. The first is the one to evaluate, or None if nothing is to be evaluated. The second
    provides example batches for a program, or is None if neither is needed."""
    if limit == 0 and SUFFIXES[to] != ".pt2":
        return None, None
    train_set, eval_set = build_data(trained.job)
    example_set = train_set if eval_set is None else eval_set
    return None if eval_set is None or limit == 0 else first_samples(eval_set, limit), example_set


def _why_unmeasured(limit: int | None) -> str:
    if limit == 0:
        return "nothing was evaluated, as --limit is 0"
    return "the job has no evaluation set: how its metrics change is unknown"


def _file_name(job: str, to: str, dynamic: bool) -> str:
    kind = {"safetensors": "", "program": ""}.get(to, f"-{to}")
    return f"{job}{kind}{'-dynamic' if dynamic else ''}{SUFFIXES[to]}"


def _create_folder(file: Path) -> None:
    """Creates the folder that the file is written to."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(error, file.parent, f"--output {file}") from None
