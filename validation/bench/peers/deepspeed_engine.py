"""DeepSpeed.

Defaults: `deepspeed.initialize` with the job's optimizer, and only the batch size and the clipping of gradients in the
configuration. Best: ZeRO stage 1 with communication during the backward pass, the engine compiled (`engine.compile`),
and a fused optimizer."""

from typing import Any

import deepspeed
import torch.distributed as dist

from validation.bench.peers.task import PeerTask, StepRecorder, run_peer


def train(task: PeerTask, recorder: StepRecorder) -> None:
    dist.init_process_group(task.backend)
    deepspeed.init_distributed(dist_backend=task.backend)
    model = task.model().to(task.device)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=task.optimizer(model), config=configuration(task, dist.get_world_size())
    )
    if task.is_best:
        engine.compile()
    for batch in task.distributed_loader():
        loss = task.loss(engine, task.on_device(batch))
        engine.backward(loss)
        engine.step()
        recorder.step(loss)


def configuration(task: PeerTask, ranks: int) -> dict[str, Any]:
    """Returns DeepSpeed's configuration, which its documentation has in a JSON file."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.job.train.global_batch // ranks,
        "gradient_clipping": task.clip_norm or 0.0,  # without this entry, DeepSpeed clips to 1.0
    }
    if task.precision == "bf16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if task.is_best:
        config["zero_optimization"] = {"stage": 1, "overlap_comm": True, "contiguous_gradients": True}
        config["zero_allow_untested_optimizer"] = True
    return config


if __name__ == "__main__":
    run_peer(train)
