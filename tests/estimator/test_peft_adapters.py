"""Every adapter that peft knows: within one percent of a real run on this CPU, or refused in one sentence."""

import pytest
from conftest import slow
from test_estimator import LENGTH, _config, _truth

from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate
from hf_memopt.estimator.tracing.shallow_adapters import adapter_at_depth, adapts_layers_alike

LAYERS = 9  # more than are traced whole
LINEAR = {"target_modules": ["q_proj", "v_proj"]}
VIRTUAL = {"num_virtual_tokens": 4, "num_layers": LAYERS, "token_dim": 64, "num_attention_heads": 4}
SETTINGS = {
    **{"LORA": {"r": 4, **LINEAR}, "ADALORA": {"init_r": 8, "target_r": 4, "total_step": 10, **LINEAR}},
    **{"ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": LAYERS}, "C3A": {"block_size": 16, **LINEAR}},
    **{"CARTRIDGE": VIRTUAL, "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    **{"LN_TUNING": {}, "MULTITASK_PROMPT_TUNING": {"num_tasks": 2, **VIRTUAL}},
    **{"P_TUNING": {"encoder_hidden_size": 32, **VIRTUAL}, "PREFIX_TUNING": VIRTUAL, "PROMPT_TUNING": VIRTUAL},
    **{"ROAD": {"group_size": 16, **LINEAR}, "SHIRA": {"r": 4, **LINEAR}},
    **{"TRAINABLE_TOKENS": {"token_indices": [1, 2, 3]}, "VBLORA": {"vector_length": 16, "num_vectors": 32, **LINEAR}},
    **{"WAVEFT": {"n_frequency": 100, **LINEAR}, "XLORA": {"hidden_size": 64, "adapters": {"a": "b"}}},
}
REFUSED = ("CPT", "MULTITASK_PROMPT_TUNING", "POLY", "SHADOW", "WAVEFT", "XLORA")
QUICK = ("ADAPTION_PROMPT", "IA3", "LOHA", "PREFIX_TUNING", "UNILORA")
FIELDS = {"per_device_train_batch_size": 2}


def _kinds():
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    return sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING)


def _adapter(kind: str):
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    try:
        return PEFT_TYPE_TO_CONFIG_MAPPING[kind](task_type="CAUSAL_LM", **SETTINGS.get(kind, LINEAR))
    except ImportError as error:  # AdaMSS asks for scikit-learn
        pytest.skip(str(error))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in _kinds() if kind not in REFUSED])
def test_within_one_percent_of_a_real_run(kind):
    predicted = estimate(_config(LAYERS), FIELDS, LENGTH, "cpu", _adapter(kind), "float32").peak_allocated_bytes
    assert predicted == pytest.approx(_truth(_config(LAYERS), FIELDS, _adapter(kind)), rel=0.01)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_traced_is_refused(kind):
    with pytest.raises(InputError, match=r"cannot be (estimated|traced)"):
        estimate(_config(LAYERS), FIELDS, LENGTH, "cpu", _adapter(kind), "float32")


def test_a_dict_is_no_adapter():
    with pytest.raises(InputError, match="must be one of peft's configurations"):
        estimate(_config(LAYERS), FIELDS, LENGTH, "cpu", {"r": 8}, "float32")


def test_adapters_that_differ_between_layers_are_traced_with_all_layers():
    from peft import AdaptionPromptConfig, LoraConfig, PrefixTuningConfig

    assert adapts_layers_alike(LoraConfig(target_modules="all-linear"), LAYERS)
    assert adapts_layers_alike(LoraConfig(target_modules=["q_proj", "fc1"]), LAYERS)
    assert not adapts_layers_alike(LoraConfig(target_modules=["layers.3.self_attn.q_proj"]), LAYERS)
    assert not adapts_layers_alike(LoraConfig(target_modules=["q_proj"], layers_to_transform=[8]), LAYERS)
    assert not adapts_layers_alike(AdaptionPromptConfig(adapter_len=4, adapter_layers=3), LAYERS)
    assert adapter_at_depth(PrefixTuningConfig(**VIRTUAL), LAYERS, 3).num_layers == 3
    few = LoraConfig(target_modules=["q_proj"], layers_to_transform=[8], task_type="CAUSAL_LM")
    predicted = estimate(_config(LAYERS), FIELDS, LENGTH, "cpu", few, "float32").peak_allocated_bytes
    assert predicted == pytest.approx(_truth(_config(LAYERS), FIELDS, few), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LOHA", slow("SHIRA"), slow("PREFIX_TUNING"), slow("BOFT"), slow("UNILORA")])
def test_a_trainer_with_any_adapter(kind, tmp_path):
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    from hf_memopt.estimator import estimate_trainer
    from hf_memopt.levers.adapters import add_adapters

    model = add_adapters(AutoModelForCausalLM.from_config(_config(LAYERS)), _adapter(kind))
    args = TrainingArguments(output_dir=tmp_path, use_cpu=True, report_to="none", **FIELDS)
    rows = [{"input_ids": [7] * LENGTH, "labels": [7] * LENGTH}] * 16
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=default_data_collator)
    predicted = estimate_trainer(trainer, "cpu").peak_allocated_bytes
    assert predicted == pytest.approx(_truth(_config(LAYERS), FIELDS, _adapter(kind)), rel=0.01)
