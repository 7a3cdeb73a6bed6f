"""Models and clusters that the planner's tests search plans for."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.polish import point
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.planner.search_result import SearchResult
from meshwright.profile.optimizer import OptimizerCost
from meshwright.simulator.predict import Prediction
from meshwright.workloads import vision
from meshwright.workloads.text.decoder import Decoder, NextTokenLoss
from meshwright.workloads.text.decoder_sizes import decoder

ADAMW = OptimizerCost(state_ratio=2.0, temporary_ratio=1.0, multi_tensor=True)
MOMENTUM = OptimizerCost(state_ratio=1.0, temporary_ratio=0.0, multi_tensor=True)


@cache
def images(name: str) -> Profiles:
    with torch.device("meta"):
        model = getattr(vision, name)(classes=1000)
        batch = torch.empty(2, 3, 224, 224), torch.empty(2, dtype=torch.long)
    return Profiles(model, batch, F.cross_entropy)


def one_layer() -> Profiles:
    """It can be neither split nor cut."""
    return Profiles(nn.Linear(16, 4), (torch.zeros(2, 16), torch.zeros(2, dtype=torch.long)), F.cross_entropy)


@cache
def small_decoder(layers: int = 8, hidden: int = 1024) -> Profiles:
    with torch.device("meta"):
        model = Decoder(layers=layers, hidden=hidden, heads=16, sequence=256, vocabulary=1000, tied=False)
        tokens = torch.empty(2, 256, dtype=torch.long)
    return Profiles(model, (tokens, tokens), NextTokenLoss())


@cache
def frozen_decoder() -> Profiles:
    """Of which only the norms are trained."""
    profiles = small_decoder.__wrapped__()
    for name, parameter in profiles.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return profiles


@cache
def published_decoder(size: str, sequence: int = 2048, **keywords: Any) -> Profiles:
    with torch.device("meta"):
        model = decoder(size, sequence=sequence, **keywords)
        tokens = torch.empty(2, sequence, dtype=torch.long)
    return Profiles(model, (tokens, tokens), NextTokenLoss())


def cluster_with(name: str = "H100", **constants: Any) -> Cluster:
    """The cluster with other constants of its device."""
    cluster = find_cluster(name)
    (node,) = cluster.nodes
    device = node.device.model_copy(update=constants)
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})


def faster_links(name: str, times: float) -> Cluster:
    """The cluster with faster links of the same name within its nodes."""
    cluster = find_cluster(name)
    (node,) = cluster.nodes
    link = node.link.model_copy(update={"bandwidth_bytes_per_s": times * node.link.bandwidth_bytes_per_s})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"link": link}),)})


def predict_as(monkeypatch: pytest.MonkeyPatch, predict: Callable[..., Prediction]) -> None:
    """Lets searches predict plans with this function."""
    monkeypatch.setattr(point, "predict_plan", predict)
    monkeypatch.setattr(point, "plan_step_s", lambda *arguments, **options: predict(*arguments, **options).step_s)


def search_plans(
    cluster: str | Cluster, profiles: Profiles, batch: int, **conditions: Any
) -> tuple[PlanningInputs, SearchResult]:
    machines = find_cluster(cluster) if isinstance(cluster, str) else cluster
    inputs = PlanningInputs(machines, batch, conditions.pop("optimizer", ADAMW), **conditions)
    return inputs, search(inputs, profiles)
