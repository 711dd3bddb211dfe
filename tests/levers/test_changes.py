"""The table of what to change: nothing in it is proposed that the project itself refuses."""

import importlib
import itertools
from dataclasses import replace
from pkgutil import iter_modules

import pytest

from hf_memopt.compatibility.setup import Setup, refusals
from hf_memopt.engines import engine_named
from hf_memopt.errors import InputError
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers import changes, facts, features
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.change import Change
from hf_memopt.levers.changes import advice, proposals
from hf_memopt.levers.facts import Facts, training_fields
from hf_memopt.oom.causes import _BY_STAGE, guess_job
from hf_memopt.planner.choices import SearchSpace
from hf_memopt.presets import get_preset, list_presets

MODULES = [
    changes,
    *(importlib.import_module(f"{features.__name__}.{one.name}") for one in iter_modules(features.__path__)),
]
TABLE = {name: value for module in MODULES for name, value in vars(module).items() if isinstance(value, Change)}
DEVICES = ("cuda", "rocm", "mps", "xpu", "cpu")
ENGINES = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp", "tp")
JOBS = [
    Facts(
        setup=Setup(device=device, strategy=engine, method=method, optim="adamw_torch", precision=precision),
        training={"per_device_train_batch_size": 4, "eval_strategy": "steps", precision: True},
        discrete_memory=device not in ("mps", "cpu"),
        seq_len=4096,
    )
    for device, engine, method, precision in itertools.product(
        DEVICES, ENGINES, ("full", "lora", "qlora"), ("bf16", "fp16")
    )
]
RUNNABLE = [job for job in JOBS if not job.refusals()]


def test_every_device_and_engine_that_works_has_a_job():
    assert {job.setup.device for job in RUNNABLE} == set(DEVICES)
    assert {job.setup.strategy for job in RUNNABLE} == set(ENGINES)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("job", RUNNABLE, ids=lambda job: "-".join((job.setup.device, job.setup.strategy)))
def test_no_proposal_is_refused(job):
    proposed = list(proposals(job, TABLE.values()))
    assert proposed
    for change, settings in proposed:
        changed = job.changed(settings)
        assert refusals(changed.setup) == [], change.written(settings)
        fields = {**job.training, **training_fields(settings)}
        memory = {name: value for name, value in settings.items() if name in MemoryArguments.names()}
        Facts.of_settings(MemoryArguments(**memory), fields, changed.engine, job.setup.device).check_features()


def test_settings_are_fields():
    """Names that TrainingArguments or MemoryArguments have, or that a preset is asked for with."""
    from transformers import TrainingArguments

    known = {*TrainingArguments.__dataclass_fields__, *MemoryArguments.names(), *facts._NOT_TRAINING}
    for name, change in TABLE.items():
        assert change.settings.keys() <= known, name
        assert change.settings or change.compute or change.label, name


def test_settings_change_the_part_of_a_job_that_they_belong_to():
    own = {"learning_rate": 1e-3, "per_device_train_batch_size": 4}
    job = Facts(setup=Setup(device="cuda", method="full", optim="adamw_torch", precision="bf16"), training=own)
    settings = {"strategy": "zero3_offload_cpu", "optim": "sgd", "method": "lora", "dtype": "bfloat16"}
    settings |= {"seq_len": 64, "max_frames": 2, "loss_chunk_size": 8, "per_device_train_batch_size": 1}
    fields = {"optim": "sgd", "per_device_train_batch_size": 1}
    assert training_fields(settings) == fields
    changed = job.changed(settings)
    assert {name: changed.training[name] for name in (*own, "optim")} == own | fields
    setup = replace(job.setup, strategy="zero3", offload="cpu", optim="sgd", method="lora", dtype="bfloat16")
    assert (changed.setup, changed.memory_args) == (setup, replace(job.memory_args, loss_chunk_size=8))


SETTINGS = [
    ("CHECKPOINTING", {"setup": {"activation_checkpointing": True}}, None),
    ("CHECKPOINTING", {"setup": {"engine_checkpointing": True}}, None),
    ("MICRO_BATCH", {}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    (
        "MICRO_BATCH",
        {"training": {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 4}},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 10},
    ),
    ("MICRO_BATCH", {"training": {"per_device_train_batch_size": 1}}, None),
    ("MICRO_BATCH", {"memory_args": MemoryArguments(max_tokens_per_batch=512)}, None),
    ("SHORTER", {"seq_len": 1024}, {"seq_len": 512}),
    ("SHORTER", {"seq_len": 513}, {"seq_len": 256}),
    ("SHORTER", {"seq_len": 512}, None),
    ("SHORTER", {}, None),
    ("SHORTER", {"seq_len": 1024, "halved_frames": 8}, {"max_frames": 8}),
    ("SHORTER", {"seq_len": 1024, "halved_frames": 0}, None),
    ("LOSS_CHUNKS", {}, {"loss_chunk_size": 1024}),
    ("LOSS_CHUNKS", {"seq_len": 1024}, {"loss_chunk_size": 1024}),
    ("LOSS_CHUNKS", {"seq_len": 65}, {"loss_chunk_size": 130}),
    ("LOSS_CHUNKS", {"seq_len": 64}, None),
    ("LOSS_CHUNKS", {"next_token": False}, None),
    ("LOSS_CHUNKS", {"memory_args": MemoryArguments(loss_chunk_size=4)}, None),
    ("MLP_TILES", {"seq_len": 1024, "setup": {"activation_checkpointing": True}}, {"mlp_tile_size": 1024}),
    ("MLP_TILES", {"seq_len": 16384, "setup": {"activation_checkpointing": True}}, {"mlp_tile_size": 2048}),
    ("MLP_TILES", {"seq_len": 1023, "setup": {"activation_checkpointing": True}}, None),
    ("MLP_TILES", {"seq_len": 1024}, None),
    ("COMPRESSION", {}, {"activation_compression": "int8"}),
    ("COMPRESSION", {"memory_args": MemoryArguments(activation_compression="int8")}, None),
    ("ACTIVATION_OFFLOAD", {}, {"activation_offload": True}),
    ("ACTIVATION_OFFLOAD", {"discrete_memory": False}, None),
    ("ACTIVATION_OFFLOAD", {"memory_args": MemoryArguments(activation_offload=True)}, None),
    ("OPTIMIZER_OFFLOAD", {}, {"optimizer_cpu_offload": True, "optim": "adamw_torch_fused"}),
    ("OPTIMIZER_OFFLOAD", {"discrete_memory": False}, None),
    ("OPTIMIZER_OFFLOAD", {"setup": {"method": "lora"}}, None),
    ("OPTIMIZER_OFFLOAD", {"memory_args": MemoryArguments(optimizer_cpu_offload=True)}, None),
    ("ADAM_8BIT", {}, {"optim": "adamw_8bit"}),
    ("ADAM_8BIT", {"setup": {"optim": "sgd"}}, None),
    ("ADAM_8BIT", {"setup": {"method": "lora"}}, None),
    ("BF16_WEIGHTS", {"setup": {"dtype": "float32"}}, {"dtype": "bfloat16"}),
    ("BF16_WEIGHTS", {"setup": {"dtype": "float32", "method": "lora"}}, None),
    ("BF16_WEIGHTS", {"setup": {"dtype": "bfloat16"}}, None),
    ("LORA", {}, {"method": "lora"}),
    ("LORA", {"setup": {"method": "qlora"}}, None),
    ("QLORA", {"setup": {"method": "lora"}}, {"method": "qlora"}),
    ("QLORA", {"setup": {"method": "qlora"}}, None),
    ("FSDP2", {"setup": {"strategy": "ddp"}}, {"strategy": "fsdp2"}),
    ("FSDP2", {"setup": {"strategy": "zero3"}}, None),
    ("ZERO2", {}, {"strategy": "zero2"}),
    ("ZERO3", {"setup": {"strategy": "fsdp2"}}, None),
    ("ZERO3_OFFLOAD", {}, {"strategy": "zero3_offload_cpu", "optim": "adamw_torch"}),
    ("ZERO3_OFFLOAD", {"discrete_memory": False}, None),
    ("ZERO3_OFFLOAD", {"setup": {"strategy": "zero3", "offload": "cpu"}}, None),
    ("VISION_FLASH", {"setup": {"device": "xpu"}}, None),
    ("LIGER", {"setup": {"device": "xpu"}}, {}),
    ("LIGER", {"setup": {"device": "mps"}}, None),
    ("EXPANDABLE_SEGMENTS", {}, {}),
    ("EXPANDABLE_SEGMENTS", {"setup": {"device": "rocm"}}, None),
    ("SPLIT_SIZE", {"setup": {"device": "rocm"}}, {}),
    ("SPLIT_SIZE", {}, None),
    ("EVAL_ACCUMULATION", {}, None),
    ("EVAL_ACCUMULATION", {"keeps_eval_logits": True}, {"eval_accumulation_steps": 1}),
    ("EVAL_BATCH", {}, None),
    ("EVAL_BATCH", {"training": {"eval_strategy": "steps"}}, {"per_device_eval_batch_size": 1}),
    ("EVAL_BATCH", {"training": {"eval_strategy": "steps", "per_device_eval_batch_size": 1}}, None),
]


def test_what_a_change_sets_for_a_job(subtests):
    for name, own, settings in SETTINGS:
        with subtests.test(f"{name} {own} {settings}"):
            setup = {"device": "cuda", "method": "full", "optim": "adamw_torch", "precision": "bf16"}
            job = Facts(
                **{
                    "training": {"per_device_train_batch_size": 4, "bf16": True},
                    "discrete_memory": True,
                    **own,
                    "setup": Setup(**{**setup, **own.get("setup", {})}),
                }
            )
            assert TABLE[name].settings_for(job) == settings


def test_8_bit_adam_is_proposed_where_it_has_a_kernel():
    jobs = {device: Facts.on_device(device) for device in DEVICES}
    assert {device for device, job in jobs.items() if not changes.ADAM_8BIT.settings_for(job)} == {"mps"}
    sharded = replace(jobs["cuda"], setup=Setup(strategy="fsdp2"))
    offloaded = replace(jobs["cuda"], setup=Setup(strategy="zero2", offload="cpu"))
    assert not changes.ADAM_8BIT.settings_for(sharded) and not changes.ADAM_8BIT.settings_for(offloaded)


@pytest.mark.parametrize(
    ("message", "device"),
    [
        ("MPS backend out of memory (MPS allocated: 5 GB)", "mps"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "cuda"),
        ("HIP out of memory. Tried to allocate 2.00 GiB", "rocm"),
        ("DefaultCPUAllocator: can't allocate memory", "cpu"),
    ],
)
def test_advice_fits_the_device_that_a_message_names(message, device):
    job = guess_job(message)
    assert job.setup.device == device
    for stage, (_, rows) in _BY_STAGE.items():
        texts = advice(job, rows)
        assert texts, stage
        if device == "mps":
            assert not any("8bit" in text or "zero" in text or "PYTORCH_ALLOC_CONF" in text for text in texts)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", list_presets())
def test_a_plan_chooses_nothing_that_is_refused(name):
    from hf_memopt.estimator.architectures import load_config

    preset = get_preset(name)
    spec = JobSpec(
        model="smollm2-135m",
        config=load_config("smollm2-135m"),
        preset=preset,
        effective_batch_size=preset.effective_batch_size,
        seq_len=preset.seq_len,
    )
    for choice in itertools.islice(SearchSpace(spec).choices(), 50):
        configured = choice.configured(preset)
        assert refusals(configured.setup()) == []


def test_a_change_that_is_refused_says_nothing_of_other_faults():
    """A job that is refused for one reason still hears what else would help it."""
    emulated = Facts(setup=Setup(native_bf16=False, label="T4"))
    assert emulated.refusals() and changes.CHECKPOINTING.settings_for(emulated)
    with pytest.raises(InputError):
        Facts.of_settings(MemoryArguments(optimizer_cpu_offload=True), {}, engine_named("ddp")).check_features()


@pytest.mark.parametrize(("samples", "size"), [(1, 1024), (8, 1024), (2048, 2048 * 4096 // 32)])
def test_very_large_micro_batches_have_few_pieces(samples, size):
    """Hundreds of pieces take minutes to trace, and long to compute."""
    setup = Setup(device="cuda", optim="adamw_torch", activation_checkpointing=True)
    job = Facts(setup=setup, training={"per_device_train_batch_size": samples}, seq_len=4096)
    proposed = {name: value for _, settings in proposals(job, TABLE.values()) for name, value in settings.items()}
    assert (proposed["loss_chunk_size"], proposed["mlp_tile_size"]) == (size, size)
