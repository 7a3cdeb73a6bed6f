"""Draws what each rank holds and trains on under each axis of a plan, and the whole mesh of a combined plan."""

from documentation.drawings.canvas import PALETTE, Canvas
from meshwright.plan_fields.groups import MESH_ORDER, Axes

_RANKS, _LAYERS = 4, 8
_CELL, _ROW = 16, 40
_WORDS = {
    "replicate": ("each rank has the whole model", "and its own samples"),
    "shard": ("each rank keeps a quarter of every", "layer, and its own samples"),
    "tensor": ("each rank computes a quarter of", "every layer, on the same samples"),
    "pipeline": ("each rank has a quarter of the", "layers; microbatches pass through"),
}


def draw_axes() -> Canvas:
    """Four panels: the parts of eight layers that four ranks hold, and their samples."""
    canvas = Canvas(800, 560, "What four ranks hold under each axis of a plan")
    canvas.text(16, 28, "Eight layers (columns) on four ranks (rows), under each axis", size=15, bold=True)
    canvas.text(
        16, 48, "Filled: what a rank holds. The colours at the left are the samples that it trains on.", color="muted"
    )
    for number, axis in enumerate(_WORDS):
        _draw_axis(canvas, 24 + 392 * (number % 2), 78 + 240 * (number // 2), axis)
    return canvas


def _draw_axis(canvas: Canvas, x: float, y: float, axis: str) -> None:
    canvas.text(x, y, axis, size=14, bold=True)
    first, second = _WORDS[axis]
    canvas.text(x + 80, y, f"{first}", color="muted")
    canvas.text(x + 80, y + 16, second, color="muted")
    for rank in range(_RANKS):
        top = y + 32 + rank * _ROW
        canvas.text(x, top + 21, f"rank {rank}", size=11)
        own_samples = axis in ("replicate", "shard")
        canvas.box(x + 48, top, 12, _ROW - 8, PALETTE[rank] if own_samples else "muted", radius=3)
        for layer in range(_LAYERS):
            _draw_part(canvas, x + 76 + layer * (_CELL + 16), top, axis, rank, layer)


def _draw_part(canvas: Canvas, x: float, y: float, axis: str, rank: int, layer: int) -> None:
    width, height = _CELL + 8, _ROW - 8
    canvas.box(x, y, width, height, "empty", stroke="line")
    if axis == "replicate":
        canvas.box(x, y, width, height, "blue")
    elif axis == "pipeline":
        if layer * _RANKS // _LAYERS == rank:
            canvas.box(x, y, width, height, "blue")
    elif axis == "shard":
        canvas.box(x, y + rank * height / _RANKS, width, height / _RANKS, "blue", radius=0)
    else:
        canvas.box(x + rank * width / _RANKS, y, width / _RANKS, height, "green", radius=0)


def draw_mesh() -> Canvas:
    """The ranks of `pipeline 2 × replicate 2 × tensor 2`, numbered as `parallel/mesh.py` does: the last axis of
    MESH_ORDER varies fastest."""
    axes = Axes(pipeline=2, replicate=2, tensor=2)
    sizes = {name: getattr(axes, name) for name in MESH_ORDER if getattr(axes, name) > 1}
    names = list(sizes)
    canvas = Canvas(640, 240, "The mesh of pipeline 2 × replicate 2 × tensor 2")
    canvas.text(16, 28, " × ".join(f"{name} {size}" for name, size in sizes.items()), size=15, bold=True)
    canvas.text(
        16, 48, "Ranks next to each other are on the innermost axis, which exchanges the most bytes.", color="muted"
    )
    for rank in range(8):
        outer, middle, inner = rank // 4, rank // 2 % 2, rank % 2
        x, y = 130 + outer * 260 + inner * 100, 86 + middle * 70
        canvas.box(x, y, 84, 48, PALETTE[outer], radius=6)
        canvas.text(x + 42, y + 29, f"rank {rank}", anchor="middle", color="on_color", bold=True)
    for outer in range(2):
        canvas.text(130 + outer * 260 + 92, 76, f"{names[0]} stage {outer}", anchor="middle", color="muted")
    for middle in range(2):
        canvas.text(16, 116 + middle * 70, f"{names[1]} {middle}", color="muted")
    canvas.text(222, 226, f"{names[2]} 0 and 1", anchor="middle", color="muted")
    canvas.text(482, 226, f"{names[2]} 0 and 1", anchor="middle", color="muted")
    return canvas
