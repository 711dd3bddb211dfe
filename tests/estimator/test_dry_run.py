"""What a script finds in a dry run: the named device, its own files, no weights; and what it leaves: nothing."""

import os
import textwrap

import pytest
from conftest import run_forked
from dry_runs import MODEL, caught, listing, prepare, refusal

from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate_trainer

# peft (0.21.2) and trl (1.16) use the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return prepare(tmp_path, monkeypatch)


WRITES = """
    import bz2, json, logging, os, pathlib, shutil, tarfile, tempfile
    import numpy, torch, datasets
    from training import train
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained("out/deep")
    tokenizer.save_pretrained("model")  # over its own files
    assert len(AutoTokenizer.from_pretrained("model")) == len(AutoTokenizer.from_pretrained("out/deep")) == 7
    model = AutoModelForCausalLM.from_pretrained("model")
    model.save_pretrained("saved")
    model = AutoModelForCausalLM.from_pretrained("saved")
    model.push_to_hub("some/where")
    tokenizer.push_to_hub("some/where")

    os.makedirs("logs/a", exist_ok=True)
    logging.getLogger("own").addHandler(logging.FileHandler("logs/own.log"))
    logging.getLogger("own").error("words")
    with open("logs/a/log.txt", "w") as file:
        file.write("one")
    with open("logs/a/log.txt", "a") as file:
        file.write(" two")
    assert open("logs/a/log.txt").read() == "one two" and os.listdir("logs") and os.path.getsize("logs/own.log")
    with open("rows.jsonl", "a") as file:
        file.write('{"text": "b"}')
    assert len(open("rows.jsonl").readlines()) == 9
    pathlib.Path("notes.md").write_text("x")
    pathlib.Path("notes.md").rename("logs/notes.md")
    assert sorted(path.name for path in pathlib.Path("logs").iterdir()) == ["a", "notes.md", "own.log"]
    assert sorted(pathlib.Path(".").glob("logs/*.md")) and not os.path.exists("notes.md")
    json.dump({}, open("result.json", "w"))
    with bz2.open("words.bz2", "wt") as file:
        file.write("words")
    assert bz2.open("words.bz2", "rt").read() == "words"
    with tarfile.open("logs.tar.gz", "w:gz") as archive:
        archive.add("result.json")
    assert tarfile.open("logs.tar.gz").getnames() == ["result.json"]
    numpy.save("array.npy", numpy.zeros(3))
    assert numpy.load("array.npy").shape == (3,)
    torch.save({"a": torch.ones(2)}, "tensors.pt")
    assert torch.load("tensors.pt")["a"].sum() == 2
    torch.save(model.state_dict(), "weights.pt")
    shutil.rmtree("model")
    assert not os.path.exists("model/config.json") and "model" not in os.listdir(".")
    os.remove("training.py")
    os.mkdir("model")
    assert os.listdir("model") == []
    with tempfile.TemporaryDirectory() as temporary:
        open(os.path.join(temporary, "x"), "w").close()
    os.symlink("rows.jsonl", "linked.jsonl")
    with open("linked.jsonl", "a") as file:
        file.write("\\n")
    os.replace("array.npy", "renamed.npy")
    for line, (top, folders, files) in zip(range(9), os.walk("logs")):
        assert files
    os.chdir("logs")
    open("inside", "w").close()
    os.chdir("..")

    data = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
    data = data.map(lambda row: {"input_ids": [7] * 16, "labels": [7] * 16}, remove_columns=["text"], num_proc=2)
    data.save_to_disk("prepared")
    data = datasets.load_from_disk("prepared").map(lambda row: row)
    assert len(data) == 9
    data.to_json("prepared.json")
    data.to_parquet("prepared.parquet")
    data.push_to_hub("some/data")
    data.train_test_split(0.5)
    from transformers import Trainer, TrainingArguments, default_data_collator
    args = TrainingArguments("trained/here", report_to="none", push_to_hub=True, logging_steps=1)
    Trainer(model, args, train_dataset=data, data_collator=default_data_collator).train()
"""


def test_nothing_stays(folder):
    environment = os.environ
    (folder / "train.py").write_text(textwrap.dedent(WRITES))
    before = listing(folder)
    with caught(WRITES, "rtx_4090") as trainer:
        assert estimate_trainer(trainer, "rtx_4090").fits
    assert listing(folder) == before
    assert os.environ is environment


@pytest.mark.slow
def test_nothing_stays_of_a_process(folder):
    (folder / "train.py").write_text(textwrap.dedent(WRITES))
    before = listing(folder)
    done = run_forked("hf-memopt", "dry-run", "train.py", "--hardware", "rtx_4090", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert listing(folder) == before


# ---- scripts that do not get to train()


@pytest.mark.parametrize(
    ("loop", "call"),
    [
        ("from accelerate import Accelerator\nAccelerator().prepare(model)", "line 7 calls Accelerator.prepare()"),
        ("model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()", "line 6 calls backward()"),
        ("torch.optim.SGD(model.parameters()).step()", "line 6 calls step() of an optimizer"),
    ],
)
def test_loops_of_ones_own(loop, call, folder):
    said = refusal(MODEL + 'model = AutoModelForCausalLM.from_pretrained("model")\n' + loop)
    assert f"train() of a Trainer was never reached: train.py, {call}" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import math\nmath.sqrt(-1)", "train.py, line 2: ValueError: "),
        ("def deep():\n    raise KeyError('x')\n\ndeep()", "train.py, line 2: KeyError: 'x'"),
        ("import json\njson.loads('{')", "train.py, line 2: JSONDecodeError: "),
        ("x = (", "train.py, line 1: SyntaxError: "),
        ("import no_such_package", "train.py, line 1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit('no data')", "train.py ended with “no data” before trainer.train()"),
        ("import sys\nsys.exit(1)", "train.py ended with exit code 1 before"),
        ("print('done')", "without calling train()"),
        ("import torch\nint(torch.nn.Linear(2, 2).weight.sum())", "the value of a tensor is asked for"),
        ("import torch\ntorch.save(lambda: 0, 'x')", "train.py, line 2: PicklingError: "),
    ],
)
def test_the_scripts_own_error_is_its_own(text, said, folder):
    assert said in refusal(text)


def test_what_a_wrapped_model_lacks_is_the_scripts_own_error(folder):
    """DistributedDataParallel has no `config`: the script fails on two devices in truth, too, with the same words."""
    script = """
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return model(**inputs).logits.sum() / model.config.vocab_size

    rows = [{"input_ids": [7] * 16, "labels": [7] * 16}] * 8
    model, args = AutoModelForCausalLM.from_pretrained("model"), TrainingArguments("out", report_to="none")
    Own(model, args, train_dataset=rows, data_collator=default_data_collator).train()
    """
    with caught(script, "rtx_4090") as trainer:
        assert estimate_trainer(trainer, "rtx_4090").fits
        with pytest.raises(InputError) as raised:
            estimate_trainer(trainer, "rtx_4090", world_size=2)
    said = str(raised.value)
    assert "train.py, line 6" in said and "'DistributedDataParallel' object has no attribute 'config'" in said


def test_the_trainer_can_make_its_model_itself(folder):
    script = """
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    rows = [{"input_ids": [7] * 16, "labels": [7] * 16}] * 8
    args = TrainingArguments("out", report_to="none")
    make = lambda: AutoModelForCausalLM.from_pretrained("model")
    Trainer(model_init=make, args=args, train_dataset=rows, data_collator=default_data_collator).train()
    """
    with caught(script, "rtx_4090") as trainer:
        assert estimate_trainer(trainer, "rtx_4090").fits


ENDS = """
    import atexit, os, sys
    atexit.register(lambda: open("at-exit", "w").close())
"""


@pytest.mark.slow
def test_a_step_that_ends_the_program_is_no_verdict(folder):
    script = """
    import sys
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    class Ends(Trainer):
        def compute_loss(self, *args, **kwargs):
            sys.exit(0)

    rows = [{"input_ids": [7] * 16, "labels": [7] * 16}] * 8
    model, args = AutoModelForCausalLM.from_pretrained("model"), TrainingArguments("out", report_to="none")
    Ends(model, args, train_dataset=rows, data_collator=default_data_collator).train()
    """
    (folder / "train.py").write_text(textwrap.dedent(script))
    done = run_forked("hf-memopt", "dry-run", "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "error: train.py: a traced step ends the program"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise RuntimeError('of the script')", "os._exit(0)", "sys.exit(1)"])
def test_an_error_is_no_verdict(end, folder):
    (folder / "train.py").write_text(textwrap.dedent(ENDS) + end)
    before = listing(folder)
    done = run_forked("hf-memopt", "dry-run", "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: train.py") and "Traceback" not in done.stderr
    assert listing(folder) == before
