"""`EarlyStopping`: a callback that ends a run whose metric does not get better any more."""

from collections.abc import Mapping
from typing import Literal

from meshwright.errors import InputError, did_you_mean
from meshwright.train.callbacks.run import CallbackRun
from meshwright.train.output.checkpoints import is_lower_better


class EarlyStopping:
    """Ends the run when `metric` was not better than its best value in the last `patience` evaluations.

    `better` says whether `lower` or `higher` values are better; None means lower for losses, errors and perplexities,
    and higher otherwise. It keeps nothing in memory: each time, it reads the evaluations of the run from metrics.jsonl,
    from which a resumed run has removed the steps that it repeats.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, better: Literal["lower", "higher"] | None = None
    ) -> None:
        if type(patience) is not int or patience < 1:
            raise InputError(f"EarlyStopping: patience is {patience!r}: write a number of evaluations, at least 1")
        if better not in ("lower", "higher", None):
            raise InputError(f"EarlyStopping: better is {better!r}: write lower or higher, or leave it out")
        self._metric = metric
        self._patience = patience
        self._lower = is_lower_better(metric, better)

    def begin(self, run: CallbackRun) -> None:
        known = ["loss", *run.job["metrics"]]
        if run.job["data"]["eval"] is None:
            raise InputError("EarlyStopping: data.eval is missing: name the data set to measure on")
        if self._metric not in known:
            raise InputError(
                f"EarlyStopping: metric is {self._metric!r}, but metrics has no metric of this name"
                f"{did_you_mean(self._metric, known)}"
            )

    def evaluation(self, run: CallbackRun, metrics: Mapping[str, float]) -> None:
        best: float | None = None
        best_step = since_best = 0
        for entry in run.evaluations():
            value = entry.get(self._metric)
            since_best += 1
            if value is not None and (best is None or (value < best if self._lower else value > best)):
                best, best_step, since_best = value, entry["step"], 0
        if since_best >= self._patience:
            described = "never a finite number" if best is None else f"best at step {best_step} ({best:.6g})"
            run.stop(f"{self._metric} was {described}, {since_best} evaluations ago")
