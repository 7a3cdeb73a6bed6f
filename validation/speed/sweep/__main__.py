"""Steps of many models on one GPU, by hand and by `best_plan`.

`python -m validation.speed.sweep RESULTS.json [MODEL …]` measures these models, or all of them.

Each form of each model runs in a process of its own with a time limit, and what fails is a row with its reason. A row
is written after each model. Models that the file has already, measured with the same digest of the step's files, the
same device and the same torch, are left out, so the command continues where it was stopped. `--ten` measures ten models
of different kinds with cold caches. `--shard I/N` takes every N-th model from the I-th on, and `--limit SECONDS` ends
the whole call in time: a model that was not finished is measured in the next call.

`--predict` measures nothing: it predicts the plans of the rows, which needs no GPU, and writes the commit into rows
that were measured where there was no git. `--table` prints the rows. `--tiny` uses tiny sizes, for a trial on a CPU.
"""

import json
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.detect import find_cluster
from meshwright.user.torchvision_import import mend_torchvision
from validation.speed.step_digest import step_digest
from validation.speed.sweep.case import ModelCase
from validation.speed.sweep.form_process import Failure, FormOptions, leave, run_probe
from validation.speed.sweep.models.all_models import MODELS, TEN
from validation.speed.sweep.one_model import Limits, measure_model
from validation.speed.sweep.predict import complete_rows
from validation.speed.sweep.results import Row, Setting, current_commit, read_rows, with_row, write_rows
from validation.speed.sweep.table import describe_row, sweep_table

_PROBE_LIMIT_S = 300.0
_FIRST_MODEL_S = 75.0  # expected of a model before one was measured
_PRELOADED = {
    "torchvision": ("torchvision.models.detection", "torchvision.models.segmentation"),
    "timm": ("timm",),
    "transformers": ("transformers.modeling_utils", "transformers.modeling_outputs"),
    "own": ("meshwright.auto.choose", "meshwright.proof.before_training.parallelize"),
}
_COMPILER = "torch._inductor.compile_fx"


def sweep(options: Namespace) -> None:
    """Measures the models that the results file does not have yet."""
    end = time.monotonic() + options.limit
    cases = list(chosen_models(options))
    missing = _preload(cases, compiles=not options.tiny)
    setting = _setting(options)
    rows = read_rows(options.results)
    durations: list[float] = []
    with tempfile.TemporaryDirectory(prefix="sweep-cache-") as cache:
        form_options = FormOptions(options.tiny, options.device, Path(cache), options.tune)
        for case in cases:
            if any(row["model"] == case.name and setting.covers(row) for row in rows):
                print(f"{case.name}: measured already", flush=True)
                continue
            left_s = end - time.monotonic()
            if left_s < (median(durations) if durations else min(_FIRST_MODEL_S, options.limit / 2)):
                print(f"{left_s:.0f} s are left: call again to measure {case.name} and those after it", flush=True)
                break
            begin = time.monotonic()
            row = _new_row(case, setting)
            if case.library in missing:
                row["failure"] = f"not available: {missing[case.library]}"
            else:
                limits = Limits(options.form_limit, end)
                forms = measure_model(case, form_options, limits, cold=setting.cold)
                if forms is None:
                    print(f"{case.name}: not finished in time, call again", flush=True)
                    break
                row["forms"] = forms
                durations.append(time.monotonic() - begin)
                row["duration_s"] = durations[-1]
            rows = with_row(read_rows(options.results), row)
            write_rows(options.results, rows)
            print(describe_row(row), flush=True)


def chosen_models(options: Namespace) -> Iterator[ModelCase]:
    """The models that are named, or all of them, or the ten; every N-th of these."""
    names = options.models or (TEN if options.ten else MODELS)
    number, _, count = options.shard.partition("/")
    yield from [MODELS[name] for name in names][int(number) - 1 :: int(count)]


def _new_row(case: ModelCase, setting: Setting) -> Row:
    sizes = case.sizes(setting.tiny)
    return {
        "model": case.name,
        "library": case.library,
        "sizes": {name: size for name, size in sizes.items() if name in ("samples", "length", "image", "nodes")},
        "device": setting.device,
        "torch": setting.torch,
        "digest": setting.digest,
        "commit": current_commit(),
        "tiny": setting.tiny,
        "cold": setting.cold,
    }


def _preload(cases: list[ModelCase], compiles: bool) -> dict[str, str]:
    """Imports what the models' processes need. Returns the libraries that cannot be imported, with the reason. Nothing
    here may use the GPU: a process that has used it cannot be forked."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # otherwise looking for a GPU uses it
    os.environ["TORCH_WARM_POOL"] = "0"  # each process starts compiler processes of its own
    mend_torchvision()
    missing: dict[str, str] = {}
    for library in ("own", *sorted({case.library for case in cases} - {"own"})):
        if library != "own" and find_spec(library) is None:
            missing[library] = f"{library} is not installed"
            continue
        try:
            for module in (*_PRELOADED[library], *((_COMPILER,) if compiles else ())):
                import_module(module)
        except Exception as error:
            missing[library] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return missing


def _setting(options: Namespace) -> Setting:
    def probe() -> dict[str, Any]:
        if options.device == "cuda":
            find_cluster("local", measure_machine)  # once for a machine, as `meshwright doctor` does
            return {"name": torch.cuda.get_device_name()}
        cluster = find_cluster("1xcpu", measure_machine)
        return {"name": cluster.nodes[0].device.name}

    device = run_probe(probe, _PROBE_LIMIT_S)
    if isinstance(device, Failure):
        raise SystemExit(f"the device {options.device} cannot be used: {device.reason}")
    cold = options.cold or options.ten
    return Setting(device["name"], torch.__version__, step_digest(), options.tiny, cold)


def _shard(text: str) -> str:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError
    return text


def main(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m validation.speed.sweep", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of models; all without any")
    parser.add_argument("--ten", action="store_true", help="ten models of different kinds, with cold caches")
    parser.add_argument("--cold", action="store_true", help="compile with empty caches, so that first steps compare")
    parser.add_argument("--shard", type=_shard, default="1/1", metavar="I/N", help="every N-th model from the I-th on")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="of the whole call")
    parser.add_argument("--form-limit", type=float, default=150.0, metavar="SECONDS", help="until a form is ready")
    parser.add_argument("--tune", type=float, metavar="SECONDS", help="budget of best_plan for measuring variants")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="a GPU if there is one")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--predict", action="store_true", help="predict the plans of the rows instead of measuring")
    parser.add_argument("--table", action="store_true", help="print the table of the rows instead of measuring")
    options = parser.parse_intermixed_args(arguments)
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if options.table:
        print(sweep_table(read_rows(options.results)))
        return
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.predict:
        _preload(list(chosen_models(options)), compiles=False)
        complete_rows(options.results, [case.name for case in chosen_models(options)])
        return
    sweep(options)
    print(json.dumps({"results": str(options.results), "digest": step_digest()}))


if __name__ == "__main__":
    main(sys.argv[1:])
    leave(0)
