"""The predictor scored on published training runs (validation/runs). `python -m validation` runs it.

- `predict.py` predicts the step time and the memory of one published case.
- `fit.py` fits the launch factor of a source to the rows of other, unrelated sources.
- `score.py` computes errors, the order of plans, and predictions that memory is too small.
- `report.py` predicts and scores all cases; `report_text.py` turns the report into a table and into Markdown.
- `publisher.py` removes the rates that a source published of its own machines before that source is predicted.
"""
