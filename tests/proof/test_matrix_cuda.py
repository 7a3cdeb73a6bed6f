"""The same on a GPU that several ranks share over Gloo, and with NCCL on one rank.

Pipelines are left out: Gloo does not send CUDA tensors from rank to rank, and NCCL refuses two ranks on one GPU.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.proof.matrix import COVERING, all_cases
from tests.proof.matrix_case import Worlds, by_size, prove_case
from tests.ranks import ranks
from tests.zoo import ZOO

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ONE_RANK = [(kind, case) for kind in ZOO for case in ("R1", "R1 twice")]
ONE_RANK += [("resnet", "R1 full"), ("gpt", "R1 full"), ("gpt", "R1 selective"), ("bert", "R1 selective")]


def _without_stages(cases: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    return by_size((kind, case) for kind, case in cases if "P" not in case.split()[0])


@pytest.fixture(scope="module")
def nccl() -> Iterator[Worlds]:
    with ExitStack() as stack:
        yield cache(lambda size: stack.enter_context(ranks(size, 300, "nccl")))


@pytest.mark.parametrize(("kind", "case"), _without_stages(COVERING))
def test_ranks_that_share_a_gpu_train_the_same_model(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path, "cuda")


@pytest.mark.parametrize("case", ["S2 twice shards", "S2 gradients shards", "S3 optimizer twice shards"])
def test_shards_in_proportion(worlds: Worlds, case: str, tmp_path: Path) -> None:
    prove_case(worlds, "gpt", case, tmp_path, "cuda")


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "case"), _without_stages(all_cases()))
def test_all_plans_on_a_shared_gpu(worlds: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(worlds, kind, case, tmp_path, "cuda")


@pytest.mark.parametrize(("kind", "case"), ONE_RANK)
def test_one_rank_with_nccl(nccl: Worlds, kind: str, case: str, tmp_path: Path) -> None:
    prove_case(nccl, kind, case, tmp_path, "cuda")
