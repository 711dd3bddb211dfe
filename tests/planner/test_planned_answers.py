"""What small functions of plans answer over grids of what they are asked, frozen: each border and each sentence."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import frozen
from test_written_traces import CONFIG, GRPO, VLLM, answered

from hf_memopt import MemoryArguments
from hf_memopt.estimator.result import Estimate
from hf_memopt.hardware.catalog import catalog
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.job.spec import JobSpec, Tool
from hf_memopt.planner import devices, launch, proposals, settle, streamed_weights
from hf_memopt.planner import plan as planning
from hf_memopt.planner.choices import Choice, sharing_counts
from hf_memopt.planner.market import boxes, card_fits, cards
from hf_memopt.planner.nothing_fits import nearest
from hf_memopt.planner.profiles import Profile
from hf_memopt.planner.samples import frames, lengths, video_tiers
from hf_memopt.planner.trl_choices import TrlChoice, TrlSpace
from hf_memopt.units import GIB, MIB

PLAIN = Choice("none", 2, 4, 1.0, "adamw_torch_fused", "bfloat16")
CHOICES = {
    "plain": PLAIN,
    "kept": replace(PLAIN, checkpointed=0.0),
    "every second": replace(PLAIN, checkpointed=0.5, knobs=frozenset({"loss_chunk_size"})),
    "in host memory": replace(PLAIN, inputs_offloaded=True, streamed=0.5, paged=True, optim="paged_adamw_8bit"),
    "generated": replace(PLAIN, trl=TrlChoice(steps_per_generation=4, generations=1, share=0.3, sleeps=True)),
}


def estimate(size: int, host: int = 0, **more) -> Estimate:
    made = Estimate(size, size, size, host, "forward", {}, {}, 2**40, {}, ())
    return replace(made, **more)


def settled(hardware: str = "rtx_4090", method: str = "lora", **asked) -> JobSpec:
    fields = {"seq_len": 256, "effective_batch_size": 8, **asked}
    return settle.settle(JobSpec(model="smollm2-135m", hardware=hardware, method=method, **fields), method)


def texts(found: dict) -> dict:
    return {str(key): str(value) for key, value in found.items()}


def test_what_trl_leaves_open():
    found = {}
    fixed = (
        *({}, {"beta": 0.0}, {"beta": 0.1}, {"precompute_ref_log_probs": True}, {"precompute_ref_log_probs": False}),
        *(GRPO, VLLM, VLLM | {"vllm_gpu_memory_utilization": 0.35, "vllm_enable_sleep_mode": True}),
        *({"num_generations": 2, "generation_batch_size": 8}, {"num_generations": 4, "steps_per_generation": 2}),
        *({"num_generations": 1}, {"num_generations": "4"}, {"padding_free": True}),
    )
    device = catalog()["rtx_4090"]
    job = SimpleNamespace(config=CONFIG, seq_len=2**14, device=device)
    asked = (
        *itertools.product(("grpo",), ("full", "lora"), fixed),
        *itertools.product(("rloo",), ("full",), fixed[4:]),
    )
    asked += (*itertools.product(("dpo", "kto"), ("full", "lora"), fixed[3:5]), ("reward", "full", fixed[-1]))
    for task, method, own in (*asked, ("dpo", "full", {}), ("dpo", "full", fixed[-1])):
        space = TrlSpace(task=task, method=method, devices=2, fixed=own)
        parts = {
            f"{strategy} {micro} {accumulation}": [*space.choices(strategy, micro, accumulation)]
            for strategy, micro, accumulation in (
                *(("none", 1, 4), ("zero2", 2, 4), ("zero3", 2, 1), ("fsdp2", 2, 8), ("ddp", 4, 3)),
            )
            if isinstance(space.setting("num_generations"), int | None)
        }
        said = [space.refused(strategy) for strategy in ("zero3", "fsdp2")]
        whole = [answered(space.whole_batch, batch) for batch in (None, 0, 4, 9)]
        rows = [
            f"{name}: {[(*part.fields().items(), *part.summary(), *part.families()) for part in some]}"
            for name, some in parts.items()
            if some
        ]
        found[f"{task} {method} {own}"] = [rows, said, whole, [name for name, _ in space.left_out()], space.colocates]
        every = [replace(PLAIN, micro_batch=2, accumulation=4, trl=part) for part in parts.get("zero2 2 4", ())]
        if space.colocates and every:
            shared = [one for weights in (3, 12, 20) for one in space.with_shares(every[0], job, weights * GIB)]
            found[f"shares {task} {method} {own}"] = [
                [(one.trl.share, one.trl.waves, one.trl.sleeps, *one.trl.summary()) for one in shared],
                *(space.notes(one, device) for one in shared[:3]),
            ]
        elif space.row.generates and every:
            found[f"notes {task} {method} {own}"] = [space.notes(one, device) for one in every]
    frozen.check("trl_spaces", texts(found))


def test_devices_of_a_plan():
    names = ("rtx_4090", "rtx_4090x2", "2x RTX 4090", "h100_80gb_x8", "h100_80gbx9", "h100_80gbx12", "h100_80gbx16")
    names += ("h100_80gbx17", "t4x13", "auto", "cpu", "nothing", "a100_80gb_x2")
    found = {}
    for name in names:
        found[name] = [answered(devices.split_count, name)]
        found[name] += [answered(devices.with_device_count, name, size) for size in (None, 1, 2, 8)]
        for strategy in (None, "none", "zero2", "zero3_offload_cpu", "zero9"):
            made = answered(devices.resolve_preset, name, "lora", strategy, None) if name != "auto" else "here"
            shown = made if isinstance(made, str) else (made.processes, made.machines, made.strategy, made.seq_len)
            found[f"{name} {strategy}"] = str(shown).partition(". ")[0]
    for row in ((None, None, None), (8, None, None), (7, None, None), (8, 2, None), (8, None, 4), (8, 3, None)):
        effective, micro, accumulation = row
        own = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
        own = {name: value for name, value in own.items() if value}
        for hardware in ("rtx_4090", "rtx_4090x2", "rtx_4090x4"):
            for both in (own, own | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}):
                asked = {"effective_batch_size": effective, "training": both}
                made = answered(lambda: settled(hardware, **asked))  # noqa: B023
                shown = made if isinstance(made, str) else (made.effective_batch_size, made.training, made.seq_len)
                found[f"{hardware} {effective} {both}"] = str(shown)
        tool = Tool(name="TRL", features=frozenset())
        for more in ({}, {"tool": tool}, {"world_size": 3, "tool": tool}, {"method": "full"}):
            spec = JobSpec(model="m", hardware="rtx_4090x2", **{"method": "lora", **more})
            spec = replace(spec, effective_batch_size=effective, training=own | {"optim": "adamw_torch", "seed": 3})
            opened = settle.left_open(spec)
            found[f"opened {row} {sorted(more)}"] = [opened.effective_batch_size, opened.world_size, opened.training]
    for memory, hardware in itertools.product((-1, 0, 1, 20 * GIB, 24 * GIB), ("rtx_4090", "apple_m2_16gb", "cpu")):
        made = answered(lambda: settled(hardware, memory=memory))  # noqa: B023
        shown = made if isinstance(made, str) else (made.memory, made.host_memory, made.memory_budget)
        found[f"{hardware} memory {memory}"] = str(shown) if hardware != "cpu" else isinstance(made, str)
    limited = settled(memory_args=MemoryArguments(max_memory_gib=7.0))
    found["limited"] = limited.memory
    for seq_len, batch, training in (
        *((8192, 8, {}), (8192, 4, {}), (4096, 8, {}), (2048, 8, {}), (8192, 1, {})),
        *((8192, 8, {"per_device_train_batch_size": 1}), (8192, 8, {"per_device_train_batch_size": 2})),
        (8192, 8, {"gradient_accumulation_steps": 1}),
    ):
        for hardware in ("a100_80gbx4", "a100_80gbx6"):
            spec = SimpleNamespace(training=training, seq_len=seq_len, batch=batch, hardware=hardware)
            made = answered(lambda: settled(hardware, seq_len=seq_len, effective_batch_size=batch, training=training))  # noqa: B023
            found[str(spec)] = made if isinstance(made, str) else sharing_counts(made)
    batches = {"seq_len": 8192, "effective_batch_size": 12}
    for more in (
        *({}, {"packed": True}, {"padded": True}, {"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}),
        *(
            {"strategy": "zero3"},
            {"strategy": "fsdp2"},
            {"task": "dpo"},
            {"tool": Tool(name="x", features=frozenset())},
        ),
        *({"method": "qlora"}, {"memory_args": MemoryArguments(sliding_window=64)}, {"hardware": "rtx_4090"}),
        *({"tool": Tool(name="x", features=frozenset({"shared"}))}, {"hardware": "h100_80gbx12", "strategy": "zero2"}),
    ):
        made = answered(lambda: settled(**{"hardware": "a100_80gbx6", **batches, **more}))  # noqa: B023
        found[f"shared with {sorted(more)} {len(found)}"] = made if isinstance(made, str) else sharing_counts(made)
    frozen.check("planned_devices", texts(found))


def profile_of(spec: JobSpec, choice: Choice, **memory) -> Profile:
    own = {**choice.memory_fields(), "target_memory_utilization": 0.9, **memory}
    preset = choice.configured(spec.preset)
    return Profile("balanced", 0.9, choice, preset, MemoryArguments(**own), estimate(GIB), 2.0, 0.87654)


def test_what_launches_a_profile(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = {}
    for hardware, method, strategy in (
        *(("rtx_4090", "lora", None), ("rtx_4090x2", "full", "ddp"), ("a100_80gbx4", "qlora", "zero2")),
        *(
            ("cpu", "lora", None),
            ("a100_80gbx4", "full", "fsdp2"),
            ("h100_80gbx16", "full", "zero3_offload_cpu"),
            ("t4", "qlora", None),
        ),
    ):
        lora = {"r": 4, "token": "x"} if method != "full" else {}
        spec = settled(hardware, method, strategy=strategy, effective_batch_size=64, lora=lora)
        for name, choice in CHOICES.items():
            choice = replace(choice, strategy=spec.preset.strategy)
            if name == "generated":
                spec = replace(spec, task="grpo", attn_implementation="eager", training={"max_completion_length": 9})
            profile = profile_of(spec, choice)
            whole = launch.as_dict(spec, profile)
            recipe = [word for word in launch.recipe_command(spec, profile) if not word.endswith(".py")]
            launcher = [word.rpartition("/")[2] for word in launch.launcher_command(profile)]
            kept = ("settings", "strategy", "memory_arguments", "model_kwargs", "lora", "relative_speed")
            beside = ("log", "save", "dataloader")
            arguments = {
                key: value for key, value in whole["training_arguments"].items() if not key.startswith(beside)
            }
            found[f"{hardware} {method} {strategy} {name}"] = [
                *(" ".join(launcher), " ".join(recipe), str([whole[key] for key in kept])),
                str(arguments),
            ]
    frozen.check("launches", found)


def test_what_is_proposed_in_words():
    found = {}
    for proposal in (
        *(proposals.Proposal(["a"], GIB), proposals.Proposal(["a", "b"], GIB, 0), proposals.Proposal(["a"], 1, GIB)),
        proposals.Proposal(["a"], GIB, sketched=True),
    ):
        found[proposal.text] = proposal.changes
    switches = {"activation_checkpointing": None, "torch_compile": None, "optim": None, "seed": 3, "bf16": False}
    found["set"] = [proposals.set_words(switches), proposals.set_words({"seed": None})]
    job = SimpleNamespace(fields={"bf16": True, "optim": "sgd", "output_dir": "a"}, memory_args=None, dtype="float32")
    for more in (
        *({"dtype": "bfloat16"}, {"memory_args": MemoryArguments(loss_chunk_size=9)}, {"fields": {"output_dir": "b"}}),
        *(
            {"memory_args": MemoryArguments(adam_mini=True), "fields": {}},
            {"fields": job.fields | {"torch_compile": 1}},
        ),
    ):
        after = SimpleNamespace(**{**vars(job), **more})
        found[str({key: str(value)[-60:] for key, value in more.items()})] = [
            proposals.differences(job, after),
            proposals.differences(after, job),
        ]
    spec = SimpleNamespace(memory_budget=20 * GIB, host_memory=HostMemory(30 * GIB, "x"), training={})
    host = replace(PLAIN, inputs_offloaded=True)
    zero3, in_host = replace(PLAIN, strategy="zero3"), replace(PLAIN, strategy="zero3_offload_cpu")
    for levels, choice, size, held in itertools.product(
        ({}, {"host": 1}, {"length": 2}),
        (PLAIN, host, zero3),
        (19 * GIB, 20 * GIB, 20 * GIB + 1),
        (30 * GIB, 31 * GIB),
    ):
        mix = nearest.Combination(levels, ["x"], spec, choice, size - 3 * GIB)
        made = nearest._proposal(mix, estimate(size, held))
        found[f"{levels} {choice.strategy} {choice.offloads} {size} {held}"] = [
            mix.certain,
            mix.size,
            made and made.text,
        ]
    for size in (None, 0, int(20 * GIB / 1.2), int(20 * GIB / 1.2) + 1):
        kinds = (zero3, in_host, replace(PLAIN, strategy="fsdp2"))
        found[f"certain {size}"] = [nearest.Combination({}, [], spec, one, size).certain for one in kinds]
    mixes = [
        nearest.Combination(levels, [], spec, PLAIN, sketched)
        for levels, sketched in (
            *(({}, 5), ({"devices": 2}, 5), ({"devices": 1, "length": 1}, 4), ({"devices": 2, "length": 2}, 6)),
            *(({"length": 1}, 4), ({"devices": 1}, 3), ({"method": 1}, 0)),
        )
    ]
    for one, other in itertools.product(mixes, mixes):
        short = [nearest._falls_short(one, other, estimate(times * GIB)) for times in (22, 40, 50, 60)]
        found[f"{one.levels} beside {other.levels}"] = [one.contains(other), one.size, *short]
    other = replace(mixes[4], choice=zero3)  # an engine of its own
    found["another strategy"] = [nearest._falls_short(other, mixes[0], estimate(60 * GIB)), other.size]
    found["no estimate"] = [nearest._proposal(mixes[0], None)]
    for name in ("llama-3.2-3b", "qwen3-30b-a3b", "qwen2.5-vl-7b"):
        spec = JobSpec(model=name, config=nearest.load_config(name))
        weights = nearest._weights(spec.config)
        smaller = [(text, replace(spec, config=nearest.load_config(text))) for text in nearest._smaller(spec)]
        found[f"smaller than {name}"] = [weights, [text for text, _ in smaller[:5]], len(smaller)]
        found[f"apart from {name}"] = [text for text, _ in nearest._apart(smaller)]
    found["config"] = nearest._as_config({"hidden_size": 4, "num_hidden_layers": 2})
    frozen.check("planned_proposals", texts(found))


def test_what_combinations_are_tried():
    """On a sketch that needs 10 GiB of a whole sample, 30 with DDP, and 4 with what uses host memory."""
    sizes = {"none": 10, "ddp": 30, "zero2": 16, "fsdp2": 14, "zero3": 12, "zero3_offload_cpu": 4}
    sketch = SimpleNamespace(
        device_bytes=lambda choice, length: (int(sizes[choice.strategy] * (1 + length) / 2 * GIB), 0),
        host_bytes=lambda choice: 50 * GIB * choice.offloads,
        outside_layers=GIB // 2,
    )
    found = {}
    for budget, strategy, host, share, levels in itertools.product(
        (3, 9, 13, 20), ("none", "ddp", "zero3"), (None, 40, 50), (1, 2), ({}, {"length": 1})
    ):
        preset = SimpleNamespace(strategy=strategy, processes=2, hardware=SimpleNamespace(label="card"))
        memory = host and HostMemory(host * GIB, "x")
        spec = SimpleNamespace(preset=preset, seq_len=512, memory_budget=budget * GIB, host_memory=memory, training={})
        changed = SimpleNamespace(**vars(spec) | {"seq_len": 512 // share})
        choices = [replace(PLAIN, strategy=name) for name in sizes if name != "none"]
        rows = nearest._combinations(spec, levels, ["shorter"], changed, choices, sketch)
        found[f"{budget} {strategy} {host} {share} {levels}"] = [
            (row.levels, row.texts, row.choice.strategy, row.sketched // MIB) for row in rows
        ]
    more = SimpleNamespace(
        preset=SimpleNamespace(processes=4, hardware=SimpleNamespace(label="card"), strategy="none")
    )
    for choice in (PLAIN, replace(PLAIN, strategy="zero2", shared=2)):
        found[f"texts {choice.shared}"] = nearest._texts(["a"], spec, more, choice)
    for hardware, method in (
        ("rtx_4090", "full"),
        ("a100_80gb", "full"),
        ("a100_80gbx2", "full"),
        ("rtx_3060", "lora"),
    ):
        for training in ({}, {"max_grad_norm": 0}, {"optim": "adamw_torch"}):
            spec = settled(hardware, method, training=training)
            rows = [
                (levels, text, made.preset.method, made.training)
                for levels, text, made in nearest._methods(spec, PLAIN)
            ]
            found[f"methods {hardware} {method} {training}"] = rows
        for times in (1, 2, 3):
            made = nearest._on_devices(spec, times)
            found[f"{hardware} × {times}"] = [made.effective_batch_size, made.preset.processes]
    frozen.check("planned_combinations", texts(found))


def test_cards_in_their_order(monkeypatch):
    device = catalog()["rtx_4090"]
    found = {}
    labels = ("GeForce RTX 9", "RTX 9 Laptop", "Quadro 9", "NVIDIA RTX 9", "NVIDIA RTX 9 Server", "Radeon RX 9", "B9")
    for label, size in itertools.product((*labels, "GB200 9", "GH200 9", "Arc A9", "Arc Pro 9"), (11, 12, 47, 48)):
        card = replace(device, label=label, memory=size * GIB, nominal_memory=size * GIB, name="another")
        found[f"{label} {size}"] = [boxes.boxes(card), boxes._kind(card)[1]]
    for capability in ("", "6.1", "7.4", "7.5", "8.9"):
        found[f"capability {capability}"] = boxes._typicality(replace(device, architecture=capability))[:3]
    found["names"] = [boxes.box_name(device, number) for number in (1, 2)]
    choice, host = PLAIN, replace(PLAIN, inputs_offloaded=True)
    fits = [
        card_fits.Fit(
            **{"device": catalog()[name], "devices": number, "method": "lora", "choice": settings, "share": share},
            **{"device_bytes": size * GIB, "host_bytes": GIB, "estimated": number > 1, "tokens_per_second": speed},
            **{"price": price, "tokens": tokens},
        )
        for name, number, settings, share, size, speed, price, tokens in (
            *(("rtx_4090", 1, choice, 0.90, 20, 1000.0, None, None), ("t4", 1, choice, 0.94, 14, 200.0, None, 10**7)),
            *(
                ("rtx_4090", 2, choice, 0.90, 20, 1800.0, 1.0, 10**7),
                ("rtx_4090", 4, host, 0.90, 9, 3000.0, 2.0, 10**7),
            ),
            *(("t4", 2, choice, 0.90, 5, None, 0.5, None), ("t4", 4, choice, 0.90, 5, 900.0, 1.0, None)),
            *(("rtx_4090", 1, choice, 0.90, 20, 905.0, 0.5, 10**7), ("t4", 8, choice, 0.90, 13, 1800.0, 1.0, None)),
        )
    ]
    found |= {f"fit {number}": [fit.to_dict(), fit.memory, cards._order(fit)] for number, fit in enumerate(fits)}
    order = {fit: number for number, fit in enumerate(fits)}
    for some in (fits[:2], fits[2:4], fits[3:4], fits[4:5], [fits[2], fits[6]], [fits[5], fits[7]]):
        found[f"best of {[order[fit] for fit in some]}"] = order[cards._best_box(some)]
    answer = card_fits.CardChoice(
        **{"model": "m", "seq_len": 9, "effective_batch_size": 8, "prices": None, "tokens": None},
        fits={"full": [], "lora": fits[:2], "qlora": fits[4:5]},
        least=("t4", 3, "x"),
    )
    whole = answer.to_dict()
    found["answer"] = [whole["first"], whole["currency"], whole["least"], len(whole["cards"]), len(list(answer))]
    fastest = [answer.fastest(method) for method in ("full", "lora", "qlora", "none")]
    found["fastest"] = [fit and order[fit] for fit in fastest]
    made_by = {1: None, 2: fits[3], 4: fits[2], 8: fits[6]}
    for every, prices in itertools.product((False, True), (None, {"t4": 1.0, "cpu": 2.0, "rtx_4090": 3.0})):
        prices = prices and SimpleNamespace(per_hour=prices)
        compared = cards._Comparison(prices=prices, max_price=None, every=every, tokens=None)
        names = [card.name for card in compared.cards()]
        found[f"compared {every} {bool(prices)}"] = names if prices else len(names) > 100
        market = SimpleNamespace(
            candidate=lambda card, number, method: SimpleNamespace(fit=lambda *_: made_by[number])
        )
        made = compared._of_card(market, device, "lora")
        found[f"boxes {every} {bool(prices)}"] = [order[fit] for fit in made]
    frozen.check("planned_cards", texts(found))


def test_which_cards_are_estimated():
    """Boxes of made searches: what is near its limit, or a little over it."""
    found, device = {}, catalog()["rtx_4090"]
    for over, share, known, strategy in itertools.product(
        (0.99, 1.0, 1.03, 1.05, 1.06), (0.85, 0.9), (0, 1), ("none", "zero2")
    ):
        choice = replace(PLAIN, strategy=strategy)
        spec = SimpleNamespace(
            preset=SimpleNamespace(method="lora", processes=2, hardware=device), memory_budget=1000, memory=1000
        )
        spec.effective_batch_size = 8
        search = SimpleNamespace(
            **{"needs": lambda choice: over * 1000, "caution": 1.0, "sketch_errors": {1: 2} if known else {}},  # noqa: B023
            **{"estimates": {}, "choices": [choice, replace(choice, inputs_offloaded=True)], "seconds": {choice: 2.0}},
            **{"sketched": lambda budget: choice if over * 1000 <= budget else None, "host_bytes": lambda choice: 7},  # noqa: B023
            sketch=SimpleNamespace(job=SimpleNamespace(seq_len=100)),
        )
        box = cards._Candidate(spec, search)
        market = SimpleNamespace(looked_at=[box], candidate=lambda *asked: box)  # noqa: B023
        row = card_fits.Fit(
            **{"device": device, "devices": 1, "method": "lora", "choice": choice, "share": 0.9, "host_bytes": 0},
            **{"device_bytes": int(share * device.memory), "estimated": False, "tokens_per_second": 1.0},
        )
        for name, rows in (("alone", []), ("two", [replace(row, estimated=True, devices=4), row]), ("one", [row])):
            asked = [bool(one is box) for one, _ in cards._doubtful(market, {"lora": rows})]
            found[f"{over} {share} {known} {strategy} {name}"] = len(asked)
        search.needs = lambda choice: over * 900 if choice.inputs_offloaded else over * 1000  # noqa: B023
        fit = box.fit(0.5, 10**6)
        found[f"{over} fit"] = fit and [fit.share, fit.price, fit.tokens_per_second, fit.device_bytes, fit.host_bytes]
        found[f"{over} least"] = [cards._least(market, "lora"), cards._least(market, "full"), box.memory // GIB]
    frozen.check("planned_looks", texts(found))


def test_weights_on_device_and_host():
    found = {}
    for hardware, method, more in (
        *(("rtx_4090", "full", {}), ("rtx_4090", "lora", {}), ("rtx_4090", "qlora", {}), ("t4", "full", {})),
        *(
            ("rtx_4090x2", "lora", {}),
            ("rtx_4090", "full", {"strategy": "zero2_offload_cpu"}),
            ("apple_m2_16gb", "lora", {}),
        ),
        *(
            ("rtx_4090", "full", {"training": {"optim": "sgd"}}),
            ("rtx_4090", "full", {"training": {"max_grad_norm": 0}}),
        ),
        *(("rtx_4090", "full", {"frozen": ("embeddings",)}), ("rtx_4090", "qlora", {"streaming": True})),
        ("rtx_4090", "lora", {"memory_args": MemoryArguments(weight_streaming=True)}),
        (
            "rtx_4090",
            "full",
            {"memory_args": MemoryArguments(optimizer_in_backward=True), "training": {"max_grad_norm": 0}},
        ),
    ):
        spec = answered(lambda: settled(hardware, method, **more))  # noqa: B023
        if isinstance(spec, str):
            found[f"{hardware} {method} {more}"] = spec
            continue
        alone = streamed_weights.weights_alone(spec)
        made = streamed_weights.streaming_spec(spec)
        row = found[f"{hardware} {method} {sorted(more)}"] = [alone, made and made.streaming]
        for budget, host in ((0, 0), (-1, 1), (-1, 0), (1, 0)) if alone else ():
            limited = replace(spec, memory=int((alone[0] + budget) / 0.94) + 1, host_memory=HostMemory(host, "a box"))
            row += [bool(streamed_weights.excessive_weights(limited)), limited.memory_budget - alone[0]]
            row.append(streamed_weights.lacks_memory(limited)[:40])
    streams = [replace(PLAIN, streamed=share, micro_batch=micro) for share in (0.5, 1.0) for micro in (1, 2)]
    for budget, held, host in itertools.product((8, 10, 20), (9, 11), (None, HostMemory(5 * GIB, "a box"))):
        needs = {choice: (10 - 4 * choice.streamed + choice.micro_batch) * GIB for choice in streams}
        made = {one: estimate(int(held * GIB), 7 * GIB + 1) for one in streams}
        asked = []
        search = SimpleNamespace(
            **{"short_of_host": streams[1:], "choices": streams[:1], "needs": needs.get, "host_memory": host},
            **{
                "host_bytes": lambda choice: int(choice.streamed * 6 * GIB),
                "estimates": made,
                "estimate": asked.append,
            },
        )
        what = streamed_weights.what_lacks(search, budget * GIB)
        change = streamed_weights.with_host_memory(SimpleNamespace(memory_budget=budget * GIB), search)
        tried = [[(one.streamed, one.micro_batch) for one in some] for some in asked]
        found[f"lacks {budget} {held} {bool(host)}"] = [what, change and change.text, tried]
    frozen.check("planned_weights", texts(found))


def test_why_a_plan_has_what_it_has():
    found, spec = {}, settled()
    budget, host = spec.memory_budget, replace(PLAIN, inputs_offloaded=True)
    for number, (needs, held, smallest) in enumerate(
        ((budget, 9 * GIB, PLAIN), (budget + 1, 9 * GIB, PLAIN), (budget - 1, 80 * GIB, host), (budget, 0, None))
    ):
        search = SimpleNamespace(
            **{"estimates": {PLAIN: estimate(needs, held), host: estimate(needs, held)}, "needs": lambda one: needs},  # noqa: B023
            **{"smallest": lambda: smallest, "choices": [PLAIN], "one_sample": lambda name: smallest},  # noqa: B023
        )
        found[f"too large {number}"] = planning._too_large(spec, search, smallest).reason
        for last in (False, True):
            made = planning._nothing_fits(replace(spec, quick=True), search, [], [], print, last)
            found[f"nothing fits {number} {last}"] = [made.missing_bytes, [one.text for one in made.proposals]]
    for hardware, name, choice in itertools.product(("rtx_4090", "apple_m2_16gb"), ("safe", "maximum"), (PLAIN, host)):
        rows = planning._safe_left_out([replace(profile_of(settled(hardware), choice), name=name)])
        found[f"{hardware} {name} {choice.offloads}"] = [(row.settings, row.reason) for row in rows]
    said = []
    for methods in (("lora",), ("full", "lora", "qlora")):
        planning._numbered(said.append, "lora", methods)("tracing")
    found["said"] = said
    picks = [None, PLAIN, PLAIN, host]
    for number in range(5):
        search = SimpleNamespace(
            fastest_for=lambda budgets: found.setdefault("budgets", [*budgets]) and [None] * number + picks[number:],  # noqa: B023
            seconds={PLAIN: 2.0, host: 4.0},
            estimates={PLAIN: "estimate of plain", host: "of host"},
        )
        rows = planning._profiles(spec, search)
        found[f"profiles {number}"] = [
            (row.name, row.share, row.relative_speed, row.seconds, row.estimate, row.memory_args.levers())
            for row in rows
        ]
    proposal = proposals.Proposal(["x"], GIB, spec=spec, choice=replace(PLAIN, checkpointed=0.0))
    given = {"per_device_train_batch_size": 2, "optim": "sgd", "activation_checkpointing": True, "seed": 3}
    for method in ("lora", "full"):
        asked = JobSpec(model="m", method=method, training=given)
        found[f"given up {method}"] = planning._given_up(asked, proposal)
    frozen.check("planned_reasons", texts(found))


def test_samples_that_fit(monkeypatch):
    found, spec = {}, settled(host_memory=HostMemory(9 * GIB, "x"))
    host = replace(PLAIN, inputs_offloaded=True)
    for positions, choice, first in itertools.product((None, 100, 256, 257, 5000), (PLAIN, host), (10, 8192)):
        text = SimpleNamespace(max_position_embeddings=positions)
        asked = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda text=text: text), memory=spec.memory)
        asked.host_memory = spec.host_memory
        search = lengths._search(asked, choice, lambda text: None, first)
        row = found[f"lengths {positions} {choice.offloads} {first}"] = [search.candidates[:3], search.candidates[-1]]
        row += [search.first, [round(limit) for limit in search.limits], len(search.candidates)]
        for size in (int(spec.memory * 0.9), int(spec.memory * 0.9) + 1):
            one = estimate(size, 9 * GIB + 1)
            row += [search.guess(1000, one), search.used(one)]
            search.estimates[search.candidates[-1]] = one
            row.append([lengths._limited_by(search, tokens) for tokens in (search.candidates[0], 0)])
    low, high = (estimate(size, size, step_seconds=size / 4, tokens_per_second=None) for size in (8, 16))
    low, high = replace(low, breakdown={"activations": 4, "other": 2}), replace(high, breakdown={"activations": 8})
    for share in (-1.5, 0.25, 0.5, 2.0):
        made = frames._moved(low, low, high, share)
        found[f"moved {share}"] = [made.device_bytes, made.capacity_bytes, made.breakdown, made.step_seconds]
        found[f"moved {share}"].append(made.tokens_per_second)
    for two, four, budget in itertools.product((20, 40), (20, 40), (900, 1000, 4000, 10**6)):
        monkeypatch.setattr(frames, "_tokens", lambda job, count: {2: two, 4: four}[count])  # noqa: B023
        text = SimpleNamespace(max_position_embeddings=None)
        video = SimpleNamespace(temporal_patch_size=lambda config: 2)
        job = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda text=text: text), video=video)
        search = frames._search(job, budget, lambda text: None)
        one = replace(estimate(1000), breakdown={"parameters": 500, "activations": 400, "gradients": 50})
        row = [round(search.guess(frames_, one), 6) for frames_ in (2, 10)]
        found[f"frames {two} {four} {budget}"] = [
            *(row, search.tokens(6), search.candidates[:2], search.near, search.first),
        ]
    for memory, batch, fixed in itertools.product((13, 14, 21), (1, 4, 8), (None, 9)):
        limits = video_tiers.TierLimits(batch, video_tiers.FixedLimits(max_frames=fixed), longest=60_000)
        monkeypatch.setattr(video_tiers, "_tokens", lambda job, clip: clip.frames * clip.side)
        for positions in (None, 30_000, 1):
            text = SimpleNamespace(max_position_embeddings=positions)
            job = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda text=text: text))
            clips = video_tiers.wanted_clips(job, memory * GIB, limits)
            found[f"clips {memory} {batch} {fixed} {positions}"] = [len(clips), str(clips[:1] + clips[-1:])]
    for evaluated in ("no", "steps"):
        fields = {"eval_strategy": evaluated, "per_device_eval_batch_size": 3}
        job = SimpleNamespace(fields=fields)
        found[f"load {evaluated}"] = video_tiers._load(job, video_tiers.Clip(4, 10, 2))
    frozen.check("planned_samples", texts(found))
