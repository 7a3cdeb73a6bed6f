"""Imports what most ranks and commands need. Tests fork them from a process that has imported this module."""

import meshwright.cli.commands
import meshwright.proof.record.record
import meshwright.train.rank  # noqa: F401
