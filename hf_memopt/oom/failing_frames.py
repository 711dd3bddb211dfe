"""What a traceback's frames say of an out-of-memory failure: when it happened, why, and what helps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hf_memopt.levers import changes
from hf_memopt.levers.changes import Change
from hf_memopt.levers.features.loss_chunks import LOSS_CHUNKS
from hf_memopt.oom.classify import NO_PINNED_MEMORY
from hf_memopt.oom.log_lines import Line

_MOST_FRAMES, _LONGEST_FRAME = 400, 1000  # characters
# As Python prints a frame, IPython, rich, and IPython before 8.
_FRAMES = (
    re.compile(r'File "(?P<path>[^"]{1,500})", line \d{1,9}, in (?P<name>\S{1,200})'),
    re.compile(r"File (?P<path>\S{1,500}?):\d{1,9}, in (?P<name>[\w.<>]{1,200})"),
    re.compile(r"(?P<path>\S{1,500}\.py):\d{1,9} in (?P<name>[\w<>]{1,200})"),
    re.compile(r"(?P<path>\S{1,500}\.py) in (?P<name>[\w<>]{1,200})\("),
)
# What stands around a line of code: rich's and IPython's numbers and marks, and Python's underlines.
_AROUND_CODE = re.compile(r"^[│|\s]{0,9}(?:❱|-+>|\d{1,6}(?=\s))?[\s\d│]{0,9}|[\s│]{1,200}$|^[\s~^]{1,200}$")
_MARKED = re.compile(r"^[│|\s]{0,9}(?:❱|-{1,4}>)")
_BEGIN = re.compile(r"Traceback \(most recent call last\)")


def frame_match(line: str) -> re.Match | None:
    """The frame of a traceback that a line is."""
    if "File " not in line and ".py" not in line:
        return None
    return next((match for pattern in _FRAMES if (match := pattern.search(line))), None)


def read_frames(lines: Sequence[Line], end: int) -> list[str]:
    """The frames above a failure's message, the outermost first, each as "path in name: code".

    Args:
        end: the message's line; frames that another rank wrote between this one's are left out.
    """
    source, own = lines[end].source, []
    for line in reversed(lines[max(0, end - 20 * _MOST_FRAMES) : end]):
        if line.source != source:
            continue
        if _BEGIN.search(line.text):
            break
        own.append(line.text)
        if len(own) > 10 * _MOST_FRAMES:
            break
    frames: list[list[str]] = []
    marked = False  # IPython and rich show lines around the one that runs, and mark it
    for text in reversed(own):
        if match := frame_match(text):
            frames.append([f"{match['path']} in {match['name'].rpartition('.')[2]}:"])
            marked = False
        elif frames and not marked:
            marked = bool(_MARKED.match(text))
            code = [_AROUND_CODE.sub("", text)]
            frames[-1] = frames[-1][:1] + code if marked else (frames[-1] + code)[:9]
    return [" ".join(frame)[:_LONGEST_FRAME] for frame in frames[-_MOST_FRAMES:]]


@dataclass(frozen=True)
class FrameRow:
    """What frames show.

    Attributes:
        stage: load, forward, backward, generate, optimizer, eval, save or resume.
        pattern: of one of the frames.
        why: the cause; "" where the stage alone is known.
        changes: what helps, the most effective first.
        among: what another of the frames has to show.
        pinned: it is about pinned host memory if the driver, not torch's allocator, found none.
    """

    stage: str
    pattern: str
    why: str = ""
    changes: tuple[Change, ...] = ()
    among: str = ""
    pinned: bool = False

    def matches(self, frames: str) -> bool:
        return bool(re.search(self.pattern, frames) and re.search(self.among, frames))


_WEIGHTS = (changes.QLORA, changes.ZERO3, changes.BF16_WEIGHTS, changes.SMALLER_MODEL)
_TRL = r"trl/(trainer|experimental)/\S{0,60} in "
_EVALUATION = r" in (evaluation_loop|prediction_loop|evaluate|prediction_step|predict):"
_GENERATION = r" in (_?generate\w*|_?beam_search|greedy_search|_?sample):|\.generate\("
_KV_CACHE = "generation keeps keys and values of all tokens of all sequences (the KV cache) beside what training holds"
_LOGITS = "logits of all tokens over the whole vocabulary, and the loss's copies of them, do not fit beside the rest"
# The first that matches a frame counts: what encloses a step before the step, the special before the general.
_TABLE = (
    FrameRow(
        "forward",
        r"unsloth_zoo/\S{0,60} in \w*(offload|checkpoint|initialize|forward)",
        f"{NO_PINNED_MEMORY}: activations are offloaded through it, and under WSL a process may pin only a little",
        (changes.UNOFFLOADED_CHECKPOINTS, changes.NO_PIN_MEMORY, changes.MORE_HOST_MEMORY),
        pinned=True,
    ),
    FrameRow(
        "load",
        r"deepspeed/.{0,200}pin_memory",
        f"{NO_PINNED_MEMORY}: DeepSpeed pins what it offloads, and under WSL a process may pin only a little",
        (changes.UNPINNED_OFFLOAD, changes.OFFLOAD_LESS, changes.MORE_HOST_MEMORY),
        pinned=True,
    ),
    FrameRow(
        "forward",
        r"pin_memory",
        f"{NO_PINNED_MEMORY}: batches are copied to it, and under WSL a process may pin only a little",
        (changes.NO_PIN_MEMORY, changes.FEWER_WORKERS, changes.MORE_HOST_MEMORY),
        pinned=True,
    ),
    FrameRow(
        "save",
        r" in (_save_checkpoint|save_model|_save_optimizer_and_scheduler|save_pretrained|save_checkpoint|"
        r"save_16bit_model|_zero3_consolidated_16bit_state_dict|save_fsdp_model|save_fsdp_optimizer|get_state_dict):",
    ),
    FrameRow(
        "resume",
        r" in (_load_from_checkpoint|_load_optimizer_and_scheduler|load_fsdp_optimizer|load_fsdp_model|"
        r"deepspeed_load_checkpoint|load_accelerator_state|_load_zero_checkpoint):"
        r"|optim\S{0,60} in load_state_dict|(resume|ckpt|checkpoint)\w* ?= ?torch\.load",
    ),
    FrameRow(
        "save",  # in people's own code, which gathers a state_dict whatever its functions are called
        r" in (\w{0,40}_)?(save|dump|export|consolidate)_(ckpt|checkpoint|model|state|weight|ema|lora|adapter|optim|"
        r"hf|final|fsdp|full|sharded)\w{0,40}:| in (get_model_state_dict|get_optimizer_state_dict|"
        r"full_optim_state_dict|optim_state_dict|_full_pre_state_dict_hook|"
        r"_common_unshard_pre_state_dict_hook|gather_full_state_dict):"
        r"|modules/module\.py in state_dict:",
    ),
    FrameRow(
        "load",
        r"kbit_training",
        "prepare_model_for_kbit_training casts all weights that are not quantized to fp32, twice their size",
        (changes.NO_KBIT_CAST, changes.ZERO3, changes.SMALLER_MODEL),
    ),
    FrameRow(
        "load",
        r"resize_token_embeddings|_get_resized_\w+|resize_\w{0,20}embedding|_init_added_embeddings",
        "the weights, and while embeddings are resized a second copy of them, do not fit",
        (changes.NO_MEAN_RESIZING, *_WEIGHTS),
    ),
    FrameRow(
        "generate",
        r"vllm/|in sync_weights:|update_named_param|_move_model_to_vllm",
        "vLLM's weights and KV cache take the memory that training needs, or the other way round",
        (changes.LESS_FOR_VLLM, changes.FEWER_COMPLETIONS, changes.SHORTER_COMPLETIONS),
    ),
    FrameRow(
        "forward",
        rf"{_TRL}(compute_ref_log_probs|compute_reference_log_probs|_compute_reference_log_probs|_precompute_ref\w*)"
        r"|self\.ref_model\b(?!\.to|\s*=)",
        "the reference model's logits do not fit beside the trained model: both are held",
        (changes.PRECOMPUTE_REFERENCE, changes.ADAPTER_REFERENCE, changes.LIGER, changes.HALF_PAIRS),
    ),
    FrameRow(
        "load",
        rf"in (create_reference_model|deepcopy|__deepcopy__):|{_TRL}prepare_deepspeed",
        "a second model, the reference, does not fit beside the trained one",
        (changes.ADAPTER_REFERENCE, changes.PRECOMPUTE_REFERENCE, *_WEIGHTS),
    ),
    FrameRow(
        "load",
        r"mxfp4|convert_moe_packed_tensors|in dequantize\w*:.{0,300}(load|param)",
        "loading dequantizes the weights: they take up to four times the checkpoint's size, and one part more",
        _WEIGHTS,
    ),
    FrameRow(
        "load",
        r" in (from_pretrained|_load_pretrained_model|load_checkpoint_in_model|load_checkpoint_and_dispatch|"
        r"load_checkpoint|dispatch_model|set_module_tensor_to_device|caching_allocator_warmup|load_model):"
        r"|modeling_utils\.py in \w*load\w*:",
    ),
    FrameRow(
        "load",
        r"in _ddp_init_helper:|in _sync_module_states:",
        "DDP's buckets hold all gradients a second time, beside the weights",
        (changes.LORA, changes.ZERO2, changes.ZERO3, changes.QLORA),
    ),
    FrameRow(
        "load",
        r"nn/modules/module\.py in (convert|_apply|to|cuda):|in (_move_model_to_device|_move_module_to_device):"
        r"|\bmodel\.(to|cuda)\(|self\.module\.to\(",
    ),
    FrameRow(
        "optimizer",
        r"in (initialize_optimizer_states|_setup_for_real_optimizer|_configure_zero_optimizer|_create_fp32_partitions|"
        r"_configure_optimizer|_initialize_optimizer_states):",
        "DeepSpeed makes fp32 copies of the trained weights and the optimizer's states when it starts",
        (changes.ZERO3_OFFLOAD, changes.LORA, changes.ZERO3, changes.SMALLER_MODEL),
    ),
    FrameRow(
        "optimizer",
        # Repetitions are bounded here and everywhere, so that long lines cost linear time.
        r"in (_init_group|_multi_tensor_adamw?|_fused_adamw?|init_state|get_state_buffer|optimizer_update|"
        r"_optimizer_step|_take_model_step|_maybe_opt_step):|optim\w{0,20}(\.py|/\S{0,60}) in step:",
    ),
    FrameRow(
        "eval",
        r"in (nested_concat|torch_pad_and_concatenate|numpy_pad_and_concatenate|nested_numpify|nested_detach|"
        r"to_cpu_and_numpy|pad_across_processes|_gpu_gather|gather_for_metrics|_nested_gather):|all_preds|preds_host",
        "logits of all evaluation batches are kept until metrics are computed",
        (changes.EVAL_ACCUMULATION, changes.EVAL_ARGMAX, changes.EVAL_TOKENS, changes.EVAL_BATCH),
    ),
    FrameRow("generate", _GENERATION, _KV_CACHE, (changes.EVAL_BATCH, changes.SHORTER_GENERATION), among=_EVALUATION),
    FrameRow("eval", _EVALUATION),
    FrameRow(
        "forward",
        r"\bself\.visual\(|\bvision_(tower|model|encoder)\b|in (get_(image|video)_features|"
        r"get_image_embeds|encode_images|extract_feature):|cu_seqlens=cu_seqlens|modeling_(siglip|clip|intern_?vit|eva|vit|pixtral)"
        r"|Vision\w{0,20}(Attention|Block|Model|Transformer|Encoder|Tower|MLP)",
        "the vision tower's activations do not fit: they grow with the pixels of images and frames",
        (changes.FEWER_PIXELS, changes.FEWER_FRAMES, changes.VISION_FLASH),
    ),
    FrameRow(
        "forward",
        r"(grpo|rloo|online_dpo|ppo)\S{0,40} in (_get_per_token_logps\w*|_compute_loss|compute_loss|"
        r"compute_liger_loss|get_per_token_logps)",
        "logits of all completions over the whole vocabulary do not fit",
        (changes.LIGER, changes.FEWER_COMPLETIONS, changes.SHORTER_COMPLETIONS),
    ),
    FrameRow(
        "generate",
        _GENERATION,
        f"{_KV_CACHE}, of all completions of a batch at once",
        (changes.FEWER_COMPLETIONS, changes.SHORTER_COMPLETIONS, changes.LESS_FOR_VLLM),
        among=_TRL,
    ),
    FrameRow("generate", _GENERATION, _KV_CACHE, (changes.GENERATE_LESS, changes.SHORTER_GENERATION, changes.SDPA)),
    FrameRow(
        "forward",
        r"eager_attention|attn_weights|attention_scores|softmax\((attn|scores|attention)|baddbmm\(|"
        r"(torch\.)?matmul\((query|q)\w*, ?key",
        "attention makes the scores of all pairs of tokens (eager attention): they grow with the square of the length",
        (changes.SDPA, changes.CHECKPOINTING, changes.SHORTER_SAMPLES),
    ),
    FrameRow(
        "forward",
        rf"{_TRL}(concatenated_forward|get_batch_logps|_get_batch_logps|get_batch_loss_metrics|selective_log_softmax)",
        "logits of chosen and rejected answers over the whole vocabulary do not fit",
        (changes.LIGER, changes.HALF_PAIRS, changes.PRECOMPUTE_REFERENCE, changes.SHORTER_SAMPLES),
    ),
    FrameRow(
        "forward",
        r"cross_entropy|in (ForCausalLMLoss|log_softmax|nll_loss|CrossEntropyLoss):|loss_utils\.py|"
        r"logits ?= ?(self\.(lm_head|output|embed_out|score)|logits)\b|logits\.float\(\)|\blog_softmax\(",
        _LOGITS,
        (LOSS_CHUNKS, changes.LIGER, changes.SMALLER_BATCH, changes.SHORTER_SAMPLES),
    ),
    FrameRow("backward", r" in (backward|run_backward|_engine_run_backward):|run_backward|autograd/__init__"),
    FrameRow("forward", r" in (forward|compute_loss|_call_impl|training_step):"),
)


def find_frame(frames: Sequence[str], pinned: bool = False) -> FrameRow | None:
    """The row of the table that says most of the frames; None where none of them is known.

    Args:
        pinned: the driver found no memory, which may be pinned host memory: the innermost frame decides.
    """
    if pinned and frames:
        inner = "\n".join(frames[-2:])
        if row := next((row for row in _TABLE if row.pinned and re.search(row.pattern, inner)), None):
            return row
    text = "\n".join(frames)
    return next((row for row in _TABLE if not row.pinned and row.matches(text)), None)
