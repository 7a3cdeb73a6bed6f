"""Draws the picture of the README: a model and machines become plans, a proof and a run."""

from documentation.drawings.canvas import PALETTE, Canvas, Color
from meshwright.collectives.schedules.builders import build
from meshwright.simulator.pipeline.order import pipeline_order
from meshwright.simulator.pipeline.timeline import timeline

_PANELS = (
    ("1  plan", "ranked plans, with time", "and memory of each"),
    ("2  prove", "every gradient and weight", "compared with one device"),
    ("3  train", "on PyTorch's own engine;", "restarts go on"),
)
_WIDTH, _TOP, _HEIGHT = 210, 70, 230


def draw_overview() -> Canvas:
    canvas = Canvas(960, 330, "A model and machines become plans, a proof and a run")
    canvas.text(24, 40, "meshwright", size=20, bold=True)
    canvas.text(172, 40, "plan, prove and train any PyTorch model in parallel", size=14, color="muted")
    _draw_inputs(canvas)
    for number, (name, first, second) in enumerate(_PANELS):
        x = 210 + number * (_WIDTH + 36)
        canvas.box(x, _TOP, _WIDTH, _HEIGHT, "empty", stroke="line", radius=8)
        canvas.text(x + 14, _TOP + 28, name, size=16, bold=True)
        canvas.text(x + 14, _TOP + 196, first, color="muted")
        canvas.text(x + 14, _TOP + 213, second, color="muted")
        canvas.line([(x - 32, _TOP + 110), (x - 6, _TOP + 110)], arrow=True, width=2)
        (_draw_plans, _draw_proof, _draw_run)[number](canvas, x + 14, _TOP + 46)
    return canvas


def _draw_inputs(canvas: Canvas) -> None:
    canvas.box(24, _TOP, 148, 104, "empty", stroke="line", radius=8)
    canvas.text(38, _TOP + 24, "your model", bold=True)
    for layer in range(6):
        canvas.box(38 + layer * 20, _TOP + 42, 14, 46, "blue", radius=3, opacity=0.45 + 0.1 * layer)
    canvas.box(24, _TOP + 126, 148, 104, "empty", stroke="line", radius=8)
    canvas.text(38, _TOP + 150, "your machines", bold=True)
    for device in range(8):
        canvas.box(38 + device % 4 * 30, _TOP + 164 + device // 4 * 28, 22, 20, "green", radius=3)


def _draw_plans(canvas: Canvas, x: float, y: float) -> None:
    plans: tuple[tuple[str, float, Color], ...] = (
        ("shard 4 × tensor 2", 62, "blue"),
        ("replicate 8", 84, "sky"),
        ("pipeline 4 × shard 2", 108, "sky"),
        ("tensor 8", 140, "sky"),
        ("replicate 8, fp32", 0, "empty"),
    )
    for number, (words, length, color) in enumerate(plans):
        top = y + number * 27
        canvas.text(x, top + 10, words, size=10.5)
        if length:
            canvas.box(x, top + 14, length, 7, color, radius=3)
        else:
            canvas.text(x, top + 22, "rejected: does not fit", size=10, color="orange")


def _draw_proof(canvas: Canvas, x: float, y: float) -> None:
    canvas.text(x, y + 8, "plan", size=10.5, color="muted")
    canvas.text(x + 106, y + 8, "one device", size=10.5, color="muted")
    for row in range(5):
        top = y + 18 + row * 23
        for column in range(4):
            canvas.box(x + column * 18, top, 15, 15, PALETTE[column], radius=2)
        canvas.text(x + 90, top + 13, "=", size=15, anchor="middle", bold=True, color="green")
        canvas.box(x + 108, top, 69, 15, "muted", radius=2)


def _draw_run(canvas: Canvas, x: float, y: float) -> None:
    """The 1F1B schedule of four ranks, and the messages of a ring's first round."""
    line = timeline(pipeline_order("1f1b", 4, 1, 6), lambda a: 2.0 if a.kind == "backward" else 1.0, lambda s, t: 0.0)
    scale = 182 / line.span_s
    for event in line.events():
        width = (event.end_s - event.start_s) * scale
        color = "orange" if event.kind == "backward" else "blue"
        canvas.box(x + event.start_s * scale, y + event.rank * 15, width - 0.8, 11, color, radius=1)
    for rank in range(4):
        canvas.box(x + 6 + rank * 48, y + 78, 30, 30, "green", radius=6)
        canvas.text(x + 21 + rank * 48, y + 97, str(rank), anchor="middle", color="on_color", bold=True)
    for send in build("ring", 4, (4,)).rounds[0]:
        begin, end = x + 21 + send.source * 48, x + 21 + send.target * 48
        drop = 14 if abs(send.source - send.target) == 1 else 26
        canvas.line(
            [(begin + 4, y + 110), (begin + 4, y + 110 + drop), (end - 4, y + 110 + drop), (end - 4, y + 112)],
            arrow=True,
        )
