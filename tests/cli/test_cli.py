"""hf-memopt as it is typed."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
import yaml
from conftest import BIN, ROOT, run, run_forked, slow, sweep
from transformers.trainer_utils import SaveStrategy

from hf_memopt.field_values import fit
from hf_memopt.presets import get_preset, list_presets
from hf_memopt.presets.trl_configs import DEFAULTS
from hf_memopt.terminal import say


@pytest.mark.slow
def test_help_names_the_commands_and_shows_examples(command):
    import typer

    from hf_memopt.cli.app import app

    commands = typer.main.get_command(app).list_commands(None)
    code, output, _ = command("--help")
    assert code == 0 and len(commands) == 18
    for name in commands:
        assert name in output
        code, text, _ = command(name, "--help")
        assert code == 0 and f"hf-memopt {name}" in text and re.search(r"Examples?:", text), name


def test_bare_and_version(command):
    code, output, _ = command()
    assert code == 0 and "Usage:" in output and "estimate" in output
    code, output, _ = command("--version")
    assert code == 0 and output.split() == ["hf-memopt", metadata.version("hf_memopt")]


def test_hf_memopt_is_an_extension_of_hf(command, tmp_path, monkeypatch):
    """Registered, `hf memopt …` runs this program; nothing is looked up on GitHub."""
    from huggingface_hub.cli import extensions

    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(extensions, "_github_request", lambda *_, **__: pytest.fail("asked GitHub"))
    monkeypatch.setattr(extensions.constants, "HF_HUB_DISABLE_UPDATE_CHECK", True)
    code, output, _ = command("register")
    assert code == 0 and "`hf memopt` runs" in output
    assert dict(extensions.list_installed_extensions_for_help())["memopt"].startswith("Predict")
    started = []
    monkeypatch.setattr(extensions.subprocess, "call", lambda argv: started.append(argv) or 0)
    assert extensions.dispatch_unknown_top_level_extension(["memopt", "--version"], {"jobs"}) == 0
    assert started == [[str(BIN / "hf-memopt"), "--version"]]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("shell", "typed", "count", "found"),
    [
        ("bash", "hf-memopt sn", 1, "snapshot"),
        ("zsh", "hf-memopt mon", 1, "monitor"),
        ("bash", "hf-memopt show rtx_30", 2, "rtx_3090_ti"),
        ("fish", "hf-memopt estimate llama-3.1-", 2, "llama-3.1-405b"),
        ("bash", "hf-memopt plan x --hardware h1", 4, "h100_80gb"),
        ("bash", "hf-memopt show cpu --method q", 4, "qlora"),
    ],
)
def test_shells_complete(shell, typed, count, found):
    environment = {
        "_HF_MEMOPT_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(count),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = run("hf-memopt", env=environment, timeout=60)
    assert found in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", [("presets",), ("show", "rtx_4090"), ("--help",), sweep(("doctor",))])
def test_no_escape_sequences_where_nobody_wants_colour(words):
    """In a pipe; and in a terminal with NO_COLOR."""
    import pty

    done = run("hf-memopt", *words)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    main, side = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen([BIN / "hf-memopt", *words], stdout=side, stderr=subprocess.DEVNULL, env=environment)
    os.close(side)
    seen = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not part:
            break
        seen += part
    assert process.wait(60) == 0
    assert not re.search(rb"\x1b\[[\d;]*(3|4|9|10)\d[;m]", seen), "a colour"


@pytest.mark.slow
def test_presets_and_show_as_json():
    listed = json.loads(run_forked("hf-memopt", "presets", "--method", "qlora", "--json").stdout)
    assert [entry["name"] for entry in listed["presets"]] == list_presets()
    shown = json.loads(run_forked("hf-memopt", "show", "rtx_4090", "--method", "qlora", "--json").stdout)
    assert shown["training_arguments"]["optim"] == "paged_adamw_8bit"
    assert shown["hardware"]["sources"]["bandwidth"] and shown["lora"]["r"] == 16


@pytest.mark.parametrize(
    "words", [("presets", "--method", "lora"), ("show", "rtx_4090", "--method", "qlora"), ("show", "cpu_x2")]
)
def test_tables_keep_words_whole_on_80_columns(words, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, output, _ = command(*words)
    table = [line for line in output.splitlines() if line.startswith("│")]
    assert code == 0 and table and {len(line) for line in table} <= set(range(81))
    for name in ("Qwen3-8B",) if words[0] == "presets" else ("per_device_train_batch_size", "adamw"):
        assert name in output
    if words[0] == "show":
        shown = set(output.split())
        assert not {word for default in DEFAULTS for word in default.effect.split()} - shown, "a broken word"


def test_sentences_break_between_words_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "error: unknown preset or hardware 'rtx_4099'. Did you mean 'rtx_4090'?"
    say(text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    say(text)
    whole, *lines = capsys.readouterr().out.splitlines()
    assert whole == text == " ".join(lines) and max(map(len, lines)) <= 40


@pytest.mark.slow
def test_tables_are_for_people():
    output = run_forked("hf-memopt", "show", "h100_80gb").stdout
    for expected in ("per_device_train_batch_size", "989.4 TFLOP/s", "450 GB/s", "$PYTORCH_ALLOC_CONF"):
        assert expected in output
    assert "l40s_x4_aggressive" in run_forked("hf-memopt", "presets").stdout


def test_export_says_how_to_start_what_it_wrote(command, tmp_path, monkeypatch):
    """In a line of its own, which a shell takes as it stands."""
    monkeypatch.chdir(tmp_path)
    expected = {
        "sh 'a run'/launch.sh": ["rtx_4090"],
        "accelerate launch --config_file 'a run'/accelerate.yaml SCRIPT.py": ["rtx_4090", "--yaml-only"],
        "sbatch 'a run'/slurm.sbatch": ["rtx_4090", "--target", "Slurm"],
    }
    for start, (preset, *options) in expected.items():
        code, output, errors = command("export", preset, "a run", *options, "--overwrite")
        assert (code, output.splitlines()[1]) == (0, f"  {start}"), errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [slow(["rtx_4090", "--method", "qlora"]), slow(["a100_80gb_x8"]), ["a100_80gb_x8", "--strategy", "fsdp2"]],
)
def test_export_writes_what_the_preset_says(arguments, tmp_path):
    done = run_forked("hf-memopt", "export", arguments[0], tmp_path / "run", *arguments[1:], "--json")
    assert done.returncode == 0, done.stderr
    files = set(json.loads(done.stdout)["files"])
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    preset = get_preset(arguments[0], options.get("--method", "full"), options.get("--strategy"))
    folder = tmp_path / "run"
    assert files == {path.name for path in folder.iterdir()}
    assert json.loads((folder / "training_arguments.json").read_text()) == preset.settings()
    config = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert config == preset.accelerate_config(str(folder / "deepspeed.json"))
    assert (folder / "deepspeed.json").exists() == (preset.deepspeed_config() is not None)
    checked = run_forked("hf-memopt", "doctor", folder / "accelerate.yaml", cwd=tmp_path)
    assert checked.returncode == 0 and "a valid accelerate configuration" in checked.stdout


def test_doctor_names_the_versions_that_the_tests_pass_with():
    from hf_memopt.cli.doctor import _TESTED

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    assert {name: pinned[name] for name in _TESTED} == _TESTED


@pytest.mark.slow
def test_doctor_says_when_bitsandbytes_is_too_old_for_a_mac(monkeypatch):
    from hf_memopt import presets
    from hf_memopt.cli import doctor

    monkeypatch.setattr(presets, "get_preset", lambda name, method: presets.preset_by_name("apple_m2_16gb", method))
    assert doctor._methods_that_work() == (["full", "lora", "qlora"], [])
    monkeypatch.setattr(doctor, "has", lambda package, since: False)
    methods, (problem,) = doctor._methods_that_work()
    assert methods == ["full", "lora"] and "bitsandbytes 0.50.2 on a Mac" in problem


@pytest.mark.parametrize(
    ("system", "release", "says"),
    [
        ("Linux", "5.15.167.4-microsoft-standard-WSL2", "share of Windows' memory"),
        ("Windows", "11", "no NCCL"),
        ("Linux", "6.8.0-45-generic", None),
    ],
)
def test_doctor_knows_windows_and_wsl(system, release, says, monkeypatch):
    from hf_memopt.cli import doctor

    monkeypatch.setattr(doctor.platform, "system", lambda: system)
    monkeypatch.setattr(doctor.platform, "release", lambda: release)
    notes = doctor._system_notes()
    assert says in notes[0] if says else notes == []


@pytest.mark.slow
def test_doctor_as_json():
    done = run_forked("hf-memopt", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    used = report["would_use"]
    assert used.pop("methods") == "full, lora, qlora"
    assert list(used.values()) == ["cpu", "fp32", "sdpa", "adamw_torch", "default"]
    assert report["packages"]["torch"]["version"].startswith("2.")
    assert 0 < report["free_memory_bytes"] <= report["host_memory_bytes"]


@pytest.mark.slow
def test_doctor_checks_every_shipped_file():
    files = sorted((ROOT / "accelerate_configs").rglob("*.yaml")) + sorted(
        (ROOT / "accelerate_configs").rglob("*.json")
    )
    done = run_forked("hf-memopt", "doctor", *files)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(files)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "rtx_409"], "unknown preset or hardware 'rtx_409'. Did you mean 'rtx_4090'?"),
        (["show", "t4", "--method", "lorra"], "Did you mean 'lora'?"),
        (["show", "t4", "--strategy", "zero33"], "Did you mean 'zero3'?"),
        (["export", "t4", "{tmp}/run", "--recipe", "sfft"], "Did you mean 'sft'?"),
        (["export", "a100_80gb_x8", "{tmp}/run", "--method", "qlora", "--strategy", "hsdp8"], "use strategy fsdp2"),
        (["export", "t4", "{tmp}/run", "--nvme-path", "/tmp"], "zero3_offload_nvme"),
        (
            ["export", "cpu_x2", "{tmp}/run", "--strategy", "zero3_offload_nvme", "--nvme-path", "/none"],
            "not a folder",
        ),
        (["doctor", "{tmp}/none.yaml"], "no such file"),
        (["shw"], "Did you mean 'show'?"),
        (["show"], "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_code_2(arguments, message, tmp_path):
    done = run("hf-memopt", *(word.format(tmp=tmp_path) for word in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("fsdp=nonsense", "unknown fsdp 'nonsense'"),
        ("deepspeed=true", "deepspeed=True must be a file, a mapping or a name"),
        ("save_strategy=never", "unknown save_strategy 'never'"),
        ("lr_scheduler_type=cosine annealing", "unknown lr_scheduler_type 'cosine annealing'"),
        ("gradient_checkpointing_kwargs=use_reentrant=False", "must be a mapping, or its JSON"),
    ],
)
def test_settings_that_the_libraries_would_refuse_late(setting, message, command):
    code, _, error = command("estimate", "smollm2-135m", "--hardware", "2xh100", "--set", setting)
    assert code == 2 and message in error and len(error.splitlines()) == 1


def test_an_option_that_a_command_does_not_have(command, subtests):
    for argv, message in [
        ("estimate gpt2 --zzz-qqq 1", "Settings of the training are written --set zzz_qqq=VALUE"),
        ("estimate gpt2 --learning-rate 1", "Settings of the training are written --set learning_rate=VALUE"),
        ("estimate gpt2 --hardwar t4", "Did you mean --hardware?"),
        ("presets --zzz-qqq", "Options: --"),
        ("presets --learning-rate 1", "Options: --"),
    ]:
        with subtests.test(argv):
            code, _, error = command(*argv.split())
            assert code == 2 and " has no option --" in error and message in error and len(error.splitlines()) == 1


def test_values_as_people_write_them():
    kinds = {"tf32": bool | None, "bf16": bool, "save_strategy": SaveStrategy | str, "max_memory_gib": float | None}
    written = {"tf32": "y", "bf16": 0, "save_strategy": False, "max_memory_gib": "20GiB"}
    assert fit(kinds, written) == {"tf32": True, "bf16": False, "save_strategy": "no", "max_memory_gib": 20}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        (
            "vit",
            {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            "16 × pixel_values of 3 × 224 × 224 on NVIDIA",
        ),
        slow("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}, "16 × 512 tokens on NVIDIA"),
        (
            "whisper",
            {"d_model": 96, "encoder_layers": 1, "decoder_layers": 1},
            "16 × input_features of 80 × 3000 on NVIDIA",
        ),
    ],
)
def test_estimate_names_the_batch_of_every_kind_of_model(command, tmp_path, kind, sizes, words):
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    code, output, errors = command("estimate", tmp_path, "--hardware", "rtx_4090")
    assert code == 0 and words in output, errors


@pytest.mark.slow
def test_estimate_takes_a_number_of_devices_as_plan_does(command, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64).save_pretrained(
        tmp_path
    )
    code, output, errors = command("estimate", tmp_path, "--hardware", "2x3090")
    assert code == 0 and "on 2 × NVIDIA GeForce RTX 3090" in output and "one of 2 devices" in output, errors
    code, _, errors = command("estimate", tmp_path, "--hardware", "2x3090", "--world-size", 3)
    assert code == 2 and "hardware=2x3090 and world_size=3 differ" in errors


@pytest.mark.slow
def test_plan_says_that_a_described_card_has_no_speed(command, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64).save_pretrained(
        tmp_path
    )
    for figures, unknown in (("", True), (', "bandwidth": "1008 GB/s", "bf16_flops": "165 TFLOPS"', False)):
        code, output, errors = command("plan", tmp_path, "--hardware", '{"memory": "24 GiB"' + figures + "}")
        said = "bandwidth and bf16_flops of the described device are unknown" in " ".join(output.split())
        assert code == 0 and said == unknown, errors


@pytest.mark.parametrize(
    "sizes",
    [{"seq_len": "128"}, {"seq_len": 12.5}, {"seq_len": 8, "world_size": 0}, {"seq_len": 8, "world_size": "2"}],
)
def test_estimate_refuses_sizes_that_are_no_whole_numbers(sizes):
    from hf_memopt import estimate
    from hf_memopt.errors import InputError

    with pytest.raises(InputError, match="must be a whole number"):
        estimate("gpt2", {}, hardware="rtx_4090", **sizes)
