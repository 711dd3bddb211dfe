"""The library leaves its user's process as it was: what is set before a call is set after it."""

import gc
import logging
import os
import random
import signal
import sys
import textwrap
import types
import warnings

import numpy
import pytest
import torch
from conftest import freeze_imports
from test_levers_together import config, trainer_of
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_memopt import InputError, estimate, get_preset, plan
from hf_memopt.estimator.scripts.dry_run import caught_trainer
from hf_memopt.estimator.scripts.launched import ScriptCommand

SEQ_LEN = 64
FIELDS = {"per_device_train_batch_size": 2, "max_steps": 1, "use_cpu": True, "report_to": "none"}
# What our code replaces for a while, in the modules of others.
PATCHED = [
    *((torch, "tensor"), (torch, "load"), (torch.nn.Module, "to"), (torch.nn.functional, "linear")),
    *((torch.nn.functional, "scaled_dot_product_attention"), (Trainer, "train"), (Trainer, "__init__")),
    *((Trainer, "evaluate"), (PreTrainedModel, "_from_config"), (PreTrainedModel, "from_pretrained")),
    *((os, "makedirs"), (sys, "excepthook"), (sys, "stdout")),
]


def global_state() -> dict:
    """Everything of a process that a library could leave changed, as far as it can be compared."""
    import torch._functorch.config

    name, keys, *rest = numpy.random.get_state()
    return {
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "logging disabled": logging.root.manager.disable,
        "log levels": [logging.getLogger(name).level for name in ("", "hf_memopt", "transformers", "accelerate")],
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "python": (list(sys.argv), list(sys.path), os.getcwd()),
        "torch": (
            *(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()),
            *(torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
            *(torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.is_autocast_enabled("cpu")),
            *(torch.utils._python_dispatch._len_torch_dispatch_stack(), torch.distributed.is_initialized()),
            torch._functorch.config.activation_memory_budget,
        ),
        "random": (random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()),
        "patches": [getattr(owner, name) for owner, name in PATCHED],
    }


def unchanged(before: dict, but: tuple[str, ...] = ()) -> None:
    after = global_state()
    for name in before.keys() - set(but):
        assert after[name] == before[name], name


@pytest.fixture
def own_settings(monkeypatch):
    """A process whose user has settings of their own, which are no defaults."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    level = logging.root.manager.disable
    logging.disable(logging.DEBUG)
    freeze_imports()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a warning of the user's own")
        yield
    torch.use_deterministic_algorithms(False)
    logging.disable(level)


def an_estimate(tmp_path):
    fields = {**FIELDS, "full_determinism": True}
    estimate(config(2), fields, SEQ_LEN, "rtx_4090")


def an_estimate_of_ranks(tmp_path):
    estimate(config(2), {"per_device_train_batch_size": 2}, SEQ_LEN, "rtx_4090", world_size=2, strategy="zero2")


def a_plan(tmp_path):
    plan(config(2), "cpu", 8, SEQ_LEN, "full")


def a_dry_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_levers_together import trainer_of
        trainer_of((), {str(tmp_path / "out")!r}).train()
    """)
    )
    with caught_trainer(ScriptCommand(str(script), ["--an", "argument"])):
        pass


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("call", [an_estimate, an_estimate_of_ranks, a_plan, a_dry_run])
def test_what_only_looks_changes_nothing(call, own_settings, tmp_path):
    if call is an_estimate_of_ranks:
        pytest.importorskip("deepspeed")
    before = global_state()
    call(tmp_path)
    unchanged(before)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_frozen")
def test_nothing_is_left_frozen_either(tmp_path):
    estimate(config(1), FIELDS, SEQ_LEN, "cpu")
    assert not gc.get_freeze_count()


class Broken(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_training_leaves_what_trainer_leaves(fails, own_settings, tmp_path):
    """Also where train() ends with an error. Training itself draws random numbers."""
    from transformers import TrainerCallback

    class Failing(TrainerCallback):
        def on_step_end(self, *_, **__):
            raise Broken

    trainer = trainer_of(("loss_chunk_size",), tmp_path, memory={"snapshot_steps": "1-2", "snapshot_on_oom": True})
    profiling = torch.autograd.profiler._is_profiler_enabled
    before = global_state()
    if fails:
        trainer.add_callback(Failing())
        with pytest.raises(Broken):
            trainer.train()
    else:
        trainer.train()
    unchanged(before, but=("random",))
    assert torch.autograd.profiler._is_profiler_enabled is profiling


def test_the_compilers_budget_is_this_runs(tmp_path):
    """The setting is the process's: it lasts as long as train(), also where that fails."""
    from transformers import TrainerCallback

    class Seen(TrainerCallback):
        def on_train_begin(self, *_, **__):
            seen.append(torch._functorch.config.activation_memory_budget)
            raise Broken  # before anything is compiled

    seen: list[float] = []
    before = global_state()
    trainer = trainer_of((), tmp_path, torch_compile=True, memory={"compile_memory_budget": 0.25})
    unchanged(before, but=("random",))
    trainer.add_callback(Seen())
    with pytest.raises(Broken):
        trainer.train()
    assert seen == [0.25]
    unchanged(before, but=("random",))


def test_fp8_of_one_preset_is_not_anothers(monkeypatch, tmp_path):
    """A preset reads what the launcher said, not what another preset has left."""
    pytest.importorskip("torchao")
    from dataclasses import replace

    from hf_memopt.presets.fp8 import in_fp8

    monkeypatch.delenv("ACCELERATE_FP8_BACKEND", raising=False)
    cpu = get_preset("cpu")
    preset = in_fp8(replace(cpu, hardware=replace(cpu.hardware, fp8=True)))
    args = preset.training_arguments(str(tmp_path), world_size=1)
    assert args.mixed_precision == "fp8", "what accelerate is given by the Trainer"
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    assert get_preset("t4").precision == "fp16" and get_preset("cpu").precision != "fp8"
    assert cpu.training_arguments(str(tmp_path), world_size=1).mixed_precision != "fp8"


def test_the_cpus_deepspeed_is_not_a_cards(monkeypatch, tmp_path):
    monkeypatch.delenv("DS_ACCELERATOR")
    get_preset("cpu").apply_environment()
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    get_preset("rtx_4090").apply_environment()
    assert "DS_ACCELERATOR" not in os.environ
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # the user's own stays
    get_preset("cpu").apply_environment()
    get_preset("rtx_4090").apply_environment()
    assert os.environ["DS_ACCELERATOR"] == "cpu"


@pytest.mark.slow
def test_a_recipe_started_in_this_process_leaves_no_filter(recipe, tmp_path):
    before = global_state()
    recipe("sft")(["--preset", "cpu", "--dry_run", "--output_dir", str(tmp_path / "out")])
    unchanged(before, but=("random", "environment"))  # a recipe seeds, and sets its preset's environment


def test_the_memory_limit_ends_with_train(monkeypatch):
    """No card is here: torch's functions stand in for one that has 8 GiB."""
    from hf_memopt.monitor.readers import process_limited

    fraction = [1.0]
    card = types.SimpleNamespace(total_memory=8 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fraction.append(share))
    with process_limited(torch.device("cuda"), 2.0) as limited:
        assert limited and fraction[-1] == 0.25
    assert fraction == [1.0, 0.25, 1.0]
    with process_limited(torch.device("cpu"), 2.0) as limited:
        assert not limited
    with process_limited(torch.device("cuda"), None) as limited:
        assert not limited and len(fraction) == 3


def test_one_observer_however_often_it_is_trained(monkeypatch, tmp_path):
    """CUDA's allocator keeps every observer for good: one is attached, and only a run that lasts hears of it."""
    from hf_memopt.monitor import snapshot_callback

    attached, heard = [], []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False)
    monkeypatch.setattr(snapshot_callback, "_observed", False)
    recorders = [snapshot_callback._CudaRecorder(torch.device("cuda"), 10) for _ in range(3)]
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    for number, recorder in enumerate(recorders):
        recorder.watch(lambda *_, number=number: heard.append(number))
        attached[0](0, 1, 2, 3)
        recorder.end()
        attached[0](0, 1, 2, 3)
    assert len(attached) == 1 and heard == [0, 1, 2]


def test_a_forecast_that_failed_says_why(caplog, tmp_path):
    """A run that ends for lack of memory keeps its report, and a fault of ours in it is not hidden."""
    from hf_memopt.trainer.oom_report import predict_one_sample

    trainer = trainer_of((), tmp_path)
    trainer._runner.running = None  # as only a fault in our own code could leave it
    with caplog.at_level(logging.DEBUG):
        breakdown, changes = predict_one_sample(trainer)
    assert breakdown is None and changes
    said, where = [record for record in caplog.records if record.name == "hf_memopt.trainer.oom_report"]
    assert said.levelno == logging.WARNING and "no estimate" in said.message and "TypeError" in said.message
    assert where.levelno == logging.DEBUG and where.exc_info


def test_settings_without_a_trainer(tmp_path):
    """TrainingArguments from a preset change no torch setting that the user would not have changed with them."""
    before = global_state()
    get_preset("cpu").training_arguments(str(tmp_path), world_size=1)
    TrainingArguments(str(tmp_path), use_cpu=True)
    unchanged(before, but=("environment",))
    with pytest.raises(InputError):
        get_preset("cpu").training_arguments(str(tmp_path), no_such_field=1)


REPEATED = {
    "text": lambda: estimate(config(2), FIELDS, SEQ_LEN, "rtx_4090"),
    "checkpointed": lambda: estimate(config(3), {**FIELDS, "activation_checkpointing": True}, SEQ_LEN, "rtx_4090"),
    "sharded": lambda: estimate(config(2), FIELDS, SEQ_LEN, "rtx_4090", world_size=2, strategy="fsdp2"),
    "unified": lambda: estimate(config(2), FIELDS, SEQ_LEN, "apple_m2_16gb"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_frozen")
def test_an_estimate_is_the_same_to_the_byte_after_others():
    """Whatever was estimated before, and however soon garbage would be collected."""
    thresholds = gc.get_threshold()
    seen = {}
    try:
        for round_, threshold in enumerate((700, 50, 10, 5000, 1)):
            gc.set_threshold(threshold)
            names = list(REPEATED)
            for name in names[round_ % 4 :] + names[: round_ % 4]:
                found = REPEATED[name]()
                assert seen.setdefault(name, (found.to_dict(), found.timeline)) == (found.to_dict(), found.timeline), (
                    name
                )
    finally:
        gc.set_threshold(*thresholds)


def test_programs_leave_out_deepspeeds_guess_of_the_device_and_nothing_else():
    import logging

    from hf_memopt.noise import quiet

    logger = logging.getLogger("DeepSpeed")
    before = list(logger.filters)
    try:
        quiet()
        quiet()
        assert len(logger.filters) == len(before) + (len(before) == 0)
        for message, shown in (("Setting accelerator to CPU. If you have GPU …", False), ("out of blocks", True)):
            record = logger.makeRecord("DeepSpeed", logging.WARNING, "", 0, message, (), None)
            assert bool(logger.filter(record)) == shown
    finally:
        logger.filters[:] = before
