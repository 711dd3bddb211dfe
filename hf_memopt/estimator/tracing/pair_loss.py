"""The loss that embedding models are trained with: the other pairs of a micro-batch are negatives.

It computes what sentence-transformers 6.2 does in MultipleNegativesRankingLoss, with mean pooling of an encoder and
the last token of a decoder; other losses of pairs differ by tensors of a number per text and feature.
"""

import torch
import torch.nn.functional as F

from hf_memopt.errors import InputError
from hf_memopt.estimator.tracing.tasks import EMBEDDINGS, TASKS

_SCALE = 20.0  # of cosines


class PairLoss:
    """forward() of a model without a head whose samples are pairs: input_ids are (pairs, 2, tokens)."""

    def forward(self, input_ids, attention_mask=None, return_loss=True, **kwargs):
        masks = (None, None) if attention_mask is None else attention_mask.unbind(1)
        queries, passages = (self._embed(ids, mask) for ids, mask in zip(input_ids.unbind(1), masks, strict=True))
        scores = _SCALE * F.normalize(queries, dim=-1) @ F.normalize(passages, dim=-1).T
        return {"loss": F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))}

    def _embed(self, ids, mask):
        tokens = getattr(super().forward(input_ids=ids, attention_mask=mask), "last_hidden_state", None)
        if tokens is None:
            raise InputError(f"task={EMBEDDINGS}: {type(self).__name__} gives no features of tokens for a text")
        if not self.is_encoder:
            return tokens[:, -1]
        kept = (torch.ones_like(ids) if mask is None else mask).unsqueeze(-1).expand(tokens.size()).to(tokens.dtype)
        return (tokens * kept).sum(1) / kept.sum(1).clamp(min=1e-9)


def with_pair_loss(model):
    """The model, trained with PairLoss."""
    own = {"is_encoder": TASKS["masked-lm"].model_class(model.config) is not None}
    model.__class__ = type(type(model).__name__, (PairLoss, type(model)), own)
    return model
