"""The predictor judged on training runs that others published and that were measured on our machines. Not part of the
wheel: `make validate` runs it."""
