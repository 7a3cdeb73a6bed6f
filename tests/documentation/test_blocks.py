"""Every block of code in the documentation is run, or says why not; every command in it has options that exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import typer
import yaml

from documentation.blocks import REPOSITORY, Block, command_problems, commands, find_blocks, pages, problems
from meshwright.cli import app
from meshwright.cli.commands import CommandLineError
from meshwright.cluster.file import load_cluster
from meshwright.errors import MeshwrightError
from meshwright.job import Job, load_plan, parse_job
from meshwright.plan import Plan
from meshwright.processes.loopback import interface
from tests.documentation.prepared import PREPARED
from tests.forking.forked import start, start_command

BLOCKS = {
    name: list(find_blocks(name, page.read_text())) for page in pages() if (name := str(page.relative_to(REPOSITORY)))
}
_JOB = yaml.safe_load((REPOSITORY / "jobs" / "mnist.yaml").read_text())
# Errors about commands in a sentence, which may leave out arguments: `meshwright plan --json`.
_SHORTENED = ("MissingParameter", "BadOptionUsage", "BadParameter")
_PLACEHOLDERS = ("…", "...", "[", "COMMAND")


def _pages_with(*kinds: str) -> list[str]:
    return [name for name, blocks in BLOCKS.items() if any(block.kind in kinds for block in blocks)]


def test_every_block_says_how_it_is_run_or_why_not() -> None:
    assert [problem for blocks in BLOCKS.values() for block in blocks for problem in problems(block)] == []
    assert sum(len(blocks) for blocks in BLOCKS.values()) > 100


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\nls\n```", "a block of code without a comment"),
        ("Text:\n\n    ls\n", "a block of code without a comment"),
        ("<!-- run -->\n\nText\n\n```\nls\n```", "a block of code without a comment"),
        ("<!-- not run: -->\n```\nls\n```", "say why it is not run"),
        ("<!-- run by tests/nowhere.py -->\n```\nls\n```", "there is no test tests/nowhere.py"),
        ("<!-- run by tests/test_job.py -->\n```\nls\n```", "tests/test_job.py does not name this page"),
        ("<!-- run: sometimes -->\n```\nls\n```", "write `run`, `run: soak` or `run: exit N`"),
    ],
)
def test_a_block_without_a_right_comment_is_found(text: str, problem: str) -> None:
    (block,) = find_blocks("docs/missing.md", text)
    assert problem in "\n".join(problems(block))


def test_comments_of_blocks_are_read() -> None:
    text = "<!-- run: soak, exit 3 -->\n```sh\na  # b\n$ c \\\n  d\n```\n- item\n\n    more of it\n"
    text += "\n<!-- output -->\n\n    e\n"
    first, second = find_blocks("docs/page.md", text)
    assert (first.kind, first.exit_code, first.language) == ("soak", 3, "sh")
    assert list(commands(first.text)) == ["a", "c d"]
    assert (second.kind, second.text) == ("output", "e\n")


def _written_commands() -> Iterator[tuple[str, str]]:
    """All commands of blocks, and all in the text that begin with `meshwright`."""
    for name, blocks in BLOCKS.items():
        shell = [block for block in blocks if block.kind != "output" and block.language in ("", "sh")]
        yield from ((block.place, line) for block in shell for line in commands(block.text))
        text = re.sub(r"```.*?```", "", (REPOSITORY / name).read_text(), flags=re.DOTALL)
        yield from ((name, " ".join(code.split())) for code in re.findall(r"`(meshwright [^`]+)`", text))


@cache
def _command_line() -> Any:
    return typer.main.get_command(app)


def _parse(words: list[str]) -> None:
    """Parses a command as the command line does, without running it."""
    command = _command_line()
    context = None
    name = "meshwright"
    while hasattr(command, "get_command"):
        context = command.make_context(name, list(words[:1]) or ["--help"], parent=context, resilient_parsing=True)
        found = command.get_command(context, words[0]) if words else None
        if found is None:
            raise CommandLineError(f"there is no command {' '.join(words[:1])}")
        name, command, words = words[0], found, words[1:]
    command.make_context(name, list(words), parent=context)


def test_every_written_command_has_options_that_exist() -> None:
    wrong, parsed = [], 0
    for place, line in _written_commands():
        match = re.search(r"(?:^|\s)(?:-m )?meshwright (\w.*)", re.split(r"\s(?:&&|[>|])\s", line)[0])
        if match is None or any(word in line for word in _PLACEHOLDERS) or "horovodrun" in line:
            continue
        words = shlex.split(match[1].replace(r"\|", "|"))
        if len(words) < 2 or "|" in match[1]:
            continue
        try:
            _parse(words)
        except CommandLineError as error:
            if ":" in place or type(error).__name__ not in _SHORTENED:
                wrong.append(f"{place}: `{line}`: {error.format_message()}")
        except MeshwrightError:
            pass  # the file of an example does not exist
        parsed += 1
    assert wrong == []
    assert parsed > 100
    with pytest.raises(CommandLineError, match="--claster"):
        _parse(["plan", "mnist", "--claster", "8xH100"])


def test_every_module_that_a_block_starts_exists() -> None:
    assert [problem for blocks in BLOCKS.values() for block in blocks for problem in command_problems(block)] == []


@pytest.mark.parametrize("page", _pages_with("run"))
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page(page, ("run",), tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", _pages_with("soak"))
def test_the_long_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run_page(page, ("run", "soak"), tmp_path, monkeypatch)


def _run_page(page: str, kinds: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the blocks of a page in order, in one folder that has the page's files."""
    monkeypatch.chdir(folder)
    names = PREPARED.get(page, lambda _: {})(folder)
    for block in BLOCKS[page]:
        if block.kind == "file":
            Path(block.detail).write_text(block.text)
    for block in BLOCKS[page]:
        if block.kind in kinds:
            _run_block(block, names)


def _run_block(block: Block, names: dict[str, Any]) -> None:
    if block.language == "python":
        exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
    elif block.language == "yaml":
        _check_yaml(block)
    else:
        *first, last = commands(block.text)
        for command in first:
            _run(block, command, 0)
        _run(block, last, block.exit_code)


def _run(block: Block, command: str, exit_code: int) -> None:
    program, *words = shlex.split(command)
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    if program == "meshwright":
        process: Any = start_command(words)
    elif program == "python" and words[0] == "-m":  # in a clone, whose folder has `validation`
        process = subprocess.Popen([sys.executable, *words], stdout=PIPE, stderr=PIPE, text=True)
    elif program == "python":
        process = start("runpy:run_path", *words)
    elif program == "torchrun":
        os.environ["GLOO_SOCKET_IFNAME"] = interface()
        process = start("tests.forking.forked:torchrun", "--standalone", *words)
    else:
        pytest.fail(f"{block.place}: `{command}`: nothing is known about running {program}")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == exit_code, f"{block.place}: `{command}`\n{output[-2000:]}\n{errors[-2000:]}"


def _check_yaml(block: Block) -> None:
    """A block of YAML is a plan, a cluster, or fields of a job, which are put into the ready job mnist."""
    content = yaml.safe_load(block.text)
    if "nodes" in content:
        Path("cluster.yaml").write_text(block.text)
        assert load_cluster("cluster.yaml").device_count > 0
    elif set(content) <= set(Plan.model_fields):
        load_plan(content)
    elif "optimizer" not in content and "MyLightningModule" in block.text:
        assert set(content) <= set(Job.model_fields)
    else:
        sections = {
            name: {**_JOB[name], **value} for name, value in content.items() if isinstance(_JOB.get(name), dict)
        }
        parse_job({**_JOB, **content, **sections}, Path.cwd())


def test_the_examples_of_a_page_leave_nothing_in_the_repository() -> None:
    assert not (REPOSITORY / "checkpoints").exists()
    assert shutil.which("git") is None or not (REPOSITORY / "plan.yaml").exists()
