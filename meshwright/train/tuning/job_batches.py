"""The batches with which steps of a job are timed."""

from dataclasses import replace
from itertools import islice
from typing import Any

from meshwright.job import Job
from meshwright.train.build import build_data, build_loading
from meshwright.train.session import Session

_BATCHES = 4  # that the measured steps take in turn


def first_batches(job: Job, session: Session, samples: int) -> list[Any]:
    """Returns the first batches of so many samples of the job's training set."""
    # Without workers, which a process that ends with its parent may not start.
    loading = replace(build_loading(job, session.world.device), workers=0)
    return list(islice(session.batches(build_data(job)[0], None, samples, loading), _BATCHES))
