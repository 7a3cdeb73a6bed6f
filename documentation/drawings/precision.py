"""Draws the number formats: their bits, and the range between their smallest and largest numbers, from torch.finfo."""

import math

import torch

from documentation.drawings.canvas import Canvas

_FORMATS = {  # name: exponent bits, mantissa bits, torch's type (tf32 has the range of fp32)
    "fp32": (8, 23, torch.float32),
    "tf32": (8, 10, torch.float32),
    "bf16": (8, 7, torch.bfloat16),
    "fp16": (5, 10, torch.float16),
    "fp8 e5m2": (5, 2, torch.float8_e5m2),
    "fp8 e4m3": (4, 3, torch.float8_e4m3fn),
}


def draw_formats() -> Canvas:
    canvas = Canvas(780, 330, "The number formats: bits and range")
    canvas.text(16, 28, "Bits of the formats, and the range of their normal numbers", size=15, bold=True)
    for number, (name, (exponent, mantissa, dtype)) in enumerate(_FORMATS.items()):
        y = 56 + number * 38
        canvas.text(16, y + 16, name, bold=True)
        x = 90.0
        for bits, color in ((1, "muted"), (exponent, "orange"), (mantissa, "blue")):
            for _ in range(bits):
                canvas.box(x, y, 8, 22, color, radius=1)
                x += 9
        _draw_range(canvas, y, torch.finfo(dtype))
    _draw_legend(canvas)
    return canvas


def _draw_range(canvas: Canvas, y: float, info: torch.finfo) -> None:
    left, scale = 400, 340 / 280  # powers of two from -140 to 140
    low, high = math.log2(info.smallest_normal), math.log2(info.max)
    canvas.box(left, y + 8, 340, 6, "empty", radius=3)
    canvas.box(left + (low + 140) * scale, y + 6, (high - low) * scale, 10, "green", radius=3)


def _draw_legend(canvas: Canvas) -> None:
    for x, color, words in ((90, "muted", "sign"), (150, "orange", "exponent"), (240, "blue", "mantissa")):
        canvas.box(x, 300, 12, 12, color)
        canvas.text(x + 18, 311, words)
    for exponent in (-120, -60, 0, 60, 120):
        canvas.text(400 + (exponent + 140) * 340 / 280, 311, f"2^{exponent}", size=11, color="muted", anchor="middle")
