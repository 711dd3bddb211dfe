"""TRL's trainers in a trace: its fused language-model head as it runs on Triton, and reference log-probabilities that
are computed before training, without their values.

From the source of trl 1.16 (`kernels/chunked_logprob.py`, `trainer/utils.add_fused_lm_head`); the kernels were not
measured on a GPU.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from hf_memopt.estimator.patches.replacement import all_replaced, replaced

_HEAD = "trl.kernels.chunked_logprob"


def counted_fused_head() -> AbstractContextManager:
    """The head as on a device with Triton: it scores the completions' tokens alone, its kernels fold each tile of
    logits in registers and write their gradient over it, and cuBLAS adds 16-bit products into fp32 sums (addmm with
    out_dtype). On a CPU each of the three makes copies of a tile: 4,096 tokens × 32,768 words in fp32."""

    def fold(tile, *args, **kwargs) -> None:
        """Writes its statistics, and in backward the gradient, into tensors that it is given."""
        tile.zero_()

    def add_product(acc, a, b) -> None:
        acc.add_(0)

    return all_replaced(
        {
            "trl.trainer.utils:_use_triton": lambda device: True,
            f"{_HEAD}:_forward_tile": fold,
            f"{_HEAD}:_backward_tile": fold,
            f"{_HEAD}:_addmm_fp32": add_product,
        }
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

    replacements = {
        "trl.trainer.dpo_trainer:DPOTrainer._precompute_ref_logps": pairs,
        "trl.trainer.kto_trainer:KTOTrainer._precompute_ref_logps": answers,
    }
    with contextlib.ExitStack() as stack:
        for module in (trl.trainer.dpo_trainer, trl.trainer.kto_trainer):
            stack.enter_context(replaced("trl.trainer.utils:hash_module", lambda weights: "", importer=module))
        stack.enter_context(all_replaced(replacements))
        yield


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

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced("trl.generation.vllm_generation:VLLMGeneration._init_vllm", start))
        for module in (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer) if make_reference else ():
            stack.enter_context(replaced("trl.trainer.utils:create_model_from_path", load, importer=module))
        yield


def _with_zeros(dataset, names: tuple[str, ...]):
    for name in names:
        dataset = dataset.add_column(name, [0.0] * len(dataset))
    return dataset
