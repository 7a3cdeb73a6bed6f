"""Requests for launch files, without reading a job file."""

from dataclasses import fields, replace
from typing import Any

from meshwright.export.launch_files.layout import Layout
from meshwright.export.launch_files.request import LaunchOptions, LaunchRequest
from tests.train.one_process import toy_job

TWO_MACHINES = Layout(nodes=2, ranks_per_node=8, on_gpus=True, cores_per_rank=12)
# What a shell, a YAML reader or Kubernetes could take for something else than text.
HOSTILE = "a'b\"c;touch pwned $(touch pwned) `touch pwned` $HOME ${x} #&|<>*?\\ : - {} [] !x %y"


_OPTIONS = {field.name for field in fields(LaunchOptions)}


def request(**changes: Any) -> LaunchRequest:
    """Returns a request for 2 × 8 ranks, with these fields and options in place of its own."""
    options = LaunchOptions(**{name: value for name, value in changes.items() if name in _OPTIONS})
    plain = LaunchRequest(toy_job(), "replicate 16", TWO_MACHINES, ("train", "toy.yaml", "--resume=auto"), "/work")
    return replace(plain, options=options, **{key: value for key, value in changes.items() if key not in _OPTIONS})
