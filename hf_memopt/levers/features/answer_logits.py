"""logits_to_keep (levers/answer_logits.py), logits of positions with labels alone, and reduce_eval_logits
(trainer/evaluation.py), predicted tokens instead of logits."""

from dataclasses import dataclass, field

from hf_memopt.levers.feature import Feature


@dataclass
class AnswerLogits(Feature):
    logits_to_keep: bool = field(
        default=False, metadata={"help": "Compute logits only where there are labels: for answers, not for prompts."}
    )

    @staticmethod
    def refused(on, facts):
        if not on.logits_to_keep:
            return
        if on.loss_chunk_size is not None:
            yield "loss_chunk_size already skips tokens without labels: leave logits_to_keep out"
        if facts.fields.get("label_smoothing_factor"):
            yield (
                "label_smoothing_factor needs all logits: leave logits_to_keep out and use loss_chunk_size, which "
                "supports it"
            )

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.logits_to_keep:
            from hf_memopt.levers.answer_logits import keep_answer_logits

            keep_answer_logits(model)


@dataclass
class EvalLogits(Feature):
    reduce_eval_logits: bool = field(
        default=False,
        metadata={
            "help": "During evaluation keep each token's argmax instead of its logits. compute_metrics must need "
            "nothing else."
        },
    )
