"""The Chinese README, and the Chinese first part of the tutorial, have the blocks of code, the commands and the figures
of the English ones."""

import re
from pathlib import Path

import yaml

import meshwright
from documentation.blocks import find_blocks

REPOSITORY = Path(__file__).parents[2]
ENGLISH, CHINESE = ((REPOSITORY / name).read_text() for name in ("README.md", "README.zh-CN.md"))


def _text(readme: str) -> str:
    """The text without blocks of code, comments and addresses of links."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", readme, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _figures(readme: str) -> list[str]:
    """The figures of the tables and of the text, such as 7.8%, 1/106 and 1.52. Words such as H200 have none."""
    return sorted(re.findall(r"(?<![\w.#-])\d[\d.,/]*\d%?|(?<![\w.#-])\d%?", re.sub(r"`[^`]*`", "", _text(readme))))


def test_both_have_the_same_blocks_of_code() -> None:
    english, chinese = (
        [(block.language, block.text) for block in find_blocks(name, text)]
        for name, text in (("README.md", ENGLISH), ("README.zh-CN.md", CHINESE))
    )
    assert len(english) > 6
    assert chinese == english


def test_the_chinese_tutorial_has_the_same_blocks_and_names() -> None:
    names = ("docs/tutorial/mnist.md", "docs/tutorial/mnist.zh-CN.md")
    english, chinese = ((REPOSITORY / name).read_text() for name in names)
    assert [block.text for block in find_blocks(names[1], chinese)] == [
        block.text for block in find_blocks(names[0], english)
    ]
    assert _codes(chinese) - {".venv", "meshwright"} == _codes(english)
    assert chinese.count("\n## ") == english.count("\n## ")


def _codes(readme: str) -> set[str]:
    return {" ".join(code.split()) for code in re.findall(r"`([^`]+)`", _text(readme))}


def test_both_have_the_same_commands_and_names_in_their_text() -> None:
    assert _codes(CHINESE) - {"make test", "call"} == _codes(ENGLISH), "the Chinese text says what two of them do"


def test_both_have_the_same_figures() -> None:
    assert "23.2%" in _figures(ENGLISH)
    assert _figures(CHINESE) == _figures(ENGLISH)


def test_both_have_the_same_links_and_sections() -> None:
    english, chinese = (
        set(re.findall(r"\]\(([^)]*)\)", text)) - {"README.md", "README.zh-CN.md", "docs/tutorial/mnist.zh-CN.md"}
        for text in (ENGLISH, CHINESE)
    )
    assert chinese == english
    assert CHINESE.count("\n## ") == ENGLISH.count("\n## ")
    assert CHINESE.count("\n| ") == ENGLISH.count("\n| ")


def test_the_citation_and_the_changelog_are_of_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == meshwright.__version__
    assert {"cff-version", "title", "message", "authors", "license"} <= set(citation)
    assert f"\n## {meshwright.__version__}\n" in (REPOSITORY / "CHANGELOG.md").read_text()
