"""`meshwright launch`: the file or the command that starts a job under Slurm, Kubernetes, torchrun or mpirun."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.options import AsJson, ClusterName, JobFile, PlanFile, Settings, check_output, path_option
from meshwright.cli.ready_jobs import ready_jobs
from meshwright.cli.text import print_lines
from meshwright.errors import InputError, did_you_mean
from meshwright.numbers.limits import LARGEST_COUNT, MOST_DEVICES
from meshwright.progress import phase, say

if TYPE_CHECKING:
    from meshwright.export.launch_files.request import LaunchFile, LaunchOptions, LaunchRequest

# The options that only some of the programs have.
_ONLY_FOR = {
    "--partition": ("slurm",),
    "--time": ("slurm", "kubernetes"),
    "--image": ("kubernetes",),
    "--cpus-per-rank": ("slurm", "kubernetes"),
    "--rendezvous": ("torchrun", "mpirun"),
    "--hosts": ("mpirun",),
}
_PROGRAMS = ("slurm", "kubernetes", "torchrun", "mpirun")


def launch(
    program: Annotated[
        str, typer.Argument(metavar="slurm|kubernetes|torchrun|mpirun", help="The program that starts the ranks.")
    ],
    job: JobFile,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=MOST_DEVICES, metavar="N", help="The machines; by default the cluster's.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_DEVICES, metavar="G", help="The GPUs of each machine; by default the cluster's."),
    ] = None,
    plan: PlanFile = None,
    cluster: ClusterName = None,
    settings: Settings = None,
    output: Annotated[
        Path | None, path_option("--output", "FILE", "Write to this file instead of stdout; replaces the file.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="D-HH:MM:SS", help="Slurm, Kubernetes: the time limit, in any of Slurm's forms."),
    ] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm: the partition.")] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Kubernetes: the container image, with Meshwright and the job.")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(metavar="NAME", help="The network interface of Gloo and NCCL, such as eth0.")
    ] = None,
    cpus_per_rank: Annotated[
        int | None,
        typer.Option(
            min=1, max=LARGEST_COUNT, metavar="N", help="Slurm, Kubernetes: CPU cores of a rank; by default its share."
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="torchrun, mpirun: where the machines find each other, if several."),
    ] = None,
    hosts: Annotated[str | None, typer.Option(metavar="A,B", help="mpirun: the machines, by name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the sbatch script, the Kubeflow TrainJob or the command that starts a job on several machines, with as many
    machines and ranks as its plan has. It is printed to stdout, or written to --output."""
    with phase("importing PyTorch"):
        from meshwright.auto.decide import plan_of_job
        from meshwright.cli.job_file import load_plain_job
        from meshwright.cluster.detect import find_cluster
        from meshwright.export.launch_files.layout import lay_out
        from meshwright.export.launch_files.request import LaunchRequest
        from meshwright.export.launch_files.write import write_launch_file
        from meshwright.job import load_plan
        from meshwright.train.job_parts import JobParts

    given = {
        "--partition": partition,
        "--time": time,
        "--image": image,
        "--cpus-per-rank": cpus_per_rank,
        "--rendezvous": rendezvous,
        "--hosts": hosts,
    }
    _check_options(program, given)
    options = _launch_options(interface, time, partition, image, rendezvous, hosts)
    arguments = _arguments(job, plan, cluster, settings or [], in_container=program == "kubernetes")
    if output:
        check_output(output)
    loaded_job = load_plain_job(job, settings or [], "launch")
    given_plan = load_plan(plan) if plan else loaded_job.plan
    machines = find_cluster(cluster or loaded_job.cluster)
    chosen = plan_of_job(JobParts(loaded_job), machines, given_plan).plan if given_plan == "auto" else given_plan
    layout = lay_out(
        chosen, machines, nodes, gpus_per_node, cpus_per_rank, loaded_job.data.workers, is_searched=given_plan == "auto"
    )
    if not layout.on_gpus and machines.name == "local":
        say("cluster 'local' is this machine, which has no GPUs: for others, give --cluster or --gpus-per-node")
    request = LaunchRequest(loaded_job, chosen.summary(), layout, arguments, str(Path.cwd()), options)
    _print_file(write_launch_file(program, request), program, request, output, as_json)


def _launch_options(
    interface: str | None,
    time: str | None,
    partition: str | None,
    image: str | None,
    rendezvous: str | None,
    hosts: str | None,
) -> "LaunchOptions":
    """Returns the options that go into the file. Raises an `InputError` for one that cannot be read."""
    from meshwright.export.launch_files.request import LaunchOptions, check_interface, check_partition, parse_time
    from meshwright.processes.nodes.address import parse_address

    return LaunchOptions(
        interface=None if interface is None else check_interface(interface),
        time_s=None if time is None else parse_time(time),
        partition=None if partition is None else check_partition(partition),
        image=image,
        rendezvous=None if rendezvous is None else str(parse_address(rendezvous)),
        hosts=() if hosts is None else _parse_hosts(hosts),
    )


def _print_file(file: "LaunchFile", program: str, request: "LaunchRequest", output: Path | None, as_json: bool) -> None:
    """Writes the file to `output`, or prints its text, and says how it is started."""
    from meshwright.files.storage import write_atomically

    plan, layout = request.plan, request.layout
    if output:
        previous = os.umask(0o077) if file.has_secret else None
        write_atomically(output, file.text)
        if previous is not None:
            os.umask(previous)
    if as_json:
        content = {"file": str(output)} if output else {"file": None, "text": file.text}
        numbers = {"nodes": layout.nodes, "ranks_per_node": layout.ranks_per_node}
        print(json.dumps({**content, "program": program, "plan": plan, **numbers}), flush=True)
    elif output:
        print_lines([f"{plan} on {layout.describe()}: {file.how_to_start.replace('FILE', str(output))}"])
    else:
        print(file.text, end="", flush=True)


def _check_options(program: str, given: Mapping[str, object]) -> None:
    if program == "kubernetes" and given["--image"] is None:
        raise InputError("launch kubernetes needs --image: the container image that has Meshwright and the job's files")
    if program not in _PROGRAMS:
        raise InputError(f"launch {program!r}: no such program{did_you_mean(program, _PROGRAMS)}")
    for option, value in given.items():
        if value is not None and program not in _ONLY_FOR[option]:
            raise InputError(
                f"{option} {value}: launch {program} has no such option, which is for {' and '.join(_ONLY_FOR[option])}"
            )


def _arguments(
    job: Path, plan: Path | None, cluster: str | None, settings: list[str], in_container: bool
) -> tuple[str, ...]:
    """Returns the words after `meshwright` that each rank is started with. Files are named by their absolute paths,
    except those in a container, which has folders of its own."""
    from meshwright.export.launch_files.request import check_printable

    def name(file: Path) -> str:
        if not in_container:
            return str(file.absolute())
        return str(file) if file.is_absolute() else f"./{file}"  # a name that begins with '-' is no option then

    ready = {str(file): ready_name for ready_name, file in ready_jobs().items()}
    words = ["train", ready.get(str(job)) or name(job), "--resume=auto"]
    if plan is not None:
        words.append(f"--plan={name(plan)}")
    if cluster is not None:
        words.append(f"--cluster={name(Path(cluster)) if Path(cluster).is_file() else cluster}")
    words += [f"--set={setting}" for setting in settings]
    check_printable("launch", words)
    return tuple(words)


def _parse_hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(text.split(","))
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,252}", host, re.ASCII):
            raise InputError(f"--hosts {text!r}: {host!r} is no host name: write names with commas between them")
    return hosts
