"""Refusals of jobs before a trace: lengths beyond the model's positions, settings that cannot train."""

from dataclasses import replace

from hf_memopt.compatibility.setup import Setup, compile_mode, quant_storage, refusals
from hf_memopt.errors import InputError
from hf_memopt.estimator.tracing.model import has_table
from hf_memopt.estimator.tracing.tasks import TASKS
from hf_memopt.estimator.tracing.untraced_optimizers import check_traceable
from hf_memopt.hardware.attention_kernels import flash_attention
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.facts import Facts
from hf_memopt.levers.language_model import predicts_next_token
from hf_memopt.levers.refusals import WHOLE_SAMPLES


def count_positions(config) -> int | None:
    """Count the tokens that a model takes; of speech models, those of text. None: any number."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
    return positions if positions and positions > 0 else None  # XLNet has -1: as many as there are


def own_attention(config) -> str | None:
    """The attention that a configuration names; a name of levers.attention_pattern comes with its lever."""
    name = config._attn_implementation
    return name if flash_attention(name) or name in ("eager", "sdpa", "flex_attention") else None


def check_length(config, task: str, seq_len: int) -> None:
    """Refuse samples for which the model has no positions; rotary embeddings are computed for any.

    Raises:
        InputError: with the setting that gives it more.
    """
    positions = count_positions(config)
    if seq_len < 1:
        raise InputError(f"seq_len={seq_len} must be at least 1")
    text = config.get_text_config()
    if not positions or seq_len <= positions or getattr(text, "rope_parameters", None):
        return  # rotary embeddings are computed for any position
    if has_table(config, task, positions):  # a position beyond its end raises an IndexError
        field = (text.attribute_map or {}).get("max_position_embeddings", "max_position_embeddings")
        raise InputError(
            f"seq_len={seq_len} must be from 1 to the model's {positions} positions, which it has a table of; "
            f"`hf-memopt estimate … --set model.{field}={seq_len}` estimates it with a longer one"
        )


def facts_of(job) -> Facts:
    """The facts of a job on its own device."""
    fields, fewer = job.fields, job.video.halved() if job.video is not None else None
    setup = Setup(
        **job.engine.setup(),
        optim=str(fields.get("optim", "adamw_torch_fused")),
        device=job.device.backend,
        method=job.method,
        precision="bf16" if fields.get("bf16") else "fp16" if fields.get("fp16") else "fp32",
        dtype=job.dtype,
        quant_storage=quant_storage(job.quantization_config),
        activation_checkpointing=bool(fields.get("activation_checkpointing")),
        auto_find_batch_size=bool(fields.get("auto_find_batch_size")),
        accumulates=fields["gradient_accumulation_steps"] > 1,
        compile_mode=compile_mode(fields.get),
        replicated=job.mesh is not None and job.mesh.dp_replicate_size > 1,
    )
    return Facts(
        setup=setup,
        training=fields,
        memory_args=job.memory_args or MemoryArguments(),
        discrete_memory=job.device.discrete_memory,
        next_token=predicts_next_token(job.task, job.config),
        seq_len=job.seq_len,
        halved_frames=None if job.video is None else fewer.frames if fewer else 0,
        keeps_eval_logits=job.kept_batches > 1,
    )


def check_combination(job) -> None:
    """Refuse what the Trainer or compatibility would refuse before training: only jobs that can run are estimated."""
    if job.fields.get("bf16") and job.fields.get("fp16"):
        raise InputError("bf16 and fp16 exclude each other: set one of them")
    facts = facts_of(job)
    if job.memory_args is not None:
        facts.check_features()
    # The table's rows on sharding on a CPU are about how accelerate starts it: the job itself runs there over gloo.
    on_cpu = job.device.backend == "cpu"
    setup = replace(facts.setup, device="cuda") if on_cpu and job.engine.accelerator_only else facts.setup
    for refusal in refusals(setup):
        raise InputError(refusal)
    check_traceable(setup.optim, not on_cpu)


def check_shared(job) -> None:
    """Refuse jobs whose samples cannot be shared by processes, or of which a trace would not know how.

    Raises:
        InputError: what keeps samples whole, and what to do instead.
    """
    if job.shared == 1:
        return
    what = f"sequence_parallel={job.shared}"
    if job.world_size % job.shared:
        raise InputError(f"{what} does not divide the {job.world_size} processes")
    others = TASKS.keys() - {"causal-lm"}  # not a Trainer's own, whose batches show what they hold
    if job.task in others or job.video is not None or job.padded or job.packed:
        raise InputError(f"{what} is predicted for whole rows of text alone, without padding: leave it out")
    if job.shares_heads:
        if reason := ulysses_refusal(job.config, job.shared, job.seq_len, next(iter(job.attention), None)):
            raise InputError(f"{what}{reason}")
    else:
        _check_ring(job, what)
    levers = job.memory_args.levers() if job.memory_args is not None else {}
    # Ulysses shifts labels before it divides them, a ring's loss has to.
    if apart := {*WHOLE_SAMPLES, "sliding_window", *(["loss_chunk_size"] * (not job.shares_heads))} & levers.keys():
        raise InputError(f"{min(apart)} needs whole samples, which {what} divides: leave it out")


def _check_ring(job, what: str) -> None:
    """Refuse what accelerate's context parallelism cannot divide (accelerate 1.15, torch 2.13)."""
    if job.engine.fsdp_version != 2:
        raise InputError(
            f"{what} divides samples under DeepSpeed and FSDP2, and the strategy is {job.engine.label}: use zero1, "
            "zero2, zero3 or fsdp2"
        )
    if masked := layers_with_masks(job.config):
        kinds = ", ".join(sorted(masked))
        raise InputError(f"{what} under FSDP2 has causal attention alone, and the model has {kinds}")
    if set(job.attention) - {"sdpa"}:
        raise InputError(f"{what} under FSDP2 needs attn_implementation=sdpa, and it is {', '.join(job.attention)}")
    if job.seq_len % (2 * job.shared):
        raise InputError(
            f"{what} under FSDP2 divides samples of a multiple of {2 * job.shared} tokens: {job.seq_len} is none"
        )


def layers_with_masks(config) -> set[str]:
    """The kinds of a model's layers whose attention is not causal over all tokens."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is None:  # as of Mistral, whose window is that of every layer
        kinds = ["sliding_attention"] if getattr(text, "sliding_window", None) else []
    return set(kinds) - {"full_attention"}


def ulysses_refusal(config, devices: int, seq_len: int, attention: str | None) -> str | None:
    """The reason that DeepSpeed's Ulysses (0.19) cannot divide a model's samples, in words that follow the number of
    devices; None where it can.

    Args:
        attention: the `attn_implementation`; None where the model's own choice holds.
    """
    text, masked = config.get_text_config(), layers_with_masks(config)
    # What it reads of a configuration: GPT-2's has no heads of keys, Mixtral's says null for their size.
    read = (("num_key_value_heads", None), ("head_dim", 0))
    if lacking := [name for name, left_out in read if getattr(text, name, left_out) is None]:
        return f": Ulysses (deepspeed 0.19) reads {' and '.join(lacking)} of the configuration, which has none"
    if not divides_heads(config, devices):
        heads, keys = attention_heads(config)
        return f" does not divide the model's {heads} attention heads and {keys} of keys"
    if any("linear" in kind for kind in masked):
        return ": linear attention passes a state along the sample, which cannot be divided"
    if masked and (getattr(text, "sliding_window", None) or 0) < seq_len and not flash_attention(attention):
        return (
            f": Ulysses (deepspeed 0.19) drops the masks of {', '.join(sorted(masked))}: "
            "set attn_implementation=flash_attention_2, which needs none"
        )
    return None


def divides_heads(config, devices: int) -> bool:
    """True if so many devices can share a model's attention heads (deepspeed 0.19, UlyssesSPAttentionHF); where there
    are fewer heads of keys, several devices have the same one."""
    heads, keys = attention_heads(config)
    return heads % devices == 0 and 0 in (keys % devices, devices % keys)


def attention_heads(config) -> tuple[int, int]:
    """A model's attention heads of queries and of keys."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1
    return heads, getattr(text, "num_key_value_heads", None) or heads
