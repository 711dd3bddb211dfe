"""A narrower window: what a token sees, in every kind of architecture that has one; refused elsewhere."""

import pytest
import torch
from test_memory_trainer import llama
from transformers import AutoConfig, AutoModelForCausalLM

from hf_memopt import InputError
from hf_memopt.levers.sliding_window import set_window

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
FAMILIES = {"mistral": {}, "phi3": {}, "qwen2": {}, "qwen3": {"head_dim": 8}, "mixtral": {"num_local_experts": 2}}


def model_of(family: str, layers: int = 1, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES.get(family, {}), num_hidden_layers=layers, **more)
    return AutoModelForCausalLM.from_config(config).eval()


def seen_by_the_last(model, tokens: int = 12) -> list[int]:
    """Tokens whose change the last token's logits notice."""
    ids = torch.arange(3, 3 + tokens)[None]
    before = model(input_ids=ids).logits[0, -1]
    seen = []
    for place in range(tokens):
        changed = ids.clone()
        changed[0, place] = 50
        if not torch.equal(model(input_ids=changed).logits[0, -1], before):
            seen.append(place)
    return seen


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_token_sees_its_window(family):
    model = model_of(family)
    set_window(model, 4)
    assert seen_by_the_last(model) == [8, 9, 10, 11]
    assert model.config.sliding_window == 4, "and so does the model that is saved and loaded"


def test_layers_that_see_everything_by_design_stay():
    model = model_of("gemma3_text", layers=2, head_dim=8, layer_types=["sliding_attention", "full_attention"])
    set_window(model, 4)
    assert seen_by_the_last(model) == list(range(12))
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [4, None]


def test_refused_with_the_list():
    with pytest.raises(
        InputError, match=r"llama has no attention window; architectures that have one: .*mistral.*qwen3"
    ):
        set_window(llama(), 4)
