"""Reading job, plan and cluster files: strings survive a round trip, and a mistake is one line that names its field."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from meshwright.errors import InputError
from meshwright.yaml_file import dump, parse, read_mapping, validate


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str = ""


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    number: int = 0


def refusal(raw: dict[str, object], **options: object) -> str:
    with pytest.raises(InputError) as caught:
        validate(Outer, raw, "file.yaml", **options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("text", ["1e3", "next\x85line", "\u2028", "yes", "é"])
def test_values_survive_a_round_trip(text: str) -> None:
    assert parse(dump({"text": text, "number": 1e-3})) == {"text": text, "number": 1e-3}


def test_an_unknown_field_is_compared_with_the_fields_of_its_section() -> None:
    assert refusal({"inner": {"pth": "x"}}) == "file.yaml: inner.pth is not a field: did you mean 'path'?"
    assert refusal({"many": [{}, {"pth": "x"}]}) == "file.yaml: many.1.pth is not a field: did you mean 'path'?"


def test_a_wrong_value_is_reported_with_its_field_and_a_hint() -> None:
    assert refusal({"inner": 3}, prefix="plan", hints={"Inner": ": write {path: ...}"}).endswith(": write {path: ...}")
    assert refusal({"number": "x" * 200}).startswith(f"file.yaml: number is '{'x' * 76}...: input should be")
    assert refusal({"number": "x", "many": 1}).endswith(" (and 1 more)")


@pytest.mark.parametrize("text", ["a: [1", "a: \x00", "a: b: c", "- 1"])
def test_a_file_that_is_no_mapping_is_reported_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_mapping(file, "cluster")
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)
