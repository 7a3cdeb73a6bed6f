"""Numbers of jobs, plans and clusters that are too large, too small or no numbers are refused, with the limit."""

from typing import Any

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.files.yaml_file import validate
from meshwright.job import Job, load_plan, parse_job
from tests.cli.commands import JOB

DEVICE = {"name": "x", "kind": "cuda", "memory_bytes": 1, "bandwidth_bytes_per_s": 1, "rates": {"fp32": 1}}
LINK = {"name": "y", "bandwidth_bytes_per_s": 1}


def job_with(section: str, field: str, value: Any) -> Job:
    return parse_job({**JOB, section: {**JOB.get(section, {}), field: value}})


def cluster_with(node: dict[str, Any], **fields: Any) -> Cluster:
    whole = {"device": DEVICE, "link": LINK, "count": 1, "cores": 1, **node}
    return validate(Cluster, {"name": "z", "nodes": [whole], "link": LINK, **fields}, "c.yaml")


@pytest.mark.parametrize(
    ("section", "field", "value", "problem"),
    [
        ("train", "global_batch", 10**18, "train.global_batch is 1000000000000000000: at most 2**31 - 1 samples"),
        ("train", "seed", 10**40, f"train.seed is {10**40}: at most 2**63 - 1, which is the largest seed of torch"),
        ("train", "timeout_s", float("inf"), "train.timeout_s is inf: at most 1,000,000 s, about eleven days"),
        ("train", "timeout_s", float("nan"), "train.timeout_s is nan: input should be greater than 0"),
        ("train", "grace_s", 1e308, "train.grace_s is 1e+308: at most 1,000,000 s"),
        ("train", "grace_s", 1e-300, "train.grace_s is 1e-300: at least 0.001 s"),
        ("train", "epochs", 2**31, "train.epochs is 2147483648: at most 2**31 - 1"),
        ("train", "steps", 10**8, "train.steps is 100000000: at most 99,999,999 steps, which checkpoints can number"),
        ("train", "restarts", 10**10, "train.restarts is 10000000000: at most 2**31 - 1"),
        ("checkpoint", "every_steps", 10**9, "checkpoint.every_steps is 1000000000: at most 99,999,999 steps"),
        ("checkpoint", "keep", 10**10, "checkpoint.keep is 10000000000: at most 2**31 - 1"),
        ("log", "every_steps", 10**9, "log.every_steps is 1000000000: at most 99,999,999 steps"),
        ("data", "workers", 5000, "data.workers is 5000: at most 1,024 processes of one machine"),
        ("data", "parts", 10**9, "data.parts is 1000000000: at most 2**20 parts"),
    ],
)
def test_a_job_with_an_impossible_number_is_refused(section: str, field: str, value: Any, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        job_with(section, field, value)
    assert problem in str(caught.value)


def test_the_largest_numbers_of_a_job_are_accepted() -> None:
    assert job_with("train", "seed", 2**63 - 1).train.seed == 2**63 - 1
    assert job_with("train", "global_batch", 2**31 - 1).train.global_batch == 2**31 - 1
    assert job_with("train", "timeout_s", 1e6).train.timeout_s == 1e6


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"axes": {"replicate": 10**12}}, "plan.axes.replicate is 1000000000000: at most 65,536 devices"),
        ({"axes": {"replicate": 2**10, "tensor": 2**10}}, "axes: replicate(1024) × tensor(1024) = 1,048,576 ranks"),
        (
            {"pipeline": {"microbatches": 10**9}},
            "pipeline.microbatches is 1000000000: at most 65,536 microbatches",
        ),
        ({"memory": {"accumulation": 10**9}}, "plan.memory.accumulation is 1000000000: at most 65,536 microbatches"),
        ({"gradients": {"bucket_bytes": 10**30}}, "at most 2**50 bytes, one pebibyte"),
        ({"gradients": {"servers": 10**6}}, "plan.gradients.servers is 1000000: at most 1,024 processes"),
        ({"compute": {"threads": 10**6}}, "plan.compute.threads is 1000000: at most 4,096 threads of one rank"),
        ({"modules": {"branches": {"a": 10**9}}}, "plan.modules.branches.a is 1000000000: at most 65,535"),
    ],
)
def test_a_plan_with_an_impossible_number_is_refused(plan: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        load_plan(plan)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"number": 10**12}, "nodes.0.number is 1000000000000: at most 65,536 devices, for which planning takes"),
        ({"number": 1024, "count": 1024}, "the nodes have 1,048,576 devices together: at most 65,536"),
        ({"cores": 10**12}, "nodes.0.cores is 1000000000000: at most 2**24 cores of one machine"),
        ({"device": {**DEVICE, "memory_bytes": 1e308}}, "nodes.0.device.memory_bytes is 1e+308: too large for"),
        ({"device": {**DEVICE, "memory_bytes": 2**60}}, "nodes.0.device.memory_bytes is 1152921504606846976: at most"),
        ({"device": {**DEVICE, "rates": {"fp32": float("inf")}}}, "rates.fp32 is inf: at most 1e21 operations/s"),
        ({"device": {**DEVICE, "rates": {"fp32": float("nan")}}}, "rates.fp32 is nan: input should be greater than 0"),
        ({"device": {**DEVICE, "rates": {"fp32": 1e-300}}}, "rates.fp32 is 1e-300: at least 1 operation/s"),
        ({"device": {**DEVICE, "bandwidth_bytes_per_s": -1}}, "bandwidth_bytes_per_s is -1: input should be greater"),
        ({"device": {**DEVICE, "bandwidth_bytes_per_s": 1e-9}}, "is 1e-09: at least 1 byte/s, or 0 if it is not known"),
        ({"device": {**DEVICE, "launch_s": 1e9}}, "nodes.0.device.launch_s is 1000000000.0: at most 3,600 s"),
        ({"link": {**LINK, "latency_s": float("inf")}}, "nodes.0.link.latency_s is inf: at most 3,600 s"),
    ],
)
def test_a_cluster_with_an_impossible_number_is_refused(node: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        cluster_with(node)
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["999999x999999xH100", "65537xA100", "70000xcpu", "99999999xcpu", f"{10**40}x8xH100"])
def test_a_name_of_too_many_devices_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"cluster '{name}' has [\d,]+ devices: at most 65,536, for which planning"):
        find_cluster(name)


@pytest.mark.parametrize("name", [f"{'9' * 5000}xH100", "1x2x3xH100"])
def test_a_name_that_is_no_count_of_devices_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is not known"):
        find_cluster(name)


@pytest.mark.parametrize("name", [f"8xH100@{'9' * 400}G", "8xH100@0.0000000001G"])
def test_a_link_of_an_impossible_rate_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"at most 1e18 bytes/s|at least 1 byte/s"):
        find_cluster(name)


def test_the_largest_cluster_is_accepted() -> None:
    assert find_cluster("8192x8xH100").device_count == find_cluster("65536xH100").device_count == 65_536
