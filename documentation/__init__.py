"""Makes the generated parts of `docs/`: the reference pages and the drawings. Not in the wheel."""
