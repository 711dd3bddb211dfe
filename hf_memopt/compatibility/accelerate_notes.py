"""What a valid accelerate YAML does otherwise than it looks."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from hf_memopt.compatibility.asked_accelerate import Answer
from hf_memopt.findings import Effect, Finding
from hf_memopt.packages import how_to_install, is_installed

FSDP_ON_CPU = "accelerate starts no FSDP on a CPU, and trains under DDP without saying so"
# `accelerate config` writes these (commands.config.cluster), and the launcher passes them on under names that nobody
# reads: as written -> as accelerate.utils.dataclasses reads them (1.15).
MISNAMED = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}
# FullyShardedDataParallelPlugin looks for these in the environment for version 1 alone (accelerate 1.15).
_VERSION_1 = ("sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states", "forward_prefetch")
_ENGINES = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}

Notes = Iterator[tuple[tuple[str, ...], str]]


def notes(content: Mapping[str, Any], answer: Answer) -> Iterator[Finding]:
    """What there is to note of a content and of accelerate's answer to it."""
    engine = content.get("distributed_type")
    blocks = {name: block for name, block in content.items() if isinstance(block, Mapping) and block}
    found = [_of_blocks(engine, blocks), _of_processes(content), _of_fp8(content, blocks.get("fp8_config", {}))]
    if engine == "FSDP":
        found.append(_of_fsdp(blocks.get("fsdp_config", {}), content.get("use_cpu")))
    if engine == "DEEPSPEED" and "deepspeed_config_file" not in blocks.get("deepspeed_config", {}):
        found.append(_of_deepspeed(blocks.get("deepspeed_config", {})))
    if answer.missing:
        found.append(iter([((), f"on this machine: {answer.missing}")]))
    for keys, text in chain(*found):
        yield Finding(keys, text, Effect.NOTED)


def _of_blocks(engine: Any, blocks: Mapping[str, Any]) -> Notes:
    for name, kind in _ENGINES.items():
        if name in blocks and engine != kind:
            yield (name,), f"{name} is not read under distributed_type={engine}: set {kind}, or remove it"


def _of_fsdp(block: Mapping[str, Any], use_cpu: Any) -> Notes:
    import torch

    names = {str(name).removeprefix("fsdp_"): name for name in block}
    version = str(block.get(names.get("version"), 1))
    if version == "2" and (unread := [names[name] for name in _VERSION_1 if name in names]):
        are = "are version 1's, which version 2 does" if unread[1:] else "is version 1's, which version 2 does"
        instead = ": fsdp_reshard_after_forward decides instead" if "sharding_strategy" in names else ""
        yield ("fsdp_config", unread[0]), f"{' and '.join(unread)} {are} not read{instead}"
    if version == "1" and (name := names.get("reshard_after_forward")):
        yield ("fsdp_config", name), f"{name} is version 2's: version 1 reads fsdp_sharding_strategy instead"
    if not torch.accelerator.is_available() and use_cpu is not True:
        yield (), f"on this machine, which has no accelerator, {FSDP_ON_CPU}"


def _of_processes(content: Mapping[str, Any]) -> Notes:
    processes, machines = content.get("num_processes"), content.get("num_machines", 1)
    engine, keys = content.get("distributed_type"), ("num_processes",)
    if engine != "NO" and processes is None and content.get("compute_environment") != "AMAZON_SAGEMAKER":
        yield (), "num_processes is missing: accelerate launch needs --num_processes beside this file"
    if type(processes) is not int or type(machines) is not int:
        return
    if engine == "NO" and processes > 1:
        yield keys, f"num_processes={processes}, and distributed_type='NO' starts one process: set MULTI_GPU"
    if machines > 1 and processes % machines:
        each = processes // machines
        text = f"num_processes={processes} is no multiple of num_machines={machines}: accelerate starts"
        yield keys, f"{text} {each} on each, {each * machines} in all"
    if machines > 1 and not content.get("main_process_ip") and engine not in ("NO", "XLA"):
        text = f"num_machines={machines} without main_process_ip: accelerate launch needs --main_process_ip"
        yield ("num_machines",), f"{text} beside this file"


def _of_deepspeed(block: Mapping[str, Any]) -> Notes:
    if not block:
        text = "distributed_type=DEEPSPEED without deepspeed_config: accelerate runs ZeRO-2 without offload"
        yield ("distributed_type",), text
    stage = block.get("zero_stage", 2)
    for name in ("offload_param_device", "zero3_init_flag", "zero3_save_16bit_model"):
        if stage != 3 and block.get(name) not in (None, False, "none"):
            yield ("deepspeed_config", name), f"{name}={block[name]} acts at zero_stage 3 alone, and it is {stage}"
    for name in ("offload_optimizer", "offload_param"):
        if block.get(f"{name}_device") == "nvme":  # commands.launch knows the path, utils.launch does not pass it on
            text = (
                f"accelerate's launcher passes no {name}_nvme_path on, and DeepSpeed writes into a folder named none"
            )
            yield ("deepspeed_config", f"{name}_device"), f"{text}: write a JSON, and name it as deepspeed_config_file"
    if not is_installed("deepspeed"):
        yield (), f"DeepSpeed is not installed here, so its own check was left out: {how_to_install('deepspeed')}"


def _of_fp8(content: Mapping[str, Any], block: Mapping[str, Any]) -> Notes:
    if misnamed := [name for name in block if str(name).removeprefix("fp8_") in MISNAMED]:
        read = " and ".join(MISNAMED[name.removeprefix("fp8_")] for name in misnamed)
        text = f"accelerate config writes {' and '.join(misnamed)} in fp8_config, and accelerate reads {read}: rename"
        yield ("fp8_config", misnamed[0]), text
    if str(content.get("mixed_precision")).lower() == "fp8" and not block:
        text = "mixed_precision=fp8 without fp8_config: accelerate takes the first that is installed of torchao"
        yield ("mixed_precision",), f"{text}, transformer-engine and MS-AMP"
