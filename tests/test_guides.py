"""docs/guides.toml, row by row: what is said to work names a test or a command that runs, everything else says why."""

import ast
import re
import shlex
import sys
from dataclasses import fields
from functools import cache

import pytest
from conftest import ROOT

from hf_memopt.presets import get_preset, list_presets

sys.path.insert(0, str(ROOT / "benchmarks"))
from docs_tables.guides import GUIDE_STATES, guide_rows, guides

ROWS = guide_rows()
WORKS = [row for row in ROWS if row["state"] == "works"]
NAMED = sorted({test for row in ROWS for test in row.get("tested_by", ())})
COMMANDS = sorted({row["command"] for row in ROWS if "command" in row})
QUICK = ("show", "monitor", "export")  # commands that need no estimate
KEYS = {"item", "here", "state", "tested_by", "command", "why"}


# ---- rows


def test_rows_are_whole():
    """What works names a test or a command that shows it; everything else says why."""

    def whole(row: dict) -> bool:
        shown, why = row.get("tested_by") or row.get("command"), row.get("why", "").strip()
        named = set(row) <= KEYS and row["item"].strip() and row["here"].strip() and row["state"] in GUIDE_STATES
        return bool(named and (shown and not why if row["state"] == "works" else why))

    assert not [row for row in ROWS if not whole(row)]


def test_five_guides_with_all_their_items():
    assert len(guides()) == 5 and len({guide["name"] for guide in guides()}) == 5
    assert all(section["rows"] for guide in guides() for section in guide["section"])
    assert len(ROWS) >= 300 and len(WORKS) >= 150
    twice = [
        (guide["name"], row["item"]) for guide in guides() for section in guide["section"] for row in section["rows"]
    ]
    assert len(twice) == len(set(twice))


# ---- what is named


@cache
def _tests() -> dict[str, bool]:
    """Every test of this folder: node id -> whether something skips it whatever happens."""
    found = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        whole = any(
            _skips(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(getattr(target, "id", "") == "pytestmark" for target in node.targets)
        )
        for scope, prefix in [
            (tree, ""),
            *((node, f"{node.name}::") for node in tree.body if isinstance(node, ast.ClassDef)),
        ]:
            for node in scope.body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    skipped = whole or any(map(_skips, (*node.decorator_list, *getattr(scope, "decorator_list", ()))))
                    found[f"{file.relative_to(ROOT)}::{prefix}{node.name}"] = skipped
    return found


def _skips(mark: ast.expr) -> bool:
    """pytest.mark.skip, xfail, or skipif of something that is always true, alone or in a list."""
    text = ast.unparse(mark)
    return bool(re.search(r"\bmark\.(skip|xfail)\b|\bmark\.skipif\((True|1)\b", text))


def test_skipped_tests_are_seen():
    for mark, skips in (
        *(("pytest.mark.skip", True), ("pytest.mark.skip(reason='x')", True)),
        *(("[pytest.mark.skipif(True, reason='x')]", True), ("pytest.mark.xfail", True)),
        *(("pytest.mark.skipif(no_card, reason='x')", False), ("pytest.mark.slow", False)),
    ):
        assert _skips(ast.parse(mark, mode="eval").body) is skips, mark


def test_the_tests_are_there_and_run():
    assert not [name for name in NAMED if name not in _tests()], "no such test"
    assert not [name for name in NAMED if _tests()[name]], "always skipped"


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_runs(line, command, tmp_path, monkeypatch):
    words = shlex.split(line)
    assert words[0] == "hf-memopt"
    _commands()[words[1]].make_context(words[1], words[2:], resilient_parsing=False)
    assert words[1] in QUICK, "a command that takes seconds: name a test instead"
    monkeypatch.chdir(tmp_path)  # where export writes
    code, output, errors = command(*words[1:])
    assert code == 0 and output, errors


# ---- what stands on the right


def _known() -> set[str]:
    """Names that a reader can type: fields, presets, commands' options, what the package exports."""
    from peft import LoraConfig
    from transformers import TrainingArguments

    import hf_memopt
    from hf_memopt.levers.arguments import PROFILES, MemoryArguments
    from hf_memopt.presets.named_presets import strategies
    from hf_memopt.recipe.recipe_arguments import RecipeArguments
    from hf_memopt.recipe.video import VideoArguments

    kinds = (TrainingArguments, MemoryArguments, RecipeArguments, VideoArguments, LoraConfig)
    known = {item.name for kind in kinds for item in fields(kind)}
    return known | {*list_presets(), *strategies(), *PROFILES, *hf_memopt.__all__}


def _commands() -> dict:
    import typer

    from hf_memopt.cli.app import app

    group = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


# Words on the right that are no setting: values, keys of estimates, breakdowns and YAML, and setting names of others'.
OTHERS = {
    *("parameters", "optimizer_states", "gradients", "activations", "logits", "workspace", "communication"),
    *("utilization", "total", "fragmentation", "host", "enabled", "memory_savings", "every_n_layers"),
    *("flash_attention_2", "flash_attention_3", "lion_32bit", "lion_8bit", "paged_lion_8bit", "adamw_8bit"),
    *("adamw_torch_fused", "adafactor", "none", "int8", "mixed_precision", "gradient_checkpointing"),
    *("num_hidden_layers", "intermediate_size", "track_memory_optimizations", "tp8", "hsdp8", "matmuls"),
    *("torch_compile_mode", "data_wait_share"),
}


def test_what_stands_here_exists():
    """Settings, flags, presets, files and commands in code on the right."""
    known, commands = _known(), _commands()
    flags = (
        known
        | {
            option.lstrip("-")
            for command in commands.values()
            for parameter in command.params
            for option in parameter.opts
        }
        | {"config_file"}
    )

    def exists(code: str) -> bool:
        if code.startswith("hf-memopt ") and code.split()[1] not in commands:
            return False
        if found := re.findall(r"--([\w-]+)", code):
            return set(found) <= flags
        if "/" in code and " " not in code:
            return (ROOT / code).exists()
        setting = re.fullmatch(r"([a-z]\w*)(: \S+)?", code)
        return not setting or setting[1] in known | OTHERS

    asked = [code for row in ROWS for code in re.findall(r"`([^`]+)`", row["here"])]
    assert len(asked) > 150 and not [code for code in asked if not exists(code)]


# ---- the guides' own settings


LOADER = {"dataloader_num_workers": 4, "dataloader_prefetch_factor": 2, "dataloader_persistent_workers": True}


@pytest.mark.parametrize(
    ("name", "batch", "tokens", "training"),
    [
        ("rtx_3090", (12, 4), 256, LOADER),
        ("rtx_4090", (16, 4), 512, LOADER),
        ("a100_80gb_x8", (1, 8), 4096, LOADER),
        ("h100_80gb", (6, 8), 4096, {**LOADER, "torch_compile": True, "tf32": True}),
    ],
)
def test_presets_have_the_guides_settings(name, batch, tokens, training):
    preset = get_preset(name)
    assert (preset.micro_batch_size, preset.gradient_accumulation_steps) == batch
    assert preset.seq_len == tokens
    assert {field: preset.training.get(field) for field in training} == training


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (
            "rtx_3060",
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "activation_checkpointing": False},
            (16, 2, False),
        ),
        ("rtx_3060", {"per_device_train_batch_size": 1}, (1, 32, True)),
        ("rtx_3060", {"per_device_train_batch_size": 4, "effective_batch_size": 64}, (4, 16, True)),
        ("a100_80gb", {"per_device_train_batch_size": 16, "effective_batch_size": 32}, (16, 2, None)),
        ("rtx_3060", {"bf16": False, "adam_beta1": 0.9, "adam_beta2": 0.999, "learning_rate": 1e-4}, (8, 4, True)),
    ],
)
def test_the_guides_settings_go_over_a_preset(name, given, expected, tmp_path):
    args = get_preset(name).training_arguments(str(tmp_path), use_cpu=True, **given)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == expected[:2]
    if expected[2] is not None:
        assert args.activation_checkpointing is expected[2]
    own = {field: value for field, value in given.items() if field != "effective_batch_size"}
    assert {field: getattr(args, field) for field in own} == own


def test_the_fastest_video_profile_keeps_mixed_precision():
    from hf_memopt.recipe.video import VideoArguments

    profile = VideoArguments.profile_of({"video_profile": "maximum_performance"})
    assert profile["dtype"] == "float32" and profile["activation_checkpointing"] is False
    assert not {"bf16", "fp16"} & set(profile)


# ---- a user of the guides finds their words there: settings, calls, commands, cards, papers

WORDS = """
    batch_size, micro_batch_size, global_batch_size, gradient_accumulation_steps, gradient_accumulation,
    max_seq_length, max_seq_len, max_length, sequence_length, eval_batch_size, gradient_checkpointing_enable,
    gradient_checkpointing, use_gradient_checkpointing, gradient_checkpointing_func, use_reentrant,
    selective_checkpoint, checkpoint_ratio, deepspeed_activation_checkpointing, activation_checkpointing,
    compress_activation, decompress_activation, bf16, fp16, fp8, mixed_precision, use_mixed_precision,
    torch.autocast, GradScaler, torch.cuda.amp, float32_matmul_precision, torch_compile, max-autotune, dtype,
    bfloat16, float16, float32, AdamMini, Adam8bit, adamw_8bit, 8bit_adam, lion_pytorch, Adafactor, AdamW,
    zero_stage, use_deepspeed, cpu_offload, nvme_offload, enable_cpu_offload, offload_optimizer, offload_param,
    pin_memory, nvme_path, zero_optimization, flash_attn_func, use_flash_attention, flash_attention,
    flash_attention_3, flash-attn, attention_type, sparse_block_size, num_local_blocks, sliding_window,
    tensor_parallel, pipeline_parallel, data_parallel, prefetch_factor, num_workers, persistent_workers,
    buffer_size, target_utilization, warning_threshold, critical_threshold, emergency_threshold, silent_mode,
    aggressive, balanced, conservative, pool_size_gb, clear_cache_frequency, dynamic_batching, min_batch_size,
    max_batch_size, target_memory_utilization, adjustment_frequency, smooth_transitions, MemoryMonitor,
    check_memory_health, get_detailed_memory_breakdown, estimate_activation_memory, track_memory_optimizations,
    gpu_utilization, recommendations, allocated_gb, reserved_gb, effective_memory_gb, savings_gb, memory_savings,
    num_layers, hidden_size, num_experts, n_layers, d_ffn, k_base, k_max, num_attention_heads, max_frames,
    expandable_segments, PYTORCH_CUDA_ALLOC_CONF, torchrun, nproc_per_node, resume_from, output_dir, nvidia-smi,
    rocm-smi, vm_stat, dmon, _record_memory_history, _dump_snapshot, empty_cache, params_memory, gradient_memory,
    optimizer_memory, activation_memory, attention_memory, flash_attention_memory, total_memory, Micikevicius, Chen,
    Rajbhandari, Dao, memory pools, RTX 3060, RTX 3070, RTX 3080, RTX 3090, RTX 4080, RTX 4090, A100 40GB, A100
    80GB, H100 80GB, RX 6750 XT, Apple M2
"""


def test_the_words_of_the_guides_are_on_the_page():
    words = " ".join(WORDS.split()).split(", ")
    page = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
    for text in (page, " ".join(row["item"] for row in ROWS)):
        assert not [word for word in words if not re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", text)]
