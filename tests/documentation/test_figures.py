"""Each measured figure of the page on speed and of the READMEs names a commit that exists, and the table of the sweep
is the one that its results give."""

import re
import subprocess
from pathlib import Path

import pytest

from documentation.figures import PAGES, REPOSITORY, commits, figures_without_commit
from documentation.parts import PARTS, stale_parts, with_parts

TABLE = "| model | ms | commit |\n| --- | --- | --- |\n"


@pytest.mark.parametrize("page", PAGES)
def test_figures_name_their_commit(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    assert figures_without_commit(text, PAGES[page]) == []
    without = re.sub(r"`[0-9a-f]{7,12}`", "", text)
    assert len(figures_without_commit(without, PAGES[page])) > 4, "the check finds the figures of the page"


@pytest.mark.parametrize("page", PAGES)
def test_commits_exist(page: str) -> None:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("there is no history here")
    assert commits(page)
    assert [one for one in commits(page) if git("cat-file", "-e", f"{one}^{{commit}}").returncode] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A step takes 12 ms.", 1),
        ("A step takes 12 ms (`a7351fd`).", 0),
        ("It is 1.23 times as fast.", 1),
        ("It is 3.5% off.", 1),
        ("The two models of 2026 have `3 ms` in their names.", 0),
        ("    a command of 3 s", 0),
        ("# Title\nA step takes 12 ms.", 1),
        ("## If training is slow\n\n- above 10%", 0),
        (f"Times:\n\n{TABLE}| a | 12 | |\n| b | 13 | `a7351fd` |", 1),
        (f"Times (`a7351fd`):\n\n{TABLE}| a | 12 | |", 0),
        ("Failures (`a7351fd`):\n\n- a: stopped after 150 s", 0),
        ("Failures:\n\n- a: stopped after 150 s", 1),
    ],
)
def test_a_figure_without_commit_is_found(text: str, count: int) -> None:
    assert len(figures_without_commit(text)) == count


def test_parts_made_from_data_are_fresh() -> None:
    assert stale_parts(REPOSITORY / "docs") == [], "run `make reference`"
    assert all((REPOSITORY / "docs" / page).is_file() for page in PARTS)


def test_a_part_is_replaced_and_its_place_must_be_there(tmp_path: Path) -> None:
    text = "Before\n\n<!-- made by here -->\nold\n<!-- end -->\n\nAfter\n"
    made = with_parts(text, {"here": lambda: r"| \new |"})
    assert made == "Before\n\n<!-- made by here -->\n\n| \\new |\n\n<!-- end -->\n\nAfter\n"
    assert with_parts(made, {"here": lambda: r"| \new |"}) == made
    with pytest.raises(ValueError, match="0 places for nowhere"):
        with_parts(text, {"nowhere": str})
