"""What from_pretrained() gives a dry-run script: its classes, dtypes and adapters, without weights."""

import json

import pytest
import torch
from dry_runs import MODEL, SHAPE, caught, listing, prepare, refusal

from hf_memopt.estimator import estimate_trainer
from hf_memopt.estimator.fake_pretrained import fake_models
from hf_memopt.estimator.scripts.dry_run import caught_trainer
from hf_memopt.estimator.scripts.launched import ScriptCommand
from hf_memopt.stack.versions import has

# peft (0.21.2) and trl (1.16) use the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return prepare(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "model.dtype == torch.bfloat16"),
        ("dtype=torch.float32", "model.dtype == torch.float32 and model.config.dtype == torch.float32"),
        ("torch_dtype='float16'", "model.dtype == torch.float16"),
        ("use_cache=False", "model.config.use_cache is False"),
        ("num_hidden_layers=1", "len(model.model.layers) == 1"),
        ("attn_implementation={'': 'eager'}", "model.config._attn_implementation == 'eager'"),
        ("attn_implementation='eager'", "model.config._attn_implementation == 'eager'"),
        ("device_map='auto', low_cpu_mem_usage=True", "model.device.type == 'cpu'"),
        ("device_map={'': 0}, trust_remote_code=False, revision='main'", "model.config._name_or_path == 'model'"),
        ("ignore_mismatched_sizes=True", "model.name_or_path == 'model' and not model.training"),
        ("tie_word_embeddings=True", "model.lm_head.weight is model.model.embed_tokens.weight"),
        ("subfolder='deeper'", "len(model.model.layers) == 3"),
        ("state_dict=None, use_safetensors=True, token=None", "model.can_generate()"),
    ],
)
def test_from_pretrained_takes_its_arguments(arguments, expected, folder):
    from transformers import LlamaConfig

    LlamaConfig(**{**SHAPE, "num_hidden_layers": 3}).save_pretrained(folder / "model" / "deeper")
    with caught(
        MODEL + f'model = AutoModelForCausalLM.from_pretrained("model", {arguments})\nassert {expected}\ntrain(model)',
        "rtx_4090",
    ):
        pass


@pytest.mark.parametrize("saved", [True, False])
def test_weights_that_a_constructor_freezes_are_trained_where_loading_replaces_them(saved, tmp_path, monkeypatch):
    """Whether a checkpoint has them or, as Marian's of its positions, leaves them out."""
    from transformers import MarianConfig, MarianMTModel

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 32, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    model = MarianMTModel(MarianConfig(**sizes, **heads, max_position_embeddings=8, decoder_start_token_id=0))
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert len(frozen) == 2
    if saved:
        monkeypatch.setattr(MarianMTModel, "_keys_to_ignore_on_save", [])
    model.save_pretrained(tmp_path)
    with fake_models():
        fake = MarianMTModel.from_pretrained(tmp_path)
    loaded = MarianMTModel.from_pretrained(tmp_path)
    trained, expected = (
        {name for name, weight in made.named_parameters() if weight.requires_grad} for made in (fake, loaded)
    )
    assert trained == expected
    assert frozen <= trained or not has("transformers", "5.0")


@pytest.mark.parametrize(("weights", "dtype"), [(True, "float16"), (False, "float32")])
def test_a_checkpoint_whose_configuration_has_no_dtype(weights, dtype, folder):
    """Its weights' header says it; without weights here, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE)).half().save_pretrained(folder / "old")
    LlamaConfig(**SHAPE).save_pretrained(folder / "old")
    if not weights:
        (folder / "old" / "model.safetensors").unlink()
    script = f'model = AutoModelForCausalLM.from_pretrained("old")\nassert model.dtype is torch.{dtype}\ntrain(model)'
    with caught(MODEL + script):
        pass


def test_other_classes_and_their_heads(folder):
    script = MODEL + (
        "from transformers import AutoModelForSequenceClassification, AutoModel, LlamaForCausalLM, LlamaConfig\n"
        'model, info = AutoModelForSequenceClassification.from_pretrained("model", num_labels=5, '
        "output_loading_info=True, problem_type='multi_label_classification')\n"
        "assert model.score.out_features == 5 and not info['missing_keys']\n"
        'assert AutoModel.from_pretrained("model").half().dtype is torch.float16\n'
        f"own = LlamaForCausalLM(LlamaConfig(**{SHAPE}))\n"
        "assert type(own.lm_head.weight.data).__name__ == 'FakeTensor'\n"
        "own.resize_token_embeddings(200)\n"
        "own.cuda().bfloat16()\ntrain(own)"
    )
    with caught(script, "rtx_4090") as trainer:
        assert next(trainer.model.parameters()).dtype is torch.bfloat16
        assert estimate_trainer(trainer, "rtx_4090").fits


def test_a_kernel_of_the_hub(folder):
    script = (
        MODEL
        + """
model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="kernels-community/flash-attn3")
train(model, bf16=True)
"""
    )
    with caught(script, "h100_80gb") as trainer:
        assert estimate_trainer(trainer, "h100_80gb").fits


@pytest.mark.parametrize(("hardware", "dtype"), [("a100_80gb", torch.bfloat16), ("h100_80gb", torch.float8_e4m3fn)])
def test_an_fp8_checkpoint_where_the_card_has_no_kernels_for_it(hardware, dtype, folder):
    config = json.loads((folder / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    script = (
        MODEL
        + """
from peft import LoraConfig, get_peft_model

model = AutoModelForCausalLM.from_pretrained("model")
train(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), bf16=True)
"""
    )
    with caught(script, hardware) as trainer:
        assert trainer.model.base_model.model.model.layers[0].self_attn.k_proj.weight.dtype == dtype
        assert estimate_trainer(trainer, hardware).fits


def test_liger_on_a_class_of_the_scripts_own(folder):
    script = (
        MODEL
        + """
from transformers import LlamaForCausalLM

class Mine(LlamaForCausalLM):
    pass

train(Mine.from_pretrained("model"), bf16=True, use_liger_kernel=True)
"""
    )
    with caught(script, "h100_80gb") as trainer:
        assert estimate_trainer(trainer, "h100_80gb").fits


def test_modules_that_stay_in_float32(folder):
    from transformers import T5Config

    T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16, vocab_size=64).save_pretrained(folder / "t5")
    script = MODEL + (
        "from transformers import AutoModelForSeq2SeqLM\n"
        'model = AutoModelForSeq2SeqLM.from_pretrained("t5", dtype=torch.float16)\n'
        "assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype is torch.float32\n"
        "assert model.shared.weight.dtype is torch.float16\ntrain(model)"
    )
    with caught(script):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("low", ["", ", low_cpu_mem_usage=True"])
def test_adapters_of_a_folder(low, folder):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path="model")
    adapter.save_pretrained(folder / "adapter")
    script = MODEL + (
        "from peft import AutoPeftModelForCausalLM, PeftModel\n"
        'model = AutoModelForCausalLM.from_pretrained("model")\n'
        f'model = PeftModel.from_pretrained(model, "adapter", is_trainable=True{low})\n'
        'other = AutoPeftModelForCausalLM.from_pretrained("adapter", is_trainable=True)\n'
        'third = AutoModelForCausalLM.from_pretrained("adapter")\n'
        "assert third.config._name_or_path == 'model' and third.peft_config\n"
        "assert other.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()\n"
        "train(model)"
    )
    with caught(script, "rtx_4090") as trainer:
        assert 0 < estimate_trainer(trainer, "rtx_4090").breakdown["optimizer_states"] < 10**6


def test_a_spread_model_is_refused(folder):
    said = refusal(MODEL + 'AutoModelForCausalLM.from_pretrained("model", device_map={"model": 0, "lm_head": "cpu"})')
    assert said.startswith("device_map=") and "not modelled" in said


def test_a_model_from_a_configuration_has_its_tied_weights_once(folder):
    """no_init_weights(), which spares them their values, leaves out tying, too (transformers 5.23)."""
    script = f"""
        from training import train
        from transformers import AutoModelForCausalLM, LlamaConfig

        train(AutoModelForCausalLM.from_config(LlamaConfig(**{SHAPE}, tie_word_embeddings=True)))
    """
    with caught(script) as trainer:
        assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "columns", "computed"),
    [
        ("DPO", '"chosen": "b", "rejected": "c"', "ref_chosen_logps"),
        ("KTO", '"completion": "b", "label": True', "ref_logps"),
    ],
)
def test_references_are_precomputed_without_values(name, columns, computed, folder):
    script = f"""
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import {name}Config, {name}Trainer

        data = Dataset.from_list([{{"prompt": "a", {columns}}}] * 8)
        args = {name}Config("out", precompute_ref_log_probs=True, bf16=False, report_to="none")
        model = AutoModelForCausalLM.from_pretrained("model")
        tokenizer = AutoTokenizer.from_pretrained("model")
        {name}Trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer).train()
    """
    with caught(script) as trainer:
        assert trainer.ref_model is None and computed in trainer.train_dataset.column_names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_trls_own_scripts(name, folder, monkeypatch):
    """They take the tokenizer from the model's `config._name_or_path`."""
    trl = pytest.importorskip("trl")
    (folder / "data").mkdir()
    row = '{"text": "a b c"}' if name == "sft" else '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    (folder / "data" / "train.jsonl").write_text(f"{row}\n" * 8)
    before = listing(folder)
    arguments = "--model_name_or_path model --dataset_name data --output_dir out --bf16 True --use_peft --load_in_4bit"
    script = f"{trl.__path__[0]}/scripts/{name}.py"
    with caught_trainer(
        ScriptCommand(script, [*arguments.split(), "--lora_target_modules", "all-linear"]), "rtx_4090"
    ) as trainer:
        assert trainer.processing_class.name_or_path == trainer.model.config._name_or_path == "model"
        assert trainer.model.get_nb_trainable_parameters()[0] > 0 and trainer.args.bf16
    assert listing(folder) == before
