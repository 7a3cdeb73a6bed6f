"""The names of all drawings, and the function that draws each."""

from collections.abc import Callable
from functools import partial

from documentation.drawings import all_reduce, pipelines
from documentation.drawings.axes import draw_axes, draw_mesh
from documentation.drawings.canvas import Canvas
from documentation.drawings.overview import draw_overview
from documentation.drawings.precision import draw_formats
from documentation.drawings.servers import draw_servers

PIPELINES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 2, "zbv": 2}  # stages of a rank
DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "overview": draw_overview,
    "axes": draw_axes,
    "mesh": draw_mesh,
    "ring": partial(all_reduce.draw_schedule, "ring", (4,)),
    "halving_doubling": partial(all_reduce.draw_schedule, "halving_doubling", (4,)),
    "tree": partial(all_reduce.draw_schedule, "tree", (4,)),
    "two_level": partial(all_reduce.draw_schedule, "two_level", (2, 2)),
    "all_reduce_costs": all_reduce.draw_costs,
    "servers": draw_servers,
    "formats": draw_formats,
    **{name: partial(pipelines.draw_schedule, name, stages) for name, stages in PIPELINES.items()},
}


def drawing_files() -> dict[str, str]:
    """The text of each drawing, by its path in `docs/`."""
    return {f"drawings/{name}.svg": draw().svg() for name, draw in DRAWINGS.items()}
