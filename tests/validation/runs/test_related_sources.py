"""Sources that must not calibrate each other."""

from meshwright.files.yaml_file import read_mapping
from validation.runs.related_sources import FILE, related_sources, untrusted_sources
from validation.runs.rows import rows


def test_related_sources_have_rows_and_each_group_has_a_reason() -> None:
    sources = {row.source for row in rows()}
    for group in read_mapping(FILE, "related sources")["groups"]:
        assert set(group["sources"]) <= sources
        assert len(group["sources"]) > 1
        assert group["reason"]
    assert untrusted_sources() <= sources


def test_relation_goes_both_ways_and_includes_the_source_itself() -> None:
    assert related_sources("lambda_v1") == related_sources("lambda_v2") == {"lambda_v1", "lambda_v2"}
    assert related_sources("llm_foundry") == {"llm_foundry"}
