"""How long a job trains: into how many global batches an epoch is divided, and how many steps the job has."""

from dataclasses import replace
from typing import Any

from meshwright.data.loading import LoadingOptions
from meshwright.data.mapped import make_partition
from meshwright.data.part_balance import describe_parts, labels_of
from meshwright.data.partition import Partition, PartPartition
from meshwright.job import Job
from meshwright.train.step_runner import StepRunner


class JobLength:
    """The length of a job that `session` trains on `train_set`."""

    def __init__(self, job: Job, session: StepRunner, train_set: Any, loading: LoadingOptions) -> None:
        self._job = job
        self._session = session
        self._train_set = train_set
        self._loading = loading

    def total_steps(self) -> int | None:
        """The number of steps of the whole job. None if it is unknown, because the job counts epochs of a stream."""
        train = self._job.train
        if train.epochs is None or not hasattr(self._train_set, "__len__"):
            return train.steps
        per_epoch = self._partition().batches
        return min(train.epochs * per_epoch, train.steps or train.epochs * per_epoch)

    def at_end(self) -> bool:
        """Whether the session has made all steps of the job."""
        train = self._job.train
        if train.steps is not None and self._session.steps >= train.steps:
            return True
        return train.epochs is not None and self._session.position[0] >= train.epochs

    def describe_data_parts(self) -> list[str]:
        """Lines that say how evenly the samples are distributed over the fixed parts of the data set. Empty unless
        `data.partition` is `sample`."""
        if not hasattr(self._train_set, "__len__"):
            return []
        partition = self._partition()
        return describe_parts(partition, labels_of(self._train_set)) if isinstance(partition, PartPartition) else []

    def _partition(self) -> Partition:
        """How the data set is divided into batches and among ranks."""
        train, size, ranks = self._job.train, len(self._train_set), self._session.plan.data_ranks
        loading = replace(self._loading, parts=self._session.parts or self._loading.parts)
        return make_partition(size, train.global_batch, ranks, loading, train.seed, self._job.data.drop_last)
