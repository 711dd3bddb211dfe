"""TRL's trainers in a trace: its fused language-model head as it runs on Triton, and reference log-probabilities that
are computed before training, without their values.

From the source of trl 1.16 (`kernels/chunked_logprob.py`, `trainer/utils.add_fused_lm_head`); the kernels were not
measured on a GPU.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from hf_memopt.estimator.private_names import Part

_TRITON = Part.TRL.replaces(
    "trl.trainer.utils:_use_triton(device)",
    why="with Triton the head scores the tokens of completions alone",
)
_TILES = Part.TRL.replaces(
    "trl.kernels.chunked_logprob:_forward_tile(tile, tile_stride, targets)",
    "trl.kernels.chunked_logprob:_backward_tile(tile, tile_stride, targets)",
    "trl.kernels.chunked_logprob:_addmm_fp32(acc, a, b)",
    why="Triton's kernels allocate nothing, where their forms for CPUs copy each tile of logits",
)


@contextmanager
def counted_fused_head() -> Iterator[None]:
    """The head as on a device with Triton: it scores the completions' tokens alone, its kernels fold each tile of
    logits in registers and write their gradient over it, and cuBLAS adds 16-bit products into fp32 sums (addmm with
    out_dtype). On a CPU each of the three makes copies of a tile: 4,096 tokens × 32,768 words in fp32."""

    def fold(tile, *args, **kwargs) -> None:
        """Writes its statistics, and in backward the gradient, into tensors that it is given."""
        tile.zero_()

    def add_product(acc, a, b) -> None:
        acc.add_(0)

    with (
        _TRITON.replaced(_use_triton=lambda device: True),
        _TILES.replaced(_forward_tile=fold, _backward_tile=fold, _addmm_fp32=add_product),
    ):
        yield


_ADDED_HEAD = Part.TRL.replaces(
    "trl.trainer.utils:add_fused_lm_head(model)",
    why="DPO trainers of LLaMA-Factory and ms-swift compute all logits",
)


def whole_logits(tool: str) -> AbstractContextManager:
    """Have DPOTrainer put heads on models that compute all logits, as another tool's DPO trainer does.

    LLaMA-Factory's: commit ff6d4d1, train/dpo/trainer.py, concatenated_forward(), and get_batch_logps() beside it;
    ms-swift's: commit 3602360, swift/rlhf_trainers, concatenated_forward() and get_per_token_logps().

    Args:
        tool: one of WHOLE_LOGITS; nothing is replaced for others.
    """
    if tool not in WHOLE_LOGITS:
        return nullcontext()

    def add_head(model, *args, **kwargs) -> None:
        forward, log_probs = model.forward, WHOLE_LOGITS[tool]

        @functools.wraps(type(model).forward)
        def whole_forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
            from trl.trainer.utils import FusedCausalLMOutput

            if not fused_lm_head:
                return forward(*args, labels=labels, **kwargs)
            labels = labels[:, 1:]
            mask = labels != -100
            outputs = dict(forward(*args, **kwargs))  # from which the logits go, so that nothing else holds them
            logps, means = log_probs(outputs.pop("logits"), labels.clamp(min=0))
            unused = means.new_zeros(means.shape)
            logps = logps * mask
            return FusedCausalLMOutput(
                loss=-logps.sum(),
                log_probs=logps,
                entropy=unused,
                mean_logits=means,
                is_top1=unused,
                label_mask=mask,
                aux_loss=outputs.get("aux_loss"),
            )

        model.forward = types.MethodType(whole_forward, model)

    import trl.trainer.dpo_trainer

    return _ADDED_HEAD.replaced([trl.trainer.dpo_trainer], add_fused_lm_head=add_head)


class _Kept(torch.autograd.Function):
    """Zeros, one a token, that keep the logits as long as they are there: LLaMA-Factory's outputs have them for
    metrics, through the reference's forward."""

    @staticmethod
    def forward(ctx, logits):
        ctx.logits = logits
        return logits.new_zeros(logits.shape[:-1])

    @staticmethod
    def backward(ctx, gradient):
        return None


def _log_softmax(logits, labels):
    logits = logits.float()
    return logits[:, :-1].log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2), _Kept.apply(logits)[:, :-1]


def _selective(logits, labels):
    from trl.trainer.utils import selective_log_softmax  # which ms-swift calls, too; on a CPU without its kernel

    if torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()  # as accelerate converts a model's outputs
    labels = torch.nn.functional.pad(labels, (0, 1))  # ms-swift shifts labels, not logits
    return selective_log_softmax(logits, labels)[:, :-1], logits.mean(-1)[:, :-1]


WHOLE_LOGITS = {"LLaMA-Factory": _log_softmax, "ms-swift": _selective}


_DPO = Part.TRL.replaces(
    "trl.trainer.dpo_trainer:DPOTrainer._precompute_ref_logps(self, dataset, name, batch_size)",
    why="runs the reference model when the trainer is made, for values",
)
_KTO = Part.TRL.replaces(
    "trl.trainer.kto_trainer:KTOTrainer._precompute_ref_logps(self, dataset, name, batch_size)",
    why="runs the reference model when the trainer is made, for values",
)
_HASH = Part.TRL.replaces(
    "trl.trainer.utils:hash_module(module)",
    why="the cache of precomputed log-probabilities is named after the weights' values",
)


@contextmanager
def without_precomputing() -> Iterator[None]:
    """Trainers that compute the reference's log-probabilities when they are made get columns of zeros.

    The pass over the data takes less than a step: the same sequences, without gradients. Its result is cached under a
    hash of the weights, which have no values here.
    """

    def pairs(self, dataset, name, batch_size):
        return _with_zeros(dataset, ("ref_chosen_logps", "ref_rejected_logps"))

    def answers(self, dataset, name, batch_size):
        return _with_zeros(dataset, ("ref_logps", *(("ref_KL_logps",) if self.calculate_KL else ())))

    import trl.trainer.dpo_trainer
    import trl.trainer.kto_trainer

    with (
        _HASH.replaced([trl.trainer.dpo_trainer, trl.trainer.kto_trainer], hash_module=lambda weights: ""),
        _DPO.replaced(_precompute_ref_logps=pairs),
        _KTO.replaced(_precompute_ref_logps=answers),
    ):
        yield


_ENGINE = Part.ROLLOUTS.replaces(
    "trl.generation.vllm_generation:VLLMGeneration._init_vllm(self)",
    why="starts an engine, whose memory is counted by arithmetic",
)
_REFERENCE = Part.ROLLOUTS.replaces(
    "trl.trainer.utils:create_model_from_path(model_id)",
    why="loads the reference model by the name of the policy",
    until="TRL's trainers that generate take a reference model",
)


@contextmanager
def without_engine(
    make_reference: Callable | None = None, mode: AbstractContextManager | None = None
) -> Iterator[None]:
    """Trainers that generate start no engine of vLLM, which need not be installed.

    Args:
        make_reference: makes the reference model, which TRL would load by the policy's name.
        mode: the fake tensor mode in which it does.
    """
    import trl.trainer.grpo_trainer
    import trl.trainer.rloo_trainer

    settings = {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def start(self):
        self.vllm_client = types.SimpleNamespace(get_server_info=lambda: settings)

    def load(*args, **kwargs):
        with mode:
            return make_reference()

    importers = [trl.trainer.grpo_trainer, trl.trainer.rloo_trainer] if make_reference else []
    with _ENGINE.replaced(_init_vllm=start), _REFERENCE.replaced(importers, create_model_from_path=load):
        yield


def _with_zeros(dataset, names: tuple[str, ...]):
    for name in names:
        dataset = dataset.add_column(name, [0.0] * len(dataset))
    return dataset
