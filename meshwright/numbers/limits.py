"""The types of numbers that jobs, plans and clusters hold: each has a largest value that is possible, and most have a
smallest one. A number outside of them raises an error that says the limit, where computing with it would fail later,
give infinities, or never end."""

from numbers import Integral, Real
from typing import Annotated, Any

from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from meshwright.errors import InputError

# The planner ranks the plans of a cluster of this size in about ten seconds; its time grows with the number of devices.
MOST_DEVICES = 65_536
MOST_RANKS_HERE = 1_024  # processes that a command starts on this machine
MOST_RANKS_PER_CORE = 32  # more of them take turns on a core for so long that they seem to hang
MOST_CHUNKS = 4_096  # of a loss
LARGEST_COUNT = 2**31 - 1
MOST_RECORDED_STEPS = 9_999  # each is a file as large as the weights and gradients
MOST_STEPS = 99_999_999  # the names of checkpoints have eight digits


def is_number(value: Any) -> bool:
    """Whether a value is an integer or a floating-point number of Python or NumPy; NaN is one, True is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises an `InputError` if an argument of a function is no whole number from `least` on."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}: give a whole number of at least {least}")


def at_most(limit: float, text: str) -> AfterValidator:
    """Returns a pydantic validator that refuses larger numbers with the message `at most` and the text."""

    def check(value: float) -> float:
        if value > limit:
            raise PydanticCustomError("at_most", "at most {text}", {"text": text})
        return value

    return AfterValidator(check)


def at_least(limit: float, text: str, zero: bool = False) -> AfterValidator:
    """Returns a pydantic validator that refuses smaller numbers with the message `at least` and the text. If `zero`, 0
    is accepted too: it stands for an unknown number."""

    def check(value: float) -> float:
        if value < limit and not (zero and value == 0):
            unknown = ", or 0 if it is not known" if zero else ""
            raise PydanticCustomError("at_least", "at least {text}", {"text": text + unknown})
        return value

    return AfterValidator(check)


# ---- counts

Count = Annotated[PositiveInt, at_most(LARGEST_COUNT, "2**31 - 1")]
CountOrZero = Annotated[NonNegativeInt, at_most(LARGEST_COUNT, "2**31 - 1")]
Samples = Annotated[PositiveInt, at_most(LARGEST_COUNT, "2**31 - 1 samples")]
Steps = Annotated[PositiveInt, at_most(MOST_STEPS, f"{MOST_STEPS:,} steps, which checkpoints can number")]
StepsOrZero = Annotated[NonNegativeInt, at_most(MOST_STEPS, f"{MOST_STEPS:,} steps, which checkpoints can number")]
Microbatches = Annotated[PositiveInt, at_most(65_536, "65,536 microbatches, as the schedule lists each of them")]
LossChunks = Annotated[PositiveInt, at_most(MOST_CHUNKS, f"{MOST_CHUNKS:,} chunks of a loss")]
Parts = Annotated[PositiveInt, at_most(2**20, "2**20 parts")]
Seed = Annotated[NonNegativeInt, at_most(2**63 - 1, "2**63 - 1, which is the largest seed of torch's generators")]

# ---- hardware

Devices = Annotated[PositiveInt, at_most(MOST_DEVICES, f"{MOST_DEVICES:,} devices, for which planning takes seconds")]
SeveralRanks = Annotated[PositiveInt, at_least(2, "2 ranks"), at_most(MOST_DEVICES, f"{MOST_DEVICES:,} ranks")]
RankNumber = Annotated[NonNegativeInt, at_most(MOST_DEVICES - 1, f"{MOST_DEVICES - 1:,}")]
ProcessesOrZero = Annotated[NonNegativeInt, at_most(MOST_RANKS_HERE, f"{MOST_RANKS_HERE:,} processes of one machine")]
Threads = Annotated[PositiveInt, at_most(4_096, "4,096 threads of one rank")]
Cores = Annotated[PositiveInt, at_most(2**24, "2**24 cores of one machine")]
BusyCores = Annotated[NonNegativeFloat, at_most(2**24, "2**24 cores of one machine")]
MultiprocessorsOrZero = Annotated[NonNegativeInt, at_most(2**20, "2**20 multiprocessors of one device")]
MemoryBytes = Annotated[NonNegativeInt, at_most(2**50, "2**50 bytes, one pebibyte per device")]
MessageBytes = Annotated[PositiveInt, at_most(2**50, "2**50 bytes, one pebibyte")]
TensorSize = Annotated[PositiveInt, at_most(2**50, "2**50")]

# ---- rates and times. With these bounds, no product or quotient of them overflows.

BytesPerSecond = Annotated[NonNegativeFloat, at_least(1, "1 byte/s", zero=True), at_most(1e18, "1e18 bytes/s")]
OperationsPerSecond = Annotated[PositiveFloat, at_least(1, "1 operation/s"), at_most(1e21, "1e21 operations/s")]
Hertz = Annotated[NonNegativeFloat, at_least(1, "1 Hz", zero=True), at_most(1e12, "1e12 Hz")]
Operations = Annotated[NonNegativeFloat, at_most(1e30, "1e30 operations")]
Bytes = Annotated[PositiveFloat, at_least(1e-3, "0.001 bytes"), at_most(1e24, "1e24 bytes")]
MeasuredSeconds = Annotated[PositiveFloat, at_least(1e-15, "1e-15 s"), at_most(1e6, "1e6 s")]
Latency = Annotated[NonNegativeFloat, at_least(1e-15, "1e-15 s", zero=True), at_most(3_600, "3,600 s")]
Share = Annotated[PositiveFloat, at_least(1e-6, "1e-6"), at_most(10, "10 times the rate")]
Price = Annotated[PositiveFloat, at_least(1e-6, "1e-6"), at_most(1e12, "1e12")]
# Longer times do not fit into the milliseconds of a network connection's timeout.
Timeout = Annotated[PositiveFloat, at_least(1e-3, "0.001 s"), at_most(1e6, "1,000,000 s, about eleven days")]
