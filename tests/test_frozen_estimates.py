"""Whole estimates of models of a few layers, frozen: every byte by kind and phase, every note, the speed."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import frozen
import pytest
from transformers import AutoConfig

from hf_memopt import InputError, MemoryArguments, estimate
from hf_memopt.units import GIB

SMALL = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "vocab_size": 300}
LLAMA = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 128, "num_hidden_layers": 12}
MODELS = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": {**SMALL, "num_hidden_layers": 10, "max_position_embeddings": 128},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 80, "num_heads": 4, "num_layers": 9, "vocab_size": 300},
    "gpt2": {"n_embd": 32, "n_layer": 10, "n_head": 4, "n_positions": 128, "vocab_size": 300},
}
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def check(name: str, model: str, hardware: str, fields: dict, length: int = 48, **more) -> None:
    """Compare a job's whole estimate with the frozen one."""
    config = AutoConfig.for_model(model, **MODELS[model])
    found = estimate(config, {**BATCH, **fields}, length, hardware, **more)
    values = found.to_dict() | {"text": str(found).splitlines()}
    values |= {key: frozen.figures(values[key]) for key in ("step_seconds", "tokens_per_second", "mfu")}
    del values["training_arguments"], values["speed_error"]
    values["notes"] = [note for note in values["notes"] if "benchmarks/" not in note]  # figures that are measured anew
    assert max(height for _, height in found.timeline) <= found.peak_allocated_bytes
    frozen.check(f"estimate_{name}", values)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("hardware", ["cpu", "rtx_4090", "t4", "apple_m2_16gb", "mi300x"])
def test_on_a_device(hardware):
    precision = {"cpu": {}, "t4": {"fp16": True}}.get(hardware, {"bf16": True})
    check(f"on_{hardware}", "llama", hardware, precision)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", ["qwen2", "mixtral", "bert", "t5", "gpt2"])
def test_of_a_model(model):
    check(f"of_{model}", model, "rtx_3060", {"bf16": True})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model", ["llama", "t5"])
def test_with_checkpointing(model):
    check(f"checkpointed_{model}", model, "rtx_3060", {"bf16": True, "activation_checkpointing": True})


def test_with_some_layers_checkpointed():
    check("some_checkpointed", "llama", "rtx_3060", {"bf16": True}, memory_args=MemoryArguments(checkpoint_ratio=0.5))


@pytest.mark.drawn(1)
@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_with_an_optimizer(optim):
    check(f"with_{optim}", "llama", "rtx_3060", {"bf16": True, "optim": optim})


def test_with_evaluation():
    fields = {"bf16": True, "eval_strategy": "steps", "eval_accumulation_steps": 3, "per_device_eval_batch_size": 4}
    check("with_evaluation", "llama", "rtx_3060", fields)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("attention", ["eager", "flash_attention_2", "flex_attention"])
def test_with_attention(attention):
    check(f"with_{attention}", "llama", "rtx_3060", {"bf16": True}, attn_implementation=attention)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("asked", [{"padded": True}, {"packed": True}], ids=["padded", "packed"])
def test_with_batches(asked):
    check(f"with_{'_'.join(asked)}", "llama", "rtx_3060", {"bf16": True}, **asked)


def test_with_adapters():
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    check("with_adapters", "llama", "rtx_3060", {"bf16": True}, peft_config=lora, dtype="bfloat16")


def test_without_gradients_kept():
    fields = {"bf16": True, "gradient_accumulation_steps": 1, "max_grad_norm": 0}
    check("in_backward", "llama", "rtx_3060", fields, memory_args=MemoryArguments(optimizer_in_backward=True))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "asked",
    [
        *({"activation_offload": True}, {"activation_compression": "int8"}, {"loss_chunk_size": 16}),
        *({"mlp_tile_size": 16}, {"adam_mini": True}, {"optimizer_cpu_offload": True}, {"sliding_window": 16}),
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_with_a_memory_feature(asked):
    check(f"with_{next(iter(asked))}", "llama", "rtx_3060", {"bf16": True}, memory_args=MemoryArguments(**asked))


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_under_an_engine(strategy):
    check(f"under_{strategy}", "llama", "a100_80gb", {"bf16": True}, world_size=4, strategy=strategy)


# ---- jobs before they are traced


def described(model, fields: dict, length: int = 48, hardware: str = "rtx_3060", **settings) -> dict | str:
    """What follows of a job's settings, or the sentence that refuses them."""
    from hf_memopt.estimator.job import describe
    from hf_memopt.estimator.job_checks import attention_heads, divides_heads, facts_of, layers_with_masks
    from hf_memopt.estimator.overheads import batch_bytes
    from hf_memopt.estimator.timing.own_runs import speed_setup
    from hf_memopt.estimator.timing.speed_errors import find_error, job_kind
    from hf_memopt.estimator.timing.step_time import StepTime
    from hf_memopt.estimator.timing.throughput import counted_job, unknown_speed

    if isinstance(model, str):
        model = AutoConfig.for_model(model, **{**MODELS[model], **settings.pop("shape", {})})
    try:
        job = describe(model, {**BATCH, **fields}, length, hardware, **settings)
    except InputError as error:
        return f"error: {error}"
    counted = counted_job(job)
    answered = {
        "batch": {name: f"{list(size)} {dtype}" for name, (size, dtype) in job.batch.items()},
        "bytes": [batch_bytes(job), batch_bytes(job, 512)],
        "words": [job.in_words("sdpa"), job.in_words("")],
        "depths": job.depths(),
        "elements": [job.elements(), job.elements(trained=True)],
        "trained": len(job.trained_sizes()),
        "heads": [attention_heads(job.config), divides_heads(job.config, 2), divides_heads(job.config, 8)],
        "masks": sorted(layers_with_masks(job.config)),
        "speed": [unknown_speed(job), job_kind(job), find_error(job_kind(job), job.device) is None],
        "step": {name: value for name, value in vars(StepTime.of(job, 10**6, 10**8)).items() if name != "device"},
        "counted": counted
        and [counted.world_size, counted.rank, counted.shared, counted.engine.strategy, counted.fields[ACCUMULATION]],
        "setup": speed_setup(job, "any job"),
        "refused": [str(refusal) for refusal in facts_of(job).refusals()],
        "traced": {name: str(value) for name, value in vars(job.at_depth(job.depths()[0])).items() if name in TRACED},
    }
    names = ("unlike_layers", "positions", "micro_batch_tokens", "attention", "runs_triton", "shares_heads", "rank")
    names += ("method", "shared", "padded", "dequantized")
    return answered | {name: getattr(job, name) for name in names} | beside_a_trace(job)


def beside_a_trace(job) -> dict:
    """What is added to peaks of some bytes each, and what is said of them."""
    from hf_memopt.estimator import overheads
    from hf_memopt.estimator.accounting.ledger import Peak
    from hf_memopt.estimator.timing.throughput import _waits

    phases = ("load", "start", "forward: layers", "backward: head", "between", "eval: logits")
    peaks = {name: Peak(100 * place, {"gradients": place, "parameters": GIB}) for place, name in enumerate(phases)}
    paged = 3 * GIB if "paged" in job.fields.get("optim", "") else 0
    peaks["backward: head"].host, peaks["between"].paged = GIB // 2 if job.method == "full" else 2 * GIB, paged
    peaks["forward: layers"].host = GIB // 8
    overheads.add_prefetched(peaks, job)
    with mock.patch.multiple(type(job), kept_batches=1, evaluated_batches=3, concatenates_logits=True):
        evaluated = overheads.host_bytes(peaks, job, 0, 11)
    traced = SimpleNamespace(unquantized_experts=job.quantization_config is not None)
    return {
        "held": {name: [peak.total, peak.by_kind["gradients"]] for name, peak in peaks.items()},
        "host": [
            *(overheads.host_bytes(peaks, job, cached, logits) for cached, logits in ((0, 0), (7, 11))),
            evaluated,
        ],
        "buffers": overheads.optimizer_buffers(job),
        "waits": [frozen.figures(_waits(job, peaks, *seconds)) for seconds in ((0.3, 0.3), (0.3, 0.25), (0.02, 0.02))],
        "notes": [list(overheads.notes(job, traced, peaks, otherwise)) for otherwise in (0, 3 << 20, -5 << 20)],
    }


ACCUMULATION = "gradient_accumulation_steps"
TRACED = {
    "fields",
    "backend",
    "discrete_memory",
    "flex",
    "capability",
    "fp8",
    "padded",
    "shared",
    "attention",
    "eval_batch",
    "dequantized",
    "evaluated",
    "world_size",
    "rank",
}


def test_what_follows_of_a_jobs_fields():
    found = {}
    for fields in (
        *({}, {"bf16": True}, {"fp16": True}, {"bf16": True, "fp16": True}, {"activation_checkpointing": True}),
        {"bf16": True, "activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
        *({"bf16": True, "optim": "sgd", "gradient_accumulation_steps": 1}, {"eval_strategy": "steps"}),
        *({"bf16": True, "torch_compile": True}, {"bf16": True, "auto_find_batch_size": True}),
        *({"bf16": True, "use_liger_kernel": True}, {"eval_strategy": "no", "do_eval": True}),
        {"per_device_train_batch_size": 5},
    ):
        found[str(fields)] = described("llama", fields)
    frozen.check("jobs_fields", found)


def test_what_follows_of_a_jobs_settings():
    found = {}
    half = {"bf16": True}
    for settings in (
        {"padded": True},
        {"packed": True},
        {"dtype": "bfloat16"},
        {"attn_implementation": "eager"},
        {"attn_implementation": "flash_attention_2"},
        {"attn_implementation": "flash_attention_3"},
        {"world_size": 4},
        {"world_size": 4, "strategy": "ddp"},
        {"world_size": 4, "strategy": "zero3", "rank": 3},
        {"world_size": 4, "strategy": "zero2"},
        {"world_size": 2, "strategy": "fsdp2", "rank": 2},
        {"world_size": 4, "strategy": "fsdp2"},
        {"world_size": 4, "strategy": "zero3_offload_cpu"},
        {"world_size": 0},
        {"length": 128},
        {"length": 129},
        {"length": 0},
        {"hardware": "t4"},
        {"hardware": "cpu"},
        {"hardware": "mi300x"},
        {"hardware": "apple_m2_16gb"},
        {"padded": "x"},
        {"task": "sequence-classification"},
        {"task": "nothing"},
        *(
            {"asked": asked}
            for asked in (
                *({"checkpoint_ratio": 0.5}, {"activation_offload": True}, {"max_tokens_per_batch": 100}),
                *({"loss_chunk_size": 16}, {"adam_mini": True}, {"activation_compression": "int8"}),
                *({"sliding_window": 16}, {"optimizer_cpu_offload": True}, {"mlp_tile_size": 16}),
                {"weight_streaming": True},
            )
        ),
    ):
        memory_args = {"memory_args": MemoryArguments(**settings["asked"])} if "asked" in settings else settings
        found[str(settings)] = described("llama", half, **memory_args)
    for model, shape in (
        *(("bert", {}), ("t5", {}), ("gpt2", {}), ("mixtral", {}), ("qwen2", {}), ("llama", {"num_hidden_layers": 2})),
        *(("llama", {"num_hidden_layers": 5}), ("llama", {"num_key_value_heads": 4})),
        ("llama", {"rope_parameters": None}),
    ):
        found[f"{model} {shape}"] = described(model, half, shape=shape)
    frozen.check("jobs_settings", found)


def test_what_follows_of_jobs_on_other_devices_of_other_kinds():
    """Adapters, quantized weights, paged states, engines by fields, shared samples, videos, each in its own words."""
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, FineGrainedFP8Config
    from video_models import qwen2_5_vl

    from hf_memopt.video.inputs import VideoInputs

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    some = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1, 2], task_type="CAUSAL_LM")
    four, eight = BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True)
    clip = VideoInputs(frames=4, height=56, width=56, prompt_tokens=5, answer_tokens=3)
    sees, half = qwen2_5_vl()[0], {"dtype": "bfloat16"}
    quantized = {**half, "peft_config": lora}
    four_cards, recovers = {"world_size": 4}, {"memory_args": MemoryArguments()}
    jobs = {
        "adapters": ({}, {"peft_config": lora}),
        "adapters of some layers": ({}, {"peft_config": some}),
        "4 bits": ({}, {**quantized, "quantization_config": four}),
        "4 bits, whole": ({}, {**half, "quantization_config": four}),
        "4 bits, ZeRO-3": ({}, {**quantized, **four_cards, "strategy": "zero3", "quantization_config": four}),
        "8 bits": ({}, {**quantized, "quantization_config": eight}),
        "8 bits, FSDP": ({}, {**quantized, **four_cards, "strategy": "fsdp2", "quantization_config": eight}),
        "8 bits, CPU": ({}, {**quantized, "hardware": "cpu", "quantization_config": eight}),
        "fp8": ({}, {**quantized, "hardware": "h100_80gb", "quantization_config": FineGrainedFP8Config()}),
    }
    for hardware in ("rtx_3060", "mi300x", "radeon_8060s_64gb", "apple_m2_16gb", "cpu"):
        precision = {"bf16": hardware not in ("apple_m2_16gb",)}
        jobs[f"paged on {hardware}"] = ({**precision, "optim": "paged_adamw_8bit"}, {"hardware": hardware})
        for accumulation in (1, 2, 7):
            fields = {**precision, "gradient_accumulation_steps": accumulation}
            jobs[f"{accumulation} on {hardware}"] = (fields, {"hardware": hardware, **recovers})
        jobs[f"a clip on {hardware}"] = (precision, {"model": sees, "hardware": hardware, "video": clip, **recovers})
    jobs |= {
        "no recovery": ({}, {"memory_args": MemoryArguments(oom_recovery=False)}),
        "recovery, DDP": ({}, {**four_cards, "strategy": "ddp", **recovers}),
        "workers": ({"dataloader_num_workers": 3}, {}),
        "workers, ahead": ({"dataloader_num_workers": 3, "dataloader_prefetch_factor": 5}, {}),
        "not pinned": ({"dataloader_pin_memory": False}, {}),
        "FSDP1": ({"fsdp": "full_shard", "fsdp_config": {"version": 1}}, four_cards),
        "FSDP2, checkpointed": ({"activation_checkpointing": True}, {**four_cards, "strategy": "fsdp2"}),
        "FSDP's checkpointing": ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, four_cards),
        "FSDP's offloading": ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, four_cards),
        "a ring": ({}, {**four_cards, "strategy": "fsdp2", "shared": 2}),
        "a ring, odd": ({}, {**four_cards, "strategy": "fsdp2", "shared": 2, "length": 46}),
        "a ring, no share": ({}, {**four_cards, "strategy": "fsdp2", "shared": 3}),
        "a ring, eager": ({}, {**four_cards, "strategy": "fsdp2", "shared": 2, "attn_implementation": "eager"}),
        "a ring, chunks": (
            {},
            {**four_cards, "strategy": "fsdp2", "shared": 2, "memory_args": MemoryArguments(loss_chunk_size=16)},
        ),
        "Ulysses": ({}, {**four_cards, "strategy": "zero2", "shared": 2, "length": 47}),
        "Ulysses, heads": ({}, {"world_size": 8, "strategy": "zero2", "shared": 8}),
        "Ulysses, windows": ({}, {**four_cards, "strategy": "zero2", "shared": 2, "padded": True}),
        "DDP, shared": ({}, {**four_cards, "strategy": "ddp", "shared": 2}),
        "tensor parallel": ({}, {**four_cards, "strategy": "tp2"}),
        "hybrid": ({}, {**four_cards, "strategy": "hsdp2"}),
        "both": ({}, {"world_size": 8, "strategy": "tp2_hsdp2"}),
        "NVMe": ({}, {**four_cards, "strategy": "zero3_offload_nvme"}),
        "graphs": ({"torch_compile": True, "torch_compile_mode": "reduce-overhead"}, {}),
        "graphs, CPU": ({"torch_compile": True, "torch_compile_mode": "reduce-overhead"}, {"hardware": "cpu"}),
        "packed, flash": ({}, {**half, "packed": True, "attn_implementation": "flash_attention_2"}),
        "flex": ({}, {"attn_implementation": "flex_attention"}),
        "window, CPU": ({}, {"hardware": "cpu", "memory_args": MemoryArguments(sliding_window=16)}),
        "blocks": ({}, {"memory_args": MemoryArguments(sparse_block_size=16)}),
        "pairs of texts": ({}, {"model": "bert", "task": "feature-extraction"}),
        "positions, a table": ({}, {"model": "gpt2", "length": 129}),
        "positions, all of a table": ({}, {"model": "gpt2", "length": 128}),
        "positions, none": ({}, {"model": "t5", "length": 1000}),
        "no rank": ({}, {**four_cards, "strategy": "ddp", "rank": 4}),
        "last rank": ({}, {**four_cards, "strategy": "ddp", "rank": 3}),
        "text of a video model": ({}, {"model": sees}),
        "clips": (
            {},
            {"model": sees, "video": replace(clip, settings={"size": {"shortest_edge": 784, "longest_edge": 3136}})},
        ),
        "clips, tower frozen": (
            {},
            {"model": sees, "video": clip, "frozen": ("vision",), "hardware": "apple_m2_16gb", **recovers},
        ),
        "clips within a budget": (
            {},
            {"model": sees, "video": clip, "memory_args": MemoryArguments(max_tokens_per_batch=50)},
        ),
    }
    found = {}
    for name, (given, settings) in jobs.items():
        fields = {"optim": "adamw_torch", "bf16": settings.get("hardware") != "apple_m2_16gb"}
        found[name] = described(**{"model": "llama", "fields": fields | given, **settings})
    frozen.check("jobs_of_other_kinds", found)


FIELDS = {
    "nothing": {},
    "aliases": {"gradient_checkpointing": True, "per_device_train_batch_size": 3},
    "unknown": {"learning": 1},
    "of another type": {"bf16": "maybe"},
    "every second": {"activation_checkpointing_kwargs": {"every_n_layers": 2, "offload": False}},
    "compile mode": {"torch_compile_mode": "default"},
    "compile backend": {"torch_compile_backend": "eager", "torch_compile": False},
    "batches": {"accelerator_config": {"split_batches": False}, "output_dir": "x", "gradient_accumulation_steps": 4},
    "split batches": {"accelerator_config": {"split_batches": True}},
    "accumulation": {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
    "fsdp": {"fsdp": "full_shard offload", "fsdp_config": {"version": 2}},
    "fsdp unread": {"fsdp_config": {"version": 2}},
    "deepspeed": {"deepspeed": {"zero_optimization": {"stage": 2}}, "optim": "sgd"},
    "both": {"deepspeed": {"zero_optimization": {"stage": 1}}, "fsdp": True},
}
SHARED_BY = (
    {},
    {"cp": 2},
    {"sp": 2},
    {"tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"cp": 2, "dp_shard": 4},
    {"cp": 4},
)


def test_what_follows_of_fields_before_there_is_a_job(monkeypatch):
    from hf_memopt.engines import engine_named
    from hf_memopt.estimator import training_fields as fields_of

    for name in ("ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    found = {}
    for name, given in FIELDS.items():
        fields = refused(fields_of.read_fields, given)
        found[name] = [str(fields)]
        for strategy, world_size in (
            [] if isinstance(fields, str) else [(s, n) for s in (None, "ddp", "fsdp2", "zero3", "tp2") for n in (1, 4)]
        ):
            checked = refused(fields_of.check_fsdp, fields, strategy, world_size)
            settled, engine = fields_of.settle_engine(fields, strategy, world_size)
            shown = {key: value for key, value in settled.items() if key in ("fsdp", "fsdp_config")}
            found[name].append(
                [f"{strategy} {world_size}", checked, engine.strategy, str(shown), "deepspeed" in settled]
            )
    usual = {"cp": 1, "sp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": 1}
    for sizes in SHARED_BY:
        config = SimpleNamespace(**{f"{name}_size": size for name, size in {**usual, **sizes}.items()})
        found[f"shared {sizes}"] = [
            refused(fields_of.sharing_processes, {"parallelism_config": config}, engine_named(engine), ranks, False)
            for engine in ("ddp", "fsdp2", "tp2")
            for ranks in (1, 2, 4, 8)
        ]
        zero = SimpleNamespace(deepspeed={}, by_transformers=False, label="zero3", fsdp_version=None)
        asked = {"parallelism_config": config}
        found[f"by zero {sizes}"] = [refused(fields_of.sharing_processes, {**asked}, zero, 2, True)]
    asked = {"parallelism_config": None, "bf16": True}
    assert fields_of.sharing_processes(asked, engine_named("ddp"), 3, launched=True) == 1 and asked == {"bf16": True}
    kinds = ({}, {"do_eval": True}, {"eval_strategy": "no"}, {"eval_strategy": "steps"}, {"eval_strategy": KIND})
    found["evaluates"] = [fields_of.evaluates(fields) for fields in kinds]
    found["periods"] = [
        fields_of.checkpointing_period({"activation_checkpointing_kwargs": kwargs}, memory_args)
        for kwargs in (None, {}, {"every_n_layers": 3}, {"every_n_layers": 0}, "text")
        for memory_args in (
            *(None, MemoryArguments(checkpoint_ratio=0.5), MemoryArguments(weight_streaming=True)),
            *(
                MemoryArguments(weight_streaming=True, weight_streaming_ratio=0.25, checkpoint_ratio=part)
                for part in (None, 0.5)
            ),
        )
    ]
    frozen.check("training_fields", found)


KIND = SimpleNamespace(value="epoch")


def refused(function, *args):
    """What a function returns, or the sentence that refuses it."""
    try:
        return function(*args)
    except InputError as error:
        return f"error: {error}"


# ---- what is made of traces


def of_job(hardware: str = "rtx_3060", length: int = 48, **settings):
    from hf_memopt.estimator.job import describe

    fields = {**BATCH, "bf16": True, **settings.pop("fields", {})}
    return describe(AutoConfig.for_model("llama", **LLAMA), fields, length, hardware, **settings)


@pytest.fixture(scope="module")
def traced():
    """A job's traces, which those of other cards and of other settings beside the step have as well."""
    from hf_memopt.estimator.api import run_trace

    job = of_job()
    return job.depths(), [run_trace(replace(job.at_depth(depth), counted=True)) for depth in job.depths()]


def test_assembled_for_other_devices_and_settings(traced):
    from hf_memopt.estimator.assembly import assemble, capacity, missing_layers, phase_of
    from hf_memopt.estimator.timing.throughput import throughput

    found = {"phases": [phase_of(name) for name in ("start", "forward: first layer", "eval", "load: x")]}
    found["missing"] = [missing_layers(of_job().config, depths) for depths in ((12,), (3, 4), (2, 4), traced[0])]
    for hardware in ("rtx_3060", "rtx_4090", "a100_80gb", "mi300x", "h100_80gb", "t4"):
        job = of_job(hardware, fields={"bf16": hardware != "t4", "fp16": hardware == "t4"})
        found[hardware] = [answered(assemble(job, *traced)), speed(throughput(job, job, *traced))]
    for more in (
        *({"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 7}, {"dataloader_num_workers": 3}),
        *({"dataloader_num_workers": 3, "dataloader_prefetch_factor": 5}, {"dataloader_pin_memory": False}),
        *({"torch_compile": True}, {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}),
    ):
        job = of_job(fields=more)
        found[str(more)] = [answered(assemble(job, *traced)), speed(throughput(job, job, *traced))]
    limits = {"max_memory_gib": 2.0}, {"oom_recovery": False}
    for more in ({"length": 300}, *({"memory_args": MemoryArguments(**one)} for one in limits)):
        job = of_job(**more)
        found[f"{len(found)}"] = [answered(assemble(job, *traced)), capacity(job), job.seq_len]
    frozen.check("assembled", found)


def answered(found) -> dict:
    kept = ("peak_allocated_bytes", "reserved_bytes", "device_bytes", "host_bytes", "phase", "breakdown", "phases")
    notes = [note for note in found.notes if "benchmarks/" not in note]
    return {name: getattr(found, name) for name in kept} | {"notes": notes, "estimated": found.estimated}


def speed(found) -> list:
    return [frozen.figures(found.step_seconds), frozen.figures(found.tokens_per_second), frozen.figures(found.mfu)]


def test_speed_of_traces_written_by_hand():
    """Of one device, of engines, with samples that are shared, with what waits in host memory, with paged states."""
    from collections import Counter

    from test_hand_made_traces import trace

    from hf_memopt.estimator.accounting.ledger import Moment, TraceResult
    from hf_memopt.estimator.timing.throughput import Throughput, counted_job, speed_note, throughput, unknown_speed

    def result(number: int, host: int = 0) -> TraceResult:
        made = trace(number)
        moments = {Moment(name, 0, None): replace(peak, paged=10**9) for name, peak in made.peaks.items()}
        for moment, peak in moments.items():
            peak.host = host * (2 if moment.segment.startswith("backward") else 1)
        kernels = made.kernels + Counter(dict.fromkeys(again(made.kernels), 5))
        return TraceResult(moments, [], [], {}, False, 0, kernels, steps=1 + (number > 1))

    def again(kernels):
        return [kernel._replace(recomputed=True) for kernel in kernels if not kernel.optimizer and kernel.matmul]

    found = {}
    for settings in (
        {},
        {"fields": {"gradient_accumulation_steps": 1}},
        {"fields": {"gradient_accumulation_steps": 5}},
        {"world_size": 4, "strategy": "ddp"},
        {"world_size": 4, "strategy": "zero2"},
        {"world_size": 8, "strategy": "zero3"},
        {"world_size": 4, "strategy": "fsdp2"},
        {"world_size": 4, "strategy": "zero3_offload_cpu"},
        *({"feature": name} for name in ("activation_offload", "weight_streaming", "optimizer_cpu_offload")),
        {"hardware": "a100_80gb"},
        {"hardware": "mi300x"},
    ):
        feature = settings.get("feature")
        job = of_job(**({"memory_args": MemoryArguments(**{feature: True})} if feature else settings))
        counted = counted_job(job)
        answered = [counted.world_size, counted.engine.strategy, counted.fields["gradient_accumulation_steps"]]
        depths = job.depths()
        for host, full in ((0, False), (10**6, True), (3 * 10**9, False)):
            traces = [result(number, host) for number in range(len(depths))]
            answered.append(speed(throughput(job, counted, depths, traces, full)))
        found[str(settings)] = answered
    for hardware, fields in (
        ("t4", {}),
        ("cpu", {}),
        ("rtx_4090", {"bf16": False}),
        ("apple_m2_16gb", {"bf16": False}),
    ):
        job = of_job(hardware, fields=fields)
        found[f"{hardware} {fields}"] = [unknown_speed(job), counted_job(job) is None]
        note = speed_note(job.device, SimpleNamespace(speed_kind="dense models", own_runs=None))
        found[f"{hardware} note"] = note.partition("±")[0]
    made = Throughput.of(of_job(world_size=4), 2.0, 0.5)
    found["of"] = [*speed(made), made.speed_kind]
    frozen.check("speeds", found)
