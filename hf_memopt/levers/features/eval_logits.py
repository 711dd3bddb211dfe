"""reduce_eval_logits (trainer/evaluation.py): predicted tokens instead of logits."""

from dataclasses import dataclass, field

from hf_memopt.levers.feature import Feature


@dataclass
class EvalLogits(Feature):
    reduce_eval_logits: bool = field(
        default=False,
        metadata={
            "help": "During evaluation keep each token's argmax instead of its logits. compute_metrics must need "
            "nothing else."
        },
    )
