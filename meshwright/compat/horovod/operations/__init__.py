"""Horovod's operations, each as a call that waits, and as one that returns a handle."""
