"""Plans of samples that several devices share (DeepSpeed's Ulysses). tests/trainer/test_engines.py runs them."""

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import AutoConfig

from hf_memopt import InputError, MemoryArguments
from hf_memopt.cli.cards import _brief
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choice_jobs import choice_job, start_search
from hf_memopt.planner.choices import Choice, SearchSpace, sharing_counts
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.launch import accelerate_config, launch_command, write_files
from hf_memopt.planner.nothing_fits.nearest import _texts
from hf_memopt.planner.plan import plan_job
from hf_memopt.planner.search import summarize
from hf_memopt.planner.settle import settle
from hf_memopt.recipe.recipe_arguments import parse

MODEL = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 28, "num_key_value_heads": 4}
CONFIG = AutoConfig.for_model(**MODEL, hidden_size=3584, vocab_size=500, max_position_embeddings=131072)
LONG = {"model": "Qwen/Qwen2.5-7B", "config": CONFIG, "hardware": "h100_80gbx8", "method": "full", "seq_len": 131072}


def spec(hardware="h100_80gbx8", method="full", **changes) -> JobSpec:
    """A job on devices that have their preset."""
    made = JobSpec(**{**LONG, "hardware": hardware, "method": method, "effective_batch_size": 32})
    return replace(made, preset=resolve_preset(hardware, method), **changes)


COUNTS = [
    ({}, [2, 4]),  # 28 heads: eight devices do not divide them
    ({"hardware": "h100_80gbx16"}, [2, 4]),
    ({"hardware": "h100_80gbx2"}, [2]),
    ({"hardware": "h100_80gb"}, []),
    ({"method": "lora"}, [2, 4]),
    ({"method": "qlora"}, []),
    ({"seq_len": 4096}, []),  # as long as the preset's
    ({"seq_len": 4097}, [2, 4]),
    ({"task": "sft"}, []),
    ({"padded": True}, []),
    ({"memory_args": MemoryArguments(max_tokens_per_batch=131072)}, []),
    ({"memory_args": MemoryArguments(loss_chunk_size=64)}, [2, 4]),
    ({"config": AutoConfig.for_model("mistral", sliding_window=4096)}, []),
    ({"config": AutoConfig.for_model("gpt2")}, []),
    ({"task": "causal-lm", "attn_implementation": "sdpa"}, [2, 4]),
    ({"attn_implementation": "flash_attention_2"}, []),
    ({"training": {"per_device_train_batch_size": 1}}, [2, 4]),
    ({"training": {"per_device_train_batch_size": 2}}, []),
    ({"training": {"gradient_accumulation_steps": 4}}, []),
    ({"config": AutoConfig.for_model(**{**MODEL, "num_attention_heads": 32, "num_key_value_heads": 8})}, [2, 4, 8]),
]


def test_how_many_devices_may_share_a_sample(subtests):
    for changes, counts in COUNTS:
        with subtests.test(**changes):
            assert sharing_counts(spec(**changes)) == counts


BATCHES = [  # devices that share a sample, micro-batch, accumulation
    (8, "zero3", [(1, 1, 1), (2, 1, 2), (4, 1, 4)]),
    (16, "zero2", [(1, 1, 2), (1, 2, 1), (2, 1, 4), (4, 1, 8)]),
    (16, "ddp", [(1, 1, 2), (1, 2, 1)]),
    (16, "fsdp2", [(1, 1, 2), (1, 2, 1)]),
    (2, "zero3_offload_cpu", [(4, 1, 1)]),
    (12, "zero3", [(2, 1, 3), (4, 1, 6)]),
]


def test_every_split_of_a_batch_has_its_samples(subtests):
    for batch, strategy, expected in BATCHES:
        with subtests.test(batch=batch, strategy=strategy):
            found = SearchSpace(spec(effective_batch_size=batch))._batches(strategy)
            assert found == expected
            assert {micro * accumulation * 8 // shared for shared, micro, accumulation in found} == {batch}


def test_a_fixed_micro_batch_of_two_is_of_whole_samples():
    two = {"per_device_train_batch_size": 2}
    assert SearchSpace(spec(effective_batch_size=16, training=two))._batches("zero3") == [(1, 2, 1)]
    assert SearchSpace(spec(effective_batch_size=2, training=two))._batches("zero3") == []


def test_a_batch_may_have_fewer_samples_than_there_are_devices():
    assert settle(JobSpec(**LONG, effective_batch_size=2), "full").effective_batch_size == 2
    with pytest.raises(InputError, match="batch_size=3 cannot be split over 8 devices: use a multiple of 2"):
        settle(JobSpec(**LONG, effective_batch_size=3), "full")
    for whole in ({"seq_len": 2048}, {"strategy": "fsdp2"}, {"padded": True}):
        with pytest.raises(InputError, match="batch_size=2 cannot be split over 8 devices: use a multiple of 8"):
            settle(JobSpec(**{**LONG, **whole}, effective_batch_size=2), "full")


SHARED = Choice("zero3", 1, 16, 1.0, "adamw_torch_fused", "bfloat16", knobs=frozenset({"loss_chunk_size"}), shared=4)


def profile(choice: Choice = SHARED) -> SimpleNamespace:
    preset = choice.configured(spec().preset)
    memory_args = MemoryArguments(loss_chunk_size=1024, memory_profile="balanced", target_memory_utilization=0.9)
    return SimpleNamespace(choice=choice, preset=preset, memory_args=memory_args, name="balanced")


def test_the_command_starts_what_was_planned(monkeypatch):
    """accelerate reads who shares samples from the environment, the recipe the rest."""
    words = shlex.split(launch_command(spec(), profile()))
    environment = dict(word.split("=") for word in words[: words.index("accelerate")])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    handler = DeepSpeedSequenceParallelConfig()
    assert (handler.sp_seq_length_is_variable, handler.sp_attn_implementation) == (True, "sdpa")
    sizes = ParallelismConfig()
    assert (sizes.sp_size, sizes.dp_shard_size, sizes.sp_backend) == (4, 2, "deepspeed")
    start = next(place for place, word in enumerate(words) if word.endswith("pretrain.py"))
    parsed = parse(words[start + 1 : words.index("--dataset_name")])
    assert (parsed.recipe.max_length, parsed.recipe.effective_batch_size) == (131072, 32)
    assert parsed.recipe.attn_implementation == "sdpa" and parsed.memory.loss_chunk_size == 1024
    assert parsed.training["per_device_train_batch_size"] == 1
    job = choice_job(spec(), SHARED)
    assert (job.shared, job.world_size, job.fields["gradient_accumulation_steps"]) == (4, 8, 16)


def test_a_preset_of_one_device_shares_the_samples_of_all_that_are_launched(monkeypatch):
    """As the command has it: its preset is of one."""
    from hf_memopt.presets import get_preset

    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
    preset = get_preset("h100_80gb", "full", "zero3")
    assert (preset.sequence_parallel, preset.batches(8)) == (4, 2)
    assert preset.gradient_accumulation_steps == preset.effective_batch_size // preset.micro_batch_size


def test_a_proposal_of_more_devices_says_who_shares_samples():
    more = replace(spec(), preset=replace(spec().preset, processes=16))
    assert _texts(["a change"], spec(), more, SHARED)[1].endswith(", strategy zero3, samples shared by 4")
    assert _texts([], spec(), more, replace(SHARED, shared=1))[0].endswith(", strategy zero3")


def test_the_words_of_a_choice():
    assert summarize(SHARED).endswith("all layers checkpointed, loss in chunks, samples shared by 4 devices")
    assert "1×16, shared by 4, ckpt" in _brief(SHARED) and "shared" not in _brief(replace(SHARED, shared=1))
    assert SHARED.levers == replace(SHARED, shared=1).levers + 1
    assert "shared" in SHARED.features and "shared" not in replace(SHARED, shared=1).features
    sizes = accelerate_config(profile())["parallelism_config"]
    assert sizes["parallelism_config_sp_size"] == 4 and sizes["parallelism_config_dp_shard_size"] == 2


@pytest.fixture(scope="module")
def search():
    return start_search(settle(JobSpec(**LONG, effective_batch_size=8), "full"), lambda text: None)


@pytest.mark.slow
def test_a_sketch_shares_what_grows_with_samples(search):
    """And with it a micro-batch's time, but what devices then send each other."""
    plain = replace(SHARED, knobs=frozenset(), accumulation=4)
    whole = replace(plain, shared=1, accumulation=1)
    (fixed, moving), (of_whole, all_moving) = (search.sketch.device_bytes(choice) for choice in (plain, whole))
    assert moving == pytest.approx(all_moving / 4, rel=0.02)
    assert fixed - moving == pytest.approx(of_whole - all_moving, rel=0.02)
    assert search.sketch.activations(plain) == search.sketch.activations(whole) / 4
    assert 1 < search.cost.step(plain) / search.cost.step(whole) < 1.1
    search.estimate([plain])
    estimate = search.estimates[plain]
    assert search.seconds[plain] == pytest.approx(estimate.step_seconds, rel=0.05)
    assert 0.8 < search.sketch_bytes[plain][0] / estimate.device_bytes < 1.05


@pytest.mark.slow
def test_a_plan_of_long_samples_shares_them(tmp_path, monkeypatch):
    """Four of eight devices share each, of 28 heads: a whole one has no room. The files start the same."""
    small = {"memory": 24 * 2**30, "host_memory": None}
    found = plan_job(JobSpec(**LONG, effective_batch_size=8, **small))
    shared = found.usual
    assert shared.choice.shared > 1 and f"shared by {shared.choice.shared}" in shared.estimate.estimated
    assert shared.estimate.device_bytes <= 24 * 2**30
    monkeypatch.chdir(tmp_path)
    write_files(found.spec, shared, "run")
    written = (tmp_path / "run" / "accelerate.yaml").read_text()
    assert f"parallelism_config_sp_size: {shared.choice.shared}" in written
    assert "--attn_implementation sdpa" in (tmp_path / "run" / "launch.sh").read_text()


@pytest.mark.slow
def test_an_estimate_proposes_who_shares_samples(command, tmp_path):
    """In words that, added to the command, make it fit."""
    CONFIG.save_pretrained(tmp_path)
    words = ["estimate", str(tmp_path), "--hardware", "rtx_4090x8", "--seq-len", "131072", "--strategy", "zero2"]
    words += ["--method", "full", "--json"]
    code, output, _ = command(*words)
    change = json.loads(output)["levers"][0]["change"]
    assert code == 1 and "--sequence-parallel 4" in change
    added = shlex.split(change.replace(" and ", " "))
    code, output, _ = command(*words, *added)
    assert code == 0 and "samples shared by 4" in json.loads(output)["estimated"]
