"""Questions about plans: which batch, which cluster, how far does it scale, why is one plan faster than another."""
