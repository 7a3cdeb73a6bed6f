"""`meshwright export`: the weights of a run for use without Meshwright, or a plan as the configuration of another
program."""

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import AsJson, Settings, Trust, check_not_empty, check_output, path_argument, path_option
from meshwright.cli.ready_jobs import complete_job, find_job
from meshwright.cli.text import print_lines
from meshwright.errors import InputError, did_you_mean
from meshwright.numbers.limits import LARGEST_COUNT
from meshwright.progress import phase


def export(
    source: Annotated[
        Path,
        path_argument("RUN|PLAN", "The run folder that train wrote. For a program: a plan file, or a run folder."),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="safetensors|bf16|int8|int16|program|huggingface|deepspeed|accelerate|torchrun",
            help="The format of the weights, or the program that trains by the plan.",
        ),
    ],
    output: Annotated[
        Path | None,
        path_option("--output", "FILE", "The file to write, or the folder of huggingface; by default in RUN/export."),
    ] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="With int8: quantize activations as well.")] = False,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="N|best|last",
            help="The checkpoint; by default the best if the job sets checkpoint.best, else the last.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, max=LARGEST_COUNT, metavar="N", help="Evaluate at most N samples; 0 evaluates none."),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(
            "--job",
            metavar="JOB",
            help="For a program: the job with the batch, the clipping and the optimizer, which a plan does not have.",
            parser=find_job,
            autocompletion=complete_job,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="C",
            help="For a program: the machines; by default the job's.",
            callback=lambda text: check_not_empty(text, "--cluster"),
        ),
    ] = None,
    trust: Trust = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a run for use without Meshwright, and print how size and metrics change. Or write the
    configuration with which deepspeed, accelerate or torchrun trains by a plan, and print what of the plan it cannot
    express."""
    from meshwright.export.configurations.write import PROGRAMS

    if to in PROGRAMS:
        if dynamic or step is not None or limit is not None:
            raise InputError(f"--to {to} writes no weights: leave out --dynamic, --step and --limit")
        _export_plan(source, to, output, job, cluster, settings or [], as_json)
        return
    with phase("importing PyTorch"):
        from meshwright.export.export import SUFFIXES
        from meshwright.export.export import export as write
        from meshwright.export.show import describe_export

    if to not in SUFFIXES:
        raise InputError(f"--to {to}{did_you_mean(to, (*SUFFIXES, *PROGRAMS))}")
    if job or cluster:
        raise InputError(f"--to {to} writes weights, and --job and --cluster are for plans: leave them out")
    exported = write(source, to, output, dynamic, step, limit, settings or [], trust=trust)
    if as_json:
        print(json.dumps(exported.to_dict()), flush=True)
        return
    print_lines(describe_export(exported))


def _export_plan(
    source: Path,
    to: str,
    output: Path | None,
    job: Path | None,
    cluster: str | None,
    settings: list[str],
    as_json: bool,
) -> None:
    from meshwright.cluster.detect import find_cluster
    from meshwright.export.configurations.write import export_plan
    from meshwright.job import load_job

    if output:
        check_output(output)
    job_file = job or (source / "job.yaml" if source.is_dir() else None)
    if settings and job_file is None:
        raise InputError(f"--set {settings[0]}: it overrides a field of the job: name one with --job")
    loaded_job = load_job(job_file, settings) if job_file else None
    name = cluster or (loaded_job.cluster if loaded_job else None)
    exported = export_plan(source, to, loaded_job, find_cluster(name) if name else None, output)
    if as_json:
        print(json.dumps(exported.to_dict()), flush=True)
        return
    print_lines(exported.lines())
