"""`SharedStorages`: the storages of this rank's tensors that other ranks may map. A storage moves into shared memory
when it is first used, and the other ranks can see when it is gone."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch import UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.collectives.shared_memory.segment import SLOTS, SharedSegment
from meshwright.collectives.torch_private import move_to_shared_memory, storage_key

SHARED = Path("/dev/shm")  # the file system of torch's shared memory files, which have no name there


def free_bytes(folder: Path = SHARED) -> int:
    """Returns the number of bytes that can still be moved into shared memory; 0 if there is no such folder. Containers
    often have 64 MiB, and a rank that writes more is killed by a bus error without any message."""
    try:
        file_system = os.statvfs(folder)
    except OSError:
        return 0
    return file_system.f_bavail * file_system.f_frsize


@dataclass(frozen=True)
class SharedStorage:
    """A storage in shared memory. `slot` is its index in `SharedSegment.generations`. `generation` tells it from
    earlier and later storages in the same slot."""

    slot: int
    generation: int
    file_descriptor: int
    file_bytes: int
    address: int
    # While this reference exists, torch gives the key of this storage to no other storage.
    storage: StorageWeakRef


class SharedStorages:
    """The storages that a rank has moved into shared memory, at most `SLOTS`. If there are more, the least recently
    used one is given up. `segment` shows the generations to the other ranks."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self._storages: dict[int, SharedStorage] = {}
        self._free = list(range(SLOTS - 1, -1, -1))
        self._generation = 0

    def __len__(self) -> int:
        return len(self._storages)

    def share(self, storage: UntypedStorage) -> SharedStorage:
        """Returns where the storage is in shared memory. A storage that is not there yet is moved, which changes the
        addresses of all tensors that view it."""
        key = storage_key(storage)
        shared = self._storages.pop(key, None)
        if shared is not None and shared.address != storage.data_ptr():
            self._retire(shared)
            shared = None
        if shared is None:
            shared = self._add(storage)
        self._storages[key] = shared
        return shared

    def _add(self, storage: UntypedStorage) -> SharedStorage:
        for key in [key for key, shared in self._storages.items() if shared.storage.expired()]:
            self._retire(self._storages.pop(key))
        if not self._free:
            self._retire(self._storages.pop(next(iter(self._storages))))
        file_descriptor, file_bytes = move_to_shared_memory(storage)
        slot = self._free.pop()
        self._generation += 1
        self._segment.generations[slot] = self._generation
        return SharedStorage(
            slot, self._generation, file_descriptor, file_bytes, storage.data_ptr(), StorageWeakRef(storage)
        )

    def _retire(self, shared: SharedStorage) -> None:
        self._free.append(shared.slot)
        self._segment.generations[shared.slot] = 0
        self._segment.retired += 1
