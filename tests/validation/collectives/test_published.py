"""The score is honest: no row is lost, nothing of a source helps to price its own rows, and the figures hold."""

from statistics import median

import pytest

from meshwright.cluster.names import cluster_from_name
from meshwright.simulator.communication.collectives import link_efficiencies
from validation.collectives.published import (
    PRIORS,
    ScoredCase,
    by_group,
    cases,
    datasheet_s,
    fit,
    fit_without_source,
    not_covered,
    predict,
    score_as_shipped,
    score_left_out,
    summary,
    without_source,
)

COLLECTED = 555


def test_every_collected_row_is_priced_or_has_a_reason() -> None:
    priced = [case.id for case in cases()]
    left = [name for series in not_covered() for name in series["ids"]]
    assert sorted(priced + left) == [f"coll-{number:04}" for number in range(1, COLLECTED + 1)]
    assert all(series["reason"] for series in not_covered())


def test_what_a_source_gave_to_the_catalog_is_taken_away() -> None:
    before = cluster_from_name("2x8xH100@EFA-400G")
    after = without_source(before, "aws-samples/awsome-distributed-training")
    assert before.link is not None
    assert after.link is not None
    assert before.link.curves["all_reduce"]
    assert not after.link.curves["all_reduce"]
    assert after.link.latency_s < before.link.latency_s
    assert after.nodes[0].link.curves["all_reduce"] == before.nodes[0].link.curves["all_reduce"]
    bare = without_source(before, None, curves=False)
    assert not any(bare.nodes[0].link.curves.values())


def test_curves_of_the_catalog_name_their_source_as_the_rows_do() -> None:
    """Otherwise leaving a source out would leave its curves in."""
    sources = {case.source for case in cases()}
    links = [link for case in cases() for link in (case.cluster.link, case.cluster.nodes[0].link) if link]
    told = {curve.source for link in links for curves in link.curves.values() for curve in curves}
    assert all(any(source in one for source in sources) for one in told if "collectives.json" in one)


def test_a_fit_finds_the_efficiencies_that_rows_were_made_with() -> None:
    rows = [case for case in cases() if case.group_name in ("dgxc_nccl", "stas_a100")][::3]
    clusters = {case.cluster.name: without_source(case.cluster, None, curves=False) for case in rows}
    planted = link_efficiencies()
    made = [
        type(case)(**{**case.__dict__, "seconds": predict(case, clusters[case.cluster.name], planted)}) for case in rows
    ]
    found = fit(made, clusters)
    errors = [abs(predict(case, clusters[case.cluster.name], found) / case.seconds - 1) for case in made]
    assert median(errors) < 0.05
    assert {name: getattr(found.families["tcp"], name) for name in PRIORS["tcp"]} == PRIORS["tcp"]


def test_the_catalog_as_shipped_prices_what_it_has_not_measured_too() -> None:
    scored = score_as_shipped()
    assert summary(scored)["median"] < 0.05
    unseen = [one for name in ("stas_nvls", "stas_h200", "jeanzay") for one in by_group(scored)[name]]
    assert summary(unseen)["median"] < 0.15


def test_one_source_left_out() -> None:
    source = "bigscience-workshop/bigscience"
    rows = [case for case in cases() if case.source == source or case.group_name == "vtrain_lut"]
    efficiencies = fit_without_source(source, rows)
    scored = [
        ScoredCase(
            case, predict(case, without_source(case.cluster, source), efficiencies), datasheet_s(case, case.cluster)
        )
        for case in rows
        if case.source == source
    ]
    assert summary(scored)["median"] < 0.2


@pytest.mark.soak
def test_all_sources_left_out() -> None:
    found = summary(score_left_out())
    assert found["median"] < 0.15
    assert found["median"] < 0.5 * found["datasheet_median"]
