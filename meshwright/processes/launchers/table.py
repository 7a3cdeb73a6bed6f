"""The launchers whose ranks can be joined, in the order in which their variables are looked at. docs/machines.md shows
this table to users."""

from collections.abc import Callable

from meshwright.processes.launchers.launched_rank import LaunchedRank, Variables
from meshwright.processes.launchers.mpi_variables import check_size_is_known, read_open_mpi, read_pmi
from meshwright.processes.launchers.slurm_variables import read_slurm
from meshwright.processes.launchers.torch_variables import read_own_rank, read_pytorch_job, read_torch_elastic

# Whoever starts a process last comes first: a torchrun that srun has started passes on Slurm's variables, which then
# describe torchrun itself and not its ranks. mpirun starts its helpers on other machines with srun.
LAUNCHERS: dict[str, Callable[[Variables], LaunchedRank | None]] = {
    "meshwright": read_own_rank,
    "torch elastic": read_torch_elastic,
    "PyTorchJob": read_pytorch_job,
    "OpenMPI": read_open_mpi,
    "MPICH, Intel MPI": read_pmi,
    "Slurm": read_slurm,
}
# With these, a process that is alone has been started as such: it starts no ranks of its own.
_ALSO_FOR_ONE_RANK = ("meshwright", "torch elastic", "PyTorchJob")


def read_launched_rank(variables: Variables) -> LaunchedRank | None:
    """Returns the rank that the variables describe; None for a process that no launcher started as one of several
    ranks. Raises InputError if the variables of the first launcher that they name are incomplete or contradictory."""
    for name, read in LAUNCHERS.items():
        rank = read(variables)
        if rank is not None:
            return rank if rank.size > 1 or name in _ALSO_FOR_ONE_RANK else None
    check_size_is_known(variables)
    return None
