"""Published training runs that the predictor is scored on (`python -m validation`).

`rows` holds what was published, `cover` turns each row into a `PublishedCase` or gives the reason why it cannot, and
`baseline` is the simple guess that the predictor has to beat.
"""
