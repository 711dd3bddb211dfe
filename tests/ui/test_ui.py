"""Questions of a web page: links, what strangers may ask, and limits of time and memory."""

import sys
from dataclasses import replace

import pytest

from hf_memopt.errors import InputError
from hf_memopt.ui import limited_process
from hf_memopt.ui.limited_process import run_limited
from hf_memopt.ui.limits import Limits, check_public
from hf_memopt.ui.question import Question

QUESTION = Question(
    model="llama-3.1-8b", seq_len=4096, tokens="10M", price="1.5", settings=("optim=adamw_torch", "lora.r=8")
)


def test_a_link_holds_the_question():
    assert Question.from_query("?" + QUESTION.to_query()) == QUESTION
    assert Question.from_query("model=gpt2") == Question(model="gpt2")


@pytest.mark.parametrize("query", ["", "hardware=cpu", "model=a&x=1", "model=a&seq_len=-1", "&".join(["set=a"] * 41)])
def test_a_faulty_link_is_one_sentence(query):
    with pytest.raises(InputError, match=r"^link: "):
        Question.from_query(query)


def test_options_in_a_field_stay_values():
    assert Question(model="--plot=x").argv("estimate")[-2:] == ["--", "--plot=x"]


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "gpt2"])
def test_names_and_hub_ids_are_public(model):
    check_public(replace(QUESTION, model=model))
    check_public(replace(QUESTION, model=model, hardware="rtx_4090x8"))


def test_strangers_may_not_ask_for(subtests):
    for changed in [
        *({"model": "/etc/passwd"}, {"model": "../x"}, {"model": "a/../b"}, {"model": "a/b/c"}),
        *({"model": "https://x/y"}, {"model": "a/b\n"}, {"hardware": "/tmp/card.toml"}),
        *({"hardware": '{"label": "x"}'}, {"hardware": "auto"}, {"method": "--plot"}, {"seq_len": 0}),
        *({"tokens": "/etc/passwd"}, {"price": "$(id)"}, {"seq_len": 2**31}, {"settings": ("deepspeed=/etc/passwd",)}),
        *({"settings": ("push_to_hub=true",)}, {"settings": ("optim=../x",)}, {"settings": ("optim",)}),
        *({"settings": ("lora.r=8",) * 21}, {"config": "base_model: /etc"}),
    ]:
        with subtests.test(changed=changed), pytest.raises(InputError):
            check_public(replace(QUESTION, **changed))


def python(code: str, limits: Limits) -> tuple[int, str, str]:
    return run_limited([sys.executable, "-S", "-c", code], limits)


def test_time_and_memory_are_limited():
    with pytest.raises(InputError, match="more than 0 s"):
        python("import time; time.sleep(60)", Limits(seconds=0.2))
    with pytest.raises(InputError, match="of memory"):
        python("import time; a = bytearray(2**27); time.sleep(60)", Limits(memory_bytes=2**26))


def test_strangers_get_no_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    code = "import os; print(os.environ.get('HF_TOKEN'), os.listdir())"
    assert python(code, Limits(public=True))[1].startswith("None")
    assert python(code, Limits())[1].startswith("hf_")


def test_an_error_is_its_one_sentence(monkeypatch):
    monkeypatch.setattr(limited_process, "run_limited", lambda *_: (2, "", "noise\nerror: model x: no such folder\n"))
    with pytest.raises(InputError, match=r"^model x: no such folder$"):
        limited_process.ask(Question(model="x"), "estimate", Limits())


def test_notes_beside_the_answer_are_in_it(monkeypatch):
    monkeypatch.setattr(
        limited_process, "run_limited", lambda *_: (0, '{"notes": ["speed: x"]}', "noise\nnote: approximated: a\n")
    )
    assert limited_process.ask(Question(model="x"), "plan", Limits())["notes"] == ["approximated: a", "speed: x"]


def test_a_yaml_says_the_job_itself():
    question = replace(QUESTION, config="base_model: gpt2\n")
    argv = question.argv("estimate")
    assert argv[-2:] == ["--", "job.yaml"] and "--hardware=rtx_4090" in argv and "--set=lora.r=8" in argv
    assert not any(word.startswith(("--method", "--seq-len")) for word in argv)
    written = run_limited([sys.executable, "-S", "-c", "print(open('job.yaml').read())"], Limits(), question.config)
    assert written[1].strip() == "base_model: gpt2"
