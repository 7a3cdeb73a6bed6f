"""`Operator`: one thing that models do with their activations, as a template of Python source.

A template's placeholders are filled when a program is rendered:

x, y, m         the names of the tensor that goes in, of the tensor that comes out, and of an attribute of the module
d, e            two dimensions of x;  n is the size of d, and B L D H E V are sizes by their letters
i, j            positions along d;  a, b: a range of them with a < b;  k: a small number;  c: a factor
at, last        an index such as `:, 3` or `:, -1` that selects position i or the last one along d
range, step     an index such as `:, 3:7` or `:, 1::2` along d
others          one of the operator's `choices`
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

# The dimensions of activations by layout. B: samples, L: positions, D: features, H: heads, E: features of a head, N:
# samples and positions together, C: channels, S: rows or columns of a picture.
LAYOUTS = ("BLD", "BLHE", "BHLE", "BDL", "LBD", "ND", "BD", "BCSS")
SEQUENCES = ("BLD", "BLHE", "BHLE", "BDL", "LBD", "ND")
DERIVED = ("x", "y", "m", "n", "rest", "B", "L", "D", "H", "E", "V", "C", "S", "at", "last", "range", "step")


@dataclass(frozen=True)
class Operator:
    """`forward`, `init` and `definitions` are lines of the module's `forward`, of its constructor and of the file.
    `takes` are the layouts of the input; `gives` is the layout of the output if it is another one. `needs` is what a
    program must have: `tokens`, the token ids as `t`; `one_part`, a plan that does not divide batches; or both."""

    name: str
    family: str
    forward: str
    takes: tuple[str, ...] = LAYOUTS
    gives: str | None = None
    init: str = ""
    definitions: str = ""
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    needs: str = ""

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The placeholders whose values are drawn, in the order in which they are first used."""
        text = f"{self.definitions}\n{self.init}\n{self.forward}"
        names = [name for _, name, _, _ in Formatter().parse(text) if name]
        if {"at", "last", "range", "step", "n", "rest"} & set(names):
            names = ["d", *names]
        if "at" in names:
            names.append("i")
        if {"range", "rest"} & set(names):
            names += ["a", "b"]
        if "step" in names:
            names.append("k")
        return tuple(name for name in dict.fromkeys(names) if name not in DERIVED)


class Family:
    """Collects the operators of one file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.operators: list[Operator] = []

    def add(self, name: str, forward: str, **options: Any) -> None:
        """Adds an operator. The template's lines are separated by newlines; options are those of `Operator`."""
        self.operators.append(Operator(name, self.name, forward, **options))
