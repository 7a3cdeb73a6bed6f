"""The effect of a plan's fields on the numerical result: `same` (equal up to the order of summation), `rounding` (other
kernels, so the last bits may differ) or `changes` (different arithmetic)."""

from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Numerics = Literal["same", "rounding", "changes"]
NUMERICS: tuple[Numerics, ...] = ("same", "rounding", "changes")  # each includes the ones before it


def choice(default: Any, numerics: Numerics, **limits: Any) -> Any:
    """A field of a plan with its default and its effect."""
    return Field(default=default, json_schema_extra={"numerics": numerics}, **limits)


def effect(field: FieldInfo) -> Numerics:
    assert isinstance(field.json_schema_extra, dict)
    return cast(Numerics, field.json_schema_extra["numerics"])


class PlanGroup(BaseModel):
    """A frozen group of a plan's fields that refuses unknown ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")
