"""How much memory the spare process takes from which ranks are started again."""

from pathlib import Path

from meshwright.processes.environment import fork_server_pid


def spare_memory_bytes() -> int | None:
    """Returns the memory of the process that forked this rank: what it has for itself, and its share of what it has in
    common with the ranks, as the kernel divides it (Pss). None if no such process started this rank, or if the system
    does not say."""
    pid = fork_server_pid()
    return None if pid is None else process_memory_bytes(pid)


def process_memory_bytes(pid: int) -> int | None:
    """Returns the proportional set size of a process; None if the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")]
    return sizes[0] if sizes else None
