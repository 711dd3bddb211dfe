"""What CUDA itself must show: pytest -m cuda, on a machine with a card. Skipped anywhere else."""

import functools
import gc
import os

import pytest
import torch
from small_runs import llama
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_memopt import MemoryArguments, MemoryTrainer, detect, estimate
from hf_memopt.hardware import configure_allocator

pytestmark = pytest.mark.cuda
LENGTH, ROWS = 128, 4


@pytest.fixture(autouse=True)
def whole_card():
    """No test finds another one's tensors, peaks or limit."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def trainer(folder, memory=None, prepare=None, **fields):
    """A trained MemoryTrainer, or with memory=None a plain Trainer, from the same weights on the same batches."""
    torch.manual_seed(0)
    model = llama(torch.float32).cuda()
    ids = torch.randint(0, model.config.vocab_size, (ROWS * 4, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in ids.tolist()]
    args = TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 3,
            "per_device_train_batch_size": ROWS,
            "report_to": "none",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "save_strategy": "no",
            **fields,
        }
    )
    given = {"model": model, "args": args, "train_dataset": rows, "data_collator": default_data_collator}
    made = Trainer(**given) if memory is None else MemoryTrainer(**given, memory_args=MemoryArguments(**memory))
    if prepare:
        prepare(made)
    made.train()
    return made


def weights(made) -> torch.Tensor:
    return torch.cat([weight.detach().flatten().double() for weight in made.model.parameters()])


def close(one, other, tolerance=1e-5) -> bool:
    return float((weights(one) - weights(other)).norm() / weights(other).norm()) < tolerance


def exhausted() -> None:
    """The allocator's own error: more than the card has."""
    torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_recovers_from_the_allocators_own_error(tmp_path, phase):
    failed = []

    def prepare(made):
        holder, name = {"forward": (made.model, "forward"), "backward": (made.accelerator, "backward")}[phase]
        usual = getattr(holder, name)

        @functools.wraps(usual)  # the Trainer keeps the columns that its signature names
        def once(*args, **kwargs):
            if not failed:
                failed.append(phase)
                exhausted()
            return usual(*args, **kwargs)

        setattr(holder, name, once)

    recovered = trainer(tmp_path / "recovered", {}, prepare)
    assert failed and recovered.state.global_step == 3
    assert close(recovered, trainer(tmp_path / "plain"))


@pytest.mark.parametrize(
    "memory",
    [
        {"activation_offload": True},
        {"loss_chunk_size": 32},
        {"checkpoint_ratio": 0.5},
        {"optimizer_cpu_offload": True},
    ],
    ids=lambda memory: next(iter(memory)),
)
def test_a_lever_that_is_exact_stays_so_with_real_streams(tmp_path, memory):
    assert close(trainer(tmp_path / "lever", memory), trainer(tmp_path / "plain"))


def test_the_estimate_is_near_the_counter(tmp_path):
    made = trainer(tmp_path)
    measured = torch.cuda.max_memory_allocated()
    predicted = estimate(made.model.config, {"per_device_train_batch_size": ROWS}, LENGTH, detect())
    assert abs(predicted.peak_allocated_bytes / measured - 1) < 0.1  # a small model: workspaces weigh much


def test_the_allocators_setting_is_taken_in_process():
    if not configure_allocator().startswith("expandable"):
        pytest.skip(f"the environment sets {os.environ.get('PYTORCH_ALLOC_CONF')}")
    kept = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()), kept.shape


def test_the_monitor_reads_what_the_counters_say():
    from hf_memopt.monitor.readers import Reader

    kept = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    reading = Reader().read()
    assert reading.allocated == torch.cuda.memory_allocated() >= kept.nbytes
    assert reading.used >= reading.reserved >= reading.allocated


def test_a_snapshot_has_the_largest_tensor(tmp_path):
    from hf_memopt.contrib.snapshots.snapshot_analysis import analyze_snapshot

    trainer(tmp_path, {"snapshot_steps": "2"})
    (file,) = tmp_path.glob("memory_snapshot_step_*")
    assert analyze_snapshot(file).peak_bytes > 0
