"""Whatever a user sets is in the traced job, or refused with its reason: nothing is dropped without a word."""

import dataclasses
import re
import tempfile

import pytest
import yaml
from transformers import AutoConfig, TrainingArguments

from hf_memopt import MemoryArguments
from hf_memopt.cli.estimate import settle_job
from hf_memopt.cli.settings import command_spec, parse_settings
from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate, trl_job
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.estimator.tracing.process_state import process_state_kept
from hf_memopt.estimator.tracing.traced_arguments import NEUTRAL, make_arguments
from hf_memopt.estimator.trl_tasks import TRL_TASKS

MODEL = "llama-3.2-1b"
# Values of fields whose type alone does not say one that differs from the default.
VALUES = {
    **{"output_dir": "out", "per_device_train_batch_size": "2", "per_device_eval_batch_size": "2"},
    **{"gradient_accumulation_steps": "4", "max_steps": "7", "lr_scheduler_type": "cosine"},
    **{"lr_scheduler_kwargs": "{num_cycles: 2}", "optim": "adafactor", "optim_args": "rank=4"},
    **{"optim_target_modules": "all-linear", "activation_checkpointing_kwargs": "{every_n_layers: 2}"},
    **{"gradient_checkpointing_kwargs": "{use_reentrant: true}", "torch_compile_mode": "default"},
    **{"liger_kernel_config": "{rope: false}", "logging_strategy": "epoch", "save_strategy": "epoch"},
    **{"eval_strategy": "epoch", "hub_strategy": "end", "debug": "underflow_overflow", "log_level": "info"},
    **{"log_level_replica": "info", "train_sampling_strategy": "sequential"},
    **{"dataloader_multiprocessing_context": "spawn", "ddp_backend": "gloo", "deepspeed": "zero2"},
    **{"fsdp_config": "{reshard_after_forward: false}", "accelerator_config": "{split_batches: true}"},
    **{"parallelism_config": "{cp_size: 2}", "include_for_metrics": "[loss]"},
}
# Under another name: what it becomes, and fields of the traced Trainer that say so.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# Where files go, how many steps and micro-batches are traced, and what the processes of a trace talk through.
OF_THE_TRACE = ("output_dir", "max_steps", "gradient_accumulation_steps", "ddp_backend")


def resolved(*settings, **options):
    options = {"model": MODEL, "hardware": "a100_80gb", "seq_len": 64, **options}
    return spec_job(settle_job(command_spec(settings, **options)))


def text_of(field) -> str:
    """A value that is not the field's default."""
    if field.name in VALUES:
        return VALUES[field.name]
    if isinstance(field.default, bool) or "bool" in str(field.type):
        return "false" if field.default is True else "true"
    if isinstance(field.default, int | float):
        return str(field.default + 1 if isinstance(field.default, int) else (field.default / 2 or 0.5))
    return "3"


@pytest.mark.slow
def test_every_field_of_training_arguments(subtests):
    for field in [field for field in dataclasses.fields(TrainingArguments) if field.init]:
        with subtests.test(field=field):
            name = RENAMED.get(field.name, field.name)
            try:
                job = resolved(f"{field.name}={text_of(field)}")
            except InputError as refused:
                assert field.name in str(refused) or field.name in ("deepspeed", "fp16")
                continue
            if name in OF_THE_TRACE:
                continue
            with process_state_kept(), tempfile.TemporaryDirectory() as folder:
                traced = make_arguments(job.at_depth(1), folder)
            wanted = job.fields[name]
            assert wanted != field.default or name in RENAMED.values()
            if name == "fp16":  # as large, and what a CPU can trace
                assert traced.bf16
            elif name == "deepspeed":
                assert traced.deepspeed["zero_optimization"] == wanted["zero_optimization"]
            elif name not in NEUTRAL:
                found = getattr(traced, name)
                assert str(getattr(wanted, "value", wanted)) in str(getattr(found, "value", found))


# Of TRL's classes, where the type says no value that goes with the other fields.
TRL_VALUES = {
    **{"model_init_kwargs": {"dtype": "bfloat16"}, "chat_template_kwargs": {"enable_thinking": False}},
    **{"dataset_kwargs": {"skip_prepare_dataset": True}, "generation_kwargs": {"num_beams": 1}, "max_length": 32},
    **{"max_completion_length": 16, "num_generations": 4, "generation_batch_size": 8, "min_p": 0.1, "top_p": 0.9},
    **{"reward_weights": [1.0, 2.0], "loss_weights": [0.5], "truncation_mode": "keep_end"},
    **{"packing_strategy": "wrapped", "f_divergence_type": "js_divergence", "cache_implementation": "static"},
    **{"importance_sampling_level": "sequence", "multi_objective_aggregation": "normalize_then_sum"},
    **{"scale_rewards": "batch", "vllm_importance_sampling_clip_min": 0.1},
    "loss_type": {"SFTConfig": "dft", "DPOConfig": ["ipo"], "KTOConfig": "apo_zero_unpaired", "GRPOConfig": "bnpo"},
}
# What goes with a field alone.
WITH = {"sync_ref_model": {"beta": 0.1}, "log_completions_hub_repo": {"log_completions": True}}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reward", "sft", "dpo", "kto", "grpo", "rloo"])
def test_every_field_of_trls_classes(task, subtests, monkeypatch):
    """TRL's own Trainer gets it, or it is refused by its name, or of what a trace has in the place of the user's."""
    kind = TRL_TASKS[task].config_class
    own = {item.name for item in dataclasses.fields(TrainingArguments)}
    made = []
    make = trl_job._make_trainer
    monkeypatch.setattr(trl_job, "_make_trainer", lambda *args: made.append(make(*args)) or made[-1])
    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
    base = {"per_device_train_batch_size": 4}
    if TRL_TASKS[task].generates:
        base |= {"num_generations": 2, "max_completion_length": 32}
    for field in [item for item in dataclasses.fields(kind) if item.init and item.name not in own]:
        value = TRL_VALUES.get(field.name, yaml.safe_load(text_of(field)))
        value = value.get(kind.__name__, "nll") if field.name == "loss_type" else value
        with subtests.test(field=field.name):
            try:
                estimate(config, {**base, **WITH.get(field.name, {}), field.name: value}, 64, "a100_80gb", task=task)
            except InputError as refused:
                named = "use_transformers_continuous_batching" if "paged" in field.name else field.name
                assert re.search(rf"\b{named}\b", str(refused)), refused
                continue
            if field.name not in trl_job._NOT_OF_TRAINER:
                assert field.name in REPLACED or str(getattr(made[-1].args, field.name)) == str(value)


# A trace rounds generation up to whole groups of all processes.
REPLACED = {"max_length", "steps_per_generation", "generation_batch_size"}


def test_every_field_of_memory_arguments():
    """They reach the traced job as one object."""
    for field in dataclasses.fields(MemoryArguments):
        choice = {"activation_compression": "int8", "checkpoint_keeps": "matmuls", "memory_profile": "aggressive"}
        text = choice.get(field.name, "2-4" if field.name == "snapshot_steps" else text_of(field))
        text = "0.93" if field.name.endswith(("threshold", "utilization")) else text
        text = "0.5" if "ratio" in field.name or "budget" in field.name else text
        try:
            job = resolved("max_grad_norm=0", "gradient_accumulation_steps=1", f"{field.name}={text}")
        except InputError as refused:
            assert field.name in str(refused)
            continue
        traced = job.at_depth(1).memory_args
        assert getattr(traced, field.name) != field.default
        assert traced == job.memory_args


def test_a_limit_of_its_own_is_the_capacity():
    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
    found = estimate(config, {}, 32, "rtx_4090", memory_args=MemoryArguments(max_memory_gib=0.5))
    assert found.capacity_bytes == 2**29 and found.fits is False
    assert estimate(config, {}, 32, "rtx_4090", memory_args=MemoryArguments(max_memory_gib=900)).fits


FSDP2 = {"strategy": "fsdp2", "world_size": 4}


@pytest.mark.parametrize(
    ("settings", "checkpoints"),
    [
        ([], True),
        (["activation_checkpointing=false"], False),
        (["gradient_checkpointing=false"], False),
        (["fsdp_config={activation_checkpointing: false}"], False),
        (["fsdp_config={fsdp_activation_checkpointing: false}"], False),
        (["fsdp_config={reshard_after_forward: false}"], True),
        (["activation_checkpointing_kwargs={offload: true}"], True),
        (["gradient_checkpointing_kwargs={every_n_layers: 2}"], True),
    ],
)
def test_the_users_checkpointing_replaces_the_presets(settings, checkpoints):
    """`activation_checkpointing=false` was ignored, since a preset's fsdp_config says otherwise."""
    job = resolved(*settings, **FSDP2)
    assert bool(job.at_depth(1).fields.get("activation_checkpointing")) is checkpoints
    assert not (job.engine.checkpointing and job.fields.get("activation_checkpointing"))


@pytest.mark.parametrize("task", ["sft", "reward"])
def test_trls_tasks_are_checkpointed_by_fsdp_too(task):
    """A preset's silence is false there, as TRL's own default is true: that was taken for the user's."""
    job = resolved(task=task, **FSDP2)
    assert job.fields["activation_checkpointing"] is False and job.engine.checkpointing


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
@pytest.mark.parametrize("method", [pytest.param("lora", marks=pytest.mark.sweep), "qlora"])
def test_trls_tasks_hold_their_share_of_the_weights(strategy, method):
    """Of a trainer's copy the whole model was loaded under ZeRO-3, and kept beside its shards under FSDP2."""
    plain, sft = (
        estimate_job(resolved(method=method, strategy=strategy, world_size=4, task=task)).phases
        for task in (None, "sft")
    )
    for phase in ("load", "between"):
        assert sft[phase] <= 1.02 * plain[phase], phase


@pytest.mark.slow
def test_weights_that_stay_gathered_take_more():
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=6, num_attention_heads=4, vocab_size=500)

    def peak(**settings):
        return estimate(
            config, settings, 32, "rtx_4090", world_size=4, strategy=None if "fsdp" in settings else "fsdp2"
        )

    usual = peak().peak_allocated_bytes
    kept = peak(fsdp_config={"reshard_after_forward": False}).peak_allocated_bytes
    assert kept > 1.05 * usual
    assert peak(fsdp="shard_grad_op").peak_allocated_bytes == kept
    assert peak(fsdp="full_shard").peak_allocated_bytes == usual


def test_the_batch_of_a_deepspeed_json_is_the_jobs():
    """The JSON is the user's, the micro-batch the preset's."""
    job = resolved("deepspeed={zero_optimization: {stage: 2}, train_micro_batch_size_per_gpu: 2}", world_size=4)
    assert job.fields["per_device_train_batch_size"] == 2


def test_two_answers_to_one_question_are_refused(subtests):
    for settings, options, reason in [
        (["activation_checkpointing=false", "fsdp_config={activation_checkpointing: true}"], FSDP2, "leave one"),
        (["gradient_checkpointing=true", "activation_checkpointing=false"], {}, "activation_checkpointing"),
        (["optim=adafactor", "optim=sgd"], {}, "set it once"),
        (["optim=adafactor", "adam_mini=true"], {}, "adam_mini replaces"),
        (["task=sft"], {"task": "dpo"}, "--task dpo"),
        (["deepspeed=zero3"], {"strategy": "zero2", "world_size": 2}, "leave one of the two out"),
        (["deepspeed=zero3"], {"strategy": "ddp", "world_size": 2}, "leave one of the two out"),
        (["fsdp=true"], {"strategy": "ddp", "world_size": 2}, "leave one of the two out"),
        (["fsdp=true"], {"world_size": 1}, "several processes"),
        ([], {"strategy": "fsdp2", "world_size": 1}, "several processes"),
        (["fsdp=full_shard offload", "fsdp_config={version: 1}"], {"world_size": 2}, "use version=2"),
        (["fsdp=hybrid_shard"], {"world_size": 2}, "hsdpN"),
        (["fsdp_config={reshard_after_foward: false}"], FSDP2, "reshard_after_forward"),
        (["fsdp_config={auto_wrap_policy: SIZE_BASED_WRAP}"], FSDP2, "auto_wrap_policy"),
        (["fsdp_config={reshard_after_forward: false}"], {"strategy": "ddp", "world_size": 2}, "under FSDP alone"),
        (["accelerator_config={gradient_accumulation_kwargs: {num_steps: 4}}"], {}, "gradient_accumulation_steps"),
        (["use_cpu=true"], {}, "hardware=cpu"),
        (["max_length=32"], {"task": "sft"}, "max_length=32"),
        (["model_init_kwargs={dtype: float32}"], {"task": "sft"}, "set dtype"),
        (
            ["per_device_train_batch_size=4", "deepspeed={train_micro_batch_size_per_gpu: 2}"],
            {"world_size": 2},
            "for per_device_train_batch_size",
        ),
        (["deepspeed={train_batch_size: 7}"], {"world_size": 2}, "train_batch_size=7"),
        (["deepspeed={gradient_clipping: 0.5}", "max_grad_norm=2"], {"world_size": 2}, "gradient_clipping"),
        (["deepspeed={bf16: {enabled: false}}", "bf16=true"], {"world_size": 2}, "bf16"),
        (["deepspeed={optimizer: {type: Adam}}", "optim=adafactor"], {"world_size": 2}, "optim=adafactor"),
    ]:
        with subtests.test(settings=settings, options=options, reason=reason):
            from hf_memopt.estimator.api import run_trace

            with pytest.raises(InputError) as refused:
                job = resolved(*settings, **options)
                run_trace(job.at_depth(1))
            assert reason in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "fsdp_config"])
def test_a_plan_chooses_the_engine(name):
    from hf_memopt.planner.plan import plan

    with pytest.raises(InputError, match=f"{name}=.*plan chooses"):
        plan("llama-3.2-1b", "a100_80gb", training={name: {"zero_optimization": {"stage": 2}}})


@pytest.mark.parametrize(
    ("settings", "options", "line"),
    [
        ([], {}, "float32 + bf16, adamw_torch_fused, checkpointing, sdpa, plain loss, 4 × 8 × 1"),
        (
            ["activation_checkpointing=false", "loss_chunk_size=512", "dtype=bfloat16", "optim=sgd"],
            FSDP2,
            "bfloat16 + bf16, sgd, no checkpointing, sdpa, loss in chunks of 512, fsdp2, 4 × 2 × 4",
        ),
        (
            ["checkpoint_ratio=0.5", "activation_checkpointing=false", "use_liger_kernel=true", "adam_mini=true"],
            {"strategy": "ddp", "world_size": 2},
            "float32 + bf16, adam_mini, checkpointing of 50%, sdpa, fused loss, ddp, 4 × 4 × 2",
        ),
    ],
)
def test_the_header_says_what_was_estimated(settings, options, line):
    assert resolved(*settings, **options).in_words("sdpa") == line


def test_an_estimate_says_which_attention_the_model_took():
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
    assert estimate(config, {"per_device_train_batch_size": 3}, 32, "rtx_4090").estimated == (
        "float32, adamw_torch_fused, no checkpointing, sdpa, plain loss, 3 × 1 × 1"
    )
    assert ", eager, " in estimate(config, {}, 32, "rtx_4090", attn_implementation="eager").estimated


def test_modules_are_named_as_people_write_lists(subtests):
    """peft takes a text for a pattern of a whole path, and finds no module of that name."""
    for text, expected in [
        *(("q_proj", ["q_proj"]), ("q_proj,v_proj", ["q_proj", "v_proj"])),
        *(("q_proj, mlp.up_proj", ["q_proj", "mlp.up_proj"]), ("[q_proj, v_proj]", ["q_proj", "v_proj"])),
        *(("all-linear", "all-linear"), (r".*\.(q|v)_proj", r".*\.(q|v)_proj"), ("true", True)),
    ]:
        with subtests.test(f"{text} {expected}"):
            assert parse_settings([f"lora.target_modules={text}"])["lora"] == {"target_modules": expected}
