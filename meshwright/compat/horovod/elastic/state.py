"""The state of elastic training: what `commit` keeps, `restore` brings back after a failure, and `sync` makes the same
on all workers. All of it is kept in memory."""

import copy
import queue
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import Any

import torch
from torch import nn

from meshwright.compat.horovod.basics import rank
from meshwright.compat.horovod.elastic.sampler import ElasticSampler
from meshwright.compat.horovod.exceptions import HostsUpdatedInterrupt
from meshwright.compat.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class HostUpdateResult(IntFlag):
    """How the workers of a job change."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """The base class of states. Subclasses implement `save`, `restore` and `sync`."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Registers functions that are called after each reset, to adapt the learning rate, for instance."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Keeps the state, and checks whether the number of workers changes."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises `HostsUpdatedInterrupt`, on all workers at the same call, if the number of workers changes."""
        previous = latest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, kind = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= HostUpdateResult(kind)
        message = (previous, latest, int(update))
        previous, self._last_updated_timestamp, kind = self._bcast_object(message, name="host updates")
        if self._last_updated_timestamp > previous:
            raise HostsUpdatedInterrupt(kind == HostUpdateResult.removed)

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """Called after a reset, before the callbacks."""


class ObjectState(State):
    """A state of attributes that can be pickled. Lists, dicts and sets are copied when the state is saved."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()

    def save(self) -> None:
        self._saved_state = {name: _copied(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state, name="elastic state")
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, _copied(value))


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


class StateHandler:
    """Saves, restores and synchronizes one object of a `TorchState`."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic sampler"))
        self.save()


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    _handler_registry[:] = registry


class TorchState(ObjectState):
    """The state of a training with PyTorch: models, optimizers and samplers, and other values by name."""

    def __init__(self, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        for name, value in values.items():
            handler = next((handler for kind, handler in _handler_registry if isinstance(value, kind)), None)
            if handler is not None:
                self._handlers[name] = handler(value)
        for name, created in self._handlers.items():
            object.__setattr__(self, name, created.value)
        others = {name: value for name, value in values.items() if name not in self._handlers}
        super().__init__(broadcast_object, rank, **others)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers and value is not handlers[name].value:
            handlers[name].set_value(value)
        super().__setattr__(name, value)
