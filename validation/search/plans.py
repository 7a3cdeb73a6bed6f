"""Plans for a problem as people write them, plans with random values of all fields, and the neighbours of a plan.
Nothing here knows how the search works: what can run is asked of the executor, what fits of the prediction."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

from pydantic import ValidationError

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.inputs import PlanningInputs
from meshwright.profile.values import ModelProfile

Groups = dict[str, dict[str, Any]]
_RECOMPUTES = ("none", "selective", "full")
_SHARDINGS = ("optimizer", "gradients", "parameters")
_SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


class PlanWriter:
    """Writes plans for these inputs in one precision. `profile` is the model's in this precision, of which only the
    names of its blocks are used."""

    def __init__(self, inputs: PlanningInputs, profile: ModelProfile, precision: str, random: Random) -> None:
        self.inputs, self.random, self.precision = inputs, random, precision
        self.blocks = list(profile.blocks)
        self.devices, self.batch = inputs.cluster.device_count, inputs.global_batch
        self.on_gpu = inputs.cluster.kind == "cuda"

    def plans(self, number: int) -> Iterator[Plan]:
        """Yields about this many plans, each once, that the executor accepts."""
        known: set[str] = set()
        for groups in self._raw(number):
            plan = self._valid(groups)
            if plan is not None and (text := plan.model_dump_json()) not in known:
                known.add(text)
                yield plan

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Yields the plans that differ from a plan in one field."""
        raw = plan.model_dump()
        parts = "microbatches" if plan.axes.pipeline > 1 else "accumulation"
        group = "pipeline" if plan.axes.pipeline > 1 else "memory"
        counts = divisors(max(1, self.batch // plan.data_ranks))
        changes: list[Groups] = [{group: {parts: count}} for count in counts]
        changes += [{"memory": {"recompute": level}} for level in _RECOMPUTES]
        changes += [{"memory": {"sharding": level}} for level in _SHARDINGS]
        changes += [{"compute": fields} for fields in self._computes()]
        changes += [{"memory": {"offload": value}} for value in ("none", "optimizer")]
        for first, second in pairwise(("replicate", "shard", "tensor", "replicate")):
            for source, target in ((first, second), (second, first)):
                size = raw["axes"][source]
                changes += [
                    {"axes": {source: size // factor, target: raw["axes"][target] * factor}}
                    for factor in {2, 3, size}
                    if factor > 1 and size % factor == 0
                ]
        for change in changes:
            groups = {name: {**raw[name], **change.get(name, {})} for name in raw}
            if neighbour := self._valid(groups):
                yield neighbour

    def _valid(self, groups: Groups) -> Plan | None:
        try:
            plan = Plan.model_validate(groups)
            self.inputs.check_plan(plan)
        except (InputError, ValidationError):
            return None
        fits_batch = plan.batch_parts <= self.batch and plan.stays_within(self.inputs.allow)
        is_fixed = self.inputs.constraints.beyond(self.inputs.allow) is not None
        return plan if fits_batch or (is_fixed and plan.batch_parts <= self.batch) else None

    def _raw(self, number: int) -> Iterator[Groups]:
        yield from self._written_by_people()
        for _ in range(number):
            yield self._random()

    def _counts(self, data_ranks: int) -> list[int]:
        return divisors(max(1, self.batch // data_ranks))

    def _computes(self) -> list[dict[str, Any]]:
        fused = {"fused_optimizer": True} if self.inputs.can_fuse_optimizer else {}
        if not self.on_gpu or self.inputs.allow == "same":
            return [{}]
        graphs = [True, False] if self.inputs.device.has_graphs else [False]
        options: list[dict[str, Any]] = [{}, fused]
        options += [
            {"compile": compiled, "cuda_graphs": graph, **extra}
            for compiled in ("blocks", "model")
            for graph in graphs
            for extra in ({}, fused)
        ]
        return [option for index, option in enumerate(options) if option not in options[:index]]

    def _written_by_people(self) -> Iterator[Groups]:
        """Yields DDP, FSDP, hybrid shards and FSDP × TP, with accumulation, recomputation and compiled code."""
        devices, random = self.devices, self.random
        axes: list[dict[str, int]] = [{"replicate": devices}, {"shard": devices}]
        for size in (2, 4, 8):
            if devices % size == 0 and devices > size:
                axes += [{"replicate": devices // size, "shard": size}, {"shard": devices // size, "tensor": size}]
                axes += [{"replicate": devices // size, "tensor": size}]
        if devices > self.batch:
            axes = [{"replicate": self.batch}, {"shard": self.batch}] if self.batch > 1 else [{}]
        computes = self._computes()
        for sizes in axes:
            data_ranks = sizes.get("replicate", 1) * sizes.get("shard", 1)
            if data_ranks > self.batch:
                continue
            for count in self._counts(data_ranks)[:12]:
                for recompute in ("none", random.choice(_RECOMPUTES)):
                    yield self._groups(
                        sizes,
                        {"accumulation": count, "recompute": recompute, "sharding": random.choice(_SHARDINGS)},
                        random.choice(computes),
                    )

    def _random(self) -> Groups:
        random, left = self.random, min(self.devices, self.devices if self.devices <= self.batch else self.batch)
        sizes: dict[str, int] = {}
        names = ["replicate", "shard", "tensor", "pipeline"]
        random.shuffle(names)
        for name in names[:-1]:
            sizes[name] = random.choice(divisors(left))
            left //= sizes[name]
        sizes[names[-1]] = left
        data_ranks, pipeline = sizes["replicate"] * sizes["shard"], sizes["pipeline"]
        count = random.choice(self._counts(data_ranks))
        memory = {
            "sharding": random.choice(_SHARDINGS),
            "recompute": random.choice(_RECOMPUTES),
            "accumulation": 1 if pipeline > 1 else count,
            "offload": random.choices(("none", "optimizer", "parameters"), (8, 1, 1))[0] if self.on_gpu else "none",
        }
        compute = dict(random.choice(self._computes()))
        if self.inputs.allow != "same" and random.random() < 0.2:
            compute["loss_chunks"] = random.choice((2, 8, 40))
        groups = self._groups(sizes, memory, compute)
        if pipeline > 1:
            groups["pipeline"] = self._pipeline(pipeline, count)
        if random.random() < 0.2:
            groups["gradients"] = {"bucket_bytes": random.choice((1, 5, 100)) * 2**20}
        return groups

    def _pipeline(self, ranks: int, count: int) -> dict[str, Any]:
        """Stages with equally many blocks."""
        schedule = self.random.choice(_SCHEDULES)
        stages = ranks * (self.random.choice((2, 3)) if schedule == "interleaved_1f1b" else 1)
        ends = [len(self.blocks) * (stage + 1) // stages - 1 for stage in range(stages - 1)]
        cuts = [self.blocks[end] for end in ends if 0 <= end < len(self.blocks)]
        return {"schedule": schedule, "microbatches": count, "cuts": cuts}

    def _groups(self, axes: dict[str, int], memory: dict[str, Any], compute: dict[str, Any]) -> Groups:
        tensor = axes.get("tensor", 1) > 1
        modules = {"sequence": self.random.random() < 0.7, "loss": self.random.random() < 0.7} if tensor else {}
        numerics = {"precision": self.precision}
        return {"axes": dict(axes), "memory": memory, "compute": compute, "modules": modules, "numerics": numerics}
