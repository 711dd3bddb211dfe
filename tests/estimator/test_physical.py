"""Every estimate is checked against itself and its model: what contradicts itself is an error, never a number."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hf_memopt import MemoryArguments
from hf_memopt.engines import engine_named
from hf_memopt.errors import ImpossibleEstimate
from hf_memopt.estimator import assembly, physical
from hf_memopt.estimator.accounting.ledger import Peak
from hf_memopt.estimator.api import run_trace
from hf_memopt.estimator.job import describe
from hf_memopt.estimator.job_checks import facts_of
from hf_memopt.estimator.physical import check_physics


@pytest.fixture(scope="module")
def judged():
    """A job's estimate, its peaks, and the job."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=8, num_attention_heads=4, vocab_size=500)
    job = describe(config, {"per_device_train_batch_size": 2, "optim": "adamw_torch"}, 64, "rtx_4090")
    kept = []
    patch = pytest.MonkeyPatch()
    patch.setattr(assembly, "check_physics", lambda *all_of_it: kept.append(all_of_it))
    assembly.assemble(job, job.depths(), [run_trace(job.at_depth(depth)) for depth in job.depths()])
    patch.undo()
    return kept[0]


def test_what_is_right_passes(judged):
    check_physics(*judged)


def test_logits_of_several_evaluation_batches_are_a_fact_of_the_job(judged, monkeypatch):
    job = judged[2]
    for count, several in ((0, False), (1, False), (2, True)):
        monkeypatch.setattr(type(job), "kept_batches", count)
        assert facts_of(job).keeps_eval_logits is several


def _moved(breakdown: dict, to: str, size: int) -> dict:
    """With `size` bytes of one kind and the rest of the peak as another's: the sum stays."""
    rest = "other" if to != "other" else "workspace"
    return {kind: 0 for kind in breakdown} | {to: size, rest: sum(breakdown.values()) - size}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda it: {"breakdown": it.breakdown | {"gradients": it.breakdown["gradients"] + 1}}, "parts of the peak"),
        (lambda it: {"breakdown": _moved(it.breakdown, "gradients", 2 * it.breakdown["parameters"])}, "gradients are"),
        (
            lambda it: {"breakdown": _moved(it.breakdown, "parameters", 2 * it.breakdown["parameters"])},
            "parameters are",
        ),
        (
            lambda it: {"breakdown": _moved(it.breakdown, "optimizer_states", 3 * it.breakdown["parameters"])},
            "adamw_torch and",
        ),
        (lambda it: {"breakdown": _moved(it.breakdown, "workspace", -1)}, "workspace at the peak is -1"),
        (lambda it: {"host_bytes": float("nan")}, "host is nan"),
        (lambda it: {"phases": it.phases | {"load": 2 * it.peak_allocated_bytes}}, "none of its phase"),
        (lambda it: {"reserved_bytes": it.reserved_bytes | {"segments": 1}}, "are reserved"),
        (lambda it: {"device_bytes": it.peak_allocated_bytes - 1}, "the device holds"),
    ],
)
def test_a_contradiction_is_an_error(judged, change, says):
    estimate, peaks, job = judged
    with pytest.raises(ImpossibleEstimate, match=says) as error:
        check_physics(dataclasses.replace(estimate, **change(estimate)), peaks, job)
    assert "\n" not in str(error.value) and "please report it" in str(error.value)


LOADED, SIZES, SPARE = 4_000_000, [300_000, 700_000], 2 * 4 * 512  # bytes, trained weights, a block of each and more


@pytest.mark.parametrize("streamed", [False, True])
def test_kinds_of_memory_are_bounded_by_the_weights(streamed, monkeypatch):
    """One byte more than a hundredth above the bound, and the blocks of the weights, is too much."""
    weights = {"count": 0}
    monkeypatch.setattr(physical, "count_weights", lambda *_: weights["count"])

    def contradictions(engine="none", optim="adamw_torch", dtype="float32", **breakdown) -> list[str]:
        job = SimpleNamespace(
            **{"engine": engine_named(engine), "fields": {"optim": optim} if optim else {}, "dtype": dtype},
            **{"trained_sizes": lambda: SIZES, "config": None, "task": "", "quantization_config": None},
            memory_args=MemoryArguments(weight_streaming=streamed),
        )
        kinds = dict.fromkeys(("parameters", "gradients", "optimizer_states"), 0) | breakdown
        return list(physical._bounds(kinds, {"load": Peak(LOADED, {"parameters": LOADED})}, job))

    for settings, kind, bound in [
        *(((), "parameters", LOADED), ((), "gradients", LOADED), (("fsdp2",), "parameters", None)),
        *(
            (("fsdp2",), "gradients", 4),
            (("zero2",), "gradients", 8),
            (("none", "sgd", "float64"), "gradients", LOADED),
        ),
        *((("fsdp2", "sgd", "float64"), "gradients", 8), (("fsdp2", "sgd", "bfloat16"), "gradients", 4)),
        *(
            ((), "optimizer_states", 8),
            (("none", "sgd"), "optimizer_states", 4),
            (("none", None), "optimizer_states", 8),
        ),
        *((("none", "lomo"), "optimizer_states", 12), (("none", "galore_adamw"), "optimizer_states", 16)),
        *((("zero2",), "optimizer_states", 12), (("none", "sgd", "float64"), "optimizer_states", 8)),
    ]:
        if bound == LOADED and streamed:  # weights come and go
            bound = None if kind == "parameters" else 8 if "float64" in settings else 4
        most = (bound if bound == LOADED else (bound or 100) * sum(SIZES)) * 101 // 100 + SPARE
        assert not contradictions(*settings, **{kind: most}), (settings, kind)
        found = contradictions(*settings, **{kind: most + 1})
        assert len(found) == (
            0 if bound is None else 2 if not streamed and kind == "gradients" and not settings else 1
        )
    for count, missing in ((1_010_000, 0), (1_010_001, 1)):
        weights["count"] = count
        assert len(contradictions()) == (0 if streamed else missing) and not contradictions("fsdp2")
        assert not contradictions(dtype="bfloat16")


def test_a_sharded_peak_is_near_that_of_all_its_layers():
    for engine, extended, wrong in [
        *(("fsdp2", 0, False), ("fsdp2", 1, True), ("zero3", 1, False), ("ddp", 1, False), ("none", 1, False)),
    ]:
        job = SimpleNamespace(engine=engine_named(engine))
        with pytest.raises(ImpossibleEstimate, match="from layer to layer") if wrong else nullcontext():
            physical.check_depth(125 * 2**20 + 32 * 2**20 + extended, 100 * 2**20, job)


def test_a_command_ends_with_a_sentence(monkeypatch, capsys):
    from hf_memopt.program import run

    def fails():
        raise ImpossibleEstimate("no estimate, as its numbers contradict each other: …")

    with pytest.raises(SystemExit) as end:
        run(fails)
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: no estimate")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("command", ["estimate llama-3.2-1b --hardware cpu --seq-len 16", "dry-run script.py"])
def test_the_command_line_ends_with_a_sentence(command, monkeypatch, capsys, tmp_path):
    """The program's own main() and dry-run's child print errors by themselves."""
    from hf_memopt.cli import app
    from hf_memopt.cli import estimate as cli_estimate

    def contradict(*_args, **_kwargs):
        raise ImpossibleEstimate("no estimate, as its numbers contradict each other: …")

    if command.startswith("estimate"):
        monkeypatch.setattr(assembly, "check_physics", contradict)
        monkeypatch.setattr("sys.argv", ["hf-memopt", *command.split()])
        with pytest.raises(SystemExit) as ended:
            app.main()
        code = ended.value.code
    else:
        monkeypatch.setattr(cli_estimate, "_print_dry_run", contradict)
        code = cli_estimate._dry_run(cli_estimate.DryRunOptions(script="script.py"), None, False)
    errors = capsys.readouterr().err
    assert code == 2 and "error: no estimate" in errors and "Traceback" not in errors
