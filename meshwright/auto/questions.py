"""Questions about a model, from Python: `mw.sweep`, `mw.largest_batch`, `mw.best_cluster` and `mw.compare_plans`
(`mw.diagnose` is in diagnosis.py). Each returns an `Answer` with the same values as the JSON of the command line."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from meshwright.auto.inputs import question_inputs
from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.measured_search import measured_search, with_measured_operators
from meshwright.planner.questions.answer import Answer
from meshwright.planner.questions.differences import explain_difference
from meshwright.planner.questions.goals import Goal, Limits, priced_clusters
from meshwright.planner.questions.goals import best_cluster as find_best_cluster
from meshwright.planner.questions.largest_batch import answer_largest_batch
from meshwright.planner.questions.sweep import sweep as plan_sweep
from meshwright.planner.questions.variations import read_sweep


def sweep(
    model: nn.Module,
    sample_batch: Any,
    over: str,
    *,
    cluster: str | Cluster,
    global_batch: int,
    what_if: Sequence[str] = (),
    **options: Any,
) -> Answer:
    """Returns the best plan for each value of `over`, such as `devices=8..1024`, `link=200G,400G` or `batch=64..1024`,
    with its time, efficiency and memory. `what_if` repeats it with changes of the cluster, such as `link=2x`. `options`
    are those of `best_plan`: `loss`, `optimizer`, `allow`, `target`, `fix`, `avoid`, `max_memory`.

    >>> import torch, meshwright as mw
    >>> batch = (torch.randn(8, 20), torch.zeros(8, dtype=torch.long))
    >>> loss = torch.nn.functional.cross_entropy
    >>> answer = mw.sweep(torch.nn.Linear(20, 5), batch, "devices=1..4", cluster="4xH100", global_batch=64, loss=loss)
    >>> [row["devices"] for row in answer.values["rows"]]
    [1, 2, 4]
    """
    name, values = read_sweep(over)
    if name == "sequence":
        raise InputError("sweep: the tokens of a sample are those of sample_batch: call it once for each length")
    inputs, profiles = question_inputs(model, sample_batch, cluster, global_batch=global_batch, **options)
    inputs_on = partial(question_inputs, model, sample_batch, global_batch=global_batch, **options)
    return plan_sweep(name, values, inputs, profiles, what_if, inputs_on=inputs_on)


def largest_batch(
    model: nn.Module, sample_batch: Any, *, cluster: str | Cluster, global_batch: int, **options: Any
) -> Answer:
    """Returns the largest batch that fits under each plan that a search for `global_batch` samples simulates.

    >>> import torch, meshwright as mw
    >>> model, loss = torch.nn.Linear(20, 5), torch.nn.functional.cross_entropy
    >>> batch = (torch.randn(8, 20), torch.zeros(8, dtype=torch.long))
    >>> answer = mw.largest_batch(model, batch, cluster="H100", global_batch=64, loss=loss)
    >>> answer.values["rows"][0]["global_batch"] > 1000
    True
    """
    inputs, profiles = question_inputs(model, sample_batch, cluster, global_batch=global_batch, **options)
    return answer_largest_batch(*measured_search(inputs, profiles), profiles)


def best_cluster(
    model: nn.Module,
    sample_batch: Any,
    prices: Mapping[str, float | None],
    *,
    goal: Goal,
    steps: int,
    global_batch: int,
    deadline_s: float | None = None,
    budget: float | None = None,
    **options: Any,
) -> Answer:
    """Returns which of the clusters, given with their prices of an hour, trains so many steps in the shortest `time`,
    for the lowest `cost` or with the fewest `devices`, within the deadline and the budget.

    >>> import torch, meshwright as mw
    >>> model, loss = torch.nn.Linear(20, 5), torch.nn.functional.cross_entropy
    >>> batch = (torch.randn(8, 20), torch.zeros(8, dtype=torch.long))
    >>> prices = {"A100": 2.0, "2xH100": 6.0}
    >>> answer = mw.best_cluster(model, batch, prices, goal="devices", steps=100, global_batch=64, loss=loss)
    >>> answer.values["best"]["cluster"]
    'A100'
    """
    clusters = priced_clusters(prices, "best_cluster")
    inputs, profiles = question_inputs(model, sample_batch, clusters[0], global_batch=global_batch, **options)
    inputs_on = partial(question_inputs, model, sample_batch, global_batch=global_batch, **options)
    return find_best_cluster(goal, clusters, steps, Limits(deadline_s, budget), inputs, profiles, inputs_on)


def compare_plans(
    model: nn.Module,
    sample_batch: Any,
    first: Plan,
    second: Plan,
    *,
    cluster: str | Cluster,
    global_batch: int,
    **options: Any,
) -> Answer:
    """Returns why one of the plans is predicted to be faster than the other, term by term.

    >>> import torch, meshwright as mw
    >>> model, loss = torch.nn.Linear(20, 5), torch.nn.functional.cross_entropy
    >>> batch = (torch.randn(8, 20), torch.zeros(8, dtype=torch.long))
    >>> plans = [mw.load_plan({"axes": {axis: 2}}) for axis in ("replicate", "shard")]
    >>> answer = mw.compare_plans(model, batch, *plans, cluster="2xH100", global_batch=64, loss=loss)
    >>> answer.values["fields"]
    {'axes.replicate': [2, 1], 'axes.shard': [1, 2]}
    """
    inputs, profiles = question_inputs(model, sample_batch, cluster, global_batch=global_batch, **options)
    return explain_difference(first, second, with_measured_operators(inputs, profiles), profiles)
