"""`meshwright export`: a run's weights as a file that needs no Meshwright, and what that does to size and metrics."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from meshwright.errors import InputError, did_you_mean
from meshwright.export.measure import Change, changes, first, measure
from meshwright.export.program import Program, write_program
from meshwright.export.quantize import Width, chosen, quantize, quantized_state, read_quantized_state
from meshwright.export.run import Trained, read_run
from meshwright.export.weights import in_bf16, read_weights, size_bytes, write_weights
from meshwright.train.build import build_data

SUFFIXES = {
    "safetensors": ".safetensors",
    "bf16": ".safetensors",
    "int8": ".pt2",
    "int16": ".pt2",
    "program": ".pt2",
}


@dataclass(frozen=True)
class Exported:
    """`bytes_before` are those of the model's own weights. `metrics` is empty where nothing was evaluated."""

    run: Path
    format: str
    step: int
    file: Path
    bytes: int
    bytes_before: int
    metrics: dict[str, Change]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
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
    """A file, the model that was read back from it, and what is to be said of it."""

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
) -> Exported:
    """`limit` is how many samples are evaluated at most; None: all of them, 0: none."""
    if to not in SUFFIXES:
        raise InputError(f"--to {to}{did_you_mean(to, SUFFIXES)}")
    if dynamic and to != "int8":
        raise InputError(f"--dynamic quantizes activations, which --to {to} does not: use it with --to int8")
    if output and output.suffix != SUFFIXES[to]:
        raise InputError(f"--output {output}: a file of --to {to} ends in {SUFFIXES[to]}")
    trained = read_run(run, step, settings)
    file = output or run / "export" / _name(trained.job.name, to, dynamic)
    evaluated, shown = _data(trained, to, limit)
    before = measure(trained.model, trained.job, evaluated) if evaluated is not None else {}
    written = _write(trained, to, dynamic, shown, _folder_of(file))
    after = measure(written.model, trained.job, evaluated) if evaluated is not None else {}
    unmeasured = () if evaluated is not None else (_why_unmeasured(limit),)
    return Exported(
        run=run,
        format=f"{to}, dynamic" if dynamic else to,
        step=trained.step,
        file=written.file,
        bytes=written.file.stat().st_size,
        bytes_before=size_bytes(trained.model),
        metrics=changes(before, after),
        notes=(*trained.notes, *written.notes, *unmeasured),
    )


def _write(trained: Trained, to: str, dynamic: bool, shown: Any, file: Path) -> _Written:
    """Beside its place first: a file exists whole or not at all."""
    aside = file.with_name(f".writing-{file.name}")
    if to in ("safetensors", "bf16"):
        about = {"format": "pt", "job": trained.job.name, "step": str(trained.step)}
        write_weights(in_bf16(trained.model) if to == "bf16" else trained.model, aside, about)
        os.replace(aside, file)
        return _Written(file, read_weights(trained.fresh(), file))
    if to == "program":
        write_program(trained.model, trained.job, shown, aside)
        os.replace(aside, file)
        return _Written(file, Program(file))
    width = cast(Width, to)
    notes = () if chosen(trained.model, width) else (f"the model has nothing that {width} is for: no weight changed",)
    quantized = quantize(trained.model, width, dynamic)
    try:
        write_program(quantized, trained.job, shown, aside)
    except InputError as error:
        state = _write_state(trained, width, file.with_suffix(".pt"))
        lost = "; it holds no quantized activations" if dynamic else ""
        return replace(state, notes=(*notes, f"{error}; so this is a quantized state dict{lost}"))
    os.replace(aside, file)
    return _Written(file, Program(file), notes)


def _write_state(trained: Trained, width: Width, file: Path) -> _Written:
    aside = file.with_name(f".writing-{file.name}")
    torch.save(quantized_state(trained.model, width), aside)
    os.replace(aside, file)
    return _Written(file, read_quantized_state(trained.fresh(), torch.load(file, weights_only=True)))


def _data(trained: Trained, to: str, limit: int | None) -> tuple[Any, Any]:
    """What is evaluated, if anything, and what shows a program its batches. Weights alone need no data at all."""
    if limit == 0 and SUFFIXES[to] == ".safetensors":
        return None, None
    train_set, eval_set = build_data(trained.job)
    shown = train_set if eval_set is None else eval_set
    return None if eval_set is None or limit == 0 else first(eval_set, limit), shown


def _why_unmeasured(limit: int | None) -> str:
    if limit == 0:
        return "nothing was evaluated, as --limit is 0"
    return "the job has no evaluation set: what this does to its metrics is unknown"


def _name(job: str, to: str, dynamic: bool) -> str:
    kind = {"safetensors": "", "program": ""}.get(to, f"-{to}")
    return f"{job}{kind}{'-dynamic' if dynamic else ''}{SUFFIXES[to]}"


def _folder_of(file: Path) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {file}: cannot write in '{file.parent}': {error.strerror}") from None
    return file
