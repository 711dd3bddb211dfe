"""Experts in 4 bits: forward and gradients of the dequantized weights, loaded tensor by tensor, predicted."""

import pytest
import torch
from conftest import refused, slow
from peft import LoraConfig
from test_estimator import CHECKPOINTED, LENGTH
from test_quantized_jobs import _trainer as trainer_of
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TrainingArguments, default_data_collator

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, MemoryTrainer
from hf_memopt.engines import engine_named, engine_of_table
from hf_memopt.estimator import estimate
from hf_memopt.estimator.accounting.ledger import _parts
from hf_memopt.estimator.tracing.fake_quantization import loaded_tensors
from hf_memopt.levers import activation_offload, weight_streaming
from hf_memopt.levers.adapters import add_adapters, keep_differentiable
from hf_memopt.levers.apply import apply_levers
from hf_memopt.levers.expert_loading import experts_quantized_on_load
from hf_memopt.levers.quantized_experts import (
    dequantize_rows,
    expert_weights,
    is_quantized,
    quantize,
    quantize_experts,
)

ON = MemoryArguments(quantized_experts=True)
FAMILIES = {
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"head_dim": 16, "num_local_experts": 4},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"] * 2,
    },
    "glm4_moe": {
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def config(family="qwen3_moe", layers=2, **more):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return AutoConfig.for_model(family, **{**sizes, **FAMILIES[family], **more})


def four_bits(double=True):
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)


def lora(**more):
    """Of linear layers alone: all-linear means experts, too."""
    return LoraConfig(r=4, target_modules=["o_proj"], task_type="CAUSAL_LM", **more)


def model_of(family, experts="grouped_mm"):
    """A model with adapters, as if its linear layers were in 4 bits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family), experts_implementation=experts).train()
    model.is_loaded_in_4bit, model.config.quantization_config = True, four_bits()
    torch.manual_seed(1)
    return add_adapters(model, lora(init_lora_weights=False))


def gradients(model, checkpointed=None):
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": checkpointed == "reentrant"})
        model.enable_input_require_grads()
    ids = torch.arange(2 * 24).reshape(2, 24) % 64
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("checkpointed", [None, "not reentrant", slow("reentrant")])
@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen3_moe", "grouped_mm"),
        ("gpt_oss", "eager"),
        slow("qwen3_moe", "eager"),
        slow("qwen3_moe", "batched_mm"),
        slow("gpt_oss", "grouped_mm"),
        *(
            slow(family, experts)
            for family in ("mixtral", "glm4_moe", "deepseek_v3")
            for experts in ("eager", "grouped_mm")
        ),
    ],
)
def test_forward_and_gradients_are_those_of_the_dequantized_experts(family, experts, checkpointed):
    quantized, plain = model_of(family, experts), model_of(family, experts)
    quantize_experts(quantized)
    assert any(is_quantized(module) for module in quantized.modules())
    modules, replaced = dict(quantized.named_modules()), 0
    for name, module in plain.named_modules():
        for weight_name, weight in expert_weights(module):
            weight.data = getattr(modules[name], weight_name).detach().clone()
            replaced += 1
    assert replaced
    loss, wanted = gradients(plain, checkpointed)
    found_loss, found = gradients(quantized, checkpointed)
    assert torch.equal(found_loss, loss) and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    assert not parametrize._cache  # nothing dequantized outlives the step


OTHER_LEVERS = {
    "loss_chunk_size": 16,
    "mlp_tile_size": 10,
    "checkpoint_ratio": 0.5,
    "checkpoint_keeps": "attention",
    "weight_streaming": True,
    "activation_offload": True,
    "activation_compression": "int8",
}


@pytest.mark.parametrize("lever", sorted(OTHER_LEVERS))
@pytest.mark.parametrize("family", ["deepseek_v3", *map(slow, ("qwen3_moe", "gpt_oss", "mixtral"))])
def test_with_every_other_lever(family, lever, monkeypatch):
    """The CPU stands in for a device with memory of its own: what is offloaded is copied, at once."""
    monkeypatch.setattr(activation_offload, "make_lanes", lambda _: activation_offload.AtOnce())
    monkeypatch.setattr(activation_offload, "_SMALLEST", 256)
    monkeypatch.setattr(weight_streaming, "make_lanes", lambda _: weight_streaming.LanesAtOnce())
    plain, changed = model_of(family), model_of(family)
    apply_levers(plain, ON)
    if lever == "mlp_tile_size" and family in ("qwen3_moe", "gpt_oss", "mixtral"):
        with pytest.raises(InputError, match="has no MLP as a module of its own"):
            apply_levers(changed, MemoryArguments(mlp_tile_size=10))
        return
    apply_levers(changed, MemoryArguments(quantized_experts=True, **{lever: OTHER_LEVERS[lever]}))
    (loss, wanted), (found_loss, found) = gradients(plain), gradients(changed)
    assert torch.allclose(found_loss, loss) and found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if lever == "activation_compression":
            assert torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.999
        elif lever == "weight_streaming":
            assert torch.equal(found[name], gradient), name
        else:
            assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_a_run_with_streamed_experts_is_the_run_without(family, tmp_path, monkeypatch):
    """Three steps of a real Trainer: losses and adapters are the same to the bit."""
    monkeypatch.setattr(weight_streaming, "make_lanes", lambda _: weight_streaming.LanesAtOnce())

    def run(name, **levers):
        rows = [{"input_ids": (torch.arange(16) + n) % 64, "labels": (torch.arange(16) + n) % 64} for n in range(6)]
        args = TrainingArguments(
            tmp_path / name,
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
        )
        memory_args = MemoryArguments(quantized_experts=True, silent_mode=True, **levers)
        trainer = MemoryTrainer(model_of(family), args, default_data_collator, rows, memory_args=memory_args)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        away = [name for name, w in trainer.model.named_parameters() if not w.untyped_storage().nbytes()]
        assert any("experts" in name for name in away) == bool(levers)
        return losses, {name: w for name, w in trainer.model.named_parameters() if w.requires_grad}

    (losses, adapters), (found_losses, found) = run("resident"), run("streamed", weight_streaming=True)
    assert len(losses) == 3 and losses[0] != losses[-1] and found_losses == losses
    assert adapters and all(torch.equal(found[name], weight) for name, weight in adapters.items())


@pytest.mark.parametrize("double", [False, True])
def test_some_experts_are_the_same_bits_as_in_all(double):
    weights = torch.randn(6, 24, 40)  # 15 blocks each: double quantization's groups of 256 blocks cross experts
    packed = quantize(weights.repeat(40, 1, 1), four_bits(double))
    state = packed.expert_state
    every = dequantize_rows(packed, state, 0, 240)
    assert (every - weights.repeat(40, 1, 1)).abs().max() < 1
    for start, stop in ((0, 1), (17, 18), (100, 140), (239, 240)):
        assert torch.equal(dequantize_rows(packed, state, start, stop), every[start:stop])


def load(folder, shape, memory_args, peft_config=None, dtype=torch.float32):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return read(folder, memory_args, peft_config, dtype)


def read(folder, memory_args, peft_config=None, dtype=torch.float32):
    quantization = four_bits()
    with experts_quantized_on_load(memory_args, quantization, peft_config):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantization)
    keep_differentiable(model)  # bitsandbytes' other layout, of some CPUs, does not take layers this small
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", *map(slow, ("gpt_oss", "mixtral", "deepseek_v3", "glm4_moe"))])
def test_loading_quantizes_the_same(family, tmp_path):
    loaded = load(tmp_path, config(family), ON)
    later = load(tmp_path, config(family), MemoryArguments()).requires_grad_(False)
    quantize_experts(later)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, later(input_ids=ids).logits)
    modules = dict(later.named_modules())
    experts = [(name, module) for name, module in loaded.named_modules() if "Experts" in type(module).__name__]
    assert experts and not any(list(expert_weights(module)) for _, module in experts)
    for name, module in experts:
        for weight in module.parametrizations:
            assert torch.equal(getattr(module, weight), getattr(modules[name], weight))


@pytest.mark.slow
def test_loading_takes_a_layer_more_than_the_result(tmp_path):
    shape = config(layers=8, hidden_size=256, moe_intermediate_size=128)
    load(tmp_path, shape, ON)
    kept = []
    plain = allocator_peak(lambda: kept.append(read(tmp_path, MemoryArguments())))
    quantized = allocator_peak(lambda: kept.append(read(tmp_path, ON)))
    layer = 8 * 3 * 256 * 128 * 4
    result = sum(tensor.nbytes for tensor in loaded_tensors(kept[-1]))
    # On a CPU the whole file counts, which is mapped into memory.
    file = (tmp_path / "model.safetensors").stat().st_size
    assert quantized <= (file + result + 2 * layer) * 1.05 < plain


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, slow(True)])
def test_estimates_are_what_a_real_run_takes(checkpointed, tmp_path):
    shape = config(layers=5, hidden_size=128, moe_intermediate_size=128)
    fields = {"per_device_train_batch_size": 2, "bf16": True, **(CHECKPOINTED if checkpointed else {})}
    arguments = {"dtype": "bfloat16", "quantization_config": four_bits(), "memory_args": ON}
    predicted = estimate(shape, fields, LENGTH, "cpu", lora(), **arguments)
    model = load(tmp_path, shape, ON, lora(), torch.bfloat16)
    storages = [part.untyped_storage() for tensor in loaded_tensors(model) for part in _parts(tensor)]
    loaded = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    measured = loaded + allocator_peak(lambda: trainer_of(tmp_path, add_adapters(model, lora()), fields).train())
    assert predicted.peak_allocated_bytes == pytest.approx(measured, rel=0.03)
    assert not any("experts stay" in note for note in predicted.notes)


def test_experts_that_adapters_change_stay(tmp_path):
    adapted = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["layers.0.mlp.experts.down_proj"])
    model = add_adapters(load(tmp_path, config(), ON, adapted), adapted)
    quantize_experts(model)
    first, second = (layer.mlp.experts for layer in model.get_base_model().model.layers)
    assert [name for name, _ in expert_weights(first.get_base_layer())] == ["gate_up_proj", "down_proj"]
    assert list(second.parametrizations) == ["gate_up_proj", "down_proj"]
    loss, found = gradients(model)
    assert torch.isfinite(loss) and any("experts" in name for name in found)


def test_what_is_refused(tmp_path):
    assert "torch_compile" in next(refused(ON, {"torch_compile": True}, engine_named("none")))
    for name, family in (("fsdp1", "fsdp1"), ("fsdp2", "fsdp2"), ("tp", "tp")):
        assert f"{family} shards" in next(refused(ON, {}, engine_of_table(name)))
    assert "zero3 shards" in next(refused(ON, {}, engine_named("zero3")))
    assert not list(refused(ON, {}, engine_named("zero2")))
    model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(InputError, match="in 4 bits: use method=qlora"):
        quantize_experts(model)
    with pytest.raises(InputError, match="in 4 bits: use method=qlora"), experts_quantized_on_load(ON, None):
        pass
    everywhere = add_adapters(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.is_loaded_in_4bit = True
    with pytest.raises(InputError, match="adapters train the experts, as with target_modules=all-linear"):
        quantize_experts(everywhere)
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=1))
    dense.is_loaded_in_4bit = True
    with pytest.raises(InputError, match="LlamaForCausalLM has no experts"):
        quantize_experts(dense)
