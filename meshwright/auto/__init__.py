"""Implements `plan: auto`: chooses the fastest plan that the planner finds among those that the executor can run."""
