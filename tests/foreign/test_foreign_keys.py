"""Keys of other tools, one by one: the job that each describes, or the sentence that refuses it."""

import json

import pytest

from hf_memopt.foreign.key_table import _setting, read_table
from hf_memopt.foreign.translate import translate

MODEL = {
    "axolotl": {"base_model": "m"},
    "llama_factory": {"model_name_or_path": "m", "do_train": True},
    "ms_swift": {"model": "m"},
    "torchtune": {
        "model._component_": "torchtune.models.llama3_2.llama3_2_1b",
        "optimizer._component_": "torch.optim.AdamW",
    },
    "trl": {"model_name_or_path": "m"},
}
KWARGS, REENTRANT = "gradient_checkpointing_kwargs", {"use_reentrant": True}
LIGER = {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}
OFF = dict.fromkeys(("rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu", "geglu"), False)
LINEAR = "torchtune.modules.loss.LinearCrossEntropyLoss"


def _translated(tool, settings, folder):
    return translate(read_table(tool), {**MODEL[tool], **settings}, folder)


def _read(tool, settings, folder, **options):
    """The job, its fields dotted."""
    translation = _translated(tool, settings, folder)
    translation.check()
    spec = translation.spec(**options)
    fields = {name: getattr(spec, name) for name in ("method", "dtype", "seq_len", "task", "packed")}
    for group in ("training", "lora", "quantization"):
        fields |= {f"{group}.{name}": value for name, value in getattr(spec, group).items()}
    fields |= {f"memory.{name}": getattr(spec.memory_args, name) for name in spec.named}
    return fields


@pytest.mark.parametrize(
    ("batch", "devices", "accumulation"), [(1, None, 16), (1, 4, 4), (4, 4, 1), (3, 1, 6), (8, 8, 1)]
)
def test_ms_swift_accumulates_to_16_samples_over_all_devices(batch, devices, accumulation, tmp_path):
    settings = {"per_device_train_batch_size": batch, "max_length": 64}
    fields = _read("ms_swift", settings, tmp_path, devices=devices)
    assert fields["training.gradient_accumulation_steps"] == accumulation
    fields = _read("ms_swift", settings | {"nproc_per_node": devices or 1}, tmp_path)
    assert fields["training.gradient_accumulation_steps"] == accumulation


@pytest.mark.slow
def test_the_devices_of_the_command_line_count(command):
    words = "swift sft --model Qwen/Qwen2.5-0.5B --max_length 64"
    _, output, _ = command("estimate", words, "--hardware", "rtx_4090", "--world-size", "4", "--json")
    assert "1 × 4 × 4" in json.loads(output)["estimated"]


def test_a_key_is_read_as_its_tool_reads_it(tmp_path, subtests):
    for tool, settings, expected in [
        ("trl", {"trainer": "grpo", "use_vllm": True, "vllm_device": "auto"}, {"training.vllm_mode": "server"}),
        ("ms_swift", {}, {"training.bf16": True, "dtype": "bfloat16"}),
        ("ms_swift", {"torch_dtype": "float16"}, {"training.bf16": False, "training.fp16": True, "dtype": "float16"}),
        ("ms_swift", {"torch_dtype": "float32"}, {"training.bf16": False, "training.fp16": True, "dtype": "float32"}),
        (
            "ms_swift",
            {"torch_dtype": "float32", "bf16": True, "fp16": False},
            {"training.bf16": True, "training.fp16": False},
        ),
        (
            "ms_swift",
            {"fsdp": "fsdp2", "gradient_checkpointing": False},
            {
                "training.fsdp_config": {
                    "version": 2,
                    "reshard_after_forward": True,
                    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                    "activation_checkpointing": True,
                },
                "training.activation_checkpointing": None,
            },
        ),
        ("ms_swift", {"bnb_4bit_quant_type": "nf4"}, {"method": "lora"}),
        ("llama_factory", {"stage": "pt"}, {"packed": True}),
        ("llama_factory", {"stage": "pt", "packing": False}, {"packed": False}),
        ("llama_factory", {"packing": True, "neat_packing": False}, {"packed": True}),
        (
            "llama_factory",
            {"quantization_bit": 4, "double_quantization": None},
            {"quantization.bnb_4bit_use_double_quant": False},
        ),
        *(
            (tool, {packing: True, degree: devices}, {"packed": devices == 1})
            for tool, packing, degree in (
                ("axolotl", "sample_packing", "context_parallel_size"),
                ("axolotl", "sample_packing", "sequence_parallel_degree"),
                ("ms_swift", "packing", "sequence_parallel_size"),
            )
            for devices in (1, 2, 3, 128)
        ),
        ("trl", {"load_in_8bit": True, "use_peft": True}, {"quantization.load_in_8bit": True}),
        ("trl", {"gradient_checkpointing": None}, {"training.activation_checkpointing": False}),
        ("trl", {"torch_dtype": None}, {"dtype": "auto"}),
        ("trl", {"bnb_4bit_quant_type": "nf4"}, {"method": "full"}),
        *(
            ("trl", {f"{name}_kwargs": REENTRANT}, {"training.activation_checkpointing_kwargs": REENTRANT})
            for name in ("gradient_checkpointing", "activation_checkpointing")
        ),
        (
            "trl",
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
            {"training.activation_checkpointing_kwargs": {"use_reentrant": True}},
        ),
        (
            "trl",
            {"fsdp": "full_shard", "fsdp_config": {"fsdp_reshard_after_forward": False}},
            {"training.fsdp_config": {"reshard_after_forward": False}},
        ),
        (
            "trl",
            {"fsdp": "full_shard", "fsdp_config": "fsdp.json"},
            {"training.fsdp_config": {"version": 2, "cpu_offload": True}},
        ),
        ("llama_factory", {"fsdp_config": {"fsdp_version": 2}}, {"training.fsdp_config": {"version": 2}}),
        ("axolotl", {"bf16": None}, {"dtype": "float32"}),
        (
            "axolotl",
            {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], "cut_cross_entropy": None},
            {"memory.loss_chunk_size": None},
        ),
        *(
            (
                "axolotl",
                {**LIGER, f"liger_{theirs}": True},
                {"training.use_liger_kernel": True, "training.liger_kernel_config": OFF | dict.fromkeys(ours, True)},
            )
            for theirs, ours in {
                "rope": ["rope"],
                "rms_norm": ["rms_norm"],
                "glu_activation": ["swiglu", "geglu"],
                "cross_entropy": ["cross_entropy"],
                "fused_linear_cross_entropy": ["fused_linear_cross_entropy"],
            }.items()
        ),
        ("axolotl", {"gradient_checkpointing": True}, {"training.activation_checkpointing_kwargs": REENTRANT}),
        (
            "axolotl",
            {"gradient_checkpointing": True, KWARGS: {"use_reentrant": False}},
            {"training.activation_checkpointing_kwargs": {"use_reentrant": False}},
        ),
        ("axolotl", LIGER, {"training.use_liger_kernel": None}),
        ("axolotl", {"liger_rope": True}, {"training.use_liger_kernel": None, "training.liger_kernel_config": None}),
        ("axolotl", {"torch_compile": "auto"}, {"training.torch_compile": True}),
        (
            "axolotl",
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": '{"use_reentrant": true}'},
            {"training.activation_checkpointing_kwargs": {"use_reentrant": True}},
        ),
        (
            "axolotl",
            {"fsdp_version": 2, "fsdp_config": {"offload_params": True}},
            {"training.fsdp": "full_shard auto_wrap", "training.fsdp_config": {"version": 2, "cpu_offload": True}},
        ),
        (
            "axolotl",
            {"fsdp_config": {"state_dict_type": "x"}},
            {"training.fsdp_config": {"version": 1, "state_dict_type": "x"}},
        ),
        ("axolotl", {"fsdp_config": {"fsdp_version": 2}}, {"training.fsdp_config": {"version": 2}}),
        ("axolotl", {"fsdp": ["full_shard"]}, {"training.fsdp_config": {"version": 1}, "training.fsdp": "full_shard"}),
        ("axolotl", {"fsdp": ["full_shard"], "fsdp_version": 2}, {"training.fsdp_config": {"version": 2}}),
        ("axolotl", {"fsdp_version": 2}, {"training.fsdp_config": None, "training.fsdp": None}),
        ("axolotl", {"tiled_mlp": True, "sequence_len": 65536}, {"memory.mlp_tile_size": 32768}),
        ("axolotl", {"tiled_mlp": True, "sequence_len": 4096}, {"memory.mlp_tile_size": None}),
        (
            "axolotl",
            {"tiled_mlp": True, "tiled_mlp_num_shards": 8, "sequence_len": 4096, "micro_batch_size": 2},
            {"memory.mlp_tile_size": 1024},
        ),
        ("axolotl", {"tiled_mlp_num_shards": 8}, {"memory.mlp_tile_size": None}),
        ("axolotl", {"model_type": "AutoModelForSequenceClassification", "reward_model": True}, {"task": "reward"}),
        ("torchtune", {"loss._component_": LINEAR}, {"memory.loss_chunk_size": 8}),
        ("torchtune", {"loss._component_": LINEAR, "loss.num_output_chunks": 2}, {"memory.loss_chunk_size": 32}),
        ("torchtune", {"loss._component_": LINEAR, "loss.num_output_chunks": 1}, {"memory.loss_chunk_size": None}),
        ("torchtune", {"dtype": None}, {"dtype": "float32"}),
        (
            "torchtune",
            {"model._component_": "torchtune.models.llama3_2.lora_llama3_2_1b"},
            {"lora.r": 8, "lora.lora_alpha": 16},
        ),
    ]:
        with subtests.test(tool=tool, settings=settings, expected=expected):
            (tmp_path / "fsdp.json").write_text('{"fsdp_version": 2, "offload_params": true}')
            fields = _read(tool, settings, tmp_path, seq_len=settings.get("sequence_len", 64))
            for name, value in expected.items():
                assert (name, fields.get(name)) == (name, value)


@pytest.mark.parametrize(
    ("tool", "file", "stage"),
    [
        ("axolotl", "deepspeed_configs/zero2_torch_compile.json", 2),
        ("llama_factory", "examples/deepspeed/ds_z3_fp8_config.json", 3),
    ],
)
def test_files_that_a_tool_ships_are_known(tool, file, stage, tmp_path):
    fields = _read(tool, {"deepspeed": file}, tmp_path, seq_len=64)
    assert fields["training.deepspeed"]["zero_optimization"]["stage"] == stage


def test_a_key_that_is_not_modelled_is_named(tmp_path, subtests):
    for tool, settings, key in [
        ("trl", {"load_in_8bit": True}, "use_peft"),
        ("trl", {"fsdp": "full_shard", "fsdp_config": "missing.json"}, "fsdp_config"),
        ("trl", {"trainer": "grpo", "activation_offloading": True}, "activation_offloading"),
        ("axolotl", {"activation_offloading": True}, "activation_offloading"),
        ("axolotl", {"selective_checkpointing": True}, "selective_checkpointing"),
        ("axolotl", {"model_type": "AutoModelForSequenceClassification"}, "model_type"),
        ("axolotl", {"gradient_checkpointing": True, KWARGS: "yes"}, KWARGS),
        ("torchtune", {"model._component_": "torchtune.models.phi3.lora_phi3_mini"}, "model._component_"),
        ("torchtune", {"model._component_": "torchtune.models.phi4.qlora_phi4_14b"}, "model._component_"),
        (
            "torchtune",
            {
                "model._component_": "torchtune.models.llama4.lora_llama4_scout_17b_16e",
                "model.apply_lora_to_mlp": True,
            },
            "model._component_",
        ),
        ("llama_factory", {"deepspeed": "examples/deepspeed/ds_z2_autotp_config.json"}, "deepspeed"),
        ("llama_factory", {"deepspeed": {"tensor_parallel": {"autotp_size": 2}}}, "deepspeed"),
        ("llama_factory", {"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method"),
        ("llama_factory", {"quantization_bit": 3}, "quantization_bit"),
        ("ms_swift", {"quant_method": "hqq", "quant_bits": 4}, "quant_method"),
        ("ms_swift", {"quant_method": "bnb", "quant_bits": 2}, "quant_bits"),
        ("ms_swift", {"tuner_type": "longlora", "quant_method": "bnb", "quant_bits": 4}, "tuner_type"),
    ]:
        with subtests.test(tool=tool, settings=settings, key=key):
            translation = _translated(tool, settings, tmp_path)
            assert [remark.key for remark in translation.refused] == [key] and not translation.unknown


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--max_length null", "--max_seq_length null"])
def test_samples_that_are_not_truncated_need_a_length(words, command):
    file = f"trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name mine {words}"
    code, _, errors = command("estimate", file, "--hardware", "rtx_4090")
    assert code == 2 and "is null" in errors and "--seq-len" in errors
    assert command("estimate", file, "--hardware", "rtx_4090", "--seq-len", "64")[0] == 0
    assert command("migrate", file)[0] == 2


def test_liger_beside_another_loss_and_tiles(command, tmp_path):
    """Its switches that are off replace nothing."""
    cut = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
    content = {
        "base_model": "Qwen/Qwen2.5-0.5B",
        "sequence_len": 256,
        "plugins": [*LIGER["plugins"], cut],
        "liger_rms_norm": True,
        "tiled_mlp": True,
        "tiled_mlp_num_shards": 2,
    }
    (tmp_path / "a.yml").write_text(json.dumps(content))
    code, output, _ = command("estimate", str(tmp_path / "a.yml"), "--hardware", "rtx_4090", "--json")
    assert code == 0 and "loss in chunks of 512" in json.loads(output)["estimated"]
    (tmp_path / "a.yml").write_text(json.dumps(content | {"liger_fused_linear_cross_entropy": True}))
    code, _, errors = command("estimate", str(tmp_path / "a.yml"), "--hardware", "rtx_4090")
    assert code == 2 and "both replace the loss" in errors


def test_a_family_of_keys_is_the_first_that_is_on():
    settings = {"a": 1, "a_x": False, "a_y": 2, "a_z": 3, "b": 4}
    assert _setting("a_*", settings) == 2 and _setting("a", settings) == 1 and _setting("a_", settings) is None
    assert _setting("a*", settings) == 1 and _setting("c*", settings) is None
