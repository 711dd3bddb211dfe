"""Samples packed into one row: the loss and gradients of the padded batch, lengths without decoding, and refusals."""

import json

import pytest
import torch
import video_models
import videos
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from conftest import slow
from faults import Strikes, struck
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3_5Config, TrainingArguments

from hf_memopt import InputError, MemoryArguments
from hf_memopt.data.sample_batches import PackedBatches, packed_batches
from hf_memopt.estimator.job import describe
from hf_memopt.trainer.data_loading import batch_order
from hf_memopt.trainer.video_trainer import VideoTrainer
from hf_memopt.video import media
from hf_memopt.video.collator import PACKED, VideoCollator, check_packing, pack
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.inputs import VideoInputs
from hf_memopt.video.media import Limits
from hf_memopt.video.model_parts import take_videos_of_any_length
from hf_memopt.video.processor import load_processor
from hf_memopt.video.samples import VideoSamples
from hf_memopt.video.video_files import BadVideo

MODELS = sorted({*video_models.FAMILIES, *video_models.MORE})


def row(*names, answer="first red then blue", images=()):
    tags = "<video>" * len(names) + "<image>" * len(images)
    say = [{"role": "user", "content": f"{tags}What?"}, {"role": "assistant", "content": answer}]
    return {"messages": say, "videos": list(names), "images": list(images)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("packing")
    for number, frames in enumerate((4, 9, 12, 30, 5, 20)):
        videos.write(folder / f"{number}.mp4", videos.numbered(frames, 56, 84))
    Image.new("RGB", (56, 84), "red").save(folder / "picture.png")
    return folder


def data_of(folder, name, **limits) -> VideoSamples:
    rows = [row("0.mp4"), row("3.mp4", "1.mp4", answer="green"), row(answer="nothing to see"), row("2.mp4")]
    if name != "smolvlm":  # whose processor puts pictures and clips into the same tensor
        rows.append(row("5.mp4", images=["picture.png"]))
    if not (folder / name).exists():
        video_models.make(name, folder / name)
    processor = load_processor(str(folder / name), AutoConfig.from_pretrained(folder / name))
    return VideoSamples(rows, Encoder(processor, Limits(**{"max_frames": 6, **limits}), folder))


def gradients(model, batch) -> tuple[float, dict]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss  # as VideoTrainer runs it
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "qwen2_5_vl" else slow(name) for name in MODELS])
def test_a_packed_batch_has_the_loss_and_gradients_of_a_padded_one(name, folder):
    samples = list(data_of(folder, name))
    # Eager, where there are experts: the grouped kernel has no float64.
    model = AutoModelForImageTextToText.from_pretrained(folder / name, experts_implementation="eager").double().train()
    take_videos_of_any_length(model)
    padded = VideoCollator(0, lengths=True)(samples)
    lengths = padded.pop("lengths")
    packed = pack(padded, lengths, model)
    assert packed["input_ids"].shape == (1, sum(len(sample["input_ids"]) for sample in samples))
    (wanted, one), (found, other) = gradients(model, padded), gradients(model, packed)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert one.keys() == other.keys()
    largest = max(gradient.abs().max() for gradient in one.values())
    for weight, gradient in one.items():
        assert (gradient - other[weight]).abs().max() < 1e-6 * largest, weight
    # Were samples not kept apart, the loss would differ by far more.
    mixed = {key: value for key, value in packed.items() if key != "position_ids"}
    assert abs(gradients(model, mixed)[0] - wanted) > 1e-4 * wanted


@pytest.mark.slow
def test_flash_attention_would_keep_samples_apart(folder):
    """What transformers' flash attention, which needs a GPU, does with the positions of a packed row."""
    from transformers import modeling_flash_attention_utils as flash

    data = data_of(folder, "qwen2_5_vl")
    padded = VideoCollator(0, lengths=True)(list(data))
    model = AutoModelForImageTextToText.from_pretrained(folder / "qwen2_5_vl")
    packed = pack(padded, padded.pop("lengths"), model)
    assert packed["position_ids"].shape[:2] == (4, 1)
    assert flash._is_packed_sequence(packed["position_ids"][0], len(packed["input_ids"]))
    (begins, _), (longest, _) = flash.prepare_fa_kwargs_from_position_ids(packed["position_ids"][0])
    assert begins.diff().tolist() == data.lengths() and longest == max(data.lengths())
    alone = pack(VideoCollator(0)([data[0]]), torch.tensor(data.lengths()[:1]), model)
    assert not flash._is_packed_sequence(alone["position_ids"][0], 1), "one sample takes the usual kernel"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "qwen3_vl" else slow(name) for name in MODELS])
def test_headers_tell_what_a_sample_will_be(name, folder):
    """Its tokens, labels and grids, and the shapes of its pixels; also where frames are dropped to keep to a limit."""
    longest = max(data_of(folder, name, max_frames=30).lengths())
    for limits in ({}, {"max_length": longest - 1, "max_frames": 30}, {"max_pixels_per_frame": 2000}):
        data = data_of(folder, name, **limits)
        for index in range(len(data)):
            found, wanted = data.outline(index), data[index]
            assert data.lengths()[index] == len(found["input_ids"])
            if name == "video_llama_3":  # compresses by the pixels
                assert len(found["input_ids"]) >= len(wanted["input_ids"])
                continue
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                many = isinstance(value, list)
                for one, other in zip(found[key], value, strict=True) if many else [(found[key], value)]:
                    assert one.shape == other.shape and one.dtype == other.dtype
                    # The last digit of timestamps in the text may differ.
                    is_text = key in ("input_ids", "labels")
                    assert is_text or one.device.type == "meta" or torch.equal(one, other), key


@pytest.mark.slow
def test_bad_files_count_as_the_rows_in_their_place(folder, tmp_path):
    from hf_memopt.video.samples import BadVideos

    data = data_of(folder, "qwen2_5_vl")
    (folder / "broken.mp4").write_text("no video")
    rows = [data.rows[3], row("broken.mp4"), data.rows[0], row("gone.mp4")]
    lengths = VideoSamples(rows, data.encode, BadVideos(tmp_path / "bad.txt", 2)).lengths()
    assert lengths == [data.lengths()[index] for index in (3, 0, 0, 3)]
    with pytest.raises(BadVideo, match=r"gone\.mp4.*max_bad_videos=1"):
        VideoSamples(rows, data.encode, BadVideos(tmp_path / "bad2.txt", 1)).lengths()


# ---- which samples are together


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=120),
    most=st.integers(200, 900),
    rows=st.integers(1, 3),
    processes=st.integers(1, 4),
)
def test_every_sample_once_and_no_row_too_long(lengths, most, rows, processes):
    sampler = SeedableRandomSampler(range(len(lengths)), data_seed=1)
    batches = PackedBatches(sampler, lengths, most, rows, processes)
    taken = list(batches)
    assert len(taken) == len(batches)
    assert sorted(index for batch in taken for index in batch) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in batch) for batch in taken]
    assert max(sizes) <= rows * most and max(sizes) <= sum(lengths[index] for index in batches.largest())
    shards = [list(BatchSamplerShard(batches, processes, rank)) for rank in range(processes)]
    assert len({len(shard) for shard in shards}) == 1
    assert len(batches) % processes == 0 or max(map(len, taken)) <= rows


def test_packs_are_full_and_epochs_differ():
    lengths = [10 + 7 * index % 90 for index in range(400)]
    sampler = SeedableRandomSampler(range(400), data_seed=1)
    batches = PackedBatches(sampler, lengths, 512)
    assert len(batches) * 512 < 1.05 * sum(lengths)
    first, again = list(batches), list(batches)
    sampler.set_epoch(1)
    later = list(batches)
    assert first == again != later and sorted(first) == sorted(later)
    with pytest.raises(InputError, match="packing into 50 tokens: sample 77 has 99; raise max_length"):
        PackedBatches(sampler, lengths, 50)


def trainer_of(folder, data, tmp_path, packing=None, memory=None, dtype=torch.float64, **fields) -> VideoTrainer:
    args = TrainingArguments(
        str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        **fields,
    )
    return VideoTrainer(
        model=AutoModelForImageTextToText.from_pretrained(folder / "qwen2_5_vl", dtype=dtype),
        args=args,
        train_dataset=data,
        data_collator=VideoCollator(0, separate_media=True, lengths=packing is not None),
        processing_class=data.encode.processor,
        memory_args=MemoryArguments(**(memory or {})),
        packing=packing,
    )


def test_batches_by_tokens_decode_nothing_before_they_run(folder, tmp_path, monkeypatch):
    data = data_of(folder, "qwen2_5_vl")
    wanted = [len(sample["input_ids"]) for sample in data]
    monkeypatch.setattr(media, "read_clip", lambda *_: pytest.fail("decoded"))
    assert data.lengths() == wanted
    one = {"per_device_train_batch_size": 1}
    packed = trainer_of(folder, data, tmp_path, packing=120, **one).get_train_dataloader()
    assert all(sum(wanted[index] for index in batch) <= 120 for batch in packed.batch_sampler)
    assert packed_batches(packed) is packed.batch_sampler
    now = list(packed.batch_sampler)
    assert list(batch_order(packed, 0)) == now, "which rows a failing batch has is known"
    assert any(list(batch_order(packed, epoch)) != now for epoch in range(1, 6))
    budget = trainer_of(folder, data, tmp_path, memory={"max_tokens_per_batch": 160}).get_train_dataloader()
    assert all(len(batch) * max(wanted[index] for index in batch) <= 160 for batch in budget.batch_sampler)
    grouped = trainer_of(folder, data, tmp_path, train_sampling_strategy="group_by_length", logging_steps=1)
    order = list(grouped._get_train_sampler())
    assert sorted(order) == list(range(len(data))) and wanted[order[0]] == max(wanted)


@pytest.mark.slow
def test_a_packed_row_that_does_not_fit_is_split_between_samples(folder, tmp_path):
    """The weights after two steps are those of a run that fits, and those of a padded run with the same samples."""
    data = data_of(folder, "qwen2_5_vl")
    (pack,) = PackedBatches(None, data.lengths(), 10_000)
    together = VideoSamples([data.rows[index] for index in pack], data.encode)
    weights = []
    for packing, strikes in ((10_000, None), (10_000, Strikes({"forward": {150}, "backward": {900}})), (None, None)):
        whole = {} if packing else {"per_device_train_batch_size": len(pack)}
        trainer = trainer_of(folder, together, tmp_path, packing, max_steps=2, optim="sgd", learning_rate=0.1, **whole)
        if strikes:
            struck(trainer, strikes)
            with strikes:
                trainer.train()
            assert any(event["event"] == "oom_recovered" for event in trainer.memory_events)
        else:
            trainer.train()
        weights.append(torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_the_recipe_packs_and_predicts_what_it_measures(folder, recipe, tmp_path):
    """Rows of one size, so that no other batch is measured than the one that is predicted."""
    video_models.make("qwen2_5_vl", tmp_path / "wide", vocab=8000)
    (tmp_path / "rows.jsonl").write_text((json.dumps(row(str(folder / "3.mp4"))) + "\n") * 12)
    given = [
        *("--preset", "cpu", "--model_name_or_path", str(tmp_path / "wide"), "--method", "lora"),
        *("--dataset_name", str(tmp_path / "rows.jsonl"), "--held_out", "0", "--max_pixels_per_frame", "none"),
        *("--packing", "true", "--max_length", "260", "--max_frames", "12", "--effective_batch_size", "1"),
        *("--max_steps", "2", "--samples", "0", "--output_dir", str(tmp_path / "out")),
    ]
    trainer = recipe("video_sft")(given)
    report = json.loads((tmp_path / "out" / "memory_report.json").read_text())
    rows, tokens = trainer.packing, len(trainer.train_dataset[0]["input_ids"])
    assert report["measured_batch"] == f"1 × {rows // tokens * tokens} tokens" and rows // tokens > 2
    assert abs(report["relative_error"]["peak_allocated_bytes"]) < 0.02
    largest = report["estimate"]["peak_allocated_bytes"] / report["measured"]["peak_allocated_bytes"]
    assert 0.98 < largest < 1.1, "the limit, from headers, is of the same rows"


def test_estimates_fill_the_token_budget_with_clips():
    budget = MemoryArguments(max_tokens_per_batch=2000)
    video = VideoInputs(frames=8, height=224, width=224)
    args = {"per_device_train_batch_size": 64}
    job = describe("qwen2.5-vl-7b", args, 1, "a100_80gb", video=video, memory_args=budget)
    samples, tokens = job.batch["input_ids"][0]
    assert samples == 2000 // tokens == 2


def test_other_models_are_refused():
    assert list(PACKED) == MODELS, "each is tested"
    with pytest.raises(InputError, match="packing: not tested for models of the type qwen3_5, only for internvl"):
        check_packing(Qwen3_5Config())
    config = AutoConfig.for_model("internvl", text_config=Qwen3_5Config().text_config.to_dict())
    with pytest.raises(InputError, match=r"layers of the type linear_attention .* carry one sample over"):
        check_packing(config)
