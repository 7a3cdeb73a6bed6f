"""Models that are named without a job: `hf:` (transformers), `timm:` and `torchvision:`. `job_text` writes a job for
such a name; `huggingface` builds models of transformers; `text`, `pictures` and `speech` are their data sets."""
