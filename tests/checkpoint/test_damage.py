"""Random damage to a checkpoint is detected and the older checkpoint used, or it is harmless: weights, optimizer state,
schedule and position are then equal."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.errors import CheckpointError
from tests.train.one_process import make_trainer, session_of, toy_job, train

JOB = toy_job(
    schedule={"call": "torch.optim.lr_scheduler:MultiStepLR", "milestones": [2, 5]},
    checkpoint={"every_steps": 5},
)
DAMAGES = 300
NEWER, OLDER = "step-00000010", "step-00000005"


def any_file(folder: Path, chance: random.Random, *, json_only: bool = False) -> Path:
    """A file of the checkpoint; the manifest as often as all other files together."""
    names = sorted(path.name for path in folder.iterdir() if not json_only or path.suffix == ".json")
    return folder / (MANIFEST if chance.random() < 0.5 else chance.choice(names))


def flip(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def swap_two_files(folder: Path, chance: random.Random) -> None:
    first, second = chance.sample(sorted(folder.iterdir()), 2)
    contents = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(contents)


def take_file_of_the_older_one(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    path.write_bytes((folder.parent / OLDER / path.name).read_bytes())


def take_the_older_one(folder: Path, chance: random.Random) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / OLDER, folder)


def delete(folder: Path, chance: random.Random) -> None:
    any_file(folder, chance).unlink()


def zero(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    data = bytearray(path.read_bytes())
    begin = chance.randrange(len(data))
    end = min(len(data), begin + chance.randrange(1, 200))
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def edit_number(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance, json_only=True)
    text = path.read_text()
    number = chance.choice(list(re.finditer(r"-?\d+", text)))
    new = chance.choice([str(int(number[0]) + 1), "0", "-1", "99999999999999999999", "1e400", "null", "[]", '"x"'])
    path.write_text(text[: number.start()] + new + text[number.end() :])


def edit_field(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance, json_only=True)
    contents = json.loads(path.read_text())
    place: Any = contents
    while isinstance(place, dict) and place and chance.random() < 0.7:
        parent, key = place, chance.choice(list(place))
        place = place[key]
        if not isinstance(place, dict) or not place or chance.random() < 0.3:
            parent[key] = chance.choice([{}, [], None, 7, "text", {"files": {}}])
            break
    path.write_text(json.dumps(contents))


def lose_field(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance, json_only=True)
    contents = json.loads(path.read_text())
    section = chance.choice([contents, *(value for value in contents.values() if isinstance(value, dict) and value)])
    del section[chance.choice(list(section))]
    path.write_text(json.dumps(contents))


def append(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    path.write_bytes(path.read_bytes() + chance.choice([b"\n", b" ", b"x", b"{}", bytes(100)]))


def replace_by_folder(folder: Path, chance: random.Random) -> None:
    path = any_file(folder, chance)
    path.unlink()
    path.mkdir()


ACTS: list[Callable[[Path, random.Random], None]] = [
    flip,
    flip,
    flip,
    truncate,
    swap_two_files,
    take_file_of_the_older_one,
    take_the_older_one,
    delete,
    zero,
    edit_number,
    edit_number,
    edit_field,
    lose_field,
    append,
    replace_by_folder,
]


def contents(path: Path) -> list[Any]:
    """Everything that a run gets from a checkpoint, as values that can be compared."""
    session = session_of(make_trainer(JOB, path.parent.parent))
    session.load(path)
    assert session.schedule is not None
    state = session.optimizer.state_dict()
    moments = [tensor.tolist() for entries in state["state"].values() for tensor in entries.values()]
    weights = [(name, tensor.tolist()) for name, tensor in session.state_dict().items()]
    groups = state["param_groups"]
    return [session.about(), weights, moments, groups, session.schedule.state_dict()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(JOB, folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [OLDER, NEWER]
    return folder


def test_damage_is_detected_or_harmless(run: Path, tmp_path: Path) -> None:
    expected = contents(run / "checkpoints" / NEWER)
    manifest = json.loads((run / "checkpoints" / NEWER / MANIFEST).read_text())
    harmless: list[str] = []
    for number in range(DAMAGES):
        chance = random.Random(number)
        act = chance.choice(ACTS)
        case = f"{act.__name__}, seed {number}"
        folder = tmp_path / str(number)
        shutil.copytree(run / "checkpoints", folder / "checkpoints")
        act(folder / "checkpoints" / NEWER, chance)
        newest = find_newest_valid(folder / "checkpoints")
        assert newest.path is not None, case
        assert newest.manifest is not None, case
        if newest.path.name == OLDER:
            assert len(newest.problems) == 1, case
            assert NEWER in newest.problems[0], case
            assert "\n" not in newest.problems[0], case
        else:
            harmless.append(case)
            assert contents(newest.path) == expected, case
            assert newest.manifest.about == manifest["about"], case
        shutil.rmtree(folder)
    assert len(harmless) < DAMAGES // 10, harmless


@pytest.mark.parametrize("act", [delete, truncate, swap_two_files, edit_number], ids=lambda act: act.__name__)
def test_a_session_names_the_damage_and_stays_as_it_was(
    run: Path, tmp_path: Path, act: Callable[[Path, random.Random], None]
) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    act(tmp_path / "checkpoints" / NEWER, random.Random(1))
    session = session_of(make_trainer(JOB, tmp_path / "other"))
    before = {name: value.clone() for name, value in session.state_dict().items()}
    with pytest.raises(CheckpointError, match=NEWER):
        session.load(tmp_path / "checkpoints" / NEWER)
    assert all(torch.equal(before[name], value) for name, value in session.state_dict().items())
