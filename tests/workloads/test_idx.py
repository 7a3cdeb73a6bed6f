import gzip
import re
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.workloads.idx import read_idx

LABELS = bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 0, 9])
IMAGES = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 1, 2, 3, 4])


@pytest.mark.parametrize("name", ["file", "file.gz"])
def test_reads_plain_and_gzipped(tmp_path: Path, name: str) -> None:
    for content, expected in ((LABELS, [7, 0, 9]), (IMAGES, [[[1, 2]], [[3, 4]]])):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        array = read_idx(tmp_path / name)
        assert array.dtype == np.uint8
        assert array.tolist() == expected


PACKED = gzip.compress(LABELS * 50)
DAMAGES = {
    "not gzip": ("f.gz", LABELS, "not a gzip file"),
    "truncated gzip": ("f.gz", PACKED[:-12], "truncated"),
    "damaged gzip": ("f.gz", PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:], "damaged"),
    "garbled gzip": ("f.gz", PACKED[:10] + b"\xff" * 20, "damaged"),
    "foreign": ("f", b"\x89PNG\r\n", "magic number 0x89504e47"),
    "floats": ("f", bytes([0, 0, 13, 1]) + LABELS[4:], "magic number 0x00000d01"),
    "empty": ("f", b"", "magic number"),
    "header cut": ("f", IMAGES[:9], "header needs 16 bytes, the file has 9"),
    "fewer": ("f", IMAGES[:-1], "2 × 1 × 2 = 4 bytes, but 3 follow: it is cut short"),
    "more": ("f", LABELS + b"x", "3 = 3 bytes, but 4 follow: it is longer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_input_error_of_one_line(tmp_path: Path, damage: str) -> None:
    name, content, words = DAMAGES[damage]
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        read_idx(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert re.search("download|put the original", str(caught.value))


def test_an_unreadable_path_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_idx(tmp_path / "f")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_idx(tmp_path)
