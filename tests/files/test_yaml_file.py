"""Reading job, plan and cluster files: strings survive a round trip, and a mistake is one line that names its field."""

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from meshwright.errors import InputError
from meshwright.files.yaml_file import dump, parse, read_mapping, validate


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
    assert refusal({"inner": 3}, prefix="plan", hints={"Inner": "write {path: ...}"}).endswith(": write {path: ...}")
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


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(BOMB, "line 5: not YAML: aliases such as *a3 repeat more than 100,000 values", id="alias bomb"),
        pytest.param("a: " + "[" * 100_000, "line 1: not YAML: it is nested more than 100 levels deep", id="brackets"),
        pytest.param("a: " + "{b: " * 100_000, "line 1: not YAML: it is nested more than 100 levels deep", id="braces"),
        pytest.param("- " * 5_000, "line 1: not YAML: it is nested more than 100 levels deep", id="dashes"),
        pytest.param("a: &a [1, *a]", "line 1: not YAML: the value &a contains itself", id="sequence in itself"),
        pytest.param("a: &a\n  b: *a", "line 2: not YAML: the value &a contains itself", id="mapping in itself"),
        pytest.param("a: 1\nb: 2\na: 3", "line 3: not YAML: 'a' is there twice", id="duplicate key"),
        pytest.param("p: {x: 1, y: {z: 1}, x: 2}", "line 1: not YAML: 'x' is there twice", id="nested duplicate"),
        pytest.param("a: " + "9" * 5000, "line 1: not YAML: a number of 5,000 characters", id="long number"),
        pytest.param("a: 0x" + "f" * 5000, "line 1: not YAML: a number of 5,002 characters", id="hexadecimal number"),
        pytest.param("a: 1" + ":1" * 500000, "line 1: not YAML: a number of 1,000,001 characters", id="base 60"),
        pytest.param("\na: !!bool x", "line 2: not YAML: 'x' is no bool", id="wrong bool"),
        pytest.param("a: !!int ''", "line 1: not YAML: '' is no int", id="empty number"),
        pytest.param("a: !!timestamp x", "line 1: not YAML: 'x' is no timestamp", id="wrong date"),
        pytest.param("a: !!binary aGk=", "line 1: not YAML: could not determine a constructor", id="bytes"),
        pytest.param("a: 2026-13-45", "not YAML: month must be in 1..12", id="impossible date"),
    ],
)
def test_a_file_that_would_not_end_or_says_something_twice_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_mapping(file, "job")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("what", "limit"), [("job", 2**20), ("plan", 2**20), ("cluster", 2**22), ("device", 2**22)])
def test_a_file_that_takes_too_long_to_read_is_refused(tmp_path: Path, what: str, limit: int) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("a: 1\n" + "#" * (limit - 5))
    assert read_mapping(file, what) == {"a": 1}
    file.write_text("a: 1\n" + "#" * (limit - 4))
    with pytest.raises(InputError, match=rf"file.yaml is too large: a {what} file has at most {limit:,} characters$"):
        read_mapping(file, what)


def test_aliases_and_merged_keys_are_read() -> None:
    text = "base: &base {lr: 1, name: x}\none: {<<: *base, lr: 2}\nlist: [&a [1, 2], *a, *a]\n? [1, 2]\n: 3\n"
    with pytest.raises(yaml.YAMLError, match="unhashable"):
        parse(text)
    assert parse(text.partition("? ")[0]) == {
        "base": {"lr": 1, "name": "x"},
        "one": {"lr": 2, "name": "x"},
        "list": [[1, 2]] * 3,
    }
