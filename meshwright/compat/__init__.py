"""Meshwright inside of other training libraries. Each folder needs the library that it is named after, except
`deepspeed_config`, which needs none."""

from meshwright.doors import register

_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")


def register_doors() -> None:
    """Registers what the rooms of this package do for the rooms below it. Imports none of them."""
    register("plan", "deepspeed", "meshwright.compat.deepspeed_config.plan_groups:plan_of_config")
    for name in _SCHEDULES:  # 0.1.0 wrote these paths into the job files of its runs
        register(
            "call", f"meshwright.deepspeed_config.schedules:{name}", f"{__name__}.deepspeed_config.schedules:{name}"
        )
    register("job", "lightning", "meshwright.compat.lightning_job:load_module_job")
    register("train", "meshwright.compat.lightning_job:configured_by_module", "meshwright.compat.lightning.run:train")
