"""Nothing in a checkpoint is executed, whatever somebody has put into its files and however right its checksums are."""

import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.manifest import MANIFEST, Manifest, write_manifest
from meshwright.checkpoint.manifest import file_checksum as checksum
from meshwright.checkpoint.reader import verify
from meshwright.errors import MeshwrightError
from meshwright.export.run import read_run
from meshwright.job import load_job
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
    if ".metadata" in names:
        raw["files"] = {name: checksum(folder / name).model_dump() for name in names}
        (folder / MANIFEST).write_text(json.dumps(raw))
    else:
        files = {name: checksum(folder / name) for name in names}
        write_manifest(folder, Manifest(step=raw["step"], files=files, about=raw["about"]))


# ---- crafted files of the older format


def replace_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Payload()))


def metadata_with_builtin(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(BuiltinPayload()))


def metadata_by_dotted_name(folder: Path) -> None:
    """A class that is allowed, and a name that leads from it to another module's functions."""
    (folder / ".metadata").write_bytes(
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x22Metadata.__init__.__globals__.get\x93."
    )


def metadata_of_other_function(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def _edit_metadata(folder: Path, edit: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def planner_data(folder: Path) -> None:
    _edit_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Payload()))


def storage_meta(folder: Path) -> None:
    _edit_metadata(folder, lambda metadata: setattr(metadata, "storage_meta", Payload()))


def key_of_metadata(folder: Path) -> None:
    _edit_metadata(folder, lambda metadata: metadata.state_dict_metadata.update({"x": Payload()}))


def path_outside(folder: Path) -> None:
    (folder.parent / "outside.bin").write_bytes(pickle.dumps(Payload()))

    def edit(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../outside.bin"

    _edit_metadata(folder, edit)


def _entry(folder: Path, key: str, data: bytes) -> None:
    """Makes an entry of the data files hold these bytes."""
    name = "__9_0.distcp"
    (folder / name).write_bytes(data)

    def edit(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                info.relative_path, info.offset, info.length = name, 0, len(data)

    _edit_metadata(folder, edit)


def _saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def object_entry(folder: Path) -> None:
    _entry(folder, "schedule", _saved({"last_epoch": Payload()}))


def object_entry_without_zip(folder: Path) -> None:
    _entry(folder, "schedule", _saved(Payload(), _use_new_zipfile_serialization=False))


def object_entry_as_plain_pickle(folder: Path) -> None:
    _entry(folder, "optimizer_groups", pickle.dumps(Payload()))


def tensor_entry(folder: Path) -> None:
    _entry(folder, "model/layers.0.weight", _saved(Payload()))


def tensor_entry_with_builtin(folder: Path) -> None:
    _entry(folder, "model/layers.0.weight", _saved([BuiltinPayload()]))


def tensor_entry_of_a_program(folder: Path) -> None:
    """A TorchScript archive, which torch.load may recognize."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload()))
        archive.writestr("archive/constants.pkl", pickle.dumps(Payload()))
        archive.writestr("archive/version", "3")
    _entry(folder, "model/layers.0.weight", buffer.getvalue())


# ---- crafted files of the format of today


def pickle_as_index(folder: Path) -> None:
    (folder / INDEX).write_bytes(pickle.dumps(Payload()))


def pickle_as_data(folder: Path) -> None:
    path = folder / "rank-00000.bin"
    data = pickle.dumps(Payload())
    path.write_bytes(data + bytes(max(0, path.stat().st_size - len(data))))


def metadata_beside(folder: Path) -> None:
    """A file of the older format in a checkpoint of today's format."""
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


def nested_tuples_as_key(folder: Path) -> None:
    """Hashing them recurses in C, which ends the process."""
    (folder / ".metadata").write_bytes(b"\x80\x04}(" + b")" + b"\x85" * 2_000_000 + b"Nu.")


def nested_sizes_as_key(folder: Path) -> None:
    """The same with objects of `torch.Size`, which are tuples, too."""
    nested = b"h\0h\1\x85\x85Rq\x010" * 200_000
    (folder / ".metadata").write_bytes(b"\x80\x02ctorch\nSize\nq\x000)q\x010" + nested + b"}h\x01Ns.")


def doubled_path(folder: Path) -> None:
    """A path of which each part is the whole path before."""
    doubled = b"h\0h\1h\1\x86Rq\x010" * 45
    (folder / ".metadata").write_bytes(b"\x80\x02cpathlib\nPath\nq\x000X\1\0\0\0aq\x010" + doubled + b"h\x01.")


def doubled_layout(folder: Path) -> None:
    """A list that has the one before it twice, 45 times, as the argument of a function that need not be called."""
    doubled = b"]h\1ah\1aq\x010" * 45
    start = b"\x80\x02ctorch.serialization\n_get_layout\nq\x000]q\x010"
    (folder / ".metadata").write_bytes(start + doubled + b"h\0h\1\x85R.")


def attributes_of_a_class(folder: Path) -> None:
    """Sets an attribute of a class instead of one of an object."""
    (folder / ".metadata").write_bytes(b"\x80\x04cpathlib\nPath\n(N}(\x8c\x07is_filectorch\nSize\nutb.")


OLDER = [
    nested_tuples_as_key,
    nested_sizes_as_key,
    doubled_path,
    doubled_layout,
    attributes_of_a_class,
    replace_metadata,
    metadata_with_builtin,
    metadata_by_dotted_name,
    metadata_of_other_function,
    planner_data,
    storage_meta,
    key_of_metadata,
    path_outside,
    object_entry,
    object_entry_without_zip,
    object_entry_as_plain_pickle,
    tensor_entry,
    tensor_entry_with_builtin,
    tensor_entry_of_a_program,
]
NEWER = [pickle_as_index, pickle_as_data, metadata_beside, object_of_unknown_type, array_of_objects, file_outside]


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


@pytest.mark.parametrize("craft", OLDER, ids=lambda craft: craft.__name__)
def test_nothing_in_an_older_checkpoint_is_executed(tmp_path: Path, craft: Callable[[Path], None]) -> None:
    with tarfile.open(Path(__file__).with_name("written_by_dcp.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    craft(tmp_path / CHECKPOINT)
    settings = ["plan.axes.shard=1", "log.tensorboard=false", "train.steps=5"]
    check_nothing_is_executed(
        tmp_path / CHECKPOINT, load_job(tmp_path / "run" / "job.yaml", settings), tmp_path / "run"
    )


@pytest.mark.parametrize("craft", NEWER, ids=lambda craft: craft.__name__)
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, craft: Callable[[Path], None]) -> None:
    job = toy_job(train={"epochs": None, "steps": 4})
    train(job, tmp_path / "run")
    craft(tmp_path / CHECKPOINT)
    check_nothing_is_executed(tmp_path / CHECKPOINT, job, tmp_path / "run")
