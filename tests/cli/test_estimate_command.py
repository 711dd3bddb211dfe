"""`hf-memopt estimate`: what it prints, draws and refuses."""

import json

import pytest
from conftest import flags, run, run_forked
from test_estimator import _config

from hf_memopt.estimator.accounting.ledger import KINDS


@pytest.fixture
def model_folder(tmp_path):
    _config(8, vocabulary=32000).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_the_command_line(model_folder, command):
    options = [*flags(preset="a100_80gb", method="lora", set="per_device_train_batch_size=2"), *flags(set="lora.r=4")]
    done = run_forked("hf-memopt", "estimate", model_folder, *options, "--seq-len", 256, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is True and found["phase"] == "backward"
    assert sum(found["breakdown"].values()) == found["peak_allocated_bytes"]
    assert found["training_arguments"]["gradient_accumulation_steps"] == 16
    assert set(found["breakdown"]) == set(KINDS)
    assert found["peak_allocated_bytes"] <= found["peak_reserved_bytes"] < found["device_bytes"]
    assert found["host_bytes"] > 0 and found["levers"] == []
    large = [*flags(set="effective_batch_size=4096"), *flags(set="per_device_train_batch_size=2048")]
    code, shown, _ = command("estimate", model_folder, "--preset", "rtx_3070", *large)
    assert code == 1 and shown.startswith("NO, it does not fit:") and "\nchange " in shown
    code, shown, _ = command("estimate", model_folder, "--preset", "rtx_3070", *large, "--verbose")
    assert code == 1 and "changes that save most" in shown and "per_device_train_batch_size=1024" in shown


@pytest.mark.slow
def test_the_plot_is_a_picture(model_folder, tmp_path, command):
    picture = tmp_path / "memory.png"
    code, _, err = command("estimate", model_folder, "--preset", "rtx_3070", "--seq-len", 64, "--plot", picture)
    assert code == 0, err
    assert picture.read_bytes().startswith(b"\x89PNG") and list(tmp_path.glob("tmp*")) == []


@pytest.mark.slow
def test_several_devices_and_4_bits_on_the_command_line(model_folder, command):
    def estimated(*words):
        code, out, err = command("estimate", model_folder, "--preset", "a100_80gb", "--seq-len", 64, "--json", *words)
        assert code == 0, err
        return json.loads(out)

    alone, sharded = estimated("--set", "effective_batch_size=32"), estimated("--world-size", 8, "--strategy", "zero3")
    assert sharded["breakdown"]["optimizer_states"] < 0.3 * alone["breakdown"]["optimizer_states"]
    assert "8 devices, zero3" in " ".join(sharded["notes"])
    by_name = estimated("--world-size", 8, "--set", "deepspeed=zero3")
    assert by_name["peak_allocated_bytes"] == pytest.approx(sharded["peak_allocated_bytes"], rel=0.1)
    packed, lora = estimated("--method", "qlora"), estimated("--method", "lora")
    assert packed["breakdown"]["parameters"] < lora["breakdown"]["parameters"]


@pytest.mark.slow
def test_show_tells_what_the_reference_model_is_predicted_to_need():
    """The shipped file is what estimating anew gives; the cheapest row is made again."""
    from hf_memopt.estimator.preset_estimates import reference_estimate
    from hf_memopt.presets import get_preset

    found = json.loads(run("hf-memopt", "show", "rtx_3070", "--json").stdout)["reference_estimate"]
    anew = reference_estimate(get_preset("rtx_3070"))
    assert (found["model"], found["phase"], found["fits"]) == (anew["model"], anew["phase"], anew["fits"])
    assert found["peak_allocated_bytes"] == pytest.approx(anew["peak_allocated_bytes"], rel=0.001)
    assert found["device_bytes"] == pytest.approx(anew["device_bytes"], rel=0.001)
    shown = run("hf-memopt", "show", "a100_80gb", "--method", "lora").stdout
    assert "its memory" in shown and "(predicted," in shown


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/where", "--preset", "cpu"], "llama-3.1-8b"),
        (["{model}", "--preset", "t5"], "Did you mean 't4'"),
        (["{model}", "--preset", "cpu", "--set", "learning_rat=1"], "Did you mean 'learning_rate'"),
        (["{model}", "--preset", "cpu", "--set", "nonsense"], "KEY=VALUE"),
        (["{model}", "--preset", "cpu", "--set", "dtype=int3"], "unknown dtype"),
        (["{model}", "--preset", "cpu", "--method", "lora", "--set", "lora.rr=1"], "unknown key of lora"),
        (["{model}", "--preset", "cpu", "--set", "lora.r=1"], "method=lora only"),
        (["{model}", "--preset", "cpu", "--seq-len", "0"], "at least 1"),
        (["{model}", "--preset", "cpu", "--set", "quantization.bnb_4bit_quant_type=fp4"], "method=qlora only"),
        (["{model}", "--preset", "cpu", "--method", "qlora", "--set", "quantization.nf5=1"], "unknown key of quant"),
        (["{model}", "--preset", "cpu", "--set", "deepspeed=zero4"], "unknown deepspeed configuration 'zero4'"),
        (["{model}", "--preset", "cpu", "--set", "fp16=true", "--set", "bf16=true"], "exclude each other"),
        (["{model}", "--preset", "cpu", "--world-size", "0"], "at least 1"),
        (["{model}", "--preset", "cpu", "--set", "task=singing"], "unknown task"),
        (["{model}", "--preset", "cpu", "--plot", "memory.txt"], "must end in .png"),
        (["llama-3.1-7b", "--preset", "cpu"], "did you mean 'llama-3.1-70b' or 'llama-3.1-8b'"),
    ],
)
def test_bad_input(arguments, message, model_folder, command):
    code, out, err = command("estimate", *(word.format(model=model_folder) for word in arguments))
    assert code == 2, out + err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]


@pytest.fixture
def small_estimate():
    """Of a job that takes some MiB, on a CPU, which has no caching allocator."""
    from hf_memopt.estimator.result import Estimate

    return Estimate(
        peak_allocated_bytes=30 * 2**20,
        peak_reserved_bytes=30 * 2**20,
        device_bytes=30 * 2**20,
        host_bytes=3 * 2**30,
        phase="backward",
        breakdown={"parameters": 10 * 2**20, "activations": 20 * 2**20 - 2048, "logits": 0, "other": 2048},
        phases={"backward": 30 * 2**20},
        capacity_bytes=16 * 2**30,
        training_arguments={"learning_rate": 5e-5},
        notes=("a note",),
    )


def test_a_printed_estimate_is_three_short_lines(small_estimate):
    lines = str(small_estimate).splitlines()
    assert lines == [
        "30.0 MiB of 16.00 GiB predicted, fits",
        "peak in backward: parameters 10.0 MiB, activations 20.0 MiB, other 2.0 KiB",
        "allocated 30.0 MiB, reserved 30.0 MiB, host 3.00 GiB",
    ]
    assert "learning_rate" not in repr(small_estimate)


def _job(estimate, savings=()):
    from hf_memopt.cli.estimate_printed import EstimatedJob
    from hf_memopt.cli.speed_printed import AmountOptions

    return EstimatedJob(
        title="a job", settings=None, estimate=estimate, savings=list(savings), took=None, amount=AmountOptions()
    )


def test_small_sizes_are_no_zeros_and_equal_totals_one_row(small_estimate, capsys):
    _job(small_estimate).print(verbose=True)
    out = capsys.readouterr().out
    assert "0.00 GiB" not in out and "2.0 KiB" in out
    assert "peak allocated = peak reserved = device" in out and out.count("30.0 MiB") == 2  # above and the row
