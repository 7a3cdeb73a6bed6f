"""The environment variables in which `accelerate launch` gives its options, and those of the file that `accelerate
config` has written, to the processes that it starts."""

import os

_PREFIX = "ACCELERATE_"


def read_accelerate_variables() -> dict[str, str]:
    """Returns the variables that begin with `ACCELERATE_`, by their names without this prefix."""
    return {name.removeprefix(_PREFIX): value for name, value in os.environ.items() if name.startswith(_PREFIX)}
