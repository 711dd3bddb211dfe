"""estimate(task="dpo") and its like: without a script or data, the peak that TRL's trainers really have."""

import gc
import random

import pytest
import trl
from conftest import slow
from datasets import Dataset
from peft import LoraConfig
from test_trl_estimates import VOCABULARY, llama, tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, estimate
from hf_memopt.estimator.trl_tasks import TRL_TASKS, WORD, _text

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TOKENS = 80
FIELDS = {"per_device_train_batch_size": 4, "activation_checkpointing": False, "bf16": False}


def words(count: int) -> str:
    return " ".join(f"w{random.randrange(3, VOCABULARY)}" for _ in range(count))


def data(task: str, packing: bool = False) -> Dataset:
    """Rows of TOKENS tokens a sequence, the end that TRL adds included; one of a pair is a token shorter."""
    random.seed(0)
    if task == "sft":
        lengths = (TOKENS - TOKENS // 3 - 1, TOKENS // 3 - 1) if packing else (TOKENS - 1,)
        return Dataset.from_list([{"text": words(length)} for _ in range(16) for length in lengths])
    answers = {"completion": 70} if task == "kto" else {"chosen": 70, "rejected": 69}
    rows = [
        {"prompt": words(9) + " ", **{name: words(count) for name, count in answers.items()}, "label": at % 2 == 0}
        for at in range(16)
    ]
    return Dataset.from_list(
        rows if task == "kto" else [{k: v for k, v in row.items() if k != "label"} for row in rows]
    )


def lora(task: str) -> LoraConfig:
    return LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS" if task == "reward" else "CAUSAL_LM")


def train(folder, task: str, adapters: bool, **fields):
    row = TRL_TASKS[task]
    whole = fields.get("padding_free")
    usual = {
        **{"max_length": None if whole else TOKENS, "max_steps": 2, "use_cpu": True, "report_to": "none"},
        **{"save_strategy": "no", "disable_tqdm": True},
    }
    more = {"peft_config": lora(task)} if adapters else {}
    if row.reference and not adapters and not fields.get("precompute_ref_log_probs"):
        more["ref_model"] = llama()
    trainer = getattr(trl, row.trainer)(
        model=llama(LlamaForSequenceClassification, num_labels=1) if task == "reward" else llama(),
        args=row.config_class(str(folder), **usual | FIELDS | fields),
        train_dataset=data(task, fields.get("packing", False)),
        eval_dataset=data(task) if "eval_strategy" in fields else None,
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 16}
CASES = {
    **{"SFT, evaluated": ("sft", True, EVALUATED), "DPO, evaluated": ("dpo", True, EVALUATED)},
    **{"KTO, evaluated": ("kto", True, EVALUATED), "reward, evaluated": ("reward", True, EVALUATED)},
    **{"SFT": ("sft", False, {}), "SFT, packed": ("sft", False, {"packing": True})},
    **{"SFT, padding-free": ("sft", False, {"padding_free": True}), "SFT, LoRA": ("sft", True, {})},
    **{"DPO": ("dpo", False, {}), "DPO, LoRA": ("dpo", True, {})},
    "DPO, precomputed": ("dpo", False, {"precompute_ref_log_probs": True}),
    "DPO, checkpointed": ("dpo", True, {"activation_checkpointing": True}),
    **{"DPO, bf16": ("dpo", False, {"bf16": True}), "KTO": ("kto", False, {})},
    **{"KTO, precomputed": ("kto", False, {"precompute_ref_log_probs": True}), "KTO, LoRA": ("kto", True, {})},
    **{"reward": ("reward", False, {}), "reward, LoRA": ("reward", True, {})},
}


@pytest.mark.parametrize("case", [slow(case) for case in CASES])
def test_predicted_as_measured(case, tmp_path):
    task, adapters, fields = CASES[case]
    config = llama().config
    predicted = estimate(
        config, {**FIELDS, **fields}, TOKENS, "cpu", lora("dpo") if adapters else None, task=task
    ).peak_allocated_bytes
    gc.collect()
    measured = allocator_peak(lambda: train(tmp_path, task, adapters, **fields))
    assert predicted == pytest.approx(measured, rel=0.01)


def test_names_of_the_tasks_are_suggested():
    with pytest.raises(InputError, match=r"unknown task 'dpoo'\. Did you mean 'dpo'"):
        estimate(llama().config, FIELDS, TOKENS, "cpu", task="dpoo")


@pytest.mark.slow
def test_the_reference_counts_unless_adapters_or_precomputing_spare_it():
    config = llama().config
    weights = sum(weight.numel() * 4 for weight in llama().parameters())
    with_reference, precomputed, adapters = (
        estimate(config, {**FIELDS, **fields}, TOKENS, "cpu", peft, task="dpo").breakdown["parameters"]
        for fields, peft in (({}, None), ({"precompute_ref_log_probs": True}, None), ({}, lora("dpo")))
    )
    assert with_reference - precomputed == pytest.approx(weights, rel=0.01)
    assert adapters < 1.2 * weights


@pytest.mark.slow
def test_a_card_computes_the_head_without_copies_of_its_tiles():
    """Where there is Triton, a tile of 4,096 tokens × 32,768 words is held once, in 16 bits."""
    config = llama().config
    config.vocab_size = 32768
    fields = {**FIELDS, "bf16": True, "per_device_train_batch_size": 32}
    card, cpu = (estimate(config, fields, 128, device, task="sft") for device in ("a100_80gb", "cpu"))
    tile = 32 * 127 * 32768 * 2
    assert card.peak_allocated_bytes < cpu.peak_allocated_bytes - 2 * tile
    assert card.peak_allocated_bytes > tile


@pytest.mark.slow
def test_trls_own_offloading_leaves_the_inputs_of_layers_on_the_host():
    """16 inputs of layers and the last norm's: at the head, the norm's is being copied, and one is what flows."""
    config = LlamaConfig(
        **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "num_attention_heads": 4},
        vocab_size=1000,
    )
    settings = {"task": "sft", "dtype": "bfloat16", "peft_config": LoraConfig(target_modules=["q_proj"], r=4)}
    fields = {"per_device_train_batch_size": 8, "bf16": True, "activation_checkpointing": True}
    whole, left = (
        estimate(config, {**fields, "activation_offloading": on}, 1024, "a100_80gb", **settings)
        for on in (False, True)
    )
    inputs = 8 * 1024 * 256 * 2
    assert whole.phases["forward"] - left.phases["forward"] == 15 * inputs
    assert left.host_bytes - whole.host_bytes > 13 * inputs
    assert any("activation_offloading" in note for note in left.notes)


BAD = [
    ({"activation_offloading": True}, {"strategy": "zero3", "world_size": 2}, "weights that zero3 gathers.*or zero2"),
    ({"activation_offloading": True}, {"hardware": "cpu"}, "an accelerator with streams.*which CPU"),
    ({"loss_type": ["sigmoidal"]}, {}, "sigmoidal"),
    ({"loss_type": "sigmoidal"}, {}, "sigmoidal"),
    ({"packing": True}, {}, "unknown DPOConfig field 'packing'"),
    ({}, {"memory_args": MemoryArguments(loss_chunk_size=64)}, "loss_chunk_size goes without task=dpo"),
    ({}, {"packed": True}, "packed=true goes without task=dpo"),
    ({}, {"seq_len": 4}, "seq_len=4 must be at least 8"),
    ({"f_divergence_type": "forward_kl", "loss_type": ["bco_pair"]}, {}, "DPOTrainer: .*f_divergence_type"),
    ({}, {"strategy": "fsdp2", "world_size": 2}, "ref_model beside the trained model is not modelled.*precompute_ref"),
    ({}, {"strategy": "hsdp2", "world_size": 2}, "transformers shards the model"),
    ({"sync_ref_model": True, "precompute_ref_log_probs": True}, {}, "DPOTrainer: .*sync_ref_model"),
]


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("fields", "settings", "message"), BAD, ids=[case[2][:24] for case in BAD])
def test_what_cannot_run_is_refused_in_a_sentence(fields, settings, message):
    arguments = {"seq_len": TOKENS, "hardware": "a100_80gb", **settings}
    with pytest.raises(InputError, match=message) as error:
        estimate(llama().config, {**FIELDS, **fields}, task="dpo", **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task", [slow("sft"), slow("dpo"), slow("kto"), slow("reward")])
def test_the_command_line_estimates_a_task(task, command, tmp_path):
    llama().config.save_pretrained(tmp_path)
    words = ("estimate", tmp_path, "--hardware", "rtx_4090", "--task", task, "--seq-len", "64")
    code, output, _ = command(*words, "--set", "per_device_train_batch_size=2")
    said = " ".join(output.split())  # a long path moves the ends of lines
    assert code == 0 and f"{4 if task in ('dpo', 'reward') else 2} × 64 tokens" in said and "fits" in said


def test_a_text_has_the_tokens_of_its_words_and_an_end(subtests):
    for tokens in [2, 7]:
        with subtests.test(f"{tokens}"):
            assert _text(tokens).split() == [WORD] * (tokens - 1)
