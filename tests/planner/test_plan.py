"""plan: the fastest settings that fit."""

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from conftest import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from hf_memopt import InputError, MemoryArguments, list_architectures, plan
from hf_memopt.compatibility.setup import refusals
from hf_memopt.estimator.accounting.ledger import Ledger
from hf_memopt.estimator.accounting.work import Kernel, Work, extended
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.tracing.parallel import on_all_cores, one_by_one
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.hardware import list_hardware
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.levers.facts import Facts
from hf_memopt.planner.choice_jobs import choice_job, start_search
from hf_memopt.planner.choices import Choice, list_choices, memory_arguments
from hf_memopt.planner.cost import Cost
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.settle import PLANNED_TASKS
from hf_memopt.units import GIB

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 2000,
}


def config(layers: int = 3, **changes):
    return AutoConfig.for_model(num_hidden_layers=layers, **{**SHAPE, **changes})


def spec_for(config, method: str = "full", seq_len: int = 256, hardware: str = "cpu", batch: int = 4) -> JobSpec:
    """Without a limit, with one optimizer."""
    preset = resolve_preset(hardware, method)
    optim = {"optim": preset.training["optim"]}
    return JobSpec(
        model=config,
        config=config,
        preset=preset,
        method=method,
        memory=2**62,
        seq_len=seq_len,
        effective_batch_size=batch * preset.processes,
        training=optim,
    )


def small_spec(preset) -> JobSpec:
    """SmolLM2-135M, 64 samples of 256 tokens."""
    spec = JobSpec(model="smollm2-135m", config=load_config("smollm2-135m"), preset=preset, method=preset.method)
    return dataclasses.replace(spec, memory=2**40, seq_len=256, effective_batch_size=64)


def planned(spec: JobSpec, memory: float, method: str | None = None):
    preset = spec.preset
    return plan(
        spec.config,
        preset.hardware.name,
        spec.effective_batch_size,
        spec.seq_len,
        method or preset.method,
        memory=int(memory),
        training=spec.training,
    )


def least(spec: JobSpec) -> int:
    """Bytes that the smallest choice needs."""
    search = start_search(spec, lambda text: None)
    return search.estimates[search.smallest()].device_bytes


@pytest.fixture(scope="module")
def search():
    """Of a small model on the CPU."""
    spec = spec_for(config(2))
    return spec, start_search(spec, lambda text: None)


@pytest.fixture(scope="module")
def every(search):
    """The estimate of every choice, the fastest first."""
    spec, found = search
    jobs = [choice_job(spec, choice) for choice in found.choices]
    return dict(zip(found.choices, estimate_jobs(jobs, on_all_cores), strict=True))


# ---- the profiles


@pytest.mark.slow
def test_every_profile_is_the_fastest_that_fits_of_all_choices(search, every):
    spec, _ = search
    sizes = sorted({estimate.device_bytes for estimate in every.values()})
    for memory in (int(sizes[0] * 1.12), sizes[len(sizes) // 2], sizes[-1] * 2):
        made = planned(spec, memory)
        rooms = {name: int(memory * share) for name, (_, share) in PLAN_PROFILES.items()}
        assert [profile.name for profile in made] == [name for name, room in rooms.items() if sizes[0] <= room]
        for profile in made:
            fitting = [choice for choice in every if every[choice].device_bytes <= rooms[profile.name]]
            plain = [choice for choice in fitting if not choice.complexities] if profile.name == "safe" else []
            best = (plain or fitting)[0]
            assert profile.choice == best and profile.estimate.device_bytes == every[best].device_bytes
    assert not made.profiles[-1].choice.levers  # nothing is pulled where memory is plenty


@pytest.mark.slow
def test_sketches_are_near_estimates(search, every):
    """On the CPU, of every choice; docs/plans.md says so."""
    _, found = search
    for choice, estimate in every.items():
        assert found.sketch.device_bytes(choice)[0] == pytest.approx(estimate.device_bytes, rel=0.005), choice


@pytest.mark.slow
def test_profiles_rise(search, every):
    spec, found = search
    made = planned(spec, every[found.choices[0]].device_bytes)
    speeds = [profile.relative_speed for profile in made]
    assert speeds == sorted(speeds) and speeds[-1] == 1.0
    assert [profile.memory_args.memory_profile for profile in made] == [
        PLAN_PROFILES[profile.name][0] for profile in made
    ]
    assert [profile.memory_args.target_memory_utilization for profile in made] == [profile.share for profile in made]


@pytest.mark.slow
def test_a_profile_lives_within_its_budget_and_less_than_the_least_does_not():
    """Real training, evaluation, saving and resuming, on an allocator that ends where the budget does."""
    from planner_cpu import EVALUATED, lived_through

    spec = spec_for(config(2), seq_len=128, batch=8)
    spec = dataclasses.replace(spec, training={**spec.training, **EVALUATED})
    search = start_search(spec, lambda text: None)
    smallest = search.smallest()
    needed = search.estimates[smallest].device_bytes
    budget = int(needed * 1.2)
    made = planned(spec, budget)
    profile = made.profiles[-1]
    survived, peak = lived_through(spec, profile.choice, budget)
    assert survived and peak <= profile.estimate.device_bytes * 1.02
    assert lived_through(spec, smallest, int(needed * 0.95))[0] is False


@pytest.mark.slow
def test_any_takes_the_first_method_that_fits_and_says_why_not_the_others():
    small = config(2, hidden_size=256, intermediate_size=704)
    full, lora = (least(spec_for(small, method, 64)) for method in ("full", "lora"))
    assert lora < full
    made = planned(spec_for(small, "full", 64), (lora + full) / 2 / 0.94, "any")
    assert made.spec.preset.method == "lora" and made.profiles
    assert "full fine-tuning needs" in made.rejected[0].reason and "at least" in made.rejected[0].reason
    answer = json.loads(json.dumps(made.to_dict()))  # of a configuration object, which no command line can name
    assert answer["model"] == "llama" and answer["profiles"][0]["launch"] is None
    head, *profiles = str(made).splitlines()
    assert (
        head.startswith("llama on 1 × ") and len(profiles) == len(made.profiles) and " predicted, fits" in profiles[0]
    )


@pytest.mark.slow
def test_nothing_fits_but_a_shorter_sequence_would():
    spec = spec_for(config(2, vocab_size=200), seq_len=512)
    needed, shorter = least(spec), least(dataclasses.replace(spec, seq_len=256))
    made = planned(spec, shorter * 1.02 / 0.94)
    # Weights in bf16 lack less, and what lacks least is said.
    assert not made.profiles and 0 < made.missing_bytes <= (needed - shorter * 1.02) * 1.01
    assert any(change.startswith("--seq-len 256") for change in made.nearest), made.nearest
    smaller = [change for change in made.nearest if "a smaller model, trained from scratch): " in change]
    assert smaller and smaller[0].endswith("iB"), made.nearest


@pytest.mark.slow
def test_a_lack_of_host_memory_rules_choices_out():
    spec = spec_for(config(2), hardware="rtx_3060")
    search = start_search(spec, lambda text: None)
    choice = next(choice for choice in search.choices if choice.offloads)
    plain = next(choice for choice in search.choices if not choice.offloads)
    search.estimate([choice, plain])
    for one in (choice, plain):
        estimate = search.estimates[one]
        search.host_memory = HostMemory(estimate.host_bytes, "asked", assumed=False)
        assert search.fits(one, estimate.device_bytes)
        search.host_memory = HostMemory(estimate.host_bytes - 1, "asked", assumed=False)
        assert not search.fits(one, estimate.device_bytes)
        # An assumption rules out what depends on the host, and not the way of the weights to the device.
        search.host_memory = HostMemory(estimate.host_bytes - 1, "a usual box")
        assert search.fits(one, estimate.device_bytes) == (one is plain)


@pytest.mark.slow
def test_a_job_that_cannot_be_estimated_says_why():
    search = start_search(spec_for(config(2)), lambda text: None)
    search.build = lambda choice: dataclasses.replace(search.sketch.job, attn_implementation="flash_attention_9")
    with pytest.raises(InputError, match="flash_attention_9"):
        search.fastest_for([2**40])
    assert len(search.estimates) <= 4  # a choice or two may fail where others work


# ---- what may be chosen


@settings(max_examples=60, deadline=None)
@given(
    hardware=st.sampled_from(list_hardware()),
    devices=st.sampled_from([1, 2, 8, 128]),
    model=st.sampled_from([name for name in list_architectures() if infer_task(load_config(name)) in PLANNED_TASKS]),
    method=st.sampled_from(["full", "lora", "qlora"]),
    chunked=st.booleans(),
)
@pytest.mark.slow
def test_nothing_that_compatibility_refuses_is_ever_a_choice(hardware, devices, model, method, chunked):
    preset = resolve_preset(f"{hardware}x{devices}", method)
    given = MemoryArguments(loss_chunk_size=512 if chunked else None)
    read = load_config(model)
    spec = JobSpec(
        model=model, config=read, preset=preset, effective_batch_size=4 * devices, seq_len=512, memory_args=given
    )
    found = list_choices(spec)
    assert found or hardware.startswith("apple_") or hardware == "rx_6750_xt" or method == "qlora"
    for choice in found:
        configured = choice.configured(preset)
        assert refusals(configured.setup()) == []
        fields = {**configured.training, **choice.fields(configured)}
        assert not list(Facts.of_settings(memory_arguments(given, choice), fields, choice.engine).feature_refusals())
        assert choice.micro_batch * choice.accumulation * devices == 4 * devices * choice.shared


def test_a_choice_becomes_hugging_faces_words():
    preset = resolve_preset("rtx_4090", "full")
    choice = Choice("none", 2, 4, 1 / 3, "adamw_8bit", "float32")
    kwargs = choice.configured(preset).training["activation_checkpointing_kwargs"]
    assert kwargs == {"use_reentrant": False, "every_n_layers": 3} and not choice.memory_fields()
    uneven = dataclasses.replace(choice, checkpointed=2 / 3, knobs=frozenset({"loss_chunk_size"}))
    assert uneven.memory_fields() == {"loss_chunk_size": 1024, "checkpoint_ratio": 2 / 3}
    offloaded = dataclasses.replace(choice, checkpointed=1.0, inputs_offloaded=True).configured(preset)
    assert offloaded.training["activation_checkpointing_kwargs"] == {"use_reentrant": False, "offload": True}
    kept = dataclasses.replace(choice, checkpointed=0.0).configured(preset).training
    assert "activation_checkpointing" not in kept and "activation_checkpointing_kwargs" not in kept
    compiled = dataclasses.replace(preset, training=MappingProxyType({**preset.training, "torch_compile": True}))
    compressed = dataclasses.replace(choice, knobs=frozenset({"activation_compression"}))
    for other, compiles in ((choice, True), (compressed, False), (dataclasses.replace(choice, streamed=1.0), False)):
        assert other.configured(compiled).training.get("torch_compile", False) is compiles


@pytest.mark.slow
def test_what_the_user_sets_stays():
    made = plan(
        config(2),
        "cpu",
        8,
        128,
        "full",
        training={"per_device_train_batch_size": 4, "optim": "adafactor"},
        memory_args=MemoryArguments(loss_chunk_size=64),
    )
    for profile in made:
        assert profile.choice.micro_batch == 4 and profile.choice.optim == "adafactor"
        assert (
            profile.estimate.training_arguments["optim"] == "adafactor" and profile.memory_args.loss_chunk_size == 64
        )


@pytest.mark.slow
def test_what_is_given_of_the_batch_decides_the_effective_batch():
    small = config(2)
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    made = plan(small, "cpu", None, 64, "full", training=given)
    assert made.spec.effective_batch_size == 6
    assert {(profile.choice.micro_batch, profile.choice.accumulation) for profile in made} == {(2, 3)}
    made = plan(small, "cpu", 8, 64, "full", training={"gradient_accumulation_steps": 4})
    assert {(profile.choice.micro_batch, profile.choice.accumulation) for profile in made} == {(2, 4)}
    with pytest.raises(InputError, match="leave one out"):
        plan(small, "cpu", 8, 64, "full", training=given | {"per_device_train_batch_size": 4})


@pytest.mark.slow
def test_a_model_without_checkpointing_is_planned_without_it():
    from transformers import AutoConfig

    xlnet = AutoConfig.for_model("xlnet", vocab_size=64, d_model=32, n_layer=3, n_head=2, d_inner=64)
    made = plan(xlnet, "rtx_4090", 4, 32, "full")
    assert [profile.name for profile in made] == list(PLAN_PROFILES)
    assert not any(
        profile.choice.checkpointed or "activation_checkpointing" in profile.preset.training for profile in made
    )


@pytest.mark.slow
def test_a_method_whose_weights_are_too_large_is_not_traced():
    said = []
    made = plan("qwen3-1.7b", "rtx_4090", 4, 128, "any", memory=6 * GIB, say=said.append)
    assert made.spec.preset.method == "qlora"  # LoRA's balanced profile depends on host memory
    assert not any("full" in text for text in said)
    reason = next(each.reason for each in made.rejected if each.settings == "full fine-tuning")
    assert reason.startswith("full fine-tuning needs at least 12.82 GiB for float32 weights and gradients alone")


# ---- what it costs


def test_products_are_counted_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config(2), attn_implementation="eager")
    ids = torch.ones(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as truth:
        model(input_ids=ids, labels=ids).loss.backward()
    ledger = Ledger()
    ledger.work, ledger.step = Work(), 1
    with ledger:
        ledger.begin("forward", "activations")
        model(input_ids=ids, labels=ids).loss.backward()
    counted = sum(kernel.flops * times for kernel, times in ledger.work.kernels.items())
    assert counted == truth.get_total_flops() > 0


def test_kernels_grow_with_layers():
    few, more = Kernel(False, 10, 5), Kernel(True, 0, 7)
    assert extended({few: 3, more: 1}, {few: 5, more: 1}, 4) == {few: 11, more: 1}


@pytest.mark.slow
def test_recomputing_costs_a_forward_pass(search):
    _, found = search
    cost = Cost(found.sketch)
    plain = next(choice for choice in found.choices if not choice.levers and choice.micro_batch == 1)
    whole = dataclasses.replace(plain, checkpointed=1.0)
    half = dataclasses.replace(plain, checkpointed=0.5)
    assert 1.1 < cost.step(whole) / cost.step(plain) < 1.5  # a forward pass beside a forward and a backward
    assert cost.step(half) == pytest.approx((cost.step(whole) + cost.step(plain)) / 2, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["rtx_4090", slow("h100_80gb")])
def test_seconds_are_the_estimates_where_a_micro_batch_fits_the_cache(hardware):
    """Of one sample of 2,048 tokens tensors take 8 and 32 MiB, and caches hold 50 and 72 MiB; of eight none fits."""
    wide = config(2, hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=8)
    spec = spec_for(wide, "lora", seq_len=2048, hardware=hardware, batch=8)
    search = start_search(spec, lambda text: None)
    plain = [choice for choice in search.choices if not choice.levers and not choice.checkpointed]
    estimates = estimate_jobs([choice_job(spec, choice) for choice in plain])
    assert len(plain) == 4
    for choice, estimate in zip(plain, estimates, strict=True):
        assert search.seconds[choice] == pytest.approx(estimate.step_seconds, rel=0.04), choice.micro_batch


@pytest.mark.slow
def test_seconds_are_of_one_step_where_two_are_traced():
    """A vision tower that text does not reach gets no gradients, as two steps show."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 1000, **sizes}
    tower = {"hidden_size": 64, "intermediate_size": 128, "image_size": 28, "patch_size": 14, **sizes}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=tower, mm_tokens_per_image=4)
    spec = spec_for(config, "lora", hardware="rtx_4090")
    search = start_search(spec, lambda text: None)
    choice = next(one for one in search.choices if one.micro_batch == 4 and not one.levers and not one.checkpointed)
    (estimate,) = estimate_jobs([choice_job(spec, choice)])
    assert search.seconds[choice] == pytest.approx(estimate.step_seconds, rel=0.02)


def exchanged(cost: Cost, choice: Choice) -> tuple[float, float]:
    return cost.steps.exchanged(cost.computed(choice, 0.0))


@pytest.mark.slow
def test_what_engines_exchange():
    """ZeRO-3 gathers weights for every micro-batch, DDP reduces gradients once a step; both wait for the link."""
    search = start_search(spec_for(config(2), hardware="a100_80gbx8"), lambda text: None)
    zero3 = next(one for one in search.choices if one.strategy == "zero3" and one.accumulation == 4)
    ddp = dataclasses.replace(zero3, strategy="ddp")

    def seconds(choice: Choice, sketch) -> float:
        per_micro_batch, per_step = exchanged(Cost(sketch), choice)
        return choice.accumulation * per_micro_batch + per_step

    assert seconds(zero3, search.sketch) > 3 * seconds(ddp, search.sketch) > 0
    device = search.sketch.job.device
    slow = dataclasses.replace(device, peer_link=device.peer_link / 10)
    slower = dataclasses.replace(search.sketch, job=dataclasses.replace(search.sketch.job, device=slow))
    hops = dataclasses.replace(search.sketch, trained=0)
    passing = seconds(ddp, search.sketch) - seconds(ddp, hops)
    assert seconds(ddp, slower) - seconds(ddp, hops) == pytest.approx(10 * passing)


@pytest.mark.slow
def test_adapters_that_fit_train_with_ddp():
    """What ZeRO-2 gains by sharding an adapter's step is not worth an engine."""
    assert plan(config(8), "a100_80gbx2", 8, 256, "lora").profiles[-1].preset.strategy == "ddp"


@pytest.mark.slow
def test_a_disk_is_slower_than_the_host_and_more_drives_are_faster():
    """ZeRO-3: without offloading, in host memory, on one drive a machine, on four."""
    search = start_search(spec_for(config(2), hardware="a100_80gbx8"), lambda text: None)
    zero3 = next(one for one in search.choices if one.strategy == "zero3" and one.accumulation == 4)
    cpu, nvme = (dataclasses.replace(zero3, strategy=f"zero3_offload_{to}") for to in ("cpu", "nvme"))
    one, four = Cost(search.sketch), Cost(search.sketch, drives=4)
    assert one.step(zero3) < one.step(cpu) < four.step(nvme) < one.step(nvme)
    assert four.step(cpu) == one.step(cpu)
    # With every micro-batch weights come twice, and with three of four gradients come and go. On a disk so small a
    # model's weights stay in host memory.
    waits = [exchanged(one, choice)[0] for choice in (zero3, cpu, nvme)]
    link = search.sketch.job.device.host_link * 0.8
    assert waits[1] - waits[0] == pytest.approx((2 * search.sketch.loaded + 3 * search.sketch.trained) / 8 / link)
    assert waits[2] == waits[1]


@pytest.fixture
def two_cores(monkeypatch):
    """For copies of this process, however many cores there are, and however many workers of pytest."""
    monkeypatch.setattr("hf_memopt.estimator.tracing.parallel._cores", lambda: 2)


@pytest.mark.usefixtures("nothing_frozen", "two_cores")
@pytest.mark.slow
def test_traces_in_copies_of_the_process_are_the_same(search):
    spec, found = search
    jobs = [choice_job(spec, choice) for choice in found.choices[:3]]
    assert estimate_jobs(jobs, on_all_cores) == estimate_jobs(jobs, one_by_one)


@pytest.mark.usefixtures("two_cores")
def test_a_copy_that_is_ended_is_done_without():
    parent = os.getpid()

    def work(item: int) -> int:
        if os.getpid() != parent:
            os._exit(9)  # as the system does when memory runs out
        return item * 2

    assert on_all_cores(work, [1, 2, 3]) == [2, 4, 6]


@pytest.mark.usefixtures("two_cores")
def test_a_copy_that_is_stuck_is_done_without(monkeypatch):
    parent = os.getpid()
    monkeypatch.setattr("hf_memopt.estimator.tracing.parallel._PATIENCE", 0.5)

    def work(item: int) -> int:
        if os.getpid() != parent:
            threading.Event().wait()  # as on a lock that a thread of the parent held when it was copied
        return item * 2

    assert on_all_cores(work, [1, 2, 3, 4]) == [2, 4, 6, 8]


@pytest.mark.usefixtures("two_cores")
def test_an_error_in_a_copy_is_raised_here():
    parent = os.getpid()

    def work(item: int) -> int:
        if os.getpid() != parent:
            raise InputError(f"item {item}")
        return item

    with pytest.raises(InputError, match="item"):
        on_all_cores(work, [1, 2, 3, 4])
