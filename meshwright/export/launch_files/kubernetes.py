"""The TrainJob manifest of a job: Kubeflow's Trainer starts a pod on each machine, and torchrun in it starts the ranks.
The controller sets torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, …)."""

import re
import secrets
from typing import Any

import yaml

from meshwright.export.launch_files.request import LaunchFile, LaunchRequest

_RUNTIME = "torch-distributed"
_NODE = "node"  # the name of the runtime's job and of its container
_LONGEST_NAME = 50  # Kubernetes allows 63 for a pod's name, which is this name and the numbers of job and pod


def trainjob_manifest(request: LaunchRequest) -> LaunchFile:
    """Returns the manifest. The request has an image."""
    assert request.options.image is not None
    layout = request.layout
    resources = {"cpu": str(layout.cores_per_rank * layout.ranks_per_node)}
    if layout.gpus_per_node:
        resources["nvidia.com/gpu"] = str(layout.gpus_per_node)
    restarts = f"--max-restarts={request.job.train.restarts}"
    trainer: dict[str, Any] = {
        "image": request.options.image,
        "command": [_literal(word) for word in ("torchrun", restarts, "-m", "meshwright", *request.arguments)],
        "numNodes": layout.nodes,
        "numProcPerNode": layout.ranks_per_node,
        "resourcesPerNode": {"requests": resources, "limits": resources},
    }
    name = _resource_name(request.job.name)
    environment: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in request.variables.items()]
    if layout.nodes > 1:
        source = {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}
        environment.append({"name": "MESHWRIGHT_TOKEN", "valueFrom": source})
    if environment:
        trainer["env"] = environment
    spec: dict[str, Any] = {
        "runtimeRef": {"name": _RUNTIME},
        "trainer": trainer,
        "runtimePatches": [_grace_period(request.grace_s)],
    }
    if request.options.time_s is not None:
        spec["activeDeadlineSeconds"] = request.options.time_s
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": spec,
    }
    text = f"# {request.plan}: {layout.describe()}\n{_dump(manifest)}"
    if layout.nodes > 1:
        text = f"{_token_secret(name)}---\n{text}"
    return LaunchFile(text, "kubectl create -f FILE", has_secret=layout.nodes > 1)


def _token_secret(name: str) -> str:
    """Returns the manifest of the secret that the pods share, by which their ranks tell each other from strangers."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-token"},
        "type": "Opaque",
        "stringData": {"token": secrets.token_hex(16)},
    }
    return f"# The token of this run. Whoever can read this file can join the run.\n{_dump(secret)}"


def _grace_period(seconds: int) -> dict[str, Any]:
    """Returns the patch that gives pods this long to save before they are killed. Kubernetes gives 30 s otherwise."""
    pod = {"spec": {"terminationGracePeriodSeconds": seconds}}
    job = {"name": _NODE, "template": {"spec": {"template": pod}}}
    return {
        "manager": "meshwright",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }


def _literal(word: str) -> str:
    """Returns a word of a command as it must be written: Kubernetes replaces `$(NAME)` by a variable's value, and reads
    `$$` as one `$`."""
    return word.replace("$", "$$")


def _resource_name(name: str) -> str:
    """Returns a name that Kubernetes allows: small letters, digits and '-', with a letter at the beginning."""
    allowed = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not allowed[:1].isalpha():
        allowed = f"job-{allowed}".rstrip("-")
    return allowed[:_LONGEST_NAME].rstrip("-")


def _dump(manifest: dict[str, Any]) -> str:
    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True  # requests and limits are written out twice

    return yaml.dump(manifest, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
