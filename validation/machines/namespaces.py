"""Two "machines": network namespaces of Linux that are joined by a pair of virtual Ethernet devices. They share the
file system, as machines with a network file system do. Needs root and the programs `ip` and `tc`."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Machine:
    """A namespace. `device` is its end of the cable, and `address` the address of that."""

    name: str
    device: str
    address: str
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def run(self, *command: str) -> str:
        return _run("ip", "netns", "exec", self.name, *command)

    def start(self, *command: str, log: Path, **variables: str) -> "subprocess.Popen[str]":
        """Starts a program on this machine, with its output in a file."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
        with log.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                text=True,
            )
        self.processes.append(process)
        return process

    def take_away(self) -> None:
        """Cuts the cable, then kills all processes: the other machine hears nothing of it."""
        self.cut()
        for number in self.run_quietly("ip", "netns", "pids", self.name).split():
            os.kill(int(number), signal.SIGKILL)

    @staticmethod
    def run_quietly(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True).stdout

    def cut(self) -> None:
        self.run("ip", "link", "set", self.device, "down")

    def restore(self) -> None:
        self.run("ip", "link", "set", self.device, "up")

    def shape(self, rate: str | None) -> None:
        """Limits what this machine sends, for example to "100mbit"; not any more if the rate is None."""
        if rate is None:
            self.run_quietly("ip", "netns", "exec", self.name, "tc", "qdisc", "delete", "dev", self.device, "root")
            return
        limits = ("rate", rate, "burst", "64k", "latency", "50ms")
        self.run("tc", "qdisc", "replace", "dev", self.device, "root", "tbf", *limits)


def why_not() -> str | None:
    """Why there can be no machines here; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    try:
        with two_machines():
            return None
    except RuntimeError as error:
        return str(error)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    name = f"mw{os.getpid()}"
    subnet = f"10.77.{os.getpid() % 250}"
    machines = (Machine(f"{name}a", f"{name}a", f"{subnet}.1"), Machine(f"{name}b", f"{name}b", f"{subnet}.2"))
    try:
        for machine in machines:
            _run("ip", "netns", "add", machine.name)
            machine.run("ip", "link", "set", "lo", "up")
        ends = [(machine.device, "netns", machine.name) for machine in machines]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for machine in machines:
            machine.run("ip", "address", "add", f"{machine.address}/24", "dev", machine.device)
            machine.restore()
        yield machines
    finally:
        for machine in machines:
            for text in machine.run_quietly("ip", "netns", "pids", machine.name).split():
                os.kill(int(text), signal.SIGKILL)
            for process in machine.processes:
                process.wait()
            machine.run_quietly("ip", "netns", "delete", machine.name)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
