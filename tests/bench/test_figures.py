"""The derived figures are ratios of the seconds of steps."""

from meshwright.bench.figures import SpeedFigure, automatic_over_manual, efficiency, precision_gains, speedup, spread

FIGURES = [
    SpeedFigure("single device", 1, "fp32", 8.0),
    SpeedFigure("ring", 2, "fp32", 5.0),
    SpeedFigure("ring", 2, "bf16", 2.0),
    SpeedFigure("tree", 2, "bf16", 1.0),
    SpeedFigure("auto", 2, "bf16", 1.25),
]


def test_figures() -> None:
    assert efficiency(speedup(8.0, 5.0), 2) == 0.8
    assert precision_gains(FIGURES) == {"bf16": 2.5}
    assert automatic_over_manual(FIGURES, "auto") == {2: 0.8}
    assert automatic_over_manual(FIGURES, "auto", ("tree",)) == {2: 1.6}
    assert spread([1.0, 2.0, 4.0]) == 1.5
