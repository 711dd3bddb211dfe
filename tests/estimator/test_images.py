"""Jobs of images: what a picture is to a model, what its job takes, on the command line and in a real run."""

import gc
import json
import re

import pytest
import torch
import video_models
from conftest import slow
from peft import LoraConfig
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, estimate
from hf_memopt.estimator.api import run_trace
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.spec_job import preset_spec, read_model, spec_job
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.planner.samples.data_use import find_use
from hf_memopt.presets import get_preset
from hf_memopt.video.image_inputs import image_inputs, read_image_settings
from hf_memopt.video.inputs import value_tensors
from hf_memopt.video.processor import load_processor

FIELDS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
SIZES = [(640, 480), (96, 224), (1280, 720)]
KNOWN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "internvl")


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", KNOWN)
def test_a_picture_is_what_the_processor_makes_of_it(name, tmp_path, subtests):
    folder = video_models.make(name, tmp_path, weights=False)
    config = AutoConfig.from_pretrained(folder)
    processor = load_processor(str(folder), config)
    for width, height in SIZES:
        with subtests.test(size=(width, height)):
            images = image_inputs(str(folder), config, {"images": 2, "image_size": f"{width}x{height}"}, None)
            pictures = [Image.new("RGB", (width, height))] * 2
            text = (processor.image_token + " ") * 2
            made = processor(text=[text], images=pictures, return_tensors="pt")
            batch = images.batch(config, 1)
            token, _ = images.place(config)
            assert (batch["input_ids"] == token).sum() == (made["input_ids"] == token).sum() > 0
            assert batch["pixel_values"].shape == made["pixel_values"].shape
            if "image_grid_thw" in made:
                assert torch.equal(batch["image_grid_thw"], made["image_grid_thw"])


def test_bundled_models_see_pictures_as_their_checkpoints_do(subtests):
    """Worked out by hand from the published processors: patches of 14 or 16 pixels merged by two, in whole multiples
    near the picture's own size; Gemma's 256 tokens of any picture; SmolVLM's tiles of 64 tokens."""
    expected = {
        ("qwen2.5-vl-3b", "1280x720"): (26 * 2 * 46 * 2, 26 * 46),
        ("qwen3-vl-8b", "1280x720"): (44 * 80, 22 * 40),
        ("qwen3-vl-8b", "100x100"): (16 * 16, 64),
        ("qwen3.5-27b", "100x100"): (16 * 16, 64),  # scaled up to 65,536 pixels
        ("gemma-3-4b", "1280x720"): (1, 256),
    }
    for (model, size), (patches, tokens) in expected.items():
        with subtests.test(model=model):
            config = load_config(model)
            images = image_inputs(model, config, {"image_size": size}, None)
            tensors, count, step_tokens, *_ = images.clip(config)
            assert (tensors["pixel_values"].shape[0], count, step_tokens) == (patches, 1, tokens)


def test_a_sample_has_the_length_that_was_asked_for():
    config = load_config("qwen3-vl-8b")
    images = image_inputs("qwen3-vl-8b", config, {"images": 2, "image_size": "640x480"}, 2048)
    assert images.seq_len(config) == 2048 and images.prompt_tokens == 64
    assert images.batch(config, 1)["labels"].ne(-100).sum() == images.answer_tokens
    assert (
        image_inputs("qwen3-vl-8b", config, {"image_size": "640x480", "answer_tokens": 10}, 2048).answer_tokens == 10
    )


def test_what_is_no_picture_is_refused():
    most = "at most 10,000 a sample, of at most 134,217,728 pixels"
    for settings, message in [
        ({"images": 0}, "images=0 must be an integer of at least 1"),
        ({"images": 1, "image_size": "big"}, "image_size=big: write width and height"),
        ({"images": 1, "image_size": "60000x60000"}, most),
        ({"images": 10_001}, most),
        ({"images": 1, "max_frames": 4}, "max_frames beside images"),
    ]:
        with pytest.raises(InputError, match=message):
            image_inputs("qwen3-vl-8b", None, settings, None)


@pytest.mark.slow
def test_pictures_that_no_model_takes_are_refused():
    settings = {"images": 4, "image_size": "4000x4000"}
    with pytest.raises(InputError, match="seq_len=2048 leaves no room for text"):
        image_inputs("qwen3-vl-8b", load_config("qwen3-vl-8b"), settings, 2048)
    with pytest.raises(InputError, match="what a picture is to models of type 'qwen3' is not known"):
        image_inputs("qwen3-8b", load_config("qwen3-8b"), {"images": 1}, None)


def test_damaged_settings_are_those_of_the_family(tmp_path):
    for damaged in ("{", "[1, 2]", '"qwen"', "7"):
        (tmp_path / "preprocessor_config.json").write_text(damaged)
        assert read_image_settings(str(tmp_path)) == {}
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 4, "longest_edge": 9}}')
    assert read_image_settings(str(tmp_path))["size"]["longest_edge"] == 9
    assert read_image_settings("qwen3-vl-8b") == {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    assert read_image_settings("qwen2.5-vl-7b")["max_pixels"] == 12845056


TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 1000}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {**TOWER, "model_type": "clip_vision_model", "patch_size": 14, "image_size": 56, "projection_dim": 32}
# Families whose processor needs a tokenizer: their models refuse a number of tokens that is not their tower's.
TINY = {
    "llava": {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_seq_length": 16},
    "llava_next": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": CLIP,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**TOWER, "model_type": "pixtral", "patch_size": 14, "image_size": 112},
    },
}


def _made(name: str, folder):
    if name not in TINY:
        return video_models.make(name, folder)
    token = "image_token_index" if name == "mistral3" else "image_token_id"
    config = AutoConfig.for_model(name, **TINY[name], **{token: 999})
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def test_pictures_are_tiles_and_rows_of_patches():
    """LLaVA-NeXT's 320 × 240: 112 × 112 of four tiles, of which 8 × 6 patches are no padding, a newline each row, and
    16 of the whole; Mistral 3's: 84 × 112, merged by two: 3 rows of 4, with a break each."""
    for name, tokens, beside in [("llava", 16, 2), ("llava_next", 8 * 6 + 6 + 16, 2), ("mistral3", 12, 3)]:
        token = "image_token_index" if name == "mistral3" else "image_token_id"
        config = AutoConfig.for_model(name, **TINY[name], **{token: 999})
        images = image_inputs("none", config, {"image_size": "320x240"}, None)
        assert images.clip(config)[-3:] == (tokens, 0, beside)


SAMPLES = {
    "two": {"images": 2},
    "long answer": {"images": 1, "answer_tokens": 300},
    "adapters in a checkpointed tower": {"images": 1, "image_size": "640x480"},
}


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["qwen3_vl", *map(slow, ("qwen2_5_vl", "smolvlm", "internvl", *TINY))])
@pytest.mark.parametrize("sample", SAMPLES)
def test_predicted_as_measured(name, sample, tmp_path):
    folder = _made(name, tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    images = image_inputs(str(folder), config, {"image_size": "320x240", **SAMPLES[sample]}, None)
    batch = images.batch(config, FIELDS["per_device_train_batch_size"])
    real = {name: torch.rand(value.shape) if value.device.type == "meta" else value for name, value in batch.items()}
    fields, lora = FIELDS, None
    if "adapters" in sample:
        fields = FIELDS | {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
        }
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    job = {"video": images, "task": "image-text-to-text", "peft_config": lora}
    predicted = estimate(config, fields, 0, "cpu", **job).peak_allocated_bytes

    def collate(rows):  # a batch of its own, as every collator makes
        return {name: value.clone() for name, value in real.items()}

    def run():
        args = TrainingArguments(
            str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, **fields
        )
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        model = add_adapters(model, lora) if lora else model
        Trainer(model=model, args=args, train_dataset=[0] * 8, data_collator=collate).train()

    gc.collect()
    assert predicted == pytest.approx(allocator_peak(run), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("clips", [{"images": 1}, {"max_frames": 8}], ids=["images", "videos"])
def test_every_depth_has_the_same_segments(clips):
    """Qwen3-VL has three mergers between its tower and its text layers, which are no layers of a model of three."""
    spec = read_model(preset_spec(get_preset("h100_80gb", "lora"), "qwen3-vl-2b", MemoryArguments(), clips=clips))
    job = spec_job(spec)
    depths = job.depths()
    assert len(depths) == 2 and 3 in depths
    names = [{moment.segment for moment in run_trace(job.at_depth(depth)).moments} for depth in depths]
    assert names[0] == names[1]


@pytest.mark.slow
def test_the_command_line_takes_images(command, tmp_path):
    folder = video_models.make("qwen3_vl", tmp_path, weights=False)
    words = ("--hardware", "rtx_4090", "--method", "lora", "--set", "images=2", "--set", "image_size=640x480")
    code, output, _ = command("estimate", str(folder), *words, "--json")
    found = json.loads(output)
    assert code == 0 and any("2 images of 640 × 480" in note for note in found["notes"])
    code, output, _ = command("plan", str(folder), *words)
    assert code == 0 and "video_sft.py" in output and "--max_frames" not in output
    code, _, errors = command("estimate", str(folder), *words[:4], "--set", "image_size=640")
    assert code == 2 and "image_size=640: write width and height" in errors


@pytest.mark.slow
def test_pictures_of_a_data_set_are_measured(command, jsonl, tmp_path, monkeypatch):
    """By the headers of the files: the most pictures of a row, the largest of all, and the longest text."""
    monkeypatch.chdir(tmp_path)
    for name, size in {"wide": (320, 40), "tall": (100, 200), "small": (64, 64)}.items():
        Image.new("RGB", size).save(f"{name}.png")
    answer = {"role": "assistant", "content": "three of them"}
    rows = [
        {"images": ["tall.png"], "messages": [{"role": "user", "content": "<image>" + "word " * 40}, answer]},
        {"images": ["wide.png", "small.png"], "messages": [{"role": "user", "content": "how many?"}, answer]},
    ]
    source = jsonl(rows, "pictures.jsonl")
    found = find_use(str(source), with_media=True, clips=False)
    tokens = -(-len("word " * 40) // 4) + -(-len("three of them") // 4)  # four bytes each, without a tokenizer
    assert found.pictures == {"images": 2, "image_size": "100x200", "answer_tokens": tokens}
    assert not find_use(str(source), with_media=True).pictures, "the job has clips of its own"
    video = {**rows[0], "images": [], "videos": ["a.mp4"]}
    assert not find_use(str(jsonl([video], "clips.jsonl")), with_media=True, clips=False).pictures

    model = video_models.make("qwen2_5_vl", tmp_path / "model", weights=False)
    asked = ("plan", model, "--hardware", "rtx_4090", "--method", "lora", "--quick", "--dataset")
    code, output, errors = command(*asked, source, "--json")
    says = r"for rows of 2 × 100x200 and \d+ tokens of text, the most that the 2 rows have"  # by the model's tokenizer
    assert code == 0 and re.fullmatch(says, json.loads(output)["notes"][-1]), errors
    code, _, errors = command(*asked, jsonl([video], "clips.jsonl"))
    assert code == 2 and "has videos: --set max_frames=N" in errors
    (tmp_path / "tall.png").unlink()
    code, _, errors = command(*asked, source)
    assert code == 2 and "tall.png: no such file" in errors


def test_answers_that_are_long_have_their_loss_in_chunks():
    spec = JobSpec(model="qwen3-vl-2b", clips={"images": 1}, seq_len=8192, memory_args=MemoryArguments())
    assert read_model(spec).memory_args.loss_chunk_size == 1024 and not read_model(spec).memory_args.logits_to_keep
    spec = JobSpec(model="qwen3-vl-2b", clips={"images": 1}, memory_args=MemoryArguments())
    assert read_model(spec).memory_args.logits_to_keep
    assert value_tensors(read_model(spec).video.batch(read_model(spec).config, 1)).keys() >= {"input_ids", "labels"}
