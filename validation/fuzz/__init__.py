"""A fuzzer: random small models under random plans, compared with plain PyTorch in one process."""
