"""The variables of mpirun: OpenMPI, and the process managers that speak PMI (MPICH's Hydra, Intel MPI, Cray's PALS). A
single process is no rank: it starts ranks of its own, as it would without mpirun."""

from meshwright.errors import InputError
from meshwright.processes.launchers.launched_rank import LaunchedRank, Variables, check_order, numbers

_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
# Hydra (MPICH and Intel MPI), and PALS.
_PMI_LOCAL = (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"))
_PMI_JOB = ("PMI_JOBID", "PALS_APID")


def read_open_mpi(variables: Variables) -> LaunchedRank | None:
    if not any(name in variables for name in _OPEN_MPI[:2]):
        return None
    return _rank("OpenMPI's mpirun", variables, _OPEN_MPI, _OPEN_MPI_JOB)


def read_pmi(variables: Variables) -> LaunchedRank | None:
    if not ("PMI_RANK" in variables or "PMI_SIZE" in variables) or _srun_speaks_pmi(variables):
        return None
    local = next((names for names in _PMI_LOCAL if names[0] in variables), _PMI_LOCAL[0])
    return _rank("mpirun (MPICH or Intel MPI)", variables, ("PMI_RANK", "PMI_SIZE", *local), _PMI_JOB)


def check_size_is_known(variables: Variables) -> None:
    """Raises an error if a launcher that speaks PMIx started this process, and no variable says how many ranks it
    has."""
    if "PMIX_RANK" in variables:
        raise InputError(
            f"PMIX_RANK={variables['PMIX_RANK']} says that a PMIx launcher started this process, but no variable says"
            " how many ranks there are: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or start it with mpirun"
            " or srun; unset PMIX_RANK if this process is no rank"
        )


def _srun_speaks_pmi(variables: Variables) -> bool:
    """Whether the variables are those of `srun --mpi=pmi2`, whose ranks Slurm's own variables describe completely."""
    return (
        variables.get("PMI_RANK") == variables.get("SLURM_PROCID")
        and variables.get("PMI_SIZE") == variables.get("SLURM_STEP_NUM_TASKS")
        and _PMI_LOCAL[0][0] not in variables
    )


def _rank(launcher: str, variables: Variables, names: tuple[str, ...], jobs: tuple[str, ...]) -> LaunchedRank:
    rank, size, local_rank, local_size = numbers(variables, launcher, *names)
    check_order(variables, names[0], names[1])
    check_order(variables, names[2], names[3])
    if local_size > size:
        raise InputError(f"{names[3]}={local_size} is more than {names[1]}={size}: they contradict each other")
    job = next((variables[name] for name in jobs if name in variables), "")
    return LaunchedRank(launcher, rank, size, local_rank, local_size, names[0], job)
