"""Names of other libraries that a trace replaces: each is called in a tiny job; a missing one ends in a sentence."""

import functools
import json
import os
import pkgutil
import re
import sys
import textwrap
from collections import Counter
from importlib import util
from pathlib import Path

import pytest
import torch
import transformers
import video_models
from accelerate import ParallelismConfig
from conftest import BIN, ROOT, run, slow
from peft import BOFTConfig, FrodConfig, LoraConfig, ShiraConfig, UniLoraConfig
from transformers import (
    AutoConfig,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    Trainer,
    TrainingArguments,
    YolosConfig,
    YolosForObjectDetection,
    vision_utils,
)
from transformers.utils import import_utils

from hf_memopt import estimator
from hf_memopt.cli import doctor
from hf_memopt.errors import IncompatibleLibrary, InputError
from hf_memopt.estimator import estimate, estimate_trainer
from hf_memopt.estimator.accounting import engine_tensors, fake_ledger
from hf_memopt.estimator.private_names import Part, PrivateNames, Use, check, declared, faults, resolve
from hf_memopt.estimator.scripts.dry_run import caught_trainer
from hf_memopt.estimator.scripts.launched import ScriptCommand
from hf_memopt.estimator.tracing import untraced_optimizers
from hf_memopt.estimator.trl_job import describe_task
from hf_memopt.foreign.launchers import Launch
from hf_memopt.video.inputs import VideoInputs

SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 256, "vocab_size": 500, "num_hidden_layers": 2},
}
FOUR_BITS = {
    "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16"),
    "peft_config": LoraConfig(r=4, target_modules="all-linear"),
    "dtype": "bfloat16",
}
EIGHT_BITS = {**FOUR_BITS, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
FP8 = {**FOUR_BITS, "quantization_config": FineGrainedFP8Config(), "hardware": "h100_80gb"}
DDP, FSDP2 = ({"world_size": 2, "strategy": name} for name in ("ddp", "fsdp2"))
# Part -> settings of the jobs that call all it replaces.
JOBS = {
    **{Part.EVERY_JOB: [{"optim": "adamw_torch_8bit"}], Part.ACCELERATOR: [{"optim": "adamw_torch"}]},
    **{Part.SEVERAL_DEVICES: [DDP], Part.DDP: [DDP], Part.FSDP2: [FSDP2, {"world_size": 4, "strategy": "tp2_hsdp1"}]},
    Part.CONTEXT_PARALLEL: [{**FSDP2, "sharing": {"cp_size": 2}}],
    Part.DEEPSPEED: [
        *({"world_size": 2, "strategy": name} for name in ("zero2_offload_cpu", "zero3_offload_nvme")),
        {"world_size": 2, "strategy": "zero2", "sharing": {"sp_size": 2, "sp_backend": "deepspeed"}},
    ],
    Part.BITSANDBYTES: [{**FSDP2, **FOUR_BITS}, EIGHT_BITS, {"optim": "paged_ademamix_32bit"}],
    Part.FP8: [FP8],
    Part.OPTIMIZERS: [{"optim": "adamw_torch_8bit"}],
    Part.PEFT: [
        {"peft_config": kind(target_modules=["q_proj", "v_proj"], **settings)}
        for kind, settings in ((BOFTConfig, {}), (ShiraConfig, {"r": 4}), (UniLoraConfig, {}), (FrodConfig, {}))
    ],
    Part.OFFLOADED_INPUTS: [
        {"more": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}}
    ],
    Part.FLASH_ATTENTION: [
        {"attn_implementation": "flash_attention_2", **rows}
        for rows in ({}, {"padded": True}, {"packed": True, "more": {"per_device_train_batch_size": 1}})
    ],
    Part.LIGER: [{"liger": True}],
    Part.TRL: [{"task": task, "more": {"precompute_ref_log_probs": True}} for task in ("dpo", "kto")],
    Part.WITHOUT_DEEPSPEED: [{}],
}
SCRIPT = """
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    LlamaConfig(**SHAPE).save_pretrained("none")
    model = LlamaForCausalLM.from_pretrained("none", config=LlamaConfig(**SHAPE))
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    trainer = Trainer(model, TrainingArguments("out", use_cpu=True, report_to="none"), train_dataset=[{}])
    trainer.evaluate()
    trainer.init_hf_repo()
    model.push_to_hub("somewhere")
    model.save_pretrained("saved")
    model.resize_token_embeddings(8)
    LoraConfig(target_modules="all-linear").save_pretrained("adapter")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("saved"), "adapter")
    trainer.train()
"""


@pytest.fixture
def calls(monkeypatch):
    """Replaced name -> how often it was called, 0 for values."""
    counter, replaced = Counter(), PrivateNames.replaced

    def count_calls(names, importers=None, /, **replacements):
        counted = {name: counting(counter, names.path(name), new) for name, new in replacements.items()}
        return replaced(names, importers, **counted)

    monkeypatch.setattr(PrivateNames, "replaced", count_calls)
    forget_linear()
    yield counter
    forget_linear()


def counting(counter, path, new):
    """A replacement that counts its calls."""
    counter[path] += 0
    if isinstance(new, classmethod):
        return classmethod(counting(counter, path, new.__func__))
    if isinstance(new, type):
        return type(new.__name__, (new,), {"__init__": counting(counter, path, new.__init__)})
    if not callable(new):
        return new

    @functools.wraps(new)
    def count(*args, **kwargs):
        counter[path] += 1
        return new(*args, **kwargs)

    return count


def forget_linear() -> None:
    """DeepSpeed replaces the linear that it saw first and no other; in a test that may be one that counts calls."""
    module = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if module and hasattr(module.InsertPostInitMethodToModuleSubClasses, "linear_bk"):
        del module.InsertPostInitMethodToModuleSubClasses.linear_bk


@pytest.fixture
def unchecked():
    """No check of this process counts, neither before nor after."""
    check.cache_clear()
    yield
    check.cache_clear()


def small(optim="adamw_torch_fused", config=None, liger=False, hardware="a100_80gb", more=None, **settings):
    fields = {"per_device_train_batch_size": 2, "bf16": True, "optim": optim, "optim_target_modules": ["mlp"]}
    fields |= {"use_liger_kernel": liger, **(more or {})}
    if sharing := settings.pop("sharing", None):
        fields["parallelism_config"] = ParallelismConfig(**sharing)
    return estimate(config or AutoConfig.for_model("llama", **SHAPE), fields, 64, hardware, **settings)


def uncalled(part: Part, calls: Counter) -> list[str]:
    """Replaced names of a part that no job has called; of values, those that no job has replaced."""
    return [path for path in replaced_paths(part) if not (calls[path] if callable(resolve(path)) else path in calls)]


def replaced_paths(part: Part) -> list[str]:
    return [path for names in declared(part) if names.use is Use.REPLACED for path in names.signatures]


# Those whose jobs take more than a second.
LONG = {Part.DEEPSPEED, Part.OPTIMIZERS, Part.FSDP2, Part.BITSANDBYTES, Part.PEFT, Part.TRL, Part.FP8}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "part", [slow(part) if part in LONG else part for part in JOBS], ids=lambda part: part.name.lower()
)
def test_every_replaced_name_is_called(part, calls, monkeypatch):
    if part is Part.EVERY_JOB:  # torchao keeps tables that another test's job may have asked for
        from torchao.optim import subclass_8bit

        subclass_8bit.get_qmap_signed.cache_clear()
        subclass_8bit.get_qmap_unsigned.cache_clear()
    if part is Part.WITHOUT_DEEPSPEED:
        monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    if part is Part.OPTIMIZERS:  # as if torchao were not installed
        monkeypatch.setattr(untraced_optimizers, "by_formula", lambda *_: True)
    for settings in JOBS[part]:
        small(**settings)
    if part is Part.DEEPSPEED:  # an optimizer of a DeepSpeed JSON
        engine = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {}}}
        engine |= {"bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}
        small(world_size=2, more={"deepspeed": engine})
    if part is Part.TRL:  # the head of another tool's DPO
        config, fields = AutoConfig.for_model("llama", **SHAPE), {"per_device_train_batch_size": 1}
        adapter = LoraConfig(target_modules=["q_proj"])
        describe_task(config, fields, 64, "a100_80gb", task="dpo", tool="LLaMA-Factory", peft_config=adapter)
    assert uncalled(part, calls) == []


OTHER_OPTIMIZERS = ("DeepSpeedCPUAdam", "FusedAdam")
ZERO_INIT = ("assert_ints", "_orig_torch_tensor", "zero_wrapper_for_fp_tensor_constructor")  # of stage 3 alone
WHOLE_SAMPLES = ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP")  # Ulysses' groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "idle"),
    [
        ("zero1", (*OTHER_OPTIMIZERS, "AsyncIOBuilder", *ZERO_INIT)),
        ("zero2", (*OTHER_OPTIMIZERS, "AsyncIOBuilder", *ZERO_INIT)),
        ("zero3", (*OTHER_OPTIMIZERS, "AsyncIOBuilder")),
    ],
)
def test_what_zero_needs_without_offloading(strategy, idle, calls):
    """Each stage calls all but the names of a stage above it, of offloading and of shared samples."""
    small(world_size=2, strategy=strategy)
    left = uncalled(Part.DEEPSPEED, calls)
    idle += WHOLE_SAMPLES
    assert all(any(name in path for name in idle) for path in left) and len(left) == len(idle)


@pytest.mark.slow
def test_a_vision_tower_calls_what_is_replaced(calls, tmp_path):
    folder = video_models.make("qwen2_5_vl", tmp_path, weights=False)
    video = VideoInputs(
        frames=40, height=112, width=112, settings={"size": {"shortest_edge": 784, "longest_edge": 10**7}}
    )
    estimate(str(folder), {"per_device_train_batch_size": 1}, 8, "a100_80gb", video=video)
    assert uncalled(Part.VISION, calls) == []


# peft (0.21.2) asks models for it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_detection_loss_calls_what_is_replaced(calls, tmp_path):
    pytest.importorskip("scipy", reason="the losses of detection need it")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = YolosConfig(**shape, image_size=[32, 32], patch_size=16, num_detection_tokens=4)
    label = {"class_labels": torch.tensor([0, 1]), "boxes": torch.full((2, 4), 0.5)}

    def collate(rows):
        return {"pixel_values": torch.zeros(len(rows), 3, 32, 32), "labels": [label for _ in rows]}

    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", remove_unused_columns=False)
    trainer = Trainer(YolosForObjectDetection(config), args, train_dataset=[{}] * 8, data_collator=collate)
    estimate_trainer(trainer, "cpu")
    assert uncalled(Part.DETECTION, calls) == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_script_calls_what_is_replaced(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("SHAPE", repr(SHAPE)))
    with caught_trainer(ScriptCommand(str(script))):
        pass
    assert uncalled(Part.DRY_RUN, calls) == []
    for words in (["--num_processes", "1"], ["--num_processes", "2", "--multi_gpu"]):
        with caught_trainer(ScriptCommand(str(script), launch=Launch("accelerate"), words=words), "a100_80gb"):
            pass
    assert uncalled(Part.LAUNCH, calls) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.slow
def test_a_trainer_that_generates_calls_what_is_replaced(calls):
    pytest.importorskip("test_grpo_estimates").task(beta=0.1, use_vllm=True)
    assert uncalled(Part.ROLLOUTS, calls) == []


def test_every_part_has_its_jobs():
    unreplaced = {part for part in Part if not replaced_paths(part)}
    elsewhere = {Part.VISION, Part.DETECTION, Part.ROLLOUTS, Part.DRY_RUN, Part.LAUNCH}
    assert set(Part) == set(JOBS) | unreplaced | elsewhere
    assert unreplaced == {Part.LEVERS, Part.MESH}


def test_every_declaration_is_found():
    """A part lists the modules that declare names for it and no others; all declarations are globals."""
    written = Counter()
    for module in pkgutil.walk_packages(estimator.__path__, f"{estimator.__name__}."):
        source = Path(util.find_spec(module.name).origin).read_text(encoding="utf-8")
        for part in re.findall(r"\bPart\.(\w+)\.(?:replaces|relies_on)\(", source):
            written[part, module.name.removeprefix(f"{estimator.__name__}.")] += 1
    assert {(part.name, module) for part in Part for module in part.modules} == set(written)
    assert sum(len(declared(part)) for part in Part) == written.total()


@pytest.mark.slow
def test_everything_is_put_back():
    before = {path: resolve(path) for part in Part for path in replaced_paths(part)}
    small(world_size=2, strategy="fsdp2")
    # Methods are bound anew whenever they are looked up: equal, not identical.
    assert {path: resolve(path) for path in before} == before


def test_the_ledger_of_deepspeed_asks_for_declared_names():
    instances = [names for names in declared(Part.DEEPSPEED) if names.use is Use.INSTANCE]
    known = {path.rpartition(".")[2] for names in instances for path in names.signatures}
    assert {*engine_tensors._KINDS, *engine_tensors._STAGING} <= known


def test_the_installed_libraries_are_known(subtests):
    for part in Part:
        with subtests.test(part=part):
            assert list(faults(part)) == []


@pytest.mark.slow
def test_a_missing_name_ends_in_a_sentence(unchecked, monkeypatch, command):
    monkeypatch.delattr(import_utils, "is_fake_tensor")
    said = (
        f"hf_memopt does not know transformers {transformers.__version__}: "
        "transformers.utils.import_utils.is_fake_tensor is missing"
    )
    with pytest.raises(IncompatibleLibrary) as ended:
        small()
    assert str(ended.value) == said
    code, out, err = command("estimate", "llama-3.2-1b", "--hardware", "a100_80gb")
    assert (code, out, err.strip()) == (2, "", f"error: {said}")
    _, out, _ = command("doctor")
    assert f"problem: no predictions: {said}" in " ".join(out.split())


def test_other_parameters_end_in_a_sentence(unchecked, monkeypatch):
    monkeypatch.setattr(vision_utils, "get_vision_window_index", lambda grid, window: None)
    (said,) = faults(Part.VISION)
    assert said.startswith(f"hf_memopt does not know transformers {transformers.__version__}: ")
    assert "get_vision_window_index takes (grid, window) instead of (grid_thw, " in said


def test_a_renamed_attribute_of_an_engine_is_noticed(unchecked, monkeypatch):
    if util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    from deepspeed.runtime.zero import stage3

    class Renamed:
        def __init__(self):
            self.fp16_partitioned_groups_flat = self.bit16_partitioned_groups = []

    monkeypatch.setattr(stage3, "DeepSpeedZeroOptimizer_Stage3", Renamed)
    said = " ".join(faults(Part.DEEPSPEED))
    assert "Stage3.ipg_buckets is missing" in said and "Stage3.fp16_partitioned_groups_flat" not in said


@pytest.mark.parametrize("kind", [AttributeError, IndexError, KeyError, TypeError])
def test_an_error_of_a_library_is_not_one_of_settings(kind, monkeypatch):
    error = kind("x")
    # Code of a library: an error of the user's own would be named by its place.
    source = compile("def fail(*_, **__): raise error", transformers.trainer.__file__, "exec")
    library = {"error": error, "__name__": "transformers.trainer"}
    exec(source, library)
    monkeypatch.setattr(transformers.Trainer, "training_step", library["fail"])
    with pytest.raises(IncompatibleLibrary) as ended:
        small()
    text = str(ended.value)
    assert f"transformers {transformers.__version__}: {kind.__name__}: " in text
    assert "please report it with `hf-memopt doctor --json`" in text
    assert ended.value.__cause__ is error


def test_an_error_of_this_package_is_called_its_own(monkeypatch):
    """Though torch's dispatcher, on the way to it, is a library's."""
    monkeypatch.setattr(fake_ledger.FakeLedger, "_inherit", None)
    with pytest.raises(IncompatibleLibrary, match=r"tracing fails in hf_memopt \S+, torch "):
        small()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lr_scheduler_kwargs": {"foo": 1}}, "lr_scheduler_kwargs.foo"),
        ({"learning_rate": "much"}, "learning_rate='much' must be a number"),
        ({"weight_decay": None}, "weight_decay=None must be a number"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs"),
    ],
)
def test_an_error_of_settings_stays_one(fields, named):
    with pytest.raises(InputError) as ended:
        estimate(AutoConfig.for_model("llama", **SHAPE), {"per_device_train_batch_size": 1, **fields}, 64, "a100_80gb")
    assert named in str(ended.value)


@pytest.mark.slow
def test_an_installation_that_cannot_be_imported_is_a_sentence(monkeypatch, tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise RuntimeError('CUDA_HOME does not exist')")
    done = run(BIN / "hf-memopt", "doctor", "--json", env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert done.returncode == 0, done.stderr
    (problem,) = (text for text in json.loads(done.stdout)["problems"] if "cannot be imported" in text)
    assert problem.startswith("no predictions of deepspeed: deepspeed ")
    assert problem.endswith("RuntimeError: CUDA_HOME does not exist")


def test_doctor_has_a_line_for_each_part_and_one_where_nothing_can_be_predicted():
    missing = {Part.VISION: ["one", "two", "three"], Part.LIGER: ["four"]}
    lines = doctor._refused_predictions(lambda part: missing.get(part, []), Part)
    assert lines == [
        "no predictions of Liger's kernels: four",
        "no predictions of vision towers: one, and 2 more names",
    ]
    missing[Part.EVERY_JOB] = ["five"]
    assert doctor._refused_predictions(lambda part: missing.get(part, []), Part) == ["no predictions: five"]
