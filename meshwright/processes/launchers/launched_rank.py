"""`LaunchedRank`: a rank as the environment variables of its launcher describe it, and how such variables are read. An
error names the variables and their values."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import InputError

Variables = Mapping[str, str]


@dataclass(frozen=True)
class LaunchedRank:
    """Which rank a process is. `rank_variable` is the variable that gives every process of the launch its rank. `job`
    tells the launch from others on the same machine; it is empty if no variable does. `attempt` is how often the ranks
    were restarted before. If no variable says how many ranks this machine has, `local_size` is a lower bound, and
    `counts_local_ranks` is true: ranks then count themselves when they join. `host` and `port` are the address that the
    launcher's own variables give for the store, if they do."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    rank_variable: str
    job: str = ""
    attempt: int = 0
    counts_local_ranks: bool = False
    host: str | None = None
    port: int | None = None

    @property
    def is_on_one_machine(self) -> bool:
        return self.local_size == self.size and not self.counts_local_ranks


def number(variables: Variables, name: str) -> int:
    """Returns the value of a variable that is set, as a number from 0 on."""
    text = variables[name]
    if not (text.isascii() and text.isdigit()):
        raise InputError(
            f"{name}={text!r}: a launcher sets this variable to a whole number from 0 on; correct or unset it"
        )
    return int(text)


def numbers(variables: Variables, launcher: str, *names: str) -> list[int]:
    """Returns the values of these variables. It is an error if only some of them are set."""
    missing = [name for name in names if name not in variables]
    if missing:
        present = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
        raise InputError(
            f"{present} {'is' if len(names) - len(missing) == 1 else 'are'} set, but {' and '.join(missing)}"
            f" {'is' if len(missing) == 1 else 'are'} not: a rank of {launcher} has all of them; unset the first ones"
            " if this process is no rank"
        )
    return [number(variables, name) for name in names]


def check_order(variables: Variables, index: str, count: str) -> None:
    """Raises an error if the index that one variable gives is not below the count that the other one gives."""
    if number(variables, index) >= number(variables, count):
        raise InputError(
            f"{index}={variables[index]} is not below {count}={variables[count]}: these variables contradict each other"
        )
