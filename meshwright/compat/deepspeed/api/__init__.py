"""What scripts import from modules of DeepSpeed: each file stands for one or a few of them (modules.py)."""
