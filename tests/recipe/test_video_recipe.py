"""The video recipe on real clips: that the model looks, what is trained, what it takes, and what is refused."""

import json
import weakref
from pathlib import Path

import pytest
import torch
import video_models
import videos
from conftest import flags, slow
from faults import Strikes, struck
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments, set_seed

from hf_memopt import MemoryArguments, estimate, estimate_trainer
from hf_memopt.errors import InputError
from hf_memopt.levers.replaced import put_back
from hf_memopt.recipe.phase_peaks import PhasePeaks, _model_inputs
from hf_memopt.recipe.video import answer, real_inputs
from hf_memopt.trainer.video_trainer import VideoTrainer
from hf_memopt.video.collator import VideoCollator
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.media import Limits
from hf_memopt.video.model_parts import train_parts, vision_parts
from hf_memopt.video.processor import load_processor
from hf_memopt.video.video_files import BadVideo

QUIET = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "remove_unused_columns": False,
}
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
FAST = flags(preset="cpu", samples=1, held_out=2, max_steps=2, effective_batch_size=4, eval_steps=2)
FAST += flags(per_device_train_batch_size=2, max_frames=4, max_pixels_per_frame="none")


def given(clips: Path, out: Path, model: str = "qwen2_5_vl", rows: Path | None = None, **more) -> list[str]:
    """Options of a run on the clips."""
    rows = rows or clips / "rows.jsonl"
    return flags(model_name_or_path=clips / model, dataset_name=rows, output_dir=out, **more)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """A data file, its clips beside it, and tiny models of some families."""
    folder = tmp_path_factory.mktemp("clips")
    rows = []
    for number, frames in enumerate((4, 9, 12, 30, 5, 7, 8, 20)):
        videos.write(folder / f"{number}.mp4", videos.numbered(frames, 56, 56))
        messages = [
            {"role": "user", "content": "<video>What is moving?"},
            {"role": "assistant", "content": "first red then blue" + " green" * (number % 3)},
        ]
        rows.append({"messages": messages, "videos": [f"{number}.mp4"]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("qwen2_5_vl", "llava_onevision"):
        video_models.make(name, folder / name)
    return folder


def samples_of(folder: Path, name: str, **limits) -> list[dict]:
    processor = load_processor(str(folder / name), AutoConfig.from_pretrained(folder / name))
    encode = Encoder(processor, Limits(**limits), folder)
    return [encode(json.loads(line)) for line in (folder / "rows.jsonl").read_text().splitlines()]


class Copies(torch.utils.data.Dataset):
    """Samples made anew every time, as decoding makes them."""

    def __init__(self, samples: list[dict]):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {name: value.clone() for name, value in self.samples[index].items()}


@pytest.mark.slow
def test_the_demo_looks_at_its_clips(recipe, tmp_path):
    """22 of 24 held-out clips right, and a loss with another clip's pixels at least twice its own."""
    output = tmp_path / "out"
    trainer = recipe("video_sft")(
        ["--preset", "cpu", "--output_dir", str(output), "--max_steps", "70", "--eval_steps", "70", "--samples", "1"]
    )
    processor, held_out = trainer.processing_class, list(trainer.eval_dataset)
    model = AutoModelForImageTextToText.from_pretrained(output).eval()
    assert len(held_out) == 24
    answers = [answer(model, processor.tokenizer, sample, 8) for sample in held_out]
    assert sum(said == meant for said, meant in ((a.strip(), b.strip()) for a, b in answers)) >= 22
    assert len({meant for _, meant in answers}) > 6

    def loss(sample) -> float:
        with torch.no_grad():
            return model(**VideoCollator(processor.tokenizer.pad_token_id)([sample])).loss.item()

    own = swapped = 0.0
    for sample, (_, meant) in zip(held_out, answers, strict=True):
        shape = sample["pixel_values_videos"].shape
        others = zip(held_out, answers, strict=True)
        other = next(one for one, (_, said) in others if said != meant and one["pixel_values_videos"].shape == shape)
        own += loss(sample)
        swapped += loss(sample | {"pixel_values_videos": other["pixel_values_videos"]})
    assert own <= swapped / 2

    report = json.loads((output / "memory_report.json").read_text())
    assert report["bad_videos"] == []
    predicted, measured = report["estimate"]["peak_allocated_bytes"], report["measured"]["peak_allocated_bytes"]
    assert abs(predicted / measured - 1) < 0.05
    assert load_processor(str(output), AutoConfig.from_pretrained(output)).video_token == processor.video_token


def test_the_projector_of_gemma():
    import torch
    from transformers import AutoModelForImageTextToText, Gemma4Config

    layer = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    config = Gemma4Config(text_config={**layer, "layer_types": ["full_attention"]}, vision_config=layer)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert vision_parts(model) == ("model.vision_tower", ["model.embed_vision"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", slow("llava_onevision")])
@pytest.mark.parametrize("method", [slow("full"), "lora", slow("qlora")])
def test_what_is_trained(name, method, recipe, clips, tmp_path):
    """The tower stays as it is and in its precision; projector and language model get gradients."""
    trainer = recipe("video_sft")([*FAST, *given(clips, tmp_path / "out", name, method=method)])
    tower, projectors = vision_parts(trainer.model)
    trained = [weight for weight, value in trainer.model.named_parameters() if value.requires_grad]
    seeing = [weight for weight in trained if tower in weight and not any(part in weight for part in projectors)]
    assert seeing == []
    assert any(part in weight for weight in trained for part in projectors)
    assert any("layers" in weight for weight in trained)
    assert all(("lora_" in weight) == (method != "full") for weight in trained)
    if method == "qlora":
        packed = [part for part, module in trainer.model.named_modules() if type(module).__name__ == "Linear4bit"]
        assert packed and not any(tower in part or part.endswith("lm_head") for part in packed)
    assert trainer.args.activation_checkpointing and trainer.args.train_batch_size == 2
    assert trainer.memory_args.logits_to_keep
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(loss > 0 for loss in losses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "frames", "micro", "checkpointing"),
    [("maximum_savings", 50, 2, True), slow("balanced", 100, 4, True), slow("maximum_performance", None, 8, False)],
)
def test_profiles(profile, frames, micro, checkpointing, recipe, clips, tmp_path):
    more = {"preset": "cpu", "held_out": 1, "video_profile": profile, "max_pixels_per_frame": "none"}
    arguments = [*given(clips, tmp_path / "out", **more), "--dry_run"]
    trainer = recipe("video_sft")(arguments)
    assert trainer.train_dataset.encode.limits.max_frames == frames
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (micro, 32 // micro)
    assert bool(args.activation_checkpointing) is checkpointing
    assert not (tmp_path / "out").exists()
    trainer = recipe("video_sft")([*arguments, "--max_frames", "none" if frames else "7"])  # goes over the profile's
    assert trainer.train_dataset.encode.limits.max_frames == (None if frames else 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "float16"], "dtype=float16 with method=full.*method=lora"),
        (["--video_profile", "fastest"], "unknown video_profile 'fastest'"),
        (["--max_frames", "0"], "max_frames=0 must be above 0"),
        (["--streaming", "true", "--max_steps", "1"], "streaming: videos are read one by one"),
        (["--packing", "true"], "packing: set max_length, the tokens of a packed row"),
        (
            ["--packing", "true", "--max_length", "99", "--train_sampling_strategy", "group_by_length"],
            "leave train_sampling_strategy=group_by_length out",
        ),
        (
            ["--packing", "true", "--max_length", "99", "--max_tokens_per_batch", "99"],
            "packing and max_tokens_per_batch=99 do not go together",
        ),
        (["--media_folder", "nowhere"], "media_folder=nowhere: no such folder"),
        (["--max_length", "9"], "max_length=9.*raise max_length, or lower max_pixels_per_frame"),
    ],
)
def test_refusals(arguments, said, recipe, clips, tmp_path):
    options = given(clips, tmp_path / "out", preset="cpu", held_out=1, max_pixels_per_frame="none")
    with pytest.raises(InputError, match=said):
        recipe("video_sft")([*options, *arguments])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_hub_data_sets_keep_their_files(recipe, clips, tmp_path):
    """Columns of the type Video, which `datasets` would decode with torchcodec."""
    from datasets import Dataset, List, Video

    rows = [json.loads(line) for line in (clips / "rows.jsonl").read_text().splitlines()]
    data = Dataset.from_list([row | {"videos": [str(clips / row["videos"][0])]} for row in rows])
    data.cast_column("videos", List(Video())).save_to_disk(str(tmp_path / "data"))
    arguments = [*FAST, *given(clips, tmp_path / "out", rows=tmp_path / "data"), "--dry_run"]
    trainer = recipe("video_sft")(arguments)
    (file,) = trainer.train_dataset.rows[0]["videos"]
    assert len(file["bytes"]) > 1000
    assert len(trainer.train_dataset[0]["input_ids"]) > 10


def test_a_language_model_is_refused(recipe, builtin_model, clips, tmp_path):
    options = [*given(clips, tmp_path / "out", preset="cpu"), *flags(model_name_or_path=builtin_model)]
    with pytest.raises(InputError, match="llama: AutoModelForImageTextToText has no such type"):
        recipe("video_sft")(options)


@pytest.mark.slow
def test_broken_clips_are_found_before_training(recipe, clips, tmp_path):
    rows = [json.loads(line) for line in (clips / "rows.jsonl").read_text().splitlines()]
    (tmp_path / "bad.mp4").write_text("no video")
    broken = [row | {"videos": [str(clips / row["videos"][0])]} for row in rows]
    broken[3] = broken[3] | {"videos": ["bad.mp4"]}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in broken))
    arguments = [*FAST, *given(clips, tmp_path / "out", rows=data, held_out=0)]
    with pytest.raises(BadVideo, match=r"bad\.mp4.*raise max_bad_videos"):
        recipe("video_sft")(arguments)
    recipe("video_sft")([*arguments, "--max_bad_videos", "1"])
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    assert len(report["bad_videos"]) == 1 and "bad.mp4" in report["bad_videos"][0]


@pytest.mark.slow
def test_llava_rows_and_a_resumed_run(recipe, clips, tmp_path):
    """Data of another format; and a run that goes on from its checkpoint ends where an uninterrupted one does."""
    rows = [json.loads(line) for line in (clips / "rows.jsonl").read_text().splitlines()]
    llava = [
        {
            "conversations": [
                {"from": "human", "value": "<video>\nWhat?"},
                {"from": "gpt", "value": row["messages"][1]["content"]},
            ],
            "video": row["videos"][0],
        }
        for row in rows
    ]
    data = tmp_path / "llava.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in llava))
    more = {"held_out": 0, "media_folder": clips, "lr_scheduler_type": "constant"}
    arguments = [*FAST, *given(clips, tmp_path / "out", rows=data, **more)]
    whole = recipe("video_sft")([*arguments, "--output_dir", str(tmp_path / "whole"), "--save_strategy", "no"])
    first = [*arguments, "--output_dir", str(tmp_path / "out"), "--save_strategy", "steps", "--save_steps", "1"]
    recipe("video_sft")([*first, "--max_steps", "1"])
    resumed = recipe("video_sft")([*first, "--resume_from_checkpoint", "true"])
    assert resumed.state.global_step == 2
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


# ---- memory


def trained(folder, name, samples, kind, model, memory=None, peak=None, **fields):
    args = TrainingArguments(str(folder / "out"), max_steps=2, learning_rate=1e-3, **fields, **QUIET)
    pad = 0
    given = {"model": model, "args": args, "train_dataset": Copies(samples), "callbacks": [peak] if peak else []}
    if kind is Trainer:
        trainer = Trainer(data_collator=VideoCollator(pad, attention_mask=True), **given)
    else:
        trainer = kind(memory_args=memory, data_collator=VideoCollator(pad, separate_media=True), **given)
    return trainer


@pytest.mark.slow
def test_a_third_of_the_memory_and_the_same_losses(clips, tmp_path):
    """Against a plain Trainer with LoRA and activation checkpointing on the same clips."""
    from peft import LoraConfig

    folder = video_models.make("qwen2_5_vl", tmp_path / "wide", vocab=16_000)
    videos.write(tmp_path / "long.mp4", videos.numbered(64, 56, 56))
    processor = load_processor(str(folder), AutoConfig.from_pretrained(folder))
    row = {
        "messages": [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "red"}],
        "videos": ["long.mp4"],
    }
    samples = [Encoder(processor, Limits(max_frames=64), tmp_path)(row)] * 6
    peaks, losses = [], []
    for kind in (Trainer, VideoTrainer):
        set_seed(0)
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = train_parts(AutoModelForImageTextToText.from_pretrained(folder), lora, ("vision",))
        if kind is Trainer:
            put_back(model)
        peak = PhasePeaks()
        trainer = trained(
            tmp_path,
            "qwen2_5_vl",
            samples,
            kind,
            model,
            MemoryArguments(logits_to_keep=True),
            peak,
            per_device_train_batch_size=2,
            **CHECKPOINTED,
        )
        trainer.train()
        peaks.append(peak.bytes)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert peaks[0] >= 3 * peaks[1]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", slow("smolvlm"), slow("qwen3_vl")])
def test_the_estimate_and_that_peaks_grow_linearly_with_frames(name, tmp_path):
    """Predicted within 5 % of what two steps hold, for each number of frames; twice the frames cost twice as much."""
    folder = video_models.make(name, tmp_path / name)
    config = AutoConfig.from_pretrained(folder)
    processor = load_processor(str(folder), config)
    videos.write(tmp_path / "long.mp4", videos.numbered(32, 56, 56))
    row = {
        "messages": [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "red"}],
        "videos": ["long.mp4"],
    }
    memory, fields = MemoryArguments(logits_to_keep=True), {"per_device_train_batch_size": 2, **CHECKPOINTED}
    peaks = []
    for frames in (8, 16, 32):
        sample = Encoder(processor, Limits(max_frames=frames), tmp_path)(row)
        model = train_parts(AutoModelForImageTextToText.from_pretrained(folder), None, ("vision",))
        peak = PhasePeaks()
        trainer = trained(tmp_path, name, [sample] * 6, VideoTrainer, model, memory, peak, **fields)
        found = estimate(config, fields, 8, "cpu", memory_args=memory, video=real_inputs(sample), frozen=("vision",))
        trainer.train()
        assert found.peak_allocated_bytes == pytest.approx(peak.bytes, rel=0.05), frames
        peaks.append(peak.bytes)
    assert (peaks[2] - peaks[1]) / (peaks[1] - peaks[0]) == pytest.approx(2, rel=0.1)


@pytest.mark.slow
def test_estimate_trainer_sees_the_videos(clips, tmp_path):
    samples = samples_of(clips, "qwen2_5_vl", max_frames=8)
    model = train_parts(AutoModelForImageTextToText.from_pretrained(clips / "qwen2_5_vl"), None, ("vision",))
    peak = PhasePeaks()
    longest = max(samples, key=lambda sample: len(sample["input_ids"]))
    trainer = trained(
        tmp_path, "", [longest] * 6, VideoTrainer, model, MemoryArguments(), peak, per_device_train_batch_size=2
    )
    found = estimate_trainer(trainer, "cpu")
    trainer.train()
    assert found.peak_allocated_bytes == pytest.approx(peak.bytes, rel=0.05)


# ---- the trainer


def test_pixels_of_one_micro_batch_at_a_time(clips, tmp_path):
    """4 × 8: when a micro-batch runs, no earlier one's joined pixels are left."""
    samples = samples_of(clips, "qwen2_5_vl", max_frames=4)
    model = train_parts(AutoModelForImageTextToText.from_pretrained(clips / "qwen2_5_vl"), None, ("vision",))
    trainer = trained(
        tmp_path,
        "",
        samples * 8,
        VideoTrainer,
        model,
        MemoryArguments(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
    )
    seen, alive = [], []
    forward = model.forward

    def watched(*args, pixel_values_videos=None, **kwargs):
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(pixel_values_videos))
        return forward(*args, pixel_values_videos=pixel_values_videos, **kwargs)

    model.forward = watched
    trainer.train()
    assert len(seen) == 16 and alive == [0] * 16


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("qwen2_5_vl"), "llava_onevision"])
def test_a_micro_batch_that_does_not_fit_is_cut_between_samples(name, clips, tmp_path):
    samples = samples_of(clips, name, max_frames=6)
    weights = []
    for strikes in (None, Strikes({"forward": {150}, "backward": {900}})):
        model = AutoModelForImageTextToText.from_pretrained(clips / name, dtype=torch.float64)
        trainer = trained(
            tmp_path,
            name,
            samples * 2,
            VideoTrainer,
            model,
            MemoryArguments(),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        )
        if strikes:
            struck(trainer, strikes)
            with strikes:
                trainer.train()
            assert strikes.hits and any(event["event"] == "oom_recovered" for event in trainer.memory_events)
        else:
            trainer.train()
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-7)


def test_of_pixels_and_their_masks_only_shapes_are_kept():
    shapes = {"input_ids": (2, 3), "position_ids": (3, 2, 3), "pixels": (2, 4), "mask": (1, 2, 3), "cut": (2,)}
    given = {
        name: torch.ones(shape, dtype=torch.float if name in ("pixels", "cut") else torch.long)
        for name, shape in shapes.items()
    }
    kept = _model_inputs({**given, "use_cache": False, "scalar": torch.tensor(1)})
    assert {name: tuple(value.shape) for name, value in kept.items()} == shapes
    assert [name for name, value in kept.items() if value.is_meta] == ["pixels", "mask"]
    assert _model_inputs({**given, "other": [1]}) is _model_inputs({"pixels": given["pixels"]}) is None
