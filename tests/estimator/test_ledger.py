"""What a ledger counts of tensors on this CPU, step by step; real runs are compared elsewhere."""

from contextlib import contextmanager

import torch

from hf_memopt.estimator.accounting.ledger import HOST, PAGED, Event, Ledger, Moment, Peak, highest


def new(size: int, *shape: int) -> torch.Tensor:
    """A tensor of so many bytes, or of a shape."""
    return torch.empty(shape or size, dtype=torch.uint8)


@contextmanager
def counting(block: int = 1):
    with Ledger(block) as ledger:
        ledger.begin("forward", "activations")
        yield ledger


def held(ledger) -> list[int]:
    """Bytes of the segment's peak: all on the device, those of each kind, host and paged ones."""
    peak = ledger.moments[ledger._moment]
    return [peak.total, peak.by_kind, peak.host, peak.paged]


def test_segments_have_peaks_and_events_are_in_order():
    with counting() as ledger:
        first = new(100)
        assert not ledger.passed_layers()
        ledger.enter("forward: layer", "workspace", layer=3)
        second = new(50)
        del second
        third = new(50)
        ledger.enter("forward: head")
        assert ledger.passed_layers()
        ledger.begin("backward", "gradients")
        assert not ledger.passed_layers()
        ledger.enter("backward: head")
        assert not ledger.passed_layers()
        with ledger.counting_as("other"):
            fourth = new(7)
        fifth = new(1)
        ledger.paused = True
        sixth = new(1000)
        ledger.paused = False
        del first, third
        seventh = new(10)
        views = fourth.view(7), fifth, sixth, seventh, new(0), torch.empty(5, device="meta")
    found = ledger.result()
    both = {"activations": 100, "workspace": 50}
    assert found.moments == {
        Moment("forward", 1, None): Peak(100, {"activations": 100}),
        Moment("forward: layer", 1, 3): Peak(150, both),
        Moment("forward: head", 1, None): Peak(150, both),
        Moment("backward", 2, None): Peak(150, both),
        Moment("backward: head", 2, None): Peak(158, both | {"other": 7, "gradients": 1}),
    }
    assert found.segments == ["load", "forward", "forward: layer", "forward: head", "backward", "backward: head"]
    assert found.events == [
        *(Event(1, 100, 1, None), Event(2, 50, 2, 3), Event(2, 0, 2, 3), Event(3, 50, 2, 3)),
        *(Event(4, 7, 5, None), Event(5, 1, 5, None), Event(1, 0, 5, None), Event(3, 0, 5, None)),
        Event(6, 10, 5, None),
    ]
    assert len(views) == 6 and (found.steps, found.kept_logits, found.unquantized_experts) == (0, 0, False)


def test_a_job_begins_by_loading():
    with Ledger() as ledger:
        kept = new(5)
    assert ledger.moments == {Moment("load", 0, None): Peak(5, {"other": 5})} and len(kept) == 5
    assert (ledger.events, ledger.segments, ledger.layers) == ([Event(1, 5, 0, None)], ["load"], {})
    assert (ledger.vocabulary, ledger.kept_logits, ledger.step, ledger.work) == ((0, 0), 0, 0, None)
    assert not (ledger.paused or ledger.unquantized_experts or ledger.attention or ledger.without_gradient)
    assert ledger.ignore_compile_internals() is True


def test_sizes_are_rounded_to_blocks_and_pinned_ones_to_powers_of_two():
    for size, block, pinned in [(1, 512, 512), (512, 512, 512), (513, 1024, 1024), (1025, 1536, 2048)]:
        with counting(512) as ledger:
            tensor = new(size)
            assert held(ledger) == [block, {"activations": block}, 0, 0]
            ledger.pin(tensor)
            ledger.enter("between")
            assert held(ledger) == [0, {}, pinned, 0] and ledger.on_host(tensor)
    for size, pinned in [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)]:
        with counting() as ledger:
            ledger.pin(tensor := new(size))
            ledger.enter("between")
            assert held(ledger)[2] == pinned
            del tensor
            ledger.enter("end")
            assert held(ledger) == [0, {}, 0, 0]


def test_kinds_change_and_host_memory_is_none_of_the_devices():
    with counting() as ledger:
        tensor = new(100)
        with ledger.counting_as(PAGED):
            paged = new(30)
        ledger.classify(paged, "parameters")  # stays paged
        ledger.enter("a")
        assert held(ledger) == [100, {"activations": 100}, 0, 30]
        assert not ledger.on_host(tensor)
        ledger.classify(tensor, HOST)
        ledger.enter("b")
        assert held(ledger) == [0, {}, 100, 30] and ledger.on_host(tensor)
        ledger.classify(tensor, HOST)
        ledger.classify(tensor, "gradients")
        ledger.enter("c")
        assert held(ledger) == [100, {"gradients": 100}, 0, 30]
        ledger.classify(tensor, "parameters")
        changes = [event for event in ledger.events if event.allocation == 1]
        assert changes == [Event(1, 100, 1, None), Event(1, 0, 2, None), Event(1, 100, 3, None)]
        ledger.forget(tensor)
        ledger.enter("d")
        assert held(ledger) == [0, {}, 0, 30] and ledger.on_host(tensor)
        del tensor, paged
        ledger.enter("e")
        assert held(ledger) == [0, {}, 0, 0]
    ledger.classify(outside := torch.ones(3), "gradients")
    assert not ledger.on_host(outside) and ledger.find_layer(outside) is None


def test_of_equal_peaks_the_later_counts_and_host_bytes_are_the_most_of_any():
    with counting() as ledger:
        first, waiting = new(10), new(8)
        ledger.classify(waiting, HOST)
        ledger.classify(first, "gradients")
        second = new(8)
        ledger.enter("next")
        assert ledger.peaks["forward"] == Peak(18, {"gradients": 10, "activations": 8}, 8)
        del waiting
        third = new(1)
        assert held(ledger) == [19, {"gradients": 10, "activations": 9}, 8, 0]
    peaks = [
        *(("a", Peak(5, {"x": 5}, 1, 9)), ("a", Peak(5, {"y": 5}, 3, 2)), ("a", Peak(4, {"z": 4}, 2, 1))),
        ("b", Peak(1)),
    ]
    assert highest(peaks) == {"a": Peak(5, {"y": 5}, 3, 9), "b": Peak(1)} and second is not third


def test_layers_and_restarts():
    with counting() as ledger:
        weight, moved, other = new(3), new(20), new(4)
        for layer in (None, 7, 5, None):
            ledger.tag(weight, layer)
        assert [ledger.find_layer(tensor) for tensor in (weight, other)] == [5, None]
        ledger.pin(moved)
        ledger.enter("load")
        del other
        ledger.restart()
        assert [(event.allocation, event.size, event.layer) for event in ledger.events] == [(1, 3, None)]
        assert [(moment.segment, peak.total) for moment, peak in ledger.moments.items()] == [
            *(("forward", 27), ("load", 3), ("start", 3))
        ]
        assert ledger.result().layers == {1: 5}


def test_storages_that_are_resized_in_place_are_counted_anew():
    with counting() as ledger:
        tensor = new(100)
        for size in (40, 0, 60):
            tensor.untyped_storage().resize_(size)
            ledger.resized(tensor)
            ledger.enter(f"of {size}")
            assert held(ledger)[0] == size
        del tensor
        assert [event.size for event in ledger.events] == [100, 0, 40, 0, 60, 0]


def test_logits_are_told_by_the_vocabulary():
    with counting() as ledger:
        ledger.vocabulary = (11, 4)
        kept = [new(0, *shape) for shape in ((2, 11), (3, 5, 11), (4, 11), (11, 2), (11,))]
        with ledger.counting_as("workspace"):
            kept.append(new(0, 2, 11))
        ledger.enter("now")
        assert held(ledger)[1] == {"logits": 22 + 165 + 11, "activations": 44 + 22, "workspace": 22}, len(kept)
