"""loss_chunk_size (chunked_loss.py): logits and loss of a few tokens at a time."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.change import CHUNK, Change, chunk_tokens, micro_batch_tokens
from hf_memopt.levers.feature import Feature, Knob, liger_replaces


def _chunk_loss(job) -> dict[str, int] | None:
    if job.memory_args.loss_chunk_size is not None or not job.next_token:
        return None
    if job.seq_len is None:
        return {"loss_chunk_size": CHUNK}
    tokens = micro_batch_tokens(job)
    return {"loss_chunk_size": min(chunk_tokens(tokens), tokens // 2)} if tokens > CHUNK // 4 else None


LOSS_CHUNKS = Change(
    settings={"loss_chunk_size": CHUNK}, compute=_chunk_loss, effect="logits of so many tokens at once"
)


def _offered(spec, task: str, engine) -> bool:
    from hf_memopt.levers.language_model import predicts_next_token

    fixed = spec.memory_args.loss_chunk_size or spec.memory_args.logits_to_keep
    return not fixed and spec.seq_len > CHUNK // 4 and predicts_next_token(task, spec.config)


def _bytes(kinds, growing, sketch, choice) -> None:
    kinds["logits"] = kinds.get("logits", 0) * min(1, CHUNK / (choice.micro_batch * sketch.job.seq_len))


_PLANNED = Knob(
    name="loss_chunk_size", settings=LOSS_CHUNKS.settings, words="loss in chunks", offered=_offered, bytes=_bytes
)


@dataclass
class LossChunks(Feature):
    loss_chunk_size: int | None = field(
        default=None,
        metadata={"help": "Compute logits and loss for this many tokens at a time. The loss does not change."},
    )
    above_zero: ClassVar = ("loss_chunk_size",)
    proposed: ClassVar = LOSS_CHUNKS
    planned: ClassVar = (_PLANNED,)

    @staticmethod
    def refused(on, facts):
        if on.loss_chunk_size is None:
            return
        if liger_replaces(facts.fields, "fused_linear_cross_entropy", "cross_entropy"):
            yield "use_liger_kernel and loss_chunk_size both replace the loss: use one of them"
        if facts.engine.by_transformers:
            yield (
                "loss_chunk_size calls the head a second time, which crashes when transformers shards the model: "
                "leave it out, or use fsdp2 or zero3"
            )

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.loss_chunk_size is not None:
            from hf_memopt.levers.chunked_loss import chunk_loss

            chunk_loss(model, on.loss_chunk_size, label_smoothing)
