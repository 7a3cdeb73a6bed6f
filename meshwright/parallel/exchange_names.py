"""`ModelExchanges`: says in words what the ranks of a model exchange, for heartbeats and reports about ranks that are
stuck."""

from weakref import ref

from torch.nn.parallel import DistributedDataParallel

from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.replicate.bucket_names import describe_bucket
from meshwright.parallel.torch_private import ddp_buckets


class ModelExchanges:
    """The exchanges of a parallel model. Its methods are called only if progress has stopped."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel = ref(parallel)  # a watchdog may live longer than the model

    def waiting(self) -> str | None:
        """What this process is blocked in, or has failed in; None if it does not wait in an exchange of its own."""
        return WAIT_CLOCK.waiting()

    def name(self, operation: str, elements: int) -> str | None:
        """The bucket of gradients that a collective of torch with so many elements exchanges; None if there is none."""
        parallel = self._parallel()
        runner = parallel.runner if parallel is not None else None
        if operation != "all-reduce" or not isinstance(runner, DistributedDataParallel):
            return None
        texts = []
        for number, bucket in enumerate(ddp_buckets(runner)):
            if sum(parameter.numel() for parameter in bucket) == elements:
                keys = {id(parameter) for parameter in bucket}
                names = [name for name, parameter in runner.module.named_parameters() if id(parameter) in keys]
                texts.append(describe_bucket(number, names))
        return " or the ".join(texts) or None
