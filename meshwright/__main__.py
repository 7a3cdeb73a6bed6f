"""Entry point of `python -m meshwright` and of `torchrun -m meshwright train JOB`."""

from meshwright.cli import main

main()
