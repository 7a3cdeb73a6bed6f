"""Imported once in the process that ranks are forked from. It traces a small model: the first trace of a process takes
seconds, and forked ranks have what it leaves in the caches of torch."""

import torch
from torch import nn

from meshwright.profile.structure.structure import find_structure
from validation.fuzz.training import rank

torch.set_num_threads(1)
_layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
find_structure(_layer, (torch.zeros(2, 6, 8, dtype=torch.float64), torch.zeros(2, 6, 8, dtype=torch.float64)))
RUN_CASE = rank.run_case
