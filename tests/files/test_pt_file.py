"""Files of `torch.save` are read as torch reads them, and whatever is in a crafted one, it is refused in one line:
nothing is executed, the process does not crash, and no memory is used that the file does not have."""

import io
import os
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.files.pt_file import read_pt_bytes, read_pt_file
from meshwright.files.stored_zip import PtFileError


def saved(value: Any, **options: Any) -> bytearray:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return bytearray(buffer.getvalue())


def archive(pickle: bytes, compression: int = zipfile.ZIP_STORED, **storages: bytes) -> bytearray:
    """A file with this pickle and these storages."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as written:
        written.writestr("a/data.pkl", pickle)
        for key, content in storages.items():
            written.writestr(f"a/data/{key}", content)
    return bytearray(buffer.getvalue())


def refusal(data: bytearray) -> str:
    with pytest.raises(PtFileError) as caught:
        read_pt_bytes(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return str(caught.value)


# Parts of pickles in protocol 2.


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little")


def storage(key: str, count: int, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(key: str, count: int, size: tuple[int, ...], stride: tuple[int, ...], kind: str = "FloatStorage") -> bytes:
    sizes = b"(" + b"".join(map(number, size)) + b"t(" + b"".join(map(number, stride)) + b"t"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(key, count, kind) + number(0) + sizes + b"\x89NtR"


DTYPES = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex128, torch.float8_e4m3fn, torch.uint16]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_values_are_those_that_torch_reads(tmp_path: Path, protocol: int) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wide, marked = torch.arange(12.0).reshape(3, 4), torch.ones(2)
    marked.note = "of a user"  # type: ignore[attr-defined]
    value = {
        "state_dict": model.state_dict(),
        "parameters": dict(model.named_parameters()),
        "views": [wide.t()[1:], wide, torch.ones(1).expand(5), torch.zeros(0, 3), torch.tensor(7), marked],
        "dtypes": {str(dtype): torch.ones(3, dtype=torch.int8).to(dtype) for dtype in DTYPES},
        "plain": (1, 2.5, None, True, "é", b"\0\xff", {3: [4]}, {5, 6}, Counter({7: 8}), torch.float16, 10**30),
    }
    file = tmp_path / "a.pt"
    torch.save(value, file, pickle_protocol=protocol)
    read = read_pt_file(file)
    assert type(read["state_dict"]) is OrderedDict
    assert read["plain"] == value["plain"]
    for part in ("state_dict", "parameters", "views", "dtypes"):
        torch.testing.assert_close(read[part], value[part], rtol=0, atol=0)
    assert read["views"][0].untyped_storage().data_ptr() == read["views"][1].untyped_storage().data_ptr()
    read["views"][1].zero_()  # a private copy: the file stays as it is
    assert torch.equal(read_pt_file(file)["views"][1], wide)


def test_entries_that_are_not_aligned_are_read() -> None:
    pickle = b"\x80\x02" + tensor("k", 3, (3,), (1,)) + b"."
    for padding in range(4):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as written:
            written.writestr("a/padding", bytes(padding))
            written.writestr("a/data.pkl", pickle)
            written.writestr("a/data/k", struct.pack("3f", 1, 2, 3))
        assert read_pt_bytes(bytearray(buffer.getvalue())).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3).to_sparse(), "it holds a sparse tensor: only dense tensors"),
        (torch.zeros(2, device="meta"), "it holds a meta tensor: only dense tensors"),
        (torch.ones(2, dtype=torch.complex64).conj(), "a conjugated or negated view"),
        (Path("a"), f"it names {type(Path()).__module__}.PosixPath, which is not read from files"),
        (nn.Linear(2, 2), "it names torch.nn.modules.linear.Linear"),
    ],
    ids=["sparse", "meta", "conjugate", "path", "module"],
)
def test_what_is_not_read_is_named(value: Any, words: str) -> None:
    assert words in refusal(saved({"w": value}))


def test_the_format_before_torch_1_6_is_refused_with_the_conversion() -> None:
    words = refusal(saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False))
    assert words.startswith("it has the format of torch.save before torch 1.6")
    assert "torch.save(torch.load(OLD, weights_only=True), NEW)" in words
    assert refusal(bytearray(b"text")) == "torch.save did not write it"


def test_every_cut_and_flipped_bit_is_refused_or_harmless() -> None:
    weight = torch.arange(6.0)
    whole = saved({"w": weight})
    for position in range(0, len(whole), 7):
        refusal(whole[:position])
        damaged = bytearray(whole)
        damaged[position] ^= 16
        try:
            read = read_pt_bytes(damaged)
        except PtFileError:
            continue
        assert torch.equal(read["w"], weight)


# ---- crafted pickles

DEEP = b"\x80\x02}" + b")" + b"\x85" * 2_000_000 + b"Ns."  # a key of 2 million tuples in each other
DOUBLED_TUPLES = b"\x80\x02})" + b"2\x86" * 49 + b"Ns."  # each of 49 tuples has the one before it twice
DOUBLED_LISTS = b"\x80\x02]" + b"q\x00]h\x00ah\x00a" * 40 + b"."
DEEP_LISTS = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


@pytest.mark.parametrize(
    ("pickle", "words"),
    [
        (DEEP, "its tuples are nested too deeply"),
        (DOUBLED_TUPLES, "its tuples are nested too deeply"),
        (DOUBLED_LISTS, "it has more than 10,000,000 values"),
        (DEEP_LISTS, "its values are nested too deeply"),
        (b"\x80\x02]q\x00h\x00a.", "a value contains itself"),
        (b"\x80\x02ca\x1b[2J\n\tb\n.", "it names a?[2J.?b"),
        (b"\x80\x05\x96" + (2**44).to_bytes(8, "little") + b".", "it has a bytearray"),
        (b"\x80\x02ccollections\nOrderedDict\n.", "something else than tensors and plain values"),
        (b"\x80\x02" + storage("k", 1) + b".", "something else than tensors and plain values"),
        (b"\x80\x02cos\nsystem\n" + text("exit 1") + b"\x85R.", "it names os.system"),
        (b"\x80\x02c" + b"a" * 10_000 + b"\nb\n.", "it names aaa"),
        (b"\x80\x02K\x01r\xff\xff\xff\x7f.", ""),  # stores an object as number 2**31 - 1 of a list
    ],
    ids=[
        "deep",
        "doubled",
        "lists",
        "deep lists",
        "itself",
        "control characters",
        "bytearray",
        "function",
        "storage",
        "system",
        "long",
        "memo",
    ],
)
def test_a_crafted_pickle_is_refused(pickle: bytes, words: str) -> None:
    if not words:
        read_pt_bytes(archive(pickle))  # harmless: no list of that length is made
        return
    assert words in refusal(archive(pickle))


def test_a_tensor_is_not_changed_or_added_to_by_the_pickle() -> None:
    """The instructions for items of sets and dicts call `add` and `__setitem__` of whatever they find."""
    column, row = tensor("k", 4, (4, 1), (1, 1)), tensor("k", 4, (1, 4), (4, 1))
    assert "has no attribute 'add'" in refusal(archive(b"\x80\x04" + column + b"(" + row + b"\x90.", k=bytes(16)))
    assert "does not support item assignment" in refusal(archive(b"\x80\x02" + column + b"K\0K\1s.", k=bytes(16)))
    assert "sets the state of an object" in refusal(archive(b"\x80\x02" + column + b"}b.", k=bytes(16)))


@pytest.mark.parametrize("function", [b"c__builtin__\nset\n", b"ccollections\nCounter\n", b"c_codecs\nencode\n"])
def test_a_value_that_is_written_once_is_not_copied_again_and_again(
    function: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.files.pt_file._LARGEST_PICKLE_BYTES", 10_000)
    arguments = {b"s": b"](" + b"K\1" * 1000 + b"e\x85", b"C": b"}(" + b"".join(number(n) + b"N" for n in range(500))}
    large = arguments.get(function.splitlines()[1][:1], text("a" * 1000) + text("latin1") + b"\x86")
    large += b"u\x85" if large.startswith(b"}") else b""
    calls = b"".join(b"h\x00h\x01R0" for _ in range(30))
    pickle = b"\x80\x02" + function + b"q\x000" + large + b"q\x010" + calls + b"N."
    assert "it repeats too many values" in refusal(archive(pickle)), pickle


@pytest.mark.parametrize(
    ("count", "size", "stride", "words"),
    [
        (4, (5,), (1,), "out of bounds"),
        (4, (2, 2), (2**40, 1), "out of bounds"),
        (5, (4,), (1,), "its storage k has 16 bytes"),
        (4, (2**50,), (0,), "are larger than the file"),
        (4, (2**62, 2**62), (0, 0), "are larger than the file"),
        (4, (1,) * 65, (1,) * 65, "the size of a tensor is impossible"),
        (4, (2,), (1, 1), "the size of a tensor is impossible"),
        (4, (2**64 - 3,), (1,), "the size of a tensor is impossible"),
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(
    count: int, size: tuple[int, ...], stride: tuple[int, ...], words: str
) -> None:
    pickle = b"\x80\x02" + tensor("k", count, size, stride) + b"."
    assert words in refusal(archive(pickle, k=bytes(16)))


# ---- crafted archives


def listed(entries: list[tuple[str, int, int, int]], data: bytes) -> bytearray:
    """An archive of this data, whose list has these entries: the name, the size, the checksum, and the position."""
    listing = b"".join(
        struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, crc, size, size, len(name), 0, 0, 0, 0, 0, position)
        + name.encode()
        for name, size, crc, position in entries
    )
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(entries), len(entries), len(listing), len(data), 0)
    return bytearray(data + listing + end)


def header(name: str, content: bytes) -> bytes:
    crc = zlib.crc32(content)
    numbers = (20, 0, 0, 0, 0, crc, len(content), len(content), len(name), 0)
    return struct.pack("<4s5H3L2H", b"PK\3\4", *numbers) + name.encode()


def entry(name: str, content: bytes, position: int) -> tuple[str, int, int, int]:
    return name, len(content), zlib.crc32(content), position


def test_entries_that_overlap_are_refused() -> None:
    pickle, blob = b"\x80\x02N.", bytes(1000)
    first = header("a/data.pkl", pickle) + pickle
    good = listed([entry("a/data.pkl", pickle, 0)], first)
    assert read_pt_bytes(good) is None
    twice = [entry("a/data/0", blob, len(first)), entry("a/data/1", blob, len(first))]
    data = first + header("a/data/0", blob) + blob
    assert "its entries overlap" in refusal(listed([entry("a/data.pkl", pickle, 0), *twice], data))
    inner = header("a/data/1", blob) + blob  # the data of one entry is another entry
    nested = [entry("a/data/0", inner, len(first)), entry("a/data/1", blob, len(first + header("a/data/0", inner)))]
    data = first + header("a/data/0", inner) + inner
    assert "its entries overlap" in refusal(listed([entry("a/data.pkl", pickle, 0), *nested], data))


def test_entries_that_are_compressed_or_listed_wrongly_are_refused() -> None:
    pickle = b"\x80\x02N."
    assert "its entries are compressed" in refusal(archive(pickle, zipfile.ZIP_DEFLATED, k=bytes(10**6)))
    first = header("a/data.pkl", pickle) + pickle
    assert "does not have the checksum" in refusal(listed([("a/data.pkl", len(pickle), 0, 0)], first))
    assert "overlap" in refusal(listed([("a/data.pkl", 2**31, 0, 0)], first))
    assert "is missing in its list" in refusal(listed([("a/data.pkl", 2**32 - 1, 0, 0)], first))
    assert "listed twice or wrongly" in refusal(listed([entry("a/data.pkl", pickle, 4)], first + bytes(100)))
    assert "it has no entry data.pkl" in refusal(listed([entry("a/b", pickle, 0)], first))
    two = listed([entry("a/data.pkl", pickle, 0), entry("b/data.pkl", pickle, len(first))], first + first)
    assert "listed twice or wrongly" in refusal(two)
    order = header("a/byteorder", b"big") + b"big"
    both = [entry("a/data.pkl", pickle, 0), entry("a/byteorder", b"big", len(first))]
    assert "another byte order" in refusal(listed(both, first + order))


def test_a_pickle_of_too_many_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.files.safe_pickle._CountedInstructions.left", 20)
    assert read_pt_bytes(archive(b"\x80\x02(" + b"]" * 10 + b"l.")) == [[]] * 10
    assert "too many instructions" in refusal(archive(b"\x80\x02(" + b"]" * 20 + b"l."))


@pytest.mark.parametrize("name", ["_LARGEST_PICKLE_BYTES", "_MOST_TENSORS", "_LARGEST_ENTRY_LIST_BYTES"])
def test_files_with_too_much_of_one_thing_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "stored_zip" if name == "_LARGEST_ENTRY_LIST_BYTES" else "pt_file"
    monkeypatch.setattr(f"meshwright.files.{module}.{name}", 2)
    assert "more than 2 " in refusal(saved([torch.ones(1), torch.ones(1), torch.ones(1)]))


# ---- what is no file


def test_pipes_folders_and_empty_files_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        read_pt_file(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        read_pt_file(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        read_pt_file(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(PtFileError, match="it is empty"):
        read_pt_file(tmp_path / "empty")


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    torch.save(torch.arange(1000.0), tmp_path / "a.pt")
    read: Tensor = read_pt_file(tmp_path / "a.pt")
    (tmp_path / "a.pt").unlink()
    assert float(read.sum()) == 499_500
