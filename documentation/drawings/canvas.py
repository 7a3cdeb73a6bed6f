"""`Canvas`: an SVG file with the colours of the drawings. They follow the reader's light or dark theme, and are those
that Okabe and Ito chose so that colour-blind readers can tell them apart."""

from collections.abc import Sequence
from html import escape

Color = str  # the name of a variable of the style sheet

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1d2733",
    "muted": "#5b6672",
    "line": "#c3ccd6",
    "empty": "#eef1f4",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "yellow": "#e69f00",
    "sky": "#56b4e9",
    "on_color": "#ffffff",
}
DARK = {
    **LIGHT,
    "paper": "#12161b",
    "ink": "#e6edf3",
    "muted": "#9aa7b4",
    "line": "#3b4652",
    "empty": "#1f262e",
    "blue": "#3a9ad9",
    "orange": "#f0883e",
    "green": "#2cbf97",
    "on_color": "#0b0e12",
}
PALETTE: tuple[Color, ...] = ("blue", "orange", "green", "pink", "yellow", "sky")


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colors.items())


_STYLE = (
    f"svg{{{_variables(LIGHT)}}}"
    f"@media (prefers-color-scheme: dark){{svg{{{_variables(DARK)}}}}}"
    "text{font-family:system-ui,'Segoe UI',Roboto,'Noto Sans','Noto Sans CJK SC',sans-serif;fill:var(--ink)}"
)


class Canvas:
    """Collects shapes, and writes them as one SVG file without scripts, fonts or links."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: Color = "empty",
        *,
        stroke: Color | None = None,
        radius: float = 2,
        opacity: float = 1,
    ) -> None:
        line = f' stroke="var(--{stroke})"' if stroke else ""
        faint = f' fill-opacity="{_number(opacity)}"' if opacity != 1 else ""
        self._shapes.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
            f' rx="{_number(radius)}" fill="var(--{fill})"{faint}{line}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        color: Color = "ink",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" text-anchor="{anchor}"{weight}'
            f' style="fill:var(--{color})">{escape(words)}</text>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        color: Color = "muted",
        *,
        width: float = 1.5,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="var(--{color})"'
            f' stroke-width="{_number(width)}"{dashes}{end}/>'
        )

    def svg(self) -> str:
        size = f"{_number(self.width)} {_number(self.height)}"
        width, height = size.split()
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"'
            ' orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="var(--muted)"/></marker></defs>'
        )
        return "\n".join(
            [
                '<svg xmlns="http://www.w3.org/2000/svg" role="img"'
                f' viewBox="0 0 {size}" width="{width}" height="{height}">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_STYLE}</style>",
                arrow,
                f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
