"""The estimator against published measurements on GPUs: python benchmarks/estimator_published.py [ID …]

data/published_peaks.json holds 136 rows, each with its source: peaks that others measured and published. Nothing here
was measured by this project. Tier A are Hugging Face's own kernels, as the estimator traces them; tier B ran other
kernels (a fused loss, another implementation of the model), which it does not know: there it should be above.
"""

import functools
import json
import sys
import tomllib
from pathlib import Path
from unittest import mock

from jobs import CHECKPOINTED, four_bits, lora
from record import record
from rich.progress import track

DATA = Path(__file__).parent / "data" / "published_peaks.json"
NAMES = tomllib.loads(DATA.with_name("published_names.toml").read_text())


def config_of(row: dict):
    from transformers import AutoConfig

    arch = row["arch"]
    family = next(kind for start, kind in NAMES["same_shape"].items() if row["model"].startswith(start))
    if arch.get("experts"):
        family = "mixtral"
    if family == "gpt_bigcode":
        sizes = {"n_embd": arch["hidden"], "n_inner": arch["intermediate"], "n_positions": arch["max_pos"]}
        sizes |= {"n_layer": arch["layers"], "n_head": arch["heads"], "vocab_size": arch["vocab"]}
        return AutoConfig.for_model(family, **sizes, multi_query=True)
    more = {"num_local_experts": arch["experts"], "num_experts_per_tok": arch["top_k"]} if "experts" in arch else {}
    more |= {"num_key_value_heads": arch["kv_heads"]} if family not in ("bert", "gpt_neox") else {}
    more |= {"pad_token_id": 0} if family == "phi3" else {}
    more |= {"head_dim": arch["head_dim"]} if "head_dim" in arch else {}
    more |= {"new_decoder_architecture": False, "multi_query": True} if family == "falcon" else {}
    more |= {"architectures": ["BertForSequenceClassification"]} if family == "bert" else {}
    return AutoConfig.for_model(
        family,
        hidden_size=arch["hidden"],
        num_hidden_layers=arch["layers"],
        num_attention_heads=arch["heads"],
        vocab_size=arch["vocab"],
        intermediate_size=arch["intermediate"],
        tie_word_embeddings=arch["tied"],
        max_position_embeddings=512 if family == "bert" else 32768,
        **more,
    )


def lora_of(row: dict, family: str):
    settings = row["lora"]
    if not settings:
        return None
    known = NAMES["targets"]
    names = known.get(family, known["fused" if family in ("falcon", "gpt_neox") else "llama"])
    names = dict(zip(known["litgpt"], map(str.split, names), strict=True))
    targets = [name for target in settings["targets"] for name in names.get(target, [target])]
    more = {"lora_alpha": settings["alpha"], "lora_dropout": settings["dropout"]}
    return lora(settings["r"], target_modules=targets, **more)


def quantization_of(row: dict):
    if not row["quant"]:
        return None
    storage = {"bnb_4bit_quant_storage": "bfloat16"} if "quant_storage" in row["quant"] else {}
    return four_bits("double" in row["quant"], **storage)


def loss_of_then(row: dict):
    """The loss as transformers 4.48 computed it, which needed more than today's.

    It made a contiguous copy of the shifted logits, in fp32; GPT-BigCode's own loss left them in the model's type.
    """
    import torch
    from transformers.loss import loss_utils

    def loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
        if row["model"].startswith("bigcode"):
            num_items_in_batch = None
        else:
            logits = logits.float()
        shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
        target = labels[..., 1:].contiguous().view(-1)
        if num_items_in_batch is None:
            return torch.nn.functional.cross_entropy(shifted, target)
        return torch.nn.functional.cross_entropy(shifted, target, reduction="sum") / num_items_in_batch

    then = {"ForCausalLM": loss} if "transformers 4.48" in row["versions"] else {}
    return mock.patch.dict(loss_utils.LOSS_MAPPING, then)


def gradients_of_then(row: dict):
    """Gradients as torch before 2.0 kept them: zero_grad() set them to zero, where today's frees them."""
    from torch.optim import Optimizer

    now = Optimizer.zero_grad
    then = functools.partialmethod(now, set_to_none=False)
    return mock.patch.object(Optimizer, "zero_grad", then if "(Jan 2022)" in row["versions"] else now)


def experts_of_then(row: dict):
    """Mixtral's experts as transformers 4.48 had them: linear layers, which bitsandbytes packs, one after another.

    transformers 5 keeps all experts of a layer in one tensor, which stays in bf16: today these jobs need far more.
    """
    from torch import nn
    from transformers.models.mixtral import modeling_mixtral

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.top_k = config.num_experts_per_tok
            sizes = config.hidden_size, config.intermediate_size
            for name, (inner, outer) in {"w1": sizes, "w2": sizes[::-1], "w3": sizes}.items():
                layers = [nn.Linear(inner, outer, bias=False) for _ in range(config.num_local_experts)]
                setattr(self, name, nn.ModuleList(layers))

        def forward(self, hidden_states, top_k_index, top_k_weights):
            result = hidden_states.new_zeros(hidden_states.shape)
            for number, up in enumerate(self.w1):
                # An even share: which tokens an expert gets is not known to tensors without values.
                chosen = top_k_index.flatten()[: len(hidden_states) * self.top_k // len(self.w1)].clone()
                tokens = hidden_states[None, chosen].reshape(-1, hidden_states.shape[-1])
                inner = nn.functional.silu(up(tokens)) * self.w3[number](tokens)
                weighted = self.w2[number](inner) * top_k_weights.flatten()[: len(chosen), None]
                result.index_add_(0, chosen, weighted.to(hidden_states.dtype))
            return result

    block = modeling_mixtral.MixtralSparseMoeBlock
    now = block.__init__

    def then(self, config):
        now(self, config)
        self.experts = Experts(config)

    applies = "Mixtral" in row["model"] and "transformers 4.48" in row["versions"]
    return mock.patch.object(block, "__init__", then if applies else now)


def job_arguments(row: dict) -> dict:
    """The arguments of estimate() for a row."""
    config = config_of(row)
    dtype, optimizer = row["dtype"], row["optimizer"]
    upcast = "FSDP1 upcasts to fp32" in dtype and "gemma" not in row["model"]
    adamw = "adamw_8bit" if "8bit" in optimizer else "adamw_torch"
    fields = {
        "per_device_train_batch_size": row["micro_batch"],
        "gradient_accumulation_steps": row["grad_accum"] or 1,
        "optim": "adafactor" if optimizer == "adafactor" else adamw,
        "bf16": "autocast" in dtype or "--bf16" in dtype,
        "use_liger_kernel": row["fused_loss"].startswith("liger"),
        **(CHECKPOINTED if row["grad_checkpointing"] else {"activation_checkpointing": False}),
    }
    hardware = {"V100-SXM2-16GB": "v100_32gb", "A10G 24GB": "rtx_3090"}.get(row["gpu"], "a100_80gb")
    return {
        "model": config,
        "args": fields,
        "seq_len": row["seq_len"],
        "hardware": hardware,
        "peft_config": lora_of(row, config.model_type),
        "dtype": "float32" if dtype.startswith("fp32") or upcast else "bfloat16",
        "attn_implementation": None if "sdpa" in row["attention"] else row["attention"],
        "quantization_config": quantization_of(row),
        "world_size": row["n_gpus"],
        "strategy": "fsdp2" if row["n_gpus"] > 1 else None,
        "kbit_preparation": "prepare_model_for_kbit_training" in row["notes"] and row["n_gpus"] == 1,
    }


def predicted(row: dict):
    from hf_memopt.estimator import estimate

    with loss_of_then(row), experts_of_then(row), gradients_of_then(row):
        return estimate(**job_arguments(row))


def size_of(row: dict) -> int:
    """The predicted bytes of what the row measured."""
    found = predicted(row)
    if row["metric"].startswith("NVML"):  # of 2022, without expandable segments
        return found.reserved_bytes["segments"] + row["also"]["cuda_context_mib"] * 2**20
    return found.peak_allocated_bytes


def again(row: dict) -> dict:
    """What is predicted now."""
    return {"predicted_bytes": size_of(next(one for one in json.loads(DATA.read_text()) if one["id"] == row["id"]))}


def main(only: list[str]) -> None:
    rows = []
    chosen = [row for row in json.loads(DATA.read_text()) if not only or row["id"] in only]
    for row in track(chosen, description="published rows"):
        told = {name: row[name] for name in ("id", "tier", "model", "method", "micro_batch", "n_gpus", "source")}
        try:
            size = size_of(row)
        except Exception as failure:
            print(f"not traced: {row['id']}: {str(failure)[:150]}")
            continue
        error = round(size / row["peak_bytes"] - 1, 5)
        rows.append({**told, "predicted_bytes": size, "published_bytes": row["peak_bytes"], "error": error})
    for row in sorted(rows, key=lambda row: (row["tier"], row["method"], row["error"])):
        print(f"{row['error']:+8.2%}  {row['tier']} {row['method']:>5}  {row['id']}, {row['model']}")
    if not only:
        record("estimator_published", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
