"""Callbacks of a job, which are called as it trains. docs/callbacks.md says how to write one."""

from meshwright.train.callbacks.early_stopping import EarlyStopping

__all__ = ["EarlyStopping"]
