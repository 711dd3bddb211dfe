"""recipes/grpo.py in this process: rewards rise, vLLM's settings pass, and what is no question is refused."""

import json
import re

import pytest
import trl
from conftest import slow

from hf_memopt import InputError, MemoryTrainerMixin
from hf_memopt.recipe.prompts import correct, numeric, sums

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

QUICK = ["--preset", "cpu", "--disable_tqdm", "true", "--report_to", "none"]
SMALL = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--effective_batch_size", "4"]
SMALL += ["--num_generations", "2", "--max_completion_length", "4"]
SUMS = [{"prompt": row["prompt"], "completion": row["answer"]} for row in sums(16)]


@pytest.mark.slow
def test_rewards_of_the_built_in_model_rise(recipe, tmp_path, capsys):
    recipe("grpo")([*QUICK, "--output_dir", str(tmp_path / "out")])
    output = capsys.readouterr().out
    first, last = re.search(r"reward numeric: ([\d.]+) at step 6 → ([\d.]+) at step 60", output).groups()
    assert float(last) > 0.05 + float(first)


@pytest.mark.slow
def test_the_built_in_model_trains(recipe, tmp_path, capsys):
    trainer = recipe("grpo")([*QUICK, "--max_steps", "3", "--output_dir", str(tmp_path / "out")])
    assert re.search(r"reward correct: [\d.]+ at step 1 → [\d.]+ at step 3", capsys.readouterr().out)
    assert isinstance(trainer, MemoryTrainerMixin) and isinstance(trainer, trl.GRPOTrainer)
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    assert report["estimate"]["phases"]["generation"] and report["estimate"]["phases"]["rewards"]
    assert -0.01 < report["relative_error"]["peak_allocated_bytes"] < 0.03


@pytest.mark.parametrize("method", [slow("lora"), slow("qlora")])
def test_methods(method, recipe, jsonl, tmp_path):
    """The reference is the model without its adapters."""
    arguments = ["--method", method, "--dataset_name", jsonl(SUMS), "--output_dir", str(tmp_path / "out")]
    trainer = recipe("grpo")([*QUICK, *SMALL, *arguments, "--beta", "0.04"])
    assert trainer.state.global_step == 2 and trainer.ref_model is None and trainer.args.beta == 0.04
    assert "answer" in trainer.train_dataset.column_names


def test_settings_of_vllm_pass_through(recipe, tmp_path):
    """vLLM is not here: TRL asks for it when it makes its engine."""
    arguments = ["--use_vllm", "true", "--vllm_mode", "server", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(InputError, match="GRPOTrainer: vLLM is not available and `use_vllm` is set"):
        recipe("grpo")([*QUICK, *SMALL, *arguments])


BAD = [
    ([], [{"text": "a"}] * 4, "has the columns text; GRPO needs prompt, and completion"),
    (["--packing", "true"], SUMS, "unknown argument 'packing'"),
    (["--config_name", "llama-3.2-1b"], SUMS, "config_name starts from random weights"),
    (["--num_generations", "3"], SUMS, r"generation_batch_size .4. must be divisible by num_generations .3."),
    (["--num_generation", "2"], SUMS, "unknown argument 'num_generation'.*num_generations"),
]


@pytest.mark.parametrize(("arguments", "rows", "message"), BAD, ids=[case[2][:30] for case in BAD])
def test_what_is_no_question_is_refused(arguments, rows, message, recipe, jsonl, tmp_path):
    with pytest.raises(InputError, match=message):
        recipe("grpo")(
            [*QUICK, *SMALL, "--dataset_name", jsonl(rows), "--output_dir", str(tmp_path / "out"), *arguments]
        )
    assert not (tmp_path / "out").exists(), "nothing is written"


def test_rewards():
    completions = [" 7", "it is 12, so 7.0", "seven", ""]
    assert correct(completions, ["7", "#### 7", "7", "7"]) == [1.0, 1.0, 0.0, 0.0]
    assert correct(["none"], ["none"]) == [0.0], "an answer without a number is never right"
    assert correct([[{"role": "assistant", "content": "1,200"}]], ["1200"]) == [1.0]
    assert numeric([" 42", "4b", ""]) == [1.0, 0.5, 0.0]
