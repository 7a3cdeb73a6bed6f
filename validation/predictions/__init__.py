"""`bench predictions`: the predictor scored on published runs (bench/runs), each source without its own rows' help.

`predict` gives a case's step time and memory, `fit` the factors that are read off other sources' rows, `score` the
errors, `report` all of it.
"""
