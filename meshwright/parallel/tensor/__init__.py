"""The tensor axis. Importing any file of this folder imports dispatch.py, which tells `ShardView` how to run functions
of torch."""

from meshwright.parallel.tensor import dispatch as dispatch
