"""`RankRecord`: what one rank is doing when progress stops, as it tells the other ranks."""

import json
import sys
import threading
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.processes.heartbeat import ExchangeNames, Heartbeat
from meshwright.processes.stall.flight_recorder import CollectiveCall, parse_calls, plain_calls, recorded_calls
from meshwright.processes.stall.position import find_position, format_stack, stack_of, stack_of_error


@dataclass(frozen=True)
class RankRecord:
    """What a rank is doing. `exchange` is the exchange with other ranks that it waits in, in words; empty if it does
    not wait. `place` is the function that it is in. `calls` are the last collectives that torch has recorded. `stacks`
    are the Python stacks of its threads."""

    rank: int
    step: int
    activity: str
    module: str
    exchange: str
    place: str
    calls: tuple[CollectiveCall, ...]
    stacks: str

    @property
    def pending_calls(self) -> list[CollectiveCall]:
        return [call for call in self.calls if not call.is_done]

    def call(self, group: str, number: int) -> CollectiveCall | None:
        same = (call for call in self.calls if (call.group, call.number) == (group, number))
        return next((call for call in same if not call.is_point_to_point), None)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "calls": plain_calls(self.calls)})

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankRecord":
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "calls": parse_calls(values["calls"])})


def record_of_thread(rank: int, heartbeat: Heartbeat, thread: int, error: BaseException | None = None) -> RankRecord:
    """Returns what this rank is doing: where the thread with this number is, or where it raised `error`."""
    frames = sys._current_frames()
    stack = stack_of(frames.get(thread)) if error is None else stack_of_error(innermost(error).__traceback__)
    position = find_position(stack)
    names = heartbeat.exchanges
    calls = tuple(_with_name(call, names) for call in recorded_calls())
    if error is not None:
        calls = _with_failed_call(calls, position.operation)
    pending = [call for call in calls if not call.is_done]
    waiting = names.waiting() if names is not None else None
    is_waiting = bool(waiting or position.operation or (heartbeat.device == "cuda" and pending))
    exchange = ""
    if is_waiting:
        exchange = next((call.name for call in pending if call.name), None) or waiting or position.exchange
        exchange = exchange or f"{_called_here(pending, position.operation)} called in {position.place}"
    trains = format_stack(stack) if error is None else _format_error(error)
    stacks = f"the thread that trains:\n{trains}" + "".join(
        f"{name}:\n{format_stack(stack_of(frames[number]))}"
        for number, name in _other_threads(thread)
        if number in frames
    )
    return RankRecord(
        rank, heartbeat.step, heartbeat.activity, position.module, exchange, position.place, calls, stacks
    )


def _called_here(pending: list[CollectiveCall], operation: str) -> CollectiveCall | str:
    """Returns the collective that the thread waits in: the last one of this operation. Earlier ones may be pending that
    it has started and does not wait for yet."""
    of_operation = [call for call in pending if call.operation == operation]
    if of_operation:
        return of_operation[-1]
    return pending[0] if pending else operation


def _with_failed_call(calls: tuple[CollectiveCall, ...], operation: str) -> tuple[CollectiveCall, ...]:
    """Returns the calls with the last one of this operation as not done: torch counts a collective that has failed as
    done."""
    failed = max((number for number, call in enumerate(calls) if call.operation == operation), default=None)
    return tuple(replace(call, is_done=False) if number == failed else call for number, call in enumerate(calls))


def innermost(error: BaseException) -> BaseException:
    """Returns the first exception in the chain of causes that led to this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _with_name(call: CollectiveCall, names: ExchangeNames | None) -> CollectiveCall:
    """Returns the call with what it exchanges, if the model knows that, such as a bucket of gradients."""
    name = names.name(call.operation, call.elements) if names is not None else None
    return replace(call, name=name) if name else call


def _format_error(error: BaseException) -> str:
    """Returns the stacks of an error and of those that led to it, which may come from other threads."""
    cause = f"caused by:\n{_format_error(error.__cause__)}" if error.__cause__ is not None else ""
    return format_stack(stack_of_error(error.__traceback__)) + cause


def _other_threads(thread: int) -> list[tuple[int, str]]:
    current = threading.get_ident()
    return [
        (other.ident, f"thread {other.name}")
        for other in threading.enumerate()
        if other.ident is not None and other.ident not in (thread, current)
    ]
