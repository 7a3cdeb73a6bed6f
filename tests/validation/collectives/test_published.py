"""Published collectives: no row is lost, nothing from a source helps to price its own rows, and errors stay small."""

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


def test_every_collected_row_is_priced_or_has_a_reason() -> None:
    """Rows are numbered without a gap, so a row that is lost or counted twice is noticed."""
    priced = [case.id for case in cases()]
    ids = priced + [name for series in not_covered() for name in series["ids"]]
    assert sorted(ids) == [f"coll-{number:04}" for number in range(1, len(ids) + 1)]
    assert priced
    assert all(series["reason"] for series in not_covered())


def test_measurements_of_a_source_are_removed_from_the_catalog() -> None:
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
    curve_sources = {curve.source for link in links for curves in link.curves.values() for curve in curves}
    assert all(
        any(source in curve_source for source in sources)
        for curve_source in curve_sources
        if "collectives.json" in curve_source
    )


def test_a_fit_finds_the_efficiencies_that_rows_were_made_with() -> None:
    rows = [case for case in cases() if case.group_name in ("dgxc_nccl", "stas_a100")][::3]
    clusters = {case.cluster.name: without_source(case.cluster, None, curves=False) for case in rows}
    true_efficiencies = link_efficiencies()
    priced_rows = [
        type(case)(**{**case.__dict__, "seconds": predict(case, clusters[case.cluster.name], true_efficiencies)})
        for case in rows
    ]
    fitted = fit(priced_rows, clusters)
    errors = [abs(predict(case, clusters[case.cluster.name], fitted) / case.seconds - 1) for case in priced_rows]
    assert median(errors) < 0.05
    assert {name: getattr(fitted.families["tcp"], name) for name in PRIORS["tcp"]} == PRIORS["tcp"]


def test_the_catalog_also_prices_collectives_that_it_has_no_curves_for() -> None:
    scored = score_as_shipped()
    assert summary(scored)["median"] < 0.05
    unseen = [case for name in ("stas_nvls", "stas_h200", "jeanzay") for case in by_group(scored)[name]]
    assert summary(unseen)["median"] < 0.15


@pytest.mark.soak
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
    errors = summary(score_left_out())
    assert errors["median"] < 0.15
    assert errors["median"] < 0.5 * errors["datasheet_median"]
