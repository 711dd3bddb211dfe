"""What a newcomer's and an expert's own questions found wrong in plans."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import slow
from test_plan import config, least, spec_for

from hf_memopt import InputError, plan
from hf_memopt.estimator.result import Estimate
from hf_memopt.planner.alternatives import left_out, method_alternative, plain_alternative
from hf_memopt.planner.choice_jobs import start_search
from hf_memopt.planner.choices import list_choices
from hf_memopt.planner.nothing_fits.nearest import Combination, _proposal
from hf_memopt.planner.search import Search, summarize
from hf_memopt.presets import METHODS, get_preset
from hf_memopt.units import GIB, MIB


@pytest.mark.slow
@pytest.mark.parametrize("planned", ["full", slow("lora")])
def test_methods_are_compared_over_the_same_step(planned, monkeypatch):
    """Presets of a card have other lengths for other methods; samples twice as long are half as many. A method that
    does not fit is not said to fit beside the one that does."""
    lengths = {get_preset("rtx_3070", method).seq_len for method in METHODS}
    assert len(lengths) > 1
    memory = None  # all
    if planned == "lora":
        memory = int(least(spec_for(config(2), planned, max(lengths), "rtx_3070", 32)) / 0.94) + MIB
    asked = {}

    def noted(spec, *args, **kwargs):
        asked.setdefault(spec.preset.method, []).append((spec.seq_len, spec.effective_batch_size))
        return start_search(spec, *args, **kwargs)

    monkeypatch.setattr("hf_memopt.planner.plan.start_search", noted)
    found = plan(config(2), "rtx_3070", memory=memory)
    assert found.spec.preset.method == planned and found.spec.seq_len == max(lengths)
    assert asked == {method: [(max(lengths), 32)] for method in METHODS}
    assert planned in {one.method for one in found.methods}
    assert all(one.to_dict()["device_bytes"] <= (memory or 8 * GIB) for one in found.methods)


@pytest.mark.slow
def test_a_preset_is_planned_by_its_own_method():
    found = plan(config(2), get_preset("rtx_3060", "lora"))
    assert found.spec.preset.method == "lora" and not found.methods


@pytest.mark.slow
def test_a_method_beside_leaves_room_for_its_sketchs_error(searched):
    spec, search = searched
    bare = Search(list(search.choices), search.sketch, search.build, search.say)
    assert bare.caution > 1 == search.caution
    profile = SimpleNamespace(share=0.9, preset=get_preset("rtx_3060", "lora"), seconds=1.0, tokens_per_second=1.0)
    for memory in sorted({int(search.needs(choice)) for choice in search.choices})[::7]:
        if alternative := method_alternative(replace(spec, memory=memory), bare, profile):
            assert alternative.device_bytes <= 0.9 * memory


def test_qloras_own_optimizer_is_not_rounding():
    """QLoRA's own optimizer has 8 bits, which FSDP2 cannot have: DDP was left out for it."""
    spec = spec_for(config(2), "qlora", hardware="rtx_4090")
    spec = replace(spec, training={}, preset=replace(spec.preset, processes=2, strategy="none"))
    by_strategy = {choice.strategy: choice for choice in list_choices(spec) if choice.levers <= 1}
    assert by_strategy["ddp"].optim == "paged_adamw_8bit" and not by_strategy["ddp"].complexities
    assert "8bit" not in by_strategy["fsdp2"].optim
    full = [choice for choice in list_choices(replace(spec_for(config(2), hardware="rtx_4090"), training={}))]
    assert all(choice.complexities for choice in full if "8bit" in choice.optim)
    assert any("8bit" in choice.optim for choice in full)


@pytest.fixture(scope="module")
def searched():
    spec = spec_for(config(2), hardware="rtx_3060", batch=8)
    spec.training.pop("optim")
    search = start_search(spec, lambda text: None)
    search.estimate(search.choices[:1])
    return spec, search


def as_estimate(size: float) -> Estimate:
    return Estimate(int(size), int(size), int(size), 0, "forward", {}, {}, 2**40, {}, ())


@pytest.mark.slow
def test_plain_settings_are_estimated_before_others_take_their_place(searched, monkeypatch):
    """A sketch that is a little too high must not be why a plan rounds."""
    _, search = searched
    monkeypatch.setattr(search, "estimates", {})
    monkeypatch.setattr(search, "sketch_errors", {})
    plain = min(filter(search.is_plain, search.choices), key=search.needs)
    budget = int(search.needs(plain)) + 1
    whole, moving = search.sketch_bytes[plain]
    real = {choice: search.sketch_bytes[choice][0] for choice in search.choices}
    monkeypatch.setattr(search, "sketch_bytes", search.sketch_bytes | {plain: (int(1.03 * whole), moving)})
    others = {choice for choice in search.choices if search.is_plain(choice) and choice != plain}
    monkeypatch.setattr(search, "choices", [choice for choice in search.choices if choice not in others])
    assert search.needs(plain) > 1.01 * budget
    monkeypatch.setattr(
        search, "estimate", lambda new: search.estimates.update({one: as_estimate(real[one]) for one in new})
    )
    search.fastest_for([budget] * 4)
    assert search.estimates[plain].device_bytes <= budget


@pytest.mark.slow
def test_a_sketch_stays_within_the_share(searched):
    _, search = searched
    sizes = sorted(search.needs(choice) for choice in search.choices)
    for size in sizes[:: max(1, len(sizes) // 20)]:
        for budget in (int(size), int(size) + 1):
            if choice := search.sketched(budget):
                assert search.needs(choice) <= budget


@pytest.mark.slow
def test_a_kind_of_settings_is_left_out_by_the_variant_that_lost(searched, monkeypatch):
    """Not by its fastest with more features, which lost by more."""
    spec, search = searched
    chosen = next(choice for choice in search.choices if search.is_plain(choice) and not choice.checkpointed)
    compressed = [
        choice
        for choice in search.choices
        if "activation_compression" in choice.knobs and search.fits(choice, spec.memory_budget)
    ]
    lost = max(compressed, key=search.seconds.get)
    monkeypatch.setattr(search, "choices", [lost, *search.choices])
    assert lost != min(compressed, key=search.seconds.get)
    reasons = {rejected.settings: rejected.reason for rejected in left_out(search, spec.memory_budget, [chosen])}
    assert f"take {search.seconds[lost] / search.seconds[chosen]:.2f} ×" in reasons["8-bit activations"]


def test_an_alternative_is_the_one_that_would_be_planned(searched, monkeypatch):
    """ZeRO-2 was the plain alternative beside DDP, by a thousandth of the time."""
    spec, search = searched
    offloading = next(choice for choice in search.choices if choice.offloads)
    profile = SimpleNamespace(
        share=0.9, choice=offloading, preset=get_preset("rtx_3060"), seconds=1.0, tokens_per_second=1.0
    )
    plain = [choice for choice in search.choices if search.is_plain(choice) and choice.checkpointed == 1]
    preferred = max(plain, key=search.seconds.get)
    monkeypatch.setattr(search, "choices", [preferred, *search.choices])
    assert plain_alternative(search, profile, spec.memory).settings == summarize(preferred)
    profile.preset = get_preset("rtx_3060", "lora")
    assert method_alternative(spec, search, profile).settings == summarize(preferred)


def test_a_change_that_lacks_host_memory_says_how_much(searched):
    """16-bit weights and two more GiB of host memory were not proposed where twice as many cards were."""
    spec, search = searched
    offloading = next(choice for choice in search.choices if "optimizer_cpu_offload" in choice.knobs)
    few = replace(spec, host_memory=replace(spec.host_memory or _host(), bytes=24 * GIB))
    needs = replace(as_estimate(GIB), host_bytes=26 * GIB)
    assert "and --host-memory 26: 1.00 GiB" in _proposal(Combination({"dtype": 1}, ["x"], few, offloading), needs).text
    assert _proposal(Combination({}, ["a smaller model"], few, offloading), needs) is None


def _host():
    from hf_memopt.hardware.host_memory import HostMemory

    return HostMemory(0, "assumed", assumed=True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "qwen3-8b", "--hardware", "rtx_4090", "--memory", "99"), "RTX 4090 has 23.64 GiB for a job"),
        (("plan", "qwen3-8b", "--hardware", "rtx_4090", "--task", "ppo"), "did you mean 'grpo'"),
        (("plan", "qwen3-8b", "--hardware", "any", "--prices", "none.toml"), "none.toml: no such file"),
        (("estimate", "qwen3-8b", "--hardware", "any"), "hf-memopt plan MODEL --hardware any"),
    ],
)
def test_errors_name_the_fix(words, says, command):
    code, _, errors = command(*words)
    assert code == 2 and says.lower() in errors.lower() and "not TOML" not in errors, errors


@pytest.mark.slow
@pytest.mark.kept
def test_speeds_say_what_they_rest_on():
    note = "±"
    known = plan(config(2), "rtx_4090", method="lora", seq_len=256)
    assert any(note in text for text in known.notes)
    generating = plan(
        config(2), "rtx_3060", method="lora", seq_len=256, task="grpo", training={"max_completion_length": 128}
    )
    profile = generating.usual
    assert 0 < profile.estimate.generation_share < 1 and profile.tokens_per_second > 0
    assert any(text.startswith("speed: ±") and "of RLOO none was compared" in text for text in generating.notes)
    assert any(text.startswith("generation: ") for text in generating.notes)
    # The sketch, by which choices are ranked, is close to what is shown.
    assert profile.seconds == pytest.approx(profile.estimate.step_seconds, rel=0.1)
    nothing = plan("qwen3-32b", "rtx_3060_12gb", method="full", seq_len=256, memory=GIB)
    assert not nothing.profiles and not any(text.startswith("speed") for text in nothing.notes)


def test_memory_beyond_the_device_is_refused_in_python_too():
    with pytest.raises(InputError, match="leave it out"):
        plan(config(2), "rtx_4090", memory=25 * GIB)
