"""The blocks of code in README, CONTRIBUTING and `docs/`, and what the comment before each says about running it.

CONTRIBUTING.md lists the comments. `find_blocks` reads them, and `problems` names blocks without one, or with one that
cannot be true."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).parents[1]
Kind = Literal["run", "soak", "file", "run by", "output", "not run"]
_COMMENT = re.compile(r"<!-- (run by|run|file|output|not run)(?:: ?| )?(.*?) ?-->$")
_FENCE = re.compile(r"```(\w*)")


@dataclass(frozen=True)
class Block:
    """A block of code. `detail` is the name of a file, the path of a test, or a reason; `exit_code` that of its last
    command."""

    page: str
    line: int
    language: str
    text: str
    kind: Kind | None
    detail: str = ""
    exit_code: int = 0

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All pages with blocks of code. The generated reference is among them."""
    roots = [REPOSITORY / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")]
    return [*roots, *sorted((REPOSITORY / "docs").rglob("*.md"))]


def find_blocks(page: str, text: str) -> Iterator[Block]:
    """Yields fenced blocks, and blocks that are indented by four spaces after an empty line."""
    lines = text.splitlines()
    number, comment = 0, ""
    while number < len(lines):
        line = lines[number]
        begin = number
        if fence := _FENCE.match(line):
            number += 1
            while not lines[number].startswith("```"):
                number += 1
            yield _block(page, begin, fence[1], "\n".join(lines[begin + 1 : number]) + "\n", comment)
        elif line.startswith("    ") and _begins_indented(lines, begin):
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1].strip()):
                number += 1
            code = "\n".join(line[4:] for line in lines[begin : number + 1]).strip("\n") + "\n"
            yield _block(page, begin, "", code, comment)
        if line.strip():
            comment = line if line.startswith("<!-- ") and begin == number else ""
        number += 1


def _begins_indented(lines: list[str], number: int) -> bool:
    """Whether an indented line is code: it follows an empty line, and the text before that is no item of a list."""
    before = [line for line in lines[:number] if line.strip()]
    return (
        number > 0 and not lines[number - 1].strip() and bool(before) and not before[-1].startswith(("  ", "- ", "* "))
    )


def _block(page: str, number: int, language: str, text: str, comment: str) -> Block:
    match = _COMMENT.match(comment)
    kind, detail = match.groups() if match else (None, "")
    exit_code = 0
    if kind == "run" and (ending := re.fullmatch(r"(?:(soak)(?:, )?)?(?:exit (\d+))?", detail)):
        kind, exit_code = ending[1] or "run", int(ending[2] or 0)
        detail = ""
    return Block(page, number + 1, language, text, kind, detail, exit_code)  # type: ignore[arg-type]


def problems(block: Block) -> Iterator[str]:
    """What is wrong with the comment of a block."""
    if block.kind is None:
        yield f"{block.place}: a block of code without a comment that says how it is run, or why not (CONTRIBUTING.md)"
    elif block.kind == "run" and block.detail:
        yield f"{block.place}: `run: {block.detail}`: write `run`, `run: soak` or `run: exit N`"
    elif block.kind == "not run" and len(block.detail.split()) < 2:
        yield f"{block.place}: say why it is not run"
    elif block.kind == "run by":
        test = REPOSITORY / block.detail
        if not test.is_file():
            yield f"{block.place}: there is no test {block.detail}"
        elif Path(block.page).name not in test.read_text() and "reference/" not in block.page:
            yield f"{block.place}: {block.detail} does not name this page"
    elif block.kind == "file" and f"`{block.detail}`" not in (REPOSITORY / block.page).read_text():
        yield f"{block.place}: the text has to tell the reader to write `{block.detail}`"


def command_problems(block: Block) -> Iterator[str]:
    """Names modules that `python -m` of a block cannot start."""
    for command in commands(block.text):
        if block.kind != "output" and (
            match := re.match(r"python -m ((?:meshwright|validation|documentation)[\w.]*)", command)
        ):
            path = REPOSITORY.joinpath(*match[1].split("."))
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                yield f"{block.place}: `{command}`: there is no module {match[1]}"


def commands(text: str) -> Iterator[str]:
    """The commands of a block, without comments and prompts; a line that ends with a backslash goes on in the next."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        command = re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ").strip()
        if command:
            yield command
