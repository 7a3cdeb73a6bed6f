"""How long planning takes for large models: `python -m validation.large_models [MODEL …]` plans each of `CASES` in a
process of its own with one thread, from a configuration without weights, and prints the seconds of a core, imports
included, and the plan."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
# Models with the number of machines with eight H100 each, and the length of sequences.
CASES = [
    *((model, nodes, 4096) for model in ("Mixtral-8x7B", "Qwen3-235B-A22B", "DeepSeek-V3") for nodes in (8, 32, 256)),
    ("Llama-3-70B", 32, 131072),
]


def command(model: str, nodes: int, length: int, folder: Path) -> tuple[str, ...]:
    """The words after `meshwright` that plan a case. The configuration is written into `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    batch = 64 if length > 100_000 else max(1024, 16 * nodes)
    words = ("--cluster", f"{nodes}x8xH100", "--sequence", str(length), "--global-batch", str(batch), "--json")
    return "plan", f"hf:{folder}", *words


def main() -> None:
    for model, nodes, length in CASES:
        if sys.argv[1:] and model not in sys.argv[1:]:
            continue
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as folder:
            words = command(model, nodes, length, Path(folder))
            threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            result = subprocess.run(
                [sys.executable, "-m", "meshwright", *words],
                env={**os.environ, **threads},
                capture_output=True,
                text=True,
                check=False,
            )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        plan = result.stderr.strip().rpartition("\n")[2]  # the reason why none fits
        if result.returncode == 0:
            plan = json.loads(result.stdout.splitlines()[-1])["best"]["summary"]
        print(f"| {model} | {8 * nodes:,} | {seconds:.0f} s | {plan} |", flush=True)


if __name__ == "__main__":
    main()
