"""DeepSpeed's configuration files as values. This package imports neither torch nor DeepSpeed."""
