"""Real processes of an engine over gloo, forked from one that has imported everything: a case for each line of input.

python benchmarks/engine_ranks.py FOLDER < cases

A case is JSON: {"name", "strategy", "world_size", "fields", "seq_len", "model"}: the strategy is ddp, fsdp2 or the name of
a shipped DeepSpeed configuration, "fields" are TrainingArguments', and "model" is a folder to load the weights from. Rank
N writes FOLDER/NAME/N.json: every step's loss, the most bytes that its live tensors took until training ended, and which
segment of the step that was. With "saved", a checkpoint and the gathered weights are written after that.
"""

import json
import os
import socket
import sys
import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import torch

SAMPLES = 64


def rows(seq_len: int, vocabulary: int) -> list[dict]:
    """Samples that differ, the same in every process."""
    drawn = torch.randint(0, vocabulary, (SAMPLES, seq_len), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in drawn]


def rank_of(case: dict, rank: int, folder: Path) -> None:
    """One process of a case."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    from transformers.distributed import DistributedConfig

    from hf_memopt.estimator.fake_cluster import following_fsdp
    from hf_memopt.estimator.ledger import Ledger
    from hf_memopt.estimator.truth import allocator_peak
    from hf_memopt.estimator.prediction import deepspeed_config

    fields = dict(case["fields"])
    if case["strategy"].startswith("zero"):
        deepspeed.init_distributed("gloo", verbose=False)  # as a launch's environment has accelerate do
        fields["deepspeed"] = with_nvme(deepspeed_config(case["strategy"]), folder)
    args = TrainingArguments(
        output_dir=folder / "out", use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_steps=1, logging_nan_inf_filter=False, **fields,
    )  # fmt: skip
    sizes = {"distributed_config": DistributedConfig(**case["sizes"])} if "sizes" in case else {}
    def train() -> None:
        model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32, **sizes)
        alone(model)
        trainers.append(Trainer(model=model, args=args, train_dataset=rows(case["seq_len"], model.config.vocab_size),
                                data_collator=default_data_collator))  # fmt: skip
        trainers[0].train()

    trainers: list[Trainer] = []
    with Ledger(fake=False) as ledger, following_fsdp(ledger), fsdp2(case, trainers), sized(case):
        allocator = allocator_peak(train)
    (trainer,) = trainers
    segment, peak = max(ledger.peaks.items(), key=lambda item: item[1].total)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if case.get("saved"):
        trainer.save_model()
        trainer._save_checkpoint(trainer.model, trial=None)
    (folder / f"{rank}.json").write_text(json.dumps({"losses": losses, "tensors": peak.total, "allocator": allocator, "segment": segment}))


@contextmanager
def fsdp2(case: dict, trainers: list):
    """Where accelerate would wrap a model for DDP, it shards it, with its own function for FSDP2, which it calls for
    accelerators only."""
    if case["strategy"] != "fsdp2":
        yield
        return
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
                                            cpu_ram_efficient_loading=False)  # fmt: skip
    sizes = ParallelismConfig(dp_shard_size=case["world_size"])
    mesh = None

    class Sharded:
        def __new__(cls, model, **_):
            nonlocal mesh
            mesh = sizes.build_device_mesh("cpu")
            accelerator = SimpleNamespace(
                state=SimpleNamespace(fsdp_plugin=plugin), torch_device_mesh=mesh, parallelism_config=sizes,
                mixed_precision="no", is_main_process=False, device=torch.device("cpu"),
            )  # fmt: skip
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
def sized(case: dict):
    """accelerate lets a model be cut up by tensor parallelism on accelerators only, and asks for no more than that."""
    from accelerate import ParallelismConfig

    asks = mock.patch.object(ParallelismConfig, "_validate_accelerator", lambda *_: None)
    with asks if "sizes" in case else nullcontext():
        yield


def alone(model) -> None:
    """A rank's parts of weights without the rest of the file's, of which they are views as long as nothing moves them
    to another device."""
    for weight in model.parameters():
        if (part := getattr(weight, "_local_tensor", None)) is not None:
            weight._local_tensor = part.clone()


def with_nvme(config: dict, folder: Path) -> dict:
    """A disk of the case's own for what is swapped."""
    for part in ("offload_optimizer", "offload_param"):
        offload = config["zero_optimization"].get(part, {})
        if offload.get("device") == "nvme":
            offload["nvme_path"] = str(folder / "disk")
    return config


def run(case: dict, folder: Path) -> None:
    """All processes of a case. Raises RuntimeError if one fails."""
    (folder / "disk").mkdir(parents=True)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    children = []
    for rank in range(case["world_size"]):
        if (child := os.fork()) == 0:
            code, size = 1, str(case["world_size"])
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size,
                              MASTER_ADDR="localhost", MASTER_PORT=str(port))  # fmt: skip
            if case["strategy"].startswith("zero"):
                os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            try:
                rank_of(case, rank, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"{case['name']}: processes ended with {codes}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    from transformers import Trainer, models  # noqa: F401

    for line in sys.stdin:
        described = json.loads(line)
        run(described, Path(sys.argv[1], described["name"]))
