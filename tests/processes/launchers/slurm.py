"""Runs a command with a Slurm of its own: `unshare -n python -m tests.processes.launchers.slurm FOLDER COMMAND…` starts
munge, slurmctld and slurmd in a network of its own, which nothing outside can reach, and ends them after the command.
Cgroups are not used, because containers do not permit them. A job in the partition `urgent` preempts those in `all`."""

import os
import secrets
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

START_S = 60.0
GRACE_S = 60  # before a job that another one preempts is killed


def main() -> int:
    folder, command = Path(sys.argv[1]), sys.argv[2:]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # Slurm resolves names with AI_ADDRCONFIG, for which addresses of the loopback network do not count.
    subprocess.run(["ip", "address", "add", "192.0.2.1/32", "dev", "lo"], check=True)
    os.environ["SLURM_CONF"] = str(_write_configuration(folder))
    munge = folder / "munge"
    files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
    with ExitStack() as daemons:
        for words in (
            ["munged", "--foreground", "--force", f"--socket={munge}/socket", *files],
            ["slurmctld", "-c", "-D"],
            ["slurmd", "-D"],
        ):
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            daemons.callback(process.wait)
            daemons.callback(process.terminate)
        _wait_until_idle()
        return subprocess.run(command).returncode


def _write_configuration(folder: Path) -> Path:
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge" / "key").chmod(0o600)
    file = folder / "slurm.conf"
    file.write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={GRACE_S}
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
""")
    return file


def _wait_until_idle() -> None:
    deadline = time.monotonic() + START_S
    while subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout.strip() != "idle":
        if time.monotonic() > deadline:
            sys.exit("slurmd did not register with slurmctld: see the logs in the folder")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
