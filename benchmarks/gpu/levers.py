"""Part 5: what each lever saves and costs on a card: benchmarks/levers.py with a model that fills one."""

import sys

from benchmarks.gpu.case import ROOT, Case
from hf_memopt.contrib.calibration.processes import Skip

# Most valuable first. Liger is no lever of ours: what chunked losses are compared with.
ORDER = (
    "bf16, activation_compression=int8",
    "activation_offload, activation_checkpointing",
    "activation_checkpointing, transformers' own offload",
    "loss_chunk_size=128",
    "use_liger_kernel",
    "activation_offload",
    "activation_checkpointing (checkpoint_ratio=1)",
    "checkpoint_ratio=0.5",
    "bf16",
    "sparse_block_size=64",
    "optim=adamw_8bit",
    "optimizer_in_backward",
    "adam_mini",
)
REHEARSED = ORDER[3:4]


def cases(rehearse: bool) -> list[Case]:
    """The levers whose cost depends on the device."""
    return [
        Case("levers", name, 18 + 10 * number, rehearse=rehearse)
        for number, name in enumerate(REHEARSED if rehearse else ORDER)
    ]


def measure(case: Case) -> dict:
    """The lever's row: peak, step time and gradient beside the baseline's."""
    import importlib
    import importlib.util

    import torch
    from transformers import MistralConfig

    sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by their bare names
    bench = importlib.import_module("levers")
    if case.name == "use_liger_kernel":
        if importlib.util.find_spec("liger_kernel") is None:
            raise Skip("liger_kernel is not installed")
        bench.LEVERS[case.name] = ({"use_liger_kernel": True}, {})
    if not torch.cuda.is_available():
        bench.LENGTH, bench.VOCABULARY, bench.TURNS = 64, 500, 2
    else:
        bench.LENGTH, bench.VOCABULARY, bench.TURNS = 2048, 64_000, 15

        def config(name: str = "") -> MistralConfig:
            sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8}
            sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": bench.LENGTH}
            more = {"sliding_window": None, "tie_word_embeddings": False}
            attention = "eager" if name == bench.EAGER else "sdpa"
            return MistralConfig(vocab_size=bench.VOCABULARY, **sizes, **more, attn_implementation=attention)

        bench.config = config
    bench.held_out_loss = lambda name: 1.0  # measured on the CPU, where it is the same
    row = bench.row_of(case.name)
    row.pop("held_out_loss_ratio", None)
    return row
