"""recipes/dpo.py in this process: pairs are learned, in full and with adapters, and what is no pair is refused."""

import json
import re

import pytest
import trl
from conftest import flags, slow

from hf_memopt import InputError, MemoryTrainerMixin

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

QUICK = ["--preset", "cpu", "--disable_tqdm", "true", "--report_to", "none", "--held_out", "8"]
PAIRS = [
    {"prompt": f"What is {n} plus {n}?", "chosen": f" It is {2 * n}.", "rejected": f" Maybe {2 * n}?"}
    for n in range(24)
]


def messages(pair):
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": roles[name], "content": text}] for name, text in pair.items()}


def without_prompt(pair):
    turns = messages(pair)
    return {name: turns["prompt"] + turns[name] for name in ("chosen", "rejected")}


@pytest.mark.slow
def test_the_built_in_pairs_are_learned(recipe, tmp_path, capsys):
    """What `make test` shows: the chosen answers of held-out pairs get the higher rewards."""
    steps = flags(max_steps=12, eval_steps=12, effective_batch_size=4, held_out=12, max_length=32)
    trainer = recipe("dpo")([*QUICK, *steps, "--learning_rate", "1e-3", "--output_dir", str(tmp_path / "out")])
    output = capsys.readouterr().out
    before, after = re.search(r"held-out pairs: ([\d.]+) at step 0 → ([\d.]+) at step 12", output).groups()
    assert float(before) == 0 and float(after) >= 0.8
    assert "perplexity" not in output
    with capsys.disabled():
        print(f"\nDPO on the built-in model, held-out reward accuracy: {before} → {after}")
    assert isinstance(trainer, MemoryTrainerMixin) and isinstance(trainer, trl.DPOTrainer)
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    assert report["estimate"]["breakdown"]["parameters"] > 2 * 4 * 4_196_608 * 0.99, "the reference's weights count"
    assert report["relative_error"]["peak_allocated_bytes"] > -0.01


FORMS = {"texts": lambda pair: pair, "messages": messages, "prompt in both": without_prompt}


@pytest.mark.parametrize(
    ("method", "more", "form"),
    [
        slow("lora", [], "texts"),
        slow("qlora", [], "messages"),
        slow("full", ["--precompute_ref_log_probs", "true"], "prompt in both"),
    ],
)
def test_methods_and_forms(method, more, form, recipe, jsonl, tmp_path):
    """With adapters and with a precomputed reference there is one copy of the weights."""
    data = jsonl([FORMS[form](pair) for pair in PAIRS])
    arguments = ["--method", method, "--dataset_name", data, "--output_dir", str(tmp_path / "out"), *more]
    sizes = ["--max_length", "32", "--max_steps", "2", "--held_out", "4", "--beta", "0.2"]
    trainer = recipe("dpo")([*QUICK, *arguments, *sizes])
    assert trainer.state.global_step == 2 and trainer.args.beta == 0.2 and trainer.ref_model is None
    assert (trainer.args.max_length, trainer.args.per_device_train_batch_size) == (32, 2)
    adapters = getattr(trainer.model, "peft_config", {})
    assert list(adapters) == ([] if method == "full" else ["default"]), "the reference is the model without adapters"
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    assert report["estimate"]["breakdown"]["parameters"] < 1.5 * 4 * 4_196_608
    assert report["relative_error"]["peak_allocated_bytes"] > -0.01


BAD = [
    (
        [],
        [{"prompt": "a", "completion": "b"}],
        "has the columns prompt, completion; preferences need chosen and rejected",
    ),
    ([], [{**PAIRS[0], "images": ["x.png"]}], "'images' would not be trained on"),
    ([], [*PAIRS, {**PAIRS[0], "rejected": ""}], "row 24: rejected is empty"),
    ([], [*PAIRS, {**PAIRS[0], "rejected": PAIRS[0]["chosen"]}], "row 24: chosen and rejected are the same"),
    ([], [{**messages(PAIRS[0]), "prompt": "What?"}] * 12, "row .: some of chosen, rejected and prompt are texts"),
    (
        [],
        [{"chosen": [{"role": "user", "content": 5}], "rejected": [{"role": "user"}]}] * 12,
        "row .: chosen must be a text, or mess",
    ),
    (["--packing", "true"], PAIRS, "unknown argument 'packing'"),
    (["--streaming", "true", "--max_steps", "2"], PAIRS, "streaming=True: pairs are padded and read whole"),
    (["--config_name", "llama-3.2-1b"], PAIRS, "config_name starts from random weights"),
    (["--loss_type", "sigmoidal"], PAIRS, "unknown loss_type .sigmoidal.*sigmoid"),
    (["--betta", "1"], PAIRS, "unknown argument 'betta'.*beta"),
]


@pytest.mark.parametrize(("arguments", "rows", "message"), BAD, ids=[case[2][:30] for case in BAD])
def test_what_is_no_preference_is_refused(arguments, rows, message, recipe, jsonl, tmp_path):
    with pytest.raises(InputError, match=message):
        recipe("dpo")([*QUICK, "--dataset_name", jsonl(rows), "--output_dir", str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists(), "nothing is written"
