"""Sources that must not calibrate each other."""

from meshwright.yaml_file import read_mapping
from validation.runs.kin import FILE, kin_of, untrusted
from validation.runs.rows import rows


def test_kin_are_sources_there_are_and_each_group_has_a_reason() -> None:
    known = {row.source for row in rows()}
    for group in read_mapping(FILE, "kin")["groups"]:
        assert set(group["sources"]) <= known
        assert len(group["sources"]) > 1
        assert group["reason"]
    assert untrusted() <= known


def test_kinship_goes_both_ways_and_includes_oneself() -> None:
    assert kin_of("lambda_v1") == kin_of("lambda_v2") == {"lambda_v1", "lambda_v2"}
    assert kin_of("llm_foundry") == {"llm_foundry"}
