"""Part 6: the caching allocator's own history of a job, replayed through our model of it."""

import tempfile

from benchmarks.gpu.case import Case
from hf_memopt.contrib.calibration.training import Setting, make_trainer

JOB = Setting("allocator", "qwen2.5-0.5b", {"bf16": True}, micro=4, length=1024)
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
COLLECTED = {"PYTORCH_ALLOC_CONF": "expandable_segments:False,garbage_collection_threshold:0.6"}
MIXED = {"model": "qwen3-0.6b", "length": 777, "fields": {"bf16": True, "eval_strategy": "steps", "eval_steps": 1}}


def cases(rehearse: bool) -> list[Case]:
    """The same jobs with each of the allocator's settings, and requests of every size class."""
    made = [
        Case("allocator", "expandable", 19, {}, EXPANDABLE),
        Case("allocator", "segments", 20, {}, SEGMENTS),
        Case("allocator", "expandable, mixed sizes", 41, MIXED, EXPANDABLE),
        Case("allocator", "segments, mixed sizes", 42, MIXED, SEGMENTS),
        Case("allocator", "garbage_collection_threshold", 70, {}, COLLECTED),
        Case("allocator", "rounding", 22, {}, SEGMENTS),
    ]
    return [Case(one.part, one.name, one.worth, one.settings, one.env, rehearse=rehearse) for one in made]


def measure(case: Case) -> dict:
    """By the case's name."""
    import dataclasses

    if case.name == "rounding":
        return rounding()
    setting = dataclasses.replace(JOB, **case.settings)
    setting = setting.rehearsed() if case.rehearse else setting
    expandable = "expandable_segments:True" in case.env["PYTORCH_ALLOC_CONF"]
    events, found = recorded(setting)
    return {"events": len(events), **found, **replayed(events, expandable)}


def recorded(setting: Setting) -> tuple[list[tuple[int, int]], dict]:
    """(address, bytes; 0 frees) of every allocation of three steps, and the allocator's own peaks."""
    import torch

    if not torch.cuda.is_available():
        from torch.profiler import ProfilerActivity, profile

        watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with tempfile.TemporaryDirectory() as folder, watched as recording:
            make_trainer(setting, folder, 2).train()
        raw = [event for event in recording.profiler.kineto_results.events() if event.name() == "[memory]"]
        raw.sort(key=lambda event: event.start_ns())
        live = [(number, event.nbytes()) for number, event in enumerate(raw)]
        return [(number, size) for number, size in live if size > 0], {"allocated_bytes": None, "reserved_bytes": None}
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=2_000_000)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(setting, folder, 3).train()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    sizes = {"alloc": lambda event: event["size"], "free_completed": lambda event: 0}
    events = [(event["addr"], sizes[event["action"]](event)) for event in trace if event["action"] in sizes]
    return events, {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def replayed(events: list[tuple[int, int]], expandable: bool) -> dict:
    """The same requests in estimator.allocator.caching."""
    from hf_memopt.estimator.allocator.caching import CachingAllocator

    model, blocks, live, peak = CachingAllocator(expandable), {}, 0, 0
    for address, size in events:
        if size:
            blocks[address] = (model.allocate(size), size)
            live += size
            peak = max(peak, live)
        elif address in blocks:
            block, size = blocks.pop(address)
            model.release(block)
            live -= size
    return {"replayed_allocated_bytes": peak, "replayed_reserved_bytes": model.peak}


def rounding() -> dict:
    """Requests of every size class: how much more the allocator reserves, beside the model's answer."""
    import torch

    from hf_memopt.estimator.allocator.caching import CachingAllocator

    found = {}
    for size in (1, 513, 2**20, 2**20 + 1, 5 * 2**20, 10 * 2**20, 11 * 2**20 + 1, 33 * 2**20 + 5):
        model = CachingAllocator(expandable=False)
        model.allocate(size)
        reserved = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            kept = torch.empty(size, dtype=torch.uint8, device="cuda")
            reserved = torch.cuda.memory_reserved() - before
            del kept
        found[str(size)] = {"reserved_bytes": reserved, "model_bytes": model.reserved}
    return found
