"""`plan --seq-len max`: the longest sequence that fits, by memory features."""

import dataclasses

import pytest
from test_plan import config, spec_for
from test_quantized_experts import config as config_with_experts

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.planner.choice_jobs import choice_job
from hf_memopt.planner.samples.lengths import _features, longest_sequences


@pytest.fixture
def spec_of_a_small_model():
    """LoRA of a model with positions to spare, on a device that short sequences fill."""
    small = config(2, vocab_size=2000, max_position_embeddings=2**17)
    return dataclasses.replace(spec_for(small, "lora"), memory=2**28)


@pytest.mark.slow
def test_the_longest_fits_and_little_more_does_not(spec_of_a_small_model):
    found = list(longest_sequences(spec_of_a_small_model))
    assert [row.limited_by for row in found] == ["device"] * len(found)
    lengths = [row.seq_len for row in found]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert ["MLP in tiles" in row.settings for row in found] == [False, False, True]
    for row, (settings, spec, choice) in zip(found, _features(spec_of_a_small_model), strict=True):
        budget = spec.memory * 0.9
        assert row.settings == settings and row.estimate.device_bytes <= budget
        longer = dataclasses.replace(spec, seq_len=int(row.seq_len * 1.05) + 256)
        assert estimate_job(choice_job(longer, choice)).device_bytes > budget


@pytest.mark.slow
def test_positions_end_it(spec_of_a_small_model):
    few = dataclasses.replace(spec_of_a_small_model.config, max_position_embeddings=600)
    spec = dataclasses.replace(spec_of_a_small_model, config=few)
    found = list(longest_sequences(spec))
    assert {(row.seq_len, row.limited_by) for row in found} == {(600, "model")}


@pytest.mark.slow
def test_a_model_without_mlps_is_answered_without_tiles(spec_of_a_small_model):
    experts = config_with_experts(vocab_size=2000, max_position_embeddings=600)
    found = list(longest_sequences(dataclasses.replace(spec_of_a_small_model, config=experts)))
    assert found and not any("MLP" in row.settings for row in found)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_presets_8bit_optimizer_is_no_memory_feature(method, spec_of_a_small_model):
    """rtx_4090's for QLoRA: every choice has it, the plainest too."""
    spec = spec_for(spec_of_a_small_model.config, method, hardware="rtx_4090")
    settings, _, choice = next(_features(spec))
    assert settings == "all layers checkpointed" and ("8bit" in choice.optim) == (method == "qlora")
    assert not choice.offloads and not choice.knobs


def test_several_devices_and_videos_are_refused(spec_of_a_small_model):
    several = dataclasses.replace(spec_of_a_small_model.preset, processes=2)
    with pytest.raises(InputError, match="for one device"):
        next(longest_sequences(dataclasses.replace(spec_of_a_small_model, preset=several)))
    with pytest.raises(InputError, match="--frames max"):
        next(longest_sequences(dataclasses.replace(spec_of_a_small_model, video=object())))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--seq-len", "many"], "'many' is neither a number of tokens nor max"),
        (["--seq-len", "max", "--hardware", "any"], "counted for one card"),
        (["--seq-len", "max", "--hardware", "rtx_4090", "--export", "out"], "leave --export out"),
    ],
)
def test_bad_input(words, error, command):
    code, out, err = command("plan", "gpt2", *words)
    assert code == 2 and error in err and not out
