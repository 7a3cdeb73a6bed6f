"""Where a source file can be changed, and the changes that a seed draws.

Every change keeps the number of lines, so that a changed function has the line numbers of the original. Left out are
type hints, error messages and other texts, assertions, and what only runs on a GPU.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOMS = {
    "parallel": "meshwright/parallel",
    "step": "meshwright/train/step",
    "planner": "meshwright/planner",
    "collectives": "meshwright/collectives",
}
_COMPARE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
}
_TEXTS = (ast.Raise, ast.Assert, ast.JoinedStr)
_GPU = "cuda"


@dataclass(frozen=True)
class Mutant:
    """`old` at an offset of the file, replaced by `new`. The lines are those of the statement, without the statements
    inside it."""

    file: str
    start: int
    old: str
    new: str
    kind: str
    line: int
    statement: tuple[int, int]
    in_function: bool

    def apply(self, source: str) -> str:
        assert source[self.start : self.start + len(self.old)] == self.old
        return source[: self.start] + self.new + source[self.start + len(self.old) :]


def draw(repository: Path, room: str, count: int, seed: int) -> list[Mutant]:
    """Returns `count` different changes of the files of a room, each as likely as any other."""
    mutants = [
        mutant
        for file in sorted((repository / ROOMS[room]).rglob("*.py"))
        if _GPU not in file.name and file.parent.name != "graphs"
        for mutant in mutants_of(file.read_text(), file.relative_to(repository).as_posix())
    ]
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Returns every change that can be made to a file."""
    offsets = [0]
    for text in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(text))
    return list(_Finder(source, file, offsets).of_body(ast.parse(source).body, False))


class _Finder:
    def __init__(self, source: str, file: str, offsets: Sequence[int]) -> None:
        self._source, self._file, self._offsets = source, file, offsets
        self._lines = source.splitlines()
        self._statement, self._in_function = (0, 0), False

    def of_body(self, body: Sequence[ast.stmt], in_function: bool) -> Iterator[Mutant]:
        for statement in body:
            if isinstance(statement, (*_TEXTS, ast.Import, ast.ImportFrom)) or _is_docstring(statement):
                continue
            self._in_function = in_function
            self._statement = statement.lineno, _end_of_head(statement)
            yield from self._of_statement(statement)
            inside = in_function or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in _bodies(statement):
                yield from self.of_body(inner, inside)

    def _of_statement(self, statement: ast.stmt) -> Iterator[Mutant]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield self._replacing(statement, "pass", "dropped call")
        if (
            isinstance(statement, ast.Return)
            and statement.value is not None
            and ast.unparse(statement) != "return None"
        ):
            yield self._replacing(statement.value, "None", "return")
        if isinstance(statement, ast.AugAssign) and type(statement.op) in _ARITHMETIC:
            old, new = _ARITHMETIC[type(statement.op)]
            yield self._between(statement.target, statement.value, f"{old}=", f"{new}=", "arithmetic")
        for expression in _expressions(statement):
            yield from self._of_expression(expression)

    def _of_expression(self, node: ast.expr) -> Iterator[Mutant]:
        if isinstance(node, _TEXTS):
            return
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for number, operator in enumerate(node.ops):
                yield self._between(operands[number], operands[number + 1], *_COMPARE[type(operator)], "comparison")
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _is_text(node):
            yield self._between(node.left, node.right, *_ARITHMETIC[type(node.op)], "arithmetic")
        if isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield self._between(left, right, *words, "boolean")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._replacing(node, self._text(node.operand), "boolean")
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self._replacing(node, str(not node.value), "flag")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield self._replacing(node, str(node.value + 1), "constant")
        for child in ast.iter_child_nodes(node):
            for inner in _inner_expressions(child):
                yield from self._of_expression(inner)

    def _offset(self, line: int, column: int) -> int:
        """ast counts columns in bytes."""
        return self._offsets[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _ends(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr) -> str:
        start, end = self._ends(node)
        return self._source[start:end]

    def _replacing(self, node: ast.expr | ast.stmt, new: str, kind: str) -> Mutant:
        start, end = self._ends(node)
        old = self._source[start:end]
        missing = old.count("\n") - new.count("\n")
        if missing and isinstance(node, ast.stmt):
            new += "\n" * missing
        elif missing:
            new = f"({new}" + "\n" * missing + ")"
        return self._mutant(start, old, new, kind, node.lineno)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str, kind: str) -> Mutant:
        """Replaces the operator between two operands; around it are blanks, parentheses and comments."""
        start = self._source.index(old, self._ends(left)[1])
        assert start < self._ends(right)[0]
        line = self._source.count("\n", 0, start) + 1
        return self._mutant(start, old, new, kind, line)

    def _mutant(self, start: int, old: str, new: str, kind: str, line: int) -> Mutant:
        return Mutant(self._file, start, old, new, kind, line, self._statement, self._in_function)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_text(node: ast.BinOp) -> bool:
    """Whether texts are joined or filled in."""
    return any(isinstance(one, ast.JoinedStr) or _is_string(one) for one in (node.left, node.right))


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yields the lists of statements inside a statement, without those that a GPU is needed for."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef) and _GPU in statement.name.lower():
        return
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return
    for name in ("body", "orelse", "finalbody"):
        if not (name == "body" and isinstance(statement, ast.If) and _GPU in ast.unparse(statement.test)):
            yield getattr(statement, name, [])
    for handler in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
        yield handler.body


def _end_of_head(statement: ast.stmt) -> int:
    inner = [first.lineno for body in _bodies(statement) for first in body[:1]]
    assert statement.end_lineno is not None
    return max(statement.lineno, min(inner) - 1) if inner else statement.end_lineno


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yields the expressions of a statement that are evaluated when it runs, without type hints."""
    for name, value in ast.iter_fields(statement):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        if isinstance(value, ast.arguments):
            yield from (default for default in (*value.defaults, *value.kw_defaults) if default is not None)
        elif isinstance(value, list):
            for one in value:
                yield from _inner_expressions(one)
        elif isinstance(value, ast.AST):
            yield from _inner_expressions(value)


def _inner_expressions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.expr):
        yield node
    elif isinstance(node, ast.arguments):
        yield from (default for default in (*node.defaults, *node.kw_defaults) if default is not None)
    elif isinstance(node, ast.keyword | ast.comprehension | ast.withitem):
        for child in ast.iter_child_nodes(node):
            yield from _inner_expressions(child)
