"""Published training runs as cases for a predictor: `bench predictions` scores itself on them.

`rows` are what was published, `cover` makes a `Case` of a row or says why not, `baseline` is the guess to beat.
"""
