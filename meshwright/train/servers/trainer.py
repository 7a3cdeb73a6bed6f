"""The trainer on servers: it logs, evaluates, saves and resumes as under every plan, and says what only they know."""

import json
from typing import Any

from meshwright.launch.signals import StopRequest
from meshwright.train.output.folder import read_result, write_text
from meshwright.train.servers.server import Serving
from meshwright.train.trainer import Trainer


class Conduct(Trainer):
    @property
    def serving(self) -> Serving:
        assert isinstance(self.session, Serving)
        return self.session

    def _train(self, stop: StopRequest) -> bool:
        self.serving.divide(self.loading)
        self.serving.limit(self.total_steps())
        self.serving.lead.say = self.display.line
        return super()._train(stop)

    def _finish(self) -> None:
        super()._finish()
        result = read_result(self.folder) if self.world.rank == 0 else None
        if result is not None:
            told = self.staleness()
            result = {**result, "restarts": self.world.attempt + self.serving.lead.rejoined, "staleness": told}
            write_text(self.folder.result, json.dumps(result, indent=1))
            bound = f", the largest lead {told['largest_lead']}" if "largest_lead" in told else ""
            self.display.line(f"staleness: mean {told['mean']:.2f}, max {told['max']}{bound}")

    def staleness(self) -> dict[str, float]:
        """How many updates gradients were behind; under a bound also how many steps anybody was ahead."""
        seen = self.serving.staleness
        told: dict[str, float] = {"mean": round(seen.mean, 4), "max": seen.largest}
        if self.session.plan.gradients.updates == "bounded":
            told["largest_lead"] = self.serving.lead.clocks.largest_lead
        return told

    def _log(self, batch: Any) -> None:
        super()._log(batch)
        steps = self.session.steps
        if self.logbook and self.session.plan.gradients.updates != "synchronous":
            if steps % self.job.log.every_steps and not self._at_end():
                return
            told = {f"staleness_{name}": value for name, value in self.staleness().items()}
            self.logbook.write("servers", steps, batch.epoch, told)

    def _where(self) -> str:
        plan, kind = self.session.plan, "GPU" if self.world.device.type == "cuda" else "CPU"
        workers, servers = plan.world_size, plan.gradients.servers
        return f"{workers} {kind} workers and {servers} servers ({plan.summary()}) in {self.folder.path}"

    def _peak_memory_bytes(self) -> int:
        """Workers hold the activations: theirs is mostly the largest."""
        return max(super()._peak_memory_bytes(), self.serving.lead.peak_bytes)
