"""Prints an audit for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.audit.result import Audit


def show(audit: Audit, console: Console) -> None:
    colour = "bold yellow" if not audit.comparable else "green" if audit.equal else "bold red"
    console.print(Text(audit.headline, colour))
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in audit.readable_rows():
        table.add_row(name, Text(text))  # Text: names of parameters are not markup
    console.print(table)
