"""Each launcher's variables, as it sets them, describe a rank; the launchers have an order; incomplete or contradictory
variables are named in an error. The variables of OpenMPI 4.1.4, MPICH 4.0.2 and Slurm 22.05.8 were recorded in their
processes."""

import pytest

from meshwright.errors import InputError
from meshwright.processes.launchers.launched_rank import LaunchedRank
from meshwright.processes.launchers.table import LAUNCHERS, read_launched_rank
from meshwright.processes.launchers.torch_variables import check_no_torchrun_is_missing

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
PYTORCH_JOB = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PYTHONUNBUFFERED": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1384710145",
    "PMIX_NAMESPACE": "1384710145",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PALS_APID": "a7"}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOBID": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NODELIST": "gpu[07-08]",
    "SLURMD_NODENAME": "gpu07",
}
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURMD_NODENAME": "gpu08",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_RESTART_COUNT": "1",
}
SRUN_PMI2 = {**SRUN, "PMI_RANK": "6", "PMI_SIZE": "8", "PMI_JOBID": "2.0", "PMI_FD": "11"}
PODS = "a launcher that sets RANK and WORLD_SIZE, such as PyTorchJob"

ROWS = {
    "meshwright": (
        {**TORCHRUN, "MESHWRIGHT_FORK_SERVER": "77"},
        LaunchedRank("meshwright", 5, 8, 1, 4, "RANK", "run", attempt=2),
    ),
    "torch elastic": (TORCHRUN, LaunchedRank("torchrun", 5, 8, 1, 4, "RANK", "run", attempt=2)),
    "PyTorchJob": (PYTORCH_JOB, LaunchedRank(PODS, 1, 4, 0, 1, "RANK")),
    "OpenMPI": (OPEN_MPI, LaunchedRank("OpenMPI's mpirun", 1, 2, 1, 2, "OMPI_COMM_WORLD_RANK", "1384710145")),
    "MPICH, Intel MPI": (MPICH, LaunchedRank("mpirun (MPICH or Intel MPI)", 1, 2, 1, 2, "PMI_RANK")),
    "Slurm": (
        SRUN,
        LaunchedRank("srun", 6, 8, 2, 4, "SLURM_PROCID", "2.0", attempt=1, host="gpu07", port=16384 + 62),
    ),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launchers_variables_describe_a_rank(name: str) -> None:
    variables, expected = ROWS[name]
    assert read_launched_rank(variables) == expected
    assert LAUNCHERS[name](variables) == expected


def test_a_launcher_that_another_one_has_started_comes_first() -> None:
    names = list(LAUNCHERS)
    for position, name in enumerate(names[:-1]):
        for outer in names[position + 1 :]:
            if (name, outer) == ("torch elastic", "PyTorchJob"):
                continue  # the same variables: torchrun replaces those of the pod
            assert read_launched_rank({**ROWS[outer][0], **ROWS[name][0]}) == ROWS[name][1], (name, outer)


def test_further_forms_of_the_variables() -> None:
    assert read_launched_rank(SRUN_PMI2) == ROWS["Slurm"][1]
    pals = read_launched_rank(PALS)
    assert pals is not None
    assert (pals.local_rank, pals.local_size, pals.job) == (1, 2, "a7")
    by_hand = read_launched_rank({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    assert by_hand is not None
    assert (by_hand.local_rank, by_hand.local_size, by_hand.is_on_one_machine) == (1, 2, True)
    # As job scripts for Slurm export them: how many ranks a machine has is counted when they join.
    exported = read_launched_rank({**SRUN, "RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "MASTER_ADDR": "gpu07"})
    assert exported is not None
    assert (exported.local_rank, exported.counts_local_ranks, exported.is_on_one_machine) == (2, True, False)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH_SCRIPT,
        {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # the shell of salloc
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
        | {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "gpu07"},
        {**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"},
        {**PYTORCH_JOB, "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "2"},
    ],
)
def test_a_process_that_is_no_rank_of_several(variables: dict[str, str]) -> None:
    assert read_launched_rank(variables) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE=2 is set, but RANK is not"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "worker-1"}, "RANK='worker-1': a launcher sets this variable to a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1': a launcher sets"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_LOCAL_RANK and OMPI_COMM_WORLD_LO",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2 is not below OMPI_COMM_WORLD_SIZE=2"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "OMPI_COMM_WORLD_LOCAL_SIZE=3 is more than"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID and MPI_LOCALNRANKS are not"),
        ({**MPICH, "PMI_SIZE": "two"}, "PMI_SIZE='two'"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3 says that a PMIx launcher"),
        ({**SRUN, "SLURM_PROCID": "8"}, "SLURM_PROCID=8 is not below SLURM_STEP_NUM_TASKS=8"),
        ({**SRUN, "SLURM_LOCALID": "4"}, "SLURM_LOCALID=4 is not below the 4 tasks of node 1"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,2"}, "SLURM_STEP_TASKS_PER_NODE=4,2 has 6 tasks on 2 nodes"),
        ({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}, "but SLURM_LOCALID is not"),
        (
            {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            "SLURM_PROCID=0 runs on SLURMD_NODENAME=gpu08, but the first host of SLURM_STEP_NODELIST=gpu[07-08] is gpu",
        ),
    ],
)
def test_variables_that_are_incomplete_or_contradictory_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_launched_rank(variables)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "variables",
    [{"PET_NNODES": "2", "PET_NODE_RANK": "1"}, {"PET_NNODES": "1:4"}, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}],
)
def test_a_pod_where_torchrun_should_have_been_started_says_so(variables: dict[str, str]) -> None:
    with pytest.raises(InputError) as error:
        check_no_torchrun_is_missing(variables)
    assert all(f"{name}={value}" in str(error.value) for name, value in variables.items())
    assert "start `torchrun -m meshwright train JOB`" in str(error.value)


def test_a_pod_of_one_machine_starts_its_own_ranks() -> None:
    variables = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "0"}
    check_no_torchrun_is_missing(variables)
    assert read_launched_rank(variables) is None
