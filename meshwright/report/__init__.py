"""Pages and pictures of runs, benchmarks, proofs and plans."""
