"""`ServerClient`: a worker's connections to the servers, which its session uses as its optimizer; and `run_worker`,
which does what the servers instruct."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.data.loading import Batch, SampleShare
from meshwright.errors import CollectiveError
from meshwright.messages.exchange import to_bytes_tensor
from meshwright.plan import Plan
from meshwright.processes.peer_connection import (
    ConnectToStore,
    PeerConnection,
    PeerLostError,
    PeerTimeoutError,
    describe_last_heartbeat,
)
from meshwright.train.output.peak_memory import peak_memory_bytes
from meshwright.train.servers.connections import announce, pair_store
from meshwright.train.servers.messages import (
    USED,
    Instruction,
    ReportKind,
    ServerReply,
    TensorKey,
    WorkerReport,
    frozen_buffer,
    push_buffer,
    reply_buffer,
)
from meshwright.train.servers.training_spec import model_tensors
from meshwright.train.session import Session


class ServerClient:
    """Sends a worker's gradients to the servers, and copies the weights that come back into its session's model. It
    implements `RemoteOptimizer`."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        worker: int,
        connect: ConnectToStore,
        timeout_s: float,
        *,
        folder: Path | None = None,
        recorded: bool = False,
    ) -> None:
        """`folder` holds the heartbeats of the servers, which error messages mention; None if there are none.
        `recorded`: replies also carry the combined gradients, for a proof."""
        self.share = SampleShare(worker, plan.world_size, samples=plan.shares.samples)
        self.reply = ServerReply()
        self.batch: Batch | None = None  # the batch of the next step
        self._session = session
        self._recorded = recorded
        self._folder = folder
        self._first_rank = plan.world_size  # the rank of the first server
        # The message buffers are on the CPU, where all messages are sent and received.
        tensors = model_tensors(session.module, lambda _: session.optimizer, plan.gradients.servers)
        self._weights: dict[str, nn.Parameter] = dict(tensors.trained)
        self._buffers = dict(tensors.buffers)
        self._frozen = dict(tensors.frozen)
        self._rows = tensors.rows
        servers = range(plan.gradients.servers)
        self._pushes = [
            push_buffer(tensors.rows[server], self._buffers if (worker, server) == (0, 0) else {}) for server in servers
        ]
        self._replies = [
            reply_buffer(tensors.rows[server], {} if server else self._buffers, recorded) for server in servers
        ]
        self._pairs = self._connect_to_servers(connect(), worker, timeout_s)
        session.remote_optimizer = self

    def _connect_to_servers(
        self, store: torch.distributed.Store, worker: int, timeout_s: float
    ) -> list[PeerConnection]:
        """Returns the connections to all servers. The first server is connected last: when it sees a worker, the worker
        is connected to all servers."""
        incarnation = announce(store, worker)
        pairs: dict[int, PeerConnection] = {}
        for server in reversed(range(len(self._rows))):
            name = f"server {server} (rank {self._first_rank + server})"
            prefixed = pair_store(store, server, worker, incarnation)
            pairs[server] = self._explain(partial(PeerConnection, prefixed, False, name, timeout_s, timeout_s), server)
        return [pairs[server] for server in sorted(pairs)]

    def close(self) -> None:
        """Closes the connections without a message. The servers notice that the connections break."""
        for pair in self._pairs:
            pair.close()

    # ---- from the servers

    def receive_start(self) -> None:
        """Receives the frozen parameters and the first reply, and sets the session to the position in that reply."""
        frozen = frozen_buffer(self._frozen)
        if frozen:
            self._explain(partial(self._pairs[0].receive, frozen.memory), 0)
            with torch.no_grad():
                for name, parameter in self._frozen.items():
                    parameter.copy_(frozen.views[TensorKey("frozen", name)])
        self.receive_reply()
        session, reply = self._session, self.reply
        session.steps, session.seed, session.position = reply.clock, reply.seed, (reply.epoch, reply.index)
        session.parts = reply.data_parts or None
        if session.loss_scale and reply.scale:
            session.loss_scale.load_state_dict({"value": reply.scale, "good": reply.good, "skipped": reply.skipped})

    @torch.no_grad()
    def receive_reply(self) -> None:
        """Receives the replies of all servers, and copies their weights and buffers into the session's model."""
        waits = [
            self._explain(partial(pair.start_receive, message.memory), server)
            for server, (pair, message) in enumerate(zip(self._pairs, self._replies, strict=True))
        ]
        for server, wait in enumerate(waits):
            self._explain(wait, server)
        self.reply = ServerReply.unpack(self._replies[0].header)
        for rows, message in zip(self._rows, self._replies, strict=True):
            for part in rows:
                part.view(self._weights[part.name]).copy_(message.views[TensorKey("weights", part.name)])
        for name, buffer in self._buffers.items():
            buffer.copy_(self._replies[0].views[TensorKey("buffers", name)])

    # ---- to the servers

    def update(self, session: Session, loss_sum: Tensor) -> tuple[bool, Tensor]:
        """Sends the gradients of a step and receives the updated weights. Returns whether the servers used the
        gradients, and the mean loss of their update."""
        scale = session.loss_scale
        is_left_out = session.nonfinite is not None
        is_finite = is_left_out or scale is None or scale.unscale_(session.module.parameters())
        state = scale.state_dict() if scale else {"value": 0.0, "good": 0, "skipped": 0}
        batch = self.batch
        report = WorkerReport(
            kind=ReportKind.GRADIENTS,
            version=self.reply.version,
            clock=session.steps,
            epoch=batch.epoch if batch else 0,
            index=batch.index if batch else 0,
            last=int(batch.last) if batch else 0,
            samples=sum(microbatch.samples for microbatch in batch.microbatches) if batch else 0,
            overflow=int(not is_finite),
            nonfinite=int(is_left_out),
            peak_bytes=peak_memory_bytes(session.world.device),
            good=int(state["good"]),
            skipped=int(state["skipped"]),
            scale=float(state["value"]),
            count=float(session.target_count),
            loss=float(loss_sum),
        )
        self._fill_pushes()
        self._send_report(report)
        self._send([(server, message.memory) for server, message in enumerate(self._pushes)])
        self.receive_reply()
        if self._recorded:
            self._copy_combined_gradients(session)
        return bool(self.reply.stepped), torch.tensor(self.reply.loss, dtype=torch.float64)

    def send_evaluation(self, gave_up: bool, totals: dict[str, Tensor]) -> None:
        """Sends the result of an evaluation to the first server, and receives the next reply."""
        data = to_bytes_tensor((gave_up, totals))
        peak_bytes = peak_memory_bytes(self._session.world.device)
        self._send_report(WorkerReport(kind=ReportKind.EVALUATED, result_bytes=data.numel(), peak_bytes=peak_bytes))
        self._send([(0, data)])
        self.receive_reply()

    def report(self, kind: ReportKind) -> None:
        """Sends a report without data, and receives the next reply."""
        self._send_report(WorkerReport(kind=kind))
        self.receive_reply()

    def _send_report(self, report: WorkerReport) -> None:
        without_result = replace(report, result_bytes=0).pack()  # only the first server receives the result
        servers = range(1, len(self._pairs))
        self._send([(0, report.pack()), *((server, without_result) for server in servers)])

    def _send(self, messages: list[tuple[int, Tensor]]) -> None:
        """Sends messages, each to the server of the given number, at the same time."""
        waits = [
            (server, self._explain(partial(self._pairs[server].start_send, message), server))
            for server, message in messages
        ]
        for server, wait in waits:
            self._explain(wait, server)

    @torch.no_grad()
    def _fill_pushes(self) -> None:
        """Copies the session's gradients, and the model's buffers if this worker sends them, into the messages to the
        servers."""
        for rows, message in zip(self._rows, self._pushes, strict=True):
            gradients = [self._weights[part.name].grad for part in rows]
            used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
            message.views[USED].copy_(used)
            for part, gradient in zip(rows, gradients, strict=True):
                view = message.views[TensorKey("gradients", part.name)]
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(part.view(gradient.to_dense() if gradient.is_sparse else gradient))
            for key, view in message.views.items():
                if key.kind == "buffers":
                    view.copy_(self._buffers[key.name])

    @torch.no_grad()
    def _copy_combined_gradients(self, session: Session) -> None:
        """Puts the combined gradients and their norm into the session, as a step without servers would leave them."""
        used: set[str] = set()
        for rows, message in zip(self._rows, self._replies, strict=True):
            for part, is_used in zip(rows, message.views[USED].tolist(), strict=True):
                weight = self._weights[part.name]
                if is_used:
                    used.add(part.name)
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    part.view(weight.grad).copy_(message.views[TensorKey("gradients", part.name)])
        for name, weight in self._weights.items():
            weight.grad = weight.grad if name in used else None
        session.gradient_norm = torch.tensor(self.reply.norm, dtype=torch.float64)
        if session.on_gradients is not None:
            session.on_gradients()

    def _explain(self, operation: Callable[[], Any], server: int) -> Any:
        """Calls `operation` and returns its result. If the server is gone or does not answer, raises a
        `CollectiveError` that says where the server was last seen."""
        try:
            return operation()
        except (PeerLostError, PeerTimeoutError) as error:
            rank, step = self.share.rank, self._session.steps
            last_seen = describe_last_heartbeat(self._folder, self._first_rank + server)
            raise CollectiveError(f"rank {rank}, step {step}, {error}{last_seen}") from error


def run_worker(
    session: Session,
    client: ServerClient,
    batches: Callable[[], Iterator[Batch]],
    evaluate: Callable[[SampleShare], tuple[bool, dict[str, Tensor]]],
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Does what the servers instruct until they tell the worker to stop. `batches` yields batches from the session's
    position on. `evaluate` evaluates a share of the evaluation set, and returns whether it was interrupted, and its
    totals."""
    client.receive_start()
    with closing(batches()) as iterator:  # type: ignore[type-var]
        while client.reply.instruction != Instruction.STOP:
            if client.reply.instruction == Instruction.EVALUATE:
                client.send_evaluation(*evaluate(SampleShare(client.reply.part, client.reply.parts)))
            elif client.reply.instruction == Instruction.WAIT:
                client.report(ReportKind.WAITED)
            elif (batch := next(iterator, None)) is None:
                client.report(ReportKind.OUT_OF_DATA)
            else:
                client.batch = batch
                session.step(batch)
                after_step()
