"""The page of the command line, from the commands' own descriptions."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from documentation.reference.markdown import page, table
from meshwright.cli import app

_INTRODUCTION = (
    "Every command prints tables and lines for people; with `--json` the last line of stdout is one JSON object. "
    "Exit codes: 0 done, 2 the input is wrong, 3 a proof failed, 1 anything else "
    "([how a command ends](../job.md#how-a-command-ends)). `meshwright COMMAND --help` prints the same options."
)


def command_line_page() -> str:
    root: Any = typer.main.get_command(app)
    context = root.make_context("meshwright", [], resilient_parsing=True)
    parts = list(_commands(root, "meshwright", context))
    return page("Command line", "the commands in `meshwright/cli`", _INTRODUCTION, *parts)


def _commands(group: Any, path: str, context: Any) -> Iterator[str]:
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        if hasattr(command, "list_commands"):
            yield from _commands(command, f"{path} {name}", context)
        else:
            yield f"## `{path} {name}`"
            yield _help(command.help or "")
            arguments = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
            yield f"Usage: `{path} {name} {' '.join([*arguments, '[OPTIONS]'])}`"
            yield _options(command, context)


def _help(text: str) -> str:
    """The description of a command; a paragraph that typer must not wrap, which begins with \\b, becomes a list."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            rows = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in paragraph.splitlines()[1:])
            paragraphs.append("\n".join(f"- `{name}`: {''.join(words)}" for name, *words in rows))
        else:
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def _options(command: Any, context: Any) -> str:
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            name, default = f"`{parameter.metavar or parameter.name.upper()}`", "required" if parameter.required else ""
        else:
            name, default = f"`{_option_name(parameter)}`", _default(parameter)
        rows.append((name, default, " ".join((parameter.help or "").split())))
    return table(("argument or option", "default", "meaning"), rows)


def _option_name(parameter: Any) -> str:
    names = ", ".join(parameter.opts)
    if parameter.is_flag:
        return names
    choices = getattr(parameter.type_descriptor.annotation, "__args__", ())
    return f"{names} {parameter.metavar or '|'.join(map(str, choices)) or 'N'}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, False, ()) or callable(parameter.default):
        return ""
    return f"`{parameter.default}`"
