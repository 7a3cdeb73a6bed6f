"""A checkpoint that is written while training goes on has the bytes of one that is written at once, and appears as a
whole or not at all."""

import json
import os
import signal
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import background
from meshwright.checkpoint.background import BackgroundSaver
from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.manifest import checkpoint_name
from meshwright.checkpoint.reader import open_checkpoint, verify
from meshwright.checkpoint.save import clear_unfinished, save
from meshwright.errors import StorageError
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.train.toy import Net

ABOUT: dict[str, Any] = {"step": 3, "position": [0, 3], "seed": 0}


def a_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model/weight": torch.arange(1001.0).view(7, 143).t() * value,  # not contiguous
        "model/small": torch.full((3,), value, dtype=torch.bfloat16),  # its end needs padding
        "model/mask": torch.tensor([True, False]),
        "schedule": {"last_epoch": 3},
        "optimizer_groups": [],
    }


def begin(saver: BackgroundSaver, folder: Path, state: dict[str, Any], step: int = 3, **calls: Any) -> str | None:
    about = {**ABOUT, "step": step, "position": [0, step]}
    return saver.begin(state, folder / checkpoint_name(step), step, about, **calls)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / checkpoint_name(3)).iterdir()}


def both_ways(rank: int, size: int, folder: str) -> None:
    """Saves the state of a sharded model at once and in the background, where the weights change after the copy."""
    session = Session(
        Net(),
        lambda parameters: torch.optim.Adam(parameters.values()),
        loss=torch.nn.functional.cross_entropy,
        plan=Plan.model_validate({"axes": {"shard": size}}),
        world=World(rank, rank, size, size, 0, torch.device("cpu"), None),
        seed=0,
    )
    at_once, later = Path(folder, "at once"), Path(folder, "later")
    save(session.state(), at_once, 3, ABOUT)
    saver = BackgroundSaver()
    begin(saver, later, session.state())
    with torch.no_grad():
        for parameter in session.module.parameters():
            parameter.zero_()
    published = saver.finish()
    assert published is not None
    assert published.path == later / checkpoint_name(3)
    assert saver.finish() is None, "a checkpoint is returned once"


def test_the_files_of_two_ranks_are_those_of_a_save_at_once(two: RankPool, tmp_path: Path) -> None:
    for name in ("at once", "later"):
        (tmp_path / name).mkdir()
    two.run(both_ways, str(tmp_path))
    assert files(tmp_path / "later") == files(tmp_path / "at once")
    assert len(files(tmp_path / "later")) == 4, "each rank has written a file"


def refused_on_one_rank(rank: int, size: int, folder: str) -> list[Any]:
    """The second rank's part of the state must not be saved. Both ranks write a tensor."""
    state: dict[str, Any] = {name: torch.full((7,), 1.0) for name in ("model/first", "model/second")}
    state |= {"schedule": None, "optimizer_groups": []}
    saver = BackgroundSaver()
    keys: list[str] = []

    def examine(names: Collection[str]) -> str | None:
        keys.extend(names)
        return "bad" if rank else None

    problem = begin(saver, Path(folder), state, examine=examine)
    refused = [keys, problem, saver.finish(), Path(folder, checkpoint_name(3)).exists()]
    begin(saver, Path(folder), state)
    saver.finish()
    return refused


def test_a_state_that_one_rank_refuses_is_saved_by_none(two: RankPool, tmp_path: Path) -> None:
    expected = [[["model/first"], "bad", None, False], [["model/second"], "bad", None, False]]
    assert two.run(refused_on_one_rank, str(tmp_path)) == expected
    assert len(files(tmp_path)) == 4, "the next one is saved"


def states_that_change(rank: int, size: int, folder: str) -> None:
    """Saves states of the same tensors, of other values, and of other tensors on one rank, with one saver."""
    saver = BackgroundSaver()
    for step in (1, 2, 3):
        state: dict[str, Any] = {"model/a": torch.full((4,), float(step)), "schedule": step, "optimizer_groups": []}
        if step == 3 and rank == 1:
            state["model/b"] = torch.arange(3.0)
        begin(saver, Path(folder), state, step)
        saver.finish()


def test_a_state_of_other_tensors_is_divided_again(two: RankPool, tmp_path: Path) -> None:
    two.run(states_that_change, str(tmp_path))
    for step, names in ((1, ["model/a"]), (2, ["model/a"]), (3, ["model/a", "model/b"])):
        path = tmp_path / checkpoint_name(step)
        with open_checkpoint(path, verify(path)) as reader:
            assert list(reader.tensors) == names
            assert reader.objects["schedule"] == step
        assert (path / "rank-00000.bin").read_bytes() == torch.full((4,), float(step)).numpy().tobytes()


def test_training_may_change_the_state_after_the_copy(tmp_path: Path) -> None:
    for name in ("at once", "later"):
        (tmp_path / name).mkdir()
    save(a_state(), tmp_path / "at once", 3, ABOUT)
    state = a_state()
    saver = BackgroundSaver()
    begin(saver, tmp_path / "later", a_state(5.0), 2)  # its memory is used again
    saver.finish()
    begin(saver, tmp_path / "later", state)
    state["model/weight"].zero_()
    saver.finish()
    assert files(tmp_path / "later") == files(tmp_path / "at once")


def test_a_checkpoint_is_published_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = background.write_copied
    monkeypatch.setattr(background, "write_copied", lambda *args: (may_write.wait(), write(*args))[1])
    saver = BackgroundSaver()
    assert begin(saver, tmp_path, a_state(), 1) is None
    assert saver.finish(limit_s=0.01) is None
    assert not (tmp_path / checkpoint_name(1)).exists()
    may_write.set()
    published = saver.finish()
    assert published is not None
    assert published.path == tmp_path / checkpoint_name(1)
    assert published.path.exists()


def test_a_checkpoint_that_cannot_be_written_fails_at_the_next_call(tmp_path: Path) -> None:
    saver = BackgroundSaver()
    folder = tmp_path / "gone"
    folder.mkdir()
    begin(saver, folder, a_state())
    saver.finish()
    folder.rename(tmp_path / "elsewhere")
    begin(saver, folder, a_state(), 4)
    with pytest.raises(StorageError, match="gone"):
        saver.finish()
    assert saver.finish() is None, "an error is raised once"


def _die_while_writing(folder: str) -> None:
    background.write_copied = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    saver = BackgroundSaver()
    begin(saver, Path(folder), a_state(2.0), 4)
    saver.finish()


def test_a_kill_between_copy_and_publication_loses_nothing_that_was_published(tmp_path: Path) -> None:
    save(a_state(), tmp_path, 3, ABOUT)
    process = torch.multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / f".writing-{checkpoint_name(4)}").is_dir()
    newest = find_newest_valid(tmp_path)
    assert newest.manifest is not None
    assert (newest.manifest.step, newest.problems) == (3, ())
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(3)]


def test_a_checkpoint_waits_for_space_on_a_full_disk_if_the_job_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for two attempts. What else goes wrong with the disk is an error at once."""
    lines: list[str] = []
    space = iter((False, False, True))
    attempts: list[Path] = []
    write = background.write_copied

    def write_or_fail(path: Path, file: torch.Tensor) -> Any:
        attempts.append(path)
        if len(attempts) == 1:
            raise StorageError("the disk mounted at /data is full")
        return write(path, file)

    monkeypatch.setattr(background, "write_copied", write_or_fail)
    monkeypatch.setattr(background, "has_space", lambda *_: next(space))
    monkeypatch.setattr(background, "_POLL_S", 0.0)
    saver = BackgroundSaver(on_full="wait", tell=lines.append)
    begin(saver, tmp_path, a_state())
    assert saver.finish() is not None
    assert lines == ["the checkpoint of step 3 waits for space: the disk mounted at /data is full"]
    assert json.loads((tmp_path / checkpoint_name(3) / "manifest.json").read_text())["step"] == 3
    attempts.clear()
    monkeypatch.setattr(background, "has_space", lambda *_: True)
    begin(saver, tmp_path, a_state(), 4)
    with pytest.raises(StorageError, match="is full"):
        saver.finish()
