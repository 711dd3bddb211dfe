"""Packed rows of text: whether a model keeps the samples of a row apart, asked of the model before its first step."""

import inspect
import logging
from dataclasses import replace

import torch

from hf_memopt.compatibility import resolve_engine
from hf_memopt.errors import InputError
from hf_memopt.hardware.attention import flash_attention, resolve_attention
from hf_memopt.levers.language_model import has_no_values, inner_model
from hf_memopt.recipe.job import Job

logger = logging.getLogger(__name__)
_SAMPLE = 8  # tokens of each of the two samples that are asked about
# Largest change of a sample's logits, by their largest, that counts as rounding. Rows have the same shape, so that in
# fp32 there is none but that of routed experts, which group other tokens; half precision is far coarser.
_ROUNDING, _HALF_ROUNDING = 1e-4, 2e-2


def choose_attention(job: Job) -> None:
    """Attention that keeps packed samples apart in a micro-batch of several rows.

    transformers' flash attention takes positions that start again for a new sample in a single row only (5.23,
    modeling_flash_attention_utils._is_packed_sequence); in more it would silently attend to the samples before.

    Raises:
        InputError: flash attention was asked for with several rows.
    """
    rows = max(job.args.per_device_train_batch_size, job.args.per_device_eval_batch_size)
    asked = job.recipe.attn_implementation
    chosen = resolve_attention(job.preset.hardware, asked)
    if rows == 1 or flash_attention(chosen) is None:
        return
    alone = "per_device_train_batch_size=1 and per_device_eval_batch_size=1"
    if asked:
        raise InputError(
            f"packing: attn_implementation={asked} keeps samples apart in micro-batches of one row only: set {alone}, "
            "or attn_implementation=sdpa"
        )
    logger.warning("attention: sdpa, since %s keeps packed samples apart only with %s", chosen, alone)
    job.recipe = replace(job.recipe, attn_implementation="sdpa")


def keep_samples_apart(trainer) -> None:
    """Turn the KV cache off, and refuse a model in which a packed sample depends on the one before it.

    Beside a cache transformers takes no packed positions (5.23, masking_utils._preprocess_mask_arguments), and the
    Trainer turns it off in the outer configuration only. Models that shard are taken on trust: their weights are
    gathered by engines that have not started yet.

    Raises:
        InputError: names the model type.
    """
    model = inner_model(trainer.model)
    model.config.get_text_config().use_cache = False
    if resolve_engine(trainer.args).shards:
        return
    kind = model.config.model_type
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise InputError(f"packing: {kind} takes no position_ids, which keep the samples of a row apart; leave it out")
    rows = min(2, trainer.args.per_device_train_batch_size)
    with trainer.compute_loss_context_manager():
        leaks = getattr(model, "_is_stateful", False) or _depends_on_the_sample_before(trainer.model, rows)
    if leaks:
        raise InputError(f"packing: {kind} would carry one sample of a row over into the next; leave it out")


@torch.no_grad()
def _depends_on_the_sample_before(model, rows: int) -> bool:
    """Whether a sample's logits change with the sample in front of it."""
    device = model.get_input_embeddings().weight.device
    device = next(model.parameters()).device if device.type == "meta" else device
    last = torch.arange(2 * _SAMPLE, 3 * _SAMPLE)
    positions = torch.arange(_SAMPLE).repeat(2).expand(rows, -1).to(device)
    training = model.training
    model.eval()
    try:
        one, other = (
            model(input_ids=torch.cat([first, last]).expand(rows, -1).to(device), position_ids=positions).logits[
                :, _SAMPLE:
            ]
            for first in torch.arange(2 * _SAMPLE).view(2, -1)
        )
    finally:
        model.train(training)
    if has_no_values(one):
        return False
    rounding = _ROUNDING if one.dtype == torch.float32 and _computes_in_fp32(model) else _HALF_ROUNDING
    return bool((one - other).abs().max() > rounding * one.abs().max())


def _computes_in_fp32(model) -> bool:
    return not torch.is_autocast_enabled(next(model.parameters()).device.type) and all(
        weight.dtype in (torch.float32, torch.float64) for weight in model.parameters() if weight.is_floating_point()
    )
