"""`deepspeed.ops.op_builder`: which kernels of DeepSpeed there are. torch's are used in their place."""


class OpBuilder:
    """A kernel of DeepSpeed by its `NAME`."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return bool(COMPATIBLE.get(self.NAME, False))


class FusedAdamBuilder(OpBuilder):
    NAME = "fused_adam"


class CPUAdamBuilder(OpBuilder):
    NAME = "cpu_adam"


class FusedLambBuilder(OpBuilder):
    NAME = "fused_lamb"


class AsyncIOBuilder(OpBuilder):
    NAME = "async_io"


COMPATIBLE = {"fused_adam": True, "cpu_adam": True, "fused_lamb": False, "async_io": False}
ALL_OPS = dict.fromkeys(COMPATIBLE)
