"""Imports what most ranks and commands need, loads the compiled C files, and traces a small model. Tests fork them from
a process that has imported this module: they neither compile the C files in the cache folder of a test, nor take the
time of the first trace of a process."""

import torch
from torch import nn

import meshwright.cli.commands
import meshwright.proof.before_training.parallelize
import meshwright.proof.record.record
import meshwright.train.parallelize
import meshwright.train.rank  # noqa: F401
from meshwright.collectives.shared_memory.compiled_helper import load_helper
from meshwright.processes.network import own_user
from meshwright.profile.structure.structure import find_structure

load_helper(None)  # with the argument that reducers have, by which it is kept
own_user._library()
torch.set_num_threads(1)
with torch.random.fork_rng(devices=[]):  # what is forked draws the numbers of a new process
    _layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    find_structure(_layer, (torch.zeros(2, 6, 8, dtype=torch.float64), torch.zeros(2, 6, 8, dtype=torch.float64)))
