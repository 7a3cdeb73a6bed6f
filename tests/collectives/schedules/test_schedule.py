"""A schedule whose result depends on the order of its sends is refused; chunks cover a tensor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.schedules.schedule import Round, Schedule, Send, bounds
from meshwright.errors import InputError


@pytest.mark.parametrize(
    ("sends", "message"),
    [
        ((Send(0, 3, 0, "add"),), "ranks 0 to 2"),
        ((Send(-1, 1, 0, "add"),), "ranks 0 to 2"),
        ((Send(0, 1, 2, "copy"),), "chunks 0 to 1"),
        ((Send(1, 1, 0, "copy"),), "to itself"),
        ((Send(0, 1, 0, "max"),), "has an operation other than copy and add"),  # type: ignore[arg-type]
        ((Send(0, 2, 1, "add"), Send(1, 2, 1, "add")), "chunk 1 of rank 2 is written twice"),
        ((Send(0, 1, 0, "add"), Send(1, 2, 0, "copy")), "chunk 0 of rank 1 is read and written"),
    ],
)
def test_an_ambiguous_or_invalid_round_is_refused(sends: Round, message: str) -> None:
    with pytest.raises(ValueError, match=f"strange, round 1: .*{message}"):
        Schedule("strange", 3, 2, ((), sends))


def test_a_round_may_read_a_chunk_twice_and_write_its_neighbor() -> None:
    sends = (Send(0, 1, 0, "copy"), Send(0, 2, 0, "copy"), Send(1, 0, 1, "add"))
    assert Schedule("fine", 3, 2, (sends,)).rounds == (sends,)


def test_a_schedule_without_ranks_or_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        Schedule("nobody", 0, 1, ())
    with pytest.raises(ValueError, match="0 chunks"):
        Schedule("nothing", 1, 0, ())


@given(chunks=st.integers(1, 70), size=st.integers(0, 1000))
def test_chunks_cover_the_tensor_evenly(chunks: int, size: int) -> None:
    chunk_bounds = bounds(Schedule("any", 1, chunks, ()), size)
    assert [begin for begin, _ in chunk_bounds] == [0, *(end for _, end in chunk_bounds[:-1])]
    assert chunk_bounds[-1][1] == size
    lengths = [end - begin for begin, end in chunk_bounds]
    assert max(lengths) - min(lengths) <= 1


def test_builders_are_found_by_the_names_of_plans() -> None:
    assert [build(name, 6, [4, 2]).name for name in SCHEDULES] == [
        "ring",
        "double tree",
        "halving-doubling",
        "two-level",
    ]
    with pytest.raises(InputError, match="did you mean 'ring'"):
        build("rings", 4, [4])
    with pytest.raises(InputError, match=r"\[4, 2\] ranks have 6 ranks, but 8"):
        build("two_level", 8, [4, 2])
