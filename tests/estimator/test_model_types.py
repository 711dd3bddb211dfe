"""estimate() over model types that transformers trains: answered and right, or refused in a sentence.

benchmarks/estimator_model_types.py runs all of them; here is a fixed sample, and every type that was wrong once.
"""

import sys

import pytest
from conftest import ROOT, slow

sys.path.insert(0, str(ROOT / "benchmarks"))
from tiny_models import LENGTH, measured_peak, tiny_config

from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate
from hf_memopt.estimator.tracing import extrapolate
from hf_memopt.estimator.tracing.pair_loss import with_pair_loss
from hf_memopt.estimator.tracing.tasks import TASKS, find_task, infer_task
from hf_memopt.estimator.trl_tasks import model_task
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.settle import PLANNED_TASKS, settle

_MICRO = 2
_SAMPLE = 40


def _config(model_type: str, **changes):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return tiny_config(CONFIG_MAPPING[model_type], **changes)


def _predicted(config, task: str) -> int:
    fields = {"per_device_train_batch_size": _MICRO}
    return estimate(config, fields, LENGTH, "cpu", task=task).peak_allocated_bytes


# What was wrong: states of weights that the batch does not reach, gradients that a loop adds in place, missing token
# ids, no vocabulary.
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("task", "model_type"),
    [
        *(slow("causal-lm", "mamba"), ("causal-lm", "whisper"), ("seq2seq-lm", "t5")),
        *(slow("sequence-classification", "llama"), slow("image-classification", "vit")),
        *(slow("image-text-to-text", "aya_vision"), slow("image-text-to-text", "fuyu")),
        *(slow("speech-seq2seq", "whisper"), slow("multiple-choice", "bert"), slow("causal-lm", "deepseek_v3")),
        *(slow("masked-lm", "deberta-v2"), slow("causal-lm", "jamba"), ("feature-extraction", "bert")),
        *(slow("feature-extraction", "qwen3"), slow("feature-extraction", "modernbert")),
    ],
)
def test_within_one_percent_of_a_real_step(task, model_type):
    config = _config(model_type)
    assert _predicted(config, task) == pytest.approx(measured_peak(config, task, _MICRO), rel=0.01)


def _sample() -> list[tuple[str, str]]:
    """Every n-th of all tasks and model types."""
    import transformers

    every = [
        (task, kind.model_type)
        for task, row in TASKS.items()
        for kind in getattr(transformers, row.auto_class)._model_mapping
    ]
    return every[:: len(every) // _SAMPLE]


@pytest.mark.slow
def test_a_sample_of_model_types_is_answered_or_refused():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for task, model_type in _sample():
        try:
            config = tiny_config(CONFIG_MAPPING[model_type])
        except Exception:  # its class has no defaults that go together
            continue
        try:
            assert _predicted(config, task) > 0
        except InputError as error:
            assert "\n" not in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "t5", "jamba", "deepseek_v3", "mamba", "gemma3_text", "qwen3_next"])
def test_shallow_models_extend_to_the_whole_one(model_type, monkeypatch):
    config = _config(model_type, layers=16)
    task = infer_task(config)
    extended = _predicted(config, task)
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert _predicted(config, task) == pytest.approx(extended, rel=0.001)


def test_a_task_has_the_names_that_hugging_face_gives_it(subtests):
    for name, model_type, task in [
        ("text-generation", "llama", "causal-lm"),
        ("summarization", "t5", "seq2seq-lm"),
        ("automatic-speech-recognition", "whisper", "speech-seq2seq"),
        ("automatic-speech-recognition", "wav2vec2", "ctc"),
        ("AutoModelForTokenClassification", "bert", "token-classification"),
        ("ctc", "hubert", "ctc"),
        ("sentence-similarity", "bert", "feature-extraction"),
    ]:
        with subtests.test(f"{name} {model_type} {task}"):
            assert find_task(name, _config(model_type)) == task


def test_without_a_task_the_usual_one_of_the_model_type_counts(subtests):
    for model_type, task in [
        *(("bert", "masked-lm"), ("t5", "seq2seq-lm"), ("whisper", "speech-seq2seq"), ("vit", "image-classification")),
        *(("wav2vec2", "ctc"), ("llava", "image-text-to-text"), ("llama", "causal-lm")),
    ]:
        with subtests.test(f"{model_type} {task}"):
            assert infer_task(_config(model_type)) == task


def test_a_checkpoint_of_text_without_a_head_is_of_embeddings(subtests):
    for model_type, named, task in [
        ("bert", "BertModel", "feature-extraction"),
        ("qwen3", "Qwen3ForCausalLM", "causal-lm"),
        ("vit", "ViTModel", None),
    ]:
        with subtests.test(f"{model_type} {named} {task}"):
            config = _config(model_type)
            config.architectures = [named]
            assert infer_task(config) == (task or "image-classification")


def test_the_other_pairs_are_negatives():
    """Two texts that are alike have the least loss beside those that are not; padding does not count."""
    import torch
    from transformers import AutoModel

    torch.manual_seed(0)
    model = with_pair_loss(AutoModel.from_config(_config("bert"))).eval()
    texts, mask = torch.randint(5, 90, (4, 6)), torch.ones(4, 6, dtype=torch.long)
    alike, moved = texts.unsqueeze(1).repeat(1, 2, 1), torch.stack([texts, texts.roll(1, 0)], dim=1)
    losses = [model(pairs, mask.unsqueeze(1).repeat(1, 2, 1))["loss"].item() for pairs in (alike, moved)]
    assert losses[0] < losses[1] and model(alike)["loss"].item() == pytest.approx(losses[0], abs=1e-5)
    padded = torch.cat([alike, torch.full((4, 2, 3), 7)], dim=2)
    ends = torch.cat([mask, torch.zeros(4, 3, dtype=torch.long)], dim=1).unsqueeze(1).repeat(1, 2, 1)
    assert model(padded, ends)["loss"].item() == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("model_type", "task", "reason"),
    [
        ("llama", "ctc", "no AutoModelForCTC of model type 'llama'; its tasks: causal-lm"),
        ("vit", "feature-extraction", "no AutoModel of model type 'vit'; its tasks: image-classification"),
        ("bark", "feature-extraction", "no AutoModel of model type 'bark'"),
        ("higgs_audio_v2_tokenizer", "feature-extraction", "no AutoModel of model type"),  # its library is missing
        ("dpr", "feature-extraction", "DPRQuestionEncoder gives no features of tokens"),
        ("clvp", "feature-extraction", "'clvp' cannot be trained on input_ids"),
        ("qwen2_5_omni_thinker", "feature-extraction", "no attribute 'vision_start_token_id'"),
        ("llama", "wrong", "unknown task 'wrong'"),
        ("pi0", "image-text-to-text", "takes state: a robot's joints"),
        ("musicgen", "causal-lm", "'musicgen' cannot be estimated"),
        ("instructblip", "image-text-to-text", "cannot be trained on pixel_values, input_ids, labels"),
        ("pp_lcnet", "image-classification", "did not return a loss|takes no labels"),
    ],
)
def test_what_cannot_be_estimated_is_refused_with_the_model_type_and_the_reason(model_type, task, reason):
    with pytest.raises(InputError, match=reason):
        _predicted(_config(model_type), task)


@pytest.mark.slow
def test_every_model_type_has_tasks_or_is_refused(subtests):
    """Some classes of transformers' tables are missing, or raise when they are asked for an attribute."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type in CONFIG_MAPPING:
        with subtests.test(model_type):
            try:
                config = CONFIG_MAPPING[model_type]()
            except Exception:  # its class has no defaults that go together
                continue
            try:
                assert TASKS[infer_task(config)].model_class(config)
            except InputError as error:
                assert "has no head" in str(error)


@pytest.mark.drawn(15)
@pytest.mark.parametrize("task", PLANNED_TASKS)
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "t5", "bert", "llama", "vit"])
def test_plan_refuses_a_task_that_a_model_type_has_not_as_estimate_does(model_type, task):
    config = _config(model_type)
    auto, had = TASKS[model_task(task)].auto_class, TASKS[model_task(task)].model_class(config) is not None
    try:
        settle(JobSpec(model=config, hardware="rtx_4090", task=task), "full")
        assert had
    except InputError as refused:
        assert had is (f"no {auto} of model type" not in str(refused)), str(refused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "batch"),
    [("vit", "4 × pixel_values of "), ("hubert", "4 × input_values of "), ("bert", "4 × 32 tokens")],
)
def test_the_command_line_says_how_large_a_batch_is(model_type, batch, tmp_path, command):
    _config(model_type).save_pretrained(tmp_path)
    sizes = ("--seq-len", "32", "--set", "per_device_train_batch_size=4")
    code, out, err = command("estimate", tmp_path, "--hardware", "rtx_4090", *sizes)
    assert code == 0 and f", {batch}" in " ".join(out.split()), err
