"""Compares the answer of a search with other plans for the same problem, all predicted in the same way."""

import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from meshwright.cluster.cluster import Cluster, Device, Link
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan import Plan
from meshwright.planner.constraints.apply import unconstrained
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.measured_search import measured_search
from meshwright.planner.profiles import Profiles
from meshwright.simulator.predict import Prediction, predict_plan
from validation.search.plans import PlanWriter
from validation.search.problems import Problem

SLACK = 0.03  # what a simpler plan may be slower
Row = dict[str, Any]


@dataclass(frozen=True)
class Rival:
    """A plan that fits, with its prediction."""

    plan: Plan
    prediction: Prediction


def predict(plan: Plan, inputs: PlanningInputs, profiles: Profiles) -> Prediction:
    """The prediction of a plan, with nothing that a search has kept."""
    profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
    return predict_plan(inputs.cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime)


def rivals(
    inputs: PlanningInputs, profiles: Profiles, answer: Plan | None, number: int, random: Random
) -> Iterator[Rival]:
    """Yields plans that the executor can run and that fit: as people write them, random ones, and the neighbours of the
    answer."""
    for precision in inputs.precisions_to_try():
        writer = PlanWriter(inputs, profiles.get(precision, "none"), precision, random)
        plans = list(writer.plans(number))
        if answer is not None and answer.numerics.precision == precision:
            plans += writer.neighbours(answer)
        for plan in plans:
            try:
                prediction = predict(plan, inputs, profiles)
            except InputError:  # the model cannot be traced with this recomputation, or is not cut so
                continue
            if inputs.fits(prediction):
                yield Rival(plan, prediction)


def check_search(problem: Problem, seed: int, number: int, plans: int) -> Row:
    """Searches, and returns what was found, the fastest rival, and the answer of a relaxed problem, as a row. `beaten`
    is by how much the rival is faster, and `relaxed` by how much the answer of the relaxed problem is slower."""
    row: Row = {"seed": seed, "number": number, "problem": problem.describe()}
    random = Random(f"{seed}/{number}/plans")
    try:
        inputs, profiles = problem.inputs()
        begin = time.process_time()
        answer = _answer(inputs, profiles)
        row["search_s"] = round(time.process_time() - begin, 2)
        begin = time.process_time()
        found = list(rivals(inputs, profiles, answer.plan if answer else None, plans, random))
        row |= {"plans": len(found), "plans_s": round(time.process_time() - begin, 2)}
        row |= _compared(answer, min(found, key=lambda rival: rival.prediction.step_s, default=None))
        if answer is not None:
            afresh = predict(answer.plan, inputs, profiles).step_s
            if afresh != answer.prediction.step_s:
                row["afresh"] = [answer.prediction.step_s, afresh]
            row |= _relaxed(answer, inputs, profiles, random)
    except MeshwrightError as error:
        row["error"] = str(error)
    except Exception:
        row["crash"] = traceback.format_exc(limit=-6)
    return row


def is_failure(row: Row) -> bool:
    """Whether a row contradicts what the search promises."""
    return "crash" in row or "afresh" in row or row.get("beaten", 0.0) > SLACK or row.get("relaxed", 0.0) > SLACK


def _answer(inputs: PlanningInputs, profiles: Profiles) -> Rival | None:
    """The plan that the search returns; None if it says that there is none."""
    try:
        best = measured_search(inputs, profiles)[0].ranked[0]
    except InputError:
        return None
    return Rival(best.plan, best.prediction)


def _compared(answer: Rival | None, rival: Rival | None) -> Row:
    row: Row = {}
    if answer is not None:
        row |= {"answer": answer.plan.summary(), "step_s": answer.prediction.step_s}
    if rival is not None:
        beaten = answer.prediction.step_s / rival.prediction.step_s - 1 if answer else float("inf")
        row |= {"rival": rival.plan.summary(), "rival_s": rival.prediction.step_s, "beaten": beaten}
        if beaten > SLACK:
            row["rival_plan"] = rival.plan.model_dump(mode="json", exclude_defaults=True)
    return row


# ---- relaxed problems


def _relaxed(answer: Rival, inputs: PlanningInputs, profiles: Profiles, random: Random) -> Row:
    name, relaxed = _relax(inputs, random)
    other = _answer(relaxed, profiles)
    slower = other.prediction.step_s / answer.prediction.step_s - 1 if other else float("inf")
    row: Row = {"relaxation": name, "relaxed": slower}
    if slower > SLACK:
        row["relaxed_answer"] = other.plan.summary() if other else None
    return row


def _relax(inputs: PlanningInputs, random: Random) -> tuple[str, PlanningInputs]:
    options = ["devices", "memory", "bandwidth", "rate", "links"]
    if inputs.constraints:
        options += ["constraints"] * 3
    name = random.choice(options)
    if name == "constraints":
        return name, unconstrained(inputs)
    if name == "devices" and (len(inputs.cluster.nodes) > 1 or "axes.shard" in inputs.constraints.fixed):
        name = "memory"
    return name, replace(inputs, cluster=_better(inputs.cluster, name, random))


def _better(cluster: Cluster, name: str, random: Random) -> Cluster:
    """The cluster with one more device (with several machines: one more machine), or with devices or links that are
    better."""
    if name == "devices":
        (node,) = cluster.nodes
        grown = (
            {"number": node.number + 1} if node.number > 1 else {"count": node.count + random.choice((1, node.count))}
        )
        return cluster.model_copy(update={"nodes": (node.model_copy(update=grown),)})
    if name == "links":
        nodes = tuple(node.model_copy(update={"link": _faster(node.link)}) for node in cluster.nodes)
        link = _faster(cluster.link) if cluster.link else None
        return cluster.model_copy(update={"nodes": nodes, "link": link})
    better = [node.model_copy(update={"device": _better_device(node.device, name)}) for node in cluster.nodes]
    return cluster.model_copy(update={"nodes": tuple(better)})


def _better_device(device: Device, name: str) -> Device:
    if name == "memory":
        return device.model_copy(update={"memory_bytes": 2 * device.memory_bytes})
    if name == "bandwidth":
        return device.model_copy(update={"bandwidth_bytes_per_s": 2 * device.bandwidth_bytes_per_s})
    return device.model_copy(update={"rates": {dtype: 2 * rate for dtype, rate in device.rates.items()}})


def _faster(link: Link) -> Link:
    return link.model_copy(update={"bandwidth_bytes_per_s": 2 * link.bandwidth_bytes_per_s})
