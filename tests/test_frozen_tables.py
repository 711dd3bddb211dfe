"""What functions answer over grids of inputs, looked at once and frozen: each border and each sentence is in them."""

import itertools
import random
import tomllib
from collections.abc import Callable
from pathlib import Path

import frozen
import pytest

from hf_memopt.errors import InputError
from hf_memopt.units import GIB, MIB, read_bytes, read_number, size

FOLDER = Path(__file__).parent


def answered(function: Callable, *args, **kwargs):
    """What a function returns, or the sentence that refuses it."""
    try:
        return function(*args, **kwargs)
    except InputError as error:
        return f"error: {str(error).partition('. ')[0] if str(error).startswith('unknown ') else error}"


def checked(name: str, found: dict) -> None:
    """Frozen as texts, a line each."""
    frozen.check(name, {str(key): str(value) for key, value in found.items()})


# ---- other tools' files and commands


def translated(source) -> dict:
    """All that a translation says."""
    translation = source.translate()
    remarks = ("neutral", "unwritten", "approximated", "refused", "unknown")
    return {
        **{name: getattr(translation, name) for name in ("fields", "run", "translated")},
        **{name: sorted(str(remark) for remark in getattr(translation, name)) for name in remarks},
        "faults": sorted(text for _, text in translation.faults()),
        "engine": source.engine,
        "label": source.label,
    }


def test_files_of_other_tools(monkeypatch):
    from hf_memopt.foreign.source import read_source

    monkeypatch.chdir(FOLDER)
    names = tomllib.loads(Path("foreign_configs/expected.toml").read_text(encoding="utf-8"))
    found = {name: answered(lambda: translated(read_source(f"foreign_configs/{name}"))) for name in names}  # noqa: B023
    frozen.check("foreign_files", found)


def test_commands_of_other_tools(tmp_path, monkeypatch):
    import test_foreign_commands

    from hf_memopt.foreign.source import read_source

    test_foreign_commands.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)

    def said(text: str) -> dict:
        source = read_source(text)
        command, whole = source.command, translated(source)
        parts = ("settings", "config", "style", "environment", "folder", "launch")
        return {
            "fields": whole["fields"],
            "remarks": [*whole["approximated"], *whole["faults"], *whole["neutral"]],
            **{name: str(getattr(command, name)) for name in parts},
            "arguments": [[one.key, str(one.value), text[one.start : one.end]] for one in command.arguments],
        }

    frozen.check("foreign_commands", {text: answered(said, text) for text in test_foreign_commands.COMMANDS})


def test_advice_on_logs():
    from hf_memopt.reports.advice import advise_on_text

    found = {}
    for path in sorted((FOLDER / "logs").glob("*.txt")):
        advice = advise_on_text(path.read_text(encoding="utf-8", errors="replace"))
        found[path.stem] = advice and advice.to_dict()
    frozen.check("advice", found)


# ---- devices

DEVICES = (
    *("t4", "v100_pcie_16gb", "rtx_3060", "rtx_4090", "a100_80gb", "h100_80gb", "h200_141gb", "b200"),
    *("mi300x", "apple_m2_16gb", "cpu", "rtx_5090", "rx_7900_xtx", "l40s", "gh200_96gb"),
)


def devices():
    from hf_memopt.hardware.catalog import catalog

    return {name: catalog()[name] for name in DEVICES if name in catalog()}


def test_rates_of_attention():
    from hf_memopt.hardware.attention_kernels import attention_kernel, attention_rate

    asked = (None, "sdpa", "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3@main", "eager")
    found = {}
    for (name, device), implementation, element, masked in itertools.product(
        devices().items(), asked, (2, 4), (False, True)
    ):
        kernel = attention_kernel(device, implementation, element, masked)
        rates = [
            frozen.figures(attention_rate(device, kernel, element, head, keys, backward))
            for head, keys, backward in ((64, 200, False), (128, 8192, True), (192, 600, False), (256, 1024, True))
        ]
        found[f"{name} {implementation} {element} {masked}"] = f"{kernel}: {rates}"
    checked("attention_rates", found)


def test_seconds_of_links():
    from hf_memopt.hardware.links import Links

    checked(
        "links",
        {
            f"{name} {ranks} {in_box}": frozen.figures(Links(device, ranks).seconds(10**9, 33, in_box))
            for (name, device), ranks, in_box in itertools.product(
                devices().items(), (1, 2, 4, 8, 9, 16, 64), (False, True)
            )
        },
    )


def test_seconds_of_kernels():
    from hf_memopt.estimator.accounting.work import Attention, Kernel
    from hf_memopt.estimator.timing.speed import has_rates, kernel_seconds, memory_rate, peak_rate

    kinds = {
        "small": Kernel(False, 10, 10),
        "matmul": Kernel(False, 10**12, 10**7, 2),
        "thin matmul": Kernel(False, 10**9, 10**9, 2),
        "wide matmul": Kernel(False, 10**12, 10**7, 4),
        "moved": Kernel(False, 0, 10**9),
        "cached": Kernel(False, 0, 2 * 10**7),
        "convolution": Kernel(False, 10**12, 10**6),
        "attention": Kernel(False, 10**12, 10**6, 0, Attention(128, 2048, 2, True)),
        "wide attention": Kernel(False, 10**12, 10**6, 0, Attention(128, 2048, 4, False, True)),
        "optimizer": Kernel(True, 0, 10**9),
    }
    found = {}
    for name, device in devices().items():
        known = (has_rates(device), frozen.figures(memory_rate(device)), peak_rate(device))
        found[name] = f"{known}"
        for (kind, kernel), cached in itertools.product(kinds.items(), (0.0, 1.0)):
            seconds = kernel_seconds({kernel: 7}, device, None, cached)
            found[f"{name} {kind} {cached}"] = [frozen.figures(one) for one in seconds]
    checked("kernel_seconds", found)


def test_memory_of_a_device_beside_the_allocator():
    from hf_memopt.estimator import overheads
    from hf_memopt.estimator.accounting.ledger import Peak

    found = {}
    for name, device in devices().items():
        peaks = {"load": Peak(5, {}), "eval: x": Peak(7, {"logits": 3, "activations": 4}, 1, 5 * GIB)}
        overheads.add_workspace(peaks, device)
        overheads.add_kept_logits(peaks, 11)
        overheads.add_concatenation(peaks, 20)
        found[name] = [
            overheads.context(device),
            *peaks.values(),
            *(overheads.paged_on_device(part * device.memory // 8, peaks, device) for part in (0, 6, 8, 9)),
            *(line for expands in (True, False) for line in overheads.measured_memory(device, expands)),
        ]
    checked("device_overheads", found)


def test_words_for_cards():
    from hf_memopt.hardware.catalog import read_devices

    cards = ("4090", "RTX 4090", "A100", "a100 80", "H100 PCIe", "T4", "V100s", "MI300x", "3080 Ti", "RTX 4060Ti 16GB")
    cards += ("M2", "macbook air m2", "colab", "Tesla T4 (Colab)")
    forms = (
        *("{}", "2x {}", "{}x8", "{} (4 GPUs)", "8 {}", "{}:2", "0x{}", "2000x {}", "{} 16", "two {}", "my {} laptop"),
    )
    forms += ("{} 24gb", "{}, {}", "{} and T4", "2 nodes of 8x{}", "x2 {}", "{} or 3090", "24564MiB {}")
    series = ("rtx", "rtx 30", "16GB", "4", "6000", "nothing", "24gb", "2x 16GB", "apple", "8x rtx")
    texts = [*series, *(form.format(card, card) for form in forms for card in cards)]
    checked("words_for_cards", {text: answered(read_devices, text) for text in texts})


# ---- the allocator


@pytest.mark.parametrize("expandable", [True, False])
def test_what_the_allocator_reserves(expandable):
    from hf_memopt.estimator.allocator.caching import CachingAllocator

    found = {}
    for seed, limit in itertools.product(range(6), (None, 300 * MIB)):
        draw, allocator, held, seen = random.Random(seed), CachingAllocator(expandable, limit), [], []
        for number in range(400):
            if held and draw.random() < (0.45 if number < 250 else 0.55):
                allocator.release(held.pop(draw.randrange(len(held))))
            else:
                scale = draw.choice((300, 5_000, MIB, MIB + 1, 6 * MIB, 10 * MIB, 23 * MIB))
                held.append(allocator.allocate(draw.randint(scale // 2, scale)))
            if number % 8 == 0:
                seen.append(allocator.reserved // MIB)
        found[f"{seed} {limit}"] = [seen, allocator.peak, sorted((one.address, one.size) for one in held)[::5]]
    checked(f"allocator_{expandable}", found)


# ---- frames


def test_frames_of_a_clip():
    from hf_memopt.video.frame_limits import FrameLimits, Sampling

    samplings = (
        *({}, {"fps": 1}, {"fps": 30.0}, {"nframes": 3}, {"nframes": 9, "max_frames": 6}),
        *({"min_frames": 7, "fps": 0.1}, {"max_frames": 5}, {"min_pixels": 90_000}, {"max_pixels": 20_000}),
        *({"total_pixels": 500_000}, {"total_pixels": 100, "min_pixels": 3_000}),
        {"total_pixels": 10**6, "max_pixels": 50_000, "min_pixels": 60_000},
    )
    limits = ({}, {"max_frames": None, "fps": 2}, {"max_frames": 7, "multiple_of": 2}, {"fps": 0.5, "multiple_of": 4})
    limits += ({"max_pixels": 10_000, "side_multiple": 28, "multiple_of": 2},)
    found = {}
    for sampling, more in itertools.product(samplings, limits):
        asked = FrameLimits(**more, sampling=Sampling(**sampling))
        counts = [
            asked.count(total, seconds) for total, seconds in ((1, 0.04), (3, 1), (10, 4), (150, 6), (3000, 100))
        ]
        sizes = [asked.frame_size(*shape) for shape in ((360, 640, 8), (50, 31, 1), (2000, 20, 3), (1080, 1920, 64))]
        found[f"{sampling} {more}"] = f"{counts} {sizes} {asked.pixel_bounds(6)}"
    checked("frame_limits", found)


def test_sampling_that_cannot_be():
    from hf_memopt.video.frame_limits import FrameLimits, Sampling, parse_frame_size

    found = {}
    for name, value in itertools.product(
        ("fps", "nframes", "min_frames", "max_pixels", "video_start", "sample_fps"),
        (None, 0, 1, 2.5, 3.0, -1, True, "2", float("inf")),
    ):
        found[f"{name} {value!r}"] = answered(Sampling, **{name: value})
    for both in ({"fps": 1, "nframes": 2}, {"video_start": 2, "video_end": 2}, {"video_end": 1}, {"video_start": 3}):
        found[str(both)] = answered(Sampling, **both)
    for outer, inner in (({"fps": 1}, {"nframes": 2}), ({"fps": 1, "x": 2}, {"fps": None}), ({"fps": 0}, {})):
        found[f"{outer} {inner}"] = answered(Sampling.read, outer, inner, "row 1")
    for name, value in itertools.product(("max_frames", "fps", "max_pixels"), (None, 0, -1, 1)):
        found[f"limit {name} {value}"] = answered(FrameLimits, **{name: value})
    for text in ("640x360", "640×360", " 2 x 3 ", "0x4", "4x0", "4", "1x2x3", "ax2"):
        found[text] = answered(parse_frame_size, text)
    checked("sampling", found)


def test_sizes_that_processors_scale_to():
    from hf_memopt.video.pixels import FAMILIES

    shapes = ((4, 360, 640), (3, 1080, 1920), (64, 720, 480), (1, 20, 31), (5, 30, 3000), (200, 480, 480))
    changes = ({}, {"cap_pixels_per_frame": True}, {"cap_pixels_per_frame": True, "max_video_tokens": 300})
    found = {}
    for (name, family), change in itertools.product(FAMILIES.items(), changes):
        steps = [family.resize_steps({**family.defaults, **change}, *shape) for shape in shapes]
        found[f"{name} {change}"] = f"{steps} {family.text_tokens}"
    checked("frame_sizes", found)


# ---- values, units, rows


def test_values_of_fields():
    from transformers import TrainingArguments

    from hf_memopt.field_values import fit, hints_of

    names = (
        *("bf16", "learning_rate", "max_steps", "seed", "save_steps", "optim", "eval_strategy", "report_to", "fsdp"),
        *("per_device_train_batch_size", "adam_beta1", "run_name", "max_grad_norm", "lr_scheduler_kwargs"),
        *("log_level", "num_train_epochs", "dataloader_num_workers", "eval_delay", "torch_empty_cache_steps"),
        "label_names",
    )
    values = (
        *(True, False, None, 0, 1, 2, -1, -2, 1.0, 0.5, 1.5, 2**31, 2**63, float("nan"), "1", "0", "yes", "no", "2k"),
        *("1e-4", "AdamW_Torch", "steps", "", "abc", [], ["a"], ["a", 1], {"a": 1}, "1_000", "3 GB", 1025),
    )
    hints = hints_of(TrainingArguments)
    checked(
        "field_values",
        {f"{name}={value!r}": answered(fit, hints, {name: value}, "x: ") for name in names for value in values},
    )
    own = {"max_length": int, "loss_chunk_size": int, "max_memory_gib": float, "frame_cache_gib": float, "seed": int}
    texts = ("2k", "1.5k", "24GB", "3 GiB", "512M", "2,048", "1", "-1", "0", "12 tokens", "2k tokens", "1e3", "10**3")
    checked("own_values", {f"{name}={text}": answered(fit, own, {name: text}) for name in own for text in texts})


def test_numbers_and_sizes():
    from hf_memopt.estimator.timing.duration import Amount, duration, parse_count, run_duration, time_text, two_digits

    found = {}
    texts = (
        "10M|2.5B|300k|1e9|2,048|20,48|1_000|1_000_000|2k tokens|2k|3 bn|5t|k|M||1.5|0.5|-3|-1|0|7|ten|nan|1e3|1e99"
    )
    for text in (*texts.split("|"), "1e999", "1,5", "10 MB"):
        read = [read_number(text), read_number(text, 1024, "max_length"), read_number(text, of="samples")]
        found[text] = [*read, read_bytes(text), answered(parse_count, text, "tokens")]
    for text in ["24GB", "24 GiB", "512M", "1.5tb", "7 kib", "3 bytes", "G", "GB", "1_0 k", "24"]:
        found[text] = read_bytes(text)
    for value in (None, 0, 1, 1023, 1024, 1075, 2**20 - 1, 2**20, 2**30 - 1, 2**30, 5 * 2**40, -(2**21), 53.7 * 2**20):
        found[f"size {value}"] = [size(value), size(value, 2**30), size(value, 2**20)]
    for value in (
        *(1e-4, 0.5, 0.9994, 1, 40, 89.9, 90, 91.4, 700, 5399, 5400, 19_000, 48 * 3600 - 1, 48 * 3600, 1e7, 123456789),
    ):
        found[f"time {value}"] = [time_text(value), two_digits(value)]
    found["duration"] = [duration(10**9, 5e3, 2.5, 8), duration(7, 2.0), run_duration(100, 3.6, 2.0, 4)]
    found["unknown"] = [run_duration(None, 1.0), run_duration(1, None)]
    for asked in (
        *({}, {"tokens": 5}, {"samples": 3}, {"samples": 3, "epochs": 1.5}, {"epochs": 2}, {"tokens": 1, "epochs": 1}),
        *({"price": 2}, {"tokens": 1, "samples": 1}, {"samples": 2, "price": 1}),
    ):
        amount = answered(Amount, **asked)
        counts = amount if isinstance(amount, str) else (amount.count_samples(), amount.count_tokens(10))
        found[f"amount {asked}"] = counts
    checked("numbers", found)


ROWS = (
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "user", "content": "a"}]},
    {"messages": []},
    {"messages": "a"},
    {"messages": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}]},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "narrator", "content": "b"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "model", "content": "b"}]},
    {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "user", "content": "a", "weight": 0}, {"role": "assistant", "content": "b", "weight": 1}]},
    {"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"messages": [{"role": "system", "content": "t"}, {"role": "user", "content": "a"}], "system": "s"},
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "system": "s",
        "system_prompt": "t",
    },
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "tools": [{"function": {"name": "f", "x": None}}],
    },
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "{"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "videos": ["v"]},
    {"prompt": "a", "completion": "b"},
    {"prompt": "a", "completion": ""},
    {"prompt": ["a"], "completion": "b"},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "user", "content": "b"}]},
    {"instruction": "a", "input": "i", "output": "b"},
    {"instruction": "a", "output": None},
    {"text": "a"},
    {"text": "\u2800 "},
    {"text": None},
    {"chosen": "a", "rejected": "b", "prompt": "p"},
    {"chosen": "a", "rejected": "a", "prompt": "p"},
    {
        "chosen": [{"role": "assistant", "content": "a"}],
        "rejected": [{"role": "assistant", "content": "b"}],
        "prompt": [{"role": "user", "content": "p"}],
    },
    {"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]},
    {
        "chosen": [{"role": "user", "content": "p"}],
        "rejected": [{"role": "user", "content": "p"}, {"role": "user", "content": "q"}],
    },
    {"chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]},
    {"label": 1, "text": "a", "weight": 2},
)


def test_rows_of_every_form():
    from hf_memopt.data.chat import find_answer_kind, read_answer
    from hf_memopt.data.columns import FORMS, find_form, find_refused, find_unused
    from hf_memopt.data.pairs import check_pair, check_prompt
    from hf_memopt.data.turns import is_blank, joined_text, read_tools

    found = {}
    for row in ROWS:
        form, names = find_form(row), tuple(row)
        of_form = [answered(read_answer, row, "row 3", form, find_answer_kind([row], form))] if form else []
        if {"chosen", "rejected"} <= row.keys():
            of_form += [answered(check_pair, row, "row 3"), answered(check_pair, row, "row 3", None, False)]
        if "prompt" in row:
            of_form.append(answered(check_prompt, row, "row 3", ("prompt",)))
        unused = [
            (find_refused(names, one, media), find_unused(names, one, media)) for one in FORMS for media in (0, 1)
        ]
        found[str(row)] = [form, *of_form, answered(read_tools, row, "row 3"), *(unused if len(names) > 2 else ())]
    for content in (
        *(None, "", " ", "a", ["a", {"type": "text", "text": "b"}], [], [{"type": "image"}], {"text": ""}, 3),
    ):
        found[str(content)] = [is_blank(content), answered(joined_text, content, "row 1")]
    checked("rows", found)


def test_packs():
    """Best-fit decreasing, by trying every pack."""
    from hf_memopt.data.sample_batches import pack_best_fit

    for seed in range(40):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 50) for _ in range(draw.randint(0, 60))]
        packs: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            sizes = [sum(lengths[one] for one in pack) for pack in packs]
            fitting = [place for place, held in enumerate(sizes) if held + lengths[index] <= 50]
            if not fitting:
                packs.append([index])
                continue
            packs[max(fitting, key=lambda place: (sizes[place], -place))].append(index)
        assert pack_best_fit(lengths, 50) == packs


def test_texts_without_secrets():
    from hf_memopt.redaction import is_secret, redact, redact_argv, redact_text

    names = ("hub_token", "hubToken", "pad_token", "token_ids", "api_key", "keys", "API-KEY", "wandb_key_id", "monkey")
    names += ("passwd", "max_tokens", "aws_secret_access_key", "x_key", "key_x", "credentials", "push_to_hub_token")
    texts = (
        *("hf_" + "a" * 16, "hf_" + "a" * 15, "token=abc", "my token is x", "--hub_token abc --n 3", "api_key: 'x y'"),
    )
    texts += (
        *("https://u:p@h/x", "Authorization: Bearer abc", '"password": "a", "n": 2', "sk-" + "b" * 16),
        "ghp_" + "c" * 20,
    )
    found = {
        **{name: is_secret(name) for name in names},
        **{text: [redact_text(text), redact_argv(text.split())] for text in texts},
        "nested": redact({"a": {"hub_token": "x", "b": ["token=y", 3]}, "token": None, "api_key": True, "t": ("z",)}),
    }
    checked("secrets", found)


# ---- kernels, batches, presets


def test_what_backward_of_flash_attention_allocates():
    import torch

    from hf_memopt.estimator.accounting.flash_kernels import BACKWARD, Attention, check_call

    found = {}
    for flash, head, kv_heads, causal, ragged, capability in itertools.product(
        BACKWARD, (32, 64, 72, 96, 104, 128, 136, 192, 256), (2, 8), (True, False), (True, False), (9.0, 10.0, 12.0)
    ):
        call = Attention(3, 1000, 700, 8, kv_heads, head, torch.bfloat16, causal, ragged, capability)
        held = [f"{list(one.shape)} {one.dtype}".replace("torch.", "") for one in BACKWARD[flash](call)]
        found[f"{flash} {head} {kv_heads} {causal} {ragged} {capability}"] = (
            sum(one.numel() * one.element_size() for one in BACKWARD[flash](call)),
            held if head == 96 else len(held),
        )
    for flash, dtype, head, capability in itertools.product(
        BACKWARD, (torch.float16, torch.float32), (128, 136, 256, 264), (8.0, 9.0, 10.3, 12.0)
    ):
        found[f"check {flash} {dtype} {head} {capability}"] = answered(check_call, flash, dtype, head, capability)
    checked("flash_kernels", found)


def test_batches_are_what_trying_all_numbers_finds():
    """The largest micro-batch up to the preferred one whose product with accumulation and processes is the batch."""
    from hf_memopt.presets.batch import batch_settings

    for effective, preferred, processes in itertools.product(range(1, 25), (1, 3, 8), (1, 2, 3)):
        all_numbers = itertools.product(range(1, 25), repeat=2)
        right = [(m, a) for m, a in all_numbers if m <= preferred and m * a * processes == effective]
        answer = answered(batch_settings, effective, preferred, processes)
        assert answer == max(right) if right else answer.startswith(f"error: an effective batch of {effective} cannot")
        for number in (1, 2, 5):
            for fixed in ({"micro": number}, {"accumulation": number}):
                share, rest = divmod(effective, processes)
                answer = answered(batch_settings, effective, preferred, processes, **fixed)
                if rest or share % number:
                    assert answer.startswith("error: ")
                else:
                    pair = (number, share // number)
                    assert answer == (pair if "micro" in fixed else pair[::-1])
    odd = {}
    for numbers in (
        *((0, 4, 1), (10, 4, 4), (1, 4, 4), (12, 4, 1, 5), (12, 4, 1, None, 5), (12, 4, 1, 0), (12, 4, 5, 7, 9)),
    ):
        odd[numbers] = answered(batch_settings, *numbers)
    checked("batches", odd)


def test_clips_in_the_order_of_preference():
    from hf_memopt.planner.samples.video_tiers import FixedLimits, guide_row, ranked_clips

    found = {}
    for memory, effective in itertools.product((8, 13.99, 14, 20.99, 21, 80), (1, 6, 32)):
        for fixed in ({}, {"max_frames": 12}, {"max_pixels_per_frame": 50_000}, {"micro_batch": 3}):
            clips = list(ranked_clips(int(memory * GIB), effective, FixedLimits(**fixed)))
            kept = [(clip.frames, clip.side, clip.micro_batch) for clip in clips]
            found[f"{memory} {effective} {fixed}"] = (guide_row(int(memory * GIB)), len(kept), kept[:9], kept[-3:])
    checked("ranked_clips", found)


PRESETS = ("t4", "rtx_4090", "l40s_x4", "h100_80gb_x8", "h100_80gb_x16_nodes", "apple_m2_16gb", "cpu_x2", "mi300x")
OVERRIDES = (
    *({}, {"fp16": True}, {"bf16": True}, {"activation_checkpointing": False}, {"dataloader_num_workers": 0}),
    *({"use_cpu": True}, {"optim": "adamw_torchs"}, {"optim": "sgd"}),
    *({"torch_compile": False, "torch_compile_mode": "x"}, {"torch_compile": False}),
    *({"torch_compile": True, "torch_compile_backend": "y"}, {"lr_scheduler_kwargs": "a"}),
    *({"lr_scheduler_kwargs": '{"a": 1}'}, {"activation_checkpointing_kwargs": "x"}, {"optim_args": "a=1, b=2"}),
    *({"optim_args": "a"}, {"optim_args": "a=b=c"}, {"output_dir": ""}, {"effective_batch_size": 12}),
    *({"effective_batch_size": 16, "per_device_train_batch_size": 2}, {"per_device_train_batch_size": 3}),
    {"effective_batch_size": 7, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"a": 1}},
)


def test_fields_of_presets_under_a_users():
    from hf_memopt.presets import METHODS, get_preset
    from hf_memopt.presets.training_arguments import resolve

    found = {}
    for name, method in itertools.product(PRESETS, METHODS):
        preset = answered(get_preset, name, method)
        if isinstance(preset, str):
            found[f"{name} {method}"] = preset
            continue
        usual = resolve(preset, preset.processes, {})
        found[f"{name} {method}"] = usual
        for overrides in OVERRIDES if method == "full" else ():
            answer = answered(resolve, preset, preset.processes, overrides)
            if isinstance(answer, dict):
                fields = usual | answer
                answer = {key: answer.get(key, "-") for key in fields if answer.get(key, "-") != usual.get(key, "-")}
            found[f"{name} {overrides}"] = answer
    checked("preset_fields", found)


def test_files_that_start_a_preset():
    from hf_memopt.contributed import load_contributed
    from hf_memopt.presets import get_preset
    from hf_memopt.presets.launch_script import machine_words, scripts
    from hf_memopt.presets.preset import on_machines

    targets = load_contributed("export_targets")
    found = {}
    for name, machines in itertools.product(PRESETS, (0, 1, 2)):
        preset = answered(on_machines, get_preset(name, "lora"), machines)
        if isinstance(preset, str):
            found[f"{name} {machines}"] = preset
            continue
        files = scripts(preset, Path("/out put"), ["sft.py", "--a", "1"], batch=machines == 2 or name == "t4")
        found[f"{name} {machines}"] = {
            "words": machine_words(preset),
            "files": {file: text.splitlines() for file, text in files.items()},
            "accelerate": preset.accelerate_config(),
            "deepspeed": preset.deepspeed_config(),
            "batch": [preset.micro_batch_size, preset.gradient_accumulation_steps, preset.effective_batch_size],
            "targets": {
                target: answered(files_of, preset, target, ["sft", "--a", "1"], {"b.json": "{}"})
                for target, files_of in targets.items()
            },
        }
    frozen.check("preset_files", found)


# ---- chunks of batches


def test_chunks_are_the_rows_of_their_samples():
    import torch

    from hf_memopt.trainer.step.split import (
        PairLayout,
        RowLayout,
        UnpaddedLayout,
        count_elements,
        count_rows,
        count_tokens,
        tensor_shapes,
    )

    rows = {
        "input_ids": torch.arange(12).view(4, 3),
        "position_ids": torch.arange(24).view(2, 4, 3),
        "shared": torch.ones(1, 5),
        "names": ["a", "b", "c", "d"],
        "inner": {"x": torch.arange(4)},
        "number": 3,
        "scalar": torch.tensor(2.0),
    }
    pairs = {"input_ids": torch.arange(8).view(8, 1), "margin": torch.arange(4)}
    packed = {
        "input_ids": torch.arange(7)[None],
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 0, 1]]),
        "cu_seq_lens_q": torch.tensor([0, 2, 5, 7]),
        "max_length_q": 3,
        "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2, 2]]),
        "labels": torch.arange(7)[None] * 2,
    }
    found = {}
    for layout, batch in ((RowLayout(), rows), (PairLayout(), pairs), (UnpaddedLayout(), packed)):
        samples = layout.count(batch)
        for start, stop in itertools.combinations(range(samples + 1), 2):
            found[f"{type(layout).__name__} {start} {stop}"] = {
                name: value.tolist() if isinstance(value, torch.Tensor) else str(value)
                for name, value in layout.chunk(batch, start, stop).items()
            }
        about = (samples, count_rows(batch), count_elements(batch), count_tokens(batch), tensor_shapes(batch))
        found[type(layout).__name__] = about
    for name, odd in (("labels", torch.zeros(3, 2)), ("position_ids", torch.zeros(2, 3, 4)), ("texts", ["a"] * 3)):
        found[f"odd {name}"] = answered(RowLayout().chunk, {"input_ids": torch.zeros(4, 2), name: odd}, 0, 2)
    found["nothing"] = (count_rows({}), count_elements(3), count_tokens({}), count_tokens({"input_ids": [1]}))
    checked("chunks", found)


def test_the_weight_of_a_chunk():
    import torch

    from hf_memopt.trainer.step.loss_rule import LossRule
    from hf_memopt.trainer.step.split import RowLayout

    class Rows:
        count_samples = RowLayout().count

    labels = torch.tensor([[5, -100, 7], [-100, -100, 2], [1, 1, 1], [-100] * 3])
    whole = {"input_ids": labels, "labels": labels}
    for rule, items in (
        (LossRule.LABELS, [1, 1, 2, 0]),
        (LossRule.UNSHIFTED, [2, 1, 3, 0]),
        (LossRule.SAMPLES, [1] * 4),
    ):
        parts = [{name: value[at : at + 1] for name, value in whole.items()} for at in range(4)]
        assert [rule.count_items(Rows, part) for part in parts] == items
        assert [rule.weight(Rows, whole, part) for part in parts] == [item / sum(items) for item in items]
        assert LossRule.SUM.weight(Rows, whole, parts[0]) == 1
        unlabeled = {name: value[3:] for name, value in whole.items()}
        assert rule.weight(Rows, unlabeled, unlabeled) == 1  # by samples, where there is no label
    flat = {"input_ids": labels, "labels": torch.tensor([1, -100, 2, 3])}
    assert LossRule.LABELS.count_items(Rows, flat) == 3  # a label a sample is not shifted
    beyond = whole | {"start_positions": torch.tensor([0, 3, 1, 1])}
    assert answered(LossRule.SAMPLES.weight, Rows, beyond, beyond).startswith("error: start_positions lie beyond")
    assert LossRule.SAMPLES.weight(Rows, whole | {"end_positions": torch.tensor([2] * 4)}, parts[0]) == 0.25


# ---- questions of strangers


def test_what_strangers_may_ask():
    from dataclasses import replace

    from hf_memopt.ui.limits import check_public
    from hf_memopt.ui.question import Question

    usual = Question(model="Qwen/Qwen3-8B", hardware="rtx_4090")
    changes = [{"model": text} for text in ("llama-3.1-8b", "/etc/passwd", "a/b/c", "https://huggingface.co/a/b", "x")]
    changes += [{"hardware": text} for text in ("2x H100", "/tmp/x", "{}", "a" * 81, "nothing")]
    changes += [{"method": text} for text in ("any", "LoRA", "sft", "full")]
    changes += [{"seq_len": number} for number in (0, 1, 2**20, 2**20 + 1)]
    changes += [{"tokens": text} for text in ("10M", "a b", "")] + [{"price": text} for text in ("2.5", "$2")]
    changes += [{"settings": [setting]} for setting in ("bf16=true", "bf16=../x", "output_dir=x")]
    changes += [{"settings": ["bf16=1"] * number} for number in (20, 21)]
    changes += [{"config": "a: 1"}]
    checked("strangers", {str(one)[:90]: answered(check_public, replace(usual, **one)) for one in [{}, *changes]})


# ---- models of other sizes, presets by name


def test_smaller_models_and_other_sizes():
    from transformers import AutoConfig

    from hf_memopt.estimator.smaller import find_experts, smaller_sizes, with_sizes

    llama = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 12, "num_key_value_heads": 4}
    configs = {
        "llama": AutoConfig.for_model("llama", **llama, num_hidden_layers=10, vocab_size=100),
        "shallow": AutoConfig.for_model("llama", **llama | {"hidden_size": 72}, num_hidden_layers=3, vocab_size=100),
        "mixtral": AutoConfig.for_model("mixtral", **llama, num_hidden_layers=4, num_local_experts=8, vocab_size=100),
        "gemma3": AutoConfig.for_model("gemma3_text", **llama, num_hidden_layers=12, head_dim=8, vocab_size=100),
        "gpt2": AutoConfig.for_model("gpt2", n_layer=5, n_embd=48, n_head=6, vocab_size=100),
    }
    changes = (
        *({"num_hidden_layers": 5}, {"num_hidden_layers": 25}, {"hidden_size": 48}, {"hidden_size": 50}),
        *({"hidden_size": 48, "num_attention_heads": 6}, {"num_attention_heads": 24}, {"num_key_value_heads": 2}),
        *({"head_dim": 16, "hidden_size": 48}, {"vocab_size": 7.5}, {"vocab_size": True}, {"tie_word_embeddings": 1}),
        *({"rms_norm_eps": 1}, {"model_type": "bert"}, {"num_layers": 3}),
    )
    found = {}
    for name, config in configs.items():
        found[name] = [find_experts(config), *smaller_sizes(config)]
        before = config.to_dict()
        for change in changes:
            after = answered(lambda: with_sizes(config, change).to_dict())  # noqa: B023
            if isinstance(after, dict):
                after = {key: value for key, value in after.items() if value != before.get(key)}
            found[f"{name} {change}"] = after
    checked("other_sizes", found)


def test_presets_by_any_name():
    from hf_memopt.presets import METHODS, preset_by_name
    from hf_memopt.presets.named_presets import plain_settings
    from hf_memopt.presets.training_arguments import resolve

    def shown(preset) -> str:
        fields = resolve(preset, preset.processes, {})
        return (
            f"{preset.name} on {preset.hardware.name}: {preset.method}, {preset.strategy} × {preset.processes}, "
            f"{preset.dtype}, {preset.precision}, {preset.seq_len} tokens, {preset.micro_batch_size} of "
            f"{preset.effective_batch_size}, {fields.get('optim')}, {preset.engine.label}, {preset.environment}: "
            f"{preset.meant_for}"
        )

    found = {}
    for name in (
        *("rtx_4090", "RTX 4090", "8x A100 80GB", "h100_80gb_x8", "rtx_2060", "gtx_1650", "mi300x", "m2", "nothing"),
    ):
        for method in (*METHODS, "LoRA"):
            found[f"{name} {method}"] = answered(lambda: shown(preset_by_name(name, method)))  # noqa: B023
        for strategy, precision, processes in (
            *(("none", None, None), ("ddp", None, None), ("zero3", None, 4), ("fsdp2", "fp8", None), ("tp2", None, 2)),
            *(("hsdp2", None, 4), ("zero9", None, None), (None, "fp8", None), (None, "int8", None)),
            ("zero2_offload_cpu", None, None),
        ):
            asked = (name, "full", strategy, precision, processes)
            found[str(asked)] = answered(lambda: shown(preset_by_name(*asked)))  # noqa: B023
    for name, device in devices().items():
        plain = plain_settings(device, "lora", "ddp")
        found[f"plain {name}"] = [plain.strategy, plain.processes, plain.micro_batch_size, plain.seq_len]
        found[f"plain {name}"] += [plain.precision, plain.effective_batch_size, plain.dtype, plain.meant_for]
    checked("presets_by_name", found)


def test_the_dtype_of_weights_that_a_video_recipe_trains():
    from types import SimpleNamespace

    from hf_memopt.presets import get_preset
    from hf_memopt.recipe.video import with_weights_dtype

    found = {}
    for name, method, dtype in itertools.product(
        ("rtx_4090", "t4", "cpu"), ("full", "lora"), (None, "float16", "float32")
    ):
        job = SimpleNamespace(recipe=SimpleNamespace(dtype=dtype), preset=get_preset(name, method))
        found[f"{name} {method} {dtype}"] = answered(with_weights_dtype, job) or job.preset.dtype
    checked("video_dtypes", found)


# ---- what runs at once, after failures and quiet steps


def test_how_much_runs_at_once():
    from hf_memopt.trainer.step.batch_limit import BatchLimit

    found = {}
    for seed, (patience, fewest, first) in itertools.product(range(4), ((1, 1, None), (3, 2, 4), (2, 1, 64))):
        draw, limit, seen = random.Random(seed), BatchLimit(patience, fewest, first), []
        for _ in range(120):
            samples = draw.choice((1, 2, 7, 8, 32))
            elements = samples * draw.choice((100, 130))
            size = limit.chunk_size(samples, elements)
            assert 1 <= size <= samples
            if size > 4 * fewest and draw.random() < 0.3:
                seen.append(f"-{limit.halve(size, elements * size // samples)}")
            else:
                seen.append(f"{size}{'+' * limit.count_quiet_step(draw.random() < 0.8)}")
            if draw.random() < 0.03:
                limit.adopt(draw.choice((None, 200, 1000)))
        found[f"{seed} {patience} {fewest} {first}"] = [" ".join(seen), limit.elements]
    checked("batch_limits", found)


# ---- tables, pictures, measurements


def test_tables_of_every_width(capsys, monkeypatch):
    from hf_memopt.cli.output import print_table

    words = ["a", "word", "and", "another", "of", "some", "unusually-long-words-of-a-machine", "[/x]", "markup"]
    found = {}
    for columns, frame, seed in itertools.product((12, 40, 60, 77, 120), (True, False), range(3)):
        monkeypatch.setenv("COLUMNS", str(columns))
        draw = random.Random(seed)
        rows = [
            [" ".join(draw.choices(words, k=draw.randint(0, most))) for most in (2, 1, 9, 4, 1)[: 2 + seed]]
            for _ in range(4)
        ]
        print_table("a title" if seed else "", [f"column {n}" for n in range(2 + seed)], rows, frame)
        found[f"{columns} {frame} {seed}"] = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    frozen.check("tables", found)


def test_pictures_as_clips(tmp_path):
    from PIL import Image

    from hf_memopt.video.frame_limits import FrameLimits, Sampling
    from hf_memopt.video.images import frames_in, image_size, outline_frames, read_frames

    for number in range(12):
        Image.new("RGB", (40, 30), (number * 20, 0, 5)).save(tmp_path / f"frame{number}.png")
    (tmp_path / "times.txt").write_text("no frame")
    for turn in (1, 3, 6, 8):
        exif = Image.Exif()
        exif[0x0112] = turn
        (tmp_path / "turned").mkdir(exist_ok=True)
        Image.new("RGB", (40, 30)).save(tmp_path / "turned" / f"{turn}.jpg", exif=exif)
    files, found = frames_in(tmp_path), {}
    found["names"] = [file.name for file in files]
    found["turned"] = [image_size(file) for file in frames_in(tmp_path / "turned")]
    for limits in (
        *({}, {"max_frames": 4}, {"max_frames": 5, "multiple_of": 2}, {"max_frames": None, "multiple_of": 5}),
        *({"max_pixels": 600, "side_multiple": 4}, {"sampling": Sampling(video_start=1, video_end=4)}),
        *({"sampling": Sampling(sample_fps=4, nframes=3)}, {"fps": 1}, {"sampling": Sampling(fps=1)}),
    ):
        clip, outline = read_frames(files, FrameLimits(**limits)), outline_frames(files, FrameLimits(**limits))
        assert (outline.frames, outline.height, outline.width) == (len(clip.frames), *clip.frames.shape[2:])
        assert outline.pixels == outline.frames * outline.height * outline.width
        reds = clip.frames[:, 0, 0, 0].tolist()
        found[str(limits)] = [list(clip.frames.shape), reds, clip.indices, clip.timestamps, clip.total, clip.duration]
        found[str(limits)] += [clip.rate, outline.total, outline.rate]
        thinned = clip.thinned(3, 2)
        found[str(limits)] += [thinned.indices, thinned.timestamps, len(thinned.frames)]
    checked("pictures", found)


def test_constants_that_measurements_give():
    from hf_memopt.contrib.calibration.measurements import constants_from, predicted_reserved, reserved_errors, trained
    from hf_memopt.hardware.measured import MEASURABLE, show, show_value

    def job(measured, predicted, allocator="", **more) -> dict:
        sizes = {"reserved_bytes": {"expandable": 100, "segments": 200}, "step_seconds": predicted}
        row = {"outcome": "measured", "outcome_of_training": "trained", "step_seconds": measured, "predicted": sizes}
        return row | {"allocator": allocator, "reserved_bytes": 160, **more}

    rows = {
        "context": {"outcome": "measured", "context_bytes": 5 * MIB, "workspace_bytes": 3 * GIB},
        "rates": {
            "outcome": "measured",
            "matmul_flops_per_second": {"bfloat16": 1e17, "float16": 1e9},
            **{"bandwidth_bytes_per_second": 1e8, "host_link_bytes_per_second": 1e13 + 1e9, "launch_seconds": 0},
        },
        "job: a": job(2.0, 1.0),
        "job: b": job(6.0, 2.0, "expandable_segments:True", reserved_bytes=80),
        "job: c": job(None, 2.0, reserved_bytes=0),
        "job: d": job(9.0, 1.0, outcome="failed"),
        "job: e": job(9.0, 1.0, outcome_of_training="oom"),
        "other": job(9.0, 1.0),
    }
    found = {name: constants_from(rows, device) for name, device in devices().items() if name in ("t4", "rtx_4090")}
    found["nothing"] = constants_from({"rates": {"outcome": "failed", "launch_seconds": 1}}, devices()["t4"])
    found["trained"] = [
        list(trained(rows)),
        reserved_errors(rows),
        [predicted_reserved(rows[f"job: {n}"]) for n in "ab"],
    ]
    for name, row in MEASURABLE.items():
        shown = [show_value(name, value) for value in (row.lowest, row.highest, 99.5 * MIB, 100 * MIB, 101 * MIB)]
        found[f"show {name}"] = [show(name, 1.0), *shown]
    checked("measured_constants", found)


# ---- files of rows, times of frames


FILES = {
    "plain.jsonl": '{"text": "a", "n": 1}\n\n{"text": "b", "n": null}\n',
    "bom.jsonl": "\ufeff" + '{"text": "a"}\n',
    "list.json": '[{"text": "a"}, "b",\n {"text": "c"}]',
    "broken list.json": '[\n{"text": "a"},\n{"text": "b",\n{"text": "c"}\n]',
    "cut.jsonl": '{"text": "a"}\n{"text": "b',
    "comma.jsonl": '{"text": "a",}\n',
    "number.jsonl": '{"text": "a"}\n3\n',
    "null.jsonl": 'null\n{"text": NaN}\n',
    "surrogate.jsonl": '{"text": "\\ud83d"}\n',
    "pair.jsonl": '{"text": "\\ud83d\\ude00"}\n',
    "latin.jsonl": b'{"text": "a"}\n{"text": "\xe9"}\n',
    "utf16.jsonl": '{"text": "a"}'.encode("utf-16"),
    "binary.txt": b"ab\0cd\n",
    "empty.jsonl": "",
    "blank.json": "\n \n",
    "cells.csv": 'text,n\na,1\n"b\nc",2\n\nd\n',
    "wide.csv": "text\na\nb,c\n",
    "quote.csv": 'text\n"a\nb\n',
    "paragraphs.txt": "a\nb\n\n\nc\n",
    "one.txt": "a",
    "deep.jsonl": '{"a": [1, {"b": 2}], "c": "x"}\n{"a": null, "d": "y"}\n',
}


def test_rows_of_files(tmp_path, monkeypatch):
    from hf_memopt.data.row_files import Place, encoded_rows, find_columns, find_line, numbered_rows

    monkeypatch.chdir(tmp_path)
    found = {}
    for name, content in FILES.items():
        path = Path(name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        columns = answered(find_columns, [path], None)
        found[name] = [answered(lambda: list(numbered_rows(path))), columns, answered(find_columns, [path], 1)]  # noqa: B023
        if isinstance(columns, dict):
            for kept in (columns, dict(list(columns.items())[:1]), dict.fromkeys(columns, True)):
                found[name].append(answered(lambda: list(encoded_rows((path,), tuple(kept.items()), ()))))  # noqa: B023
        found[name] += [
            find_line(path, lambda number, row: number == 1),
            str(Place(name, 1)),
            str(Place("", 2, {}, "clip")),
        ]
        found[name] += [
            str(Place(name, 7, {"text": "b"})),
            find_line(path, lambda number, row: row.get("text") == "a"),
        ]
    checked("row_files", found)


def test_captions_of_a_folder(tmp_path, monkeypatch):
    from hf_memopt.data.row_files import captioned_rows

    monkeypatch.chdir(tmp_path)
    folder, found = Path("clips"), {}
    folder.mkdir()
    found["empty"] = captioned_rows(folder, "clips")
    for name in ("a.mp4", "b.PNG", "c.webm"):
        (folder / name).touch()
        found[f"with {name}"] = answered(captioned_rows, folder, "clips")
        (folder / name).with_suffix(".txt").write_text("" if name == "c.webm" else f" of {name}\n")
        rows = answered(captioned_rows, folder, "clips")
        found[f"{name} captioned"] = str(rows).replace(str(tmp_path), "")
    (folder / "metadata.csv").touch()
    found["metadata"] = captioned_rows(folder, "clips")
    checked("captions", found)


def test_times_of_frames():
    from hf_memopt.video.frame_limits import FrameLimits, Sampling
    from hf_memopt.video.video_files import FrameTimes, average_rate, choose_frames, header_length

    even = [0.04 * number for number in range(50)]
    rows = {
        "even": FrameTimes(even, list(range(50)), [0, 25], 0.04),
        "jitter": FrameTimes([second + 0.01 * (number % 2) for number, second in enumerate(even)], None, [], 0.04),
        "uneven": FrameTimes([0.0, 0.1, 0.2, 1.0, 1.1, 3.0, 3.05, 7.0], None, [], 0.5),
        "late": FrameTimes([2.0, 2.5, 3.0], [4, 5, 6], [4], 0.5, 4),
        "one": FrameTimes([0.0], None, [], 0.1),
    }
    found = {}
    for name, times in rows.items():
        found[name] = [round(times.duration, 6), times.step and round(times.step, 6)]
        for between in ((None, None), (0.04, None), (None, 1.0), (0.5, 1.001), (0.999, 1.1), (3.0, 9.0), (8.0, 9.0)):
            inside = times.between(*between)
            kept = [round(second, 3) for second in inside.seconds]
            found[f"{name} {between}"] = [kept, inside.stamps, inside.first, round(inside.last_duration, 6)]
        for limits in ({"max_frames": 5}, {"max_frames": None, "fps": 2}, {"max_frames": 6, "multiple_of": 4}):
            found[f"{name} {limits}"] = choose_frames(times, FrameLimits(**limits))
        found[f"{name} asked"] = choose_frames(times, FrameLimits(sampling=Sampling(nframes=3)))

    class Stream:
        def __init__(self, **values):
            vars(self).update(
                {"frames": 0, "duration": None, "time_base": 0.5, "average_rate": None, "guessed_rate": None}
            )
            vars(self).update(values)

    for values in ({}, {"frames": 30}, {"duration": 7}, {"average_rate": 25}, {"guessed_rate": 10, "duration": 1}):
        stream = Stream(**values)
        rate = average_rate(stream)
        lengths = [header_length(Stream(duration=length), stream, rate) for length in (None, 1_500_000, 10)]
        found[f"header {values}"] = [rate, *lengths]
    checked("frame_times", found)


@pytest.mark.parametrize("task", [None, "sft", "dpo", "grpo"])
def test_what_data_train_a_model_for(task, tmp_path, monkeypatch, no_progress_bars):
    import json

    from hf_memopt.planner.samples.data_use import find_use

    monkeypatch.chdir(tmp_path)
    answer = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c" * 40}]
    kinds = {
        "text": {"text": "a " * 9},
        "messages": {"messages": answer},
        "pairs": {"prompt": "p ", "chosen": "a" * 30, "rejected": "b"},
        "prompts": {"prompt": "what?", "completion": "that"},
        "others": {"something": "x"},
        "clips": {"messages": answer, "videos": ["v.mp4"]},
        "caption": {"caption": "a cat", "video": "v.mp4"},
    }
    bad = {"messages": {"messages": answer[:1]}, "pairs": {"prompt": "p", "chosen": "a", "rejected": "a"}}
    found = {}
    for name, row in kinds.items():
        rows = [row, row, *([bad[name]] if name in bad else [])]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        for with_media, skip in ((False, False), (name in ("clips", "caption"), True)):
            use = answered(find_use, f"{name}.jsonl", task, with_media, skip=skip)
            if not isinstance(use, str):
                use = [
                    *(use, use.lengths, use.counted, use.notes(5), use.notes(None), use.to_dict(8)),
                    use.longer_than(9),
                ]
            found[f"{name} {with_media} {skip}"] = use
    found["nothing"] = find_use("owner/name")
    checked(f"data_use_{task}", found)


# ---- counted kernels


def test_work_of_operators():
    """FLOPs by formula: two for every product of a matmul, of attention half where it is causal."""
    import torch

    from hf_memopt.estimator.accounting.work import Work

    aten, half = torch.ops.aten, torch.bfloat16
    a, b, c = torch.zeros(6, 4), torch.zeros(4, 10), torch.zeros(3, 6, 10)
    query, key = torch.zeros(2, 8, 16, 32), torch.zeros(2, 8, 24, 32)
    image, kernel = torch.zeros(2, 3, 12, 12), torch.zeros(5, 3, 3, 3)
    calls = {
        "mm": (aten.mm.default, (a, b), 2 * 6 * 4 * 10),
        "addmm": (aten.addmm.default, (torch.zeros(10), a, b), 2 * 6 * 4 * 10),
        "bmm": (aten.bmm.default, (torch.zeros(3, 2, 6), c), 3 * 2 * 2 * 6 * 10),
        "baddbmm": (aten.baddbmm.default, (torch.zeros(3, 2, 10), torch.zeros(3, 2, 6), c), 3 * 2 * 2 * 6 * 10),
        "linear": (aten.linear.default, (a, b.t().contiguous()), 2 * 6 * 4 * 10),
        "in 16 bits": (aten.mm.default, (a.to(half), b.to(half)), 2 * 6 * 4 * 10),
        "sum": (aten.sum.default, (a,), 0),
        "added": (aten.add.Tensor, (a, a), 0),
        "view": (aten.view.default, (a, (4, 6)), None),
        "empty": (aten.empty_like.default, (a,), None),
        "detach": (aten.detach.default, (a,), None),
        "convolution": (
            aten.convolution.default,
            (image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            2 * 2 * 5 * 10 * 10 * 3 * 3 * 3,
        ),
    }
    found = {}
    for name, (function, args, flops) in calls.items():
        work = Work()
        out = function(*args)
        for phase in ("load", "forward", "backward", "optimizer", "eval"):
            work.note(function, args, {}, out, phase)
        kinds = {kernel.flops for kernel in work.kernels}
        assert kinds == (set() if flops is None else {flops}), name
        found[name] = [[str(kernel), count] for kernel, count in work.kernels.items()]
    for causal in (False, True):
        for keys, name in ((query, "alike"), (key, "longer")):
            function = aten._scaled_dot_product_flash_attention_for_cpu.default
            args = (query, keys, keys, 0.0, causal)
            out, work = function(*args), Work()
            work.note(function, args, {}, out, "forward")
            back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            arguments = (out[0], query, keys, keys, out[0], out[1], 0.0, causal)
            work.note(back, arguments, {}, back(*arguments), "backward")
            (forward,), (backward,) = (
                [one for one in work.kernels if one.attention.backward is way] for way in (False, True)
            )
            whole = 4 * 2 * 8 * 16 * keys.shape[-2] * 32
            assert forward.attention[:1] + forward.attention[2:] == (32, 4, False, False)
            if not causal:
                assert (forward.flops, backward.flops) == (whole, whole * 5 // 2)
            found[f"attention {name} {causal}"] = [str(forward), str(backward)]
    checked("work", found)


# ---- engines

ZERO = {
    "none": {},
    "0": {"stage": 0},
    "1": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "2": {"stage": 2, "reduce_bucket_size": 7},
    "2 auto": {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {}},
    "3": {"stage": 3, "stage3_max_live_parameters": 5, "stage3_max_reuse_distance": 9, "sub_group_size": 0},
    "3 auto": {"stage": 3, "stage3_max_live_parameters": "auto", "sub_group_size": "auto"},
    "3 quantized": {"stage": 3, "zero_quantized_weights": True, "offload_optimizer": {"device": "nvme"}},
}
LIMITS = ("live_weights", "gradient_bucket", "step_group")  # of a configuration
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
SHARDED = (
    *({"version": version} for version in (1, "1", 2, 3)),
    *({"activation_checkpointing": value} for value in ("true", "no", False)),
    *(
        {"reshard_after_forward": value}
        for value in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "false", "0", "N", "on", True, None)
    ),
    *({"cpu_offload": "1"}, {"cpu_offload": True, "version": 1}, {"xla": True}, {"xla": "0"}, {"unknown": 1}),
    *({"activation_checkpointing_offload": True}, {"auto_wrap_policy": "NO_WRAP"}),
    *(CHECKPOINTED, {**CHECKPOINTED, "version": 1}),
)


def test_engines_and_their_settings():
    """All that an engine says of itself, by name, by a DeepSpeed configuration and by FSDP's settings."""
    from hf_memopt.engines import FSDP, DeepSpeed, engine_named
    from hf_memopt.engines.deepspeed import deepspeed_files, missing_batch_size, numeric_batch_sizes, shipped_deepspeed
    from hf_memopt.engines.engine import is_true
    from hf_memopt.engines.fsdp import fsdp_settings
    from hf_memopt.engines.mesh import Mesh, is_mesh, mesh_strategy, mesh_words

    names = ("none", "ddp", "fsdp2", "fsdp2_offload_cpu", "tp2", "hsdp4", "tp2_hsdp2", "tp1")
    engines = {name: (engine_named(name), {}) for name in (*names, *(file.stem for file in deepspeed_files()))}
    for name, zero in ZERO.items():
        config = {"optimizer": {}, "train_batch_size": 24} if name == "1" else {}
        engines[f"ZeRO {name}"] = DeepSpeed.of_config({**config, "zero_optimization": zero}), {}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": 23}
    for name, number in itertools.product(sizes, (0, 1)):
        engines[f"{name}+{number}"] = DeepSpeed.of_config({name: sizes[name] + number}), {}
    for settings in SHARDED:
        engines[f"FSDP {settings}"] = answered(FSDP.of_settings, settings), {"fsdp_config": settings}
    fields = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    found = {}
    for name, (engine, settings) in engines.items():
        if isinstance(engine, str):
            found[name] = engine
            continue
        known = engine.family != "deepspeed" or engine.deepspeed is not None
        lists = [one for one in dir(engine) if one[0] != "_" and (known or one not in LIMITS)]
        found[name] = {
            **{one: getattr(engine, one) for one in lists if not callable(getattr(engine, one))},
            "setup": engine.setup(),
            "peak ranks": [engine.peak_rank(ranks) for ranks in (1, 4)],
            "bytes": engine.rank_bytes(4, 1000, 100, 400.0, 50.0) | {"on host": engine.host_bytes(4, 1000, 100)},
            "widened": engine.rank_bytes(4, 1000, 100, 200.0, 50.0),
            "sent": engine.exchanged(1000, 100),
            "mesh": {ranks: answered(engine.mesh, ranks) for ranks in (1, 2, 4, 6, 8)},
            "traced": engine.traceable({"deepspeed": {"train_batch_size": 8}, "bf16": True}),
            "refused": answered(engine.check, {**fields, **settings}, 4) if known else None,
            "started": answered(engine.fields, {"fsdp_config": {"fsdp_version": 1, "use_orig_params": True}}),
        }
    for fsdp in (None, "", "full_shard", "shard_grad_op auto_wrap", "full_shard offload", ["offload"], True, "shard"):
        for config in (None, {"fsdp_cpu_offload": False}, {"reshard_after_forward": 1}, '{"version": 1}'):
            found[f"settings {fsdp} {config}"] = answered(fsdp_settings, fsdp, config)
    for sizes in itertools.product((1, 2, 4), repeat=3):
        shared = Mesh(*sizes)
        found[f"mesh {sizes}"] = shared.batches, shared.strategy
    words = ("tp2", "hsdp8", "tp2_hsdp4", "tp0", "tp2hsdp4", "_hsdp4", "zero3", "")
    found["words"] = [(word, is_mesh(word), mesh_words(word)) for word in words] + [is_mesh(None)]
    found["named"] = [mesh_strategy(*sizes) for sizes in ((None, None), (2, None), (None, 4), (2, 4))]
    found["true"] = [
        value for value in (True, "TRUE", 1, "1", "yes", "y", "on", "t", 2, None, "", "off") if is_true(value)
    ]
    for config in (
        {},
        {"train_batch_size": 8},
        {"train_batch_size": None},
        {"train_micro_batch_size_per_gpu": "auto"},
    ):
        found[f"sizes {config}"] = numeric_batch_sizes(config), missing_batch_size(config)
    found["shipped"] = [shipped_deepspeed(name) and name for name in ("zero2", "zero4", "zero2.json")]
    checked("engines", found)


# ---- deep models from shallow ones


class Layers:
    """What of a configuration says how its layers differ."""

    model_type, is_encoder_decoder = "made", False

    def __init__(self, depth: int, **fields):
        self.num_hidden_layers = depth
        vars(self).update(fields)

    def get_text_config(self):
        return self


PATTERNS = {
    "alike": lambda depth: {},
    "every second": lambda depth: {"decoder_sparse_step": 2},
    "two and three": lambda depth: {"attn_layer_period": 2, "expert_layer_period": 3},
    "none": lambda depth: {"moe_layer_interval": 0, "moe_layer_freq": [1] * (depth + 1)},
    "behind one": lambda depth: {"first_k_dense_replace": 1},
    "behind five": lambda depth: {"first_k_dense_replace": 5, "num_dense_layers": 2, "moe_layer_freq": 2},
    "first listed": lambda depth: {"mlp_only_layers": [0, 1]},
    "every third listed": lambda depth: {"moe_layers": list(range(2, depth, 3))},
    "one listed": lambda depth: {"mlp_only_layers": [depth // 2]},
    "alternating": lambda depth: {"layer_types": ["a", "b"] * (depth // 2) + ["a"] * (depth % 2)},
    "five to one": lambda depth: {"layer_types": (["a"] * 5 + ["b"]) * (depth // 6) + ["a"] * (depth % 6)},
    "all others": lambda depth: {"widths": list(range(depth))},
    "last is another": lambda depth: {"layer_types": ["a"] * (depth - 1) + ["b"]},
    "as deep a decoder": lambda depth: {"is_encoder_decoder": True, "num_decoder_layers": depth},
    "a deeper decoder": lambda depth: {"is_encoder_decoder": True, "num_decoder_layers": depth + 1},
}


def test_depths_that_are_traced_and_what_they_say_of_deep_ones():
    from hf_memopt.estimator.accounting.ledger import STACK, Moment, Peak
    from hf_memopt.estimator.tracing import extrapolate

    found = {}
    for (name, pattern), depth in itertools.product(PATTERNS.items(), (1, 2, 6, 7, 8, 9, 12, 13, 24, 30)):
        config = Layers(depth, **pattern(depth))
        depths = [
            extrapolate.shallow_depths(config, fewest, every)
            for fewest, every in ((3, 1), (4, 1), (10, 1), (3, 2), (3, 3))
        ]
        shallow = vars(extrapolate.with_depth(config, 4 if depth > 4 else depth))
        found[f"{name} {depth}"] = [extrapolate.layer_period(config), depths, list(shallow.values())]
    found["counted"] = [extrapolate.count_layers(Layers(depth)) for depth in (3, 0, -1, None, 2.0, True)]

    def shown(peaks: dict) -> list:
        return [(name, vars(peak) | {"by_kind": sorted(peak.by_kind.items())}) for name, peak in peaks.items()]

    def moments(depth: int) -> dict:
        """Peaks that grow with the depth and from layer to layer; of host memory and paged states, too."""
        made = {Moment("start", 0, None): Peak(10 * depth, {"a": 10 * depth}, depth, 3 * depth)}
        for stack, layer in itertools.product((0, 1), range(depth)):
            sizes = {"a": 7 * depth + layer, "b": 100 - layer, "c": max(0, 30 - 9 * depth)}
            made[Moment(f"layer {stack}", 1 + stack, stack * STACK + layer)] = Peak(sum(sizes.values()), sizes, layer)
        return made | {Moment("start", 1, None): Peak(9 * depth + 5, {"b": 9 * depth + 5})}

    for dense, (low, high), by_layer, unlike in itertools.product((0, 1), ((3, 4), (4, 6)), (True, False), (0, 1, 2)):
        config, traces = Layers(12, first_k_dense_replace=dense), [moments(low), moments(high)]
        peaks = extrapolate.extrapolate_peaks(config, (low, high), traces, by_layer, unlike)
        found[f"peaks {dense} {low} {by_layer} {unlike}"] = shown(peaks)
        places = [place for place, _ in extrapolate._placed(moments(high), high, low, dense + unlike, by_layer)]
        found[f"places {dense} {low} {by_layer} {unlike}"] = places
    found["whole"] = shown(extrapolate.extrapolate_peaks(Layers(4), (4,), [moments(4)]))
    deep = extrapolate.highest((moment.segment, peak) for moment, peak in moments(12).items())
    wanted = extrapolate.extrapolate_peaks(Layers(12), (4, 6), [moments(4), moments(6)])
    assert {name: peak.total for name, peak in wanted.items()} == {name: peak.total for name, peak in deep.items()}
    checked("depths", found)


# ---- hardware


DESCRIBED = (
    *(
        '{"memory": "24 GiB"}',
        '{"memory": "0.25 GiB"}',
        '{"memory": "0.24 GiB"}',
        '{"memory": 26e9}',
        '{"memory": true}',
    ),
    *('{"memory": "1 TiB", "name": "big"}', '{"memory": "24 GiB", "label": "L", "vendor": "v"}', '{"memory": ""}'),
    *('{"memory": "24 gib", "bandwidth": " 1.5 TB/s "}', '{"memory": "24 GiB", "bandwidth": "1e3GB/s"}'),
    *('{"memory": "24 GiB", "bandwidth": "1e100"}', '{"memory": "-24 GiB"}', '{"memory": "24 GiB", "fp8": 1}'),
    *('{"memory": "24 GiB", "fp16_flops": "70 TFLOPS"}', '{"memory": "24 GiB", "bf16_flops": "1 PFLOPS"}'),
    '{"memory": "24 GiB", "architecture": "7.5", "fp16_flops": 65e12, "bf16_flops": 1}',
    '{"memory": "24 GiB", "architecture": "7.5", "fp16_flops": 65e12}',
    *(f'{{"memory": "24 GiB", "architecture": "{number}"}}' for number in ("8.0", "8.8", "8.9", "12", "8.90", "x8.9")),
    *(f'{{"memory": "24 GiB", "backend": "{name}"}}' for name in ("cuda", "rocm", "mps", "xpu", "cpu", "tpu")),
    *(
        f'{{"memory": "24 GiB", "backend": "rocm", "architecture": "{name}"}}'
        for name in ("gfx90a", "gfx1100", "gfx9", "gfx")
    ),
    '{"memory": "24 GiB", "nominal_memory": "25 GiB", "host_link": 3, "peer_link": "9 GB/s", "unified_memory": true}',
    *(
        '{"name": "x"}',
        '{"memory": 24}',
        '{"memory": "24 apples"}',
        '{"memory": "1.2.3 GiB"}',
        '{"memory": "1e999 GiB"}',
    ),
    *('{"memory": "24 GiB", "bandwith": 1}', '{"memory": "24 GiB", "architecture": "ada"}'),
    *("[]", "{", ' {"memory": "24 GiB"}', '{"memory": "24 GiB", "native_bf16": false, "bf16_flops": 1e12}', "4090"),
)
ARCHITECTURES = ("6.1", "7.5", "8.0", "8.9", "9.0", "9.9", "10.0", "10.3", "11.0", "12.9", "13.0")
ATTENTIONS = (
    *(None, "", "eager", "sdpa", "flex_attention", "paged|sdpa", "flash_attention_2", "flash_attention_3"),
    *("flash_attention_4", "kernels-community/flash-attn2@main", "kernels-community/flash-attn4:fwd", "owner/kernel"),
)
MEASURED = {
    **{
        "format": 1,
        "date": "2026-11-29",
        "rehearsal": False,
        "constants": {"context_bytes": 5},
        "reserved_errors": [0.1],
    },
    "device": {"name": "t4", "label": "T4", "backend": "cuda"},
    "versions": {"torch": "2.13.0", "runtime": "13.0", "driver": None, "other": "x"},
}


def test_devices_as_they_are_listed_described_and_measured():
    from dataclasses import replace

    from hf_memopt.hardware.attention_kernels import attention_kernel, check_attention, flash_attention
    from hf_memopt.hardware.catalog import box_of, catalog
    from hf_memopt.hardware.constants import TABLE, assumed
    from hf_memopt.hardware.described import described, described_text
    from hf_memopt.hardware.host_memory import assumed_host_memory
    from hf_memopt.hardware.measured import device_path, parse_device_file

    found = {}
    for name, device in catalog().items():
        figures = [value for figure, value in vars(device).items() if figure not in ("sources", "name", "reported")]
        also = [device.capability, device.is_large, device.discrete_memory, box_of(device).adapters]
        found[name] = [*figures, *also, assumed_host_memory(device)]
    for name, device in devices().items():
        rows = {row.name: row for row in TABLE if row.applies_to(device)}
        found[f"constants {name}"] = {one: assumed(one, device).value for one in sorted(rows)}
    for text in DESCRIBED:
        device = answered(described, text)
        figures = device if isinstance(device, str | None) else [v for k, v in vars(device).items() if k != "sources"]
        found[text] = [figures, described_text(text)]
    card = catalog()["t4"]
    for architecture in ARCHITECTURES:
        one = replace(card, architecture=architecture)
        kernels = [attention_kernel(one, None, element, masked) for element in (2, 4) for masked in (False, True)]
        found[architecture] = [kernels, *(answered(check_attention, name, one) for name in ATTENTIONS)]
    for name in ("mi300x", "apple_m2_16gb", "cpu"):
        found[f"on {name}"] = [answered(check_attention, attention, catalog()[name]) for attention in ATTENTIONS]
    found["flash"] = [flash_attention(name) for name in ATTENTIONS]
    found["parts"] = [
        answered(check_attention, {"a": "sdpa", "b": name}, card) for name in (None, "flash_attention_2", 3)
    ]

    def measured(changes: dict) -> str:
        try:
            return str(parse_device_file({**MEASURED, **changes}))
        except ValueError as error:
            return f"error: {error}"

    texts = ("", "x" * 200, "x" * 201, "two\nlines", "\x1b[1m", 3, None)
    numbers = (0, 16 * 2**30, 16 * 2**30 + 1, -1, True, "5", float("nan"))
    changes = [
        {"format": 2},
        {"format": None},
        {"device": []},
        {"versions": None},
        {"reserved_errors": 1},
        {"constants": []},
    ]
    changes += [{"device": {**MEASURED["device"], "label": text}} for text in texts]
    changes += [{"versions": {"torch": text}} for text in texts]
    changes += [{"date": date} for date in ("2026-1-29", "2026-11-29 ", None)] + [{"rehearsal": 0}, {}]
    changes += [{"constants": {"context_bytes": number}} for number in numbers] + [{"constants": {"speed": 1}}]
    changes += [{"reserved_errors": [number]} for number in (-1, -1.01, 100, 100.5, "x")]
    for number, change in enumerate(changes):
        found[f"measured {number} {str(change)[:60]}"] = measured(change)[:300]
    paths = {"torch": "2.13.0+cu130", "runtime": None, "driver": "580.1/x"}
    found["path"] = device_path(card, paths).name
    checked("listed_devices", found)


# ---- batches of models that take no text


INPUTS = {
    "usual": {},
    "sized": {"image_size": 30, "num_channels": 1},
    "wide": {"image_size": (30, 40), "in_channels": 4, "num_frames": 5},
    "cropped": {"crop_size": [8, 9], "frames_per_clip": 7, "num_frames": 3},
    "a tower": {"vision_config": Layers(1, image_size=12, patch_embed_hidden_size=70), "image_size": 99},
    "an encoder": {"encoder": Layers(1, image_size=14, num_channels=2)},
    "convolutions": {"conv_kernel": (10, 3), "conv_stride": (5, 2)},
    "spectrogram": {"max_length": 100, "num_mel_bins": 64},
    "length alone": {"max_length": 100},
    "whisper": {"model_type": "whisper", "num_mel_bins": 80, "max_source_positions": 1500, "is_encoder_decoder": True},
    "speech": {"input_feat_per_channel": 40, "max_source_positions": 2000, "is_encoder_decoder": True},
    "long speech": {"input_dim": 20, "max_source_positions": 6000, "is_encoder_decoder": True},
    "frames": {"feature_projection_input_dim": 160, "encoder_config": Layers(1, mel_dim=50, subsampling_factor=8)},
    "audio": {"audio_config": Layers(1, num_mel_bins=128)},
}


def test_inputs_of_models_of_images_and_speech():
    from hf_memopt.estimator.tracing import tasks
    from hf_memopt.estimator.tracing.tasks import Batch

    found = {}
    for name, fields in INPUTS.items():
        batch = Batch(Layers(1, **fields), 3, 50)
        for kind, function in tasks._OTHER_INPUTS.items():
            if kind != "flattened_patches" or name == "a tower":
                found[f"{name} {kind}"] = answered(function, batch)
        found[name] = tasks._image_size(batch.config), tasks._channels(batch.config)
    for task, row in tasks.TASKS.items():
        labels = [row.labels(Batch(Layers(1, image_size=20), 2, tokens)) for tokens in (1, 3, 4, 100)]
        found[f"labels {task}"] = labels, row.choices, row.adapters
    for name in (
        "ner",
        "AutoModelForCTC",
        "seq2seq",
        "automatic-speech-recognition",
        "translation",
        "dpo",
        "causal lm",
    ):
        found[f"named {name}"] = answered(tasks.named_tasks, name)
    checked("inputs", found)


# ---- jobs of TRL, traced arguments, sizes of configurations

CONFIG_SIZES = (
    *({"num_hidden_layers": number} for number in (0, 1, 2000, 2001, -1, 1.0, True, "2", None)),
    *({"hidden_size": number} for number in (0, 1, 2**24, 2**24 + 1)),
    *({"depth": number} for number in (-1, 0, 1)),
    *(
        {name: 0}
        for name in ("head_dim", "n_layer", "encoder_layers", "d_model", "num_heads", "attention_heads", "nothing")
    ),
    *({"vision_config": {"patch_size": size}} for size in (0, [14, 14], [14, 0])),
    *({"num_attention_heads": 8, "num_key_value_heads": keys} for keys in (8, 4, 3, 16)),
    *({"num_local_experts": 4, "num_experts_per_tok": used} for used in (4, 5, 0, "2")),
    *({"n_routed_experts": [4, 8], "moe_topk": 8}, {"moe_num_experts": [4, 8], "moe_k": 9}, {"top_k_experts": 3}),
)


def test_settings_of_jobs_before_they_are_traced():
    from types import SimpleNamespace

    from hf_memopt.estimator import trl_job, trl_tasks
    from hf_memopt.estimator.model_sizes import check_sizes
    from hf_memopt.estimator.tracing import traced_arguments

    found = {}
    micro = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    for more, ranks in itertools.product(
        (*({}, {"steps_per_generation": 5}), *({"generation_batch_size": batch} for batch in (4, 8, 12, 13))), (1, 2)
    ):
        job = SimpleNamespace(fields={**micro, **more}, world_size=ranks)
        found[f"generation {more} {ranks}"] = answered(trl_job._steps_per_generation, job)
    both = SimpleNamespace(fields={**micro, "steps_per_generation": 2, "generation_batch_size": 4}, world_size=1)
    found["generation twice"] = answered(trl_job._steps_per_generation, both)
    row = SimpleNamespace(config_class=SimpleNamespace(max_completion_length=256))
    for completion, length in itertools.product((None, 0, 1, 99, 100, -1), (100, 256, 257)):
        fields = {} if completion is None else {"max_completion_length": completion}
        job = SimpleNamespace(fields=fields, seq_len=length)
        found[f"completion {completion} {length}"] = answered(trl_job._completion, row, job)
    for length, settings in ((7, {}), (8, {}), (8, {"packed": True}), (8, {"packed": False}), (8, {"video": "clip"})):
        found[f"check {length} {settings}"] = answered(trl_job._check, "sft", length, settings)
    for name, task in trl_tasks.TRL_TASKS.items():
        texts = [[len(str(text).split()) for text in task.row(length).values()] for length in (1, 2, 3, 8)]
        found[f"row {name}"] = [texts, task.model, task.reference, task.generates, trl_tasks.model_task(name)]
    for steps, accumulation in itertools.product((None, 0, 1, 2, 3, 5), (1, 2, 3, 4)):
        fields = {"gradient_accumulation_steps": accumulation, "steps_per_generation": steps}
        found[f"traced {steps} {accumulation}"] = traced_arguments.traced_micro_batches(fields)
    found["traced"] = [
        traced_arguments.traced_micro_batches({}),
        trl_tasks.model_task("ctc"),
        trl_tasks.unscored("ab"),
    ]
    for optimizer in ("Adam", "ADAMW", "Lion", "lamb", "SGD", None):
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": "/data"}, "offload_param": {"device": "cpu"}}
        config = {"optimizer": {"type": optimizer}, "zero_optimization": zero if optimizer == "Adam" else None}
        found[f"deepspeed {optimizer}"] = answered(traced_arguments._traceable, config, "folder")
    found["deepspeed"] = traced_arguments._traceable({"optimizer": None}, "folder")
    for content in CONFIG_SIZES:
        found[str(content)] = answered(check_sizes, content, "here")
    checked("before_traces", found)
