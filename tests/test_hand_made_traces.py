"""What plans make of four traces: bytes, seconds and order of every choice, from traces written by hand."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import frozen
import pytest
from transformers import AutoConfig

from hf_memopt import MemoryArguments
from hf_memopt.engines import engine_named
from hf_memopt.estimator.accounting.ledger import GENERATION, KINDS, Peak
from hf_memopt.estimator.accounting.work import Attention, Kernel
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.timing.step_time import Step, StepTime
from hf_memopt.hardware.catalog import catalog
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choice_jobs import baseline_jobs, choice_job
from hf_memopt.planner.choices import KNOBS, Choice, list_choices
from hf_memopt.planner.cost import Cost
from hf_memopt.planner.search import Search, summarize
from hf_memopt.planner.settle import settle
from hf_memopt.planner.sketch import Traced, make_sketch
from hf_memopt.units import GIB, MIB

SEGMENTS = ("load", "forward", "forward layer 1", "backward layer 2", "between", "optimizer", GENERATION)
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
CONFIG = AutoConfig.for_model("llama", **LLAMA, num_key_value_heads=4, max_position_embeddings=1024)
ASKED = {
    "one card": {"hardware": "rtx_3070", "method": "full"},
    "one card, one micro-batch": {"hardware": "rtx_3070", "method": "full", "training": {"max_grad_norm": 0}},
    "one old card": {"hardware": "t4", "method": "qlora"},
    "four cards": {"hardware": "a100_80gbx4", "method": "full"},
    "two boxes": {"hardware": "h100_80gbx16", "method": "lora"},
    "unified memory": {"hardware": "apple_m2_16gb", "method": "lora"},
    "a processor": {"hardware": "cpu", "method": "full"},
    "streamed weights": {"hardware": "rtx_3060", "method": "lora", "streaming": True},
    "pairs": {"hardware": "rtx_4090", "method": "full", "task": "dpo"},
    "completions": {"hardware": "rtx_4090", "method": "lora", "task": "grpo"},
}


def trace(number: int) -> Traced:
    """The numbers are of no model: each kind, segment and trace has its own, and a second sample adds less than the
    first has."""
    checkpointed, samples = divmod(number, 2)
    peaks, growing = {}, {}
    for place, segment in enumerate(SEGMENTS, 3):
        kinds = {kind: MIB * (place * 7 + order * 13 + samples * (place + order)) for order, kind in enumerate(KINDS)}
        kinds["parameters"] = 900 * MIB
        kinds["activations"] = MIB * (500 * place + 300 * samples) // (1 + 2 * checkpointed)
        peaks[segment] = Peak(sum(kinds.values()), kinds, host=(40 + place) * MIB)
        growing[segment] = kinds["activations"] * 3 // 4
    size = 2 * 10**7 * (1 + samples) * (1 + checkpointed)
    kernels = {
        Kernel(False, 900 * size, size // 50, 2): 24,
        Kernel(False, 0, size // 20): 40,
        Kernel(False, 100 * size, size // 90, 0, Attention(64, 640, 2, samples == 1)): 12,
        Kernel(False, 3, 5): 30 + number,
        Kernel(True, 0, 10**8 + number): 17,
    }
    return Traced(peaks, growing, Counter(kernels))


def made(name: str, **more) -> tuple[JobSpec, Search]:
    """A search whose sketch is of hand-made traces."""
    asked = ASKED[name]
    micro = {} if asked.get("task") == "grpo" else {"per_device_train_batch_size": 2}
    batch = {"completions": 8, "four cards": 16, "two boxes": 64, "one card, one micro-batch": 2}.get(name, 6)
    spec = JobSpec(model=CONFIG, config=CONFIG, seq_len=640, effective_batch_size=batch, **asked, **more)
    spec = settle(replace(spec, training={**spec.training, **micro}), asked["method"])
    choices = list_choices(spec)
    jobs = baseline_jobs(spec, choices)
    traces = [trace(number) for number in range(4)]
    sketch = make_sketch(jobs, traces if len(jobs) == 4 else traces[:2])
    return spec, Search(
        choices, sketch, lambda choice: choice_job(spec, choice), lambda text: None, host_memory=spec.host_memory
    )


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", ASKED)
def test_bytes_and_seconds_of_every_choice(name):
    _, search = made(name)
    sketch, cost = search.sketch, search.cost
    found = {
        f"{choice.strategy}: {summarize(choice)}, {choice.optim} {choice.dtype}": [
            *sketch.device_bytes(choice),
            *sketch.device_bytes(choice, 2.5),
            sketch.host_bytes(choice),
            int(sketch.paged_bytes(choice)),
            int(sketch.streamed_bytes(choice)),
            int(sketch.activations(choice)),
            frozen.figures(cost.step(choice)),
            frozen.figures(cost.rank(choice)),
            cost.link_bound(choice) is not None,
        ]
        for choice in search.choices
    }
    frozen.check(f"traces_{name.replace(' ', '_').replace(',', '')}", found)


HOSTS = {
    "any": None,
    "assumed": HostMemory(GIB // 4, "a box"),
    "little": HostMemory(GIB // 4, "asked", assumed=False),
    "some": HostMemory(GIB, "asked", assumed=False),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["one card", "one old card", "four cards", "unified memory", "streamed weights"])
def test_what_is_estimated_and_picked_for_every_budget(name, monkeypatch):
    """Estimates are a little off the sketches, each choice's by its own share."""
    _, search = made(name)
    sketch, choices = search.sketch, list(search.seconds)
    shares = {choice: 0.9 + 0.02 * (n % 7) for n, choice in enumerate(sorted(choices, key=summarize))}
    estimates = []

    def estimate(jobs, map_fn):
        estimates.extend(map(summarize, jobs))
        for choice in jobs:
            size = int(sketch.device_bytes(choice)[0] * shares[choice])
            host = GIB // 2 + 5 * sketch.host_bytes(choice) // 4
            yield Estimate(size, size, size, host, "forward", {}, {}, None, {}, ())

    monkeypatch.setattr("hf_memopt.planner.search.estimate_jobs", estimate)
    found = {}
    sizes = sorted({int(search.needs(choice)) for choice in choices})
    budgets = [sizes[len(sizes) * part // 8] for part in (0, 1, 4, 6)]
    for host, budget in [*itertools.product(["any"], budgets), *itertools.product(list(HOSTS)[1:], budgets[1:2])]:
        known = search.sketch_bytes.copy()
        new = Search(
            choices, sketch, lambda choice: choice, lambda text: None, host_memory=HOSTS[host], sketch_bytes=known
        )
        quick = new.sketched(budget)
        picks = new.fastest_for([int(budget * share) for share in (0.9, 1.0, 1.1, 1.4)])
        smallest = new.smallest()
        found[f"{host} {budget}"] = {
            "sketched": quick and summarize(quick),
            "picks": [choice and f"{choice.strategy}: {summarize(choice)}" for choice in picks],
            "smallest": smallest and summarize(smallest),
            "estimates": estimates.copy(),
            "needs": [int(new.needs(choice)) for choice in new.choices[::9]],
            "caution": new.caution,
            "short of host memory": len(new.short_of_host),
        }
        estimates.clear()
    frozen.check(f"picks_{name}".replace(" ", "_"), found)


def test_of_nearly_the_fastest_choices_the_cheapest_is_picked(monkeypatch):
    """Numbers stand for choices, which are as slow as they are high, and the dearer the lower."""
    monkeypatch.setattr("hf_memopt.planner.search.NEIGHBOURS", 1.5)
    choices = range(10, 40)
    search = SimpleNamespace(
        choices=choices,
        estimates=choices,
        fits=lambda choice, budget: choice >= budget,
        _rank={choice: choice for choice in choices},
        _price=lambda choice: -choice,
    )
    assert [Search._pick(search, budget) for budget in (0, 12, 39, 40)] == [15, 18, 39, None]
    assert Search._pick(search, 0, condition=lambda choice: choice > 19) == 30


@pytest.mark.parametrize(
    ("picks", "has_host", "again"), [([1, None], True, True), ([1, None], False, False), ([1, 2], True, False)]
)
def test_where_nothing_fits_the_smallest_is_estimated(picks, has_host, again):
    asked = []
    search = SimpleNamespace(
        _picks_after_estimates=lambda budgets: asked.append(budgets) or picks,
        _host_has=lambda choice: has_host,
        _traceable=lambda: [1, 2],
        smallest=lambda: asked.append("smallest"),
        _doubtful=lambda picks, budgets: None,
        _kept_out=lambda picks, budgets: None,
    )
    assert Search.fastest_for(search, [7]) == picks
    assert asked == ([[7], "smallest", [7]] if again else [[7]])


class _Numbered(int):
    """An even number stands for a plain choice, one above 100 for one with flat buffers."""

    @property
    def engine(self):
        return SimpleNamespace(flat_buffers=self > 100)


def test_a_plain_choice_that_nearly_fits_is_doubted(subtests):
    for choices, picks, budgets, doubted in [
        ((3, 4, 6), (3,), (390,), 4),
        ((3, 4, 6), (None,), (390,), 4),
        ((3, 4, 6), (3,), (381,), 4),
        ((3, 4, 6), (3,), (380,), None),  # more than 5 % too small
        ((3, 4, 6), (3,), (400,), None),
        ((3, 4, 6), (6,), (390,), None),
        ((3, 4, 6), (6, 3), (390, 700), None),
        ((3, 4, 6), (3, 6), (390, 700), 4),
        ((3, 5), (3,), (390,), None),
        ((3, 104), (3,), (10_390,), None),
        ((2, 4, 6), (3,), (190,), None),  # estimated
    ]:
        with subtests.test(choices=str(choices)):
            search = SimpleNamespace(
                _traceable=lambda: map(_Numbered, choices),  # noqa: B023
                is_plain=lambda choice: choice % 2 == 0,
                needs=lambda choice: 100 * choice,
                estimates={2},
            )
            assert Search._doubtful(search, picks, budgets) == doubted


def test_a_faster_and_simpler_choice_that_only_other_kinds_rule_out(subtests):
    """3 is dearer than the pick but for its memory, 4 is estimated and an estimate of its own kind corrects 5."""
    for budget, kept_out in [
        *((199, None), (200, 2), (249, 2), (250, None), (399, None), (400, None), (600, 6), (10_400, None)),
    ]:
        with subtests.test(budget=budget):
            choices = [*map(_Numbered, (2, 3, 4, 5, 6, 104, 8))]
            search = SimpleNamespace(
                choices=choices,
                estimates={4},
                sketch_errors={"kind 5": (0, 1)},
                _keys=lambda choice: ["a", "b", f"kind {choice}", "c"],
                _price=lambda choice: (9, 9, 9, choice) if choice in (3, 8) else (9, 9, 8, 9),
                sketch_bytes={choice: (100 * choice, 0) for choice in choices},
                needs=lambda choice: 100 * choice + 50,
                _host_has=lambda choice: True,
            )
            assert Search._kept_out(search, [choices[-1], None], [budget, budget]) == kept_out
            search._host_has = lambda choice: False
            assert Search._kept_out(search, [choices[-1]], [budget]) is None


# ---- the same parts by themselves


def test_seconds_of_steps():
    """Every engine, on one box and on two, with and without what each attribute says."""
    found = {}
    usual = {"world_size": 8, "trained": 10**9, "loaded": 2 * 10**9, "wide": False, "mixed": True, "adapters": False}
    step = {"accumulation": 3, "micro_seconds": 0.5, "launch_seconds": 0.1, "optimizer_seconds": 0.2}
    strategies = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2", "zero2_offload_cpu", "zero3_offload_cpu")
    for strategy in (*strategies, "zero3_offload_nvme", "fsdp2_offload_cpu"):
        for times in (
            *({}, {"world_size": 1}, {"world_size": 2}, {"world_size": 16}, {"wide": True}),
            *({"wide": True, "mixed": False}, {"adapters": True}, {"drives": 4}, {"loaded": 40 * 10**9}),
            {"shared": 2, "sent": 10**8, "messages": 9},
        ):
            for device in ("h100_80gb", "rtx_4090"):
                seconds = StepTime(device=catalog()[device], layers=12, **{**usual, **times})
                work = Step(engine=engine_named(strategy), **step)
                values = [*seconds.exchanged(work), seconds.seconds(work)]
                values.append(seconds.seconds(replace(work, accumulation=1, launch_seconds=0.7, paged_bytes=10**9)))
                values.append(seconds.seconds(replace(work, optimizer_offloaded=True)))
                found[f"{strategy} {times} {device}"] = str([frozen.figures(value) for value in values])
    frozen.check("step_seconds", found)


def test_bytes_of_single_choices():
    """Of a job that is nothing but what a sketch asks of it."""
    found = {}
    knobs = [frozenset(), *(frozenset({knob.name}) for knob in KNOBS)]
    for method, fields, dtype, world_size, device in (
        ("full", {"bf16": True}, "float32", 1, "rtx_4090"),
        ("full", {"fp16": True, "optim": "adamw_8bit"}, "bfloat16", 4, "t4"),
        ("lora", {}, "bfloat16", 2, "a100_80gb"),
    ):
        streaming = MemoryArguments(weight_streaming=method == "lora")
        job = SimpleNamespace(
            config=CONFIG,
            fields={"per_device_train_batch_size": 1, **fields},
            dtype=dtype,
            world_size=world_size,
            device=catalog()[device],
            memory_args=streaming,
            seq_len=640,
            elements=lambda trained=False: (5 * 10**6, 10**6 + trained),
            attention=("sdpa",),
            engine=engine_named("none"),
            shared=1,
            peft_config=None,
        )
        sketch = make_sketch([job], [trace(number) for number in range(4)])
        cost = Cost(sketch)
        usual = Choice("ddp" if world_size > 1 else "none", 2, 1, 0.0, "adamw_torch", dtype)
        for changes in (
            *({"knobs": names} for names in knobs),
            {"checkpointed": 0.25},
            {"accumulation": 3},
            {"checkpointed": 1.0, "inputs_offloaded": True},
            {"optim": "adamw_8bit"},
            {"micro_batch": 1},
            {"paged": True, "optim": "paged_adamw_8bit"},
            {"micro_batch": 5},
            {"streamed": 0.5},
            {"streamed": 1.0},
            {"dtype": "float32"},
            *({"strategy": name, "accumulation": 2} for name in ("zero2", "zero3", "fsdp2", "zero3_offload_cpu")),
        ):
            choice = replace(usual, **changes)
            found[f"{method} {device} {sorted(changes.items(), key=str)}".replace("frozenset", "")] = str(
                [
                    *sketch.device_bytes(choice),
                    *sketch.device_bytes(choice, 0.5),
                    sketch.host_bytes(choice),
                    int(sketch.paged_bytes(choice)),
                    frozen.figures(sketch.streamed_bytes(choice)),
                    int(sketch.activations(choice)),
                    frozen.figures(cost.step(choice)),
                    frozen.figures(cost.rank(choice)),
                    frozen.figures(cost.copying(choice)),
                    sorted(choice.features),
                    choice.levers,
                    choice.offloads,
                    choice.approximations,
                    choice.complexities,
                    choice.memory_fields(),
                    summarize(choice),
                ]
            )
    frozen.check("single_choices", found)
