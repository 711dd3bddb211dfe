"""Jobs of TRL's trainers from a model's name: the trainer itself, on a fake model and the longest samples."""

import contextlib
import copy
import dataclasses
import tempfile
from typing import Any

from hf_memopt.engines.engine import is_true
from hf_memopt.engines.fsdp import CHECKPOINTING_OFFLOAD, fsdp_settings
from hf_memopt.errors import InputError, as_input_error, brief
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.fake_pretrained import fake_models
from hf_memopt.estimator.job import Job, describe
from hf_memopt.estimator.largest_batch import largest_eval_batch
from hf_memopt.estimator.patches.trl_trainers import WHOLE_LOGITS, whole_logits, without_engine, without_precomputing
from hf_memopt.estimator.tracing.model import ModelSettings, adapters_for, make_model
from hf_memopt.estimator.tracing.process_state import process_state_kept, quiet
from hf_memopt.estimator.tracing.trace import TracedJob
from hf_memopt.estimator.trainer_job import TrainerJob, check_held, describe_trainer
from hf_memopt.estimator.training_fields import evaluates
from hf_memopt.estimator.trl_tasks import END, TRL_TASKS, WORD, TrlTask, unscored
from hf_memopt.hardware import Hardware
from hf_memopt.levers.apply import apply_levers
from hf_memopt.levers.refusals import check_with_trl
from hf_memopt.presets.trl_configs import trl_class
from hf_memopt.stack.vocabulary import spelled


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrlJob(TrainerJob):
    """The job of a trainer that was made for an estimate: memory features are put on its copies."""

    def at_depth(self, depth: int) -> TracedJob:
        traced = super().at_depth(depth)

        def make_with_levers():
            model = traced.make_model()
            if not self.loaded_whole:
                # Partition a model for ZeRO-3, as from_pretrained does while it loads one that is not quantized: the
                # trainer around it was made with the whole one.
                from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

                if is_deepspeed_zero3_enabled():
                    import deepspeed

                    deepspeed.zero.Init(module=model, config_dict_or_path=deepspeed_config())
            if self.memory_args is not None:
                apply_levers(model, self.memory_args)
            return model

        return dataclasses.replace(traced, make_model=make_with_levers)


def describe_task(
    model,
    args,
    seq_len: int,
    hardware: str | Hardware = "auto",
    *,
    task: str | None = None,
    tool: str = "",
    **settings: Any,
) -> Job:
    """estimator.job.describe(), and TRL's trainer around the job for a task of TRL_TASKS.

    Args:
        tool: another tool whose trainer of the task it is (patches.trl_trainers.WHOLE_LOGITS).

    Raises:
        InputError: an unknown model, or a job that cannot run or is not modelled.
    """
    fields = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    # A key that accelerate launch alone takes: transformers 5.24 does not pass it on.
    if not tool and is_true(fsdp_settings(None, fields.get("fsdp_config")).get(CHECKPOINTING_OFFLOAD)):
        raise InputError(
            f"fsdp_config.{CHECKPOINTING_OFFLOAD}=true is accelerate's alone (fsdp_{CHECKPOINTING_OFFLOAD} of its "
            "YAML): set activation_checkpointing_kwargs.offload=true and activation_checkpointing=true"
        )
    if (row := TRL_TASKS.get(task)) is None:
        return describe(model, args, seq_len, hardware, task=task, **settings)
    _check(task, seq_len, settings)
    dpo = tool in WHOLE_LOGITS and task == "dpo" and settings.get("peft_config") is not None
    if tool and tool != "TRL" and task != "reward" and not dpo:
        raise InputError(
            f"task={task}: {tool}'s trainer holds logits and reference models otherwise than TRL's: not modelled"
        )
    config = load_config(model)
    if row.model == "sequence-classification":
        config = copy.deepcopy(config)  # the caller's own, which a search asks about again
        config.num_labels = 1  # a reward (trl 1.16, RewardTrainer)
    if isinstance(args, dict):
        if (longest := args.get("max_length")) not in (None, seq_len):
            raise InputError(f"max_length={longest} and seq_len={seq_len} differ: set the latter alone")
        args = fields = {
            "bf16": not args.get("fp16"),
            "activation_checkpointing": args.get("gradient_checkpointing", True),  # as TRL's (trl 1.16, _BaseConfig)
            **({"router_aux_loss_coef": 0.0} if dpo else {}),  # which TRL takes from the model's configuration
            **args,
        }
    if kwargs := fields.get("model_init_kwargs"):
        raise InputError(
            f"model_init_kwargs={brief(kwargs)} is for models that TRL loads: set dtype, attn_implementation and "
            "quantization_config instead"
        )
    job = describe(config, args, seq_len, hardware, task=row.model, config_class=row.config_class, **settings)
    if job.mesh is not None:
        raise InputError(f"task={task} is not modelled where transformers shards the model: use ddp, fsdp2 or zero3")
    if job.shares_heads or (job.shared > 1 and task != "sft"):
        raise InputError(
            f"sequence_parallel={job.shared} is predicted with task=sft under fsdp2, and without a task: leave it out"
        )
    if job.shared > 1 and fields.get("packing"):  # SFTTrainer refuses it (trl 1.16)
        raise InputError(
            f"packing=true needs whole samples, which sequence_parallel={job.shared} divides: leave it out"
        )
    return _around_trainer(row, job, tool)


def _check(task: str, seq_len: int, settings: dict[str, Any]) -> None:
    """Refuse what TRL's head and batches leave no place for."""
    if settings.get("memory_args") is not None:
        check_with_trl(settings["memory_args"], f"task={task}")
    if settings.get("video") is not None:
        raise InputError(f"task={task} is estimated for texts: leave the settings of videos out")
    if settings.get("packed"):
        raise InputError(f"packed=true goes without task={task}: set packing=true with task=sft")
    if isinstance(seq_len, int) and seq_len < 8:
        raise InputError(f"seq_len={seq_len} must be at least 8 with task={task}: a sample has a prompt and an answer")


def _around_trainer(row: TrlTask, job: Job, tool: str) -> TrlJob:
    """The Job of TRL's trainer on the model of another Job."""
    with (
        tempfile.TemporaryDirectory() as folder,
        quiet(),
        process_state_kept(),
        without_precomputing(),
        whole_logits(tool),
        as_input_error(f"{row.trainer}", ValueError, TypeError, NotImplementedError),
    ):
        trainer = _make_trainer(row, job, folder)
        check_held(trainer, job.engine)
        described = describe_trainer(trainer, job.device, 1, None)
        evaluated = largest_eval_batch(trainer) if _evaluates(row, job) else None
    own = {item.name: getattr(described, item.name) for item in dataclasses.fields(described)}
    own["eval_inputs"] = evaluated
    if row.generates:
        steps = _steps_per_generation(job)
        own["seq_len"] = job.seq_len
        own["inputs"] = described.inputs[-steps * job.fields["per_device_train_batch_size"] :]
        fields = {name: value for name, value in job.fields.items() if name != "generation_batch_size"}
        job = dataclasses.replace(job, fields=fields | {"steps_per_generation": steps})
    names = (
        *("fields", "dtype", "engine", "world_size", "rank", "memory_args", "quantization_config", "dequantized"),
        *("expandable", "shared"),
    )
    return TrlJob(**own | {name: getattr(job, name) for name in names})


def _make_trainer(row: TrlTask, job: Job, folder: str):
    """TRL's trainer on fake models."""
    fields = {name: value for name, value in job.fields.items() if name not in _NOT_OF_TRAINER}
    half = bool(job.fields.get("bf16") or job.fields.get("fp16"))
    whole = fields.get("padding_free") and not fields.get("packing")  # which TRL takes without a limit alone
    there = {"use_cpu": True, "report_to": "none", "fp16": False, "bf16": half}
    if row.generates:  # of all processes at once: the generation batch has to hold whole groups
        fields.pop("generation_batch_size", None)
        there["steps_per_generation"] = _steps_per_generation(job) * job.world_size
    else:
        there["max_length"] = None if whole else job.seq_len
    args = row.config_class(output_dir=folder, **spelled(fields | there))
    own = {item.name: getattr(job, item.name) for item in dataclasses.fields(ModelSettings)}
    settings = ModelSettings(**own | {"peft_config": None, "memory_args": None})
    extras = {}
    with fake_models() as mode, contextlib.ExitStack() as stack:
        with mode:
            model = make_model(settings)
            if row.reference and job.peft_config is None and not fields.get("precompute_ref_log_probs"):
                extras["ref_model"] = make_model(settings)
        if job.peft_config is not None:
            adapters = adapters_for(dataclasses.replace(settings, peft_config=job.peft_config), model)
            if row.model == "sequence-classification":
                adapters.task_type = "SEQ_CLS"  # so that the score layer is trained, too
            extras["peft_config"] = adapters
        if row.generates:
            extras["reward_funcs"] = unscored
            stack.enter_context(without_engine(lambda: make_model(settings), mode))
        return trl_class(row.trainer)(
            model=model,
            args=args,
            train_dataset=_rows(row, job, args.per_device_train_batch_size),
            eval_dataset=_rows(row, job, args.per_device_eval_batch_size) if _evaluates(row, job) else None,
            processing_class=_tokenizer(),
            **extras,
        )


def _evaluates(row: TrlTask, job: Job) -> bool:
    """True if an evaluation is traced. One that generates is counted as no larger than training's generation."""
    return evaluates(job.fields) and not row.generates


# Fields that make_arguments() changes for a trace, too (engines, and what asks for the device), and those of the rows,
# the tokenizer and the rewards of the user, in whose place a trace has its own.
_NOT_OF_TRAINER = {
    *("deepspeed", "fsdp", "fsdp_config", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers", "use_liger_kernel"),
    "activation_offloading",  # whose hooks ask for an accelerator
    *("eval_strategy", "eval_steps", "eval_on_start", "do_eval", "load_best_model_at_end", "push_to_hub"),
    *("dataset_text_field", "dataset_kwargs", "assistant_only_loss", "chat_template_path", "eos_token", "pad_token"),
    *("chat_template_kwargs", "reward_weights", "log_completions_hub_repo"),
}


def _rows(row: TrlTask, job: Job, samples: int):
    """Twice as many rows as a batch has samples, for KTO of both kinds."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    length = job.seq_len - _completion(row, job) if row.generates else job.seq_len
    rows = [row.row(length) for _ in range(2 * samples)]
    if job.fields.get("packing"):  # several texts a sample
        lengths = (job.seq_len - job.seq_len // 3, job.seq_len // 3)
        rows = [row.row(length) for _ in rows for length in lengths]
    if row is TRL_TASKS["kto"]:
        rows = [{**each, "label": number % 2 == 0} for number, each in enumerate(rows)]
    return Dataset.from_list(rows)


def _steps_per_generation(job: Job) -> int:
    """Micro-batches that are generated at once.

    Raises:
        InputError: a generation batch that is not made of whole micro-batches.
    """
    micro = job.fields["per_device_train_batch_size"] * job.world_size
    batch = job.fields.get("generation_batch_size")
    if batch is None:
        return job.fields.get("steps_per_generation") or job.fields["gradient_accumulation_steps"]
    if "steps_per_generation" in job.fields or batch % micro:
        raise InputError(
            f"generation_batch_size={batch} must be a multiple of the {micro} samples of a micro-batch on all "
            "devices, and steps_per_generation left out"
        )
    return batch // micro


def _completion(row: TrlTask, job: Job) -> int:
    """The longest completion, which is a part of the sample's tokens.

    Raises:
        InputError: it leaves no token for a prompt.
    """
    length = job.fields.get("max_completion_length", row.config_class.max_completion_length)
    if not 0 < length < job.seq_len:
        raise InputError(
            f"max_completion_length={length} must be from 1 to {job.seq_len - 1}: seq_len={job.seq_len} is the prompt "
            "and the completion"
        )
    return length


def _tokenizer():
    """A tokenizer of one word: which token stands where has no effect on memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<pad>": 0, END: 1, WORD: 2}, unk_token=WORD))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token=END, unk_token=WORD)
