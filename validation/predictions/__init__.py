"""`python -m validation`: the predictor scored on published runs (validation/runs), each source without help of its own
rows.

`predict` has a case's step time and memory, `fit` the launch factors that are fitted to other sources' rows, `score`
the errors, `report` all of it. `publisher` leaves out what a source published of its own machines.
"""
