"""Draws how parameter servers update: a small simulation of three workers, of which the last takes twice as long."""

from dataclasses import dataclass

from documentation.drawings.canvas import PALETTE, Canvas

_BATCH_S = (1.0, 1.0, 2.0)  # what a batch takes each worker
_END, _UNIT, _ROW, _LEFT = 12.0, 44.0, 30, 100
_STALENESS = 1
MODES = ("synchronous", "asynchronous", "bounded")


@dataclass(frozen=True)
class Computed:
    """One batch of one worker, and the number of updates that others made meanwhile."""

    worker: int
    start: float
    end: float
    staleness: int


def simulate(mode: str) -> list[Computed]:
    """The batches until the drawing's end. `synchronous`: all start together when the slowest has ended. `bounded`:
    a worker that is more than one batch ahead of the slowest waits for it."""
    count = len(_BATCH_S)
    free, done, batches = [0.0] * count, [0] * count, list[tuple[int, float, float]]()
    while True:
        starts = dict(enumerate(free))
        if mode == "synchronous":
            starts = dict.fromkeys(starts, max(free))
        elif mode == "bounded":
            slowest = min(done)
            starts = {worker: start for worker, start in starts.items() if done[worker] - slowest <= _STALENESS}
        worker = min(starts, key=lambda number: (starts[number] + _BATCH_S[number], number))
        if mode == "synchronous":
            begin = max(free)
            if begin + max(_BATCH_S) > _END:
                break
            for number, duration in enumerate(_BATCH_S):
                batches.append((number, begin, begin + duration))
            free = [begin + max(_BATCH_S)] * count
            continue
        start = starts[worker]
        if mode == "bounded":  # a worker that waited starts when the slowest has ended its batch
            start = max(start, _time_of_batch(batches, done[worker] - _STALENESS, count))
        if start + _BATCH_S[worker] > _END:
            break
        batches.append((worker, start, start + _BATCH_S[worker]))
        free[worker], done[worker] = start + _BATCH_S[worker], done[worker] + 1
    return [Computed(*batch, _updates_during(batch, batches)) for batch in batches]


def _time_of_batch(batches: list[tuple[int, float, float]], number: int, workers: int) -> float:
    """When every worker has ended this many batches."""
    if number <= 0:
        return 0.0
    return max(sorted(end for who, _, end in batches if who == worker)[number - 1] for worker in range(workers))


def _updates_during(batch: tuple[int, float, float], batches: list[tuple[int, float, float]]) -> int:
    worker, start, end = batch
    return sum(other != worker and start < at <= end for other, _, at in batches)


def draw_servers() -> Canvas:
    canvas = Canvas(_LEFT + _END * _UNIT + 40, 470, "Three workers with parameter servers; the last is half as fast")
    canvas.text(16, 28, "Three workers; worker 2 takes twice as long for a batch", size=15, bold=True)
    words = "A number is the staleness of a batch: the updates of other workers that were applied meanwhile."
    canvas.text(16, 48, words, color="muted")
    for panel, mode in enumerate(MODES):
        y = 76 + panel * 130
        batches = simulate(mode)
        limit = f" (at most {_STALENESS} batch ahead)" if mode == "bounded" else ""
        canvas.text(16, y, f"{mode}{limit}: {len(batches)} batches", bold=True)
        for worker in range(len(_BATCH_S)):
            top = y + 12 + worker * _ROW
            canvas.text(16, top + 16, f"worker {worker}", size=11)
            canvas.box(_LEFT, top, _END * _UNIT, _ROW - 6, "empty", radius=0)
        for batch in batches:
            x, top = _LEFT + batch.start * _UNIT, y + 12 + batch.worker * _ROW
            width = (batch.end - batch.start) * _UNIT - 2
            canvas.box(x + 1, top, width, _ROW - 6, PALETTE[batch.worker])
            stale = "" if mode == "synchronous" else str(batch.staleness)
            canvas.text(x + width / 2, top + 16, stale, size=11, anchor="middle", color="on_color", bold=True)
    return canvas
