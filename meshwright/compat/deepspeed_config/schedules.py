"""DeepSpeed's learning-rate schedules, by their names and options there. The file imports no torch: a schedule only
writes numbers into the groups of an optimizer.

With i steps after the first (−1 before it) and w warm-up steps:

    warm-up         gamma(i) = log(i + 1) / log(w), or i / w                                           _warm_up
    WarmupLR        lr = min + (max − min) · gamma, then max
    WarmupDecayLR   lr = min + (max − min) · gamma, then min + (max − min) · (total − i) / (total − w)
    WarmupCosineLR  lr = base · (r + (1 − r) · gamma), then base · (c + (1 − c) · (1 + cos(π · progress)) / 2)
    OneCycle        lr = min + (max − min) · scale, then min / (1 + rate · decay steps)                 _cycle_scale
    LRRangeTest     lr = min · (1 + rate · (i + 1) / size)

Before the first step of the optimizer the schedules of warm-up have their lowest value, and the first call of `step`
leaves it there, because gamma(0) = 0.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
# DeepSpeed has a constant for each option, which scripts import.
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

PerGroup = float | Sequence[float]  # one number for all groups of the optimizer, or one for each


class _Schedule:
    """Sets the learning rates of an optimizer's groups. `last_batch_iteration` is the number of calls of `step`,
    less 1."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = _inner_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration

    def get_lr(self) -> list[Any]:
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        before = self.last_batch_iteration
        self.last_batch_iteration = before + 1 if last_batch_iteration is None else last_batch_iteration
        self._write(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]

    def _write(self, rates: Sequence[Any]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if hasattr(group["lr"], "fill_"):  # a tensor, to which the caller may hold a reference
                group["lr"].fill_(rate.item() if hasattr(rate, "item") else rate)
            else:
                group["lr"] = rate

    def _for_groups(self, value: PerGroup, name: str) -> list[Any]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * groups
        if len(value) != groups:
            raise ValueError(
                f"{name} has {len(value)} values, but the optimizer has {groups} groups: give one for each"
            )
        return list(value)


class WarmupLR(_Schedule):
    """Raises the learning rate from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` steps, then keeps it.
    Without `warmup_max_lr`, each group rises to the learning rate that it had."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [_number(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._for_groups(warmup_min_lr, WARMUP_MIN_LR)
        self.max_lrs = self._for_groups(warmup_max_lr, WARMUP_MAX_LR)
        self.warmup_num_steps = _warm_up_steps(warmup_num_steps)
        self.warmup_type = _warm_up_type(warmup_type)
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warm_up(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then lowers the learning rate in a straight line until `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _check_length(total_num_steps, self.warmup_num_steps)

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._gamma()
        decay_steps = max(1.0, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / decay_steps)


class WarmupCosineLR(_Schedule):
    """Raises the learning rate from `warmup_min_ratio` times that of the optimizer to all of it, then lowers it along a
    cosine to `cos_min_ratio` times it, and keeps it there after `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.warmup_num_steps = _warm_up_steps(warmup_num_steps)
        self.warmup_type = _warm_up_type(warmup_type)
        _check_length(total_num_steps, self.warmup_num_steps)
        self.org_lrs = [_number(group["lr"]) for group in self.optimizer.param_groups]
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def get_lr_ratio(self) -> float:
        iteration, warm_up = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0:
            return 0.0
        if iteration < warm_up:
            gamma = _warm_up(iteration, warm_up, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * gamma
        progress = min(1.0, (iteration - warm_up + 1) / max(1, self.total_num_steps - warm_up))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class OneCycle(_Schedule):
    """One cycle of the learning rate from `cycle_min_lr` to `cycle_max_lr` and back, then a decay. With
    `cycle_momentum`, the first beta of the optimizer moves in the opposite direction."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.first_step_size = float(cycle_first_step_size)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.second_step_size = float(second)
        if self.first_step_size <= 0 or self.second_step_size < 0:
            raise ValueError(
                f"cycle_first_step_size is {cycle_first_step_size} and cycle_second_step_size is {second}: give a"
                " number of steps above 0, and one of at least 0"
            )
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_stair_count, self.second_stair_count = cycle_first_stair_count, stairs
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._for_groups(cycle_min_lr, CYCLE_MIN_LR)
        self.max_lrs = self._for_groups(cycle_max_lr, CYCLE_MAX_LR)
        self.min_moms = [(momentum, 0.99) for momentum in self._for_groups(cycle_min_mom, CYCLE_MIN_MOM)]
        self.max_moms = [(momentum, 0.99) for momentum in self._for_groups(cycle_max_mom, CYCLE_MAX_MOM)]
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            name = type(self.optimizer).__name__
            warnings.warn(f"cycle_momentum has no effect: the optimizer {name} has no betas", stacklevel=2)
        if last_batch_iteration == -1:
            self._write(self.min_lrs)
            if self.cycle_momentum:
                self._write_momenta(self.min_moms)

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < self.total_size:
            scale = self._cycle_scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        factor = 1 + self.decay_lr_rate * self._decay_intervals()
        return [low / factor for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._cycle_scale()
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            return [(high - (high - low) * scale, beta) for (low, beta), (high, _) in pairs]
        factor = 1 + self.decay_mom_rate * self._decay_intervals()
        return [(momentum * factor, beta) for momentum, beta in self.max_moms]

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        if (momenta := self.get_mom()) is not None:
            self._write_momenta(momenta)

    def _write_momenta(self, momenta: Sequence[tuple[float, float]]) -> None:
        for group, betas in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = betas

    def _decay_intervals(self) -> float:
        """Number of `decay_step_size` steps since the end of the cycle; 0 if it is 0, so that nothing decays."""
        steps = self.last_batch_iteration - self.total_size + 1
        return steps / self.decay_step_size if not math.isclose(self.decay_step_size, 0) else 0.0

    def _cycle_scale(self) -> float:
        """The height in the cycle, between 0 and 1. With stairs it is rounded down to one of them, from whole steps:
        the quotient may be a little below the stair that the step lies on."""
        iteration = self.last_batch_iteration + 1
        position = iteration % self.total_size
        rises = position <= self.first_step_size
        stairs = self.first_stair_count if rises else self.second_stair_count
        if stairs > 0 and rises:
            return math.floor(position * stairs / self.first_step_size) / stairs
        if stairs > 0:
            return math.floor((self.total_size - position) * stairs / self.second_step_size) / stairs
        share = 1.0 + iteration / self.total_size - math.floor(1 + iteration / self.total_size)
        return share / self.step_ratio if share <= self.step_ratio else (share - 1) / (self.step_ratio - 1)


class LRRangeTest(_Schedule):
    """Raises the learning rate from `lr_range_test_min_lr` without end, to find the largest one that trains."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            raise ValueError(f"lr_range_test_step_size is {lr_range_test_step_size}: give a whole number above 0")
        self.min_lr = self._for_groups(lr_range_test_min_lr, LR_RANGE_TEST_MIN_LR)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._write(self.min_lr)

    def get_lr(self) -> list[Any]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * factor for low in self.min_lr]


def _warm_up(iteration: int, steps: int, kind: str) -> float:
    return iteration / steps if kind == WARMUP_LINEAR_RATE else math.log(iteration + 1) / math.log(steps)


def _warm_up_steps(steps: Any) -> int:
    if not isinstance(steps, int) or steps <= 0:
        raise ValueError(f"warmup_num_steps is {steps}: give a whole number above 0")
    return max(2, steps)  # the logarithm of 1 is 0


def _warm_up_type(kind: str) -> str:
    if kind not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        warnings.warn(f"warmup_type is {kind!r}, which is neither 'log' nor 'linear': 'log' is used", stacklevel=3)
        return WARMUP_LOG_RATE
    return kind


def _check_length(total: int, warm_up: int) -> None:
    if total < warm_up:
        warnings.warn(f"total_num_steps is {total}, less than the {warm_up} warmup_num_steps", stacklevel=3)


def _inner_optimizer(optimizer: Any) -> Any:
    """The optimizer itself, or the one that a wrapper holds as `optimizer`."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if hasattr(candidate, "param_groups") and hasattr(candidate, "defaults"):
            return candidate
    raise TypeError(f"a {type(optimizer).__name__} is no torch optimizer")


def _number(rate: Any) -> Any:
    """The learning rate itself, or a copy of it if it is a tensor, which the schedule writes into."""
    return rate.clone() if hasattr(rate, "clone") else rate
