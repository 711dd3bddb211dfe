"""Tokens, keys and passwords are in nothing that is printed or written."""

import json
import os
from types import SimpleNamespace

import pytest
from conftest import flags
from runs import RECOVERED, reading, report, write_run
from transformers import TrainingArguments

from hf_memopt.data.bad_rows import BadRows
from hf_memopt.errors import InputError, one_line
from hf_memopt.files import write_json
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.monitor.callback import append
from hf_memopt.redaction import REDACTED, is_secret, redact, redact_argv, redact_text, without_secrets

SECRET = "s3cretValue42"


def test_names_of_secrets():
    secret = "hub_token push_to_hub_token --hub-token token HF_TOKEN api_key wandbApiKey WANDB_API_KEY lora.token "
    secret += "aws_secret_access_key AWS_ACCESS_KEY_ID my.db_password client_secret credentials"
    none = "pad_token eos_token_id max_tokens_per_batch tokens_per_second average_tokens_across_devices key monkey "
    none += "include_num_input_tokens_seen trainable_token_indices token_budget label_names"
    assert [name for name in secret.split() if not is_secret(name)] == []
    assert [name for name in none.split() if is_secret(name)] == []


def test_every_field_of_training_arguments_is_judged():
    fields = TrainingArguments.__dataclass_fields__
    assert {name for name in fields if is_secret(name)} == {"hub_token"}
    assert not [name for name in MemoryArguments.names() if is_secret(name)]


@pytest.mark.parametrize(
    "text",
    [
        *("--hub_token {}", "--hub_token={}", "hub_token: '{}' is not valid", '{{"api_key": "{}"}}'),
        *("Authorization: Bearer {}", "https://me:{}@host/x", "bad hub_token: {}, or not", 'password = "{}"'),
    ],
)
def test_texts(text):
    hidden = redact_text(text.format(SECRET))
    assert SECRET not in hidden and REDACTED in hidden
    assert redact_text(hidden) == hidden


@pytest.mark.parametrize("token", ["hf_" + "aB3" * 11, "sk-ant-" + "x" * 30, "ghp_" + "a1" * 18, "AKIA" + "A1B2" * 4])
def test_issued_tokens_need_no_name(token):
    assert token not in redact_text(f"a run named {token}, it says")


@pytest.mark.parametrize("text", ["a token is missing", "pad_token: <pad>", "keys: a, b", "unknown key 'x'", "key=3"])
def test_other_texts_stay(text):
    assert redact_text(text) == text


def test_secrets_of_the_environment_are_known(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert redact({"message": f"refused {SECRET}"}) == {"message": f"refused {REDACTED}"}


@pytest.mark.parametrize("text", ["a" * 300_000, "token " * 50_000, "eyJ" * 100_000, "://a:" * 60_000, "x='" * 99_999])
@pytest.mark.timeout(60)
def test_a_long_line_takes_linear_time(text):
    redact_text(text)


def test_values_and_command_lines():
    nested = {"hub_token": SECRET, "more": [{"credentials": {"user": SECRET}}], "steps": 3, "save": True, "x": None}
    assert redact(nested) == {
        **{"hub_token": REDACTED, "more": [{"credentials": REDACTED}], "steps": 3, "save": True, "x": None},
    }
    assert redact({"hub_token": "<HUB_TOKEN>"}) == {"hub_token": "<HUB_TOKEN>"}  # TrainingArguments.to_dict's own
    assert without_secrets(nested) == {key: value for key, value in nested.items() if key != "hub_token"}
    argv = [
        *flags(hub_token=SECRET, push_to_hub="true"),
        f"--lora.token={SECRET}",
        "--a",
        f'{{"api_key": "{SECRET}"}}',
    ]
    assert redact_argv(argv) == [
        *flags(hub_token=REDACTED, push_to_hub="true"),
        f"--lora.token={REDACTED}",
        "--a",
        f'{{"api_key": "{REDACTED}"}}',
    ]


def test_error_lines():
    assert SECRET not in one_line(InputError(f"--config a.yaml: hub_token: {SECRET!r} is not valid"))
    assert one_line(InputError("a \x1b[31mred\x1b[0m name")) == "a red name"


def test_a_run_leaves_no_secret(tmp_path, monkeypatch, capsys):
    """memory_report.json and .html of a recipe's end, and memory_log.jsonl."""
    from hf_memopt.recipe import summary

    args = TrainingArguments(str(tmp_path), hub_token=SECRET, use_cpu=True, report_to=[])
    preset = SimpleNamespace(name="cpu", method="full", strategy="none", mesh=None)
    preset.hardware = SimpleNamespace(label="", memory=1)
    job = SimpleNamespace(
        args=args,
        preset=preset,
        memory_args=MemoryArguments(),
        bad_rows=BadRows(),
        model_name="a",
        argv=["--hub_token", SECRET, "--run_name", f"token={SECRET}"],
    )
    events = [RECOVERED | {"message": f"out of memory, api_key={SECRET}"}]
    state = SimpleNamespace(global_step=1, log_history=[])
    trainer = SimpleNamespace(state=state, memory_events=events, train_dataset=[], data_wait_share=0.25)
    trainer.later_steps = (0, 0, 0.0)
    summary.finish(job, trainer, {}, None, SimpleNamespace(bytes=0, phases={}, batch=None))
    append(str(tmp_path), events[0])
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert {"memory_report.json", "memory_report.html", "memory_log.jsonl"} <= written.keys()
    assert not [name for name, text in written.items() if SECRET in text]
    assert "--hub_token <redacted>" in json.loads(written["memory_report.json"])["command"]
    assert SECRET not in "".join(capsys.readouterr())


@pytest.mark.slow
def test_an_older_runs_secrets_are_not_shown(tmp_path, command):
    """Of a version that wrote them."""
    settings = {"hub_token": SECRET, "output_dir": "x"}
    events = [RECOVERED | {"message": f"hub_token={SECRET}"}]
    one = write_run(
        tmp_path / "one", report(command=f"--hub_token {SECRET}", settings=settings, events=events), [reading(1)]
    )
    other = write_run(tmp_path / "other", report(settings={"hub_token": "another"}), [reading(1)])
    for words in (
        ["report", one],
        ["report", one, other, "--output", tmp_path / "both.html", "--json"],
        ["monitor", one, "--json"],
        ["advise", one, "--json"],
    ):
        assert SECRET not in "".join(map(str, command(*words)[1:])), words
    for page in (one / "memory_report.html", tmp_path / "both.html"):
        assert SECRET not in page.read_text()


def test_an_end_out_of_memory_says_no_secret(monkeypatch):
    from hf_memopt.oom.classify import Diagnosis, OomKind
    from hf_memopt.trainer import oom_report as module

    monkeypatch.setattr(module, "count_held_bytes", lambda trainer: {})
    monkeypatch.setattr(module, "predict_one_sample", lambda trainer: (None, []))
    trainer = SimpleNamespace(
        _callback=SimpleNamespace(growth=None),
        state=SimpleNamespace(global_step=3),
        _pressure=SimpleNamespace(is_largest=lambda shapes: None),
    )
    found = Diagnosis(OomKind.DEVICE, True, "device memory ran out", f"CUDA out of memory. hub_token={SECRET}")
    assert SECRET not in str(module.describe_failure(trainer, "forward", found, None, ""))


def test_advice_quotes_no_secret(command, tmp_path):
    (tmp_path / "a.log").write_text(f"CUDA out of memory. hub_token={SECRET}\n")
    code, output, _ = command("advise", tmp_path / "a.log", "--json")
    assert code == 0 and SECRET not in output and REDACTED in output


def test_written_json_holds_none(tmp_path):
    write_json(tmp_path / "a.json", {"api_key": SECRET})
    assert json.loads((tmp_path / "a.json").read_text()) == {"api_key": REDACTED}


def test_a_recipes_token_is_not_among_the_arguments_that_checkpoints_hold(tmp_path, monkeypatch):
    from hf_memopt.recipe.job import RecipeDefaults, start

    monkeypatch.setenv("HF_TOKEN", "of somebody else")
    job = start(RecipeDefaults(), ["--preset", "cpu", "--hub_token", SECRET, "--output_dir", str(tmp_path)])
    assert job.args.hub_token is None and os.environ["HF_TOKEN"] == SECRET
