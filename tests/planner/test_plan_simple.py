"""Plans prefer what an expert would set: plain settings, unless what costs complexity saves a tenth of the time."""

from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from test_plan import config, least, spec_for

from hf_memopt import InputError, plan
from hf_memopt.cli.answer_printed import host_lines
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.estimator.tracing import model
from hf_memopt.estimator.tracing.model import count_weights
from hf_memopt.hardware import list_hardware
from hf_memopt.hardware.catalog import catalog_entry
from hf_memopt.hardware.host_memory import HostMemory, assumed_host_memory, own_host_memory
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner import alternatives, streamed_weights
from hf_memopt.planner import plan as plans
from hf_memopt.planner import search as search_module
from hf_memopt.planner.alternatives import _families, left_out, plain_alternative
from hf_memopt.planner.choice_jobs import baseline_jobs, start_search
from hf_memopt.planner.choices import Choice, list_choices
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.plan import _safe_left_out
from hf_memopt.planner.search import Search
from hf_memopt.planner.settle import of_one_length, settle
from hf_memopt.planner.sketch import baselines, make_sketch, traced_jobs
from hf_memopt.presets import preset_by_name
from hf_memopt.units import GIB


@pytest.fixture(scope="module")
def spec_and_search():
    """On a card with host memory beside it: what depends on the host, rounds, or does neither."""
    spec = spec_for(config(2), hardware="rtx_3060", batch=8)
    spec.training.pop("optim")
    search = start_search(spec, lambda text: None)
    # The sketches stand for the estimates: what is tested here is the choice between them.
    for choice in search.choices:
        size = int(search.needs(choice))
        search.estimates[choice] = Estimate(size, size, size, 0, "forward", {}, {}, 2**40, {}, ())
    return spec, search


def _budgets(search):
    sizes = sorted({search.estimates[choice].device_bytes for choice in search.choices})
    step = max(1, len(sizes) // 40)
    for place in range(0, len(sizes), step):
        # Most of what so small a model needs is the context, so shares of a memory would hold all choices or none.
        yield [sizes[min(place + more, len(sizes) - 1)] for more in (0, 0, step, 2 * step)]


@pytest.mark.slow
def test_what_costs_complexity_saves_more_than_a_tenth_of_the_time(spec_and_search):
    _, search = spec_and_search
    plain = [choice for choice in search.choices if search.is_plain(choice)]
    assert plain and len(plain) < len(search.choices)
    for place, choice in enumerate(search.choices):
        if choice.complexities and (slower := [one for one in search.choices[place:] if search.is_plain(one)]):
            assert search.seconds[choice] < 0.9 * min(search.seconds[one] for one in slower), choice


def test_rounding_beside_a_rounding_optimizer_costs_too():
    """A card's QLoRA preset has an 8-bit optimizer, which does not make 8-bit activations free."""
    plain = Choice("none", 4, 8, 1.0, "paged_adamw_8bit", "bfloat16")
    assert replace(plain, knobs=frozenset({"activation_compression"})).complexities == plain.complexities + 1
    both = replace(plain, knobs=frozenset({"activation_compression"}), inputs_offloaded=True)
    assert both.complexities == plain.complexities + 2


@pytest.mark.slow
def test_fsdp2_widens_what_is_trained_and_nothing_else():
    """accelerate's fsdp2_prepare_model: frozen weights stay in 16 bits, or in 4."""
    loaded, ranks = {}, 2
    for method in ("full", "lora"):
        spec = spec_for(config(8, vocab_size=200), method, hardware="rtx_3060x2", batch=1)
        jobs = baseline_jobs(spec, list_choices(spec))[:1]
        sketch = make_sketch(jobs * 4, traced_jobs(jobs) * 4)
        held = sketch._rank_bytes(Choice("fsdp2", 1, 1, 0.0, "adamw_torch_fused", "bfloat16"))
        loaded[method] = held["parameters"] * ranks / sketch.loaded
    assert loaded["full"] == pytest.approx(2, rel=0.01)
    assert loaded["lora"] == pytest.approx(1, rel=0.01)


@pytest.mark.slow
def test_safe_is_plain_where_anything_plain_fits(spec_and_search):
    _, search = spec_and_search
    plain, others = 0, 0
    for budgets in _budgets(search):
        safe, *rest = search.fastest_for(budgets)
        fitting = [choice for choice in search.choices if search.fits(choice, budgets[0])]
        if any(search.is_plain(choice) for choice in fitting):
            assert search.is_plain(safe)
            plain += 1
        elif safe is not None and safe.offloads:
            assert all(choice.offloads for choice in search.choices if search.fits(choice, budgets[-1]))
            others += 1
        if safe is None:
            assert not any(choice and not choice.offloads for choice in rest) or all(one.offloads for one in fitting)
    assert plain and others


@pytest.mark.slow
def test_a_larger_budget_is_never_slower(spec_and_search):
    _, search = spec_and_search
    for budgets in _budgets(search):
        seconds = [search.seconds[choice] for choice in search.fastest_for(budgets) if choice is not None]
        assert seconds == sorted(seconds, reverse=True)


def test_profiles_and_the_plain_alternative_agree_with_the_estimates_that_are_shown(spec_and_search):
    """Where estimates order two choices otherwise than the sketches do, a larger budget keeps the smaller one's."""
    spec, search = spec_and_search
    fast, plain = (
        search.choices[0],
        next(one for one in search.choices if search.is_plain(one) and one.checkpointed == 1),
    )
    assert search.relative_time(plain, fast) == search.seconds[plain] / search.seconds[fast] > 1
    before = dict(search.estimates)
    search.estimates[fast] = replace(before[fast], step_seconds=2.0, tokens_per_second=100.0)
    search.estimates[plain] = replace(before[plain], step_seconds=1.0, tokens_per_second=200.0)
    try:
        assert search.relative_time(plain, fast) == 0.5
        profile = SimpleNamespace(share=0.9, choice=fast, preset=fast.configured(spec.preset), tokens_per_second=100.0)
        search.fits = lambda choice, budget: choice == plain
        assert plain_alternative(search, profile, spec.memory).tokens_per_second == 200
    finally:
        search.estimates = before
        del search.fits


def test_the_plain_alternative_is_named_with_what_it_loses(spec_and_search):
    spec, search = spec_and_search
    fast = search.choices[0]
    profile = SimpleNamespace(share=0.9, choice=fast, preset=fast.configured(spec.preset))
    profile.seconds = search.seconds[fast]
    profile.tokens_per_second = spec.effective_batch_size * spec.seq_len / profile.seconds
    alternative = plain_alternative(search, profile, spec.memory)
    assert "all layers checkpointed" in alternative.settings and "host" not in alternative.settings
    assert alternative.fits and alternative.relative_time > 1
    profile.choice = next(one for one in search.choices if search.is_plain(one) and one.checkpointed == 1)
    assert plain_alternative(search, profile, spec.memory) is None


_KINDS = [
    ({}, ["no memory feature", "all activations kept"]),
    ({"strategy": "zero2"}, ["zero2"]),
    ({"checkpointed": 1.0}, []),
    ({"checkpointed": 1.0, "inputs_offloaded": True}, ["activations in host memory"]),
    ({"knobs": frozenset({"activation_offload"})}, ["activations in host memory"]),
    ({"knobs": frozenset({"activation_compression"})}, ["8-bit activations"]),
    ({"knobs": frozenset({"loss_chunk_size"})}, ["all activations kept"]),
    ({"streamed": 0.5}, ["all activations kept", "some layers' weights in host memory"]),
    ({"streamed": 1.0, "checkpointed": 1.0}, []),
]


def test_the_kinds_of_settings_that_a_choice_is_of(subtests):
    for more, families in _KINDS:
        with subtests.test(more=str(more), families=str(families)):
            assert _families(replace(Choice("none", 1, 1, 0.0, "adamw_torch", "bfloat16"), **more)) == families


@pytest.mark.parametrize(("method", "relative_time"), [("full", 2.0), ("lora", 1.5)])
def test_an_alternative_is_compared_by_estimates_of_its_own_method(method, relative_time):
    choice = Choice("none", 1, 1, 0.0, "adamw_torch", "bfloat16")
    search = SimpleNamespace(
        seconds={choice: 3.0},
        relative_time=lambda choice, other: 2.0,
        needs=lambda choice: 1000,
        caution=1.1,
        estimates={},
    )
    profile = SimpleNamespace(preset=SimpleNamespace(method=method), choice=choice, seconds=2.0, tokens_per_second=300)
    found = alternatives._alternative("full", search, choice, True, profile)
    assert (found.relative_time, found.tokens_per_second) == (relative_time, 300 / relative_time)
    assert (found.method, found.device_bytes, found.estimated) == ("full", 1100, False)


def test_reasons_for_what_was_left_out_agree_with_what_was_chosen(spec_and_search):
    spec, search = spec_and_search
    slowest = max((one for one in search.choices if one.offloads), key=search.seconds.get)
    for chosen in (slowest, next(one for one in search.choices if search.is_plain(one))):
        for rejected in left_out(search, spec.memory_budget, [chosen]):
            if chosen.offloads:  # "too small a gain for depending on the host" beside a choice that depends on it
                assert "depending on host" not in rejected.reason, rejected
            if "too small a gain" in rejected.reason:
                assert "predicted to take 0." in rejected.reason or "take 1.00" in rejected.reason
                assert not rejected.slower
            elif "predicted to take" in rejected.reason:
                assert rejected.slower and "predicted to take 0." not in rejected.reason
            else:
                assert not rejected.slower and "GiB" in rejected.reason


def test_what_lacks_host_memory_is_left_out_for_that(spec_and_search):
    """Not because it were too slow: it was never a choice."""
    spec, search = spec_and_search
    nothing = HostMemory(1, "a box without memory", assumed=False)
    short = Search(list(search.choices), search.sketch, None, None, host_memory=nothing)
    assert short.short_of_host and not any(choice.offloads for choice in short.choices)
    plain = next(one for one in short.choices if short.is_plain(one))
    reasons = {rejected.settings: rejected.reason for rejected in left_out(short, spec.memory_budget, [plain])}
    assert "of host memory for each process" in reasons["activations in host memory"]


def test_checkpointed_inputs_go_to_the_host_by_one_way(spec_and_search):
    """transformers' own: through activation_offload they stay on the device once backward has fetched them."""
    _, search = spec_and_search
    assert any(choice.inputs_offloaded for choice in search.choices)
    assert not any("activation_offload" in choice.knobs and choice.checkpointed == 1 for choice in search.choices)


def test_why_safe_depends_on_the_host_is_said():
    choice = SimpleNamespace(offloads=1)
    assert "every profile depends" in _safe_left_out([SimpleNamespace(name="safe", choice=choice)])[0].reason
    for hardware, says in (("rtx_4090", True), ("apple_m2_16gb", False)):  # which has no memory but the device's
        profile = SimpleNamespace(name="balanced", choice=choice, preset=resolve_preset(hardware, "lora"))
        assert ("without host memory" in _safe_left_out([profile])[0].reason) == says


@pytest.mark.slow
def test_any_shows_every_method_that_fits():
    made = plan(config(2), "rtx_3060", 8, 128, "any")
    assert made.spec.preset.method == "full" == made.methods[0].method and made.methods[0].estimated
    assert [one.method for one in made.methods] == ["full", "lora", "qlora"]
    assert all(one.device_bytes and one.tokens_per_second for one in made.methods)
    assert [one.to_dict()["estimated"] for one in made.methods] == [True, False, False]


# ---- host memory


def test_host_memory_is_assumed_small():
    assert assumed_host_memory(catalog_entry("t4")).bytes == 12 * GIB  # free Colab has 12.7 GB
    assert assumed_host_memory(catalog_entry("rtx_4090")).bytes < 32 * GIB
    assert assumed_host_memory(catalog_entry("h100_80gb")).bytes <= 256 * GIB
    for name in list_hardware():
        host = assumed_host_memory(catalog_entry(name))
        assert host.assumed and host.source, name
        assert host.bytes <= 256 * GIB or not catalog_entry(name).discrete_memory, name
    server = assumed_host_memory(catalog_entry("a100_pcie_80gb"))
    assert server == assumed_host_memory(catalog_entry("a100_80gb")) != assumed_host_memory(catalog_entry("l4"))


def test_unified_memory_is_the_machines():
    device = catalog_entry("m2_24gb")
    assert assumed_host_memory(device).bytes == 24 * GIB > device.memory
    assert "unified" in assumed_host_memory(device).source


def test_on_this_machine_it_is_asked(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=20 * GIB))
    assert own_host_memory(1).bytes == 20 * GIB and not own_host_memory(1).assumed
    assert own_host_memory(4).bytes == 5 * GIB and "free on this machine" in own_host_memory(4).source


def test_the_plan_says_what_it_assumes_and_needs():
    said = " ".join(host_lines(GIB, HostMemory(4 * GIB, "--host-memory", assumed=False)))
    assert "of 4.00 GiB there (--host-memory)" in " ".join(said.split())
    assert " ".join(" ".join(host_lines(GIB)).split()).endswith("1.00 GiB of host memory a process")
    line = " ".join(" ".join(host_lines(5 * GIB, HostMemory(4 * GIB, "a small box"))).split())
    assert "5.00 GiB of host memory a process" in line and "4.00 GiB assumed (a small box; --host-memory)" in line
    assert line.endswith("too little to load the weights through, where that holds")


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", [name for name in list_hardware() if catalog_entry(name).unified_memory])
def test_unified_memory_is_not_offloaded_to_itself(name):
    for method in ("full", "lora"):
        try:
            preset = resolve_preset(name, method)
        except InputError:
            continue
        spec = JobSpec(
            model="qwen3-0.6b",
            config=load_config("qwen3-0.6b"),
            preset=preset,
            effective_batch_size=2,
            seq_len=512,
            training={"per_device_train_batch_size": 1},
        )
        assert not any(choice.offloads for choice in list_choices(spec))


# ---- where nothing fits


@pytest.mark.slow
def test_where_no_single_change_fits_a_combination_is_found():
    """LoRA alone does not fit, nor do shorter samples: both together do."""
    small = config(2, hidden_size=256, intermediate_size=704, vocab_size=200)
    both = least(spec_for(small, "lora", 256))
    alone = min(least(spec_for(small, "full", 128)), least(spec_for(small, "lora", 512)))
    assert both < alone
    fields = {"optim": "adamw_torch"}
    made = plan(small, "cpu", 4, 512, "full", memory=int(both * 1.02 / 0.94), training=fields)
    assert not made.profiles
    assert any("--method lora and --seq-len 256" in change for change in made.nearest), made.nearest
    assert not any(change.startswith("--seq-len 256:") for change in made.nearest)


@pytest.mark.parametrize(("shares", "traced"), [({0.0}, {False}), ({1.0}, {True}), ({0.0, 0.5}, {False, True})])
def test_only_the_checkpointing_that_a_choice_needs_is_traced(shares, traced):
    jobs = baselines(lambda samples, checkpointed: (samples, checkpointed), shares, fewest=2)
    assert set(jobs) == {(samples, checkpointed) for checkpointed in traced for samples in (2, 4)}


def test_a_model_is_built_once_to_count_its_weights(monkeypatch):
    built = []
    make_model = model.make_model
    monkeypatch.setattr(model, "make_model", lambda settings: built.append(settings) or make_model(settings))
    sizes = [count_weights(config(layers, hidden_size=40), "causal-lm") for layers in (2, 3, 2)]
    assert len(built) == 2 and sizes[0] == sizes[2] < sizes[1]


def test_what_the_weights_rule_out_is_sketched_with_one_sample_alone(spec_and_search):
    spec, search = spec_and_search
    smallest = start_search(spec, lambda text: None, smallest=True)
    assert {(one.micro_batch, one.checkpointed) for one in smallest.choices} == {(1, 1.0)}
    least = smallest.one_sample("none")
    assert smallest.sketch.device_bytes(least) == search.sketch.device_bytes(least)


@pytest.mark.parametrize("written", ["h100_80gb_x8", "h100_80gbx8", "8xH100", "H100 x 8"])
def test_all_spellings_of_a_box_are_one_job(written):
    preset = resolve_preset(written, "lora")
    spec = settle(JobSpec(model="llama-3.2-1b", hardware=written, method="lora"), "lora")
    assert (preset.hardware.name, preset.processes, preset.strategy) == ("h100_80gb", 8, "none")
    assert spec.effective_batch_size == 32


@pytest.mark.parametrize(
    ("steps", "quick", "last"), [(None, False, True), (None, True, True), (2, False, False), (2, True, True)]
)
def test_what_is_given_is_left_open_before_changes_are_looked_for(steps, quick, last, monkeypatch):
    asked, training = [], {"gradient_accumulation_steps": steps} if steps else {}
    monkeypatch.setattr(plans, "_answer", lambda spec, methods, say, last: asked.append(last) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plan("llama-3.2-1b", "rtx_3060", 4, 128, "lora", training=training, quick=quick)
    assert asked == [last]


def test_methods_are_compared_by_the_same_samples():
    spec = JobSpec(model="llama-3.2-1b", config=load_config("llama-3.2-1b"), hardware="a100_40gb")
    usual = {method: resolve_preset(spec.hardware, method).seq_len for method in ("full", "lora", "qlora")}
    assert len({*usual.values()}) > 1
    assert of_one_length(spec, tuple(usual)).seq_len == max(usual.values())
    asked = replace(spec, seq_len=100)
    assert of_one_length(asked, tuple(usual)) == asked and of_one_length(spec, ("full",)) == spec


@pytest.mark.parametrize(("hardware", "batch"), [("rtx_4090", 32), ("a100_80gb", 32), ("rtx_3090x3", 33)])
def test_the_effective_batch_is_the_trainings_not_the_cards(hardware, batch):
    assert (
        settle(JobSpec(model="llama-3.2-1b", hardware=hardware, method="full"), "full").effective_batch_size == batch
    )


def test_more_devices_than_a_preset_is_for_have_a_sample_each():
    spec = preset_spec(preset_by_name("h100_80gb"), "llama-3.2-1b", world_size=128)
    assert spec_job(spec).fields["per_device_train_batch_size"] == 1


@pytest.mark.slow
def test_where_float32_weights_do_not_fit_bf16_ones_do_and_it_is_said():
    job = {"hardware": "rtx_3080", "method": "full", "seq_len": 512}
    narrow = plan("llama-3.2-1b", **job)
    assert {profile.preset.dtype for profile in narrow.profiles} == {"bfloat16"}
    assert narrow.rejected[0].settings == "full fine-tuning with float32 weights"
    assert narrow.notes[0].startswith("weights are loaded in bfloat16, as float32 ones do not fit")
    wide = plan("llama-3.2-1b", **job, dtype="float32")
    assert not wide.profiles and any("dtype=bfloat16" in change for change in wide.nearest)


@pytest.mark.parametrize(("over", "certain"), [(0, False), (1, True)])
def test_weights_alone_that_exceed_the_budget_rule_a_method_out(over, certain, monkeypatch):
    spec = SimpleNamespace(memory_budget=1000)
    monkeypatch.setattr(streamed_weights, "weights_alone", lambda spec: (1000 + over, "bfloat16 weights"))
    assert bool(streamed_weights.excessive_weights(spec)) == certain


def test_host_memory_beside_the_sketch_is_the_least_that_an_estimate_had(spec_and_search, monkeypatch):
    """It is added to sketches of the strategy; where an estimate is below its sketch, nothing is."""
    _, full = spec_and_search
    first, second, third = full.choices[:3]
    made = replace(full, estimates={}, sketch_errors={}, host_errors={})
    assert {first.strategy, second.strategy, third.strategy} == {"none"}
    for choice, beside, fewest in ((first, 700, 700), (second, 300, 300), (third, 500, 300), (first, -100, 0)):
        host = made.sketch.host_bytes(choice) + beside
        answer = Estimate(10**9, 10**9, 10**9, host, "forward", {}, {}, 2**40, {}, ())
        monkeypatch.setattr(search_module, "estimate_jobs", lambda jobs, cores, answer=answer: [answer])
        made.estimate([choice])
        assert made.host_errors == {"none": fewest} and made.host_bytes(choice) == host
    other = full.choices[3]
    assert made.host_bytes(other) == made.sketch.host_bytes(other)
