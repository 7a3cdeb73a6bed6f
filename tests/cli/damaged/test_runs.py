"""Random damages to run folders. `report`, `watch`, `explain`, `export` and `prove --against` succeed, or end with one
line, within 10 s and 1 GB."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from meshwright.errors import MeshwrightError
from meshwright.report.run.watch import RunServer
from tests.cli.commands import CommandResult
from tests.cli.damaged.test_input import ALARM_S, check_ends_well, check_result, copy_of
from tests.cli.recorded_run import recorded_run
from tests.forking.environment import REPOSITORY
from tests.report.made_up_run import make_run
from tests.soaked import all_but

LONGEST_S, LARGEST_BYTES = 10.0, 2**30
EXPORT, AGAINST = "export run --to safetensors --limit 0 --trust", "prove --against run run --trust"
COMMANDS = ("report made-up", "explain made-up", "watch made-up", EXPORT, AGAINST)
VALUES = (
    *("{}", "[]", "null", '"x"', "true", "-1", "0", "1e400", "-1e308", "NaN", "Infinity", "9" * 400, "9" * 5000),
    *(
        "[" * 3000 + "]" * 3000,
        '{"a": {"b": [1]}}',
        '"\\u001b[31m"',
        '"' + "x" * 3000 + '"',
        "[null]",
        '[[1, "x"], {}]',
    ),
)
Damage = Callable[[random.Random, Path], None]


def change_value(chance: random.Random, file: Path) -> None:
    """Replaces the value after a colon, up to the next comma, bracket or end of line."""
    text = file.read_text(errors="replace")
    places = list(re.finditer(r":\s*([^,}\]\n]+)", text))
    if places:
        begin, end = chance.choice(places).span(1)
        file.write_text(text[:begin] + chance.choice(VALUES) + text[end:])


def delete_key(chance: random.Random, file: Path) -> None:
    text = file.read_text(errors="replace")
    if places := list(re.finditer(r'"?\w+"?:\s*[^,}\]\n]+,?', text)):
        begin, end = chance.choice(places).span()
        file.write_text(text[:begin] + text[end:])


def flip_bytes(chance: random.Random, file: Path) -> None:
    content = bytearray(file.read_bytes() or b"\0")
    for _ in range(chance.randint(1, 8)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    file.write_bytes(content)


def truncate(chance: random.Random, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randint(0, len(content))])


def replace_all(chance: random.Random, file: Path) -> None:
    file.write_text(chance.choice(VALUES) + "\n")


def replace_entry(chance: random.Random, file: Path) -> None:
    """Puts a pipe, a folder, a link to an endless device or to itself, or nothing, in place of the file."""
    file.unlink()
    make: Callable[[Path], None] = chance.choice(
        [
            lambda path: os.mkfifo(path),
            lambda path: path.mkdir(),
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path.name),
            lambda path: None,
        ]
    )
    make(file)


def rename_rank(chance: random.Random, file: Path) -> None:
    file.rename(file.with_name(file.name.replace("rank-0", chance.choice(["rank-²", "rank--1", "rank-" + "9" * 30]))))


def grow(chance: random.Random, file: Path) -> None:
    """Makes a file of many gigabytes, which takes no room on the disk."""
    os.truncate(file, 2**36)


DAMAGES: tuple[Damage, ...] = (
    *(change_value,) * 6,
    *(delete_key,) * 2,
    *(flip_bytes, truncate, replace_all, replace_entry, rename_rank, grow),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    recorded_run(folder / "run")
    make_run(folder / "made-up", ranks=2, steps=100)
    return folder


def watch(folder: Path) -> None:
    with suppress(MeshwrightError):
        server = RunServer(folder)
        server.body()
        server.server_close()


def damage_and_run(runs: Path, seed: int, check: Callable[[list[str]], None] = check_ends_well) -> None:
    chance = random.Random(seed)
    command = COMMANDS[seed % len(COMMANDS)]
    with copy_of(runs) as folder:
        entries = (folder / ("made-up" if "made-up" in command else "run")).rglob("*")
        files = [file for file in sorted(entries) if file.is_file() and file.name != ".lock"]
        for file in chance.sample(files, min(len(files), chance.choice([1, 1, 2, 4]))):
            damage = chance.choice(DAMAGES)
            if damage is not grow or file.suffix not in (".bin", ".pt"):
                damage(chance, file)
        began = os.times()
        if command.startswith("watch") and check is check_ends_well:
            watch(Path("made-up"))
        else:
            check(command.split())
        ended = os.times()
        assert sum(ended[:4]) - sum(began[:4]) < LONGEST_S, (seed, command)  # of processors, which others do not change


def check_all(runs: Path, seeds: range) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LARGEST_BYTES, limits[1]))
    try:
        for seed in seeds:
            try:
                damage_and_run(runs, seed)
            except BaseException as error:
                error.add_note(f"seed {seed}: {COMMANDS[seed % len(COMMANDS)]}")
                raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_some_damages_to_runs_end_well(runs: Path) -> None:
    check_all(runs, range(60))


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_damages_to_runs_end_well(runs: Path, part: int) -> None:
    check_all(runs, range(1000 * part // 4, 1000 * (part + 1) // 4))


def check_in_a_process(words: list[str]) -> None:
    """`watch` serves until it is stopped: it is asked for its page once, and stopped."""
    is_watch = words[0] == "watch"
    with (
        tempfile.TemporaryFile("w+") as err,
        subprocess.Popen(
            [sys.executable, "-m", "meshwright", *words, *(["--no-open"] if is_watch else [])],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"},
        ) as process,
        stopped_after(process, ALARM_S),
    ):
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (2 * LARGEST_BYTES, 2 * LARGEST_BYTES))
        assert process.stdout is not None
        lines = []
        peak_bytes = [0]
        watched = threading.Thread(target=note_peak, args=(process.pid, peak_bytes), daemon=True)
        watched.start()
        for line in process.stdout:
            lines.append(line)
            if is_watch and (address := re.search(r"http://\S+", line)):
                with urllib.request.urlopen(address[0], timeout=ALARM_S) as page:
                    assert page.read(100)
                process.send_signal(signal.SIGINT)
        process.wait()
        watched.join()
        err.seek(0)
        check_result(CommandResult(process.returncode, "".join(lines), err.read()))
    assert 0 < peak_bytes[0] < LARGEST_BYTES


def note_peak(pid: int, peak_bytes: list[int]) -> None:
    """Keeps the peak of a process's memory in the list until the process ends. What `wait4` returns would not do: it
    includes the memory of the process that started it, of which it was a copy for a moment."""
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        if (peak := re.search(r"VmHWM:\s+(\d+) kB", status)) is None:  # it has ended
            return
        peak_bytes[0] = max(peak_bytes[0], 1024 * int(peak[1]))
        time.sleep(0.01)


@contextmanager
def stopped_after(process: "subprocess.Popen[str]", limit_s: float) -> Iterator[None]:
    """Ends a command that never ends."""
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.parametrize("seed", all_but({2000, 2002}, range(2000, 2050)))
def test_damages_to_runs_end_well_on_the_command_line(runs: Path, seed: int) -> None:
    damage_and_run(runs, seed, check_in_a_process)


@pytest.mark.parametrize("file", ["/dev/zero", "big.json", "pipe"])
def test_a_report_of_an_endless_file_is_refused(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("big.json").touch()
    os.truncate("big.json", 2**36)
    os.mkfifo("pipe")
    check_ends_well(["report", file, "--output", "page.html"])
    assert not Path("page.html").exists()


def test_the_damages_are_real(runs: Path, tmp_path: Path) -> None:
    """Each kind changes its file."""
    for damage in set(DAMAGES):
        file = tmp_path / "rank-0.jsonl"
        shutil.copy(runs / "made-up" / "times" / "rank-0.jsonl", file)
        before = file.read_bytes()
        damage(random.Random(1), file)
        assert not file.is_file() or file.stat().st_size > 2**30 or file.read_bytes() != before, damage
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
