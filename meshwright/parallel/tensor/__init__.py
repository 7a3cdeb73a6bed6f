"""The tensor axis. Importing any file of this folder imports dispatch.py, which registers with `ShardView` how torch
functions run on it.

Reading order: split_modules.py splits the parameters of the model's layers; parameter_swap.py puts a `ShardView`
(shard_view.py) in the place of each of them while its module runs; dispatch.py runs each torch function that is given a
`ShardView`, by a rule of products.py or vocabulary.py, or as local_calls.py derives it.
"""

from meshwright.parallel.tensor import dispatch as dispatch
