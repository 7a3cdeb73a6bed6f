"""The context axis. Importing any file of this folder imports dispatch.py, which registers with `SequenceView` how
torch functions run on it.

Reading order: divide_model.py divides the inputs of a model; sequence_view.py says what a divided tensor is;
dispatch.py runs each torch function that is given one, by a rule of rules.py or as `tensor/local_calls.py` derives it;
attention.py computes attention over ranks, from tiles (tiles.py) of keys and values that ranks exchange (exchange.py).
"""

from meshwright.parallel.context import dispatch as dispatch
