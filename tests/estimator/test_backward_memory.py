"""What backward allocates on fake tensors is what it allocates on real ones."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks.profiled_peak import allocator_peak
from hf_memopt.estimator.accounting.fake_ledger import FakeLedger

ROWS = 1000
SELECTIONS = {
    **{"gather": lambda x: x.gather(1, torch.zeros(ROWS, 3, dtype=torch.long)), "topk": lambda x: x.topk(4)[0]},
    **{"max": lambda x: x.max(-1)[0], "index": lambda x: x[torch.arange(ROWS // 2)]},
    "index_select": lambda x: x.index_select(0, torch.arange(ROWS // 2)),
    **{"mask": lambda x: x[torch.arange(ROWS) > 300], "twice": lambda x: x.exp() + x.sin()},
}


def _step(select) -> None:
    weights = torch.zeros(ROWS, 64, requires_grad=True)
    select(weights * 2).sum().backward()


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)
def test_backward_of_a_selection_takes_the_same_on_fake_tensors(select):
    ledger = FakeLedger()
    with FakeTensorMode(), ledger:
        ledger.enter("start", "other")
        _step(select)
    assert max(peak.total for peak in ledger.peaks.values()) == pytest.approx(
        allocator_peak(lambda: _step(select)), rel=0.002
    )
