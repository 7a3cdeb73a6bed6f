"""`world`: one, two or three ranks that call Horovod."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool, ranks


@pytest.fixture(scope="module", params=[1, 2, 3], ids=["1 rank", "2 ranks", "3 ranks"])
def world(request: pytest.FixtureRequest) -> Iterator[RankPool | None]:
    if request.param == 1:
        yield None
    else:
        with ranks(request.param) as pool:
            yield pool
