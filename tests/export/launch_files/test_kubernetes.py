"""The TrainJob manifest, read back: its values, and whether Kubeflow's published schema knows all of them."""

from typing import Any

import pytest
import yaml

from meshwright.export.launch_files.kubernetes import trainjob_manifest
from meshwright.export.launch_files.layout import Layout
from tests.export.launch_files.requests import HOSTILE, request
from tests.train.one_process import toy_job


def manifest(**fields: Any) -> dict[str, Any]:
    text = trainjob_manifest(request(**{"image": "registry/toy:1", **fields})).text
    *_, read = yaml.safe_load_all(text)
    assert isinstance(read, dict)
    return read


def test_the_manifest_says_what_the_layout_says() -> None:
    read = manifest(time_s=90, interface="eth0")
    assert (read["apiVersion"], read["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert read["metadata"] == {"name": "toy"}
    assert read["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    resources = {"cpu": "96", "nvidia.com/gpu": "8"}
    assert read["spec"]["trainer"] == {
        "image": "registry/toy:1",
        "command": ["torchrun", "--max-restarts=3", "-m", "meshwright", "train", "toy.yaml", "--resume=auto"],
        "numNodes": 2,
        "numProcPerNode": 8,
        "resourcesPerNode": {"requests": resources, "limits": resources},
        "env": [
            *({"name": f"{library}_SOCKET_IFNAME", "value": "eth0"} for library in ("GLOO", "NCCL")),
            {"name": "MESHWRIGHT_TOKEN", "valueFrom": {"secretKeyRef": {"name": "toy-token", "key": "token"}}},
        ],
    }
    (patch,) = read["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    assert node["template"]["spec"]["template"]["spec"] == {"terminationGracePeriodSeconds": 30}
    assert read["spec"]["activeDeadlineSeconds"] == 90


def test_pods_of_several_machines_share_a_random_secret() -> None:
    secrets = [next(yaml.safe_load_all(trainjob_manifest(request(image="toy")).text)) for _ in range(2)]
    assert [(secret["kind"], secret["metadata"]) for secret in secrets] == [("Secret", {"name": "toy-token"})] * 2
    tokens = [secret["stringData"]["token"] for secret in secrets]
    assert len({*tokens}) == 2
    assert all(len(token) == 32 for token in tokens)
    one_pod = trainjob_manifest(request(image="toy", layout=Layout(1, 2, on_gpus=True, cores_per_rank=4))).text
    assert "token" not in one_pod.lower()


@pytest.mark.parametrize("fields", [{}, {"time_s": 90, "interface": "eth0"}, {"arguments": ("train", HOSTILE)}])
def test_the_published_schema_knows_every_field(fields: dict[str, Any]) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models.trainer_v1alpha1_train_job",
        reason="kubeflow-trainer-api is not installed: pip install -e '.[dev]'",
    )
    read = manifest(**fields)
    # Reading leaves out fields that the schema does not know, and raises an error for values of a wrong type.
    assert models.TrainerV1alpha1TrainJob.from_dict(read).to_dict() == read


def test_no_value_becomes_yaml_or_a_variable() -> None:
    word = f"--set=a={HOSTILE}\\nkind: Pod"
    read = manifest(arguments=("train", word), image="x: {y: 1}")
    assert read["spec"]["trainer"]["image"] == "x: {y: 1}"
    written = read["spec"]["trainer"]["command"][-1]
    # Kubernetes reads `$$` as one `$`, and replaces `$(NAME)`: here nothing is left to replace.
    assert written.replace("$$", "") == word.replace("$", "")
    assert written.replace("$$", "$") == word
    assert read["kind"] == "TrainJob"


@pytest.mark.parametrize(
    ("name", "resource"),
    [("My_Job.v2", "my-job-v2"), ("2nd", "job-2nd"), ("___", "job"), ("x" * 80, "x" * 50), ("Ünder_", "nder")],
)
def test_names_are_made_fit_for_kubernetes(name: str, resource: str) -> None:
    assert manifest(job=toy_job(name=name))["metadata"]["name"] == resource


def test_ranks_on_cpus_ask_for_no_gpus() -> None:
    read = manifest(layout=Layout(3, 2, on_gpus=False, cores_per_rank=4))
    assert read["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"cpu": "8"}
