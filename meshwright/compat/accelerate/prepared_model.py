"""`PreparedModel`: what `Accelerator.prepare` returns for a model. It takes the place of the DDP module that Accelerate
would return.

As with DDP, the last forward pass before a backward pass decides whether the gradients of the ranks are combined:
within `no_sync` they are not.

    accelerator.backward(loss)     combines while the backward pass runs              backward_pass
    loss.backward()                combines before clipping and the optimizer's step  combine_gradients
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from meshwright.compat.accelerate.uneven_inputs import JoinedModel
from meshwright.errors import InputError
from meshwright.parallel.model import ParallelModel
from meshwright.train.drive.driver import Driver


class PreparedModel(nn.Module):
    """Calls a model under a plan, and combines its gradients. Attributes that it does not have are those of the model.

    `joined` is set within `join_uneven_inputs`, otherwise None.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self._is_accelerate_prepared = True  # Accelerate's own mark
        self.module = parallel.module
        self.parallel = parallel
        self.driver = Driver.of(parallel)
        self.joined: JoinedModel | None = None
        self._combines = True  # whether the next backward pass combines gradients
        self._is_in_backward = False  # whether `backward_pass` is running
        self._pass: ExitStack | None = None  # the context of a backward pass that has reached this model
        self._has_uncombined = False  # whether a backward pass outside of `backward_pass` has added to the gradients
        # Since the optimizer's last step: whether there was a forward pass with gradients, and a backward pass.
        self._has_forward = self._has_backward = False
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if parallel.make_averager is not None:
            note = WeakMethod(self._note_gradient)  # the parameters may live longer than this object
            for parameter in parameters:  # before the averager registers its own hooks, which run after these
                parameter.register_post_accumulate_grad_hook(lambda _: method() if (method := note()) else None)
        self.driver.lay_out_gradients()
        if self.is_sharded:
            self.driver.take_whole_tensors()

    @property
    def is_sharded(self) -> bool:
        return self.driver.is_sharded

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # the model itself is not set yet
                raise
            return getattr(self.module, name)

    # ---- passes

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            self._combines = self.driver.synchronizes
            self._has_forward = True
        return self.driver.forward(*arguments, **keywords)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """The context in which `accelerator.backward` runs the backward pass of a loss. If the loss was computed by
        this model, and its last forward pass was outside of `no_sync`, the gradients are afterwards the mean over the
        ranks of all that was accumulated in them."""
        with self.driver.product_precision():
            if self.is_sharded:
                with self._sharded_backward_pass():
                    yield
                return
            self._is_in_backward = True
            try:
                yield
            except BaseException:
                if self._pass is not None:
                    self._pass.__exit__(*sys.exc_info())
                raise
            else:
                if self._pass is not None:
                    self._pass.close()
            finally:
                self._pass, self._is_in_backward = None, False

    @contextmanager
    def _sharded_backward_pass(self) -> Iterator[None]:
        if not self._has_forward:  # the loss is that of another model
            yield
            return
        with self.driver.synchronization(self._combines):
            yield
        self._has_backward = True

    def _note_gradient(self) -> None:
        """Called when a backward pass has added to the gradient of a parameter."""
        if self._pass is not None:
            return
        if not self._is_in_backward:
            self._has_uncombined = True
            return
        if self._combines and self.joined is not None:
            self.joined.notify()
        self._pass = ExitStack()
        self._pass.enter_context(self.driver.synchronization(self._combines))
        self._has_uncombined = False

    def combine_gradients(self) -> None:
        """Combines gradients of `loss.backward()`. Does nothing if they are combined already, or if the last forward
        pass was within `no_sync`. All ranks call this together."""
        if self.is_sharded and self._has_forward and not self._has_backward:
            raise InputError(
                f"the plan ({self.parallel.plan.summary()}) shards the model, so its gradients come from"
                " accelerator.backward(loss) only: replace loss.backward() by it"
            )
        if self._has_uncombined and self.parallel.plan.shares.samples:
            raise InputError(
                f"the plan ({self.parallel.plan.summary()}) has shares, so accelerator.backward(loss) has to weight the"
                " losses of the processes: replace loss.backward() by it"
            )
        averager = self.parallel.gradient_averager
        if self._has_uncombined and self._combines and averager is not None:
            if self.joined is not None:
                self.joined.notify()
            averager.finish()
            self._has_uncombined = False

    @contextmanager
    def combining(self) -> Iterator[None]:
        """Backward passes within this context combine gradients, wherever their forward passes were."""
        before, self._combines = self._combines, True
        try:
            yield
        finally:
            self._combines = before

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Frees gathered weights, and gives all ranks the buffers of the first."""
        self._has_forward = self._has_backward = self._has_uncombined = False
        self.driver.after_optimizer_step(optimizer, aligns=self.joined is None)  # without ranks that have no batches

    # ---- weights

    def named_modules(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Module]]:
        """Frees gathered weights first, so that the parameters are those that the optimizer has."""
        self.driver.reshard()
        yield from super().named_modules(*arguments, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights of the user's model by their names in it, as whole tensors. Of a sharded model, all ranks call
        this together."""
        if not self.is_sharded:
            state: dict[str, Any] = self.module.state_dict(*arguments, **keywords)
            return state
        return self.driver.whole_state()

    def load_state_dict(self, state_dict: Any, *arguments: Any, **keywords: Any) -> Any:
        """Loads weights of the user's model: whole tensors, which every rank has."""
        return self.module.load_state_dict(state_dict, *arguments, **keywords)
