"""What a method takes at least, known without a trace: methods that are far too large are not searched."""

import torch

from hf_memopt.estimator.tracing.model import count_weights, resolve_dtype
from hf_memopt.estimator.tracing.quantization import is_quantized
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.estimator.trl_tasks import model_task
from hf_memopt.job.spec import JobSpec


def weights_alone(spec: JobSpec) -> tuple[int, str] | None:
    """Bytes of the weights, and of the gradients where every weight has one, and which of them these are.

    Returns:
        None where the device need not hold them all (sharded, offloaded, streamed), or where a checkpoint's own
        quantization says how large they are.
    """
    preset, config = spec.preset, spec.config
    streams = spec.memory_args.weight_streaming
    if preset.processes > 1 or streams or is_quantized(config) or "deepspeed" in spec.training:
        return None
    task = model_task(spec.task or infer_task(config))
    if preset.method == "qlora":
        return count_weights(config, task) // 2, "weights in 4 bits"
    dtype = resolve_dtype(config, preset.dtype)
    size = count_weights(config, task) * getattr(torch, dtype).itemsize
    # A user's own optimizer may free a layer's gradients before the next layer has its own.
    if preset.method == "full" and "optim" not in spec.training and not spec.frozen:
        return 2 * size, f"{dtype} weights and gradients"
    return size, f"{dtype} weights"
