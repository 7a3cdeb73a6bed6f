"""The variables of Slurm's srun, and the syntax of its lists.

    node[01-03,7],gpu-a     node01 node02 node03 node7 gpu-a    `expand_hosts`
    2(x3),1                 2 2 2 1                             `expand_counts`

A batch script is no rank: it has SLURM_PROCID=0 and the number of tasks of the whole job, but no step. Neither is the
shell of an interactive step, or a step of one task: they start ranks of their own.
"""

import re
from itertools import product

from meshwright.errors import InputError
from meshwright.processes.launchers.launched_rank import LaunchedRank, Variables, check_order, number, numbers

# Ids of steps that srun did not start, such as the interactive step of salloc, begin here.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Ports that neither well-known services nor outgoing connections of Linux (from 32768 on) use.
_FIRST_PORT, _PORTS = 16384, 12288
_MOST_HOSTS = 100_000
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def read_slurm(variables: Variables) -> LaunchedRank | None:
    step = _first(variables, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or "SLURM_PROCID" not in variables or number(variables, step) >= _FIRST_SPECIAL_STEP:
        return None
    tasks = _first(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or "SLURM_STEP_NUM_TASKS"
    job = _first(variables, "SLURM_JOB_ID", "SLURM_JOBID") or "SLURM_JOB_ID"
    rank, size, local_rank, node, job_id, step_id = numbers(
        variables, "srun", "SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_NODEID", job, step
    )
    check_order(variables, "SLURM_PROCID", tasks)
    local_size = _tasks_of_node(variables, node, tasks)
    if local_rank >= local_size:
        raise InputError(
            f"SLURM_LOCALID={local_rank} is not below the {local_size} tasks of node {node} (SLURM_NODEID): these"
            " variables contradict each other"
        )
    host = None
    hosts = _first(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts is not None and local_size < size:
        host = _store_host(variables, hosts, rank)
    return LaunchedRank(
        launcher="srun",
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        rank_variable="SLURM_PROCID",
        job=f"{job_id}.{step_id}",
        attempt=number(variables, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in variables else 0,
        host=host,
        port=store_port(job_id, step_id),
    )


def store_port(job: int, step: int) -> int:
    """Returns the port of the store of a job's step: 16384 + (31 × job + step) mod 12288."""
    return _FIRST_PORT + (31 * job + step) % _PORTS


def expand_counts(text: str) -> list[int]:
    """Returns the numbers of a list such as `2(x3),1`, by node."""
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            raise InputError(f"{text!r} is no list of tasks by node as Slurm writes it, such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a list such as `node[01-03,7],gpu-a`. A name may have several brackets."""
    hosts: list[str] = []
    for word in _split_outside_brackets(text):
        pieces = re.split(r"\[([^\[\]]*)\]", word)  # text and brackets alternate
        if not word or any(set(piece) & set("[],") for piece in pieces[::2]):
            raise _no_host_list(text)
        options = [[piece] if index % 2 == 0 else _bracket(piece, text) for index, piece in enumerate(pieces)]
        hosts += ["".join(parts) for parts in product(*options)]
    return hosts


def _bracket(content: str, text: str) -> list[str]:
    numbers_in_bracket: list[str] = []
    for part in content.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _no_host_list(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MOST_HOSTS:
            raise _no_host_list(text)
        numbers_in_bracket += [str(value).zfill(len(match[1])) for value in range(first, last + 1)]
    return numbers_in_bracket


def _split_outside_brackets(text: str) -> list[str]:
    words, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            words.append("")
        else:
            words[-1] += character
    return words


def _no_host_list(text: str) -> InputError:
    return InputError(f"{text!r} is no list of hosts as Slurm writes it, such as node[01-03,7],gpu-a")


def _store_host(variables: Variables, list_name: str, rank: int) -> str:
    """Returns the first host of the step, which has rank 0 unless srun was told to distribute tasks otherwise."""
    host = expand_hosts(variables[list_name])[0]
    here = variables.get("SLURMD_NODENAME", host)
    if rank == 0 and here != host and "MASTER_ADDR" not in variables:
        raise InputError(
            f"SLURM_PROCID=0 runs on SLURMD_NODENAME={here}, but the first host of {list_name}={variables[list_name]}"
            f" is {host}, where the other ranks look for it: set MASTER_ADDR={here} for all ranks"
        )
    return host


def _tasks_of_node(variables: Variables, node: int, tasks: str) -> int:
    name = _first(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    if name is None:
        raise InputError(
            f"{tasks}={variables[tasks]} is set, but SLURM_STEP_TASKS_PER_NODE is not, so it is unknown how many tasks"
            " this machine has: srun sets both"
        )
    if name == "SLURM_NTASKS_PER_NODE":
        return number(variables, name)
    counts = expand_counts(variables[name])
    if sum(counts) != number(variables, tasks) or node >= len(counts):
        raise InputError(
            f"{name}={variables[name]} has {sum(counts)} tasks on {len(counts)} nodes, but {tasks}={variables[tasks]}"
            f" and SLURM_NODEID={node}: these variables contradict each other"
        )
    return counts[node]


def _first(variables: Variables, *names: str) -> str | None:
    return next((name for name in names if name in variables), None)
