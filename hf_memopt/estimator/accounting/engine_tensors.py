"""The kinds of DeepSpeed's tensors, and which of them are in host memory."""

from collections.abc import Mapping

import torch

from hf_memopt.estimator.accounting.ledger import HOST, Ledger
from hf_memopt.estimator.private_names import Part, Use

# Attributes of DeepSpeed's optimizers (0.19, runtime/zero/stage_1_and_2.py, stage3.py) -> the kind of their tensors.
_KINDS = {
    "fp32_partitioned_groups_flat": "optimizer_states",
    "averaged_gradients": "gradients",
    "grad_partitions_flat_buffer": "gradients",
    "temp_grad_buffer_for_gpu_offload": "communication",
    "ipg_buckets": "communication",
}
# With an offloaded optimizer these are in host memory, too.
_STAGING = (
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "temp_grad_buffer_for_cpu_offload",
    "offload_gradient_dict",
)
_STAGES_1_AND_2 = Part.DEEPSPEED.relies_on(
    *(
        f"deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.{name}"
        for name in ("averaged_gradients", "ipg_buckets", "temp_grad_buffer_for_gpu_offload", *_STAGING)
    ),
    use=Use.INSTANCE,
    why="says which of the engine's tensors are weights, states, gradients and staging buffers",
)
_STAGE_3 = Part.DEEPSPEED.relies_on(
    *(
        f"deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.{name}"
        for name in (
            "fp32_partitioned_groups_flat",
            "averaged_gradients",
            "grad_partitions_flat_buffer",
            "ipg_buckets",
            "optimizer_swapper",
        )
    ),
    use=Use.INSTANCE,
    why="says which of the engine's tensors are weights, states, gradients and buffers of communication",
)


def follow_engine(engine, ledger: Ledger) -> None:
    """Tell the ledger what DeepSpeed's engine holds and where, now and around every optimizer step."""
    on_host = _offloaded(engine)
    # Buffers between optimizer states and a disk: overheads.optimizer_buffers counts them at the model's own depth.
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    for buffer in tensors_in(swapper.swap_buffer_manager.all_buffers if swapper else None):
        ledger.forget(buffer)
    _classify(engine, on_host, ledger)
    if on_host:  # until now what is in host memory counted on the device
        ledger.restart()
    step = engine.step

    def step_and_classify(*args, **kwargs):
        _classify(engine, on_host, ledger)
        ledger.begin("optimizer", HOST if "optimizer_states" in on_host else "workspace")
        out = step(*args, **kwargs)
        _classify(engine, on_host, ledger)
        ledger.begin("between", "other")
        return out

    engine.step = step_and_classify


def _classify(engine, on_host: set[str], ledger: Ledger) -> None:
    def classify(held, kind: str) -> None:
        for tensor in tensors_in(held):
            ledger.classify(tensor, HOST if kind in on_host else kind)
            if tensor.grad is not None and kind == "optimizer_states":  # gradients of the fp32 master weights
                ledger.classify(tensor.grad, HOST if kind in on_host else "gradients")

    zero = engine.optimizer
    for name, kind in _KINDS.items():
        classify(getattr(zero, name, None), kind)
    for weight in engine.module.parameters():  # views of the flat tensors of their groups
        classify(getattr(weight, "ds_tensor", weight.data), "parameters")
    inner = getattr(zero, "optimizer", None)
    # Those of stage 3 are empty between steps.
    classify([group["params"] for group in getattr(inner, "param_groups", ())], "optimizer_states")
    classify(getattr(inner, "state", None), "optimizer_states")
    if "optimizer_states" in on_host:
        for tensor in tensors_in([getattr(zero, name, None) for name in _STAGING]):
            ledger.classify(tensor, HOST)


def _offloaded(engine) -> set[str]:
    """Kinds of memory that the engine keeps in host memory."""
    zero = engine._config.zero_config
    kinds = set()
    if zero.offload_optimizer and zero.offload_optimizer.device != "none":
        kinds |= {"optimizer_states"} | ({"gradients"} if zero.stage == 3 else set())
    if zero.offload_param and zero.offload_param.device != "none":
        kinds |= {"parameters"}
    return kinds


def tensors_in(held):
    """Every tensor in nested lists, dicts (a BatchEncoding, too) and DeepSpeed's buckets."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, Mapping):
        for part in held.values():
            yield from tensors_in(part)
    elif isinstance(held, list | tuple):
        for part in held:
            yield from tensors_in(part)
    elif hasattr(held, "buffer"):
        yield from tensors_in(held.buffer)
