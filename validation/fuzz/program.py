"""The values that the fuzzer draws: a `Program` is a model as a list of statements, and a `Case` is a program with its
loss, optimizer and plan. Both are written as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

# What activations are between statements, by the kind of the model.
BASE_LAYOUTS = {"tokens": "BLD", "features": "BLD", "towers": "BLD", "heads": "BD", "vectors": "BD", "images": "BCSS"}


@dataclass(frozen=True)
class Sizes:
    """L: positions, D: features, H: heads, V: tokens and classes, S: rows and columns of a picture."""

    L: int = 12
    D: int = 16
    H: int = 4
    V: int = 11
    S: int = 6

    def of(self, letter: str) -> int | None:
        """The size of a dimension by its letter; None for samples, whose number differs from rank to rank."""
        sizes = {**asdict(self), "E": self.D // self.H, "C": self.D}
        return sizes.get(letter)


@dataclass(frozen=True)
class Statement:
    """One use of an operator. `options` are the values of its placeholders."""

    operator: str
    options: dict[str, Any] = field(default_factory=dict)


Statements = tuple[Statement, ...]


@dataclass(frozen=True)
class Program:
    """A model. `blocks` are modules, called one after the other; `gaps` are the statements of the model itself before
    the first block, between blocks and after the last one. With `equal_blocks`, all blocks are like the first one.
    `pooled`: the model has one output for each sample, not one for each position."""

    kind: str
    sizes: Sizes
    gaps: tuple[Statements, ...]
    blocks: tuple[Statements, ...]
    equal_blocks: bool = False
    pooled: bool = False
    tied_head: bool = False

    @property
    def places(self) -> Iterator[Statements]:
        """All lists of statements that are rendered."""
        yield from self.gaps
        yield from self.blocks[:1] if self.equal_blocks else self.blocks

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of all operators, each once."""
        return tuple(dict.fromkeys(statement.operator for place in self.places for statement in place))


@dataclass(frozen=True)
class Case:
    """A program with everything that decides what is trained. `plan` has the groups of a plan; `plan_kind` is the name
    of its row in plans.py. `door` is how the loop calls the session. `batch` is the number of samples of a step, and
    `last_batch` that of the last step."""

    program: Program
    plan_kind: str
    plan: dict[str, Any]
    loss: str
    optimizer: str
    door: str = "share"
    clip_norm: float | None = None
    batch: int = 12
    last_batch: int = 12
    steps: int = 3
    seed: int = 0

    @property
    def ranks(self) -> int:
        """How many ranks the plan has."""
        ranks = 1
        for axis, size in self.plan["axes"].items():
            ranks *= 1 if axis == "expert" else size
        return ranks

    def batch_sizes(self) -> list[int]:
        return [self.batch] * (self.steps - 1) + [self.last_batch]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of `as_json`, also after the values went through a file."""
        program = dict(values["program"])
        for name in ("gaps", "blocks"):
            program[name] = tuple(
                tuple(Statement(line["operator"], dict(line["options"])) for line in place) for place in program[name]
            )
        program["sizes"] = Sizes(**program["sizes"])
        return cls(**{**values, "program": Program(**program)})


def with_place(program: Program, index: int, statements: Statements) -> Program:
    """The program with other statements in the place of this index of `places`."""
    gaps = len(program.gaps)
    if index < gaps:
        return replace(program, gaps=(*program.gaps[:index], statements, *program.gaps[index + 1 :]))
    index -= gaps
    return replace(program, blocks=(*program.blocks[:index], statements, *program.blocks[index + 1 :]))
