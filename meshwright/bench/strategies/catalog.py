"""The strategies that the benchmark compares, by name, and which of them `--only` selects."""

from meshwright.errors import InputError, did_you_mean

ALGORITHMS = ("native", "ring", "tree", "halving_doubling", "two_level", "shared_memory")
UPDATES = ("synchronous", "asynchronous")
SHARDING_LEVELS = ("optimizer", "gradients", "parameters")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")

SINGLE = "single device"
PLAIN = "plain loop"
DATA_PARALLEL = "DataParallel"
ALL_CORES = "all cores"
HYBRID = "hybrid"
AUTO = "auto"
STRATEGIES = (
    SINGLE,
    PLAIN,
    DATA_PARALLEL,
    ALL_CORES,
    *(f"replicate {algorithm}" for algorithm in ALGORITHMS),
    *(f"servers {updates}" for updates in UPDATES),
    *(f"shard {level}" for level in SHARDING_LEVELS),
    "tensor",
    *(f"pipeline {schedule}" for schedule in SCHEDULES),
    HYBRID,
    AUTO,
)
ON_ONE_DEVICE = (SINGLE, PLAIN)


def selected_strategies(only: str | None) -> tuple[str, ...]:
    """Returns the strategies that `--only A,B` names, in the order of `STRATEGIES`; all of them if `only` is None. The
    first word of a name selects all that begin with it: `pipeline` is every schedule. The single device, with which all
    are compared, is always selected."""
    if only is None:
        return STRATEGIES
    words = [word.strip() for word in only.split(",")]
    kinds = [*dict.fromkeys((*STRATEGIES, *(name.split()[0] for name in STRATEGIES)))]
    for word in words:
        if word not in kinds:
            raise InputError(f"--only {only}: there is no strategy '{word}'{did_you_mean(word, kinds)}")
    selected = {name for name in STRATEGIES for word in words if name == word or name.startswith(f"{word} ")}
    return tuple(name for name in STRATEGIES if name in selected or name == SINGLE)
