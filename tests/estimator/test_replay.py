"""Events of a deep model, made from those of a shallow one, are those that the deep one has."""

from collections import Counter

from hf_memopt.estimator.accounting.ledger import STACK, Event, TraceResult
from hf_memopt.estimator.allocator.replay import replay, stretch
from hf_memopt.hardware import get_hardware
from hf_memopt.units import MIB


class Written:
    """A trace by hand: two steps of a model of alike layers, of which every `period`-th has weights."""

    def __init__(self, layers: int, period: int, stacks: int = 1):
        self.events, self.segments, self.layers, self.count = [], ["load"], {}, 0
        stacked = [[STACK * stack + layer for layer in range(layers)] for stack in range(stacks)]
        every = [layer for stack in stacked for layer in stack]
        heavy = [layer for layer in every if layer % STACK % period == 0]
        for layer in heavy:  # outside of layers, of which the ledger was told the layer
            self.layers[self.new(500 + layer % STACK % period, None)] = layer
        for _ in range(2):
            self._step(stacked, every, heavy, layers, period)

    def _step(self, stacked, every, heavy, layers, period):
        inputs, outputs, kept, incoming, gradients = {}, {}, {}, {}, {}
        self.enter("forward")
        first = self.new(30, None)
        for layer in every:
            place, kind = self.enter_layer("forward", layer, layers), layer % STACK % period
            inputs[layer] = self.new(40 + kind + 7 * (place == "first"), layer)
            kept[layer] = self.new(60 + kind + 9 * (place == "last"), layer)
            for _ in range(2):
                self.free(self.new(80 + kind, layer), layer)
            outputs[layer] = self.new(20, layer)
            if layer - 1 in outputs:  # of the layer before
                self.free(outputs.pop(layer - 1), layer)
            elif layer >= STACK and place == "first":  # of the other stack's last layer
                self.free(outputs.pop(stacked[0][-1]), layer)
        self.enter("forward")
        logits = self.new(900, None)
        self.free(first, None)
        self.enter("backward")
        for layer in reversed(every):
            self.enter_layer("backward", layer, layers)
            incoming[layer] = self.new(70, layer)
            if layer + 1 in incoming:  # of the layer after
                self.free(incoming.pop(layer + 1), layer)
            if layer in heavy:
                gradients[layer] = self.new(100, layer)
            self.free(kept.pop(layer), layer)
            if layer >= STACK:
                self.free(inputs.pop(layer), layer)
        for number in (logits, *outputs.values(), *incoming.values()):
            self.free(number, None)
        self.enter("optimizer")
        for layer in heavy:
            self.free(gradients.pop(layer), None)
        for layer in [layer for layer in inputs if layer % STACK % period == 0]:
            self.free(inputs.pop(layer), None)

    def enter(self, segment):
        self.segments.append(segment)

    def enter_layer(self, phase, layer, layers):
        place = {0: "first", layers - 1: "last"}.get(layer % STACK, "between")
        self.enter(f"{phase}: {place} layer")
        return place

    def new(self, size, layer):
        self.count += 1
        self.events.append(Event(self.count, size, len(self.segments) - 1, layer))
        return self.count

    def free(self, number, layer):
        self.events.append(Event(number, 0, len(self.segments) - 1, layer))

    def trace(self) -> TraceResult:
        return as_trace(self.events, self.segments, self.layers)


def as_trace(events, segments, layers=None) -> TraceResult:
    return TraceResult({}, events, segments, layers or {}, False, 0, Counter())


def in_order(trace: TraceResult, period: int, added: int) -> list:
    """What is allocated, how large, and when it was allocated that is freed, each in its segment."""
    began, events = {}, []
    for name, size, visit in stretch(trace, period, added):
        if size:
            began[name] = len(events)
        events.append((size or -began.pop(name), trace.segments[visit]))
    return events


def test_stretched_events_are_those_of_the_deep_model(subtests):
    for layers, period, added, stacks in [
        *((3, 1, 1, 1), (3, 1, 2, 1), (4, 1, 3, 1), (5, 1, 1, 2), (3, 1, 2, 2)),
        *((4, 2, 1, 1), (5, 2, 2, 1), (6, 2, 3, 1), (6, 2, 2, 2), (5, 3, 2, 1), (7, 3, 1, 2)),
    ]:
        with subtests.test(f"{layers} {period} {added} {stacks}"):
            shallow, deep = (Written(count, period, stacks).trace() for count in (layers, layers + period * added))
            assert in_order(shallow, period, added) == in_order(deep, 1, 0)


def test_a_replay_has_the_peaks_of_its_device_and_the_highest_of_every_stretch(monkeypatch):
    sizes = (3, 12, 0, 30, 0, 5, 1)  # MiB; 0 frees what is largest
    events, live = [], {}
    for number, size in enumerate(sizes):
        if size:
            live[number] = size
        else:
            live.pop(number := max(live, key=live.get))
        events.append(Event(number, size * MIB, number % 3, None))
    events.append(Event(99, 0, 0, None))  # of something that was there before
    trace, heights = as_trace(events, ["load", "forward", "backward"]), [3, 15, 3, 33, 3, 8, 9, 9]
    for points, width in ((2000, 1), (8, 1), (7, 1), (4, 2), (3, 2), (2, 4), (1, 8)):
        monkeypatch.setattr("hf_memopt.estimator.allocator.replay._TIMELINE_POINTS", points)
        found = replay(trace, 1, 0, get_hardware("rtx_4090"))
        assert [height // MIB for _, height in found.timeline] == [
            max(heights[at : at + width]) for at in range(0, 8, width)
        ]
        ends = [events[min(at + width, 8) - 1].visit for at in range(0, 8, width)]
        assert [segment for segment, _ in found.timeline] == [trace.segments[visit] for visit in ends]
    reserved = {
        name: replay(trace, 1, 0, get_hardware(name)).reserved for name in ("rtx_4090", "apple_m2_16gb", "cpu")
    }
    in_mib = {name: [size / MIB for size in sizes.values()] for name, sizes in reserved.items()}
    assert in_mib == {"rtx_4090": [42, 52], "apple_m2_16gb": [1064, 1064], "cpu": [33, 33]}
    nothing = replay(as_trace([], ["load"]), 1, 0, get_hardware("cpu"))
    assert (nothing.allocated, nothing.timeline) == (0, ())


def test_of_no_more_layers_than_a_period_none_is_repeated():
    for layers, period in ((1, 1), (2, 1), (2, 2), (3, 2), (2, 3)):
        trace = Written(layers, period).trace()
        assert in_order(trace, period, 2) == in_order(trace, 1, 0)
