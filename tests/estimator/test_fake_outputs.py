"""Outputs that are remembered by shapes are what FakeTensorMode returns."""

import copy

import frozen
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_memopt.estimator.accounting import fake_outputs
from hf_memopt.estimator.accounting.fake_ledger import FakeLedger
from hf_memopt.estimator.accounting.known_values import known_value
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
        *(a.transpose(0, 2) + 1, a.transpose(0, 2).contiguous(), a.expand(2, 4, 6, 8) * 1, b.t() @ b),
    ],
    "views": lambda a, b: [
        *a.split(2),
        *a.unbind(1),
        *(a.view(24, 8), a[1:, ::2], b.view(torch.int16), a.as_strided((2,), (3,), 1)),
    ],
    "several": lambda a, b: [*a.max(-1), *torch.topk(a, 3), *F.layer_norm(a, (8,)).sort(0)],
    "in place": lambda a, b: [a.add_(1).mul_(2), b.zero_(), *torch._foreach_mul([a, a], 2.0)],
    "constructors": lambda a, b: [
        *(torch.zeros_like(a), a.new_ones(3), torch.empty_strided((2, 3), (4, 1)), torch.arange(5)),
    ],
}


def described(out):
    return [(t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes(), t.device) for t in out]


def test_outputs_are_those_of_the_fake_tensor_mode(subtests):
    for name in CALLS:
        with subtests.test(f"{name}"):
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
        *((lambda: torch.rand(3), None), (lambda: torch.rand(1), [1]), (lambda: torch.randn(1), None)),
        *((lambda: torch.randint(5, 6, (2,)), [5, 5]), (lambda: torch.randperm(1), [0])),
        *((lambda: torch.empty(2), None), (lambda: torch.arange(2**16 + 1) * 1.0, None)),
        (lambda: torch.arange(2) + torch.empty(2), None),
    ]:
        with subtests.test(value=value):
            with FakeTensorMode(allow_non_fake_inputs=True), FakeLedger(accelerator=True):
                known = known_value(make())
            assert (known if known is None else known.tolist()) == value


def test_only_whole_storages_are_made_anew(subtests):
    for make, plain in [
        *((lambda: torch.empty(4, 6), True), (lambda: torch.empty(4, 6).t(), True), (lambda: torch.empty(0, 6), True)),
        *((lambda: torch.empty(()), True), (lambda: torch.empty(4, 6)[:2], False)),
        *((lambda: torch.empty(4, 6)[1:], False), (lambda: torch.empty(4, 6, dtype=torch.complex64), False)),
        (lambda: torch.empty(4, 6, layout=torch.sparse_coo), False),
        (lambda: torch.empty(4, 6, device="meta"), False),
    ]:
        with subtests.test(f"{make} {plain}"):
            with FakeTensorMode():
                assert fake_outputs._is_plain(make()) is plain
            assert not fake_outputs._is_plain(torch.empty(4, 6)), "no fake tensor"


def test_a_value_that_nobody_knows_is_a_healthy_steps(subtests):
    for dtype, value in [(torch.float16, 1.0), (torch.int64, 1), (torch.uint8, 0), (torch.bool, False)]:
        with subtests.test(f"{dtype} {value}"):
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


half, aten = torch.bfloat16, torch.ops.aten
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default


def attention(dtype, backward=False):
    query, keys = torch.empty(2, 4, 6, 8, dtype=dtype), torch.empty(2, 4, 10, 8, dtype=dtype)
    out, scales = SDPA(query, keys, torch.empty(2, 4, 10, 16, dtype=dtype) if not backward else keys)
    if not backward:
        return out, scales
    function = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return function(out, query, keys, keys, out, scales, 0.0, False)


def ctc(lengths, backward=False):
    probabilities, targets = torch.empty(50, 3, 20), torch.empty(3, 9, dtype=torch.long)
    frames = torch.empty(3, dtype=torch.long)
    lengths = torch.empty(3, dtype=torch.long) if lengths is None else torch.tensor(lengths)
    losses, alphas = aten._ctc_loss.Tensor(probabilities, targets, frames, lengths)
    if not backward:
        return losses, alphas
    backward = aten._ctc_loss_backward.Tensor
    return [backward(losses, probabilities, targets, frames, lengths, losses, alphas, 0)]


def normed(needed):
    given, weight = torch.empty(4, 6, 8, dtype=half), torch.empty(8, dtype=half)
    out, scales = aten._fused_rms_norm.default(given, [8], weight, 1e-5)
    return [out, scales, *aten._fused_rms_norm_backward.default(out, given, [8], scales, weight, needed)]


def known(values, dtype=torch.long):
    return torch.tensor(values, dtype=dtype)


def changed(make):
    tensor = torch.zeros(4)
    make(tensor)
    return [tensor]


REPLACED = {
    **{f"attention {dtype}": lambda dtype=dtype: attention(dtype) for dtype in (half, torch.float16, torch.float32)},
    "attention backward": lambda: attention(half, backward=True),
    "dropout": lambda: aten.native_dropout.default(torch.empty(6, dtype=half), 0.1, True),
    "dropout backward": lambda: [
        aten.native_dropout_backward.default(torch.empty(6), torch.empty(6, dtype=torch.bool), 2.0)
    ],
    **{
        f"norm {needed}": lambda needed=needed: normed(needed)
        for needed in ([True, True], [True, False], [False, True])
    },
    **{
        f"experts {left} {right}": lambda left=left, right=right: [
            aten._grouped_mm.default(torch.empty(left), torch.empty(right), torch.empty(3, dtype=torch.int32))
        ]
        for left, right in (((8, 12), (12, 5)), ((12, 8), (3, 8, 5)), ((3, 12, 8), (8, 5)), ((3, 12, 8), (3, 8, 5)))
    },
    "experts wide": lambda: [
        aten._grouped_mm.default(torch.empty(2, 3, 4), torch.empty(2, 4, 5), None, None, torch.half)
    ],
    **{f"ctc {lengths}": lambda lengths=lengths: ctc(lengths) for lengths in (None, [2, 5, 1])},
    "ctc backward": lambda: ctc([2, 5, 1], backward=True),
    **{f"svd {size}": lambda size=size: torch.linalg.svd(torch.empty(size), False) for size in ((6, 4), (4, 6))},
    **{
        f"{name} {dtype} {to}": lambda name=name, dtype=dtype, to=to: [
            getattr(torch, name)(torch.empty(1000, dtype=dtype), **({} if to is None else {"dtype": to}))
        ]
        for name in ("sum", "mean")
        for dtype in (half, torch.float32, torch.long)
        for to in (None, half, torch.float32)
        if not (name == "mean" and dtype is torch.long and to is None)
    },
    "norm of halves": lambda: [torch.linalg.vector_norm(torch.empty(1000, dtype=half), dtype=torch.float32)],
    "mean of rows": lambda: [torch.empty(10, 100, dtype=half).mean(-1), torch.empty(10, 100, dtype=half).sum(-1)],
    "places of unknown": lambda: [torch.empty(3, 4, dtype=torch.bool).nonzero()],
    "places of known": lambda: [known([0, 1, 1]).nonzero()],
    "selected": lambda: [torch.empty(3, 1).masked_select(torch.empty(4, dtype=torch.bool))],
    "distinct": lambda: torch.unique(torch.empty(3, 4, dtype=torch.long), return_inverse=True, return_counts=True),
    "distinct known": lambda: torch.unique(known([3, 3, 1]), return_inverse=True, return_counts=True),
    "distinct rows": lambda: torch.unique(torch.empty(3, 4), dim=1, return_inverse=True, return_counts=True),
    "distinct neighbours": lambda: torch.unique_consecutive(
        torch.empty(3, 4), return_inverse=True, return_counts=True
    ),
    "by a known mask": lambda: [torch.empty(4, 5)[known([0, 1, 1, 0], torch.bool)]],
    "by an unknown mask": lambda: [
        torch.empty(4, 5)[torch.empty(4, dtype=torch.bool)],
        torch.empty(4)[None, known([1])],
    ],
    "by a mask of two": lambda: [torch.empty(4, 5)[torch.empty(4, 5, dtype=torch.bool)]],
    "by bytes": lambda: [torch.empty(4, 5)[torch.empty(4, dtype=torch.uint8)]],
    "no padding": lambda: [torch.empty(4) == 0, torch.empty(4, dtype=torch.long) == 0, torch.empty(4) == 1],
    "highest": lambda: [torch.rand(1), torch.rand(2), torch.rand(()), torch.rand(1, dtype=torch.half)],
    "known": lambda: [known([1, 2]) + 1, known([2]).expand(3), torch.full((2,), 3), torch.arange(2).float() / 2],
    "set": lambda: changed(lambda it: it[1:].fill_(7)) + changed(lambda it: it.add_(torch.empty(4))),
    "of a view": lambda: changed(lambda it: it[1:].add_(torch.empty(3))) + changed(lambda it: it.uniform_()),
    "large": lambda: [torch.zeros(2**16), torch.zeros(2**16 + 1), torch.zeros(2**9, dtype=torch.bool)],
    "of tensors": lambda: [
        torch.tensor([known(3), known(4)]),
        torch.stack([known(3), known(4)]),
        torch.cat([known([1])] * 2),
    ],
    "items": lambda: [
        torch.empty(known(3).item()),
        torch.empty(known([1, 2]).tolist()),
        torch.empty(int(torch.empty(()))),
    ],
    "conditions": lambda: [
        torch.empty(1 + bool(flag))
        for flag in (torch.empty(3).all(), (torch.empty(3, dtype=torch.long) == 5).any(), (torch.empty(3) == 5).all())
    ],
}


def test_outputs_and_allocations_of_operators_with_kernels_of_their_own():
    found = {}
    for backend in ("cuda", "cpu"):
        with fake_world(backend):
            for name, make in REPLACED.items():
                for padded in (False, True) if name == "conditions" else (False,):
                    with FakeLedger(padded, accelerator=backend != "cpu") as ledger:
                        found[f"{name} {backend} {padded}"] = outputs_of(ledger, make)
    frozen.check("replaced_kernels", found)


def outputs_of(ledger, make) -> list:
    """Shape, strides, type and value of each output, and bytes of the peak."""
    ledger.begin("forward", "activations")
    outputs = list(make())
    values = [None if each is None else known_value(each) for each in outputs]
    return [
        [
            None if each is None else f"{list(each.shape)} {list(each.stride())} {each.dtype}",
            None if value is None or value.numel() > 9 else value.tolist(),
        ]
        for each, value in zip(outputs, values, strict=True)
    ] + [ledger.peaks["forward"].total]
