"""Prints a proof for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.proof.proof import Proof


def show(proof: Proof, console: Console) -> None:
    console.print(_headline(proof))
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _rows(proof):
        table.add_row(name, Text(text))  # Text: names of parameters are not markup
    console.print(table)


def _headline(proof: Proof) -> Text:
    plan = f"{proof.plan.summary()} on {proof.ranks} {_device_words(proof)}"
    first = proof.first_difference
    if first is None:
        steps = "1 step" if proof.steps == 1 else f"{proof.steps} steps"
        return Text(f"Equal: {plan} {_verdict(proof)}, {steps} compared in {proof.dtype}", "green")
    value = f"{first.what} of {first.parameter}" if first.parameter and first.what != "loss" else first.what
    when = f"after step {first.step}" if first.what in ("weight", "buffer") else f"in step {first.step}"
    when = "before the first step" if first.step == 0 else when
    also = f", and the gradient of {first.parameter}" if first.parameter and first.what == "loss" else ""
    on_rank = f" on rank {first.rank}" if first.rank else ""
    return Text(f"Not equal: {plan}: the {value}{on_rank} {when} is {first.error:.2e} off{also}", "bold red")


def _rows(proof: Proof) -> list[tuple[str, str]]:
    checked = ", ".join(f"{name} {count}" for name, count in proof.checked.items())
    rows = [
        ("compared", checked),
        ("largest relative error", f"{proof.max_relative_error:.2e}"),
        ("tolerance", f"{proof.tolerance:.2e} = {proof.tolerance_is}"),
    ]
    if proof.first_difference:
        cause = (proof.first_difference.cause or "unknown").replace("_", " ")
        explanation = proof.first_difference.explanation
        rows.append(("cause", f"{cause}: {explanation}" if explanation else cause))
    if proof.shrunk:
        rows.append(("shrunk", proof.shrunk))
    rows += [("note" if number == 0 else "", note) for number, note in enumerate(proof.notes)]
    return rows


def _verdict(proof: Proof) -> str:
    return f"trained as {proof.against} did" if proof.against else "trains as one device does"


def _device_words(proof: Proof) -> str:
    kind = "GPU" if proof.device == "cuda" else "CPU rank"
    return kind if proof.ranks == 1 else f"{kind}s"
