"""Nothing in a checkpoint is executed, whatever somebody has put into its files and however right its checksums are."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manifest import MANIFEST, Manifest, write_manifest
from meshwright.checkpoint.manifest import file_checksum as checksum
from meshwright.checkpoint.reader import verify
from meshwright.errors import MeshwrightError
from meshwright.export.run import read_run
from meshwright.plan import Plan
from meshwright.train.output.folder import RunFolder, write_job_and_plan
from tests.train.one_process import make_trainer, session_of, toy_job, train

CHECKPOINT = "run/checkpoints/step-00000004"
IS_FILE = Path.is_file
executed: list[str] = []


def execute(word: str) -> str:
    """What the crafted files call."""
    executed.append(word)
    return word


class Payload:
    """An object whose pickle calls `execute`."""

    def __init__(self, word: str = "payload") -> None:
        self.word = word

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return execute, (self.word,)


class BuiltinPayload:
    """An object whose pickle calls a function of the standard library."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("__import__('tests.checkpoint.test_crafted', fromlist=['x']).execute('eval')",)


def sign_again(folder: Path) -> None:
    """Makes the manifest right for the files as they are."""
    raw = json.loads((folder / MANIFEST).read_text())
    names = [path.name for path in folder.iterdir() if path.name != MANIFEST]
    files = {name: checksum(folder / name) for name in names}
    write_manifest(folder, Manifest(step=raw["step"], files=files, about=raw["about"]))


def pickle_as_index(folder: Path) -> None:
    (folder / INDEX).write_bytes(pickle.dumps(Payload()))


def pickle_as_data(folder: Path) -> None:
    path = folder / "rank-00000.bin"
    data = pickle.dumps(Payload())
    path.write_bytes(data + bytes(max(0, path.stat().st_size - len(data))))


def metadata_beside(folder: Path) -> None:
    """The index of torch.distributed.checkpoint, which is a pickle."""
    (folder / ".metadata").write_bytes(pickle.dumps(Payload()))


def object_of_unknown_type(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["objects"]["schedule"] = {"object": ["tests.checkpoint.test_crafted.execute", "x"]}
    (folder / INDEX).write_text(json.dumps(index))


def array_of_objects(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["objects"]["schedule"] = {"array": {"dtype": "|O", "shape": [1], "bytes": "AAAAAAAAAAA="}}
    (folder / INDEX).write_text(json.dumps(index))


def file_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    for tensor in index["tensors"].values():
        for piece in tensor["pieces"]:
            piece["file"] = "../../../../../../etc/passwd"
    (folder / INDEX).write_text(json.dumps(index))


CRAFTED = [pickle_as_index, pickle_as_data, metadata_beside, object_of_unknown_type, array_of_objects, file_outside]


def check_nothing_is_executed(folder: Path, job: Any, run: Path) -> None:
    sign_again(folder)
    step = int(folder.name.removeprefix("step-"))
    write_job_and_plan(RunFolder(run), job, Plan())
    executed.clear()
    for act in (
        lambda: verify(folder),
        lambda: session_of(make_trainer(job, run / "other")).load(folder),
        lambda: train(job, run),
        lambda: read_run(run, "last", trust=True),
        lambda: read_run(run, str(step), trust=True),
    ):
        message = ""
        try:
            act()
        except MeshwrightError as error:
            message = str(error)
        assert "\n" not in message
    assert executed == []
    assert Path.is_file is IS_FILE


def test_the_payload_is_executed_by_pickle() -> None:
    executed.clear()
    pickle.loads(pickle.dumps(Payload()))
    pickle.loads(pickle.dumps(BuiltinPayload()))
    assert executed == ["payload", "eval"]


@pytest.mark.parametrize("craft", CRAFTED, ids=lambda craft: craft.__name__)
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, craft: Callable[[Path], None]) -> None:
    job = toy_job(train={"epochs": None, "steps": 4})
    train(job, tmp_path / "run")
    craft(tmp_path / CHECKPOINT)
    check_nothing_is_executed(tmp_path / CHECKPOINT, job, tmp_path / "run")
