"""`own_copies`: weights of which ranks hold copies, and which these have made differently. `--start` would hide it."""

import torch

from meshwright.audit.causes.copies import copies_of
from meshwright.audit.evidence import Difference
from meshwright.audit.recorded_run import RecordedRun

_CLOSE = 1e-6  # of the largest element


def own_copies(run: RecordedRun) -> list[Difference]:
    """The weights whose copies differ between ranks before the first call of the model, where nothing has replaced the
    script's own values: they were drawn by each rank and not broadcast."""
    found = []
    for name in run.parameters:
        parts = run.parts(0, "own", name)
        if len(parts) < 2 or not parts[0].value.is_floating_point():
            continue
        largest = max((float(part.value.abs().max()) for part in parts if part.value.numel()), default=0.0)
        allowed = torch.tensor(_CLOSE * largest + 1e-30, dtype=torch.float64)
        groups = [copies.groups for copies in copies_of(parts, lambda region, allowed=allowed: allowed)]  # type: ignore[misc]
        differing = next((of_region for of_region in groups if len(of_region) > 1), None)
        if differing is not None:
            apart = (differing[1].value - differing[0].value).abs().max()
            ranks = tuple(sorted(rank for group in differing[1:] for rank in group.ranks))
            found.append(Difference(0, "start", name, float(apart) / (largest or 1.0), _CLOSE, ranks))
    return found
