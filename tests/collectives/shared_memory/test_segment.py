"""Shared segments have no names, only processes of one machine and container open them, and dead peers are noticed."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.collectives.shared_memory import segment
from meshwright.collectives.shared_memory.segment import SLOTS, SharedSegment
from meshwright.collectives.shared_memory.storages import SharedStorages
from meshwright.errors import InputError


def test_a_peer_reads_what_is_written_and_the_segment_has_no_name() -> None:
    file, created = segment.create_segment()
    opened = segment.open_segment(segment.this_process(), file)
    assert os.fstat(file).st_nlink == 0
    os.close(file)
    created.published, created.ring[3].count, created.generations[SLOTS - 1] = 7, 11, 13
    assert (opened.published, opened.ring[3].count, opened.generations[SLOTS - 1]) == (7, 11, 13)


def test_memory_that_cannot_be_opened_is_an_error() -> None:
    with pytest.raises(InputError, match=r"/proc/\d+/fd/98765 cannot be opened: No such file"):
        segment.open_segment(segment.this_process(), 98765)


def test_counters_are_in_different_cache_lines() -> None:
    """Otherwise each write to one counter would take the line from the ranks that poll another one."""
    lines = [
        getattr(SharedSegment, name).offset // 128 for name in ("published", "done", "stopped_by", "ring", "stage")
    ]
    assert len(set(lines)) == len(lines)
    assert ctypes.sizeof(segment.Descriptor) == 128
    assert SharedSegment.ring.offset % 128 == 0


def test_processes_of_one_machine_and_container_can_share() -> None:
    me = segment.this_process()
    assert segment.why_not_shareable([me, replace(me, pid=1)]) is None
    assert segment.why_not_shareable([me, me, replace(me, machine="b", host="node7")]) == (
        f"rank 0 of the group runs on {me.host}, rank 2 on node7"
    )
    assert "ranks 0 and 1 of the group run in two containers" in str(
        segment.why_not_shareable([me, replace(me, namespace="x")])
    )


def test_zombies_and_reused_pids_are_not_alive(tmp_path: Path) -> None:
    me = segment.this_process()
    assert segment.is_alive(me)
    assert not segment.is_alive(replace(me, start_time="1"))  # another process with its pid
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start_time = segment._state_and_start_time(child.pid)[1]
    process = replace(me, pid=child.pid, start_time=start_time)
    assert segment.is_alive(process)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not segment.is_alive(process)  # a zombie
    child.communicate()
    assert not segment.is_alive(process)


def test_a_storage_moves_once_with_all_its_views() -> None:
    _, rank_segment = segment.create_segment()
    storages = SharedStorages(rank_segment)
    whole = torch.arange(1000.0)
    view = whole[10:20]
    shared = storages.share(view.untyped_storage())
    assert shared.address == whole.data_ptr() == view.data_ptr() - 40
    assert torch.equal(view, torch.arange(10.0, 20.0))
    view[0] = -1
    assert whole[10] == -1
    assert storages.share(whole.untyped_storage()) is shared
    assert shared.file_bytes == 4000
    assert rank_segment.generations[shared.slot] == shared.generation


def test_a_freed_storage_is_retired_even_where_the_next_has_its_address() -> None:
    _, rank_segment = segment.create_segment()
    storages = SharedStorages(rank_segment)
    generations = set()
    for count in range(50):
        tensor = torch.full((5000,), float(count))
        shared = storages.share(tensor.untyped_storage())
        generations.add(shared.generation)
        del tensor
    assert len(generations) == 50
    assert len(storages) == 1
    assert rank_segment.retired == 49
    assert [generation for generation in rank_segment.generations if generation] == [max(generations)]


def test_of_more_storages_than_slots_the_least_recently_used_is_retired() -> None:
    _, rank_segment = segment.create_segment()
    storages = SharedStorages(rank_segment)
    tensors = [torch.zeros(10) for _ in range(SLOTS + 1)]
    first = storages.share(tensors[0].untyped_storage())
    second = storages.share(tensors[1].untyped_storage())
    for tensor in tensors[2:SLOTS]:
        storages.share(tensor.untyped_storage())
    assert storages.share(tensors[0].untyped_storage()) is first
    storages.share(tensors[SLOTS].untyped_storage())
    assert storages.share(tensors[0].untyped_storage()) is first
    assert len(storages) == SLOTS
    assert storages.share(tensors[1].untyped_storage()).generation != second.generation


def test_the_memory_of_a_freed_storage_is_released() -> None:
    _, rank_segment = segment.create_segment()
    storages = SharedStorages(rank_segment)
    tensor = torch.zeros(100)
    file = storages.share(tensor.untyped_storage()).file_descriptor
    assert os.fstat(file).st_size == 400
    del tensor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
