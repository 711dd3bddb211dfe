"""What follows of traces that are written by hand: sketches, costs and picks of plans, whole and frozen."""

import functools
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import frozen
import pytest
from transformers import LlamaConfig

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.ledger import Moment, Peak, TraceResult
from hf_memopt.estimator.accounting.work import Attention, Kernel
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner import search as searching
from hf_memopt.planner.alternatives import left_out, method_alternative, plain_alternative
from hf_memopt.planner.choice_jobs import baseline_jobs, choice_job
from hf_memopt.planner.choices import list_choices
from hf_memopt.planner.search import Search, summarize
from hf_memopt.planner.settle import settle
from hf_memopt.planner.sketch import Traced, _at_full_depth, make_sketch, sketched_estimate
from hf_memopt.planner.trl_choices import TrlSpace
from hf_memopt.units import GIB, MIB

SIZES = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
CONFIG = LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=2**15, vocab_size=4000)
BATCH = {"seq_len": 256, "effective_batch_size": 8}
GRPO = {"num_generations": 4, "max_completion_length": 128, "beta": 0.1, "num_iterations": 2}
VLLM = {**GRPO, "use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": True}
JOBS = {
    "one card": {"hardware": "rtx_4090", "method": "full"},
    "in backward": {"hardware": "rtx_3060", "method": "full", "training": {"max_grad_norm": 0}},
    "in 16 bits": {"hardware": "t4", "method": "qlora"},
    "four cards": {"hardware": "a100_80gbx4", "method": "full"},
    "pcie": {"hardware": "rtx_3090x2", "method": "lora"},
    "unified": {"hardware": "apple_m2_16gb", "method": "lora"},
    "streamed": {"hardware": "rtx_3060", "method": "qlora", "streaming": True},
    "own optimizer": {"hardware": "rtx_4090", "method": "full", "training": {"optim": "paged_adamw_8bit"}},
    "checkpointed": {"hardware": "mi300x", "method": "full", "training": {"activation_checkpointing": True}},
    "shared": {"hardware": "h100_80gbx4", "method": "full", "seq_len": 8192, "effective_batch_size": 4},
    "generated": {"hardware": "a100_80gbx2", "method": "full"},
    "vllm": {"hardware": "h100_80gb", "method": "lora"},
}
GENERATED = {"generated": GRPO, "vllm": VLLM}


@dataclass(frozen=True)
class OfTrainer(Job):
    trainer: SimpleNamespace | None = None


def trace(number: int, streamed: bool, generates: bool) -> Traced:
    """Of one sample and of two with all activations kept, then of both with every layer checkpointed."""
    samples, checkpointed = 1 + number % 2, number > 1
    growing = (40 if checkpointed else 400) * MIB * samples
    fixed = {"parameters": 600 * MIB, "gradients": 300 * MIB, "optimizer_states": 1200 * MIB}
    kinds = {
        "load": {"parameters": 600 * MIB},
        "forward: layer": {**fixed, "gradients": 0, "activations": growing, "logits": 30 * MIB * samples},
        "backward": {**fixed, "activations": growing + 9 * MIB, "workspace": 20 * MIB, "other": 3 * MIB * samples},
        "optimizer": {**fixed, "workspace": 100 * MIB},
    }
    if generates:
        kinds |= {"generation": {**fixed, "gradients": 0, "activations": 90 * MIB * samples}, "between": dict(fixed)}
    peaks = {name: Peak(sum(sizes.values()), sizes, 700 * MIB * streamed) for name, sizes in kinds.items()}
    peaks["backward"].host += 50 * MIB * streamed
    again = 1 + checkpointed / 3
    kernels = {
        Kernel(False, 10**11 * samples, 10**8 * samples, 2): int(100 * again),
        Kernel(False, 3 * 10**10 * samples, 10**7 * samples, 0, Attention(64, 256, 2, False)): int(12 * again),
        Kernel(False, 0, 3 * 10**6 * samples): int(300 * again),
        Kernel(False, 10**10 * samples, 10**7, 2, None, True): 12,
        Kernel(True, 0, 10**9): 4,
    }
    return Traced(peaks, {name: growing if name != "load" else 0 for name in peaks}, Counter(kernels))


def answered(function, *args):
    try:
        return function(*args)
    except InputError as error:
        return f"error: {error}"


@functools.cache
def settled(name: str) -> tuple:
    """The job, its choices, and the sketch of its traces."""
    asked = {**BATCH, **JOBS[name]}
    spec = settle(JobSpec(model=CONFIG, config=CONFIG, **asked), asked["method"])
    choices = list_choices(spec)
    jobs = baseline_jobs(spec, choices)
    traces = [trace(number, spec.streaming, name in GENERATED) for number in range(4)]
    sketch = make_sketch(jobs, traces if len(jobs) == 4 else traces[-2:])
    if name in GENERATED:  # the fields of a trainer of TRL, which is not made for it
        fields = {"use_vllm": False, "steps_per_generation": 4, **GENERATED[name]}
        trainer = SimpleNamespace(**fields)
        job = OfTrainer(**vars(sketch.job) | {"fields": sketch.job.fields | fields, "trainer": trainer})
        sketch = replace(sketch, job=job)
        space = TrlSpace(task="grpo", method=spec.preset.method, devices=spec.preset.processes, fixed=GENERATED[name])
        parts = ((one, space.choices(one.strategy, one.micro_batch, one.accumulation)) for one in choices[::5])
        choices = [replace(one, trl=part) for one, some in parts for part in some]
        if space.colocates:
            choices = [part for one in choices for part in space.with_shares(one, sketch.job, 3 * GIB)]
    return spec, choices, sketch


def searched(name: str, every: int = 1, **more) -> tuple[JobSpec, Search]:
    spec, choices, sketch = settled(name)
    more = {"host_memory": spec.host_memory, **more}
    return spec, Search(choices[::every], sketch, lambda choice: choice_job(spec, choice), lambda text: None, **more)


def told(choice, search) -> list:
    """The bytes, the seconds and the counts of a choice."""
    sketch, cost = search.sketch, search.cost
    seconds = [cost.step(choice), cost.copying(choice), cost.rank(choice), *cost.rollout(choice)]
    held = [*sketch.device_bytes(choice), *sketch.device_bytes(choice, 0.5), sketch.host_bytes(choice)]
    held += [int(sketch.paged_bytes(choice)), int(sketch.activations(choice))]
    return [
        [round(size / MIB) for size in held],
        list(map(frozen.figures, seconds)),
        [choice.levers, choice.offloads, choice.approximations, choice.complexities],
    ]


def test_traces_of_a_few_layers_are_those_of_all():
    """12 layers: activations grow by what each pair of layers adds, kernels of two steps count once."""
    traces = [trace(number, False, False) for number in range(2)]
    results = [
        TraceResult(
            {Moment(name, 0, None): peak for name, peak in made.peaks.items()}, [], [], {}, False, 0, made.kernels, 2
        )
        for made in traces
    ]
    whole = _at_full_depth(CONFIG, (12,), results[:1])
    assert whole.growing == {name: peak.by_kind.get("activations", 0) for name, peak in traces[0].peaks.items()}
    assert whole.kernels == {kernel: count / 2 for kernel, count in traces[0].kernels.items()}
    for depths, growing in (((2, 4), 400 * MIB * 12 // 2), ((1, 2), 400 * MIB * 12), ((3, 6), 400 * MIB * 12 // 3)):
        made = _at_full_depth(CONFIG, depths, results)
        assert made.growing == {"load": 0, "optimizer": 0, "backward": growing, "forward: layer": growing}
        more = 400 * MIB * (12 - depths[0]) // (depths[1] - depths[0])
        assert made.peaks["backward"].by_kind["activations"] == 409 * MIB + more
        (optimizer,) = (count for kernel, count in made.kernels.items() if kernel.optimizer)
        assert optimizer == 2


@pytest.mark.parametrize("number", range(4))
def test_what_is_known_of_choices(number):
    frozen.check(f"written_choices_{number}", {name: known(name) for name in list(JOBS)[number::4]})


def known(name: str) -> dict:
    spec, search = searched(name)
    choices = sorted([*search.choices, *search.short_of_host], key=lambda choice: (summarize(choice), choice.dtype))
    chosen = choices[:: max(1, len(choices) // 14)]
    found = {"choices": len(choices), "short of host memory": len(search.short_of_host)}
    found["ranked"] = [summarize(choice) for choice in search.choices[:4]]
    for number, choice in enumerate(chosen):
        preset = choice.configured(spec.preset)
        more = {"dtype": preset.dtype, "batch": preset.effective_batch_size, **choice.memory_fields()}
        training = {key: value for key, value in preset.training.items() if not key.startswith("dataloader")}
        found[f"{number} {summarize(choice)}"] = [
            *told(choice, search),
            str({**training, **choice.fields(preset), **more}),
            [*choice.trl.families(), *sorted(choice.features)],
        ]
    one, job = chosen[-1], search.sketch.job
    job = job if name in GENERATED else search.build(one)
    made = sketched_estimate(search.sketch, one, job, 5 * GIB, 2.5, None)
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "host_bytes", "phase", "breakdown", "phases")
    return found | {"estimate": [*(getattr(made, field) for field in kept), made.step_seconds]}


def estimated(search, factor: float, more: int, host: int):
    """Estimates in the place of traces: more than the sketches by a share and by bytes, and more of the host."""

    def of_choice(choice):
        size = int(search.sketch.device_bytes(choice)[0] * factor) + more
        held, paged = search.sketch.host_bytes(choice) + host, int(search.sketch.paged_bytes(choice))
        if "activation_compression" in choice.knobs and more:
            return InputError("not traced")
        made = Estimate(size, size, size, held, "forward", {}, {}, 2**40, {}, ())
        return replace(made, paged_bytes=paged, step_seconds=search.seconds[choice] * (1 + choice.checkpointed))

    return lambda choices, map_fn: [of_choice(choice) for choice in choices]


@pytest.mark.parametrize("name", ["one card", "in 16 bits", "four cards", "pcie"])
def test_what_is_picked_of_choices(name, monkeypatch):
    found, small = {}, HostMemory(300 * MIB, "a small box")
    rows = [(1.0, 0, 0, None), (1.08, 0, 40 * MIB, None), (0.93, 0, 0, None), (1.0, 90 * MIB, MIB, None)]
    rows += [(1.02, 0, 0, small), (1.02, 0, 0, replace(small, assumed=False))]
    for number, (factor, more, host, memory) in enumerate(rows):
        more_of = {"host_memory": memory} if memory else {}
        spec, search = searched(name, 3, **more_of)
        search.build = lambda choice: choice
        monkeypatch.setattr(searching, "estimate_jobs", estimated(search, factor, more, host))
        sizes = sorted(search.sketch_bytes[choice][0] for choice in search.choices)
        for place in (0, len(sizes) // 2):
            budgets = [int(sizes[place] * share) for share in (0.98, 1.0, 1.04, 1.2)]
            picks = answered(search.fastest_for, budgets)
            texts = picks if isinstance(picks, str) else [pick and summarize(pick) for pick in picks]
            found[f"{number} {place}"] = [texts, len(search.estimates), len(search.sketch_errors)]
            chosen = [] if isinstance(picks, str) else list(filter(None, picks))
            if not chosen:
                continue
            preset = chosen[-1].configured(spec.preset)
            profile = SimpleNamespace(share=0.94, choice=chosen[-1], preset=preset, tokens_per_second=1000.0)
            profile.seconds = search.seconds[chosen[-1]]
            others = [plain_alternative(search, profile, budgets[2]), method_alternative(spec, search, profile)]
            profile.preset = replace(preset, method="another")
            others.append(method_alternative(replace(spec, memory=budgets[2]), search, profile))
            found[f"{number} {place}"].append([str(other and other.to_dict()) for other in others])
            reasons = [[one.settings, one.reason, one.slower] for one in left_out(search, budgets[1], chosen)]
            found[f"{number} {place}"].append(reasons)
        smallest = search.smallest()
        found[f"{number} smallest"] = smallest and [summarize(smallest), round(search.needs(smallest) / MIB, 1)]
    frozen.check(f"written_picks_{name.replace(' ', '_')}", found)
