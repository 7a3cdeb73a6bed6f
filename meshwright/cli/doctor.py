"""`meshwright doctor`: measures this machine, or the machines on which a launcher has started it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import AsJson, ClusterName, Settings, check_output, check_page, path_option
from meshwright.cli.questions.doctor_job import print_diagnosis
from meshwright.cli.text import print_lines
from meshwright.errors import InputError

SELFTEST_REPORT = "meshwright-selftest.txt"
_A_PROOF_FAILED = 3


def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure every class of operators and write the device's calibration.")
    ] = False,
    output: Annotated[
        Path | None,
        path_option(
            "--output",
            "FILE",
            "The file that --calibrate writes, by default in the user's cache; or the report of --selftest, by default"
            f" {SELFTEST_REPORT}.",
        ),
    ] = None,
    selftest: Annotated[
        bool,
        typer.Option(
            "--selftest",
            help="Train a small model on several ranks of this machine under every kind of plan, prove each against one"
            " device, and write a report.",
        ),
    ] = False,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="JOB",
            help="Say whether this job runs here, what it needs, what limits it, and which changes would help most.",
        ),
    ] = None,
    cluster: ClusterName = None,
    html: Annotated[Path | None, path_option("--html", "FILE", "With --job: write a page with a chart.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure the devices and links of this machine, print them, and report problems that hinder training. Started on
    several machines by torchrun or another launcher, measure the links between them, too."""
    from meshwright.processes.environment import read_environment
    from meshwright.progress import phase

    if job is not None:
        if calibrate or selftest or output:
            raise InputError("--job is a question of its own: leave out --calibrate, --selftest and --output")
        if html:
            check_page(html)
        print_diagnosis(job, settings or [], cluster, html, as_json)
        return
    for name, value in (("--cluster", cluster), ("--html", html), ("--set", settings)):
        if value:
            raise InputError(f"{name} belongs to --job: add --job JOB, or leave out {name}")
    if output and not (calibrate or selftest):
        raise InputError(
            f"--output {output}: only --calibrate and --selftest write a file, so add one of them or leave --output out"
        )
    if calibrate and selftest:
        raise InputError("--calibrate and --selftest: run one after the other")
    if selftest:
        _run_selftest(output or Path(SELFTEST_REPORT), as_json)
        return
    with phase("importing PyTorch"):
        from meshwright.calibrate.doctor import calibrate_and_diagnose, diagnose, report_lines
    if read_environment().launched:
        if calibrate:
            raise InputError("--calibrate measures one machine: run it there without a launcher")
        _diagnose_machines(as_json)
        return
    diagnosis = calibrate_and_diagnose(output) if calibrate else diagnose()
    if as_json:
        print(json.dumps(diagnosis), flush=True)
        return
    print_lines(report_lines(diagnosis))


def _diagnose_machines(as_json: bool) -> None:
    """Measures the machines on which a launcher has started this command, and prints them on rank 0."""
    import torch

    from meshwright.calibrate.doctor import RUNS, system_report
    from meshwright.calibrate.machines import measure_machines
    from meshwright.calibrate.machines_report import machines_lines, machines_report
    from meshwright.processes.heartbeat import Heartbeat
    from meshwright.processes.rank import run_rank
    from meshwright.processes.world import World

    def main(world: World, heartbeat: Heartbeat) -> None:
        measured = measure_machines(world)
        if measured is not None:
            report = machines_report(measured, system_report(RUNS))
            print_lines([json.dumps(report)] if as_json else machines_lines(report))

    run_rank(main, "cuda" if torch.cuda.device_count() else "cpu", timeout_s=600)


def _run_selftest(file: Path, as_json: bool) -> None:
    """Runs the selftest, prints its report and writes it to the file."""
    from meshwright.progress import phase, say

    check_output(file, "--output")
    with phase("importing PyTorch"):
        from meshwright.selftest.report import selftest_lines, selftest_report, write_report
        from meshwright.selftest.run import run_selftest
    report = selftest_report(run_selftest(say))
    write_report(report, file)
    if as_json:
        print(json.dumps({**report, "file": str(file)}), flush=True)
    else:
        print_lines((*selftest_lines(report), f"report: {file}"))
    if not report["passed"]:
        raise typer.Exit(_A_PROOF_FAILED)
