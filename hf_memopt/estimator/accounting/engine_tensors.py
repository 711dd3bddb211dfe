"""Which of DeepSpeed's tensors are what, and which of them live on the host."""

import torch

from hf_memopt.estimator.accounting.ledger import HOST, Ledger

# Attributes of DeepSpeed's optimizers (runtime/zero/stage_1_and_2.py and stage3.py) and what they hold.
_HELD = {
    "bit16_groups_flat": "parameters",
    "fp16_partitioned_groups_flat": "parameters",
    "single_partition_of_fp32_groups": "optimizer_states",
    "fp32_partitioned_groups_flat": "optimizer_states",
    "averaged_gradients": "gradients",
    "grad_partitions_flat_buffer": "gradients",
    "temp_grad_buffer_for_gpu_offload": "communication",
    "ipg_buckets": "communication",
}
# Where the optimizer is offloaded, these are host memory too.
_STAGING = (
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "temp_grad_buffer_for_cpu_offload",
    "offload_gradient_dict",
)


def follow_engine(engine, ledger: Ledger) -> None:
    """Tell the ledger what DeepSpeed's engine holds, where, and when it steps."""
    on_host = _offloaded(engine)
    _leave_buffers_out(engine, ledger)
    _book(engine, on_host, ledger)
    if on_host:  # the start was booked on the device before it was known what lives on the host
        ledger.restart()
    step = engine.step

    def followed(*args, **kwargs):
        _book(engine, on_host, ledger)
        ledger.begin("optimizer", HOST if "optimizer_states" in on_host else "workspace")
        out = step(*args, **kwargs)
        _book(engine, on_host, ledger)
        ledger.begin("between", "other")
        return out

    engine.step = followed


def _leave_buffers_out(engine, ledger: Ledger) -> None:
    """Buffers between the optimizer and a disk are counted by swapping.optimizer_buffers, at the model's own depth."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    for buffer in tensors_in(swapper.swap_buffer_manager.all_buffers if swapper else None):
        ledger.forget(buffer)


def _book(engine, on_host: set[str], ledger: Ledger) -> None:
    def book(held, kind: str) -> None:
        for tensor in tensors_in(held):
            ledger.classify(tensor, HOST if kind in on_host else kind)
            if tensor.grad is not None and kind == "optimizer_states":  # the master weights' gradients
                ledger.classify(tensor.grad, HOST if kind in on_host else "gradients")

    zero = engine.optimizer
    for name, kind in _HELD.items():
        book(getattr(zero, name, None), kind)
    for weight in engine.module.parameters():
        book(getattr(weight, "ds_tensor", None), "parameters")
    for states in getattr(getattr(zero, "optimizer", None), "state", {}).values():
        book(states, "optimizer_states")
    if "optimizer_states" in on_host:
        for name in _STAGING:
            for tensor in tensors_in(getattr(zero, name, None)):
                ledger.classify(tensor, HOST)


def _offloaded(engine) -> set[str]:
    """Kinds of memory that the engine keeps on the host."""
    zero = engine._config.zero_config
    kinds = set()
    if zero.offload_optimizer and zero.offload_optimizer.device != "none":
        kinds |= {"optimizer_states"} | ({"gradients"} if zero.stage == 3 else set())
    if zero.offload_param and zero.offload_param.device != "none":
        kinds |= {"parameters"}
    return kinds


def tensors_in(held):
    """Every tensor in a nest of lists, dicts and DeepSpeed's buckets."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict):
        for part in held.values():
            yield from tensors_in(part)
    elif isinstance(held, list | tuple):
        for part in held:
            yield from tensors_in(part)
    elif hasattr(held, "buffer"):
        yield from tensors_in(held.buffer)
