"""From a job to a plan: what the planner is asked, and which plan a run takes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from meshwright.errors import InputError, MeshwrightError

if TYPE_CHECKING:  # rooms are loaded by the command that needs them
    from meshwright.cluster.cluster import Cluster
    from meshwright.job import Job
    from meshwright.plan import Plan
    from meshwright.planner.profiles import Profiles
    from meshwright.planner.question import Question


def asked_of(
    job: "Job", cluster: "Cluster", *, exact: bool = False, top: int = 1, say: Callable[[str], None] = lambda line: None
) -> "tuple[Question, Profiles]":
    """A job's model, batch and optimizer, as the planner takes them: without memory, where the model allows it. `say`
    hears what an answer rests on."""
    import torch

    from meshwright.call import bind
    from meshwright.planner.profiles import Profiles
    from meshwright.planner.question import Question
    from meshwright.profile.optimizer import cost_of as optimizer_of
    from meshwright.train.build import freeze, make_model, sample_batch
    from meshwright.train.step.optimizer import build_optimizer

    data, generated = _training_set(job)
    if generated and not job.data.synthetic:
        say("there is no data.root: what a batch looks like is taken from generated data")
    sample = sample_batch(job, data)
    try:
        with torch.device("meta"):
            model = make_model(job)
    except MeshwrightError:
        raise
    except Exception:  # some models cannot be built without memory
        model = make_model(job)
    freeze(model, job.train.freeze)
    loss = bind(job.loss, "loss") if job.loss else None
    on_gpu = cluster.kind == "cuda"
    try:
        optimizer = build_optimizer(job.optimizer, model)
    except (TypeError, ValueError) as error:
        raise InputError(f"optimizer: {error}") from error
    question = Question(
        cluster,
        job.train.global_batch,
        optimizer_of(optimizer, on_gpu),
        exact=exact,
        top=top,
        samples=len(data) if hasattr(data, "__len__") and not generated else None,
    )
    return question, Profiles(model, sample, loss, job.data.target, on_gpu)


def _training_set(job: "Job") -> tuple[Any, bool]:
    """The training set. Where its files are not here, planning needs only to know what a batch looks like: generated
    ones tell, too. And whether they are such."""
    from meshwright.train.build import build_data

    try:
        return build_data(job)[0], job.data.synthetic
    except InputError as reason:
        if job.data.synthetic or job.data.root is not None:
            raise
        generated = job.model_copy(update={"data": job.data.model_copy(update={"synthetic": True})})
        try:
            return build_data(generated)[0], True
        except MeshwrightError:
            raise reason from None


def by_dimension(job: "Job", ranks: int) -> "Plan":
    from meshwright.batch import split
    from meshwright.parallel.tensor.dimension import dimension_plan
    from meshwright.train.build import make_model, sample_batch

    example = split(sample_batch(job, _training_set(job)[0]), job.data.target)
    return dimension_plan(make_model(job), example, ranks)


def note_on(plan: "Plan", cluster: "Cluster", given: "Plan | Literal['auto']") -> str | None:
    """What a user should know of how a plan was chosen."""
    if given != "auto" or _is_measured(cluster):
        return None
    return f"plan: {plan.summary()}, as nobody has measured this machine (meshwright doctor does)"


def _is_measured(cluster: "Cluster") -> bool:
    return all(node.device.is_known for node in cluster.nodes)


def chosen_plan(job: "Job", cluster: "Cluster", given: "Plan | Literal['auto']") -> "tuple[Plan, float | None]":
    """The plan to run, and the seconds that a step of it is predicted to take, where the machine has been measured.
    `auto` is the best of what this version runs and what leaves the numbers as they are; every device a replica on a
    machine that nobody has measured, or for a model that cannot be predicted."""
    from dataclasses import replace

    from meshwright.parallel.check import checker
    from meshwright.planner.search import replicas, search
    from meshwright.simulator.predict import predict_plan

    if given == "auto" and job.data.partition == "dimension":  # which says how the model is to be divided
        given = by_dimension(job, cluster.devices)
    chosen = replicas(cluster.devices, job.train.global_batch) if given == "auto" else given
    if not _is_measured(cluster):
        return chosen, None
    try:
        question, profiles = asked_of(job, cluster, exact=True)
    except Exception:  # whatever a job's own code raises: the checks before a run say what is wrong with it
        return chosen, None
    try:
        if given == "auto":
            refuses = checker(profiles.model, profiles.sample, profiles.target)
            best = search(replace(question, even=False, refuses=refuses), profiles).ranked[0]
            return best.plan, best.prediction.step_s
        if chosen.numerics.precision == "auto":
            return chosen, None  # the run measures which it is
        profile = profiles.get(chosen.numerics.precision, chosen.memory.recompute)
        taken = cluster.with_devices(min(chosen.world_size, cluster.devices))
        return chosen, predict_plan(taken, profile, chosen, question.global_batch, question.optimizer).step_s
    except MeshwrightError:  # it cannot be traced, or fits no plan as predicted: the run itself has the last word
        return chosen, None
