"""The pipeline plans that models of the transformers library publish as `pp_plan` agree with the derived cuts."""

from typing import Any

import pytest
from torch.utils.data import default_collate

from meshwright.model_io.batch import WHOLE_BATCH
from meshwright.profile.structure.structure import find_structure
from tests.proof.models.transformers_models import CASES, Samples


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_a_model_can_be_cut_at_every_place_of_its_plan_and_one_tensor_crosses(name: str) -> None:
    model: Any = CASES[name].build()
    layers = [f"model.layers.{number}" for number in range(len(model.model.layers))]
    places = [module for module in model.pp_plan if module not in ("model.layers", "lm_head")]  # lm_head is the last
    assert places == ["model.embed_tokens", "model.norm"]
    data = Samples("causal")
    structure = find_structure(model, default_collate([data[0], data[1]]), target=WHOLE_BATCH)
    cuts = {cut.after: cut for cut in structure.cuts}
    for place in [*places, *layers]:
        (hidden_states,) = cuts[place].crossing  # masks and positions are computed again
        assert (hidden_states.module, hidden_states.role) == (place, "output")
