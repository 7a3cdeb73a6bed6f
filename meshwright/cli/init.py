"""`meshwright init`: writes a job file to begin with."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import GlobalBatch, ImageSize, SequenceLength, check_output, path_option
from meshwright.cli.ready_jobs import complete_job_or_model, find_job, is_model_name, ready_jobs
from meshwright.cli.text import print_lines
from meshwright.errors import InputError

TEMPLATE = """\
# A job to begin with: it trains a small network on handwritten digits that come with the package. Replace model, data
# and loss by your own. Each `call` is the import path of a function or class: `file.py:name` in your own files, and
# `package.module:name` in installed packages. The keys next to it are its keyword arguments.
# docs/job.md explains all fields; --set A.B=C replaces one for a single command.
model:     {call: meshwright.workloads.mnist:Net}                   # yours: {call: my_model.py:build, hidden: 256}
data:
  train:   {call: meshwright.workloads.mnist:digits, split: train}  # yours: {call: my_data.py:training_set}
  eval:    {call: meshwright.workloads.mnist:digits, split: test}
  workers: 0                # loader processes of each rank
loss:      {call: torch.nn.functional:cross_entropy}                # leave it out if the model returns its loss
metrics:   {accuracy: {call: meshwright.train.metrics:accuracy}}
optimizer: {call: torch.optim:AdamW, lr: 1e-3, weight_decay: 0.01, groups: no_decay}
train:     {epochs: 1, global_batch: 128, seed: 0}
checkpoint: {every_steps: 100, keep: 3, best: accuracy}
log:       {every_steps: 10, tensorboard: true}
plan: auto                  # or the file that `meshwright plan JOB --output plan.yaml` writes
allow: rounding             # what plan: auto may change: same, rounding (the last bits), changes (bf16 or fp16, too)
cluster: local              # all devices of this machine
output: runs                # the folder of the runs
"""


def init(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|JOB",
            help="hf:FOLDER (or its config.json, or a model type such as hf:llama), timm:NAME, torchvision:NAME, or the"
            " name of a ready job to change; by default a small template.",
            autocompletion=complete_job_or_model,
        ),
    ] = None,
    output: Annotated[Path, path_option("--output", "FILE", "The job file to write.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    global_batch: GlobalBatch = None,
    sequence: SequenceLength = None,
    image: ImageSize = None,
) -> None:
    """Write a job file to start from. plan, prove and train accept it as it is: it trains on generated data, or on the
    digits that come with the package."""
    from meshwright.files.storage import write_atomically

    check_output(output)
    if output.exists() and not force:
        raise InputError(f"{output} exists: choose another file with --output, or replace it with --force")
    if model is not None and is_model_name(model):
        from meshwright.zoo.job_text import job_text

        text = job_text(model, global_batch, sequence, image)
    else:
        options = {"--global-batch": global_batch, "--sequence": sequence, "--image": image}
        for name, value in options.items():
            if value is not None:
                raise InputError(f"{name} {value}: this option is for models such as hf:llama")
        text = TEMPLATE if model is None else _ready_job(model)
    write_atomically(output, text)
    print_lines([f"wrote {output}: try `meshwright plan {output}`, then `prove` and `train`"])


def _ready_job(name: str) -> str:
    file = find_job(name)
    if file not in ready_jobs().values():
        raise InputError(f"{file} is a path: write hf:{file} for a model, or the name of a ready job")
    return file.read_text()
