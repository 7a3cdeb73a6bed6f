"""Draws the pipeline schedules of `meshwright.simulator.pipeline`: when each rank computes which microbatch. Forward
passes take one unit of time, backward passes two, transfers none."""

from documentation.drawings.canvas import Canvas, Color
from meshwright.simulator.pipeline.order import Action, pipeline_order
from meshwright.simulator.pipeline.timeline import Event, Timeline, timeline

RANKS, MICROBATCHES = 4, 8
_UNITS = {"forward": 1.0, "backward": 2.0, "input_backward": 1.0, "weight_backward": 1.0}
_COLORS: dict[str, Color] = {
    "forward": "blue",
    "backward": "orange",
    "input_backward": "orange",
    "weight_backward": "yellow",
}
_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "input_backward": "backward, gradients of inputs",
    "weight_backward": "backward, gradients of weights",
}
_UNIT, _ROW, _LEFT, _TOP = 17.0, 34, 76, 82


def schedule_timeline(schedule: str, stages_per_rank: int) -> Timeline:
    """The timeline of four ranks and eight microbatches. A rank with several stages holds as much of the model as one
    with a single stage, so each of its passes is shorter."""
    order = pipeline_order(schedule, RANKS, stages_per_rank, MICROBATCHES)

    def units(action: Action) -> float:
        return _UNITS[action.kind] / stages_per_rank

    return timeline(order, units, lambda source, target: 0.0)


def bubble(line: Timeline) -> float:
    """The share of the time in which the average rank computes nothing."""
    return sum(line.idle_s) / (line.span_s * len(line.idle_s))


def draw_schedule(schedule: str, stages_per_rank: int) -> Canvas:
    line = schedule_timeline(schedule, stages_per_rank)
    events = list(line.events())
    stages = "" if stages_per_rank == 1 else f", {stages_per_rank} stages a rank"
    title = f"{schedule}: {RANKS} ranks, {MICROBATCHES} microbatches{stages}"
    canvas = Canvas(_LEFT + 34 * _UNIT + 24, _TOP + RANKS * _ROW + 34, title)
    canvas.text(16, 26, title, size=15, bold=True)
    canvas.text(16, 48, f"idle: {bubble(line):.0%} of the time, {line.span_s:g} units long", color="muted")
    _draw_legend(canvas, sorted({event.kind for event in events}, key=list(_WORDS).index))
    for rank in range(RANKS):
        y = _TOP + rank * _ROW
        canvas.text(16, y + 18, f"rank {rank}")
        canvas.box(_LEFT, y, line.span_s * _UNIT, _ROW - 8, "empty", radius=0)
    for event in events:
        _draw_event(canvas, event, stages_per_rank)
    return canvas


def _draw_event(canvas: Canvas, event: Event, stages_per_rank: int) -> None:
    x, width = _LEFT + event.start_s * _UNIT, (event.end_s - event.start_s) * _UNIT
    y = _TOP + event.rank * _ROW
    later_stage = event.stage >= RANKS and stages_per_rank > 1
    canvas.box(x + 0.5, y, width - 1, _ROW - 8, _COLORS[event.kind], radius=1, opacity=0.6 if later_stage else 1)
    size = 11 if width > 12 else 7.5
    canvas.text(x + width / 2, y + 17, str(event.microbatch), size=size, anchor="middle", color="on_color", bold=True)


def _draw_legend(canvas: Canvas, kinds: list[str]) -> None:
    x, y = float(_LEFT), _TOP + RANKS * _ROW + 8
    for kind in kinds:
        canvas.box(x, y, 12, 12, _COLORS[kind])
        canvas.text(x + 18, y + 11, _WORDS[kind], size=12)
        x += 34 + 6.6 * len(_WORDS[kind])
    canvas.box(x, y, 12, 12, "empty", stroke="line")
    canvas.text(x + 18, y + 11, "idle", size=12)
