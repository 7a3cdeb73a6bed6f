"""Each cause is tried twice: with all elements recorded, and with sketches of all matrices."""

import pytest

from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.recorder import sketches


@pytest.fixture(params=["elements", "sketches"], autouse=True)
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "elements":
        return
    monkeypatch.setattr(sketches, "_LEAST_BLOCK", 2)
    monkeypatch.setattr(sketches, "_LEAST_BLOCKS", 1)
    monkeypatch.setattr(sketches, "_MOST_SLOTS", 2.0)
    read = RecordedRun.__init__

    def read_as_sketches(run: RecordedRun, *arguments: object) -> None:
        read(run, *arguments)  # type: ignore[arg-type]
        run.sketch_above = 0

    monkeypatch.setattr(RecordedRun, "__init__", read_as_sketches)
