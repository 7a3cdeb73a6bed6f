"""How far losses may be from those of DeepSpeed, as a share of them, by configuration of their_loop.py. In fp32 sums
are taken in another order; in bf16 and fp16 DeepSpeed also sends gradients rounded to that type."""

FP32, BF16, FP16 = 1e-5, 5e-3, 1e-3
TOLERANCES = {
    "stage 0, accumulation, clipping, WarmupLR": FP32,
    "stage 1, WarmupDecayLR": FP32,
    "stage 2, accumulation, OneCycle": FP32,
    "stage 3, WarmupCosineLR": FP32,
    "stage 2, offloaded optimizer": FP32,
    "stage 3, offloaded parameters, accumulation": FP32,
    "bf16, stage 2, accumulation": BF16,
    "torch_autocast, LRRangeTest": BF16,
}
FP16_TOLERANCES = {
    "fp16, stage 2, dynamic scale": FP16,
    "fp16, stage 1, overflow": FP16,
    "fp16, stage 1, static scale, accumulation": FP16,
}
