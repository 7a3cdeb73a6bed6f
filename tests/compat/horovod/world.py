"""Runs functions that call Horovod on ranks of a pool, or alone in the process of the test."""

from collections.abc import Callable
from typing import Any

import meshwright.compat.horovod as hvd
from meshwright.processes.environment import environment_variables
from meshwright.processes.loopback import ADDRESS, serve_store
from tests.ranks import RankPool

VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT")


def run_horovod(pool: RankPool | None, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the results by rank of a function that is called between `hvd.init()` and `hvd.shutdown()`. Without a
    pool, this process is the only rank."""
    if pool is None:
        return [_between_init_and_shutdown(function, args)]
    store, port = serve_store()
    results = pool.run(_as_rank, port, function, args)
    del store  # the ranks needed it until here
    return results


def _as_rank(rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    values = (rank, size, rank, size, ADDRESS, port)
    variables = {f"HOROVOD_{name}": str(value) for name, value in zip(VARIABLES, values, strict=True)}
    with environment_variables(variables):  # other tests use the same rank afterwards
        return _between_init_and_shutdown(function, args)


def _between_init_and_shutdown(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    hvd.init()
    try:
        return function(*args)
    finally:
        hvd.shutdown()
