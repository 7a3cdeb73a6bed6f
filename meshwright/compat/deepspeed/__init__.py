"""A drop-in for DeepSpeed that trains with Meshwright. A script changes only its import:

import meshwright.compat.deepspeed as deepspeed

or nothing at all: `python -m meshwright.compat.deepspeed script.py …` provides `import deepspeed`.
"""

import argparse
import sys

from meshwright.compat.deepspeed.api import comm, zero
from meshwright.compat.deepspeed.api.accelerator import get_accelerator
from meshwright.compat.deepspeed.api.comm import init_distributed
from meshwright.compat.deepspeed.api.config import DeepSpeedConfig, DeepSpeedConfigError
from meshwright.compat.deepspeed.api.op_builder import COMPATIBLE
from meshwright.compat.deepspeed.api.utilities import OnDevice, log_dist, logger
from meshwright.compat.deepspeed.api.version import git_branch, git_hash, version
from meshwright.compat.deepspeed.engine import DeepSpeedEngine
from meshwright.compat.deepspeed.initialize import initialize
from meshwright.compat.deepspeed.modules import add_modules
from meshwright.compat.deepspeed.pipe import PipelineModule
from meshwright.compat.deepspeed.pipeline_engine import PipelineEngine

add_modules(sys.modules[__name__])
sys.modules[f"{__name__}.ops"].__compatible_ops__ = COMPATIBLE  # type: ignore[attr-defined]

__version__ = version
__version_major__, __version_minor__, __version_patch__ = (int(number) for number in version.split("."))
__git_hash__, __git_branch__ = git_hash, git_branch

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "zero",
]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config` to a script's arguments."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the DeepSpeed configuration, a JSON file")
    group.add_argument("--deepscale", action="store_true", help="an old name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="an old name of --deepspeed_config")
    return parser
