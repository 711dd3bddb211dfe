"""A narrower window: what a token sees, in architectures that have one and in those that do not; refused elsewhere."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_memopt import InputError
from hf_memopt.levers.sliding_window import set_window

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 2},
}


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


def test_llama_is_as_with_a_dense_mask():
    """Llama has no window of its own: logits and gradients, with padding."""
    ids, kept = torch.arange(3, 23).view(2, 10), torch.ones(2, 10, dtype=torch.bool)
    kept[1, 7:] = False
    places = torch.arange(10)
    near = (places[:, None] >= places) & (places[:, None] - places < 4)
    labels = ids.masked_fill(~kept, -100)

    def outcome(model, mask):
        out = model(input_ids=ids, labels=labels, attention_mask=mask)
        out.loss.backward()
        return out.logits[kept], torch.cat([weight.grad.flatten() for weight in model.parameters()])

    windowed = model_of("llama", layers=2)
    set_window(windowed, 4)
    wanted = outcome(model_of("llama", layers=2), (near & kept[:, None, :])[:, None])
    found = outcome(windowed, kept.long())
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted, strict=True))


def test_flash_attention_is_given_the_window(monkeypatch):
    """The kernel is recorded in place of run: it needs a card."""
    given = []

    def kernel(module, query, key, value, attention_mask, sliding_window=None, **kwargs):
        given.append((attention_mask, sliding_window))
        return value.transpose(1, 2).repeat_interleave(2, dim=2), None

    model = model_of("llama", layers=2)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", kernel)
    model.config._attn_implementation = "flash_attention_2"
    for _ in range(2):  # a model that a trainer gets again has it already
        set_window(model, 4)
    model(input_ids=torch.arange(3, 15)[None])
    assert given == [(None, 4)] * 2


def test_a_window_that_no_layer_reads_is_not_taken_for_one():
    """As a saved Llama's config.json has it."""
    model = model_of("llama", sliding_window=4)
    assert seen_by_the_last(model) == list(range(12))
    set_window(model, 4)
    assert seen_by_the_last(model) == [8, 9, 10, 11]


def test_attention_that_passes_nothing_to_the_kernel_is_refused():
    model = model_of("llama")
    model.config._attn_implementation = "flash_attention_2"
    attention = type(model.model.layers[0].self_attn)

    class Closed(attention):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values)

    model.model.layers[0].self_attn.__class__ = Closed
    with pytest.raises(InputError, match="sliding_window=4: Closed does not pass arguments to flash attention"):
        set_window(model, 4)


def test_refused():
    with torch.device("meta"), pytest.raises(InputError, match="sliding_window=4: bloom does not attend through"):
        set_window(AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", hidden_size=32, n_layer=1)), 4)


def test_a_mask_of_the_users_own_would_hide_the_window():
    model = model_of("llama")
    set_window(model, 4)
    with pytest.raises(InputError, match="sliding_window=4: the batch brings an attention_mask of its own"):
        model(input_ids=torch.arange(12)[None], attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool))
