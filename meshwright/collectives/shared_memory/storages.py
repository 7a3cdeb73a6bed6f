"""Which of this rank's tensors the peers know: a storage is moved into shared memory when it is first met, and the
peers are told when it is gone."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.collectives.shared_memory.segment import SLOTS, Segment

SHARED = Path("/dev/shm")  # where torch's shared segments lie, though they have no name there


def free_bytes(folder: Path = SHARED) -> int:
    """What can be moved into shared memory. Containers often have 64 MiB: a rank that writes more dies of a bus error,
    which says nothing."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True)
class Known:
    """A storage in shared memory. Another one in the same slot has another generation."""

    slot: int
    generation: int
    file_descriptor: int
    file_bytes: int
    address: int
    # A storage's record outlives its memory while this is held, so that no other storage can be taken for it.
    storage: StorageWeakRef


class Storages:
    """The storages of a rank, the one used last at the end; `segment` shows their generations to the peers."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._known: dict[int, Known] = {}
        self._free = list(range(SLOTS - 1, -1, -1))
        self._generation = 0

    def __len__(self) -> int:
        return len(self._known)

    def place(self, storage: UntypedStorage) -> Known:
        """Where the storage lies. One that is new is moved, with all tensors that view it: their addresses change."""
        key = storage._cdata
        found = self._known.pop(key, None)
        if found is not None and found.address != storage.data_ptr():
            self._retire(found)
            found = None
        if found is None:
            found = self._meet(storage)
        self._known[key] = found
        return found

    def _meet(self, storage: UntypedStorage) -> Known:
        for key in [key for key, known in self._known.items() if known.storage.expired()]:
            self._retire(self._known.pop(key))
        if not self._free:
            self._retire(self._known.pop(next(iter(self._known))))
        # As `share_memory_`, whatever strategy the process has chosen: a segment of the other one has a name.
        file_descriptor, file_bytes = storage._share_fd_cpu_()
        slot = self._free.pop()
        self._generation += 1
        self._segment.generations[slot] = self._generation
        return Known(slot, self._generation, file_descriptor, file_bytes, storage.data_ptr(), StorageWeakRef(storage))

    def _retire(self, known: Known) -> None:
        self._free.append(known.slot)
        self._segment.generations[known.slot] = 0
        self._segment.retired += 1
