"""Estimates of quantized models against real runs on this CPU, and what is refused."""

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import frozen
import pytest
import torch
from conftest import slow
from peft import LoHaConfig, LoraConfig
from test_estimator import CHECKPOINTED, LENGTH, _config, _lora
from transformers import AutoConfig, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.quantizers.auto import AutoQuantizationConfig

from benchmarks.profiled_peak import allocator_peak
from hf_memopt.engines import NO_ENGINE, engine_named
from hf_memopt.errors import InputError
from hf_memopt.estimator import assembly, estimate
from hf_memopt.estimator.accounting.ledger import _parts
from hf_memopt.estimator.quantized_checkpoints import quantization_notes, resolve_quantization
from hf_memopt.estimator.tracing.fake_quantization import _DEQUANTIZED_BYTES, loaded_tensors, quantize, staged_bytes
from hf_memopt.estimator.tracing.fake_tensors import fake_world
from hf_memopt.estimator.tracing.model import ModelSettings, make_model
from hf_memopt.estimator.tracing.quantized_linear import SCHEMES
from hf_memopt.hardware import get_hardware


def _load(folder, config, quantization, dtype=torch.bfloat16):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantization)


def _trainer(folder, model, fields):
    from transformers import Trainer, TrainingArguments, default_data_collator

    args = TrainingArguments(
        f"{folder}/out", use_cpu=True, max_steps=2, report_to="none", save_strategy="no", **fields
    )
    rows = [{"input_ids": [7] * LENGTH, "labels": [7] * LENGTH}] * 8
    return Trainer(model, args, train_dataset=rows, data_collator=default_data_collator)


def _measured(folder, config, quantization, fields) -> int:
    """The allocator's peak of real training, with the weights. Loading is left out: on a CPU the checkpoint, mapped
    into memory, would be the peak of so small a model."""
    from hf_memopt.levers.adapters import add_adapters

    model = _load(folder, config, quantization)
    parts = [part.untyped_storage() for tensor in loaded_tensors(model) for part in _parts(tensor)]
    loaded = {storage._cdata: storage.nbytes() for storage in parts}
    return sum(loaded.values()) + allocator_peak(
        lambda: _trainer(folder, add_adapters(model, _lora()), fields).train()
    )


def test_dequantized_experts_are_converted_one_weight_at_a_time():
    model = torch.nn.Linear(8, 8)
    assert staged_bytes(model, "mxfp4") == staged_bytes(model) == 0
    model.small, model.large = (torch.nn.Parameter(torch.empty(size, 4, 8)) for size in (2, 16))
    assert (
        staged_bytes(model, "mxfp4") == 16 * 4 * 8 * 7.65625 and staged_bytes(model, "fp8") == staged_bytes(model) == 0
    )


def test_a_weight_that_fsdp_gathered_has_its_modules_scales():
    import bitsandbytes

    with fake_world("cpu"):
        for own, scales in ((None, "the module's"), ("its own", "its own")):
            module = SimpleNamespace(weight=SimpleNamespace(quant_state=own), quant_state="the module's")
            bitsandbytes.nn.modules.fix_4bit_weight_quant_state_from_module(module)
            assert module.weight.quant_state == scales


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"bf16": True}, slow({"bf16": True, **CHECKPOINTED}), slow({})])
def test_8_bit_weights_take_what_a_real_run_takes(more, tmp_path):
    quantization = BitsAndBytesConfig(load_in_8bit=True)
    fields = {"per_device_train_batch_size": 2, **more}
    predicted = estimate(_config(9), fields, LENGTH, "cpu", _lora(), "bfloat16", quantization_config=quantization)
    measured = _measured(str(tmp_path), _config(9), quantization, fields)
    assert predicted.peak_allocated_bytes == pytest.approx(measured, rel=0.01)


def _torchao(name: str):
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Int8WeightOnlyConfig", slow("Float8WeightOnlyConfig"), slow("Int8DynamicActivationInt8WeightConfig")]
)
def test_torchaos_weights_take_what_a_real_run_takes(name, tmp_path):
    fields = {"per_device_train_batch_size": 2, "bf16": True}
    quantization = _torchao(name)
    predicted = estimate(_config(9), fields, LENGTH, "cpu", _lora(), "bfloat16", quantization_config=quantization)
    measured = _measured(str(tmp_path), _config(9), quantization, fields)
    assert predicted.peak_allocated_bytes == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize(
    "quantization",
    [
        slow(BitsAndBytesConfig(load_in_8bit=True)),
        slow(BitsAndBytesConfig(load_in_4bit=True)),
        slow("Int8WeightOnlyConfig"),
    ],
    ids=str,
)
def test_a_trainer_of_a_quantized_model_takes_what_its_configuration_takes(quantization, tmp_path):
    from hf_memopt.estimator import estimate_trainer
    from hf_memopt.levers.adapters import add_adapters

    quantization = _torchao(quantization) if isinstance(quantization, str) else quantization
    fields = {"per_device_train_batch_size": 2, "bf16": True}
    model = add_adapters(_load(str(tmp_path), _config(9), quantization), _lora())
    trainer = _trainer(str(tmp_path), model, fields)
    first = estimate_trainer(trainer, "cpu").peak_allocated_bytes
    wanted = estimate(_config(9), fields, LENGTH, "cpu", _lora(), "bfloat16", quantization_config=quantization)
    assert first == pytest.approx(wanted.peak_allocated_bytes, rel=0.001)
    trainer.evaluate(trainer.train_dataset)  # bitsandbytes' layers then keep their scales elsewhere
    assert estimate_trainer(trainer, "cpu").peak_allocated_bytes == first


@pytest.mark.slow
def test_8_bit_weights_are_one_byte_and_a_scale_a_row():
    quantization = BitsAndBytesConfig(load_in_8bit=True)
    job = (_config(4), {"bf16": True}, LENGTH, "rtx_4090", _lora(), "bfloat16")
    estimated = estimate(*job, quantization_config=quantization)
    layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 176
    rows = 64 + 32 + 32 + 64 + 176 + 176 + 64
    saved = estimate(*job).breakdown["parameters"] - estimated.breakdown["parameters"]
    assert saved == pytest.approx(4 * (layer - 4 * rows), abs=4 * 7 * 2 * 512)  # 7 weights and scales a layer, rounded
    assert not any("experts" in note for note in estimated.notes)
    flops = [found.mfu * found.step_seconds for found in (estimated, estimate(*job))]
    assert flops[0] == pytest.approx(flops[1], rel=0.001)  # the 8-bit matmuls count, too


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"quant_method": "mxfp4"}, r"Mxfp4Config\(dequantize=True\)"),
        ({"quant_method": "hqq", "quant_config": {}, "skip_modules": []}, "does not load HQQ"),
        ({"quant_method": "vptq", "config_for_layers": {}}, "is_trainable is False"),
        ({"quant_method": "none_such"}, "none_such"),
        ({}, "quant_method"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(block, message):
    with pytest.raises(InputError, match=message):
        estimate(_config(4, quantization_config=block), {}, 32, "h100_80gb", _lora(), "bfloat16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_config": LoHaConfig(target_modules=["q_proj"])}, "peft_type=LOHA is not modelled"),
        ({"peft_config": LoraConfig(target_modules=["q_proj"], use_dora=True)}, "use_dora=True is not modelled"),
        ({"world_size": 2, "strategy": "fsdp2"}, "not sharded: strategy ddp or zero2"),
        ({"world_size": 2, "strategy": "zero3"}, "not sharded: strategy ddp or zero2"),
    ],
    ids=["LoHa", "DoRA", "fsdp2", "zero3"],
)
def test_what_quantized_layers_cannot_have_is_refused(settings, message):
    config = _wide(quantization_config={"quant_method": "gptq", **CHECKPOINTS["gptq"][0]})
    with pytest.raises(InputError, match=message):
        estimate(config, {"bf16": True}, 32, "h100_80gb", dtype="bfloat16", **{"peft_config": _lora(), **settings})


def test_full_fine_tuning_of_quantized_weights_is_refused():
    with pytest.raises(InputError, match="attach trainable adapters"):
        estimate(_config(4), {}, 32, "h100_80gb", quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "chosen", "device"),
    [
        ({"quant_method": "mxfp4", "dequantize": True}, None, "h100_80gb"),
        ({"quant_method": "mxfp4"}, {"dequantize": True}, "h100_80gb"),
        ({"quant_method": "mxfp4"}, None, "cpu"),  # no kernels: from_pretrained dequantizes
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, "a100_80gb"),
    ],
)
def test_dequantized_weights_are_those_of_the_unquantized_model(block, chosen, device):
    job = ({}, 32, device, _lora(), "bfloat16")
    dequantized = estimate(_config(4, quantization_config=block), *job, quantization_config=chosen)
    assert dequantized.phases == estimate(_config(4), *job).phases
    assert any("dequantized while they are loaded" in note for note in dequantized.notes)


@pytest.mark.slow
def test_dequantized_weights_are_whole_before_they_are_sharded():
    """transformers 5.24 makes no quantized checkpoint under zero.Init, dequantized or not: ZeRO-3 shards what is whole
    on the device, FSDP2 what is whole in every process's host memory."""
    from transformers import AutoModelForCausalLM

    from hf_memopt.levers.adapters import add_adapters

    model = add_adapters(AutoModelForCausalLM.from_config(_config(4), dtype=torch.bfloat16), _lora())
    whole = sum(weight.nbytes for weight in model.parameters())
    job = ({"bf16": True}, 32, "h100_80gb", _lora(), "bfloat16")
    found = {}
    for strategy in ("zero3", "fsdp2"):
        for block in (None, {"quant_method": "mxfp4", "dequantize": True}):
            config = _config(4, **{"quantization_config": block} if block else {})
            found[strategy, bool(block)] = estimate(config, *job, world_size=2, strategy=strategy)
    assert found["zero3", False].phases["load"] < whole <= found["zero3", True].phases["load"] < 1.1 * whole
    more = found["fsdp2", True].host_bytes - found["fsdp2", False].host_bytes
    assert more == pytest.approx(whole - found["fsdp2", False].phases["load"], rel=0.03)
    says = [next(note for note in found[strategy, True].notes if "mxfp4" in note) for strategy in ("zero3", "fsdp2")]
    assert "on every process's device before ZeRO-3 shards them" in says[0] and "host memory" in says[1]


@pytest.mark.slow
def test_the_peak_of_dequantizing_experts_is_counted():
    """gpt-oss: the largest tensor of experts, packed and unpacked with its indices, beside all weights."""
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    experts, rows, columns = 4, 512, 256
    blocks = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
    scales = torch.full((experts, rows, columns // 32), 127, dtype=torch.uint8)
    results = []
    peak = allocator_peak(lambda: results.append(_convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)))
    beside = peak - results[0].nbytes + blocks.nbytes + scales.nbytes
    assert beside == pytest.approx(_DEQUANTIZED_BYTES["mxfp4"] * results[0].numel(), rel=0.001)

    sizes = {"hidden_size": columns, "intermediate_size": rows // 2, "num_local_experts": experts, "vocab_size": 512}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    found = {}
    for block in ({}, {"quantization_config": {"quant_method": "mxfp4", "dequantize": True}}):
        config = GptOssConfig(**sizes, **heads, attn_implementation="eager", **block)
        found[len(block)] = estimate(config, {"bf16": True}, 8, "h100_80gb", peft_config=_lora(), dtype="bfloat16")
    assert found[1].phases["load"] - found[0].phases["load"] == pytest.approx(beside, rel=0.001)
    assert found[1].peak_allocated_bytes == max(found[1].phases.values())


@pytest.mark.slow
def test_experts_are_quantized_by_fp8_alone():
    from transformers import AutoConfig

    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}

    def estimated(method):
        block = {"quant_method": method, **CHECKPOINTS[method][0]}
        config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, vocab_size=1000, quantization_config=block)
        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return estimate(config, {"bf16": True}, 32, "h100_80gb", lora, "bfloat16")

    wide, narrow = estimated("awq"), estimated("fp8")
    assert any("experts stay in 16 bits" in note for note in wide.notes)
    assert not any("experts stay in 16 bits" in note for note in narrow.notes)
    experts = 2 * 8 * 3 * 128 * 128
    assert wide.breakdown["parameters"] - narrow.breakdown["parameters"] == pytest.approx(experts, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("gptq", ["--method", "lora"], None),
        ("awq", ["--method", "qlora"], None),
        ("gptq", ["--method", "full"], "attach trainable adapters"),
        (
            "gptq",
            ["--method", "lora", "--set", "quantization.load_in_8bit=true"],
            "does not load as bitsandbytes_8bit",
        ),
        ("gptq", ["--method", "lora", "--set", "quantization.dequantize=true"], "gptq weights are not dequantized"),
        ("fp8", ["--set", "quantization.dequantize=true"], None),
    ],
)
def test_a_quantized_checkpoint_on_the_command_line(method, options, message, tmp_path, command):
    _wide(quantization_config={"quant_method": method, **CHECKPOINTS[method][0]}).save_pretrained(tmp_path)
    words = ("estimate", str(tmp_path), "--preset", "rtx_4090", "--seq-len", "32", "--json", *options)
    code, out, err = command(*words)
    if message is None:
        assert json.loads(out)["peak_allocated_bytes"] > 0
    else:
        assert code == 2 and message in err


def test_a_checkpoint_that_ignores_no_layer():
    settings = {name: value for name, value in CHECKPOINTS["compressed-tensors"][0].items() if name != "ignore"}
    config = _wide(quantization_config={"quant_method": "compressed-tensors", **settings})
    assert estimate(config, {}, 32, "rtx_4090", LoraConfig(target_modules=["q_proj"])).fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "lora", "--set", "quantization.load_in_8bit=true"], None),
        (["--method", "qlora", "--set", "quantization.load_in_8bit=true"], None),
        (["--set", "quantization.load_in_8bit=true"], "method=qlora only"),
        (["--method", "lora", "--set", "quantization.bnb_4bit_quant_type=fp4"], "method=qlora only"),
        (["--method", "lora", "--set", "quantization.dequantize=true"], "the checkpoint is not quantized"),
    ],
)
def test_what_the_command_line_takes(options, message, tmp_path, command):
    _config(4).save_pretrained(tmp_path)
    code, out, err = command("estimate", str(tmp_path), "--preset", "rtx_4090", "--seq-len", "32", "--json", *options)
    if message is None:
        assert json.loads(out)["peak_allocated_bytes"] > 0
    else:
        assert code == 2 and message in err


# What config.json holds of checkpoints whose packages are not installed here, and bytes for each weight.
CHECKPOINTS = {
    "gptq": ({"bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
    "awq": ({"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, 0.5 + 2.5 / 128),
    "fp8": ({"weight_block_size": [128, 128]}, 1),
    "bitnet": ({"linear_class": "autobitlinear", "quantization_mode": "online"}, 2),
    "compressed-tensors": (
        {
            **{"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]},
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
        },
        2 + 2 / 128,
    ),
}


def _wide(**more):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    more = {"num_hidden_layers": 4, **more}
    return AutoConfig.for_model("llama", **sizes, vocab_size=1000, max_position_embeddings=2048, **more)


@pytest.mark.slow
@pytest.mark.parametrize("method", CHECKPOINTS)
def test_a_checkpoints_own_quantization(method):
    """Its weights take the bytes that the method keeps; norms, embeddings and adapters are as they were."""
    block, size = CHECKPOINTS[method]
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    job = ({"bf16": True, "per_device_train_batch_size": 1}, 64, "h100_80gb", lora, "bfloat16")
    plain = estimate(_wide(), *job).breakdown["parameters"]
    quantized = estimate(_wide(quantization_config={"quant_method": method, **block}), *job)
    weights = 4 * (4 * 512 * 512 + 3 * 512 * 1024)
    assert plain - quantized.breakdown["parameters"] == pytest.approx((2 - size) * weights, abs=0.01 * 2 * weights)
    if method != "bitnet":
        with pytest.raises(InputError, match="attach trainable adapters"):
            estimate(_wide(quantization_config={"quant_method": method, **block}), {}, 64, "h100_80gb")


def test_quantizing_fake_weights_leaves_the_processs_code_table_real(monkeypatch):
    """bitsandbytes quantizes later models of the process with it; a trace keeps it only if it is imported before."""
    from bitsandbytes import functional
    from torch._subclasses.fake_tensor import FakeTensor

    from hf_memopt.estimator.tracing.fake_tensors import FakeMode
    from hf_memopt.estimator.tracing.model import ModelSettings, make_model
    from hf_memopt.estimator.tracing.tasks import infer_task

    monkeypatch.setattr(functional, "name2qmap", {})
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    with FakeMode():
        model = make_model(ModelSettings(config=_config(), task=infer_task(_config()), quantization_config=four_bits))
    assert isinstance(next(model.parameters()), FakeTensor)
    assert not any(isinstance(table, FakeTensor) for table in functional.name2qmap.values())


ADAPTED = {"peft_config": LoraConfig(r=8, target_modules=["q_proj", "v_proj"]), "dtype": "bfloat16"}
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype="bfloat16",
    bnb_4bit_quant_storage="bfloat16",
)


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", ["none", "fsdp2", "fsdp2_offload_cpu"])
@pytest.mark.parametrize(
    ("how", "more", "within"),
    # Of checkpointed layers the replay lacks one's weights that are gathered ahead.
    [({}, {}, 0.01), ({}, CHECKPOINTED, 0.2), ({**ADAPTED, "quantization_config": NF4}, {}, 0.01)],
    ids=["full", "checkpointed", "nf4"],
)
def test_the_replay_of_all_layers_has_the_peak_that_two_depths_extend_to(how, more, within, strategy, monkeypatch):
    """Scales of 4-bit weights belong to a layer; what moves to the host leaves the device."""
    compared = []
    monkeypatch.setattr(assembly, "check_depth", lambda extended, replayed, _: compared.append((extended, replayed)))
    fields = {"per_device_train_batch_size": 2, "bf16": True, **more}
    processes = 1 if strategy == "none" else 8
    config = LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_hidden_layers=40
    )
    estimate(config, fields, LENGTH, "a100_80gb", world_size=processes, strategy=strategy, **how)
    extended, replayed = compared[0]
    assert extended == pytest.approx(replayed, rel=within)


def test_what_is_quantized_or_dequantized_is_loaded_whole():
    settings = ({}, {"quantization_config": {}}, {"dequantized": "fp8"}, {"peft_config": _lora()})
    assert [ModelSettings(config=None, task="causal-lm", **one).loaded_whole for one in settings] == [
        *(False, True, True, False)
    ]


def test_weights_of_a_methods_own_modules_are_trained_in_bitnet_alone(subtests):
    for method, trained in [("bitnet", True), ("fp8", False)]:
        with subtests.test(method=method):
            quantization = AutoQuantizationConfig.from_dict({"quant_method": method, **CHECKPOINTS[method][0]})
            with torch.device("meta"):
                model = LlamaForCausalLM(_config(1, vocabulary=40000))
            frozen = model.model.norm.weight.requires_grad_(False)
            quantize(model, quantization, pre_quantized=True)
            weights = dict(model.named_parameters())
            assert not any(weight.is_meta for weight in weights.values()) and frozen is not model.model.norm.weight
            assert not model.model.norm.weight.requires_grad
            assert weights["model.layers.0.self_attn.q_proj.weight"].requires_grad is trained
            assert weights["model.embed_tokens.weight"].requires_grad is trained


def test_notes_on_what_is_counted_of_quantized_weights():
    """A sentence for each method and place where its memory follows from a source alone."""
    engines = {"none": NO_ENGINE} | {name: engine_named(name) for name in ("zero2", "zero3", "fsdp2")}
    methods = (None, *SCHEMES, "fp8", "mxfp8", "compressed-tensors", "load_in_4bit", "load_in_8bit")
    found = {}
    for method, engine, device in itertools.product(methods, engines, ("h100_80gb", "cpu")):
        for dequantized, targets in (("", "all-linear"), ("", ["q_proj"]), ("fp8", None), ("mxfp4", None)):
            job = SimpleNamespace(
                quantization_config=method and {method: True, "quant_method": method},
                device=get_hardware(device),
                engine=engines[engine],
                dequantized=dequantized,
                peft_config=SimpleNamespace(target_modules=targets),
            )
            if notes := [note[:60] for note in quantization_notes(job)]:
                found[f"{method} {engine} {device} {dequantized} {targets}"] = notes
    frozen.check("quantization_notes", found)


def _made(config, quantization=None, **settings) -> dict:
    """The tensors that a model is loaded with, and what loading needs beside them."""
    config, quantization, dequantized = resolve_quantization(config, quantization, get_hardware("h100_80gb"))
    own = {"task": "causal-lm", "dtype": "bfloat16", "quantization_config": quantization, **settings}
    with fake_world("cuda"):
        model = make_model(ModelSettings(config=config, **own))
        tensors = list(loaded_tensors(model))
        kinds = Counter(f"{list(one.shape)} {one.dtype} {one.requires_grad}" for one in tensors)
        return {
            "tensors": dict(kinds),
            "staged": [staged_bytes(model), staged_bytes(model, "mxfp4"), staged_bytes(model, "fp8")],
            "said": [
                dequantized,
                *(getattr(model, name, None) for name in ("is_loaded_in_4bit", "is_loaded_in_8bit")),
            ],
        }


def test_tensors_of_quantized_models():
    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float16}
    groups = CHECKPOINTS["compressed-tensors"][0]["config_groups"]["group_0"]
    asymmetric = groups | {"weights": groups["weights"] | {"symmetric": False, "group_size": None}}
    ignored = {"ignore": ["lm_head", r"re:.*q_proj"], "config_groups": {"a": {"weights": None}, "b": asymmetric}}
    checkpoints = {
        **{method: block for method, (block, _) in CHECKPOINTS.items()},
        "gptq whole": {"bits": 3, "group_size": -1},
        "awq skipped": {**CHECKPOINTS["awq"][0], "modules_to_not_convert": ["v_proj"]},
        "compressed-tensors ignored": CHECKPOINTS["compressed-tensors"][0] | ignored,
    }
    lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")}
    every = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
    found = {}
    for name, block in checkpoints.items():
        quantized = _wide(quantization_config={"quant_method": name.split()[0], **block}, num_hidden_layers=1)
        found[name] = _made(quantized)
        if name in ("gptq", "awq"):
            found[f"{name}, adapters"] = _made(quantized, **(every if name == "gptq" else lora))["tensors"]
    small = _wide(num_hidden_layers=1)
    for name, config, quantization, settings in (
        ("16 bits", small, None, {}),
        ("4 bits", small, BitsAndBytesConfig(**four), {}),
        ("4 bits twice", small, BitsAndBytesConfig(**four, bnb_4bit_use_double_quant=True), lora),
        ("4 bits, stored wide", small, BitsAndBytesConfig(**four, bnb_4bit_quant_storage=torch.bfloat16), lora),
        ("4 bits, prepared", small, BitsAndBytesConfig(**four), {**lora, "kbit_preparation": True}),
        ("8 bits", small, BitsAndBytesConfig(load_in_8bit=True), {**lora, "autocast_adapter_dtype": False}),
        ("8 bits, trained", small, BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True), {}),
        ("transposed", AutoConfig.for_model("gpt2", n_layer=1, n_embd=64, n_head=4), BitsAndBytesConfig(**four), {}),
        ("every layer", small, BitsAndBytesConfig(load_in_8bit=True), every),
    ):
        found[name] = _made(config, quantization, **settings)
    frozen.check("quantized_models", found)
