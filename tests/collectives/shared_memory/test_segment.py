"""Segments without names, who can open them, and who still lives."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright.collectives.shared_memory import segment
from meshwright.collectives.shared_memory.segment import SLOTS, Segment
from meshwright.collectives.shared_memory.storages import Storages
from meshwright.errors import InputError


def test_a_peer_sees_what_is_written_and_there_is_no_name() -> None:
    file, mine = segment.create()
    theirs = segment.open_segment(segment.here(), file)
    assert os.fstat(file).st_nlink == 0
    os.close(file)
    mine.published, mine.ring[3].count, mine.generations[SLOTS - 1] = 7, 11, 13
    assert (theirs.published, theirs.ring[3].count, theirs.generations[SLOTS - 1]) == (7, 11, 13)


def test_memory_that_cannot_be_opened_is_told() -> None:
    with pytest.raises(InputError, match=r"/proc/\d+/fd/98765 cannot be opened: No such file"):
        segment.open_segment(segment.here(), 98765)


def test_counters_have_lines_of_their_own() -> None:
    """Whatever one rank writes often: else each write would take the line from those who wait on the other."""
    lines = [getattr(Segment, name).offset // 128 for name in ("published", "done", "left", "ring", "stage")]
    assert len(set(lines)) == len(lines)
    assert ctypes.sizeof(segment.Descriptor) == 128
    assert Segment.ring.offset % 128 == 0


def test_who_can_share() -> None:
    me = segment.here()
    assert segment.apart([me, replace(me, pid=1)]) is None
    assert segment.apart([me, me, replace(me, machine="b", host="node7")]) == (
        f"rank 0 of the group runs on {me.host}, rank 2 on node7"
    )
    assert "ranks 0 and 1 of the group run in two containers" in str(segment.apart([me, replace(me, namespace="x")]))


def test_who_lives(tmp_path: Path) -> None:
    me = segment.here()
    assert segment.alive(me)
    assert not segment.alive(replace(me, born="1"))  # another process with its number
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = segment._life(child.pid)[1]
    place = replace(me, pid=child.pid, born=born)
    assert segment.alive(place)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not segment.alive(place)  # a zombie
    child.communicate()
    assert not segment.alive(place)


def test_a_storage_moves_once_with_its_views_and_is_known_again() -> None:
    _, shown = segment.create()
    storages = Storages(shown)
    whole = torch.arange(1000.0)
    view = whole[10:20]
    known = storages.place(view.untyped_storage())
    assert known.address == whole.data_ptr() == view.data_ptr() - 40
    assert torch.equal(view, torch.arange(10.0, 20.0))
    view[0] = -1
    assert whole[10] == -1
    assert storages.place(whole.untyped_storage()) is known
    assert known.file_bytes == 4000
    assert shown.generations[known.slot] == known.generation


def test_a_storage_that_is_gone_is_retired_even_where_the_next_has_its_address() -> None:
    _, shown = segment.create()
    storages = Storages(shown)
    seen = set()
    for count in range(50):
        tensor = torch.full((5000,), float(count))
        known = storages.place(tensor.untyped_storage())
        seen.add(known.generation)
        del tensor
    assert len(seen) == 50
    assert len(storages) == 1
    assert shown.retired == 49
    assert [generation for generation in shown.generations if generation] == [max(seen)]


def test_of_more_storages_than_slots_the_one_unused_longest_is_forgotten() -> None:
    _, shown = segment.create()
    storages = Storages(shown)
    tensors = [torch.zeros(10) for _ in range(SLOTS + 1)]
    first = storages.place(tensors[0].untyped_storage())
    second = storages.place(tensors[1].untyped_storage())
    for tensor in tensors[2:SLOTS]:
        storages.place(tensor.untyped_storage())
    assert storages.place(tensors[0].untyped_storage()) is first
    storages.place(tensors[SLOTS].untyped_storage())
    assert storages.place(tensors[0].untyped_storage()) is first
    assert len(storages) == SLOTS
    assert storages.place(tensors[1].untyped_storage()).generation != second.generation


def test_the_memory_of_a_storage_is_not_kept() -> None:
    _, shown = segment.create()
    storages = Storages(shown)
    tensor = torch.zeros(100)
    file = storages.place(tensor.untyped_storage()).file_descriptor
    assert os.fstat(file).st_size == 400
    del tensor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
