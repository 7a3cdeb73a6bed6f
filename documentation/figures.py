"""Checks that measured figures name the commit that they were recorded with: in `docs/performance.md` and in the table
of the READMEs.

A paragraph with a measured figure names its commit. So does each row of a table and each list, or the text before
it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = {
    "docs/performance.md": None,
    "README.md": "Measured",
    "README.zh-CN.md": "实测数据",
}  # the section, or all of it
_WITHOUT_MEASUREMENTS = ("If training is slow",)  # sections that give advice
_COMMIT = re.compile(r"`[0-9a-f]{7,12}`")
_UNITS = r"%|ms|µs|s|min|MB|GiB|TFLOP/s|times|samples"
_FIGURE = re.compile(rf"(?<![\w.])\d[\d.,]*\s?(?:{_UNITS})(?![\w/])|(?<![\w.])\d+\.\d\d(?!\w)")


def commits(page: str) -> set[str]:
    """The commits that the page names."""
    return {match.strip("`") for match in _COMMIT.findall((REPOSITORY / page).read_text())}


def figures_without_commit(text: str, section: str | None = None) -> list[str]:
    """A line for each paragraph and each row of a table that has a measured figure and no commit. Only one section of
    the page is read if it is named."""
    problems, introduction = [], ""
    for block in _blocks(text, section):
        if block.startswith("|"):
            rows = [row for row in block.splitlines()[2:] if not _COMMIT.search(row) and re.search(r"\d", row)]
            problems += [row for row in rows if not _COMMIT.search(introduction)]
            continue
        is_list = block.startswith("- ")
        has_commit = _COMMIT.search(block) or (is_list and _COMMIT.search(introduction))
        if _FIGURE.search(re.sub(r"`[^`]*`", "", block)) and not has_commit:
            problems.append(block)
        introduction = introduction if is_list else block
    return [f"no commit: {' '.join(problem.split())[:150]}" for problem in problems]


def _blocks(text: str, section: str | None) -> Iterator[str]:
    """The paragraphs, lists and tables of the page. Code, comments and headings are left out."""
    heading, fenced = "", False
    for block in re.split(r"\n\s*\n", text):
        fenced ^= block.count("```") % 2 == 1
        if block.startswith("#"):
            heading = block.splitlines()[0].lstrip("# ")
            block = "\n".join(block.splitlines()[1:]) or "\n"
        wanted = heading not in _WITHOUT_MEASUREMENTS and section in (None, heading)
        block = re.sub(r"<!--.*?-->\n?", "", block, flags=re.DOTALL)
        if wanted and block and not fenced and not block.startswith(("    ", "```")):
            yield block
