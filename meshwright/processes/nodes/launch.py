"""Starts the ranks of this machine, which is one of several that train together."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from types import MappingProxyType
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from meshwright.errors import InputError, MeshwrightError, RankError, Stopped, StorageError, TrainingDiverged
from meshwright.processes import environment as variables
from meshwright.processes.failure import Failure, to_error
from meshwright.processes.local.fork_server import ForkServer, fork_server
from meshwright.processes.local.launch import quiet_elastic
from meshwright.processes.network.interface import interface_variables
from meshwright.processes.nodes.agent import NodeAgent, result_key
from meshwright.processes.nodes.rendezvous import Node, join_rendezvous, reach_store, serve_store
from meshwright.processes.output import print_to_user
from meshwright.processes.signals import StopRequest
from meshwright.processes.token.machines import Greeter, MachinesStore, connect_launcher_store, read_greeting
from meshwright.processes.token.run_token import find_token
from meshwright.processes.token.signed_store import write

_MONITOR_S = 0.1
_RESULT_S = 60.0  # how long rank 0 waits for the launcher to take its result
_LOGS = Path("logs of the run's folder")


@dataclass(frozen=True)
class NodeSettings:
    """How the ranks of this machine are started: `threads` of each, how often all may be restarted, how long they may
    take to save, how long machines wait for each other, and whether a spare process waits to start ranks again."""

    threads: int
    restarts: int
    grace_s: float
    timeout_s: float
    spare: bool = True


def launch_node(
    module: str,
    arguments: Sequence[str],
    node: Node,
    settings: NodeSettings,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Calls `main()` of the module in every rank of this machine, with `arguments` in `sys.argv`, until the ranks of
    all machines have finished. Returns the result that rank 0 wrote with `write_result`.

    Raises RankError, StorageError or InputError when ranks failed for good, and Stopped when a signal stopped them,
    here or on another machine."""
    stop = StopRequest((SIGTERM, SIGINT, SIGHUP))

    def check() -> None:
        if stop.received is not None:
            raise Stopped(f"stopped by {stop.received.name}")

    with (
        stop,
        quiet_elastic(),
        variables.environment_variables({**_rank_variables(node, settings), **environment}),
    ):
        token = find_token(is_on_one_machine=False)
        store, look = _meet(node, token, settings, check)
        for lost in range(1, settings.restarts + 2):
            if lost > 1 and node.rank:
                store, look = _meet(node, token, settings, check)
            try:
                with fork_server(module, settings.spare) as server:
                    return _run(module, arguments, node, settings, store, server, stop, check, look)
            except RendezvousConnectionError:
                who = f"machine 0, at {node.address}," if node.rank else "another machine"
                if lost <= settings.restarts:
                    print_to_user(f"{who} does not answer: waiting until its command is started again")
    raise RankError(f"{who} did not answer {lost} times; the same commands resume the run")


def write_result(result: Mapping[str, Any] | None) -> None:
    """Called by rank 0 at the end of its work: tells the launchers of all machines the result; None if the run was
    stopped before its end."""
    env = variables.read_environment()
    store = connect_launcher_store(_RESULT_S)
    key = result_key(env.attempt)
    write(store, key, json.dumps(result))
    store.get(key)  # `set` does not wait for an answer, and the rank is about to end


def _meet(
    node: Node, token: bytes, settings: NodeSettings, check: Callable[[], None]
) -> tuple[MachinesStore, Callable[[], None]]:
    """Returns the store of the machines, and what this machine has to call again and again."""
    if node.rank == 0:
        greeter = Greeter(serve_store(node.address), token)
        if node.nodes.most > 1:
            print_to_user(f"node 0 of {node.nodes}: the others join at --rendezvous {node.address}")
        return greeter.signed, greeter.look
    print_to_user(f"node {node.rank} of {node.nodes}: joining at {node.address}")
    store = reach_store(node.address, settings.timeout_s, check)
    return read_greeting(store, token, node.rank, f"--rendezvous {node.address}", check), lambda: None


def _run(
    module: str,
    arguments: Sequence[str],
    node: Node,
    settings: NodeSettings,
    store: MachinesStore,
    server: ForkServer,
    stop: StopRequest,
    check: Callable[[], None],
    look: Callable[[], None],
) -> dict[str, Any]:
    """Runs the ranks of this machine until those of all machines have finished. Raises a `RendezvousConnectionError` if
    the machine that has the store is lost."""
    rendezvous = join_rendezvous(node, store, settings.timeout_s, check, look)
    spec = WorkerSpec(
        role="rank",
        local_world_size=node.local_ranks,
        rdzv_handler=rendezvous,
        entrypoint=module,
        args=tuple(word.replace("$", "$$") for word in arguments),  # elastic would substitute `${local_rank}`
        max_restarts=settings.restarts,
        monitor_interval=_MONITOR_S,
    )
    agent = NodeAgent(spec, server, store, settings.grace_s, stop, rendezvous)
    try:
        state = agent.run()
        result = agent.result()
    except Stopped as error:
        result = agent.result()
        if result is None:
            raise Stopped(f"{error} before the end; the same commands, on all machines, resume the run") from None
        return result
    except RendezvousConnectionError:
        agent.kill_ranks()
        raise
    except RendezvousTimeoutError:
        raise RankError(
            f"fewer than {node.nodes.least} machines have joined at {node.address} within train.timeout_s"
            f" ({settings.timeout_s:g} s): start the command on the others, with another --node-rank each"
        ) from None
    except RendezvousClosedError:
        raise RankError(
            f"another machine has ended the run that meets at {node.address}: its output says why"
        ) from None
    except RendezvousError as error:
        raise RankError(f"--rendezvous {node.address}: {error}") from None
    except RuntimeError as error:  # of a store whose machine is gone
        if isinstance(error, MeshwrightError):
            raise
        agent.kill_ranks()
        raise RendezvousConnectionError(str(error)) from error
    finally:
        rendezvous.shutdown()
    if state is not None and state.is_failed():
        raise _error(agent.failure) if agent.failure else RankError("a rank failed")
    if result is None:
        raise Stopped("the ranks were told to stop; the same commands resume the run")
    return result


def _error(failure: Failure) -> MeshwrightError:
    """Returns the error to show to the user. Rank 0 has chosen the folder of the logs."""
    error = to_error(failure, _LOGS)
    if isinstance(error, InputError | StorageError | TrainingDiverged):
        return error
    return RankError(str(error))


def _rank_variables(node: Node, settings: NodeSettings) -> dict[str, str]:
    return {
        **interface_variables(node.address.host),
        "OMP_NUM_THREADS": str(settings.threads),
        "MKL_NUM_THREADS": str(settings.threads),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "none",
    }
