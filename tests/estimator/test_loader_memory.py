"""What data loading takes of the host, and prefetching of long samples."""

import json
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_memopt import get_preset
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.monitor.loader import LoaderMemory, loader_memory, measure_worker

GIB = 2**30
FOUR = LoaderMemory(workers=4, processes=2, prefetch=2, batch=2**20, worker=GIB, buffer=0, free=16 * GIB)


def test_a_workers_own_memory_is_measured():
    """A real worker, which shares with this process what it has not written to."""
    state = torch.get_rng_state()
    found = measure_worker()
    assert 2**20 < found < psutil.Process().memory_info().rss
    assert torch.equal(torch.get_rng_state(), state)


def test_the_sum():
    assert FOUR.batches == 2 * 4 * 2 * 2**20 and FOUR.total == FOUR.batches + 8 * GIB and FOUR.warning is None
    assert "2 × 4 worker(s), 1.00 GiB each" in str(FOUR) and "16.0 MiB; 16.00 GiB of host memory free" in str(FOUR)
    streamed = replace(FOUR, buffer=2**20)
    assert streamed.total == FOUR.total + 8 * 2**20 and "shuffle buffers of about 1.0 MiB each" in str(streamed)
    assert "not measured" in str(replace(FOUR, worker=None))


def test_too_many_workers_are_named():
    full = replace(FOUR, free=5 * GIB)
    assert full.warning.startswith("data loading takes about 8.02 GiB of host memory, and 5.00 GiB are free")
    assert full.warning.endswith("set dataloader_num_workers=2")
    assert "or a smaller shuffle_buffer_size" in replace(full, buffer=2 * GIB).warning


def test_the_guides_example():
    """8 workers × 2 batches × 12 samples × 256 tokens: as tensors of 8 bytes, three for each token."""
    found = loader_memory({"dataloader_num_workers": 8, "dataloader_prefetch_factor": 2}, 12 * 256 * 24)
    assert found.batches == 8 * 2 * 12 * 256 * 24 < 2 * 2**20
    assert found.worker > found.batches, "the processes are the large item"
    assert loader_memory({"dataloader_num_workers": 0}, 1000) is None
    assert loader_memory({}, 1000, buffer_rows=100, tokens=10).total == 100 * 10 * 4


@pytest.mark.parametrize(("seq_len", "ahead"), [(2048, 2), (2049, 1), (4096, 1)])
def test_long_samples_wait_one_batch_ahead(seq_len, ahead):
    def fields(preset, **training):
        return spec_job(preset_spec(get_preset(preset), "llama-3.2-1b", seq_len=seq_len, training=training)).fields

    assert fields("rtx_4090")["dataloader_prefetch_factor"] == ahead
    assert fields("rtx_4090", dataloader_prefetch_factor=3)["dataloader_prefetch_factor"] == 3, "what is given stays"
    assert "dataloader_prefetch_factor" not in fields("cpu")


def test_presets_for_long_samples():
    assert get_preset("h100_80gb").settings()["dataloader_prefetch_factor"] == 1
    assert get_preset("rtx_4090").settings()["dataloader_prefetch_factor"] == 2


def test_a_recipe_says_what_loading_takes(monkeypatch):
    from hf_memopt.recipe import summary

    args = SimpleNamespace(per_device_train_batch_size=4, dataloader_num_workers=2, dataloader_prefetch_factor=2)
    job = SimpleNamespace(args=args, recipe=SimpleNamespace(streaming=True, shuffle_buffer_size=1000))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = summary._loading(job, None, 512, None)
    assert (found.processes, found.batch, found.buffer) == (2, 4 * 512 * 24, 1000 * 512 * 4)


@pytest.mark.slow
def test_doctor_says_what_a_worker_takes(command):
    code, out, _ = command("doctor", "--json")
    found = json.loads(out)["data_loading"]
    assert code == 0 and found["workers"] >= 1 and found["worker"] > 2**20 and found["total"] > found["worker"]
    assert "data loading" in command("doctor")[1]


def test_a_kernel_that_does_not_count_is_no_reason_to_stop(monkeypatch):
    def denied(self):
        raise psutil.AccessDenied()

    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)
    assert measure_worker("fork") is None


def test_without_workers_the_buffer_alone_is_named():
    memory = replace(loader_memory({}, 1000, 1, 10**6, 2048), free=2**30)
    assert memory.warning.endswith("set a smaller shuffle_buffer_size")
