"""The loading benchmark: every row with its reference. No test depends on how fast this machine is."""

from pathlib import Path

import pytest

from meshwright.bench import loading


def test_pictures_are_compared_with_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "PICTURES", 16)
    pictures, cached, rows = loading.measure(2, (0,), 1000)
    assert (pictures.what, cached.what, rows.what) == ("pictures", "pictures, cached", "rows")
    assert cached.ratio is not None
    assert pictures.ratio is not None
    assert pictures.spread is not None
    assert pictures.spread[0] <= pictures.ratio <= pictures.spread[1]
    assert pictures.samples_per_s > 0
    assert rows.samples_per_s > 0
    first, second = loading.report_lines([pictures, rows])
    assert "torchvision" in first
    assert "2 rounds" in first
    assert second.startswith("rows, 0 workers")
