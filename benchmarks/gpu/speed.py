"""Part 2: tokens a second beside the planner's cost model, which promises ratios and no seconds."""

import dataclasses

from benchmarks.gpu.case import Case
from benchmarks.gpu.estimator import BF16, BOTH, OFFLOADED
from hf_memopt.contrib.calibration.training import Setting, train

MODEL = "qwen3-1.7b"
# One model, so that each is a ratio to the first.
SETTINGS = {
    "baseline, 4 × 2048": Setting("baseline", MODEL, BF16, micro=4, length=2048),
    "checkpointed, 4 × 2048": Setting("checkpointing", MODEL, BOTH, micro=4, length=2048),
    "half checkpointed, 4 × 2048": Setting(
        "checkpointing", MODEL, BF16, {"checkpoint_ratio": 0.5}, micro=4, length=2048
    ),
    "checkpointed, 16 × 2048": Setting("batch", MODEL, BOTH, micro=16, length=2048),
    "checkpointed, 1 × 2048": Setting("batch", MODEL, BOTH, micro=1, length=2048),
    "checkpointed, 1 × 16384": Setting("length", MODEL, BOTH, micro=1, length=16384),
    "compressed, 4 × 2048": Setting("lever", MODEL, BF16, {"activation_compression": "int8"}, micro=4, length=2048),
    "offloaded inputs, 4 × 2048": Setting("offload", MODEL, {**BF16, **OFFLOADED}, micro=4, length=2048),
    "offloaded, 4 × 2048": Setting("offload", MODEL, BF16, {"activation_offload": True}, micro=4, length=2048),
    "chunked loss, 4 × 2048": Setting("lever", MODEL, BF16, {"loss_chunk_size": 1024}, micro=4, length=2048),
    "8-bit AdamW, 4 × 2048": Setting("optimizer", MODEL, {**BF16, "optim": "adamw_8bit"}, micro=4, length=2048),
    "LoRA, 4 × 2048": Setting("LoRA", MODEL, BF16, method="lora", dtype="bfloat16", micro=4, length=2048),
    "QLoRA, 4 × 2048": Setting("QLoRA", MODEL, BF16, method="qlora", dtype="bfloat16", micro=4, length=2048),
}


def cases(rehearse: bool) -> list[Case]:
    """Every setting; of tiny ones a few, since they are the estimator's own but for their sizes."""
    found = []
    for number, (name, setting) in enumerate(SETTINGS.items()):
        setting = setting.rehearsed() if rehearse else setting
        found.append(Case("speed", name, 12 + 9 * number, dataclasses.asdict(setting), rehearse=rehearse))
    return found[:3] if rehearse else found


def measure(case: Case) -> dict:
    """Train it; the row has tokens_per_second."""
    return train(Setting(**case.settings))
