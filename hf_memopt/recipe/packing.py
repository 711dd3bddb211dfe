"""Packed rows of text: whether a model keeps the samples of a row apart, asked of the model before its first step."""

import inspect

import torch

from hf_memopt.compatibility import resolve_engine
from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import has_no_values, inner_model

_SAMPLE = 8  # tokens of each of the two samples that are asked about
# Largest change of a sample's logits, by their largest, that counts as rounding. Rows have the same shape, so that in
# fp32 there is none but that of routed experts, which group other tokens; half precision is far coarser.
_ROUNDING, _HALF_ROUNDING = 1e-4, 2e-2


def keep_samples_apart(trainer) -> None:
    """Refuse an SFTTrainer whose packed samples depend on the one before them.

    Models that shard are taken on trust: their weights are gathered by engines that have not started yet.

    Raises:
        InputError: names the model type, or the strategy.
    """
    args, model = trainer.args, inner_model(trainer.model)
    if (args.packing or args.eval_packing) and args.packing_strategy == "wrapped":
        raise InputError(
            "packing_strategy=wrapped lets the samples of a row see each other: use bfd, or bfd_split, which drops no "
            "tokens of long samples"
        )
    if not trainer.padding_free:
        return
    kind = model.config.model_type
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise InputError(f"packing: {kind} takes no position_ids, which keep the samples of a row apart; leave it out")
    if not resolve_engine(args).plain:
        return
    with trainer.compute_loss_context_manager():
        leaks = getattr(model, "_is_stateful", False) or _depends_on_the_sample_before(trainer)
    if leaks:
        raise InputError(f"packing: {kind} would carry one sample of a row over into the next; leave it out")


@torch.no_grad()
def _depends_on_the_sample_before(trainer) -> bool:
    """True if a sample's logits change with the sample in front of it, in a batch as the collator makes it."""
    model, training = trainer.model, trainer.model.training
    device = model.get_input_embeddings().weight.device
    device = next(model.parameters()).device if device.type == "meta" else device
    tokens = torch.arange(3 * _SAMPLE).view(3, -1).tolist()

    def logits(first: list[int]):
        batch = trainer.data_collator([{"input_ids": first}, {"input_ids": tokens[2]}])
        batch = {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}
        del batch["labels"]
        return model(**batch, use_cache=False).logits[:, _SAMPLE:]  # as SFTTrainer.compute_loss of TRL 1.16 calls it

    model.eval()
    try:
        left, right = logits(tokens[0]), logits(tokens[1])
    finally:
        model.train(training)
    if has_no_values(left):
        return False
    rounding = _ROUNDING if left.dtype == torch.float32 and _computes_in_fp32(model) else _HALF_ROUNDING
    return bool((left - right).abs().max() > rounding * left.abs().max())


def _computes_in_fp32(model) -> bool:
    return not torch.is_autocast_enabled(next(model.parameters()).device.type) and all(
        weight.dtype in (torch.float32, torch.float64) for weight in model.parameters() if weight.is_floating_point()
    )
