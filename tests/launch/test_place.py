"""A rank's place can be read from outside, at any moment."""

import os
from pathlib import Path

from meshwright.launch.place import Place, Seen, describe, place_file, read_place


def test_what_is_written_is_read(tmp_path: Path) -> None:
    place = Place.in_folder(tmp_path, 2, attempt=1)
    assert read_place(place_file(tmp_path, 2)) == Seen(os.getpid(), 1, -1, "start-up", 0)
    place.at(57, "backward")
    place.finish_step()
    assert read_place(place_file(tmp_path, 2)) == Seen(os.getpid(), 1, 57, "backward", 1)


def test_a_long_name_is_cut_not_broken(tmp_path: Path) -> None:
    Place.in_folder(tmp_path, 0, 0).at(1, "é" * 100)
    seen = read_place(place_file(tmp_path, 0))
    assert seen is not None
    assert set(seen.doing) == {"é"}


def test_no_place_to_read(tmp_path: Path) -> None:
    assert read_place(tmp_path / "rank-0.place") is None
    (tmp_path / "rank-0.place").write_bytes(b"")
    assert read_place(tmp_path / "rank-0.place") is None
    (tmp_path / "rank-0.place").write_bytes(bytes(200))
    assert read_place(tmp_path / "rank-0.place") is None


def test_nowhere_remembers_too() -> None:
    place = Place.nowhere()
    place.at(4, "evaluate")
    assert (place.step, place.doing) == (4, "evaluate")


def test_a_place_can_move_to_a_folder(tmp_path: Path) -> None:
    place = Place.nowhere(attempt=1)
    place.at(4, "evaluate")
    place.move_to(tmp_path / "logs", 0)
    assert read_place(place_file(tmp_path / "logs", 0)) == Seen(os.getpid(), 1, 4, "evaluate", 0)


def test_places_in_words() -> None:
    assert describe(57, "backward") == " at step 57 (backward)"
    assert describe(-1, "start-up") == " in start-up"
