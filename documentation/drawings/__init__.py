"""The drawings of the documentation, made from the schedules that run."""
