"""Right trainings in each layout do not differ, so what the other tests find is what they plant."""

from pathlib import Path

import pytest

from meshwright.audit.causes.samples import explain_samples
from meshwright.audit.comparison.compare import compare_records
from tests.audit.causes.records import right_record


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("ranks", "layout", "same_samples"),
    [(2, "replicated", False), (4, "rows", False), (2, "tensor", True), (2, "experts", False)],
)
def test_a_right_training_does_not_differ(
    tmp_path: Path, ranks: int, layout: str, same_samples: bool, clips: bool
) -> None:
    reference = right_record(clips=clips).write(tmp_path / "reference")
    candidate = right_record(ranks, layout, same_samples, clips).write(tmp_path / "candidate")
    assert compare_records(reference, candidate, None).differences == []
    assert explain_samples(reference, candidate, 1) is None
