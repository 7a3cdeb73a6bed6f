"""Starts the ranks of Horovod scripts on this machine: `python -m meshwright.compat.horovod -np 2 script.py`."""
