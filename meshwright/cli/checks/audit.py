"""`meshwright audit`: compares what two commands train."""

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.options import AsJson, check_output, check_page, path_option
from meshwright.cli.text import console, print_lines

if TYPE_CHECKING:
    from meshwright.audit.result import Audit


def audit(
    reference: Annotated[
        str, typer.Option("--reference", metavar="CMD", help='The command that is taken as right: "python train.py".')
    ],
    candidate: Annotated[
        str, typer.Option("--candidate", metavar="CMD", help='The command to compare with it: "torchrun … train.py".')
    ],
    steps: Annotated[int, typer.Option(min=1, max=1000, metavar="K", help="How many optimizer steps to compare.")] = 3,
    start: Annotated[
        str,
        typer.Option(
            metavar="random|reference|own",
            help="The weights that both start from: drawn at a healthy scale, the reference's, or each one's own.",
        ),
    ] = "random",
    dropout: Annotated[
        str, typer.Option(metavar="off|keep", help="off: neither drops anything, because masks depend on the layout.")
    ] = "off",
    full: Annotated[
        bool, typer.Option("--full", help="Record all elements of large tensors, too: by default their sketches.")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Hide the GPUs from both commands.")] = False,
    timeout: Annotated[float, typer.Option(min=1, metavar="S", help="End a command after so many seconds.")] = 3600.0,
    records: Annotated[
        Path | None, path_option("--records", "DIR", "Keep both records in this folder; they are deleted otherwise.")
    ] = None,
    output: Annotated[
        Path | None, path_option("--output", "FILE", "Write every comparison as JSON to this file.")
    ] = None,
    html: Annotated[
        Path | None, path_option("--html", "FILE", "Write a page with a table of every comparison to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that a training script trains the same model as another command: any script, unedited, under any library.
    Both commands run, are recorded from outside, and every gradient, norm, buffer and weight is compared. The exit code
    is 3 if they differ (the first difference and its cause are printed), and 4 if they saw different samples."""
    from meshwright.audit.audit import AuditFailed, AuditRequest, records_folder
    from meshwright.audit.audit import audit as run
    from meshwright.errors import InputError

    if dropout not in ("off", "keep"):
        raise InputError(f"--dropout {dropout}: choose off or keep")
    if output:
        check_output(output)
    if html:
        check_page(html)
    request = AuditRequest(reference, candidate, steps, start, dropout == "keep", full, cpu, timeout)
    try:
        with records_folder(records, lambda: Path(tempfile.mkdtemp(prefix="meshwright-audit-"))) as folder:
            result = run(request, folder)
    except AuditFailed as error:
        for line in error.lines:
            print(f"    {line}", file=sys.stderr)
        raise
    print_audit(result, output, html, as_json)


def print_audit(result: "Audit", output: Path | None, html: Path | None, as_json: bool) -> None:
    """Prints and saves the result, and exits with its code."""
    from meshwright.audit.show import show
    from meshwright.files.storage import write_atomically

    if output:
        write_atomically(output, json.dumps(result.details(), allow_nan=False))
    if html:
        from meshwright.report.audit_page import audit_page
        from meshwright.report.page import write_page

        write_page(audit_page(result.details()), html)
    if as_json:
        print(json.dumps(result.to_dict()), flush=True)
    else:
        show(result, console())
        if output:
            print_lines([f"saved in {output}"])
    raise typer.Exit(result.exit_code)
