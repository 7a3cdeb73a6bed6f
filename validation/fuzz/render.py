"""Renders a case as the source of a file with a model and a loss, as a user would write it, and imports it."""

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

from validation.fuzz.losses import LOSSES, LossSource
from validation.fuzz.operators.operator import Operator
from validation.fuzz.operators.table import OPERATORS
from validation.fuzz.program import BASE_LAYOUTS, Case, Program, Statement, Statements

_IMPORTS = """import math

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
"""
_IN = {
    "tokens": "self.words = nn.Embedding({V}, {D})\nself.places = nn.Parameter(torch.randn({L}, {D}) / 4)",
    "features": "self.first = nn.Linear({D}, {D})",
    "vectors": "self.first = nn.Linear({D}, {D})",
    "images": "self.first = nn.Conv2d(3, {C}, 3, padding=1)",
}
_START = {
    "tokens": "x = self.words(t) + self.places[: t.shape[1]]",
    "features": "x = self.first(t)",
    "vectors": "x = self.first(t)",
    "images": "x = F.relu(self.first(t))",
}
_POOL = {"BLD": "x = x.mean(1)", "BCSS": "x = x.mean((2, 3))", "BD": ""}


def layout_after(layout: str, statement: Statement) -> str | None:
    """The layout of what a statement returns for an input of this layout; None if it does not take it."""
    operator = OPERATORS[statement.operator]
    return (operator.gives or layout) if layout in operator.takes else None


def is_consistent(program: Program) -> bool:
    """Whether every statement gets an input that it takes, and each place ends with the layout it began with."""
    for place in program.places:
        layout: str | None = BASE_LAYOUTS[program.kind]
        kept = None
        for statement in place:
            if statement.operator == "join" and kept != layout:
                return False
            kept = layout if statement.operator == "keep" else kept
            layout = layout_after(layout, statement) if layout is not None else None
        if layout != BASE_LAYOUTS[program.kind]:
            return False
    return True


def render(case: Case) -> str:
    """The source of a file with the classes of the model and, as `loss`, the loss function."""
    program, loss = case.program, LOSSES[case.loss]
    definitions: dict[str, str] = {}
    parts = [_block(program, number, place, definitions) for number, place in _distinct_blocks(program)]
    model = _towers(program, definitions) if program.kind in ("towers", "heads") else _model(program, loss, definitions)
    function = "def loss(output, target):\n" + indent(loss.lines, "    ")
    function = f"loss = {loss.lines}" if loss.is_torch else function
    return "\n\n\n".join([_IMPORTS.strip(), function, *definitions.values(), *parts, model]) + "\n"


def import_source(source: str, file: Path) -> ModuleType:
    """Writes the source to a file and imports it, so that errors name the file and its lines."""
    file.write_text(source)
    name = f"fuzzed_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    return module


def _distinct_blocks(program: Program) -> Iterable[tuple[int, Statements]]:
    return list(enumerate(program.blocks[:1] if program.equal_blocks else program.blocks))


def _class(name: str, init: str, arguments: str, forward: str) -> str:
    init = indent("super().__init__()\n" + init, "        ").rstrip()
    forward = indent(forward, "        ").rstrip()
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n{init}\n\n    def forward(self, {arguments}):\n{forward}"
    )


def _block(program: Program, number: int, place: Statements, definitions: dict[str, str]) -> str:
    init, forward = _lines(program, f"m{number}_", place, definitions)
    return _class(f"Block{number}", init, "x", "\n".join(part for part in (forward, "return x") if part))


def _model(program: Program, loss: LossSource, definitions: dict[str, str]) -> str:
    names = [f"Block{0 if program.equal_blocks else number}()" for number in range(len(program.blocks))]
    init = [_fill(_IN[program.kind], program), f"self.blocks = nn.ModuleList([{', '.join(names)}])"]
    forward = [_fill(_START[program.kind], program)]
    for number, place in enumerate(program.gaps):
        gap_init, gap_forward = _lines(program, f"g{number}_", place, definitions)
        init.append(gap_init)
        forward.append(gap_forward)
        if number < len(program.blocks):
            forward.append(f"x = self.blocks[{number}](x)")
    layout = BASE_LAYOUTS[program.kind]
    if layout == "BLD":
        init.append(_fill("self.norm = nn.LayerNorm({D})", program))
        forward.append("x = self.norm(x)")
    init.append(_fill("self.head = nn.Linear({D}, {V})", program))
    if program.tied_head and program.kind == "tokens":
        init.append("self.head.weight = self.words.weight")
    forward += [_POOL[layout]] if layout != "BLD" or program.pooled else []
    forward += ["x = self.head(x)"]
    forward += ["x = x.movedim(-1, 1)"] if loss.is_torch and layout == "BLD" and not program.pooled else []
    forward += ["return loss(x, target)" if loss.is_own else "return x"]
    return _class("Model", _joined(init), "t, target" if loss.is_own else "t", _joined(forward))


def _towers(program: Program, definitions: dict[str, str]) -> str:
    """A model with two branches: towers with an input each, or heads that share an encoder."""
    init = ["self.left = Block0()", "self.right = Block1()" if not program.equal_blocks else "self.right = Block0()"]
    if program.kind == "towers":
        init = [_fill("self.words = nn.Embedding({V}, {D})", program), *init]
        forward = ["x = self.words(t)"]
    else:
        init = [_fill("self.first = nn.Linear({D}, {D})", program), *init]
        forward = ["x = torch.tanh(self.first(t))"]
    gap_init, gap_forward = _lines(program, "g0_", program.gaps[0], definitions)
    pool = ".mean(1)" if program.kind == "towers" else ""
    forward += [gap_forward, "shared = x", f"left = self.left(shared){pool}", f"right = self.right(shared){pool}"]
    init += [gap_init, _fill("self.head = nn.Linear(2 * {D}, {V})", program)]
    forward += ["x = self.head(torch.cat([left, right], -1))", "return x"]
    return _class("Model", _joined(init), "t", _joined(forward))


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line for line in lines if line)


def _lines(program: Program, prefix: str, place: Statements, definitions: dict[str, str]) -> tuple[str, str]:
    """The lines of the constructor and of `forward` for the statements of one place."""
    init, forward, layout = [], [], BASE_LAYOUTS[program.kind]
    for number, statement in enumerate(place):
        operator = OPERATORS[statement.operator]
        names = {"x": "x" if number == 0 else f"x{number}", "y": f"x{number + 1}", "m": f"{prefix}{number}"}
        values = {**names, **_values(program, layout, statement)}
        if operator.definitions and operator.name not in definitions:
            definitions[operator.name] = operator.definitions.format(**values).strip()
        init.append(operator.init.format(**values))
        forward.append(operator.forward.format(**values))
        layout = operator.gives or layout
    if place:
        forward.append(f"x = x{len(place)}")
    return _joined(init), _joined(forward)


def _fill(template: str, program: Program) -> str:
    return template.format(**_sizes(program))


def _sizes(program: Program) -> dict[str, Any]:
    return {letter: program.sizes.of(letter) for letter in "LDHEVCS"}


def _values(program: Program, layout: str, statement: Statement) -> dict[str, Any]:
    """The values of all placeholders but the names of tensors."""
    options: dict[str, Any] = dict(statement.options)
    values = {**_sizes(program), **options, "B": "x.shape[0]"}
    if "d" not in options:
        return values
    dim = options["d"]
    before = ":, " * dim
    size = program.sizes.of(layout[dim])
    values["n"] = size if size is not None else f"x.shape[{dim}]"
    values["at"], values["last"] = f"{before}{options.get('i', 0)}", f"{before}-1"
    values["range"] = f"{before}{options.get('a', 0)}:{options.get('b', 1)}"
    values["step"] = f"{before}{options.get('k', 1) - 1}::2"
    values["rest"] = (
        f"x.shape[{dim}] - {options['a']}" if size is None and "a" in options else (size or 1) - options.get("a", 0)
    )
    return values


def operators_of(case: Case) -> tuple[Operator, ...]:
    """The operators of a case's program."""
    return tuple(OPERATORS[name] for name in case.program.operators)
