"""Options of Accelerate are obeyed, refused in one line, or listed once. None is ignored without a word."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from accelerate.commands import launch  # noqa: E402
from accelerate.utils import (  # noqa: E402
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from accelerate.utils.launch import prepare_simple_launcher_cmd_env  # noqa: E402

from meshwright.compat.accelerate import Accelerator  # noqa: E402
from meshwright.compat.accelerate.settings import check_variables  # noqa: E402
from meshwright.errors import InputError  # noqa: E402
from tests.compat.accelerate.loops import accelerate_process  # noqa: E402


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "set axes.shard of a plan"),
        ({"deepspeed_plugin": object()}, "set axes.shard of a plan"),
        ({"parallelism_config": object()}, "set axes.shard of a plan"),
        ({"dynamo_backend": "inductor"}, "set compute.compile of a plan to blocks"),
        ({"dynamo_plugin": TorchDynamoPlugin(backend="eager")}, "set compute.compile of a plan to blocks"),
        ({"mixed_precision": "fp8"}, "set numerics.precision of a plan to fp8"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]}, "set gradients.precision"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False)]}, "buffers"),
        ({"kwargs_handlers": [AutocastKwargs(enabled=False)]}, "leave mixed_precision out"),
        ({"dataloader_config": DataLoaderConfiguration()}, None),
        ({"kwargs_handlers": [InitProcessGroupKwargs()]}, None),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}, None),
    ],
)
def test_arguments_are_obeyed_or_refused(options: dict[str, Any], message: str | None) -> None:
    with accelerate_process(), warnings.catch_warnings():
        warnings.simplefilter("error")
        if message is None:
            Accelerator(**options)
            return
        with pytest.raises(InputError, match=message) as caught:
            Accelerator(**options)
        assert "\n" not in str(caught.value)


def test_arguments_without_effect_are_listed_in_one_warning() -> None:
    handler = DistributedDataParallelKwargs(static_graph=True, bucket_cap_mb=7)
    expected = r"bucket_cap_mb=7\), DistributedDataParallelKwargs\(static_graph=True"
    with accelerate_process(), pytest.warns(UserWarning, match=expected) as caught:
        Accelerator(kwargs_handlers=[handler])
    assert len(caught) == 1


def test_every_argument_of_accelerate_is_known() -> None:
    """A new version of Accelerate may have arguments about which nobody has decided."""
    inherited = {
        *("device_placement", "split_batches", "gradient_accumulation_steps", "cpu", "rng_types", "log_with"),
        *("project_dir", "project_config", "gradient_accumulation_plugin", "step_scheduler_with_optimizer"),
    }
    checked = {
        *("mixed_precision", "dataloader_config", "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin"),
        *("torch_tp_plugin", "megatron_lm_plugin", "parallelism_config", "dynamo_backend", "dynamo_plugin"),
        "kwargs_handlers",
    }
    assert set(inspect.signature(accelerate.Accelerator).parameters) == inherited | checked


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"USE_FSDP": "true"}, "`fsdp_config` of accelerate's config"),
        ({"USE_DEEPSPEED": "true"}, "`deepspeed_config` of accelerate's config"),
        ({"USE_MEGATRON_LM": "true"}, "`megatron_lm_config` of accelerate's config"),
        ({"USE_PARALLELISM_CONFIG": "true"}, "`parallelism_config` of accelerate's config"),
        ({"DYNAMO_BACKEND": "INDUCTOR"}, "`dynamo_config` of accelerate's config"),
        ({"MIXED_PRECISION": "fp8"}, "set numerics.precision of a plan to fp8"),
    ],
)
def test_variables_of_accelerates_config_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_variables(variables)


def test_variables_that_nobody_knows_are_listed() -> None:
    known = {"MIXED_PRECISION": "bf16", "USE_CPU": "true", "USE_FSDP": "false", "DYNAMO_MODE": "default"}
    assert check_variables(known) == []
    assert check_variables({**known, "NEW_OPTION": "7"}) == ["ACCELERATE_NEW_OPTION=7"]


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
num_machines: 1
num_processes: 1
use_cpu: true
"""


def _launch_environment(config: str, folder: Path) -> dict[str, str]:
    """The environment in which `accelerate launch` starts a script with this config file."""
    (folder / "config.yaml").write_text(config)
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(folder / "config.yaml"), "script.py"])
    arguments, *_ = launch._validate_launch_command(arguments)
    _, environment = prepare_simple_launcher_cmd_env(arguments)
    return {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}


def test_what_accelerates_config_file_says_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerate_process():
        for name, value in _launch_environment(CONFIG, tmp_path).items():
            monkeypatch.setenv(name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            accelerator = Accelerator()
        assert accelerator.mixed_precision == accelerator.plan.numerics.precision == "bf16"


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("dynamo_config:\n  dynamo_backend: INDUCTOR\n", "set it to NO and compute.compile"),
        ("dynamo_config:\n  dynamo_backend: EAGER\n", "ACCELERATE_DYNAMO_BACKEND is EAGER"),
    ],
)
def test_what_accelerates_config_file_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addition: str, message: str
) -> None:
    for name, value in _launch_environment(CONFIG + addition, tmp_path).items():
        monkeypatch.setenv(name, value)
    with accelerate_process(), pytest.raises(InputError, match=message):
        Accelerator()
