"""`StoredZip`: the entries of a zip archive as `torch.save` writes it. They are not compressed and do not overlap, so
their sizes add up to less than the file."""

import mmap
import struct
import zlib
from dataclasses import dataclass

# One entry takes about 100 bytes of the list of entries, and more in memory.
_LARGEST_ENTRY_LIST_BYTES = 16 * 2**20

# The records of a zip archive: its end, the end of one with 64-bit numbers, where that is, one line of the list of
# entries, and the header in front of an entry's data.
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_END_64_POSITION = struct.Struct("<4sLQL")
_LISTED_ENTRY = struct.Struct("<4s6H3L5H2L")
_ENTRY_HEADER = struct.Struct("<4s5H3L2H")
_IN_EXTRA_FIELD = 2**32 - 1  # a number that does not fit is in an extra field


class PtFileError(Exception):
    """A file is not what `torch.save` writes, or holds what is not read from files. The message is one line that says
    why, to put after the name of the file. Characters that cannot be printed, which names in the file may have, are
    replaced."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(character if character.isprintable() else "?" for character in message))


@dataclass(frozen=True)
class Entry:
    """The data of an entry: the bytes from `begin` to `end` of the file, and their checksum."""

    begin: int
    end: int
    crc32: int


class StoredZip:
    """The entries of a zip archive, without the name of the folder that all of them are in."""

    def __init__(self, data: mmap.mmap | bytearray) -> None:
        self.data = data
        try:
            self._entries = _list_entries(data)
        except struct.error:
            raise PtFileError("it is damaged: its list of entries is cut off") from None

    def entry_size(self, name: str) -> int:
        """The number of bytes of an entry; 0 if there is none of this name."""
        entry = self._entries.get(name)
        return entry.end - entry.begin if entry else 0

    def entry(self, name: str) -> Entry:
        """Returns an entry after comparing its data with its checksum."""
        entry = self._entries.get(name)
        if entry is None:
            raise PtFileError(f"it is damaged: it has no entry {name:.100}")
        if zlib.crc32(memoryview(self.data)[entry.begin : entry.end]) != entry.crc32:
            raise PtFileError(f"it is damaged: its entry {name:.100} does not have the checksum that it says")
        return entry

    def read(self, name: str) -> bytes:
        entry = self.entry(name)
        return bytes(memoryview(self.data)[entry.begin : entry.end])


def _list_entries(data: mmap.mmap | bytearray) -> dict[str, Entry]:
    """Returns the entries by name. Raises a `PtFileError` if they are compressed or overlap. So their sizes add up to
    less than the file."""
    count, size, position = _find_entry_list(data)
    if size > _LARGEST_ENTRY_LIST_BYTES:
        raise PtFileError(f"its list of entries has more than {_LARGEST_ENTRY_LIST_BYTES:,} bytes")
    list_begin = position
    entries: dict[str, Entry] = {}
    extents = []
    for _ in range(count):
        fields = _LISTED_ENTRY.unpack_from(data, position)
        signature, _, _, flags, method, _, _, crc32, stored_size, plain_size, name_size, extra_size, comment_size = (
            fields[:13]
        )
        header = fields[16]
        name_begin = position + _LISTED_ENTRY.size
        extra_begin = name_begin + name_size
        position = extra_begin + extra_size + comment_size
        if signature != b"PK\1\2" or position > list_begin + size:
            raise PtFileError("it is damaged: its list of entries is cut off")
        if method or flags & 1:
            raise PtFileError("its entries are compressed, which torch.save does not do")
        extra = bytes(data[extra_begin : extra_begin + extra_size])
        plain_size, stored_size, header = _with_extra_field(extra, plain_size, stored_size, header)
        name = bytes(data[name_begin:extra_begin]).decode().partition("/")[2]
        header_signature, *_, name_size, extra_size = _ENTRY_HEADER.unpack_from(data, header)
        begin = header + _ENTRY_HEADER.size + name_size + extra_size
        if header_signature != b"PK\3\4" or plain_size != stored_size or name in entries:
            raise PtFileError(f"it is damaged: its entry {name:.100} is listed twice or wrongly")
        entries[name] = Entry(begin, begin + plain_size, crc32)
        extents.append((header, begin + plain_size))
    extents.sort()
    ends = [begin for begin, _ in extents[1:]] + [list_begin]
    if any(end > limit for (_, end), limit in zip(extents, ends, strict=True)):
        raise PtFileError("its entries overlap, which torch.save does not do")
    return entries


def _find_entry_list(data: mmap.mmap | bytearray) -> tuple[int, int, int]:
    """Returns how many entries an archive has, and the size and position of their list."""
    end = len(data) - _END.size
    signature, *_, count, size, position, _ = _END.unpack_from(data, end)
    if end < 0 or signature != b"PK\5\6":
        raise PtFileError("it is damaged: it is cut off, or something follows its end")
    where = end - _END_64_POSITION.size
    if where >= 0 and data[where : where + 4] == b"PK\6\7":
        _, _, end_64, _ = _END_64_POSITION.unpack_from(data, where)
        *_, count, size, position = _END_64.unpack_from(data, end_64)
    return count, size, position


def _with_extra_field(extra: bytes, *numbers: int) -> list[int]:
    """Returns the numbers of a listed entry. Those that do not fit into its record are taken from the extra field of
    type 1, in their order."""
    wide: list[int] = []
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            wide = list(struct.unpack_from(f"<{min(size // 8, 3)}Q", extra, 4))
        extra = extra[4 + size :]
    if numbers.count(_IN_EXTRA_FIELD) > len(wide):
        raise PtFileError("it is damaged: a size or position is missing in its list of entries")
    return [wide.pop(0) if number == _IN_EXTRA_FIELD else number for number in numbers]
