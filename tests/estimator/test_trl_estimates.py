"""TRL's trainers, estimated and really trained: the same peak, and the trainer stays as it was."""

import gc
import random

import pytest
import torch
import trl
from conftest import slow
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import estimate_trainer

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

VOCABULARY = 2000


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def llama(kind=LlamaForCausalLM, **fields):
    """Eight layers, of which the trace makes fewer."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        **fields,
    )
    return kind(config)


def reward_model():
    return llama(LlamaForSequenceClassification, num_labels=1)


def rows(**lengths) -> Dataset:
    """Sixteen rows of as many words as each column says."""
    generator = random.Random(0)

    def words(count):
        return " ".join(f"w{generator.randrange(3, VOCABULARY)}" for _ in range(count))

    return Dataset.from_list([{name: words(count) for name, count in lengths.items()} for _ in range(16)])


def texts():
    return rows(text=100)


def pairs():
    return rows(prompt=20, chosen=60, rejected=60)


def rated():
    return rows(prompt=20, completion=60).add_column("label", [True, False] * 8)


def lora():
    return LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def score_lora():
    return LoraConfig(r=8, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"])


SFT, DPO, KTO = (
    (trl.SFTTrainer, trl.SFTConfig, texts, llama),
    (trl.DPOTrainer, trl.DPOConfig, pairs, llama),
    (trl.KTOTrainer, trl.KTOConfig, rated, llama),
)
REWARD = (trl.RewardTrainer, trl.RewardConfig, pairs, reward_model)
REFERENCE, LORA = {"ref_model": llama}, {"peft_config": lora}
CASES = {
    **{"SFT": (*SFT, {}, {}), "SFT, packed": (*SFT, {"packing": True, "max_length": 101}, {})},
    "SFT, padding-free": (*SFT, {"padding_free": True, "max_length": None}, {}),
    "SFT, completions": (*SFT[:2], lambda: rows(prompt=40, completion=60), llama, {}, {}),
    **{"SFT, dft": (*SFT, {"loss_type": "dft"}, {}), "SFT, LoRA": (*SFT, {}, LORA)},
    "SFT, NEFTune and label smoothing": (*SFT, {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1}, {}),
    **{"DPO": (*DPO, {}, REFERENCE), "DPO, LoRA": (*DPO, {}, LORA)},
    "DPO, precomputed": (*DPO, {"precompute_ref_log_probs": True}, {}),
    "DPO, weighted": (*DPO, {"use_weighting": True}, REFERENCE),
    "DPO, two losses": (*DPO, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, REFERENCE),
    **{"DPO, checkpointed": (*DPO, {"activation_checkpointing": True}, REFERENCE), "KTO": (*KTO, {}, REFERENCE)},
    **{"KTO, without KL": (*KTO, {"loss_type": "apo_zero_unpaired"}, REFERENCE), "KTO, LoRA": (*KTO, {}, LORA)},
    **{"reward": (*REWARD, {}, {}), "reward, LoRA": (*REWARD, {}, {"peft_config": score_lora})},
}


def make(folder, case):
    kind, config, data, model, fields, more = CASES[case]
    usual = {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    fields = {"per_device_train_batch_size": 4, "activation_checkpointing": False, "disable_tqdm": True, **fields}
    return kind(
        model=model(),
        args=config(str(folder), **usual, **fields),
        train_dataset=data(),
        processing_class=tokenizer(),
        **{name: make() for name, make in more.items()},
    )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("case", ["SFT", "DPO", *(slow(case) for case in CASES if case not in ("SFT", "DPO"))])
def test_predicted_as_measured(case, tmp_path):
    predicted = estimate_trainer(make(tmp_path, case), "cpu").peak_allocated_bytes
    gc.collect()
    assert predicted == pytest.approx(allocator_peak(lambda: make(tmp_path, case).train()), rel=0.002)


@pytest.mark.slow
def test_weights_of_a_reference_model_are_counted(tmp_path):
    own = sum(weight.numel() * 4 for weight in llama().parameters())
    with_reference, precomputed = (
        estimate_trainer(make(tmp_path, case), "cpu").breakdown["parameters"] for case in ("DPO", "DPO, precomputed")
    )
    assert with_reference - precomputed == pytest.approx(own, rel=0.001)


@pytest.mark.slow
def test_on_a_gpu_the_head_is_fused_by_triton_kernels(tmp_path):
    """Of the logits there is one tile of labeled tokens × vocabulary in the model's dtype, in forward and in backward.
    (No GPU is here: the sizes are those of trl/kernels/chunked_logprob.py.)"""
    tokens, vocabulary = 256, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def peaks(labeled: int, hardware: str) -> dict[str, int]:
        model = llama().to(torch.bfloat16)
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
        labels = [-100] * (tokens - labeled) + [3] * labeled
        data = Dataset.from_list([{"input_ids": [3] * tokens, "labels": labels}] * 8)
        args = trl.SFTConfig(tmp_path, use_cpu=True, report_to="none", per_device_train_batch_size=4)
        trainer = trl.SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer())
        estimate = estimate_trainer(trainer, hardware)
        assert any("Triton" in note for note in estimate.notes) == (hardware != "cpu")
        return estimate.phases

    whole, half, on_cpu = peaks(tokens, "rtx_4090"), peaks(tokens // 2, "rtx_4090"), peaks(tokens, "cpu")
    tile = 4 * (tokens // 2) * vocabulary * 2
    for phase in ("forward", "backward"):
        assert whole[phase] - half[phase] == pytest.approx(tile, rel=0.1), phase
        assert on_cpu[phase] > whole[phase] + 4 * tile, "on a CPU every tile is copied in fp32, several times"
