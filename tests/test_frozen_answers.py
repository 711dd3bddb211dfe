"""More answers over grids of inputs, frozen: charts, snapshots, messages, pages, files, words."""

import errno
import io
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import frozen
import pytest

from hf_memopt.errors import InputError
from hf_memopt.units import GIB, MIB


def answered(function, *args, **kwargs):
    """What a function returns, or the sentence that refuses it."""
    try:
        return function(*args, **kwargs)
    except (InputError, ValueError) as error:
        return f"error: {error}"


def frozen_texts(name: str, found: dict) -> None:
    frozen.check(name, {str(key): str(value) for key, value in found.items()})


class Axes:
    """Takes what is drawn down, in words."""

    def __init__(self):
        self.drawn = []
        self.figure = self

    def __getattr__(self, name: str):
        def call(*args, **kwargs):
            self.drawn.append(f"{name} {rounded(args)} {rounded(kwargs)}")

        return call


def rounded(value: Any):
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def test_what_charts_draw():
    from hf_memopt import charts
    from hf_memopt.contrib.snapshots.snapshot_command import _stack_kinds

    def reading(step: int, peak: float, phase: str = "train") -> dict:
        held = int(peak * GIB)
        return {"step": step, "time": 60.0 * step + 7, "peak_allocated": held, "allocated": held // 2, "phase": phase}

    def drawn(draw, *args) -> list[str]:
        axes = Axes()
        draw(axes, *args)
        return axes.drawn

    found = {}
    thresholds = {"warning": 0.9, "critical": 0.95, "own": 0.5}
    runs = {
        "run": [reading(0, 1), reading(1, 3), reading(2, 3.5, "eval"), reading(4, 4, "save")],
        "small": [reading(3, 0.4), reading(9, 0.5, "other")],
        "one": [reading(5, 1.0)],
    }
    for (name, readings), capacity, predicted, events in itertools.product(
        runs.items(), (1, 10), (None, 5 * GIB), ([], [1, 3])
    ):
        args = (len(events) > 0, readings, thresholds, capacity * GIB, predicted, events)
        found[f"{name} {capacity} {predicted} {events}"] = drawn(charts.over_time, *args)
    timeline = [("load", MIB), ("start", 2 * MIB), ("forward", 3 * MIB), ("forward", 4 * MIB), ("backward", 2 * MIB)]
    timeline += [("forward", GIB), ("optimizer", 5 * MIB), ("forward", MIB)]
    for narrow, capacity, many in ((False, None, 8), (True, 2 * GIB, 8), (False, None, 1)):
        found[f"phases {narrow} {many}"] = drawn(charts.by_phase, narrow, timeline[:many], GIB, capacity)
    found["passes"] = charts.forward_passes(phase for phase, _ in timeline)
    found["compared"] = [drawn(charts.compared, narrow, runs | {"a" * 40: runs["one"]}) for narrow in (False, True)]
    found["units"] = [charts.axis_unit(top) for top in (0, GIB - 1, GIB, 5 * GIB)]
    kinds = [(0.0, {"parameters": MIB}), (1.5, {"parameters": MIB, "activations": 3 * MIB, "other": 0}), (2.0, {})]
    found["kinds"] = [drawn(_stack_kinds, narrow, line) for narrow in (False, True) for line in (kinds, [])]
    for name in ("a.png", "a.svg", "a.pdf", "a.html", "a.jpg", "none/a.png", "a"):
        found[name] = answered(charts.check_path, Path(name))
    frozen_texts("charts", found)


def test_what_recordings_hold(capsys, monkeypatch):
    """Made at random: of a card with segments and stacks by number, of a CPU with owners."""
    from hf_memopt.contrib.snapshots import snapshot_analysis, snapshot_command
    from hf_memopt.contrib.snapshots.snapshot_recording import KINDS, _moment, _size, parse_recording

    monkeypatch.setenv("COLUMNS", "120")
    found = {}
    files = (
        *("/x/torch/optim/adam.py", "/x/torch/autograd/graph.py", "/x/models/llama/modeling.py", "/home/me/train.py"),
        "",
    )
    for seed, card in itertools.product(range(5), (False, True)):
        draw, live, trace, time = random.Random(seed), [], [], 1000
        stacks = [[{"filename": file, "name": f"f{n}", "line": n} for file in files[n:] + files[:n]] for n in range(5)]
        for number in range(60):
            time += draw.choice((0, 1, 50))
            if live and draw.random() < 0.4:
                address, size = live.pop(draw.randrange(len(live)))
                trace.append({"action": "free_completed", "addr": address, "size": size, "time_us": time})
                continue
            row = {
                "action": "alloc",
                "addr": 4096 * (number + 1),
                "size": draw.choice((100, 4000, MIB)),
                "time_us": time,
            }
            row |= {"stack": draw.randrange(5)} if card else {"frames": draw.choice(stacks)}
            module = draw.choice(("", "model.layers.1.mlp", "model.layers.2.mlp"))
            trace.append(row | ({"user_metadata": module} if module else {}))
            live.append((row["addr"], row["size"]))
        trace += [
            {"action": "oom", "size": MIB, "device_free": 7},
            {"action": "oom", "size": 5},
            {"action": "snapshot"},
        ]
        trace.append({"action": "free_completed", "addr": 8, "size": 333, "time_us": time + 1})
        step = (time - 1000) // 6
        marks = [
            [1000 + step * n, "phase", phase]
            for n, phase in enumerate(("forward", "backward", "optimizer", "between"))
        ]
        marks += [[1000, "step", "1"], [1000 + 3 * step, "step", "2"], [1000 + 5 * step, "phase", "between"]]
        snapshot = {"device_traces": [[], trace], "stacks": stacks if card else None}
        about = {"owners": [[1001, 4096, 100, KINDS[0], "w"], [1002, 99, 64, KINDS[2], "s"]], "reason": "asked\x1b"}
        if seed % 2:
            snapshot["hf_memopt"] = {"marks": marks, **about, "capacity": GIB, "device": "card"}
        if card:
            blocks = [{"size": size, "state": "active_allocated", "requested_size": size - 1} for _, size in live[:3]]
            blocks += [
                {"size": 500, "state": "inactive"},
                {"size": 64, "state": "active_x", "address": 77, "frames": stacks[2]},
            ]
            segment = {"address": live[0][0], "total_size": sum(block["size"] for block in blocks), "blocks": blocks}
            snapshot["segments"] = [segment | {"device": 1}, segment | {"device": 0}]
        recording = parse_recording(snapshot)
        whole = snapshot_analysis.analyze_recording(recording, 3)
        line, at = snapshot_analysis._timeline(recording.allocations, 10)
        found[f"{seed} {card}"] = [
            *(
                *(whole.peak_bytes, whole.peak_phase, whole.peak_step, whole.by_kind, whole.by_module),
                whole.fragmentation,
            ),
            *(whole.largest, whole.growth, whole.out_of_memory, whole.about, len(whole.timeline), at),
            [(round(moment, 6), sorted(sizes.items())) for moment, sizes in line],
            snapshot_command.verdict(whole),
        ]
        snapshot_command._print(whole)
        found[f"{seed} {card} printed"] = [text.rstrip() for text in capsys.readouterr().out.splitlines()]
    for value in (0, -1, 2**62 - 1, 2**62, 2**64 - 1, 2**64, True, 1.5, "1", None):
        found[f"value {value!r}"] = [answered(_size, value), answered(_moment, value)]
    frozen_texts("recordings", found)


def test_what_messages_say():
    from hf_memopt.oom import events
    from hf_memopt.oom.figures import _attribute, parse_figures
    from hf_memopt.reports import advice
    from hf_memopt.reports.next_steps import larger_batch, used_share

    found = {}
    sizes = ("1.50 GiB", "512 MiB", "20 GB", "100 bytes")
    for one, other in itertools.product(sizes, sizes[:2]):
        asked = f"Tried to allocate {one}"
        for text in (
            f"CUDA out of memory. {asked}. GPU 0 has a total capacity of 20.00 GiB of which {other} is free.",
            f"MPS backend out of memory (MPS allocated: {one}, other allocations: {other}, max allowed: 20 GB).",
            f"a: out of memory, Tried to allocate {other}\n{one} cached)\nout of memory. {asked}",
            f"out of memory. Process 7 has {one} memory in use. Including this process has {other} memory in use. "
            f"2 GiB total capacity; {one} already allocated; {other} free; {one} reserved in total by PyTorch",
        ):
            found[text] = parse_figures(text)
    free, own, allocated = (None, 0, 2 * GIB), (None, 3 * GIB, 30 * GIB), (None, 4 * GIB)
    for given in itertools.product(free, own, allocated, (None, GIB), (None, 5 * GIB)):
        names = ("free_bytes", "own_bytes", "allocated_bytes", "unused_bytes", "reserved_bytes")
        figures = {name: value for name, value in zip(names, given, strict=True) if value is not None}
        row = found[f"given {figures}"] = []
        for listed in ([], [5 * GIB], [9 * GIB, 2**63], [4 * GIB - 16 * MIB, 3 * GIB], [4 * GIB - 17 * MIB]):
            row.append(
                [value / GIB for value in _attribute({"capacity_bytes": 20 * GIB, **figures}, list(listed)).values()]
            )
    found["limited"] = _attribute({"capacity_bytes": GIB, "limit_bytes": 5, "free_bytes": 1}, [9])
    for batch, steps in itertools.product((None, 1, 4, "4"), (None, 1, 2, 3, 8)):
        found[f"batch {batch!r} {steps}"] = larger_batch(batch, steps)
    for measured, capacity, readings in itertools.product(
        ({}, {"peak_reserved_bytes": 5}, {"peak_host_bytes": 3, "peak_reserved_bytes": 0}),
        (None, 10),
        ([], [{"peak_allocated": 9}, {"peak_allocated": 4, "capacity": 20}]),
    ):
        run = SimpleNamespace(report={"measured": measured, "hardware": {"memory_bytes": capacity}}, readings=readings)
        found[f"share {measured} {capacity} {len(readings)}"] = used_share(run)
    quoted = [advice._quote("\x07" * bells + "x" * 2000) for bells in (0, 500, 750, 999, 1000, 1500)]
    assert [len(text) for text in quoted] == [500, 500, 250, 1, 0, 0]  # of 1,000 characters, without those
    found["indices"] = [events._list_indices(indices) for indices in (None, [], [1], list(range(8)), list(range(9)))]
    found["shapes"] = events._list_shapes({name: [2, number] for number, name in enumerate("abcd")})
    found["listed"] = [len(events._listed({"a": "x" * number})) for number in (10, 1000, 5000)]
    for stage, more in itertools.product(
        ("forward", "eval", "save", "resume"), ({}, {"micro_batch_after": 1, "remedy": "r"})
    ):
        event = {
            "event": "oom_recovered",
            "stage": stage,
            "step": 3,
            "message": "m" * 300,
            "micro_batch_before": 2,
            **more,
        }
        found[f"event {stage} {len(more)}"] = events._sentence(event | {"dataset_indices": [1]} if more else event)
    frozen_texts("messages", found)


def test_what_pages_show(tmp_path):
    from hf_memopt.ui import shown
    from hf_memopt.ui.question import read_length

    found, picture = {}, tmp_path / "a.html"
    picture.write_text("<picture/>")
    took = {"cost": 3.456, "seconds": 7300.0, "tokens": 10**7}
    levers = [{"change": f"<{n}>", "saved_bytes": n * MIB, "fits": n % 2 == 0} for n in range(10)]
    for fits, devices, duration, capacity in itertools.product(
        (True, False, None), (1, 2), (None, took), (None, 8 * GIB)
    ):
        told = {"device_bytes": 5 * GIB, "capacity_bytes": capacity, "fits": fits, "model": "<m>", "method": "lora"}
        told |= {
            "hardware": "t4" if devices > 1 else "own card",
            "devices": devices,
            "phase": "backward",
            "notes": ["a<b"],
        }
        told |= {"tokens_per_second": 1234.5 if duration else None, "speed_error": 0.15, "duration": duration}
        told |= {"breakdown": {"parameters": GIB, "gradients": 0, "own": 3}, "levers": levers if fits else []}
        path = picture if fits else tmp_path / "none"
        found[f"{fits} {devices} {bool(duration)} {capacity}"] = shown.show_estimate(told, path)
    profile = {
        "profile": "safe",
        "settings": "a",
        "estimate": told,
        "tokens_per_second": 1000.4,
        "launch": "x --a 1 --b YOUR_DATA.jsonl",
    }
    other = {**profile, "profile": "balanced", "launch": None}
    plan = {
        **{"model": "m", "hardware": "t4", "devices": 1, "method": "qlora", "profiles": [profile, other]},
        "usable_bytes": 9 * GIB,
    }
    plan |= {
        **{"durations": {"safe": took, "balanced": None}, "edits": None, "seq_len": 64, "effective_batch_size": 1},
        "notes": [],
    }
    edits = {"diff": "", "keys": {"a": 1, "b": None}, "launcher": "torchrun"}
    nothing = {"profiles": [], "nearest": [], "missing_bytes": 3 * GIB}
    for name, more in {
        **{"plan": {}, "one": {"profiles": [profile | {"tokens_per_second": None}], "effective_batch_size": 4}},
        **{
            "others": {"profiles": [profile, profile | {"settings": "b", "profile": "maximum"}]},
            "edits": {"edits": edits},
        },
        **{"diff": {"edits": {"diff": "+a", "keys": {}, "launcher": None}}, "same": {"edits": edits | {"keys": {}}}},
        **{
            "nothing": nothing,
            "nothing near": nothing | {"nearest": ["<x>"]},
            "no size": nothing | {"missing_bytes": None},
        },
    }.items():
        found[name] = shown.show_plan(plan | more)
    for text in ("", " ", "2k", "2048", "0", "1.5", "1.5k", "-1", "many", "1", str(2**20), str(2**20 + 1), "9" * 30):
        found[f"length {text}"] = answered(read_length, text, "tokens")
    frozen_texts("shown", found)


def test_which_values_types_take():
    from hf_memopt.field_values import fit

    hints = {
        **{
            **{"any": Any, "list": list[str], "dict": dict[str, int], "either": int | list[int] | None},
            "pair": tuple[int, str],
        },
        **{
            "words": Literal["no", "steps", "Epoch"],
            "numbers": Literal[1, 2] | None,
            "many": tuple[int, ...],
            "text": str,
        },
        **{
            "sequence": Sequence[str] | None,
            "optional": bool | None,
            "path": str | None,
            "nested": dict[str, list[int]],
        },
    }
    values = (
        *(None, True, False, 0, 1, 3, -1, 1.5, 2**64, "no", "steps", "epoch", "true", "1", "y", "[1, 2]", '{"a": 1}'),
    )
    values += (
        *([], [1], ["a"], [1, "a"], (1, "a"), {"a": 1}, {"a": "b"}, {1: 2}, {"a": [1]}, {"a": ["b"]}, "{", Path("x")),
    )
    found = {f"{name} {value!r}": answered(fit, hints, {name: value}) for name in hints for value in values}
    frozen_texts("types", found)


def test_words_versions_and_refusals(monkeypatch):
    from hf_memopt import disk, errors, terminal
    from hf_memopt.compatibility import resolve
    from hf_memopt.stack import versions

    found, known = {}, ["max_length", "max_steps", "bf16", "fp16", "learning_rate", "lr", "LoRA", "max_in_cpu"]
    words = (
        *("Max-Length", "max_lenght", "bf", "bf1", "LR", "lora+", "max_in_nvme", "max_stpes", "zzzz", ""),
        *("learning_rte", "b"),
    )
    for word in words:
        alike = [errors.closest(word, known), errors.closest(word, known, 0.9), errors.misspelling(word, known)]
        found[word] = [*alike, answered(errors.accepted, "setting", word, known)]
    found["listed"] = [errors.listed(["a", "b", "c"], most) for most in (1, 2, 3, 4)]
    found["brief"] = [
        errors.brief(value) for value in ("a" * 200, "a\nb", list(range(50)), {"a": {"b": {"c": {"d": 1}}}}, None)
    ]
    inner = ValueError("hub_token=abc\n two")
    outer = RuntimeError("")
    outer.__cause__ = inner
    group = ExceptionGroup("both", [outer, KeyError("x")])
    found["chain"] = [[type(one).__name__ for one in errors.chain(error)] for error in (None, inner, outer, group)]
    found["lines"] = [errors.one_line(error) for error in (inner, outer, KeyError("x"))]
    for number, name in itertools.product(
        (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EPIPE), (None, "a")
    ):
        found[f"disk {errno.errorcode[number]} {name}"] = disk.write_failure(OSError(number, "refused", name))
    odd = RuntimeError("PytorchStreamWriter failed writing file data/0")
    odd.__cause__, wrapped = None, ValueError("x")
    wrapped.__cause__ = OSError(errno.ENOSPC, "full")
    rust = type("SafetensorError", (Exception,), {})("I/O error: No space left (os error 28)")
    found["disks"] = [disk.write_failure(error) for error in (odd, wrapped, rust, RuntimeError("else"), None)]
    monkeypatch.setattr(versions, "installed", lambda name: {"torch": (2, 11, 0), "transformers": (5, 13)}.get(name))
    monkeypatch.setattr(
        versions, "TRIED", {"torch": ("2.4", "2.11"), "transformers": ("4.55", "5.12"), "trl": ("0.9", "1.0")}
    )
    monkeypatch.setattr(versions.metadata, "version", lambda name: f"of {name}")
    for since in ("2.4", "2.11", "2.11.0", "2.11.1", "2.12", "3"):
        found[f"since {since}"] = [versions.has("torch", since), versions.has("trl", since)]
    for text in (
        *("torch==2.4", "torch==2.3", "torch==2", "torch==1", "torch==2.11", "torch=2.5", "torch==2.x", "numpy==1"),
        "trl==0.9",
    ):
        found[f"stack {text}"] = [str(answered(versions.name_stack, [text])).partition(". ")[0], dict(versions.named)]
        found[f"stack {text}"].append([versions.stack_has(name, "2.5") for name in ("torch", "transformers")])
    versions.named.clear()
    found["beyond"] = versions.beyond_tried()
    for text, sizes in (("true", {"TP": 2}), ("true", {"TP": 1}), ("false", {"TP": 2}), ("1", {"CP": 4, "TP": 2})):
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", text)
        for name in ("TP", "CP", "SP"):
            monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(sizes.get(name, 1)))
        own = [SimpleNamespace(**dict.fromkeys((f"{name}_size" for name in resolve.PARALLEL), None)) for _ in range(2)]
        own[0].tp_size = 2
        rows = [resolve.parallel_sizes(), *(answered(resolve._tp_size, config) for config in (None, *own))]
        found[f"parallel {text} {sizes}"] = [*rows, resolve.sequence_parallel_size()]
    odd_text = "a\x1b[31mb\u202ec\x07"
    found["plain"] = [terminal.plain(odd_text), terminal.plain_values({odd_text: [odd_text, 1, {"b": odd_text}]})]
    stream = io.StringIO()
    terminal.PlainStream(stream).writelines(["\rcount 1", "x\ry\n", odd_text])
    found["stream"] = repr(stream.getvalue())
    stream.isatty = lambda: True
    monkeypatch.setenv("COLUMNS", "30")
    for text in ("some words that are longer than thirty columns of a terminal", "short"):
        terminal.say(text, stream)
    found["said"] = repr(stream.getvalue())
    monkeypatch.setattr("sys.stderr", stream)
    terminal.show_status("what takes time, in more words than there is room for in this terminal")
    terminal.show_status("then")
    terminal.clear_status()
    found["status"] = repr(stream.getvalue())
    frozen_texts("words", found)


@pytest.mark.parametrize("tail", [False, True])
def test_what_files_hold(tail, tmp_path, monkeypatch):
    from hf_memopt import files
    from hf_memopt.reports import log
    from hf_memopt.yaml_values import module_names, read_text

    monkeypatch.chdir(tmp_path)
    found, file = {}, tmp_path / "log.jsonl"
    for content in (
        *(b"", b"x", b"x\ny\n", b'{"a": 1}\nx\n[1]\n', b'{"a": 1}', b'\xff\n{"b": 2}\n'),
        b"x" * 70_000 + b'\n{"c": 3}\n',
    ):
        file.write_bytes(content)
        for largest in (5, 8, 10**6) if tail else (len(content), 9):
            read = answered(lambda: list(log._entries(file, largest)))  # noqa: B023
            found[f"log {content[:20]} {len(content)} {largest}"] = str(read).replace(str(tmp_path), "")
            whole = answered(files.read_bytes, file, largest, tail)
            found[f"bytes {content[:20]} {len(content)} {largest}"] = str(whole)[-40:].replace(str(tmp_path), "")
    for depth in (59, 60, 61):
        found[f"depth {depth}"] = [str(answered(files.parse_json, "[" * depth + "]" * depth))[:60]]
        found[f"mapping {depth}"] = [str(answered(files.parse_json, '{"a":' * depth + "1" + "}" * depth))[:60]]
    found["wide"] = len(files.parse_json("[" + "[]," * 100 + "[]]"))
    for text in (
        *("a", "a, b", "a b,c", " a ", "a.b c_d", "all-linear", ".*x", "a|b", "", ["a"], None, "a,"),
        "q_proj,\nv_proj",
    ):
        found[f"modules {text!r}"] = module_names(text)
    largest = 2**20
    for size in (largest, largest + 1):
        monkeypatch.setattr("hf_memopt.yaml_values._MOST_BYTES", largest)
        file.write_bytes(b"#" * size)
        found[f"yaml {size}"] = str(answered(read_text, file, "here"))[-60:]
    for content in (b"\xef\xbb\xbfa: 1", b"a: 1\nb: \xff"):
        file.write_bytes(content)
        found[f"yaml {content}"] = answered(read_text, file, "here")
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir(), outside.mkdir(), (outside / "a.txt").touch()
    (folder / "own.txt").touch(), (folder / "inside.txt").symlink_to(folder / "own.txt")
    (folder / "sub").symlink_to(outside), (folder / "a.txt").symlink_to(outside / "a.txt")
    for names in (None, ("own.txt", "inside.txt"), ("a.txt",), ("sub",)):
        found[f"links {names}"] = str(answered(files.check_links, folder, names)).replace(str(tmp_path), "")
    (folder / "a.txt").unlink()
    found["a folder's link"] = str(answered(files.check_links, folder)).replace(str(tmp_path), "")
    frozen_texts(f"files_{tail}", found)
