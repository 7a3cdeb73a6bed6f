"""`ServerTrainer`: the trainer on a server. It logs, evaluates, saves and resumes as `Trainer` does, and also reports
the staleness of gradients."""

from typing import Any

from meshwright.processes.signals import StopRequest
from meshwright.train.servers.server import Server
from meshwright.train.trainer import Trainer


class ServerTrainer(Trainer):
    """The training loop of one server. Its `session` is a `Server`."""

    @property
    def server(self) -> Server:
        assert isinstance(self.session, Server)
        return self.session

    def _train(self, stop: StopRequest) -> bool:
        self.server.set_data_parts(self.loading)
        self.server.limit(self.length.total_steps())
        self.server.coordinator.participants.print_line = self.display.line
        return super()._train(stop)

    def _finish(self) -> dict[str, Any]:
        result = super()._finish()
        staleness = self.staleness()
        bound = f", the largest lead {staleness['largest_lead']}" if "largest_lead" in staleness else ""
        self.display.line(f"staleness: mean {staleness['mean']:.2f}, max {staleness['max']}{bound}")
        return result

    def _describe_result(self) -> dict[str, Any]:
        restarts = self.world.attempt + self.server.coordinator.participants.rejoined
        return {**super()._describe_result(), "restarts": restarts, "staleness": self.staleness()}

    def staleness(self) -> dict[str, float]:
        """Returns the `mean` and `max` staleness of gradients, in updates. With `bounded` updates, `largest_lead` is
        the largest number of batches that a worker was ahead of the slowest one."""
        staleness = self.server.staleness
        values: dict[str, float] = {"mean": round(staleness.mean, 4), "max": staleness.largest}
        if self.session.plan.gradients.updates == "bounded":
            values["largest_lead"] = self.server.coordinator.clocks.largest_lead
        return values

    def _log(self, batch: Any) -> None:
        super()._log(batch)
        steps = self.session.steps
        if self.metrics_log and self.session.plan.gradients.updates != "synchronous":
            if steps % self.job.log.every_steps and not self.length.at_end():
                return
            values = {f"staleness_{name}": value for name, value in self.staleness().items()}
            self.metrics_log.write("servers", steps, batch.epoch, values)

    def _describe_ranks(self) -> str:
        plan, kind = self.session.plan, "GPU" if self.world.device.type == "cuda" else "CPU"
        workers, servers = plan.world_size, plan.gradients.servers
        return f"{workers} {kind} workers and {servers} servers ({plan.summary()}) in {self.folder.path}"

    def _peak_memory_bytes(self) -> int:
        """The largest peak of all servers and workers. It is usually that of a worker, which holds the activations."""
        return max(super()._peak_memory_bytes(), self.server.coordinator.participants.peak_bytes)
