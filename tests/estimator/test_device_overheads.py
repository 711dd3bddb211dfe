"""What devices hold beside tensors: contexts, workspaces of cuBLAS, and what MPS's allocator reserves."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from transformers import AutoConfig

from hf_memopt.estimator import assembly, estimate
from hf_memopt.estimator.allocator.metal import MetalAllocator
from hf_memopt.estimator.allocator.replay import Replay
from hf_memopt.estimator.overheads import _evaluated
from hf_memopt.hardware import get_hardware
from hf_memopt.hardware.constants import assumed
from hf_memopt.units import GIB, MIB

SHAPE = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 512, "vocab_size": 8000, "num_hidden_layers": 4},
}


def small(hardware):
    fields = {"per_device_train_batch_size": 2, "optim": "adamw_torch"}
    return estimate(AutoConfig.for_model("llama", **SHAPE), fields, 256, hardware, dtype="float32")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("hardware", "handle"),
    [("t4", 8_519_680), ("a100_80gb", 8_519_680), ("h100_80gb", 32 * MIB), ("rtx_5090", 32 * MIB)],
)
def test_forward_and_backward_have_a_workspace_each(hardware, handle):
    """torch keeps a cuBLAS handle a thread, and autograd runs backward in its own."""
    assert assumed("workspace_bytes", get_hardware(hardware)).value == handle
    same_kernels = small(hardware), small("mi300x")
    difference = 2 * (handle - 128 * MIB)
    assert same_kernels[0].peak_allocated_bytes - same_kernels[1].peak_allocated_bytes == difference


def reserved(*sizes):
    allocator = MetalAllocator()
    buffers = [allocator.allocate(size) for size in sizes]
    return allocator, buffers


HEAPS = [
    *(([1000], 8 * MIB), ([MIB] * 8, 8 * MIB), ([MIB] * 9, 16 * MIB), ([MIB + 1], 32 * MIB)),
    *(([9 * MIB] * 3, 32 * MIB), ([9 * MIB] * 4, 64 * MIB), ([10 * MIB], GIB), ([500 * MIB, 500 * MIB], GIB)),
    ([500 * MIB, 10 * MIB, 9 * MIB], GIB),  # a heap with room serves smaller ones too
    ([512 * MIB], 512 * MIB),
    ([600 * MIB + 1], 602 * MIB),
    ([1000, 20 * MIB, 2 * MIB, 1100 * MIB], 8 * MIB + GIB + 1100 * MIB),
]


def test_heaps_have_the_sizes_of_torch(subtests):
    for sizes, heaps in HEAPS:
        with subtests.test(f"{sizes} {heaps}"):
            assert reserved(*sizes)[0].peak == heaps


def test_a_freed_buffer_is_reused_whole():
    allocator, (first, second) = reserved(400 * MIB, 700 * MIB)
    allocator.release(first)
    assert allocator.allocate(390 * MIB) is first
    allocator.release(first)
    allocator.release(second)
    # 200 MiB fit beside neither: the cached 400 MiB are 32 MiB too large for it, and the heap has 624 MiB left.
    assert allocator.allocate(200 * MIB).offset == 400 * MIB
    assert allocator.peak == GIB + 700 * MIB


def test_a_buffer_that_is_too_large_makes_room_where_no_heap_has():
    allocator, (first, _) = reserved(500 * MIB, 500 * MIB)
    allocator.release(first)
    assert allocator.allocate(100 * MIB).offset == 0
    assert allocator.allocate(390 * MIB).offset == 100 * MIB
    assert allocator.peak == GIB


def test_mps_reserves_heaps():
    estimated = small("apple_m2_16gb")
    assert estimated.peak_reserved_bytes > estimated.peak_allocated_bytes
    assert estimated.device_bytes == estimated.peak_reserved_bytes == estimated.reserved_bytes["segments"]
    assert estimated.host_bytes > estimated.peak_reserved_bytes  # unified memory
    assert not any("CUDA" in note for note in estimated.notes)
    assert any("MPS's allocator" in note for note in estimated.notes)


def test_logits_are_on_the_host_twice_where_steps_are_concatenated(subtests):
    """Of unified memory, numpy's arrays of what was not moved in steps are torch's."""
    for evaluated, kept, hardware, concatenates, times in [
        *((0, 0, "rtx_4090", True, 0), (5, 5, "rtx_4090", True, 5), (5, 4, "rtx_4090", True, 10)),
        *((5, 1, "rtx_4090", False, 5), (0, 0, "apple_m2_16gb", True, 0), (5, 5, "apple_m2_16gb", True, 0)),
        *((5, 4, "apple_m2_16gb", True, 10), (5, 4, "apple_m2_16gb", False, 5)),
    ]:
        with subtests.test(f"{kept} of {evaluated} on {hardware}, {concatenates}"):
            device = get_hardware(hardware)
            job = SimpleNamespace(
                evaluated_batches=evaluated, kept_batches=kept, device=device, concatenates_logits=concatenates
            )
            assert _evaluated(job, 100) == 100 * times


def test_what_flat_buffers_reserve_is_scaled_from_a_shallow_model(monkeypatch, subtests):
    for flat_buffers, added in [(False, [3]), (True, [0])]:
        with subtests.test(flat_buffers=flat_buffers):
            shallow = Replay(100, {"expandable": 120, "segments": 150}, (("forward", 40), ("backward", 100)))
            asked = Mock(return_value=shallow)
            monkeypatch.setattr(assembly, "replay", asked)
            job = SimpleNamespace(engine=SimpleNamespace(flat_buffers=flat_buffers), device="the device")
            scaled = Replay(250, {"expandable": 300, "segments": 375}, (("forward", 100), ("backward", 250)))
            assert assembly._replay("the trace", 2, 3, job, 250) == (scaled if flat_buffers else shallow)
            asked.assert_called_once_with("the trace", 2, *added, "the device")
