"""`Cluster`: what there is to train on."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt


class Cluster(BaseModel):
    """`devices` ranks can run at once; `cores` are the CPU cores they share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    device: Literal["cpu", "cuda"]
    devices: PositiveInt
    cores: PositiveInt
