"""The estimator against real runs on this CPU, and against itself.

benchmarks/estimator_cpu.py has the wide comparison; here are the kinds of job whose parts could break one by one.
"""

import tempfile
from random import Random

import pytest
import torch
from conftest import slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.profiled_peak import allocator_peak
from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate, list_architectures
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.tracing import extrapolate
from hf_memopt.estimator.training_fields import read_fields
from hf_memopt.levers.arguments import MemoryArguments

CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
LENGTH = 128


def _config(layers=4, vocabulary=3000, family="llama", **more):
    from transformers import AutoConfig

    return AutoConfig.for_model(
        family,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        **more,
    )


def _lora(rank=8, **more):
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", **more)


def _truth(config, fields, peft_config=None, dtype="float32", padded=False, resumed=False) -> int:
    """The allocator's peak of a real run, or of one that resumes from a checkpoint."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    from hf_memopt.levers.adapters import add_adapters

    row = {"input_ids": [7] * LENGTH, "labels": [7] * LENGTH}
    row |= {"attention_mask": [1] * (LENGTH - 1) + [0]} if padded else {}
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}

    def train(steps=2, **more):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model = add_adapters(model, peft_config) if peft_config else model
        args = TrainingArguments(output_dir=folder, use_cpu=True, max_steps=steps, **(quiet | fields | more))
        trainer = Trainer(model=model, args=args, train_dataset=[row] * 16, data_collator=default_data_collator)
        trainer.train(resume_from_checkpoint=steps == 3)
        assert trainer.state.global_step == steps

    with tempfile.TemporaryDirectory() as folder:
        if resumed:
            train(steps=1, save_strategy="steps", save_steps=1)
        return allocator_peak(lambda: train(steps=3 if resumed else 2))


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("config", "fields", "lora", "dtype", "padded"),
    [
        (_config(), {}, None, "float32", False),
        slow(_config(9), {"bf16": True}, None, "float32", False),
        (_config(9), {**CHECKPOINTED, "bf16": True}, None, "bfloat16", False),
        (_config(9), {**CHECKPOINTED, "bf16": True}, _lora(), "bfloat16", False),
        slow(_config(9), {"bf16": True}, _lora(use_dora=True), "bfloat16", False),
        (_config(4), {"optim": "adamw_8bit", "gradient_accumulation_steps": 4}, None, "float32", False),
        slow(_config(4), {"optim": "adafactor"}, None, "float32", False),
        (_config(4), {}, None, "float32", True),
        (_config(4, family="phi3", pad_token_id=0), {}, None, "float32", False),
        (_config(9, family="gemma3_text", head_dim=16, sliding_window=32), {}, None, "float32", False),
        (_config(4, family="mixtral", num_local_experts=4), {}, None, "float32", False),
        # Of 16-bit log-probabilities, whose sums in 32 bits cast a copy.
        (_config(2, 20000), {"label_smoothing_factor": 0.1}, _lora(), "bfloat16", False),
    ],
)
def test_within_one_percent_of_a_real_run(config, fields, lora, dtype, padded):
    fields = {"per_device_train_batch_size": 2, **fields}
    found = estimate(config, fields, LENGTH, "cpu", lora, dtype, padded=padded)
    measured = _truth(config, fields, lora, dtype, padded)
    assert found.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    assert sum(found.breakdown.values()) == found.peak_allocated_bytes
    assert found.phases[found.phase] == found.peak_allocated_bytes


def test_what_set_evaluate_leaves_can_be_estimated(tmp_path):
    from transformers import TrainingArguments

    args = TrainingArguments(tmp_path, per_device_train_batch_size=2, use_cpu=True)
    wanted = estimate(_config(2), args, LENGTH, "cpu")
    args = args.set_evaluate("no")
    assert args.eval_delay is None
    fields = read_fields(args)
    assert estimate(_config(2), fields, LENGTH, "cpu").peak_allocated_bytes == wanted.peak_allocated_bytes


def test_going_on_from_a_checkpoint_takes_no_more():
    found = estimate(_config(4), {"per_device_train_batch_size": 2}, LENGTH, "cpu")
    measured = _truth(_config(4), {"per_device_train_batch_size": 2}, resumed=True)
    assert found.peak_allocated_bytes == pytest.approx(measured, rel=0.01)


def _every(count: int) -> dict:
    return {**CHECKPOINTED, "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": count}}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "fields", [{}, slow({**CHECKPOINTED, "bf16": True}), slow(_every(2)), _every(3), slow({"optim": "adamw_torch"})]
)
@pytest.mark.parametrize("lora", [None, slow(_lora())])
def test_extending_two_shallow_traces_equals_tracing_all_layers(fields, lora, monkeypatch):
    extended = estimate(_config(14), fields, LENGTH, "rtx_4090", lora)
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert estimate(_config(14), fields, LENGTH, "rtx_4090", lora).breakdown == extended.breakdown


def _memory_job(number: int):
    """A random job with features of memory: fields, features, adapters, strategy."""
    drawn = Random(number)
    fields = {"bf16": drawn.random() < 0.7, "gradient_accumulation_steps": drawn.choice([1, 2]), "max_grad_norm": 0.0}
    how = drawn.choice([None, {}, {}, {"every_n_layers": 2}, {"every_n_layers": 3}, {"offload": True}])
    if how is not None:
        fields |= {**CHECKPOINTED, "activation_checkpointing_kwargs": {"use_reentrant": False, **how}}
    features = {
        **{"activation_offload": True, "activation_compression": "int8", "checkpoint_ratio": 0.5},
        **{"checkpoint_keeps": "attention", "mlp_tile_size": 512, "weight_streaming": True},
        **{"optimizer_cpu_offload": True, "optimizer_in_backward": True, "adam_mini": True},
    }
    chosen = drawn.sample(list(features), drawn.choice([1, 2]))
    lora = _lora() if "weight_streaming" in chosen or drawn.random() < 0.4 else None
    strategy = drawn.choice([None, None, "ddp", "fsdp2", "zero2"])
    return fields, MemoryArguments(**{name: features[name] for name in chosen}), lora, strategy


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
def test_jobs_with_features_of_memory_extend_too(number, monkeypatch):
    """Most fetch ahead, of which a model of few layers has not enough."""
    fields, memory_args, lora, strategy = _memory_job(number)

    def found():
        job = {"memory_args": memory_args, "strategy": strategy, "world_size": 4 if strategy else 1}
        fields["per_device_train_batch_size"] = 1
        return estimate(_config(18), fields, 2048, "rtx_4090", lora, **job)

    try:
        extended = found()
    except InputError:  # what does not go together is refused (test_levers_together.py)
        return
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    whole = found()
    assert extended.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=0.002)
    assert extended.host_bytes == pytest.approx(whole.host_bytes, rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("dense", [1, slow(3)])
def test_layers_of_another_kind_come_first(dense, monkeypatch):
    """The layer above them runs one of them again in its backward pass, where the last one runs its own kind."""
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    config = _config(11, family="glm4_moe", head_dim=16, first_k_dense_replace=dense, **experts)
    extended = estimate(config, CHECKPOINTED, LENGTH, "rtx_4090", _lora())
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert estimate(config, CHECKPOINTED, LENGTH, "rtx_4090", _lora()).breakdown == extended.breakdown


def test_weights_of_unlike_layers_are_counted():
    """The first layers may be dense, or hold none of the modules that adapters are put on."""
    from hf_memopt.cli.estimate import settle_job
    from hf_memopt.estimator.spec_job import spec_job
    from hf_memopt.job.spec import JobSpec

    experts = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    dense_first = _config(12, family="glm4_moe", head_dim=16, first_k_dense_replace=3, **experts)
    few_attend = _config(12, family="lfm2", full_attn_idxs=[2, 5, 8, 11])
    adapters = {"target_modules": r".*self_attn\.q_proj"}
    for config, method in ((dense_first, "full"), (few_attend, "lora")):
        lora = adapters if method == "lora" else {}
        spec = JobSpec(model=config, hardware="rtx_4090", method=method, seq_len=LENGTH, lora=lora)
        job = spec_job(settle_job(spec))
        outside, layer = job.elements(trained=True)
        assert outside + 12 * layer == sum(job.trained_sizes())


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "length"), [(1, 4096), (4, 1024)])
def test_no_line_goes_through_the_peaks_of_two_moments(micro, length, monkeypatch):
    """The shallower model's backward has its peak in the loss, the deeper one's where all gradients exist before the
    first step: their difference, times the missing layers, made 103.88 GiB of gradients of a model that has 14.96."""

    def found(layers):
        config = load_config("llama-3.1-8b")
        config.num_hidden_layers = layers
        fields = {"optim": "paged_adamw_8bit", "bf16": True, "per_device_train_batch_size": micro, **CHECKPOINTED}
        levers = MemoryArguments(loss_chunk_size=1024)
        return estimate(config, fields, length, "a100_80gb", dtype="bfloat16", memory_args=levers)

    full = found(32)
    assert full.breakdown["gradients"] <= full.breakdown["parameters"]
    extended = found(8)
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert found(8).breakdown == extended.breakdown


@pytest.mark.slow
def test_a_repeating_pattern_of_layers_is_extended_by_whole_periods(monkeypatch):
    config = _config(20, family="gemma3_text", head_dim=16, sliding_window=32)
    assert extrapolate.shallow_depths(config) == (8, 14), "two shallow models, whole periods from the deep one"
    extended = estimate(config, {}, LENGTH, "cpu")
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert extrapolate.shallow_depths(config) == (20,)
    assert estimate(config, {}, LENGTH, "cpu").peak_allocated_bytes == extended.peak_allocated_bytes


def test_the_breakdown_names_what_is_known():
    """4 bytes a weight for the weights and as much for the gradients, twice that for AdamW's two states."""
    from transformers import AutoModelForCausalLM

    config = _config()
    weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    breakdown = estimate(config, {"per_device_train_batch_size": 2}, LENGTH, "cpu").breakdown
    assert breakdown["parameters"] == pytest.approx(4 * weights, rel=0.001)
    assert breakdown["optimizer_states"] == pytest.approx(8 * weights, rel=0.001)
    assert breakdown["logits"] >= 2 * LENGTH * config.vocab_size * 4


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(16, 256), micro=st.integers(1, 4), rank=st.integers(2, 32))
def test_more_never_costs_less(length, micro, rank):
    def peak(length, micro, rank, **fields):
        fields |= {"per_device_train_batch_size": micro}
        return estimate(_config(3), fields, length, "a100_80gb", _lora(rank)).peak_allocated_bytes

    base = peak(length, micro, rank)
    found = estimate(_config(3), {"per_device_train_batch_size": micro}, length, "a100_80gb", _lora(rank))
    assert sum(found.breakdown.values()) == found.peak_allocated_bytes == base
    assert peak(2 * length, micro, rank) >= base
    assert peak(length, micro + 1, rank) >= base
    assert peak(length, micro, 2 * rank) >= base
    assert peak(length, micro, rank, **CHECKPOINTED) <= base


def test_a_configuration_of_something_else_is_refused():
    from transformers import PretrainedConfig

    with pytest.raises(InputError, match="has no head that a Trainer could train"):
        estimate(PretrainedConfig(), {}, 32, "cpu")
    with pytest.raises(InputError, match=r"cannot be built: .*attn_implementation"):
        estimate(_config(2), {}, 32, "cpu", attn_implementation="no_such")


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("model", "weights"),
    [
        *(("llama-3.1-8b", 8_030_261_248), ("llama-3.1-405b", 405_853_388_800), ("qwen3-235b-a22b", 235_093_634_560)),
        *(("mixtral-8x7b", 46_702_792_704), ("qwen2.5-vl-7b", 8_292_166_656), ("qwen2.5-vl-32b", 33_452_718_336)),
        *(("qwen3-vl-2b", 2_127_532_032), ("qwen3-vl-8b", 8_767_123_696), ("qwen3-vl-30b-a3b", 31_070_754_032)),
        *(("smolvlm2-500m", 507_482_304), ("gemma-3-27b", 27_432_406_640), ("t5-3b", 2_851_598_336)),
        *(("bert-base", 109_514_298), ("whisper-large-v3", 1_543_490_560), ("whisper-large-v3-turbo", 808_878_080)),
        *(("whisper-small", 241_734_912), ("modernbert-large", 395_881_664), ("roberta-large", 355_412_057)),
        *(("xlm-roberta-base", 278_295_186), ("distilbert-base", 66_985_530), ("bge-reranker-v2-m3", 567_755_777)),
        *(("qwen3-embedding-4b", 4_021_774_336), ("vit-large-patch16-224", 304_326_632), ("bart-large", 406_291_456)),
        *(("Qwen/Qwen3-8B", 8_190_735_360), ("openai/gpt-oss-20b", 20_914_757_184)),
        ("deepseek-v3", 671_026_404_352),  # the 671,026,419,200 published include the router's bias, a buffer here
        ("mistral-large-2407", 122_610_069_504),
    ],
)
def test_bundled_architectures_have_the_published_number_of_weights(model, weights):
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.tracing.model import ModelSettings, make_model
    from hf_memopt.estimator.tracing.tasks import infer_task

    config = load_config(model)
    with torch.device("meta"):
        made = make_model(ModelSettings(config=config, task=infer_task(config), dtype="bfloat16"))
    assert sum(weight.numel() for weight in made.parameters()) == weights


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("qwen3-0.7b", "'qwen3-0.6b'"),
        ("Qwen/Qwen3-0.7B", "'qwen3-0.6b'"),  # a hub id that is not cached
        ("gpt-oss-30b", "'gpt-oss-20b'"),
        ("xyz", "a hub id, a folder, a config.json"),
    ],
)
def test_an_unknown_model_gets_the_nearest_names_in_a_short_line(asked, named):
    from hf_memopt.estimator.architectures import load_config

    with pytest.raises(InputError) as error:
        load_config(asked)
    message = str(error.value)
    assert named in message and len(message) < 400
    assert sum(name in message for name in list_architectures()) <= 6  # a name can begin another


def test_every_bundled_architecture_can_be_read():
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.tracing.extrapolate import count_layers, shallow_depths

    assert len(list_architectures()) > 50
    for name in list_architectures():
        config = load_config(name)
        assert shallow_depths(config)[-1] <= count_layers(config)
        assert config.source.startswith("https://huggingface.co/")


@pytest.mark.slow
def test_every_bundled_model_that_is_no_decoder_is_estimated():
    """For the task of its checkpoint: speech, masked words, classes of texts and images, texts from texts."""
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.tracing.tasks import infer_task

    tasks = {name: infer_task(load_config(name)) for name in list_architectures()}
    others = [name for name, task in tasks.items() if task not in ("causal-lm", "image-text-to-text")]
    assert len(others) > 35 and {"speech-seq2seq", "ctc", "image-classification"} < set(tasks.values())
    fields = {"bf16": True, "per_device_train_batch_size": 1}
    for name in others:
        made = estimate(load_config(name), fields, 128, "a100_80gb", dtype="float32")
        weights = made.breakdown["parameters"]
        assert made.fits and made.peak_allocated_bytes > 3 * weights > 0, name


@pytest.mark.slow
def test_4_bit_weights_are_right_to_one_percent(tmp_path):
    """Scales of scales, skipped head, unpacking in forward and backward. Loading is left out of both: on a CPU the
    checkpoint, mapped into memory, would be the peak of so small a model."""
    from transformers import (
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        Trainer,
        TrainingArguments,
        default_data_collator,
    )

    from hf_memopt.estimator.tracing.fake_quantization import loaded_tensors
    from hf_memopt.levers.adapters import add_adapters

    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    fields = {"per_device_train_batch_size": 2, "bf16": True, **CHECKPOINTED}
    config = _config(9)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=packing)
    loaded = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in loaded_tensors(model)}

    def train():
        args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, max_steps=2, report_to="none", **fields)
        rows = [{"input_ids": [7] * LENGTH, "labels": [7] * LENGTH}] * 8
        Trainer(add_adapters(model, _lora()), args, train_dataset=rows, data_collator=default_data_collator).train()

    measured = allocator_peak(train) + sum(loaded.values())
    found = estimate(config, fields, LENGTH, "cpu", _lora(), "bfloat16", quantization_config=packing)
    assert found.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    whole = estimate(config, fields, LENGTH, "cpu", _lora(), "bfloat16").breakdown["parameters"]
    assert found.breakdown["parameters"] < 0.8 * whole


@pytest.mark.slow
def test_fp16_takes_what_bf16_takes():
    """Cards without bf16 compute in fp16, which the CPU's autocast cannot."""
    half = estimate(_config(4), {"fp16": True}, 32, "t4", _lora(), "float16")
    assert (
        half.peak_allocated_bytes
        == estimate(_config(4), {"bf16": True}, 32, "t4", _lora(), "bfloat16").peak_allocated_bytes
    )


@pytest.mark.slow
def test_experts_that_stay_unpacked_are_told():
    from transformers import BitsAndBytesConfig

    packing = BitsAndBytesConfig(load_in_4bit=True)
    experts = _config(4, family="mixtral", num_local_experts=4)
    notes = estimate(experts, {}, 32, "cpu", _lora(), "bfloat16", quantization_config=packing).notes
    assert any("experts stay in 16 bits" in note for note in notes)
    notes = estimate(_config(4), {}, 32, "cpu", _lora(), "bfloat16", quantization_config=packing).notes
    assert not any("experts" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked-lm", "sequence-classification", "seq2seq-lm"])
def test_other_heads_than_causal_ones(task, tmp_path):
    import transformers
    from transformers import AutoConfig, Trainer, TrainingArguments, default_data_collator

    from hf_memopt.estimator.tracing.tasks import TASKS

    if task == "seq2seq-lm":
        config = AutoConfig.for_model(
            "t5",
            d_model=64,
            d_ff=176,
            num_layers=9,
            num_decoder_layers=9,
            num_heads=4,
            d_kv=16,
            vocab_size=3000,
            decoder_start_token_id=0,
        )
    else:
        config = AutoConfig.for_model(
            "bert", hidden_size=64, intermediate_size=176, num_attention_heads=4, num_hidden_layers=9, vocab_size=3000
        )
    labels = 1 if task == "sequence-classification" else [7] * LENGTH
    fields = {"per_device_train_batch_size": 2}

    def train():
        model = getattr(transformers, TASKS[task].auto_class).from_config(config)
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, max_steps=2, report_to="none", save_strategy="no", **fields
        )
        rows = [{"input_ids": [7] * LENGTH, "labels": labels}] * 8
        Trainer(model, args, train_dataset=rows, data_collator=default_data_collator).train()

    found = estimate(config, fields, LENGTH, "cpu", task=task)
    assert found.peak_allocated_bytes == pytest.approx(allocator_peak(train), rel=0.02)


@pytest.mark.slow
def test_evaluation_can_be_the_peak():
    fields = {"per_device_train_batch_size": 1, **CHECKPOINTED}
    trained = estimate(_config(4), fields, LENGTH, "cpu")
    evaluated = estimate(
        _config(4), {**fields, "eval_strategy": "steps", "per_device_eval_batch_size": 32}, LENGTH, "cpu"
    )
    assert trained.phases["eval"] == 0 and evaluated.phase == "eval"
    assert evaluated.phases["backward"] == trained.phases["backward"]


@pytest.mark.slow
def test_cuda_autocast_keeps_norms_and_powers_in_fp32():
    """GPT-2's activation takes a power, which CUDA's autocast computes in fp32 and the CPU's does not."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=4, n_head=4, vocab_size=500, n_positions=1024)
    config.attn_pdrop = 0.0
    fields = {"bf16": True, "per_device_train_batch_size": 8}
    on_card = estimate(config, fields, 512, "a100_80gb").breakdown["activations"]
    on_cpu = estimate(config, fields, 512, "cpu").breakdown["activations"]
    assert on_card > 1.2 * on_cpu


def test_nothing_of_the_fake_world_stays():
    from transformers.utils import import_utils

    before = (torch.nn.Module.to, import_utils.is_fake_tensor)
    estimate(_config(2), {"optim": "adamw_torch"}, 32, "rtx_4090")
    with pytest.raises(InputError):
        estimate(_config(2), {"optim": "no_such"}, 32, "rtx_4090")
    assert before == (torch.nn.Module.to, import_utils.is_fake_tensor)
    assert type(torch.ones(1) + 1) is torch.Tensor
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    assert optimizer.param_groups[0]["foreach"] is None
    with torch.autocast("cpu", dtype=torch.bfloat16):  # the CPU's own
        assert torch.ones(2, dtype=torch.bfloat16).exp().dtype is torch.bfloat16


def test_a_real_trainer_is_not_disturbed(tmp_path):
    """accelerate's state and every random generator are as before, so that an estimate may come before training."""
    import random

    import numpy
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True, gradient_accumulation_steps=4)
    trainer = Trainer(AutoModelForCausalLM.from_config(_config(2)), args)

    def state():
        shared = [dict(kind._shared_state) for kind in (PartialState, AcceleratorState, GradientState)]
        generators = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())
        return shared, generators

    before = state()
    estimate(_config(2), {"gradient_accumulation_steps": 2}, 32, "cpu")
    assert state() == before
    assert trainer.accelerator.mixed_precision == "bf16"
    assert trainer.accelerator.gradient_accumulation_steps == before[0][2]["plugin_kwargs"]["num_steps"]


@pytest.mark.slow
def test_an_estimate_does_not_depend_on_earlier_ones():
    """bitsandbytes keeps process-wide state, and garbage is collected at another moment in another process."""
    import gc

    from transformers import BitsAndBytesConfig

    from hf_memopt.presets import get_preset

    def quantized():
        adapters = get_preset("rtx_3070", method="qlora").peft_config()
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
        fields = {"per_device_train_batch_size": 1, "optim": "paged_adamw_8bit"}
        return estimate(_config(9), fields, 32, "rtx_3070", adapters, "bfloat16", quantization_config=quantization)

    first, thresholds = quantized(), gc.get_threshold()
    estimate(_config(9), {"optim": "adamw_8bit"}, 32, "rtx_3070")  # the Trainer registers embeddings for 32-bit states
    gc.set_threshold(200)
    try:
        assert quantized().to_dict() == first.to_dict()
    finally:
        gc.set_threshold(*thresholds)
