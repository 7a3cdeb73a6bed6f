"""Plans of large mixtures of experts and of long sequences, from configurations alone, without weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster.names import cluster_from_name
from meshwright.planner.inputs import MARGIN
from tests.cli.commands import RunCommand

# The sizes of the published models; what is not named has transformers' default, which is that of the same model.
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
    "DeepSeek-V3": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    "Llama-3-70B": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}
CASES = [
    *((model, nodes, 4096) for model in ("Mixtral-8x7B", "Qwen3-235B-A22B", "DeepSeek-V3") for nodes in (8, 32, 256)),
    ("Llama-3-70B", 32, 131072),
]


@pytest.mark.soak
@pytest.mark.parametrize(("model", "nodes", "length"), CASES)
def test_a_plan_fits_and_has_reasons(
    model: str, nodes: int, length: int, tmp_path: Path, run_command: RunCommand
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
    cluster, batch = f"{nodes}x8xH100", {4096: max(1024, 16 * nodes), 131072: 64}[length]
    words = ("--cluster", cluster, "--sequence", str(length), "--global-batch", str(batch), "--json")
    result = run_command("plan", f"hf:{tmp_path}", *words)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    capacity_bytes = cluster_from_name("H100").nodes[0].device.memory_bytes * (1 - MARGIN)
    assert all(entry["memory_bytes"] <= capacity_bytes for entry in report["ranked"])
    axes = report["best"]["plan"]["axes"]
    explanation = report["explanation"]
    assert "It is the fastest of" in explanation or "candidates" in explanation
    assert report["rejected"]
    assert all(rejected["reason"] for rejected in report["rejected"])
    if length > 100_000:
        assert axes["context"] > 1
        assert f"Context {axes['context']}: activations of 131,072 tokens need" in explanation
    else:
        assert "rows routed evenly to the" in explanation
    if axes["expert"] > 1:
        assert f"Expert {axes['expert']}: the experts have" in explanation
        buffers = report["best"]["dispatch_bytes"]
        assert buffers["worst"] == pytest.approx(axes["expert"] * buffers["expected"])
