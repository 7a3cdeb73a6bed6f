"""Models that hang, crash or fail, measured as the sweep measures its models; this program prints the results."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from validation.speed.sweep.case import ModelCase, Sizes
from validation.speed.sweep.form_process import FormOptions, leave
from validation.speed.sweep.models.all_models import MODELS
from validation.speed.sweep.one_model import Limits, measure_model


class Acting(nn.Module):
    """A linear layer that does something else first."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(3, 4), act

    def forward(self, x: Tensor) -> Tensor:
        self.act()
        out: Tensor = self.layer(x)
        return out


def _refuse() -> None:
    raise ValueError("this model refuses\nwith a second line")


def _crash() -> None:
    os.write(2, b"the library has crashed\n")
    os.kill(os.getpid(), signal.SIGKILL)


def _case(act: Callable[[], None]) -> ModelCase:
    def build(sizes: Sizes) -> nn.Module:
        return Acting(act)

    return replace(MODELS["radiance_field"], name="acting", build=build)


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        options = FormOptions(tiny=True, device="cpu", cache=Path(cache), tune_s=0)
        cases = {
            "hangs": (_case(lambda: time.sleep(600)), 1.0, 600.0),
            "crashes": (_case(_crash), 60.0, 600.0),
            "refuses": (_case(_refuse), 60.0, 600.0),
            "out of time": (_case(lambda: time.sleep(600)), 600.0, 0.5),
        }
        for name, (case, form_s, call_s) in cases.items():
            limits = Limits(form_s, time.monotonic() + call_s)
            results[name] = measure_model(case, options, limits, cold=True)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
    leave(0)
