"""Activations in host memory. There is no accelerator here: a stand-in for its streams does every copy as late as it
may, so that whoever uses a tensor without waiting for it gets the wrong one."""

import gc
import traceback

import pytest
import torch
from small_runs import llama, train
from test_activation_compression import fail
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.levers import activation_offload
from hf_memopt.levers.activation_compression import Compressor
from hf_memopt.levers.activation_offload import Offloader
from hf_memopt.levers.saved_tensors import save_through

NOTHING = float("nan")
MODEL = torch.nn.Linear(1, 1)


class Late:
    """In the place of Streams: copies happen, in order, when one of them is waited for."""

    def __init__(self):
        self.waiting, self.buffers, self.copies = [], 0, 0

    def buffer(self, size):
        self.buffers += 1
        return torch.full((size,), 255, dtype=torch.uint8)  # as floats: no number

    def copy(self, destination, source):
        if destination.is_floating_point():
            destination.fill_(NOTHING)
        event = object()
        self.waiting.append((event, destination, source.detach()))
        self.copies += 1
        return event

    def wait(self, event):
        if not any(event is found[0] for found in self.waiting):
            return
        while True:
            done, destination, source = self.waiting.pop(0)
            destination.copy_(source)
            if done is event:
                return


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(activation_offload, "_SMALLEST", 512)
    return Late()


def step(model):
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (2, 24))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def offloaded(late, checkpointed=False, compressor=None):
    model = llama(torch.float32).train()
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    keeper = Offloader(compressor, lambda _: late)
    save_through(model, keeper)
    return model, keeper


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_the_same(checkpointed, late):
    model, _ = offloaded(late, checkpointed)
    wanted = step(llama(torch.float32).train())
    assert torch.equal(step(model), wanted)
    assert late.copies >= 4


def test_buffers_are_used_again(late):
    model, _ = offloaded(late)
    step(model)
    made = late.buffers
    for _ in range(3):
        model.zero_grad()
        step(model)
    assert late.buffers == made > 5


def test_batches_of_many_lengths_share_buffers(late):
    """Pinned memory is never given back: it must not grow with every new length."""
    keeper = Offloader(None, lambda _: late)
    for length in (*range(64, 128), *range(64, 128)):
        keeper.begin(MODEL, ())
        tensor = torch.randn(length, 64)
        kept = keeper.pack(tensor)
        assert torch.equal(keeper.unpack(kept), tensor)
        del kept
    assert late.buffers <= 5
    for size in (1, 7, 512, 1000, 12345, 1 << 20, (1 << 30) + 1):
        assert size <= activation_offload._buffer_bytes(size) <= 1.25 * size


def test_a_tensor_moves_once_and_weights_stay(late):
    keeper = Offloader(None, lambda _: late)
    model = torch.nn.Linear(64, 64)
    keeper.begin(model, ())
    tensor = torch.randn(64, 64)
    first, second = keeper.pack(tensor)[0], keeper.pack(tensor.t())[0]
    assert first is second and late.copies == 1
    for left in (model.weight, model.weight.t(), torch.randn(4)):
        assert keeper.pack(left)[0] is left
    kept = keeper.pack(tensor.t())
    assert torch.equal(keeper.unpack(kept), tensor.t())


def test_at_most_a_few_wait_to_leave(late):
    """The device's copy of a tensor is let go two tensors later, and the copy is done by then."""
    keeper = Offloader(None, lambda _: late)
    keeper.begin(MODEL, ())
    alive, kept = [], []
    for _ in range(6):
        tensor = torch.randn(64, 64)
        alive.append(StorageWeakRef(tensor.untyped_storage()))
        kept.append(keeper.pack(tensor))
        del tensor
    gc.collect()
    assert sum(not storage.expired() for storage in alive) <= activation_offload.IN_FLIGHT
    assert len(late.waiting) <= activation_offload.IN_FLIGHT
    keeper.end()
    assert not late.waiting


def test_the_next_ones_come_while_one_is_used(late):
    keeper = Offloader(None, lambda _: late)
    keeper.begin(MODEL, ())
    tensors = [torch.randn(64, 64) for _ in range(5)]
    kept = [keeper.pack(tensor) for tensor in tensors]
    keeper.end()
    before = late.copies
    assert torch.equal(keeper.unpack(kept[4]), tensors[4])
    assert late.copies - before == 1 + activation_offload.IN_FLIGHT
    for number in (3, 2, 1, 0):
        assert torch.equal(keeper.unpack(kept[number]), tensors[number])
    assert late.copies - before == 5, "each comes once"


def test_a_forward_that_fails_leaves_nothing(late):
    model, keeper = offloaded(late)
    step(model)
    made = late.buffers
    model.lm_head.register_forward_pre_hook(fail)
    failed = 0
    try:
        step(model)
    except torch.OutOfMemoryError as error:  # dropped at its end, and its frames with it
        failed = len(keeper._by_number)
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    assert failed > 5
    assert not keeper._leaving and not late.waiting
    assert sum(map(len, keeper._free.values())) == made, "every buffer is free again"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compressed_tensors_move_compressed(checkpointed, late, monkeypatch):
    monkeypatch.setattr("hf_memopt.levers.activation_compression._SMALLEST", 128)
    compressor = Compressor()
    model, keeper = offloaded(late, checkpointed, compressor)
    found, wanted = step(model), step(llama(torch.float32).train())
    assert not torch.equal(found, wanted) and late.copies > 0
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.999
    assert any(kept.dtype is torch.uint8 for buffers in keeper._free.values() for kept in buffers)


@pytest.mark.slow
def test_on_a_cpu_it_says_that_it_does_nothing(tmp_path, caplog):
    wanted = train(tmp_path / "plain")
    found = train(tmp_path / "offloaded", memory={"activation_offload": True})
    assert torch.equal(found.weights, wanted.weights)
    assert caplog.text.count("activation_offload has no effect here") == 1
