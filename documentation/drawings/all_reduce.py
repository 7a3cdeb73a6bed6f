"""Draws the all-reduce schedules of `meshwright.collectives.schedules`: which chunks of which rank have been added up
after each round, and which rank has sent to which."""

from documentation.drawings.canvas import PALETTE, Canvas
from meshwright.collectives.schedules.builders import build
from meshwright.collectives.schedules.schedule import Schedule

_CHUNK, _CELL_HEIGHT, _GAP, _ROW = 12, 30, 34, 58
_LEFT, _TOP = 78, 74


def sums_after_rounds(schedule: Schedule) -> list[list[list[frozenset[int]]]]:
    """For each round, from the start on, the ranks whose values are in each chunk of each rank."""
    state = [[frozenset({rank})] * schedule.chunks for rank in range(schedule.ranks)]
    states = [[list(chunks) for chunks in state]]
    for sends in schedule.rounds:
        before = states[-1]
        after = [list(chunks) for chunks in before]
        for send in sends:
            sent = before[send.source][send.chunk]
            held = after[send.target][send.chunk]
            after[send.target][send.chunk] = sent | held if send.operation == "add" else sent
        states.append(after)
    return states


def draw_schedule(name: str, nodes: tuple[int, ...]) -> Canvas:
    """One column for each round, one row for each rank. The height of a bar is the number of ranks whose values a chunk
    has; arrows are messages."""
    ranks = sum(nodes)
    schedule = build(name, ranks, nodes)
    states = sums_after_rounds(schedule)
    cell = max(schedule.chunks * _CHUNK, 48)
    width = _LEFT + len(states) * (cell + _GAP)
    height = _TOP + ranks * _ROW + 20
    title = f"{name}: {ranks} ranks, {schedule.chunks} chunks, {len(schedule.rounds)} rounds"
    canvas = Canvas(max(width, 640), height, title)
    canvas.text(16, 26, title, size=15, bold=True)
    canvas.text(
        16, 46, "A bar shows how many ranks' values a chunk has; a full, dark bar is the sum of all.", color="muted"
    )
    for rank in range(ranks):
        canvas.text(16, _TOP + rank * _ROW + _CELL_HEIGHT / 2 + 4, f"rank {rank}")
    for number, state in enumerate(states):
        x = _LEFT + number * (cell + _GAP)
        canvas.text(
            x + cell / 2, _TOP - 8, "start" if number == 0 else f"round {number}", color="muted", anchor="middle"
        )
        for rank, chunks in enumerate(state):
            _draw_chunks(canvas, x, _TOP + rank * _ROW, chunks, ranks)
    for number, sends in enumerate(schedule.rounds):
        begin = _LEFT + number * (cell + _GAP) + cell + 3
        for source, target in sorted({(send.source, send.target) for send in sends}):
            ends = [(begin, _row_middle(source)), (begin + _GAP - 6, _row_middle(target))]
            canvas.line(ends, "muted", width=1.2, arrow=True)
    return canvas


def _row_middle(rank: int) -> float:
    return _TOP + rank * _ROW + _CELL_HEIGHT / 2


def _draw_chunks(canvas: Canvas, x: float, y: float, chunks: list[frozenset[int]], ranks: int) -> None:
    for number, ranks_in_it in enumerate(chunks):
        left = x + number * _CHUNK
        full = len(ranks_in_it) == ranks
        canvas.box(left, y, _CHUNK - 2, _CELL_HEIGHT, "empty")
        height = _CELL_HEIGHT * len(ranks_in_it) / ranks
        canvas.box(left, y + _CELL_HEIGHT - height, _CHUNK - 2, height, "blue" if full else "sky")


def costs(name: str, ranks: int) -> tuple[int, float]:
    """The rounds of a schedule, and the tensor sizes that the busiest rank sends."""
    nodes = (ranks // 2, ranks // 2) if name == "two_level" else (ranks,)
    schedule = build(name, ranks, nodes)
    sent = [0] * ranks
    for sends in schedule.rounds:
        for send in sends:
            sent[send.source] += 1
    return len(schedule.rounds), max(sent) / schedule.chunks


def draw_costs() -> Canvas:
    """Rounds and bytes of the algorithms, counted in their schedules for 2 to 64 ranks."""
    names, sizes = ("ring", "halving_doubling", "tree", "two_level"), (2, 4, 8, 16, 32, 64)
    canvas = Canvas(760, 300, "Rounds and bytes of the all-reduce algorithms, counted in their schedules")
    canvas.text(16, 26, "Counted in the schedules, for 2 to 64 ranks", size=15, bold=True)
    panels = (("rounds, which cost latency", 0, 130.0), ("tensor sizes that the busiest rank sends", 1, 3.0))
    for panel, (label, index, top) in enumerate(panels):
        x, y, width, height = 56 + panel * 370, 70, 280, 160
        canvas.text(x, y - 14, label, color="muted")
        for tick in range(5):
            value = top * tick / 4
            level = y + height - height * tick / 4
            canvas.line([(x, level), (x + width, level)], "line", width=0.7)
            canvas.text(x - 8, level + 4, f"{value:g}", size=11, color="muted", anchor="end")
        for position, ranks in enumerate(sizes):
            canvas.text(x + position * width / 5, y + height + 18, str(ranks), size=11, color="muted", anchor="middle")
        canvas.text(x + width / 2, y + height + 36, "ranks", size=11, color="muted", anchor="middle")
        for number, name in enumerate(names):
            values = [costs(name, ranks)[index] for ranks in sizes]
            points = [(x + p * width / 5, y + height - height * v / top) for p, v in enumerate(values)]
            canvas.line(points, PALETTE[number], width=2, dashed=name == "two_level")
    for number, name in enumerate(names):
        canvas.line(
            [(150 + number * 140, 284), (174 + number * 140, 284)], PALETTE[number], width=3, dashed=number == 3
        )
        canvas.text(180 + number * 140, 288, name, size=12)
    return canvas
