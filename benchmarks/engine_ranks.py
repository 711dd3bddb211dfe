"""Real processes of an engine over gloo, forked from one that has imported everything: a case for each line of input.

python benchmarks/engine_ranks.py FOLDER < cases

A case is JSON: "name"; "strategy", as estimate() takes it; "world_size"; "fields" of TrainingArguments; "seq_len"; and
"model", a folder to load the weights from; "sequence_parallel", how many ranks share a batch's tokens; "qlora", 4-bit
layers with adapters; and "memory", fields of MemoryArguments. Rank N writes FOLDER/NAME/N.json: every step's loss, and
the most bytes that its live tensors took until training ended. With "saved", a checkpoint and the gathered weights lie
in FOLDER/NAME/out.
"""

import json
import os
import socket
import sys
import traceback
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import torch
from jobs import QUIET, four_bits, lora
from transformers import TrainerCallback

SAMPLES = 64
# Elements of a buffer between memory and disk, and of a group of states: the shipped ones are larger than this model.
SWAPPED, GROUP = 2_000_000, 300_000


def rows(seq_len: int, vocabulary: int) -> list[dict]:
    """Samples that differ, the same in every process."""
    drawn = torch.randint(0, vocabulary, (SAMPLES, seq_len), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in drawn]


def rank_of(case: dict, rank: int, folder: Path) -> None:
    """One process of a case."""
    from transformers import AutoModelForCausalLM, TrainingArguments, default_data_collator
    from transformers.distributed import DistributedConfig

    from hf_memopt import MemoryArguments, MemoryTrainer
    from hf_memopt.engines import engine_named
    from hf_memopt.estimator.accounting.ledger import Ledger
    from hf_memopt.estimator.patches.fake_cluster import following_fsdp
    from hf_memopt.levers.adapters import add_adapters

    fields, kwargs = dict(case["fields"]), {"dtype": torch.float32}
    if case["strategy"].startswith("zero"):
        deepspeed.init_distributed("gloo", verbose=False)  # as a launch's environment has accelerate do
        fields["deepspeed"] = deepspeed_config(case["strategy"], folder)
    if sizes := engine_named(case["strategy"]).mesh(case["world_size"]):
        kwargs["distributed_config"] = DistributedConfig(**asdict(sizes))
    quantization, adapters = qlora(case["strategy"]) if case.get("qlora") else (None, None)
    logged = {"logging_strategy": "steps", "logging_steps": 1, "logging_nan_inf_filter": False}
    args = TrainingArguments(folder / "out", **{**QUIET, **logged, **fields})
    quiet = MemoryArguments(oom_recovery=False, silent_mode=True, **case.get("memory", {}))
    trainers: list[MemoryTrainer] = []
    with Ledger() as ledger, following_fsdp(ledger), fsdp2(case, trainers), tensor_parallel(case):
        model = AutoModelForCausalLM.from_pretrained(case["model"], quantization_config=quantization, **kwargs)
        alone(model)
        if adapters is not None:
            model = add_adapters(model, adapters)
        data = rows(case["seq_len"], model.config.vocab_size)
        trainer = MemoryTrainer(
            model=model, args=args, train_dataset=data, data_collator=default_data_collator, memory_args=quiet
        )
        trainers.append(trainer)
        trainer.add_callback(Swapping(ledger))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    peak = max(found.total for found in ledger.peaks.values())
    if case.get("saved"):
        trainer.save_model()
        trainer._save_checkpoint(trainer.model, trial=None)
    (folder / f"{rank}.json").write_text(json.dumps({"losses": losses, "tensors": peak}))


def qlora(strategy: str) -> tuple:
    """The 4-bit layers and adapters of a case; FSDP shards floats alone."""
    storage = {"bnb_4bit_quant_storage": "float32"} if strategy.startswith("fsdp2") else {}
    return four_bits(compute="float32", **storage), lora(init_lora_weights=False)


class Swapping(TrainerCallback):
    """Buffers between memory and disk are not made by torch, so the ledger has to be told of them."""

    def __init__(self, ledger):
        self.ledger = ledger

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for weight in model.parameters():
            if (swapper := getattr(weight, "nvme_swapper", None)) is not None:
                self.ledger.add(swapper.buffers)


def deepspeed_config(strategy: str, folder: Path) -> dict:
    """A shipped configuration; what is swapped goes to a disk of the case's own, through buffers of its size."""
    from hf_memopt.engines.deepspeed import deepspeed_config

    config = deepspeed_config(strategy)
    for part in ("offload_optimizer", "offload_param"):
        offload = config["zero_optimization"].get(part, {})
        if offload.get("device") == "nvme":
            offload["nvme_path"] = str(folder / "disk")
            if "buffer_size" in offload:
                offload["buffer_size"] = SWAPPED
            config["zero_optimization"]["sub_group_size"] = GROUP  # so that there are several
    return config


@contextmanager
def fsdp2(case: dict, trainers: list):
    """Where accelerate would wrap a model for DDP, it is sharded by accelerate's own function for FSDP2, which it
    calls for accelerators only."""
    if not case["strategy"].startswith("fsdp2"):
        yield
        return
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        # Pinned memory needs an accelerator.
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if "offload" in case["strategy"] else OffloadPolicy(),
    )
    sizes = ParallelismConfig(dp_shard_size=case["world_size"])

    class Sharded:
        def __new__(cls, model, **_):
            accelerator = SimpleNamespace(
                state=SimpleNamespace(fsdp_plugin=plugin),
                torch_device_mesh=sizes.build_device_mesh("cpu"),
                parallelism_config=sizes,
                mixed_precision="no",
                is_main_process=False,
                device=torch.device("cpu"),
            )
            optimizer = trainers[0].optimizer
            names = {id(weight): name for name, weight in model.named_parameters()}
            kept = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
            model = fsdp2_prepare_model(accelerator, model)
            weights = dict(model.named_parameters())
            for group, its in zip(optimizer.param_groups, kept, strict=True):
                group["params"] = [weights[name] for name in its]
            return model

    with mock.patch.object(torch.nn.parallel, "DistributedDataParallel", Sharded):
        yield


@contextmanager
def tensor_parallel(case: dict):
    """accelerate allows tensor parallelism on accelerators only, and asks for no more; a rule of this project
    says so first."""
    if not case["strategy"].startswith("tp"):
        yield
        return
    from accelerate import ParallelismConfig

    from hf_memopt.compatibility import setup

    rules = [rule for rule in setup.RULES if "tensor parallelism on accelerators only" not in rule.reason]
    with (
        mock.patch.object(setup, "RULES", rules),
        mock.patch.object(ParallelismConfig, "_validate_accelerator", lambda *_: None),
    ):
        yield


def alone(model) -> None:
    """A rank's parts of weights without the rest of the file's, of which they are views as long as nothing moves them
    to another device."""
    for weight in model.parameters():
        if (part := getattr(weight, "_local_tensor", None)) is not None:
            weight._local_tensor = part.clone()


def run(case: dict, folder: Path) -> None:
    """All processes of a case.

    Raises:
        RuntimeError: one of them fails.
    """
    (folder / "disk").mkdir(parents=True)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    children = []
    for rank in range(case["world_size"]):
        if (child := os.fork()) == 0:
            _end(_as_rank(case, rank, port, folder))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"{case['name']}: processes ended with {codes}")


def _as_rank(case: dict, rank: int, port: int, folder: Path) -> int:
    """What a launcher tells its processes; the exit code."""
    size = str(case["world_size"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    if case["strategy"].startswith("zero"):
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if (shared := case.get("sequence_parallel", 1)) > 1:
        os.environ.update(
            ACCELERATE_USE_PARALLELISM_CONFIG="true",
            PARALLELISM_CONFIG_SP_SIZE=str(shared),
            PARALLELISM_CONFIG_DP_SHARD_SIZE=str(case["world_size"] // shared),
            PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION="sdpa",
        )
    try:
        rank_of(case, rank, folder)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


def _end(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    import transformers.trainer  # noqa: F401  before the processes part

    import hf_memopt.trainer.trainer  # noqa: F401

    for line in sys.stdin:
        described = json.loads(line)
        run(described, Path(sys.argv[1], described["name"]))
