"""Jobs whose memory is decided by what a plain look misses: padding, kept logits, the allocator's setting."""

import dataclasses
import os

import pytest
import torch
from transformers import LlamaConfig
from video_models import qwen2_5_vl

from benchmarks.profiled_peak import allocator_peak
from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate, estimate_trainer
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job import describe
from hf_memopt.estimator.job_checks import facts_of
from hf_memopt.estimator.largest_batch import is_padded, largest_batch
from hf_memopt.estimator.scripts.dry_run import caught_trainer
from hf_memopt.estimator.scripts.launched import ScriptCommand
from hf_memopt.estimator.smaller import with_sizes
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.estimator.suggestions import TRAINERS_ORDER, smallest_combination
from hf_memopt.estimator.tracing import trace
from hf_memopt.estimator.tracing.tasks import TASKS
from hf_memopt.estimator.trainer_job import describe_trainer
from hf_memopt.hardware import allocator
from hf_memopt.hardware.allocator import SPELLINGS, expands_segments
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.changes import EVAL_ACCUMULATION
from hf_memopt.presets.build import build_preset
from hf_memopt.units import size
from hf_memopt.video.inputs import VideoInputs, value_tensors


def _collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    values = {"input_ids": 5, "labels": 5, "attention_mask": 1}
    lengths = [len(row["input_ids"]) for row in rows]
    return {
        name: torch.tensor([[values[name]] * length + [fill[name]] * (longest - length) for length in lengths])
        for name in fill
    }


def _trainer(folder, lengths, **more):
    """A trainer of a model with one key head for eight query heads: sdpa repeats them where there is a mask."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=1,
        intermediate_size=128,
    )
    fields = {"per_device_train_batch_size": 4, "max_steps": 2, "activation_checkpointing": False}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
        **fields | more.pop("fields", {}),
    )
    data = [{"input_ids": [5] * length} for length in lengths]
    return Trainer(LlamaForCausalLM(config), args, train_dataset=data, data_collator=_collate, **more)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("lengths", "real"),
    [
        ([128, 127] * 16, [128, 128, 128, 127] * 8),  # the four longest have no padding, most batches have
        ([128] * 31 + [90], [128, 128, 128, 90] * 8),  # one row of the data is enough
        ([128, 127, 127, 127] * 4, [128, 127, 127, 127] * 4),
        ([128] * 32, [128] * 32),  # never padded
    ],
    ids=["two lengths", "one shorter", "sampled", "one length"],
)
def test_the_longest_batch_has_the_padding_that_real_ones_have(lengths, real, tmp_path):
    found = estimate_trainer(_trainer(tmp_path, lengths), "cpu")
    fields = {"train_sampling_strategy": "sequential"}
    truth = allocator_peak(lambda: _trainer(tmp_path, real, fields=fields).train())
    assert found.peak_allocated_bytes == pytest.approx(truth, rel=0.01)


def test_a_batch_of_one_row_is_never_padded(tmp_path):
    batch = largest_batch(_trainer(tmp_path, [64, 63], fields={"per_device_train_batch_size": 1}))
    assert bool(batch["attention_mask"].all())


def test_rows_of_text_that_differ_in_characters_alone(tmp_path):
    """The size of text is in characters: the shortest of them all shows whether batches have padding."""
    from datasets import Dataset

    def split(rows):
        return _collate([{"input_ids": row["text"].split()} for row in rows])

    trainer = _trainer(tmp_path, [8])
    trainer.data_collator = split
    for texts, padded in ((["aaaa " * 8] * 6 + ["aaa " * 8] * 6 + ["a a"], True), (["aa " * 8, "a " * 8] * 6, False)):
        trainer.train_dataset = Dataset.from_dict({"text": texts})
        mask = largest_batch(trainer)["attention_mask"]
        assert mask.shape == (4, 8) and bool(mask.all()) is not padded


@pytest.fixture
def plain_environment(monkeypatch):
    for name in SPELLINGS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "segments"), ("max_split_size_mb:64", "segments"), ("expandable_segments:True", "expandable")],
)
def test_reserved_memory_is_by_the_segments_that_the_environment_asks_for(value, kind, tmp_path, plain_environment):
    if value:
        plain_environment.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    found = estimate_trainer(_trainer(tmp_path, [1300] * 8), "a100_80gb")
    assert found.reserved_bytes["expandable"] < found.reserved_bytes["segments"]
    assert found.peak_reserved_bytes == found.reserved_bytes[kind]
    words = {"segments": "ordinary segments", "expandable": "expandable segments"}[kind]
    assert any(f"allocator, with {words}" in note for note in found.notes)
    other = {
        "segments": "PYTORCH_ALLOC_CONF=expandable_segments:True, not set here,",
        "expandable": "ordinary segments",
    }
    difference = size(found.reserved_bytes["segments"] - found.reserved_bytes["expandable"])
    amount = f"reserve {difference} {'more' if kind == 'expandable' else 'less'}"
    assert f"{other[kind]} would {amount}" in found.notes


@pytest.mark.parametrize("value", [None, "expandable_segments:True", "max_split_size_mb:64"])
def test_a_call_of_estimate_runs_with_what_its_process_sets(value, plain_environment):
    """A preset's arguments ask for expandable segments, whatever build of torch is here; a user's own value stays."""
    if value:
        plain_environment.setenv("PYTORCH_ALLOC_CONF", value)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, vocab_size=3000)

    def kind():
        found = estimate(LlamaConfig(**sizes), {}, 1300, "a100_80gb")
        assert found.reserved_bytes["expandable"] != found.reserved_bytes["segments"]
        return next(kind for kind, reserved in found.reserved_bytes.items() if reserved == found.peak_reserved_bytes)

    plain_environment.setattr(allocator, "_build_has_cuda_allocator", lambda: False)
    expands = value == "expandable_segments:True"
    assert kind() == ("expandable" if expands else "segments")
    build_preset("a100_80gb", "full").apply_environment()
    assert kind() == ("expandable" if expands or value is None else "segments")


SCRIPT = """
import os, sys
{setting}
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
Trainer(model, TrainingArguments(sys.argv[1]), train_dataset=[{{"input_ids": [1] * 8, "labels": [1] * 8}}]).train()
"""


@pytest.mark.parametrize(
    ("setting", "expandable"),
    [
        ("", False),
        ("os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'", True),
        ("import hf_memopt.hardware; hf_memopt.hardware.configure_allocator()", True),
        ("os.environ.update(PYTORCH_ALLOC_CONF='', PYTORCH_CUDA_ALLOC_CONF='expandable_segments:False')", False),
    ],
)
def test_what_a_script_sets_decides(setting, expandable, tmp_path, plain_environment):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(setting=setting))
    before = dict(os.environ)
    with caught_trainer(ScriptCommand(str(script), [str(tmp_path / "out")]), "a100_80gb"):
        assert expands_segments() is expandable
    assert dict(os.environ) == before


_BERT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
_LLAMA = _BERT | {"num_key_value_heads": 1, "pad_token_id": 0}
_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "num_layers": 2}
ADAPTED = [
    ("bert", _BERT, "sequence-classification", "SEQ_CLS", 3),
    ("bert", _BERT, "token-classification", "TOKEN_CLS", 3),
    *(("bert", _BERT, "question-answering", "QUESTION_ANS", 2), ("bert", _BERT, "masked-lm", None, 2)),
    *(("t5", _T5, "seq2seq-lm", "SEQ_2_SEQ_LM", 2), ("llama", _LLAMA, "sequence-classification", "SEQ_CLS", 5)),
    ("llama", _LLAMA, "token-classification", "TOKEN_CLS", 5),
    *(("llama", _LLAMA, "question-answering", "QUESTION_ANS", 2), ("llama", _LLAMA, "causal-lm", "CAUSAL_LM", 2)),
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("kind", "sizes", "task", "task_type", "labels"), ADAPTED)
def test_a_presets_adapters_are_those_of_the_models_task(kind, sizes, task, task_type, labels):
    """peft trains the head of a classifier, too: as many weights as in the real model."""
    import transformers
    from peft import LoraConfig

    config = transformers.AutoConfig.for_model(kind, vocab_size=64, num_labels=labels, **sizes)
    model = getattr(transformers, TASKS[task].auto_class).from_config(config)
    out = {"TOKEN_CLS": ["classifier", "score"], "QUESTION_ANS": ["qa_outputs"]}.get(task_type)  # or peft raises
    adapters = LoraConfig(r=16, target_modules="all-linear", task_type=task_type, exclude_modules=out)
    real = add_adapters(model, adapters)
    trained = {name: weight.numel() for name, weight in real.named_parameters() if weight.requires_grad}
    job = spec_job(preset_spec(build_preset("rtx_3060", "lora"), config, task=task, seq_len=8))
    assert sorted(job.trained_sizes()) == sorted(trained.values())
    heads = [name for name in trained if "modules_to_save" in name]
    assert bool(heads) is (task_type in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"))


@pytest.mark.slow
def test_a_video_model_whose_positions_are_made_from_numbers_under_zero3():
    """zero.Init leaves its own torch.tensor behind, and transformers makes a tensor of one number from each sample."""
    config, *_ = qwen2_5_vl()
    video = VideoInputs(frames=2, height=56, width=56)
    fields = {"per_device_train_batch_size": 1}
    found = estimate(config, fields, 8, "a100_80gb", video=video, world_size=2, strategy="zero3")
    assert found.phases["backward"] > found.breakdown["parameters"] > 0


FIELDS = {"per_device_train_batch_size": 1}


@pytest.mark.parametrize(
    ("kind", "sizes", "field"),
    [
        ("gpt2", {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 128}, "n_positions"),
        ("opt", _BERT | {"max_position_embeddings": 128}, "max_position_embeddings"),
        ("bert", _BERT | {"max_position_embeddings": 128}, "max_position_embeddings"),
        ("gptj", {"n_layer": 2, "n_embd": 16, "n_head": 2, "rotary_dim": 4, "n_positions": 128}, "n_positions"),
    ],
)
def test_a_table_of_positions_ends_where_it_ends(kind, sizes, field):
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, vocab_size=64, **sizes)
    with pytest.raises(InputError, match=rf"128 positions.*--set model\.{field}=256"):
        estimate(config, FIELDS, 256, "cpu")
    assert estimate(with_sizes(config, {field: 256}), FIELDS, 256, "cpu").peak_allocated_bytes > 0


@pytest.mark.parametrize("prepared", [False, True])
def test_flash_attention_of_4_bit_weights_with_peft_preparation(prepared):
    """peft's preparation leaves norms in 32 bits; flash attention casts to the configuration's dtype, not to the
    first linear layer's bytes (transformers' get_target_dtype)."""
    from peft import LoraConfig
    from transformers import AutoConfig, BitsAndBytesConfig

    config = AutoConfig.for_model("llama", vocab_size=64, **_LLAMA)
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    found = estimate(
        config,
        FIELDS,
        64,
        "a100_80gb",
        dtype="bfloat16",
        attn_implementation="flash_attention_2",
        quantization_config=packed,
        kbit_preparation=prepared,
        peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    assert found.fits


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}


def _evaluating(folder, **fields):
    return _trainer(
        folder,
        [32] * 8,
        eval_dataset=[{"input_ids": [5] * 128}] * 60,
        compute_metrics=lambda _, compute_result=True: {},
        fields=EVALUATED | fields,
    )


LOGITS = 60 * 128 * 128 * 4  # bytes of the whole evaluation


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 2),  # Trainer concatenates a batch's logits with all before them
        ({"eval_do_concat_batches": False}, 1),
        ({"eval_accumulation_steps": 1}, 0),
        ({"batch_eval_metrics": True}, 0),
    ],
    ids=["kept", "listed", "moved", "batch by batch"],
)
def test_logits_of_an_evaluation_are_where_the_trainer_has_them(fields, kept, tmp_path):
    found = estimate_trainer(_evaluating(tmp_path, **fields), "cpu")
    truth = allocator_peak(lambda: _evaluating(tmp_path, **fields).train())
    assert found.peak_allocated_bytes == pytest.approx(truth, rel=0.03)
    assert (found.phase == "eval" and found.breakdown["logits"] >= kept * LOGITS) or not kept


@pytest.mark.slow
def test_logits_moved_to_the_host_are_in_host_bytes(tmp_path):
    def host(**fields):
        return estimate_trainer(_evaluating(tmp_path, **fields), "a100_80gb").host_bytes

    without = host(prediction_loss_only=True)
    assert host() - without == LOGITS
    assert host(eval_accumulation_steps=1) - without == 2 * LOGITS  # numpy concatenates there
    assert host(batch_eval_metrics=True) - without == LOGITS // 30


@pytest.mark.slow
def test_logits_that_wait_for_metrics_are_proposed_to_go_to_the_host(tmp_path):
    """transformers#12878: the change whose own answer fits is proposed, and nothing where they do not wait."""
    kept = describe_trainer(_evaluating(tmp_path), "rtx_3060", None, None)
    estimate = estimate_job(kept)
    moved = estimate_trainer(_evaluating(tmp_path, eval_accumulation_steps=1), "rtx_3060")
    small = dataclasses.replace(kept.device, memory=moved.device_bytes + 2**20)
    found = smallest_combination(dataclasses.replace(kept, device=small), estimate, order=TRAINERS_ORDER)
    assert found.change == "eval_accumulation_steps=1" and found.fits
    assert found.saved_bytes == estimate.device_bytes - moved.device_bytes
    for fields in ({"eval_accumulation_steps": 1}, {"prediction_loss_only": True}):
        job = describe_trainer(_evaluating(tmp_path, **fields), "rtx_3060", None, None)
        assert EVAL_ACCUMULATION.settings_for(facts_of(job)) is None


@pytest.mark.slow
def test_no_line_goes_through_two_points_of_one_moment():
    """Between steps first gradients are held, then the next batches: of 160 samples these are more than the gradients
    of the shallower trace, and less than those of the deeper one."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    fields = {"gradient_accumulation_steps": 2, "optim": "sgd"}
    between = [
        estimate(config, {**fields, "per_device_train_batch_size": size}, 32, "a100_80gb", dtype="float32").phases[
            "between"
        ]
        for size in (100, 160, 190)
    ]
    assert between == sorted(between)


def gemma_with_vision():
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = Gemma3TextConfig(**sizes, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, vocab_size=64)
    vision = SiglipVisionConfig(**sizes, num_hidden_layers=2, image_size=28, patch_size=14)
    return Gemma3Config(text_config=text, vision_config=vision)


@pytest.mark.slow
def test_adapters_on_a_vision_tower_that_initializes_by_values():
    """SigLIP's initialization asks tensors for values."""
    from peft import LoraConfig

    assert estimate(gemma_with_vision(), {}, 16, "l40s", peft_config=LoraConfig(target_modules=["q_proj"])).fits


@pytest.mark.slow
def test_a_tower_that_text_does_not_reach_is_found_once(monkeypatch):
    """Its weights get no states, which the first trace finds out: a second one of other sizes begins with that."""
    config, followed, follow = gemma_with_vision(), [], trace._followed
    monkeypatch.setattr(trace, "_UNREACHED", set())
    monkeypatch.setattr(trace, "_followed", lambda job: followed.append(job.real_states) or follow(job))
    asked = [estimate(config, {"per_device_train_batch_size": size}, 16, "l40s") for size in (2, 1)]
    assert followed == [False, True, False]
    monkeypatch.setattr(trace, "_UNREACHED", set())
    alone = estimate(config, {"per_device_train_batch_size": 1}, 16, "l40s")
    assert followed == [False, True, False, False, True]
    assert asked[1].to_dict() == alone.to_dict()


def test_adapters_leave_no_compiler_in_the_environment(monkeypatch):
    """peft's BOFT looks for one of its own, and leaves the choice behind."""
    from peft import BOFTConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setenv("CXX", "c++")
    add_adapters(LlamaForCausalLM(LlamaConfig(**sizes)), BOFTConfig(target_modules=["q_proj"], boft_block_size=4))
    assert os.environ["CXX"] == "c++"


RESIZES = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained({folder!r}, dtype=torch.bfloat16{placed})
model.resize_token_embeddings(model.config.vocab_size + {added}, mean_resizing={mean})
rows = [{{"input_ids": [5] * 8, "labels": [5] * 8}}] * 4
args = TrainingArguments({folder!r} + "/out", max_steps=1, report_to=[])
Trainer(model=model, args=args, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("placed", "added", "mean"),
    [(', device_map="auto"', 8, True), (', device_map="auto"', 8, False), ("", 8, True)],
    ids=["drawn", "copied", "on the host"],
)
def test_the_peak_of_resizing_embeddings_is_counted(placed, added, mean, tmp_path):
    """VILA#262: two copies of the embeddings in fp32 and their covariance, where the model is on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, **sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    matrix = 4096 * 64 * 2  # of the old embeddings, which Python may free before the head is resized, too
    beside = allocator_peak(lambda: model.resize_token_embeddings(4096 + added, mean_resizing=mean))
    script = tmp_path / "train.py"
    script.write_text(RESIZES.format(folder=str(tmp_path), placed=placed, added=added, mean=mean))
    with caught_trainer(ScriptCommand(str(script)), "a100_80gb") as trainer:
        found = estimate_trainer(trainer, "a100_80gb")
        weights = sum(weight.numel() * weight.element_size() for weight in trainer.model.parameters())
    counted = found.phases["load"] - weights
    assert found.peak_allocated_bytes >= found.phases["load"]
    if placed:
        assert beside - 8192 <= counted <= beside + matrix + 8192
    else:
        assert counted < 8192


class _LossOfPairs(torch.nn.Module):
    """Holds the trained model, as the losses of sentence-transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return sum(self.model(**{**inputs, "input_ids": ids}).loss for ids in (inputs["input_ids"],) * 2)


@pytest.mark.slow
def test_a_loss_that_holds_the_model_names_none_of_its_layers_anew(tmp_path, monkeypatch):
    """The gradients of its last layer had a name with the layer's number, by which a deeper model has none: 3 % of an
    embedding model with checkpointing were missing."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    class PairTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return self.loss(inputs)

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=8, num_attention_heads=4, intermediate_size=512
    )
    model = LlamaForCausalLM(config)
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=16, report_to="none", activation_checkpointing=True
    )
    trainer = PairTrainer(model, args, train_dataset=[{"input_ids": [5] * 48}] * 32, data_collator=_collate)
    trainer.loss = _LossOfPairs(model)
    segments = trace.trace(describe_trainer(trainer, "cpu", None, None).at_depth(3)).segments
    assert not [segment for segment in segments if "layers.2" in segment]
    extended = estimate_trainer(trainer, "cpu").peak_allocated_bytes
    monkeypatch.setattr("hf_memopt.estimator.tracing.extrapolate._TRACED_WHOLE", 99)
    assert extended == pytest.approx(estimate_trainer(trainer, "cpu").peak_allocated_bytes, rel=1e-3)


def test_a_batch_with_a_mask_or_with_positions_that_start_again_is_padded():
    mask, positions = torch.ones(2, 3), torch.arange(3).repeat(2, 1)
    for batch, padded in (
        *(({}, False), (torch.ones(2, 3), False), ({"attention_mask": mask}, False)),
        ({"attention_mask": mask.clone().fill_diagonal_(0)}, True),
        ({"position_ids": positions, "attention_mask": mask}, False),
        *(({"position_ids": torch.tensor([[0, 1, 0]])}, True), ({"position_ids": torch.tensor([[0, 0, 0]])}, False)),
    ):
        assert is_padded(batch) is padded, batch


def test_values_of_a_batch_are_kept_where_they_decide_shapes():
    floats, ids = torch.zeros(2**20), torch.zeros(2**21, dtype=torch.long)
    batch = {"ids": ids, "mask": torch.zeros(8), "pixels": floats, "meta": torch.empty(8, device="meta")}
    assert value_tensors(batch).keys() == {"ids", "mask"}


def test_facts_of_a_job_say_whether_it_accumulates(subtests):
    for accumulation in [1, 2, 3]:
        with subtests.test(accumulation=accumulation):
            job = describe(load_config("smollm2-135m"), {"gradient_accumulation_steps": accumulation}, 64, "rtx_4090")
            assert facts_of(job).setup.accumulates is (accumulation > 1)
