"""A Trainer that stands ready, and whole scripts: estimated as they are, and left as they are."""

import json
import textwrap
from types import SimpleNamespace

import pytest
import torch
from conftest import flags, run_forked, slow
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import MemoryArguments
from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate_trainer
from hf_memopt.estimator.scripts.dry_run import _explain
from hf_memopt.estimator.tracing.trainer_copy import TrainerCopy
from hf_memopt.estimator.trainer_job import TrainerJob

CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}


def _config(layers=9):
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "llama",
        hidden_size=128,
        intermediate_size=352,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        vocab_size=3000,
        max_position_embeddings=2048,
    )


def _pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


def _rows(lengths):
    return [{"input_ids": [7] * n, "labels": [7] * n, "attention_mask": [1] * n} for n in lengths]


def _trainer(tmp_path, lengths=(40,) * 20 + (200,) * 2, **more):
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    class Doubled(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            held = outputs.logits.float() * 2  # memory that only this trainer takes
            loss = outputs.loss + 0 * held.sum()
            return (loss, outputs) if return_outputs else loss

    fields = {"per_device_train_batch_size": 2, **CHECKPOINTED, **more.pop("fields", {})}
    args = TrainingArguments(
        str(tmp_path / "out"), use_cpu=True, max_steps=2, report_to="none", save_strategy="no", **fields
    )
    model = more.pop("model", None) or AutoModelForCausalLM.from_config(_config())
    return Doubled(model, args, train_dataset=_rows(lengths), data_collator=_pad, **more)


@pytest.mark.slow
def test_a_subclass_with_its_own_loss_and_collator(tmp_path):
    """The prediction is for the longest batch; so the truth trains on nothing else."""
    found = estimate_trainer(_trainer(tmp_path), "cpu")
    truth = allocator_peak(lambda: _trainer(tmp_path, lengths=(200,) * 22).train())
    assert found.peak_allocated_bytes == pytest.approx(truth, rel=0.01)


@pytest.mark.slow
def test_the_trainer_is_left_as_it_was(tmp_path):
    trainer = _trainer(tmp_path)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    optimizer, accelerator = trainer.optimizer, trainer.accelerator
    estimate_trainer(trainer, "a100_80gb")
    assert trainer.optimizer is optimizer and trainer.accelerator is accelerator and trainer.state.global_step == 0
    assert all(torch.equal(before[name], weight) for name, weight in trainer.model.named_parameters())
    assert type(next(trainer.model.parameters()).data) is torch.Tensor
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.slow
def test_the_users_own_optimizer_is_followed(tmp_path):
    trainer = _trainer(tmp_path)
    own = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    plain = _trainer(tmp_path, optimizers=(own, None), model=trainer.model)
    assert estimate_trainer(plain, "cpu").breakdown["optimizer_states"] == 0
    assert estimate_trainer(trainer, "cpu").breakdown["optimizer_states"] > 0


@pytest.mark.slow
def test_logits_that_wait_for_metrics(tmp_path):
    """Without eval_accumulation_steps every batch's logits stay on the device, twice while they are concatenated."""
    fields = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    data = {"eval_dataset": _rows((200,) * 40)}
    without = estimate_trainer(_trainer(tmp_path, fields=fields, **data), "cpu")
    kept = estimate_trainer(_trainer(tmp_path, fields=fields, compute_metrics=lambda _: {}, **data), "cpu")
    logits = 40 * 200 * 3000 * 4
    assert kept.phase == "eval"
    assert kept.phases["eval"] - without.phases["eval"] == pytest.approx(2 * logits, rel=0.1)


def test_batches_whose_logits_wait_for_metrics(subtests):
    for more, evaluated, kept in [
        *(({}, 7, 7), ({"compute_metrics": None}, 0, 0), ({"prediction_loss_only": True}, 0, 0)),
        *(({"eval_dataset": None}, 0, 0), ({"eval_dataset": {"a": [0] * 3, "b": [0] * 4, "stream": iter(())}}, 2, 2)),
        *(({"eval_dataset": []}, 1, 1), ({"batch_eval_metrics": True}, 1, 1), ({"eval_accumulation_steps": 3}, 7, 3)),
        *(({"eval_accumulation_steps": 9}, 7, 7), ({"reduce_eval_logits": True}, 0, 0)),
        ({"reduce_eval_logits": True, "preprocess_logits_for_metrics": len}, 7, 7),
    ]:
        with subtests.test(f"{more} {evaluated} {kept}"):
            own = {"compute_metrics": len, "eval_dataset": [0] * 13, "preprocess_logits_for_metrics": None}
            args = {"prediction_loss_only": False, "batch_eval_metrics": False, "per_device_eval_batch_size": 2}
            chosen = {name: more.get(name, value) for name, value in {**own, **args}.items()}
            job = object.__new__(TrainerJob)
            vars(job).update(
                fields={"eval_accumulation_steps": more.get("eval_accumulation_steps")},
                memory_args=MemoryArguments(reduce_eval_logits=more.get("reduce_eval_logits", False)),
                trainer=SimpleNamespace(**chosen, args=SimpleNamespace(**chosen)),
            )
            assert (job.evaluated_batches, job.kept_batches) == (evaluated, kept)


def test_models_held_beside_the_trained_one_keep_as_many_layers():
    """A reference has the trained model's layers; what has another number of them (a reward model) stays whole."""
    from transformers import AutoModelForCausalLM

    trained, reference, reward = (AutoModelForCausalLM.from_config(_config(layers)) for layers in (4, 4, 3))
    holder = SimpleNamespace(model=trained, ref_model=reference, rewards=[reward])
    for lists, depth, layers in (([trained.model.layers], 2, [2, 2, 3]), ([], 2, [4, 4, 3])):
        with FakeTensorMode(allow_non_fake_inputs=True):
            copies = TrainerCopy(holder, lists, depth)
            assert [len(one.model.layers) for one in (copies.copy_models(), *copies.held)] == layers


def test_a_trainer_without_data_is_refused(tmp_path):
    trainer = _trainer(tmp_path)
    trainer.train_dataset = None
    with pytest.raises(InputError, match="train_dataset is None"):
        estimate_trainer(trainer, "cpu")


@pytest.fixture
def folder(tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(_config()).save_pretrained(tmp_path / "model")
    return tmp_path


PLAIN = """
    import sys
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
    args = TrainingArguments(sys.argv[2], per_device_train_batch_size=2, report_to="none", use_cpu=True)
    rows = [{"input_ids": [7] * 64, "labels": [7] * 64}] * 8
    print("words of the script")
    trainer = Trainer(model, args, train_dataset=rows, data_collator=default_data_collator)
    trainer.train()
    raise SystemExit("trained")
"""
SUBCLASS = """
    import sys, torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Writes(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            open(sys.argv[2] + "-written", "w").write("x")

    class Mine(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    def collate(rows):
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).to("cpu")
    args = TrainingArguments(sys.argv[2], per_device_train_batch_size=2, report_to="none", use_cpu=True)
    trainer = Mine(model, args, train_dataset=[{"input_ids": [7] * 64}] * 8, data_collator=collate,
                   callbacks=[Writes()])
    trainer.evaluate(eval_dataset=[])
    try:
        trainer.train()
    except Exception:
        print("a script's own handler")
    trainer.save_model()
"""
ADAPTERS = """
    import sys, torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
    from transformers import default_data_collator

    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, quantization_config=packed)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    args = TrainingArguments(sys.argv[2], per_device_train_batch_size=2, report_to="none", use_cpu=True, bf16=True)
    rows = [{"input_ids": [7] * 64, "labels": [7] * 64}] * 8
    if __name__ == "__main__":
        Trainer(model, args, train_dataset=rows, data_collator=default_data_collator).train()
"""


EIGHT_BITS = ADAPTERS.replace(
    'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16', "load_in_8bit=True"
)


@pytest.mark.parametrize(
    "script",
    [slow(PLAIN), slow(SUBCLASS), slow(ADAPTERS), slow(EIGHT_BITS)],
    ids=["plain", "subclass", "adapters", "8 bits"],
)
def test_unmodified_scripts(script, folder):
    """Nothing is trained or written, not even the output folder, and the weights are never read."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    (folder / "model" / "model.safetensors").unlink()
    before = sorted(folder.rglob("*"))
    command = ["hf-memopt", "dry-run", folder / "train.py", *flags(hardware="rtx_3060"), "--json"]
    done = run_forked(*command, "--", folder / "model", folder / "out")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is True and sum(found["breakdown"].values()) == found["peak_allocated_bytes"]
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        slow("print('nothing to train')", "without calling train()"),
        slow("raise SystemExit(3)", "exit code 3"),
        (None, "no such file"),
    ],
)
def test_scripts_that_never_train(text, message, tmp_path):
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    done = run_forked("hf-memopt", "dry-run", tmp_path / "train.py")
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1 / 0", "script.py, line 2: ZeroDivisionError: division by zero"),
        ("json.loads('')", "script.py, line 2: JSON"),
    ],
)
def test_an_error_of_the_script_is_placed_and_one_of_a_library_also_where_it_was_raised(line, said, tmp_path):
    script = tmp_path / "script.py"
    with pytest.raises(Exception) as caught:
        exec(compile(f"import json\n{line}", str(script), "exec"), {})
    message = _explain(caught.value, script)
    assert message.startswith(said) and ("(raised in " in message) is ("json" in line)
