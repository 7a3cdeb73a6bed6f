"""From what every rank is doing, the line that says which rank is stuck, where, and who waits for it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.processes.stall.record import RankRecord

_MOST_PLACES = 3  # ranks whose places are in the line; the report has all


def diagnose(records: Mapping[int, RankRecord], missing: Mapping[int, str]) -> str:
    """Returns one line. `missing` says of the ranks that did not answer what is known about them."""
    return (
        _mismatch(records)
        or _missing(records, missing)
        or _behind_by_steps(records)
        or _late_by_number(records)
        or _stuck(records)
        or _different_exchanges(records)
        or _same_exchange(records)
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2, 3`."""
    ordered = sorted(ranks)
    return f"rank {ordered[0]}" if len(ordered) == 1 else f"ranks {', '.join(map(str, ordered))}"


def _mismatch(records: Mapping[int, RankRecord]) -> str:
    """Collectives with the same number in the same group that are not the same on all ranks."""
    for record in records.values():
        for call in record.pending_calls:
            if call.is_point_to_point:
                continue
            calls = {rank: other.call(call.group, call.number) for rank, other in records.items()}
            sides: dict[str, list[int]] = defaultdict(list)
            for rank, theirs in calls.items():
                if theirs is not None:
                    sides[str(theirs)].append(rank)
            kinds = {kind for theirs in calls.values() if theirs is not None for kind in theirs.differences(call)}
            if not kinds:
                continue
            # The side with fewer ranks is probably the wrong one; of two ranks, the second is named first.
            (others, common), *_ = sorted(sides.items(), key=lambda side: (-len(side[1]), min(side[1])))
            wrong = [(text, ranks) for text, ranks in sides.items() if text != others]
            text = "; ".join(
                f"{name_ranks(ranks)} {_verb(ranks)} {text}{_where(records, ranks)}" for text, ranks in wrong
            )
            return (
                f"{text}, where {name_ranks(common)} {_verb(common)} {others}{_where(records, common)}, at step"
                f" {record.step}: the {' and '.join(sorted(kinds))} of collective {call.number} of this group must be"
                " the same on all ranks"
            )
    return ""


def _verb(ranks: Sequence[int]) -> str:
    return "calls" if len(ranks) == 1 else "call"


def _where(records: Mapping[int, RankRecord], ranks: Sequence[int]) -> str:
    place = records[ranks[0]].place
    return f" in {place}" if place else ""


def _missing(records: Mapping[int, RankRecord], missing: Mapping[int, str]) -> str:
    if not missing:
        return ""
    texts = [f"rank {rank} {text}" for rank, text in sorted(missing.items())]
    more = f" (and {len(texts) - _MOST_PLACES} more)" if len(texts) > _MOST_PLACES else ""
    waiting = [record for record in records.values() if record.exchange]
    waits = f"; {_wait_text(waiting)}" if waiting else ""
    return f"{', '.join(texts[:_MOST_PLACES])}{more}{waits}"


def _behind_by_steps(records: Mapping[int, RankRecord]) -> str:
    """All ranks wait, but some of them have made fewer steps."""
    last = max(record.step for record in records.values())
    behind = [record for record in records.values() if record.step < last]
    if not behind or not all(record.exchange for record in records.values()):
        return ""
    return _late_text(behind, [record for record in records.values() if record.step == last])


def _late_by_number(records: Mapping[int, RankRecord]) -> str:
    """A collective that some ranks have called, and others of the same group have not, by torch's own numbers."""
    for record in records.values():
        for call in record.pending_calls:
            if call.is_point_to_point or not record.exchange:
                continue
            members = [other for other in records.values() if any(c.group == call.group for c in other.calls)]
            late = [other for other in members if other.call(call.group, call.number) is None]
            inside = [other for other in members if other.call(call.group, call.number) is not None]
            if late:
                waiting = [other for other in inside if other.exchange]
                return _late_text(late, waiting or [record])
    return ""


def _stuck(records: Mapping[int, RankRecord]) -> str:
    stuck = [record for record in records.values() if not record.exchange]
    waiting = [record for record in records.values() if record.exchange]
    if not stuck:
        return ""
    if waiting:
        return _late_text(stuck, waiting)
    places = ", ".join(f"rank {record.rank} is in {_place(record)}" for record in stuck[:_MOST_PLACES])
    more = f" (and {len(stuck) - _MOST_PLACES} more)" if len(stuck) > _MOST_PLACES else ""
    return f"no rank makes progress, and none waits for another: {places}{more}"


def _different_exchanges(records: Mapping[int, RankRecord]) -> str:
    """All ranks wait, but not in the same exchange: those that are alone are named."""
    by_exchange: dict[tuple[str, int], list[RankRecord]] = defaultdict(list)
    for record in records.values():
        by_exchange[record.exchange, record.step].append(record)
    if len(by_exchange) < 2:
        return ""
    first, *others = sorted(by_exchange.values(), key=lambda group: (-len(group), group[0].rank))
    return _late_text([record for group in others for record in group], first)


def _same_exchange(records: Mapping[int, RankRecord]) -> str:
    record = next(iter(records.values()))
    return (
        f"all ranks wait in the {record.exchange} at step {record.step}: the connection between them, or a device, does"
        " not answer"
    )


def _late_text(late: Sequence[RankRecord], waiting: Sequence[RankRecord]) -> str:
    waiting = [_with_first_late_call(record, late) for record in waiting]
    first = min(waiting, key=lambda record: record.rank)
    have = "has" if len(late) == 1 else "have"
    late_ranks = name_ranks([record.rank for record in late])
    there = [record.rank for record in waiting if record.exchange == first.exchange]
    elsewhere = [record for record in waiting if record.exchange != first.exchange]
    texts = [
        f"{late_ranks} {have} not entered the {first.exchange}{_at_step(first)}",
        f"{name_ranks(there)} {'waits' if len(there) == 1 else 'wait'} there",
        *(f"rank {record.rank} waits in the {record.exchange}" for record in elsewhere[:_MOST_PLACES]),
        *(f"rank {record.rank} {_is_in(record, first)}" for record in late[:_MOST_PLACES]),
    ]
    more = f" (and {len(late) - _MOST_PLACES} more)" if len(late) > _MOST_PLACES else ""
    return f"{'; '.join(texts)}{more}"


def _with_first_late_call(record: RankRecord, late: Sequence[RankRecord]) -> RankRecord:
    """Returns the record of a rank that waits, with the name of the first collective that a late rank has not called,
    such as one of several buckets that are exchanged at the same time. Torch does not say in which one a rank fails."""
    for call in record.calls:
        if call.is_point_to_point or not call.name.startswith(record.exchange):
            continue
        numbers = [[theirs.number for theirs in other.calls if theirs.group == call.group] for other in late]
        if any(of_rank and call.number > max(of_rank) for of_rank in numbers):
            return replace(record, exchange=call.name)
    return record


def _is_in(record: RankRecord, other: RankRecord) -> str:
    step = _at_step(record) if record.step != other.step else ""
    return f"waits in the {record.exchange}{step}" if record.exchange else f"is in {_place(record)}{step}"


def _wait_text(waiting: Sequence[RankRecord]) -> str:
    first = min(waiting, key=lambda record: record.rank)
    there = [record.rank for record in waiting if record.exchange == first.exchange]
    return f"{name_ranks(there)} {'waits' if len(there) == 1 else 'wait'} in the {first.exchange}{_at_step(first)}"


def _at_step(record: RankRecord) -> str:
    return f" at step {record.step}" if record.step >= 0 else f" in {record.activity}"


def _place(record: RankRecord) -> str:
    return record.place or record.activity
