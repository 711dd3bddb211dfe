"""Outputs that are remembered by shapes are what FakeTensorMode returns."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_memopt.estimator.accounting import fake_outputs
from hf_memopt.estimator.accounting.fake_ledger import FakeLedger
from hf_memopt.estimator.accounting.known_values import known_value
from hf_memopt.estimator.accounting.ledger import HOST
from hf_memopt.estimator.fake_pretrained import fake_models
from hf_memopt.estimator.tracing.fake_tensors import fake_world

F = torch.nn.functional


def twice(run, ledger=None):
    """What a function returns on fake tensors, twice, so that the second time it is remembered."""
    mode, ledger = FakeTensorMode(allow_non_fake_inputs=True), ledger or FakeLedger(accelerator=True)
    with mode, ledger:
        return [run(torch.empty(4, 6, 8), torch.empty(8, 6, dtype=torch.bfloat16)) for _ in range(2)]


CALLS = {
    "elements": lambda a, b: [
        a * 2,
        a + a.transpose(0, 1)[:4, :4].new_zeros(()),
        (a > 0),
        a.sum((0, 2)),
        a.mean(-1, True),
    ],
    "dtypes": lambda a, b: [b * 2.0, b * torch.ones(6), b.float() / 3, b.long() * 1.5, b.to(torch.float16)],
    "strides": lambda a, b: [
        a.transpose(0, 2) + 1,
        a.transpose(0, 2).contiguous(),
        a.expand(2, 4, 6, 8) * 1,
        b.t() @ b,
    ],
    "views": lambda a, b: [
        *a.split(2),
        *a.unbind(1),
        a.view(24, 8),
        a[1:, ::2],
        b.view(torch.int16),
        a.as_strided((2,), (3,), 1),
    ],
    "several": lambda a, b: [*a.max(-1), *torch.topk(a, 3), *F.layer_norm(a, (8,)).sort(0)],
    "in place": lambda a, b: [a.add_(1).mul_(2), b.zero_(), *torch._foreach_mul([a, a], 2.0)],
    "constructors": lambda a, b: [
        torch.zeros_like(a),
        a.new_ones(3),
        torch.empty_strided((2, 3), (4, 1)),
        torch.arange(5),
    ],
}


def described(out):
    return [(t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes(), t.device) for t in out]


@pytest.mark.parametrize("name", CALLS)
def test_outputs_are_those_of_the_fake_tensor_mode(name):
    with FakeTensorMode(allow_non_fake_inputs=True):
        truth = described(CALLS[name](torch.empty(4, 6, 8), torch.empty(8, 6, dtype=torch.bfloat16)))
    first, second = twice(CALLS[name])
    assert described(first) == described(second) == truth


def test_views_and_changes_in_place_keep_their_storage():
    for out in twice(lambda a, b: [a, a.view(-1), a.add_(1), a.split(2)[1], b, b.clone()]):
        places = [tensor.untyped_storage()._cdata for tensor in out]
        assert len(set(places[:4])) == 1
        assert len(set(places[3:])) == 3


def test_only_what_is_counted_differs_between_a_first_and_a_second_call():
    """A remembered output is counted like a new one, and freed."""
    ledger = FakeLedger(accelerator=True)
    first, second = twice(lambda a, b: a * 2, ledger)
    assert ledger._total == 2 * 1024  # 768 bytes each, in blocks of 512
    del first, second
    assert ledger._total == 0


def test_values_are_not_remembered():
    """Two masks of one shape whose values differ."""
    with FakeTensorMode(allow_non_fake_inputs=True), FakeLedger(accelerator=True):
        sizes = [torch.ones(6, dtype=torch.long).cumsum(0)[:length].nonzero().shape for length in (2, 4)]
        assert sizes == [(2, 1), (4, 1)]
        assert [torch.tensor(value).item() for value in (3, 5)] == [3, 5]


def test_a_value_is_known_where_it_follows_from_known_ones(subtests):
    for make, value in [
        (lambda: torch.arange(3) * 0.5, [0, 0.5, 1]),
        (lambda: torch.arange(3, dtype=torch.float32).exp().exp().log() > 1.5, [False, True, True]),
        (lambda: torch.rand(3), None),
        (lambda: torch.rand(1), [1]),
        (lambda: torch.randn(1), None),
        (lambda: torch.randint(5, 6, (2,)), [5, 5]),
        (lambda: torch.randperm(1), [0]),
        (lambda: torch.empty(2), None),
        (lambda: torch.arange(2**16 + 1) * 1.0, None),
        (lambda: torch.arange(2) + torch.empty(2), None),
    ]:
        with subtests.test(value=value):
            with FakeTensorMode(allow_non_fake_inputs=True), FakeLedger(accelerator=True):
                known = known_value(make())
            assert (known if known is None else known.tolist()) == value


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: torch.empty(4, 6), True),
        (lambda: torch.empty(4, 6).t(), True),
        (lambda: torch.empty(0, 6), True),
        (lambda: torch.empty(()), True),
        (lambda: torch.empty(4, 6)[:2], False),
        (lambda: torch.empty(4, 6)[1:], False),
        (lambda: torch.empty(4, 6, dtype=torch.complex64), False),
        (lambda: torch.empty(4, 6, layout=torch.sparse_coo), False),
        (lambda: torch.empty(4, 6, device="meta"), False),
    ],
)
def test_only_whole_storages_are_made_anew(make, plain):
    with FakeTensorMode():
        assert fake_outputs._is_plain(make()) is plain
    assert not fake_outputs._is_plain(torch.empty(4, 6)), "no fake tensor"


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float16, 1.0), (torch.int64, 1), (torch.uint8, 0), (torch.bool, False)]
)
def test_a_value_that_nobody_knows_is_a_healthy_steps(dtype, value):
    with FakeTensorMode():
        found = FakeLedger(accelerator=True)._plausible_item(torch.empty(1, dtype=dtype))
    assert found == value and type(found) is type(value)


def test_the_memory_of_shapes_has_an_end(monkeypatch):
    monkeypatch.setattr(fake_outputs, "_MOST", 3)
    twice(lambda a, b: [a * number for number in range(9)])
    assert len(fake_outputs._remembered) <= 3


@pytest.mark.parametrize("world", [lambda: fake_world("cpu"), fake_models])
def test_a_copied_tensor_has_the_mode_of_the_original(world):
    """Copies of the mode release its references to storages twice: some ran into a segmentation fault much later."""
    with world():
        weight = torch.nn.Linear(4, 4).weight
        assert isinstance(weight, FakeTensor)
        torch.tensor(0.1)  # the mode keeps a reference to the storage of a small tensor's value
        assert copy.deepcopy(weight).fake_mode is weight.fake_mode
        assert copy.deepcopy(torch.nn.Linear(4, 4)).weight.fake_mode is weight.fake_mode


def test_a_copied_tensor_has_the_originals_value():
    with fake_world("cpu"), FakeLedger(accelerator=True):
        positions, unknown = torch.arange(5), torch.empty(5)
        for tensor in (positions, copy.deepcopy(positions)):
            assert known_value(tensor).tolist() == [0, 1, 2, 3, 4]
        assert known_value(unknown) is known_value(copy.deepcopy(unknown)) is None


def test_what_goes_to_the_host_leaves_the_device():
    with FakeTensorMode(allow_non_fake_inputs=True), FakeLedger(accelerator=True) as ledger:
        ledger.begin("start", "other")
        first, second = torch.empty(1000), torch.empty(500)
        ledger.classify(first, HOST)
        assert (ledger._total, ledger._totals[HOST], ledger._totals["other"]) == (2048, 4096, 2048)
        ledger.classify(first, "optimizer")
        assert (ledger._total, ledger._totals[HOST], ledger._totals["optimizer"]) == (6144, 0, 4096)
        ledger.classify(second, "optimizer")  # from kind to kind it stays where it is
        assert (ledger._total, ledger._totals["optimizer"], ledger._totals["other"]) == (6144, 6144, 0)
