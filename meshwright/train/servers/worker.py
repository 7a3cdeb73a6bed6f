"""A worker: computes gradients on its share of every batch, and has servers make the step."""

import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.data.loading import Batch, Share
from meshwright.errors import CollectiveError
from meshwright.launch.pairs import Broken, Connect, Late, Pair, last_seen
from meshwright.plan import Plan
from meshwright.train.servers.connections import announce, pair_store
from meshwright.train.servers.messages import Do, Frame, Reply, Said, Told, of_tensors
from meshwright.train.servers.parameter_shard import USED, push_frame, reply_frame
from meshwright.train.servers.recipe import parts_of
from meshwright.train.session import Session


class Exchange:
    """Takes the place of a session's optimizer: gradients go to the servers, and their weights come back."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        worker: int,
        connect: Connect,
        timeout_s: float,
        *,
        folder: Path | None = None,
        recorded: bool = False,
    ) -> None:
        """`folder`: where the servers' places can be read, for errors that name one. `recorded`: the servers send the
        gradients that they have combined."""
        self.share = Share(worker, plan.world_size)
        self.reply = Reply()
        self.batch: Batch | None = None  # what the step that comes is computed on
        self.before_push: Callable[[], None] = lambda: None  # may look at the gradients, or spoil them
        self._session = session
        self._recorded = recorded
        self._folder = folder
        self._first_rank = plan.world_size
        # Held on the CPU: all that a server sends passes there.
        parts = parts_of(session.module, lambda _: session.optimizer, plan.gradients.servers)
        self._weights: dict[str, nn.Parameter] = dict(parts.trained)
        self._buffers = dict(parts.buffers)
        self._fixed = dict(parts.fixed)
        self._pieces = parts.pieces
        servers = range(plan.gradients.servers)
        self._pushes = [
            push_frame(parts.pieces[server], self._buffers if (worker, server) == (0, 0) else {}) for server in servers
        ]
        self._replies = [
            reply_frame(parts.pieces[server], {} if server else self._buffers, recorded) for server in servers
        ]
        self._pairs = self._connected(connect(), worker, timeout_s)
        session.updater = self

    def _connected(self, store: torch.distributed.Store, worker: int, timeout_s: float) -> list[Pair]:
        """The first server last: whoever has come to it has come to all."""
        life = announce(store, worker)
        pairs: dict[int, Pair] = {}
        for server in reversed(range(len(self._pieces))):
            name = f"server {server} (rank {self._first_rank + server})"
            own = pair_store(store, server, worker, life)
            pairs[server] = self._naming(partial(Pair, own, False, name, timeout_s, timeout_s), server)
        return [pairs[server] for server in sorted(pairs)]

    def close(self) -> None:
        """Leaves without a word; the servers notice."""
        for pair in self._pairs:
            pair.close()

    # ---- from the servers

    def welcome(self) -> None:
        """The first reply: the weights as they are, and where to begin."""
        fixed = Frame(of_tensors(self._fixed))
        if fixed:
            self._naming(partial(self._pairs[0].receive, fixed.memory), 0)
            with torch.no_grad():
                for name, parameter in self._fixed.items():
                    parameter.copy_(fixed.views[name])
        self.pull()
        session, reply = self._session, self.reply
        session.steps, session.seed, session.position = reply.clock, reply.seed, (reply.epoch, reply.index)
        session.parts = reply.divided or None
        if session.loss_scale and reply.scale:
            session.loss_scale.load_state_dict({"value": reply.scale, "good": reply.good, "skipped": reply.skipped})

    @torch.no_grad()
    def pull(self) -> None:
        waits = [
            self._naming(partial(pair.start_receive, frame.memory), server)
            for server, (pair, frame) in enumerate(zip(self._pairs, self._replies, strict=True))
        ]
        for server, wait in enumerate(waits):
            self._naming(wait, server)
        self.reply = Reply.unpack(self._replies[0].header)
        for pieces, frame in zip(self._pieces, self._replies, strict=True):
            for piece in pieces:
                piece.of(self._weights[piece.name]).copy_(frame.views[f"weights/{piece.name}"])
        for name, buffer in self._buffers.items():
            buffer.copy_(self._replies[0].views[f"buffers/{name}"])

    # ---- to the servers

    def update(self, session: Session, loss_sum: Tensor) -> tuple[bool, Tensor]:
        """Pushes a step's gradients and pulls the weights that the servers make of them."""
        scale = session.loss_scale
        fit = scale is None or scale.unscale_(session.module.parameters())
        state = scale.state_dict() if scale else {"value": 0.0, "good": 0, "skipped": 0}
        batch = self.batch
        told = Told(
            said=Said.GRADIENTS,
            version=self.reply.version,
            clock=session.steps,
            epoch=batch.epoch if batch else 0,
            index=batch.index if batch else 0,
            last=int(batch.last) if batch else 0,
            samples=sum(part.samples for part in batch.parts) if batch else 0,
            unfit=int(not fit),
            peak_bytes=_peak_bytes(session.world.device),
            good=int(state["good"]),
            skipped=int(state["skipped"]),
            scale=float(state["value"]),
            count=float(session.count),
            loss=float(loss_sum),
        )
        self.before_push()
        self._fill_pushes()
        self._tell(told)
        self._send([(server, frame.memory) for server, frame in enumerate(self._pushes)])
        self.pull()
        if self._recorded:
            self._show(session)
        return bool(self.reply.stepped), torch.tensor(self.reply.loss, dtype=torch.float64)

    def findings(self, gave_up: bool, totals: dict[str, Tensor]) -> None:
        """What an evaluation has found; the servers' next reply comes with it."""
        found = pickle.dumps((gave_up, {name: total.cpu() for name, total in totals.items()}))
        data = torch.frombuffer(bytearray(found), dtype=torch.uint8)
        self._tell(Told(said=Said.EVALUATED, bytes=data.numel(), peak_bytes=_peak_bytes(self._session.world.device)))
        self._send([(0, data)])
        self.pull()

    def say(self, said: Said) -> None:
        self._tell(Told(said=said))
        self.pull()

    def _tell(self, told: Told) -> None:
        others = replace(told, bytes=0).pack()  # what was found goes to the first server
        self._send([(0, told.pack()), *((server, others) for server in range(1, len(self._pairs)))])

    def _send(self, messages: list[tuple[int, Tensor]]) -> None:
        waits = [
            (server, self._naming(partial(self._pairs[server].start_send, message), server))
            for server, message in messages
        ]
        for server, wait in waits:
            self._naming(wait, server)

    @torch.no_grad()
    def _fill_pushes(self) -> None:
        for pieces, frame in zip(self._pieces, self._pushes, strict=True):
            gradients = [self._weights[piece.name].grad for piece in pieces]
            frame.views[USED].copy_(torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8))
            for piece, gradient in zip(pieces, gradients, strict=True):
                view = frame.views[f"gradients/{piece.name}"]
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(piece.of(gradient.to_dense() if gradient.is_sparse else gradient))
            for name, view in frame.views.items():
                if name.startswith("buffers/"):
                    view.copy_(self._buffers[name.removeprefix("buffers/")])

    @torch.no_grad()
    def _show(self, session: Session) -> None:
        """The combined gradients and their norm, as a session on its own would have them."""
        used: set[str] = set()
        for pieces, frame in zip(self._pieces, self._replies, strict=True):
            for piece, is_used in zip(pieces, frame.views[USED].tolist(), strict=True):
                weight = self._weights[piece.name]
                if is_used:
                    used.add(piece.name)
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    piece.of(weight.grad).copy_(frame.views[f"gradients/{piece.name}"])
        for name, weight in self._weights.items():
            weight.grad = weight.grad if name in used else None
        session.gradient_norm = torch.tensor(self.reply.norm, dtype=torch.float64)
        if session.on_gradients is not None:
            session.on_gradients()

    def _naming(self, do: Callable[[], Any], server: int) -> Any:
        """Tells which server is gone, and where it was last seen."""
        try:
            return do()
        except (Broken, Late) as error:
            rank, step = self.share.rank, self._session.steps
            seen = last_seen(self._folder, self._first_rank + server)
            raise CollectiveError(f"rank {rank}, step {step}, {error}{seen}") from error


def work(
    session: Session,
    exchange: Exchange,
    batches: Callable[[], Iterator[Batch]],
    evaluate: Callable[[Share], tuple[bool, dict[str, Tensor]]],
    finished: Callable[[], None] = lambda: None,
) -> None:
    """Does what the servers say until they send it home. `batches`: from the session's position on; `evaluate`: a
    share of the evaluation set."""
    exchange.welcome()
    with closing(batches()) as given:  # type: ignore[type-var]
        while exchange.reply.do != Do.STOP:
            if exchange.reply.do == Do.EVALUATE:
                exchange.findings(*evaluate(Share(exchange.reply.part, exchange.reply.parts)))
            elif exchange.reply.do == Do.WAIT:
                exchange.say(Said.WAITED)
            elif (batch := next(given, None)) is None:
                exchange.say(Said.ENDED)
            else:
                exchange.batch = batch
                session.step(batch)
                finished()


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
