"""Trains a job on an existing Ray cluster, in the workers of Ray Train: `meshwright train JOB --on ray`. Only `run.py`
and `worker.py` import Ray."""
