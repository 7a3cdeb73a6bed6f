"""`deepspeed.git_version_info`: the version of DeepSpeed whose behaviour the drop-in has."""

import torch

version = "0.19.8"
git_hash = git_branch = "meshwright"
torch_info = {
    "version": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "hip_version": "0.0",
    "nccl_version": "0.0",
    "bf16_support": True,
}
