"""What a script finds in a dry run: the named device, its own files, no weights; and what it leaves: nothing."""

import contextlib
import json
import os
import textwrap

import pytest
import torch
from conftest import run

from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate_trainer
from hf_memopt.estimator.device_stand_in import seen_by_script
from hf_memopt.estimator.dry_run import caught_trainer
from hf_memopt.hardware import detection, get_hardware

# peft (0.21.2) and trl (1.16) use the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
TRAIN = """
from transformers import Trainer, TrainingArguments, default_data_collator

def train(model, **fields):
    args = TrainingArguments("out", per_device_train_batch_size=2, report_to="none", **fields)
    rows = [{"input_ids": [7] * 16, "labels": [7] * 16}] * 8
    Trainer(model, args, train_dataset=rows, data_collator=default_data_collator).train()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model without weights and a tokenizer, beside a module that trains."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path / "model")
    words = {word: number for number, word in enumerate(["<unk>", "<pad>", "</s>", "a", "b", "c"])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c a"}\n' * 8)
    (tmp_path / "training.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@contextlib.contextmanager
def caught(script: str, hardware: str = "cpu", arguments=()):
    """The Trainer of a script that is written into the current folder."""
    with open("train.py", "w") as file:
        file.write(textwrap.dedent(script))
    with caught_trainer("train.py", list(arguments), hardware) as trainer:
        yield trainer


def refusal(script: str, hardware: str = "cpu") -> str:
    with pytest.raises(InputError) as refused, caught(script, hardware):
        pass
    return str(refused.value)


def listing(folder) -> dict:
    return {path: path.is_file() and path.read_bytes() for path in sorted(folder.rglob("*"))}


# ---- the device


CARDS = (
    "rtx_4090",
    "t4",
    "v100_32gb",
    "a100_40gb",
    "h100_80gb",
    "b200",
    "l40s",
    "mi300x",
    "rx_7900_xtx",
    "rx_6750_xt",
)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_recognised_by_what_torch_says_of_it(name):
    card = get_hardware(name)
    with seen_by_script(card):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert bool(torch.version.hip) == (card.backend == "rocm") != bool(torch.version.cuda)
        seen = detection._cuda(torch.cuda.get_device_properties(0), torch.version.hip)
        assert (seen.name, seen.memory, seen.native_bf16) == (card.name, card.memory, card.native_bf16)
        assert torch.cuda.mem_get_info() == (card.memory, card.memory)
        assert torch.cuda.is_bf16_supported(including_emulation=False) == card.native_bf16
        assert detection.detect() is card
    assert not torch.cuda.is_initialized()


def test_a_described_card_of_which_only_the_memory_is_known():
    with seen_by_script(get_hardware('{"memory": "24 GiB", "backend": "rocm"}')):
        assert torch.cuda.get_device_properties(0).total_memory == 24 * 2**30 and torch.version.hip


def test_libraries_ask_again():
    from transformers.utils import (
        is_torch_bf16_gpu_available,
        is_torch_cuda_available,
        is_torch_mps_available,
        is_torch_tf32_available,
    )

    def answers():
        asked = (is_torch_cuda_available, is_torch_bf16_gpu_available, is_torch_tf32_available, is_torch_mps_available)
        return tuple(bool(ask()) for ask in asked)

    here = answers()
    for name, seen in (
        ("a100_80gb", (True, True, True, False)),
        ("t4", (True, True, False, False)),
        ("mi300x", (True, True, False, False)),
        ("apple_m2_16gb", (False, True, False, True)),
        ("cpu", (False, False, False, False)),
    ):
        with seen_by_script(get_hardware(name)):
            assert answers() == seen, name
    assert answers() == here


def test_tensors_stay_on_the_cpu():
    with seen_by_script(get_hardware("rtx_4090")):
        made = torch.ones(2, device="cuda")
        assert {made.device, made.cuda().device, made.to("cuda:0").device, made.to(0, torch.float16).device} == {
            torch.device("cpu")
        }
        assert made.to(0, torch.float16).dtype is torch.float16
        assert torch.nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"
        torch.cuda.empty_cache()
        torch.cuda.set_device(0)
        torch.cuda.manual_seed_all(0)


MODEL = """
import torch
from training import train
from transformers import AutoModelForCausalLM
"""


@pytest.mark.parametrize("hardware", ["a100_80gb", "mi300x", "apple_m4_max_64gb"])
def test_bf16_on_another_machine(hardware, folder):
    script = MODEL + 'train(AutoModelForCausalLM.from_pretrained("model").to("cuda"), bf16=True)'
    with caught(script, hardware) as trainer:
        assert trainer.args.bf16 and next(trainer.model.parameters()).dtype is torch.bfloat16
        assert estimate_trainer(trainer, hardware).fits


def test_the_trainers_own_checks_are_about_the_card(folder):
    with caught(MODEL + 'train(AutoModelForCausalLM.from_pretrained("model"), tf32=True, bf16=True)', "rtx_4090"):
        pass
    said = refusal(MODEL + 'train(AutoModelForCausalLM.from_pretrained("model"), tf32=True)', "t4")
    assert "ValueError: --tf32 requires Ampere" in said


@pytest.mark.parametrize("name", ["rtx_4090", "auto"])
def test_a_preset_in_the_script_is_the_cards(name, folder):
    script = f"""
    from hf_memopt import get_preset
    from transformers import AutoModelForCausalLM, Trainer, default_data_collator

    preset = get_preset("{name}", method="qlora")
    assert preset.name == "rtx_4090"
    model = AutoModelForCausalLM.from_pretrained("model", **preset.model_kwargs())
    from peft import get_peft_model
    model = get_peft_model(model, preset.peft_config())
    args = preset.training_arguments(output_dir="out", report_to="none")
    rows = [{{"input_ids": [7] * 16, "labels": [7] * 16}}] * 64
    Trainer(model, args, train_dataset=rows, data_collator=default_data_collator).train()
    """
    with caught(script, "rtx_4090") as trainer:
        assert trainer.args.bf16 and trainer.args.optim == "paged_adamw_8bit"
        assert trainer.model.is_loaded_in_4bit


# ---- from_pretrained


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "model.dtype == torch.bfloat16"),
        ("dtype=torch.float32", "model.dtype == torch.float32 and model.config.dtype == torch.float32"),
        ("torch_dtype='float16'", "model.dtype == torch.float16"),
        ("use_cache=False", "model.config.use_cache is False"),
        ("num_hidden_layers=1", "len(model.model.layers) == 1"),
        ("attn_implementation={'': 'eager'}", "model.config._attn_implementation == 'eager'"),
        ("attn_implementation='eager'", "model.config._attn_implementation == 'eager'"),
        ("device_map='auto', low_cpu_mem_usage=True", "model.device.type == 'cpu'"),
        ("device_map={'': 0}, trust_remote_code=False, revision='main'", "model.config._name_or_path == 'model'"),
        ("ignore_mismatched_sizes=True", "model.name_or_path == 'model' and not model.training"),
        ("tie_word_embeddings=True", "model.lm_head.weight is model.model.embed_tokens.weight"),
        ("subfolder='deeper'", "len(model.model.layers) == 3"),
        ("state_dict=None, use_safetensors=True, token=None", "model.can_generate()"),
    ],
)
def test_from_pretrained_takes_its_arguments(arguments, expected, folder):
    from transformers import LlamaConfig

    LlamaConfig(**{**SHAPE, "num_hidden_layers": 3}).save_pretrained(folder / "model" / "deeper")
    with caught(
        MODEL + f'model = AutoModelForCausalLM.from_pretrained("model", {arguments})\nassert {expected}\ntrain(model)',
        "rtx_4090",
    ):
        pass


@pytest.mark.parametrize(("weights", "dtype"), [(True, "float16"), (False, "float32")])
def test_a_checkpoint_whose_configuration_has_no_dtype(weights, dtype, folder):
    """Its weights' header says it; without weights here, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE)).half().save_pretrained(folder / "old")
    LlamaConfig(**SHAPE).save_pretrained(folder / "old")
    if not weights:
        (folder / "old" / "model.safetensors").unlink()
    script = f'model = AutoModelForCausalLM.from_pretrained("old")\nassert model.dtype is torch.{dtype}\ntrain(model)'
    with caught(MODEL + script):
        pass


def test_other_classes_and_their_heads(folder):
    script = MODEL + (
        "from transformers import AutoModelForSequenceClassification, AutoModel, LlamaForCausalLM, LlamaConfig\n"
        'model, info = AutoModelForSequenceClassification.from_pretrained("model", num_labels=5, '
        "output_loading_info=True, problem_type='multi_label_classification')\n"
        "assert model.score.out_features == 5 and not info['missing_keys']\n"
        'assert AutoModel.from_pretrained("model").half().dtype is torch.float16\n'
        f"own = LlamaForCausalLM(LlamaConfig(**{SHAPE}))\n"
        "assert type(own.lm_head.weight.data).__name__ == 'FakeTensor'\n"
        "own.resize_token_embeddings(200)\n"
        "own.cuda().bfloat16()\ntrain(own)"
    )
    with caught(script, "rtx_4090") as trainer:
        assert next(trainer.model.parameters()).dtype is torch.bfloat16
        assert estimate_trainer(trainer, "rtx_4090").fits


def test_a_kernel_of_the_hub(folder):
    script = (
        MODEL
        + """
model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="kernels-community/flash-attn3")
train(model, bf16=True)
"""
    )
    with caught(script, "h100_80gb") as trainer:
        assert estimate_trainer(trainer, "h100_80gb").fits


@pytest.mark.parametrize(("hardware", "dtype"), [("a100_80gb", torch.bfloat16), ("h100_80gb", torch.float8_e4m3fn)])
def test_an_fp8_checkpoint_where_the_card_has_no_kernels_for_it(hardware, dtype, folder):
    config = json.loads((folder / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    script = (
        MODEL
        + """
from peft import LoraConfig, get_peft_model

model = AutoModelForCausalLM.from_pretrained("model")
train(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), bf16=True)
"""
    )
    with caught(script, hardware) as trainer:
        assert trainer.model.base_model.model.model.layers[0].self_attn.k_proj.weight.dtype == dtype
        assert estimate_trainer(trainer, hardware).fits


def test_liger_on_a_class_of_the_scripts_own(folder):
    script = (
        MODEL
        + """
from transformers import LlamaForCausalLM

class Mine(LlamaForCausalLM):
    pass

train(Mine.from_pretrained("model"), bf16=True, use_liger_kernel=True)
"""
    )
    with caught(script, "h100_80gb") as trainer:
        assert estimate_trainer(trainer, "h100_80gb").fits


def test_modules_that_stay_in_float32(folder):
    from transformers import T5Config

    T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16, vocab_size=64).save_pretrained(folder / "t5")
    script = MODEL + (
        "from transformers import AutoModelForSeq2SeqLM\n"
        'model = AutoModelForSeq2SeqLM.from_pretrained("t5", dtype=torch.float16)\n'
        "assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype is torch.float32\n"
        "assert model.shared.weight.dtype is torch.float16\ntrain(model)"
    )
    with caught(script):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("low", ["", ", low_cpu_mem_usage=True"])
def test_adapters_of_a_folder(low, folder):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path="model")
    adapter.save_pretrained(folder / "adapter")
    script = MODEL + (
        "from peft import AutoPeftModelForCausalLM, PeftModel\n"
        'model = AutoModelForCausalLM.from_pretrained("model")\n'
        f'model = PeftModel.from_pretrained(model, "adapter", is_trainable=True{low})\n'
        'other = AutoPeftModelForCausalLM.from_pretrained("adapter", is_trainable=True)\n'
        'third = AutoModelForCausalLM.from_pretrained("adapter")\n'
        "assert third.config._name_or_path == 'model' and third.peft_config\n"
        "assert other.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()\n"
        "train(model)"
    )
    with caught(script, "rtx_4090") as trainer:
        assert 0 < estimate_trainer(trainer, "rtx_4090").breakdown["optimizer_states"] < 10**6


def test_a_spread_model_is_refused(folder):
    said = refusal(MODEL + 'AutoModelForCausalLM.from_pretrained("model", device_map={"model": 0, "lm_head": "cpu"})')
    assert said.startswith("device_map=") and "not modelled" in said


def test_a_model_from_a_configuration_has_its_tied_weights_once(folder):
    """no_init_weights(), which spares them their values, leaves out tying, too (transformers 5.23)."""
    script = f"""
        from training import train
        from transformers import AutoModelForCausalLM, LlamaConfig

        train(AutoModelForCausalLM.from_config(LlamaConfig(**{SHAPE}, tie_word_embeddings=True)))
    """
    with caught(script) as trainer:
        assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "columns", "computed"),
    [
        ("DPO", '"chosen": "b", "rejected": "c"', "ref_chosen_logps"),
        ("KTO", '"completion": "b", "label": True', "ref_logps"),
    ],
)
def test_references_are_precomputed_without_values(name, columns, computed, folder):
    script = f"""
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import {name}Config, {name}Trainer

        data = Dataset.from_list([{{"prompt": "a", {columns}}}] * 8)
        args = {name}Config("out", precompute_ref_log_probs=True, bf16=False, report_to="none")
        model = AutoModelForCausalLM.from_pretrained("model")
        tokenizer = AutoTokenizer.from_pretrained("model")
        {name}Trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer).train()
    """
    with caught(script) as trainer:
        assert trainer.ref_model is None and computed in trainer.train_dataset.column_names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_trls_own_scripts(name, folder, monkeypatch):
    """They take the tokenizer from the model's `config._name_or_path`."""
    trl = pytest.importorskip("trl")
    (folder / "data").mkdir()
    row = '{"text": "a b c"}' if name == "sft" else '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    (folder / "data" / "train.jsonl").write_text(f"{row}\n" * 8)
    before = listing(folder)
    arguments = "--model_name_or_path model --dataset_name data --output_dir out --bf16 True --use_peft --load_in_4bit"
    script = f"{trl.__path__[0]}/scripts/{name}.py"
    with caught_trainer(script, [*arguments.split(), "--lora_target_modules", "all-linear"], "rtx_4090") as trainer:
        assert trainer.processing_class.name_or_path == trainer.model.config._name_or_path == "model"
        assert trainer.model.get_nb_trainable_parameters()[0] > 0 and trainer.args.bf16
    assert listing(folder) == before


# ---- what it leaves


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
    done = run("hf-memopt", "dry-run", "train.py", "--hardware", "rtx_4090", cwd=folder)
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
    done = run("hf-memopt", "dry-run", "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "error: train.py: a traced step ends the program"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise RuntimeError('of the script')", "os._exit(0)", "sys.exit(1)"])
def test_an_error_is_no_verdict(end, folder):
    (folder / "train.py").write_text(textwrap.dedent(ENDS) + end)
    before = listing(folder)
    done = run("hf-memopt", "dry-run", "train.py", cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: train.py") and "Traceback" not in done.stderr
    assert listing(folder) == before
