"""The commands that start or join ranks: `launch`, `horovodrun`, and `train` with `--nodes` or `--on ray`."""
