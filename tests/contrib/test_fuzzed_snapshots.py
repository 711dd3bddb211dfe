"""Snapshots that nobody foresaw: only an analysis or an InputError comes of them, never another exception."""

import contextlib
import gzip
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz import ANY_JSON, CHECKS, FEW, MANY, changed, cut_and_flipped, to_json
from test_snapshot import cuda_snapshot

from hf_memopt.contrib.snapshots.snapshot_analysis import analyze_snapshot
from hf_memopt.errors import InputError

ABOUT = {
    "reason": "step 2",
    "device": "cuda:0",
    "capacity": 8000,
    "marks": [[1, "step", "2"], [2, "phase", "forward"], [15, "phase", "backward"], [45, "phase", "between"]],
    "owners": [[1, 1000, 1000, "parameters", "a.weight"], [34, 3000, 200, "gradients", "a.weight"]],
}
VALID = cuda_snapshot(hf_memopt=ABOUT)
SNAPSHOTS = (
    st.binary(max_size=200)
    | st.binary(max_size=60).map(lambda content: b"\x80\x02}" + content)
    | changed(VALID).map(pickle.dumps)
    | changed(VALID).map(to_json)
    | ANY_JSON.map(lambda content: to_json({"device_traces": content}))
    | st.builds(
        cut_and_flipped,
        st.sampled_from([pickle.dumps(VALID), to_json(VALID), pickle.dumps(VALID, 0)]),
        st.integers(0, 2**32),
    )
    | st.builds(cut_and_flipped, st.just(gzip.compress(to_json(VALID))), st.integers(0, 2**32))
)


def _snapshot(content: bytes, folder) -> None:
    file = folder / "a.pickle"
    file.write_bytes(content)
    with contextlib.suppress(InputError):
        found = analyze_snapshot(file)
        assert sum(found.by_kind.values()) == found.peak_bytes
        json.dumps(found.to_dict()).encode()


@pytest.mark.slow
@given(SNAPSHOTS)
@settings(**FEW | {"max_examples": 200}, suppress_health_check=CHECKS)
def test_snapshots(tmp_path, content):
    _snapshot(content, tmp_path)


@pytest.mark.slow
@pytest.mark.sweep
@given(SNAPSHOTS)
@settings(**MANY, suppress_health_check=CHECKS)
def test_very_many_snapshots(tmp_path, content):
    _snapshot(content, tmp_path)
