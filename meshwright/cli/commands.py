"""The commands: they read arguments, call the other packages and print results. The exit code is 0 for success, 2 for
wrong input, 3 for a failed proof and 1 for anything else."""

import errno
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.bench import bench
from meshwright.cli.checks.audit import audit
from meshwright.cli.checks.prove import prove
from meshwright.cli.data import data
from meshwright.cli.doctor import doctor
from meshwright.cli.export import export
from meshwright.cli.init import init
from meshwright.cli.launchers.horovodrun import horovodrun
from meshwright.cli.launchers.launch import launch
from meshwright.cli.launchers.ray import check_ray_options, train_in_ray_workers
from meshwright.cli.options import (
    AsJson,
    ClusterName,
    JobFile,
    OptionsOnce,
    PlanFile,
    Settings,
    path_option,
)
from meshwright.cli.plan import plan
from meshwright.cli.questions.ask import ask
from meshwright.cli.questions.explain import explain
from meshwright.cli.ready_jobs import job_title, ready_jobs
from meshwright.cli.report import report
from meshwright.cli.text import print_columns, print_message
from meshwright.cli.training import print_result, profile_settings, train_as_rank, train_here, tune_settings
from meshwright.cli.watch import watch
from meshwright.errors import InputError, MeshwrightError, RankError
from meshwright.numbers.limits import MOST_DEVICES, MOST_RECORDED_STEPS
from meshwright.progress import showing
from meshwright.version import VERSION, untried_torch

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.plan import Plan

app = typer.Typer(
    help="Plan, prove and run distributed training of any PyTorch model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(ask, name="ask")
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {VERSION}", flush=True)
        raise typer.Exit


@app.callback()
def options_of_every_command(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def jobs(as_json: AsJson = False) -> None:
    """List the ready jobs, which every command takes by name: `meshwright train mnist`."""
    titles = {name: job_title(file.read_text()) for name, file in ready_jobs().items()}
    if as_json:
        rows = [{"name": name, "title": title, "file": str(ready_jobs()[name])} for name, title in titles.items()]
        print(json.dumps({"jobs": rows}), flush=True)
        return
    print_columns(titles)


@app.command()
def train(
    job: JobFile,
    plan: PlanFile = None,
    cluster: ClusterName = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|DIR|URL",
            help="auto: continue the newest unfinished run of this job; never: start a new run; DIR: continue it; URL:"
            " continue the run that was copied there (checkpoint.copy_to).",
        ),
    ] = "auto",
    record: Annotated[
        int,
        typer.Option(min=0, max=MOST_RECORDED_STEPS, metavar="K", help="Record the first K steps for prove --against."),
    ] = 0,
    deepspeed: Annotated[
        Path | None,
        path_option("--deepspeed", "FILE", "Train as this DeepSpeed configuration says: batch, plan, optimizer, …"),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="N|MIN:MAX", help="Train on N machines, with this command on each; MIN:MAX: elastic."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(metavar="R", help="With --nodes: which of the machines this is, from 0.")
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --nodes: an address of machine 0, where the machines meet."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="ray|ray://HOST:PORT", help="Train on an existing Ray cluster, in workers of Ray Train."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_DEVICES, metavar="N", help="With --on ray: the number of workers, or ranks."),
    ] = None,
    profile_steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Profile the steps from A to B - 1, counted from 0, for report --trace."),
    ] = None,
    unproved: Annotated[
        bool,
        typer.Option(
            "--unproved", help="Do not check first that a plan which divides the model trains the same model."
        ),
    ] = False,
    tune: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="With plan: auto, how long variants of the plan may be timed before the run; 0: not at all. By default"
            " 60, and at most 5% of the run.",
        ),
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a job on all devices of this machine. If torchrun, mpirun or srun starts this command, each process that it
    starts is one rank. A plan that divides the model is first checked against one device, once for each model; if it
    trains another model, the exit code is 3."""
    from meshwright.cli.job_file import is_module_job, load_train_job, train_module_job
    from meshwright.job import load_plan
    from meshwright.processes.environment import read_environment

    settings = [*(settings or []), *profile_settings(profile_steps), *tune_settings(tune)]
    _check_node_options(nodes, node_rank, rendezvous, deepspeed)
    check_ray_options(on, workers, nodes, deepspeed)
    loaded_job = load_train_job(job, settings or [])
    given_plan = load_plan(plan) if plan else loaded_job.plan
    if deepspeed is not None:
        loaded_job, given_plan = _job_of_deepspeed(loaded_job, deepspeed, plan, cluster)
    if nodes is not None and (is_module_job(loaded_job) or read_environment().launched):
        launcher = "another launcher has started this rank" if read_environment().launched else "Lightning starts ranks"
        raise InputError(f"--nodes {nodes}: {launcher}: leave out --nodes")
    if on is not None:
        result: Any = train_in_ray_workers(loaded_job, given_plan, on, workers, cluster, resume, record, unproved)
    elif is_module_job(loaded_job):
        result = train_module_job(loaded_job, given_plan, cluster, resume, record)
    elif read_environment().launched:
        result = train_as_rank(loaded_job, given_plan, cluster, resume, record, unproved)
    elif nodes is not None:
        from meshwright.cli.launchers.nodes import RankRequest, train_on_nodes

        job_and_plan = str(job), str(plan) if plan else None
        request = RankRequest(*job_and_plan, cluster, resume, record, settings or [], as_json, unproved)
        train_on_nodes(request, loaded_job, given_plan, nodes, node_rank, rendezvous)
        return
    else:
        result = train_here(loaded_job, given_plan, cluster, resume, record, unproved)
    if result is not None:
        print_result(result, as_json)


def _check_node_options(nodes: str | None, node_rank: int | None, rendezvous: str | None, file: Path | None) -> None:
    for name, value in (("--node-rank", node_rank), ("--rendezvous", rendezvous)):
        if nodes is None and value is not None:
            raise InputError(f"{name} {value}: say on how many machines the job is trained, with --nodes")
    if nodes is not None and file is not None:
        raise InputError(f"--deepspeed {file} with --nodes {nodes}: write a job (docs/job.md), or use torchrun")


def _job_of_deepspeed(job: "Job", file: Path, plan: Path | None, cluster: str | None) -> "tuple[Job, Plan]":
    """Returns the job and the plan of a DeepSpeed configuration, on the ranks that there are."""
    from meshwright.cluster.detect import find_cluster
    from meshwright.compat.deepspeed_job import job_of_config
    from meshwright.processes.environment import read_environment

    if plan is not None:
        raise InputError(f"--deepspeed {file} and --plan {plan} both give a plan: leave out one of them")
    env = read_environment()
    ranks = env.size if env.launched else find_cluster(cluster or job.cluster).device_count
    return job_of_config(job, file, ranks)


app.command(cls=OptionsOnce)(plan)
app.command()(prove)
app.command(cls=OptionsOnce)(audit)
app.command()(export)
app.command()(init)
app.command()(launch)
app.command(cls=OptionsOnce)(doctor)
app.command(cls=OptionsOnce)(explain)
app.command()(report)
app.command()(watch)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(horovodrun)


# The base class of typer's errors about a command line, which typer does not export.
CommandLineError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
_LONGEST_LINE = 2_000


def one_line(message: str) -> str:
    """Returns the message as one line that is safe to print: line breaks become spaces, other characters that cannot be
    printed are escaped, and the middle of a very long message is left out."""
    text = " ".join(message.split("\n"))
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} … {text[-_LONGEST_LINE // 2 :]}"
    from meshwright.user.code import printable

    return printable(text)


def _run_command() -> int:
    """Runs the command and returns its exit code. An exception out of the user's code becomes a `UserCodeError`."""
    from meshwright.user.code import exits_become_errors, raise_user_code_error, user_position

    with exits_become_errors():
        try:
            return app(standalone_mode=False, prog_name="meshwright") or 0
        except BaseException as error:
            if user_position(error) is None:
                raise
            raise_user_code_error(error, "the job's code failed")


def main() -> None:
    from meshwright.processes import environment
    from meshwright.processes.process_exit import skip_library_teardown

    is_launched = environment.read_environment().launched
    try:
        with skip_library_teardown() if is_launched else showing(sys.stderr):
            exit_code = _run_command()
            sys.stdout.flush()
            sys.exit(exit_code)
    except CommandLineError as error:  # an unknown option, for instance
        message = one_line(error.format_message()).removesuffix(".")
        if message and type(error).__name__ != "NoArgsIsHelpError":  # whose help text has been printed
            help_command = f"{error.ctx.command_path} --help" if error.ctx else "meshwright --help"
            print_message(f"meshwright: {message} (`{help_command}` lists the options)")
        sys.exit(error.exit_code)
    except MeshwrightError as error:
        sys.stdout.flush()
        message = one_line(str(error)) if isinstance(error, InputError) else str(error)
        print_message(f"meshwright: {message}")
        if type(error) is RankError and (line := untried_torch()):
            print_message(line)
        sys.exit(error.exit_code)
    except (ImportError, AttributeError, TypeError) as error:
        if not (line := untried_torch()):
            raise
        print_message(f"meshwright: {type(error).__name__}: {error}: {line}")
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        # Files that a command writes raise a `StorageError`: here it is what it prints, or a temporary file.
        name = error.filename or "the output of this command"
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # Python would try again to print what is left
        with suppress(OSError):
            print(f"meshwright: {name} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        os._exit(130)
