"""How fast Meshwright is beside other libraries, other all-reduces, and after kills: `python -m validation.bench`."""
