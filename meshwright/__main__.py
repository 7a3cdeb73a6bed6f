"""`python -m meshwright`, and `torchrun -m meshwright train JOB`."""

from meshwright.cli import main

main()
