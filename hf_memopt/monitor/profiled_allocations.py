"""The profiler's allocator events in the format of CUDA's memory history.

Reads the private event tree of torch 2.13's profiler, the only form of its results in which an allocation has its
stack and module. If it changes, snapshots without CUDA cannot be written (test_snapshot.py fails).
"""

from typing import Any

from torch._C._profiler import _EventType


def profiled_trace(results, modules: dict[int, str]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Allocations and frees in order, and the stacks that they refer to by index.

    Args:
        results: `kineto_results` of a profiler with profile_memory and with_stack.
        modules: id of a module -> its name.

    Returns:
        Dicts of `action` (alloc, free_completed), `addr`, `size` (bytes), `time_us` (since 1970), `stack` (an index
        into the second list) and `user_metadata` (the module's name); and lists of frames, innermost first, each a
        dict of `filename`, `line`, `name`.
    """
    trace: list[dict[str, Any]] = []
    stacks: dict[tuple, int] = {(): 0}
    pending = [(root, (), "") for root in results.experimental_event_tree()]
    while pending:
        event, stack, module = pending.pop()
        if event.tag == _EventType.Allocation:
            size = event.extra_fields.alloc_size
            trace.append(
                {
                    "action": "alloc" if size >= 0 else "free_completed",
                    "addr": event.extra_fields.ptr,
                    "size": abs(size),
                    "time_us": event.start_time_ns / 1000,
                    "stack": stacks.setdefault(stack, len(stacks)),
                    "user_metadata": module,
                }
            )
            continue
        if event.tag == _EventType.PyCall:
            called = event.extra_fields.callsite
            stack = ((called.file_name, called.line_number, called.function_name), *stack)
            if event.extra_fields.module is not None:
                module = modules.get(int(event.extra_fields.module.self_ptr), module)
        elif event.tag == _EventType.TorchOp:
            stack = (("", 0, event.name), *stack)
        pending.extend((child, stack, module) for child in event.children)
    trace.sort(key=lambda event: event["time_us"])
    named = [[{"filename": file, "line": line, "name": name} for file, line, name in stack] for stack in stacks]
    return trace, named
