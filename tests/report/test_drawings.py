"""Drawings of clusters and models stay small and readable for any number of machines and modules."""

import re

import pytest
from torch import nn

from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.report.cluster_drawing import cluster_drawing, cluster_values
from meshwright.report.model_tree import model_tree
from meshwright.report.page import Page, Section, render_body
from meshwright.report.plan_on_modules import MOST_NODES, plan_on_modules
from tests.report.made_up_run import HOSTILE


def test_of_many_machines_a_few_are_drawn_and_the_others_counted() -> None:
    cluster = find_cluster("1250x8xH100")
    drawing = cluster_drawing(cluster_values(cluster, Plan(axes=Axes(replicate=10_000))))
    assert "… 1,247 more machines" in drawing.svg
    assert len(drawing.svg) < 20_000
    assert "10,000 devices" in drawing.description
    assert "used by replicate 10000" in drawing.svg


@pytest.mark.parametrize("name", ["1xH100", "8xH100", "2x8xH100", "3xcpu", "1x100xH100"])
def test_texts_and_boxes_lie_inside_the_drawing(name: str) -> None:
    svg = cluster_drawing(cluster_values(find_cluster(name))).svg
    width, height = (float(size) for size in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    for x, y in re.findall(r'<(?:text|rect) x="([\d.]+)" y="([\d.]+)"', svg):
        assert 0 <= float(x) < width
        assert 0 <= float(y) < height


def test_devices_that_a_plan_does_not_use_are_dashed_and_stages_have_colours() -> None:
    plan = Plan.model_validate({"axes": {"pipeline": 3}, "pipeline": {"cuts": ["a", "b"], "microbatches": 3}})
    svg = cluster_drawing(cluster_values(find_cluster("4xH100"), plan)).svg
    assert svg.count("stroke-dasharray") == 1
    assert all(f"stroke:var(--series-{number})" in svg for number in range(3))


def test_names_of_a_cluster_and_of_modules_are_escaped() -> None:
    cluster = find_cluster("2x2xH100")
    node = cluster.nodes[0].model_copy(update={"device": cluster.nodes[0].device.model_copy(update={"name": HOSTILE})})
    svg = cluster_drawing(cluster_values(cluster.model_copy(update={"nodes": (node,)}))).svg
    assert "<img" not in svg
    model = nn.Sequential()
    model.add_module(HOSTILE, nn.Linear(2, 2))
    tree = model_tree(plan_on_modules(model, Plan(), name=HOSTILE))
    markup = render_body(Page("Model", "", [Section("Plan", "", [tree])]))
    assert "<img" not in markup
    assert "&lt;img" in markup


def test_a_model_with_very_many_modules_is_cut_off_and_the_rest_counted() -> None:
    wide = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(number + 1, inner + 1) for inner in range(9))) for number in range(400))
    )
    tree = plan_on_modules(wide, Plan())
    assert len(tree["children"]) == 400
    assert sum(child["hidden"] for child in tree["children"]) == 3_600
    assert tree["parameters"] == sum(parameter.numel() for parameter in wide.parameters())
    assert model_tree(tree).root.children[0].children[-1].phrases[0].text == "9 more modules"
    assert MOST_NODES >= 401


def test_frozen_and_tied_weights_have_a_label() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    tree = plan_on_modules(model, Plan(axes=Axes(replicate=2)))
    assert tree["parameters"] == 15
    assert ["frozen", "frozen"] in tree["labels"]
    assert ["replicated", "replicated on 2 ranks"] in tree["labels"]
    assert ["tied", "weights of an earlier module"] in tree["children"][1]["labels"]
