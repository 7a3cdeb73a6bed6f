"""`Constraints`: what a search for plans has to keep. It is the section `constraints` of a job, the options `--fix`,
`--avoid`, `--max-memory` and `--precision` of `meshwright plan`, and arguments of `mw.best_plan`.

    fix         fields of a plan and their values: {axes.tensor: 4}, or in groups: {axes: {tensor: 4}}
    avoid       an axis (pipeline), which then has one rank; a feature (recompute, offload, compile), whose field then
                has its default; or one value of a field (pipeline.schedule=gpipe)
    max_memory  bytes of one device that a plan may use: 40GB, 40GiB
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from yaml import YAMLError

from meshwright.errors import InputError, did_you_mean
from meshwright.files.yaml_file import parse
from meshwright.numbers.units import bytes_text
from meshwright.plan_fields.effects import NUMERICS, Numerics, effect
from meshwright.plan_fields.groups import GROUPS
from meshwright.plan_fields.quantities import read_bytes

FIELDS: dict[str, FieldInfo] = {
    f"{group}.{name}": field for group, kind in GROUPS.items() for name, field in kind.model_fields.items()
}
# Fields whose default is one choice among others, and not the absence of a feature.
_NO_FEATURES = (
    *("pipeline.schedule", "pipeline.microbatches", "pipeline.cuts", "memory.sharding", "numerics.precision"),
    *("gradients.bucket_bytes", "gradients.precision", "gradients.updates", "gradients.staleness"),
    *("gradients.local_after", "compute.compile_mode", "compute.threads", "modules.attention_exchange"),
)
_WORDS = {"shares.samples": "shares"}  # fields that have another word than their name
_TOGETHER = {"shares": ("shares.shards",)}  # further fields that a word avoids
FEATURES: dict[str, str] = {
    _WORDS.get(name, name.partition(".")[2]): name
    for name in FIELDS
    if name not in _NO_FEATURES and name != "modules.loss"
}
"""The words that `avoid` takes, and the field of each."""


class Constraints(BaseModel):
    """What a search for plans has to keep. `fix` maps fields of a plan to their values. `avoid` names axes, features or
    values that plans must not have. `max_memory` are the bytes of one device that a plan may use; null: all of them but
    a margin."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fix: dict[str, Any] = {}
    avoid: tuple[str, ...] = ()
    max_memory: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        read = dict(raw)
        try:
            if isinstance(raw.get("fix"), Mapping):
                read["fix"] = {name: read_value(name, value) for name, value in flattened(raw["fix"]).items()}
            if isinstance(raw.get("avoid"), str):
                read["avoid"] = (raw["avoid"],)
            if raw.get("max_memory") is not None:
                read["max_memory"] = read_bytes(raw["max_memory"], "max_memory")
        except InputError as error:
            raise ValueError(str(error)) from None
        return read

    @model_validator(mode="after")
    def _agree(self) -> Self:
        try:
            avoided = [_avoided(word) for word in self.avoid]
        except InputError as error:
            raise ValueError(str(error)) from None
        avoided += [(name, FIELDS[name].default, False) for word in self.avoid for name in _TOGETHER.get(word, ())]
        words = [*self.avoid, *(word for word in self.avoid for _ in _TOGETHER.get(word, ()))]
        for word, (name, value, excluded) in zip(words, avoided, strict=True):
            if name in self.fix and (self.fix[name] == value if excluded else self.fix[name] != value):
                raise ValueError(f"{name} is fixed to {shown(self.fix[name])}, but '{word}' is avoided: leave out one")
        return self

    @cached_property
    def fixed(self) -> dict[str, Any]:
        """The fields that have one possible value: those of `fix`, and those of avoided axes and features."""
        avoided = (_avoided(word) for word in self.avoid)
        together = {name: FIELDS[name].default for word in self.avoid for name in _TOGETHER.get(word, ())}
        return {**{name: value for name, value, excluded in avoided if not excluded}, **together, **self.fix}

    @cached_property
    def excluded(self) -> tuple[tuple[str, Any], ...]:
        """Fields and values that plans must not have."""
        return tuple((name, value) for name, value, excluded in map(_avoided, self.avoid) if excluded)

    def __bool__(self) -> bool:
        return bool(self.fix or self.avoid or self.max_memory is not None)

    def describe(self) -> str:
        """The constraints in words, such as `axes.tensor=4, without pipeline, at most 40 GB`."""
        words = [f"{name}={shown(value)}" for name, value in self.fix.items()]
        words += [f"without {word}" for word in self.avoid]
        if self.max_memory is not None:
            words.append(f"at most {bytes_text(self.max_memory)} of a device")
        return ", ".join(words)

    def beyond(self, allow: Numerics) -> str | None:
        """The first fixed field whose value changes the numerical result more than `allow`, as `name=value`; None if
        there is none."""
        for name, value in self.fix.items():
            is_larger = NUMERICS.index(effect(FIELDS[name])) > NUMERICS.index(allow)
            if is_larger and value != FIELDS[name].default:
                return f"{name}={shown(value)}"
        return None

    def with_others(self, others: "Constraints") -> "Constraints":
        """These constraints, and the others, which replace those about the same field."""
        fix = {**self.fix, **others.fix}
        kept = [word for word in self.avoid if _avoided(word)[0] not in others.fix]
        fix = {name: value for name, value in fix.items() if name in others.fix or not _is_avoided(name, others.avoid)}
        memory = self.max_memory if others.max_memory is None else others.max_memory
        return Constraints(fix=fix, avoid=tuple(dict.fromkeys((*kept, *others.avoid))), max_memory=memory)


NONE = Constraints()


def flattened(fix: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted names, from dotted names or from groups of fields."""
    flat: dict[str, Any] = {}
    for name, value in fix.items():
        if name == "shares" and value == "adaptive":
            flat["shares.adaptive"] = True
        elif name == "shares" and isinstance(value, list | tuple):
            flat["shares.samples"] = value
        elif name in GROUPS and isinstance(value, Mapping):
            flat.update({f"{name}.{field}": inner for field, inner in value.items()})
        else:
            flat[str(name).removeprefix("plan.")] = value
    return flat


def read_value(name: str, value: Any) -> Any:
    """Returns the value of a field as a plan has it. Raises an `InputError` for an unknown field or a wrong value."""
    if name not in FIELDS:
        group = name.partition(".")[0]
        near = did_you_mean(name, FIELDS)
        if group in GROUPS:
            near = did_you_mean(name, [f"{group}.{field}" for field in GROUPS[group].model_fields])
        raise InputError(f"'{name}' is no field of a plan{near or ': docs/job.md lists them'}")
    field_info = FIELDS[name]
    if isinstance(value, bool) and not isinstance(field_info.default, bool):  # pydantic would take it for 0 or 1
        raise InputError(f"{name} is {shown(value)}: write {'a number' if _is_count(name) else 'one of its values'}")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(field_info.rebuild_annotation())
        read = adapter.validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise InputError(f"{name} is {value!r}: {message[0].lower()}{message[1:]}") from None
    if name == "numerics.precision" and read == "auto":
        raise InputError("numerics.precision is auto, which leaves it to the run: name fp32, tf32, bf16, fp16 or fp8")
    return read


def constraints_from_words(
    fix: Sequence[str] = (),
    avoid: Sequence[str] = (),
    max_memory: str | None = None,
    precision: str | None = None,
) -> Constraints:
    """The constraints that words of a command line say: `axes.tensor=4`, `pipeline`, `40GB` and `bf16`."""
    values: dict[str, Any] = {}
    for word in (*fix, *([f"numerics.precision={precision}"] if precision is not None else [])):
        name, equals, text = word.partition("=")
        if not equals or not name or not text.strip():
            raise InputError(f"--fix {word}: write a field of a plan and its value, such as --fix axes.tensor=4")
        value = read_value(name, _parse(text, f"--fix {word}"))
        if values.get(name, value) != value:
            raise InputError(f"{name} is fixed to {shown(values[name])} and to {shown(value)}: leave out one")
        values[name] = value
    memory = read_bytes(max_memory, "--max-memory") if max_memory is not None else None
    return make_constraints(values, avoid, memory)


def make_constraints(
    fix: Mapping[str, Any] | None = None, avoid: Sequence[str] = (), max_memory: str | int | None = None
) -> Constraints:
    """The constraints with these fields. Raises an `InputError` if they are wrong or contradict each other."""
    try:
        return Constraints.model_validate({"fix": dict(fix or {}), "avoid": avoid, "max_memory": max_memory})
    except ValidationError as error:
        problem = error.errors()[0]
        words = str(problem["ctx"]["error"]) if problem["type"] == "value_error" else problem["msg"]
        raise InputError(words) from None


def default_of(name: str) -> Any:
    """The default value of a field of a plan."""
    return FIELDS[name].get_default(call_default_factory=True)


def shown(value: Any) -> str:
    """A value as it is written in a plan file."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def _is_count(name: str) -> bool:
    return isinstance(FIELDS[name].default, int)


def _parse(text: str, source: str) -> Any:
    try:
        return parse(text)
    except YAMLError:
        raise InputError(f"{source}: '{text}' is not YAML") from None


def _avoided(word: str) -> tuple[str, Any, bool]:
    """The field of an avoided word and a value. If the third item is True, plans must not have this value; otherwise
    they must have it."""
    name, equals, text = word.partition("=")
    if equals:
        return name, read_value(name, _parse(text, f"avoid: {word}")), True
    field = FEATURES.get(word, word)
    if field not in FIELDS or field in _NO_FEATURES:
        hint = did_you_mean(word, FEATURES) if field not in FIELDS else ""
        raise InputError(
            f"avoid: '{word}' is no axis or feature that a plan can do without"
            f"{hint or ': one value of a field is avoided with FIELD=VALUE, such as pipeline.schedule=gpipe'}"
        )
    return field, FIELDS[field].default, False


def _is_avoided(name: str, words: Sequence[str]) -> bool:
    return any(_avoided(word)[0] == name and not _avoided(word)[2] for word in words)
