"""`meshwright prove`: compares a job's training under its plan with one device, or two recorded runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import AsJson, Settings, Trust, check_output, check_page, job_argument, path_option
from meshwright.cli.text import console, print_lines
from meshwright.errors import InputError
from meshwright.files.user_path import user_path
from meshwright.numbers.limits import MOST_RANKS_HERE, MOST_RECORDED_STEPS

if TYPE_CHECKING:
    from meshwright.proof.proof import Proof


def prove(
    job: Annotated[Path | None, job_argument()] = None,
    plan: Annotated[Path | None, path_option("--plan", "FILE", "Prove this plan.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS_HERE, metavar="N", help="Use at most N ranks; a plan for more is shrunk."),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=MOST_RECORDED_STEPS, metavar="K", help="How many steps to compare.")
    ] = 3,
    dtype: Annotated[
        str, typer.Option(metavar="fp64|fp32|plan", help="The precision of the comparison; plan: the plan's precision.")
    ] = "fp64",
    dropout: Annotated[bool, typer.Option("--dropout", help="Do not switch dropout off.")] = False,
    start: Annotated[
        str, typer.Option(metavar="job|random", help="random: start from drawn weights, which hide fewer faults.")
    ] = "job",
    against: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="RUN_A RUN_B", help="Compare two recorded runs; RUN_A counts as correct."),
    ] = None,
    output: Annotated[
        Path | None,
        path_option("--output", "FILE", "Write every comparison as JSON to this file, not to one in the runs folder."),
    ] = None,
    html: Annotated[
        Path | None, path_option("--html", "FILE", "Write a page with a table of every comparison to this file.")
    ] = None,
    trust: Trust = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Check that a job trains the same model under its plan as on one device: every loss, gradient, buffer and weight.
    If not, the exit code is 3, and the first difference and its cause are printed."""
    from meshwright.cli.job_file import load_plain_job
    from meshwright.job import load_plan

    if job is None and against is None:
        raise InputError("prove needs a JOB, or two recorded runs: --against RUN_A RUN_B")
    if job is None and settings:
        raise InputError(f"--set {settings[0]}: with --against, give the JOB whose field it sets")
    if against is not None and start != "job":
        raise InputError(f"--start {start}: the runs of --against have started from weights of their own, leave it out")
    if output:
        check_output(output)
    if html:
        check_page(html)
    if against is not None:
        _compare_records(against, job, output, html, as_json)
    loaded_job = load_plain_job(job, settings or [], "prove") if job is not None else None
    if against is not None:
        from meshwright.proof.run_comparison import compare_runs as compare

        reference, compared = (user_path(run, "--against") for run in against)
        proof = compare(reference, compared, loaded_job, trust)
        folder, name = compared, "against"
    else:
        from meshwright.processes.local.fork_server import preloaded

        assert loaded_job is not None
        proof_plan = load_plan(plan) if plan else loaded_job.plan
        with preloaded("meshwright.proof.record.rank"):
            from meshwright.auto.decide import plan_of_job
            from meshwright.cluster.detect import find_cluster
            from meshwright.proof.prove import prove as run
            from meshwright.train.job_parts import JobParts

            parts = JobParts(loaded_job)
            if proof_plan == "auto":
                proof_plan = plan_of_job(parts, find_cluster(loaded_job.cluster), "auto").plan
            options: dict[str, Any] = {"ranks": ranks, "steps": steps, "dtype": dtype, "dropout": dropout}
            proof = run(loaded_job, proof_plan, **options, start=start, parts=parts)
        folder, name = Path(loaded_job.output), loaded_job.name
    from meshwright.proof.proof import save_proof, write_proof

    saved = write_proof(proof, output) if output else save_proof(proof, folder, name)
    if html:
        from meshwright.report.page import write_page
        from meshwright.report.proof_page import proof_page

        write_page(proof_page(proof.details(), name), html)
    _print_proof(proof, saved, as_json)
    raise typer.Exit(proof.exit_code)


def _compare_records(
    against: tuple[Path, Path], job: Path | None, output: Path | None, html: Path | None, as_json: bool
) -> None:
    """Compares two records of any trainings, as `meshwright audit` does, and exits; returns for runs of a job."""
    from meshwright.audit.from_python.compare_folders import compare, is_record
    from meshwright.cli.checks.audit import print_audit

    reference, compared = (user_path(run, "--against") for run in against)
    if not is_record(reference) and not is_record(compared):
        return
    if job is not None:
        raise InputError(f"{job}: records that `meshwright audit` or mw.record made are of no job, leave it out")
    print_audit(compare(reference, compared), output, html, as_json)


def _print_proof(proof: "Proof", file: Path, as_json: bool) -> None:
    from meshwright.proof.show import show

    if as_json:
        print(json.dumps({**proof.to_dict(), "file": str(file)}), flush=True)
    else:
        show(proof, console())
        print_lines([f"saved in {file}"])
