"""Videos as samples and batches, in six families: what the tensors hold, what is trained, what is refused."""

import json
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
import video_models
import videos
from conftest import ROOT
from conftest import run as run_process
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError
from hf_memopt.levers.apply import apply_levers
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.few_logits import with_few_logits
from hf_memopt.program import run
from hf_memopt.video import media, samples
from hf_memopt.video.collator import VideoCollator
from hf_memopt.video.conversations import Medium, conversation
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.frame_limits import FrameLimits, Sampling
from hf_memopt.video.media import Limits
from hf_memopt.video.model_parts import take_videos_of_any_length
from hf_memopt.video.processor import TorchVideoProcessor, load_processor
from hf_memopt.video.samples import BadVideos, VideoSamples
from hf_memopt.video.video_files import BadVideo

FAMILIES = list(video_models.FAMILIES)
LENGTHS = (1, 5, 150, 491)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    for frames in LENGTHS:
        videos.write(folder / f"{frames}.mp4", videos.numbered(frames, 60, 80), rate=25)
    Image.fromarray(numpy.full((60, 80, 3), 90, numpy.uint8)).save(folder / "picture.png")
    (folder / "broken.mp4").write_text("no video")
    return folder


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A family's folder and processor, made once."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = video_models.make(name, tmp_path_factory.mktemp(name))
            made[name] = folder, load_processor(str(folder), AutoConfig.from_pretrained(folder))
        return made[name]

    return get


def row(*clips: str, question: str = "What is moving?", answer: str = "first red then blue", images=()) -> dict:
    tags = "<video>" * len(clips) + "<image>" * len(images)
    messages = [{"role": "user", "content": tags + question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "videos": list(clips), "images": list(images)}


def fresh(family, name: str, folder, **limits) -> Encoder:
    """An encoder whose processor is its own: limits change it."""
    path, _ = family(name)
    return Encoder(load_processor(str(path), AutoConfig.from_pretrained(path)), Limits(**limits), folder)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_hold_as_many_frames_as_the_formula_says(name, family, files):
    _, processor = family(name)
    for max_frames in (1, 2, 7, 16, 50, None):
        encode = Encoder(processor, Limits(max_frames=max_frames), files)
        for length in LENGTHS if max_frames else (1, 5):
            sample = encode(row(f"{length}.mp4"))
            limits = FrameLimits(max_frames, multiple_of=encode.media.temporal_patch_size)
            wanted = limits.count(length, length / 25)
            wanted = max(
                wanted, encode.media.temporal_patch_size
            )  # a single frame is shown as often as the model merges
            assert encode.media.count_frames(sample) == wanted, (max_frames, length)


def test_a_sample_has_the_frames_that_its_row_asks_for(family, files):
    """150.mp4 lasts six seconds."""
    encode = fresh(family, "qwen2_5_vl", files, max_frames=20, fps=2.0)
    for asked, frames, step in (({}, 12, 1.0), ({"video_end": 2.96}, 6, 1.0), ({"nframes": 4}, 4, 3.0)):
        sample = encode({**row("150.mp4"), **asked})
        assert encode.media.count_frames(sample) == frames
        assert sample["second_per_grid_ts"].tolist() == pytest.approx([step], rel=0.02)
    whole, end = (Medium("video", "150.mp4", Sampling(video_start=start)) for start in (None, 4.0))
    assert encode.media.outline(whole).pixels == 3 * encode.media.outline(end).pixels


def test_a_list_and_a_folder_of_frames_are_clips(family, files, tmp_path):
    """All of them, the last repeated where the model merges two; fewer within max_frames."""
    for index in range(11):
        Image.new("RGB", (56, 56), (20 * index,) * 3).save(tmp_path / f"{index}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    names = [str(tmp_path / f"{index}.png") for index in range(11)]
    encode = fresh(family, "qwen2_5_vl", files, max_frames=12, fps=0.5)
    listed, folder = encode(row(names, question="What?")), encode(row(str(tmp_path), question="What?"))
    assert encode.media.count_frames(listed) == 12 and listed["second_per_grid_ts"].tolist() == [1.0]
    assert all(torch.equal(listed[name], folder[name]) for name in listed)
    few = fresh(family, "qwen2_5_vl", files, max_frames=5)
    assert few.media.count_frames(few(row(names))) == 4
    assert few.media.count_frames(few({**row(str(tmp_path)), "sample_fps": 10.0, "video_end": 0.1})) == 2
    assert few.media.outline(Medium("video", names)).pixels == 4 * 56 * 56
    with pytest.raises(InputError, match="sample_fps is of lists of frames"):
        few({**row("5.mp4"), "sample_fps": 2})
    with pytest.raises(BadVideo, match=r"12\.png: no such file"):
        few(row([*names, str(tmp_path / "12.png")]))
    with pytest.raises(BadVideo, match="a folder without frames"):
        few(row(str(folder_without(tmp_path))))
    Image.new("RGB", (80, 56)).save(tmp_path / "11.png")
    with pytest.raises(BadVideo, match="change size"):
        few(row(str(tmp_path)))


def folder_without(tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_batches_equal_single_samples(name, family, files):
    """Clips of other lengths, two in a sample, a clip and an image, text alone: each sample's logits are its own."""
    folder, processor = family(name)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    take_videos_of_any_length(model)
    encode = Encoder(processor, Limits(max_frames=6), files)
    rows = [row("150.mp4"), row("1.mp4", answer="green"), row("5.mp4", "150.mp4", question="Describe both videos")]
    if name != "smolvlm":  # whose processor puts pictures and clips into the same tensor
        rows.append(row("5.mp4", images=["picture.png"]))
    rows.append(row(question="Nothing to see"))
    samples = [encode(one) for one in rows]
    collate = VideoCollator(processor.tokenizer.pad_token_id)
    with torch.no_grad():
        together = model(**collate(samples)).logits
        for number, sample in enumerate(samples):
            alone = model(**collate([sample])).logits
            tokens = len(sample["input_ids"])
            torch.testing.assert_close(together[number, :tokens], alone[0, :tokens], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_labels_are_the_answers_alone(name, family, files):
    _, processor = family(name)
    talk = row("5.mp4", answer="green")
    talk["messages"] += [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "blue"}]
    sample = Encoder(processor, Limits(max_frames=4), files)(talk)
    ids, labels = sample["input_ids"], sample["labels"]
    answered = labels != IGNORED
    assert torch.equal(labels[answered], ids[answered])
    said = processor.tokenizer.decode(labels[answered], skip_special_tokens=True)
    assert said.split() == ["green", "blue"]
    types = torch.tensor(processor.create_mm_token_type_ids([ids.tolist()])[0])
    assert (types[answered] == 0).all() and (types > 0).any()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl"])
def test_an_image_alone(name, family, files):
    folder, processor = family(name)
    sample = Encoder(processor, Limits(), files)(row(images=["picture.png"]))
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.isfinite(model(**VideoCollator(0)([sample])).loss)


# ---- limits


@pytest.mark.parametrize("name", FAMILIES)
def test_too_long_a_sample_loses_frames_first(name, family, files):
    _, processor = family(name)
    encode = Encoder(processor, Limits(max_frames=16), files)
    whole, count_frames = encode(row("150.mp4")), encode.media.count_frames
    types = torch.tensor(processor.create_mm_token_type_ids([whole["input_ids"].tolist()])[0])
    limit = len(whole["input_ids"]) - int((types > 0).sum()) // 2
    shorter = Encoder(processor, Limits(max_frames=16, max_length=limit), files)(row("150.mp4"))
    assert len(shorter["input_ids"]) <= limit
    assert 1 <= count_frames(shorter) < count_frames(whole)
    assert (shorter["labels"] != IGNORED).sum() == (whole["labels"] != IGNORED).sum()
    few = Encoder(processor, Limits(max_frames=16, max_video_tokens=limit), files)(row("150.mp4"))
    types = torch.tensor(processor.create_mm_token_type_ids([few["input_ids"].tolist()])[0])
    assert (types > 0).sum() <= limit


def test_frames_are_dropped_without_decoding_again(family, files, monkeypatch):
    read, decoded = media.read_clip, []
    monkeypatch.setattr(media, "read_clip", lambda *given: decoded.append(given) or read(*given))
    encode = fresh(family, "qwen2_5_vl", files, max_frames=16, max_video_tokens=10)
    short = encode(row("150.mp4", images=["picture.png"]))
    assert encode.media.count_frames(short) < 16 and len(decoded) == 1


def test_then_the_end_of_the_answer(family, files):
    _, processor = family("qwen2_5_vl")
    talk = row("1.mp4", answer="red " * 200)
    whole = Encoder(processor, Limits(), files)(talk)
    asked = int((whole["labels"] != IGNORED).nonzero()[0])
    cut = Encoder(processor, Limits(max_length=asked + 50), files)(talk)
    assert len(cut["input_ids"]) == asked + 50 and (cut["labels"] != IGNORED).sum() == 50
    assert torch.equal(cut["pixel_values_videos"], whole["pixel_values_videos"])
    with pytest.raises(InputError, match=r"max_length=10 .* raise max_length, or lower max_pixels_per_frame"):
        Encoder(processor, Limits(max_length=10), files)(talk)
    with pytest.raises(InputError, match="max_video_tokens=1"):
        Encoder(processor, Limits(max_video_tokens=1), files)(talk)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "video_llama_3"])
def test_pixels_stay_below_the_cap(name, family, tmp_path):
    """Also of frames that the processor would scale up."""
    for height, width in ((360, 640), (40, 44)):
        videos.write(tmp_path / f"{height}.mp4", videos.numbered(5, height, width))
        encode = fresh(family, name, tmp_path, max_frames=4, max_pixels_per_frame=9000)
        sample = encode(row(f"{height}.mp4"))
        _, rows, columns = sample["video_grid_thw"][0].tolist()
        patch = 16 if name == "qwen3_vl" else 14
        assert rows * columns * patch**2 <= 9000


def test_a_processor_that_takes_other_frames_is_found_out(family, files, monkeypatch):
    encode = fresh(family, "qwen2_5_vl", files, max_frames=4)
    call = TorchVideoProcessor.__call__
    monkeypatch.setattr(
        TorchVideoProcessor,
        "__call__",
        lambda self, videos, **more: call(self, [torch.cat([videos[0], videos[0]])], **more),
    )
    with pytest.raises(InputError, match="is not supported: 8 frames in its tensors, 4 given, max_frames=4"):
        encode(row("5.mp4"))


def test_a_limit_of_nothing_is_refused():
    for name in ["max_frames", "fps", "max_pixels_per_frame", "max_length"]:
        with pytest.raises(InputError, match=f"{name}=0 must be above 0"):
            Limits(**{name: 0})


# ---- rows


def test_formats_of_rows():
    parts = [{"type": "video"}, {"type": "text", "text": "What?"}]
    rows = [
        row("a.mp4", question="What?", answer="This."),
        {
            "messages": [
                {"role": "user", "content": [{"type": "video", "video": "a.mp4"}, parts[1]]},
                {"role": "assistant", "content": [{"type": "text", "text": "This."}]},
            ]
        },
        {
            "conversations": [{"from": "human", "value": "<video>\nWhat?"}, {"from": "gpt", "value": "This."}],
            "video": "a.mp4",
        },
        {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "This."}], "video": "a.mp4"},
    ]
    for one in rows:
        messages, media = conversation(one, "row 0")
        assert messages == [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": "This."}]},
        ]
        assert media == [Medium("video", "a.mp4")]


def test_rows_that_do_not_add_up():
    for wrong, said in [
        ({"messages": row("a.mp4")["messages"], "videos": []}, "more <video> tags than videos"),
        ({"messages": row("a.mp4")["messages"], "videos": ["a", "b"]}, "1 video.s. more than <video> tags"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "no answer"),
        ({"text": "Hi"}, "neither messages nor conversations"),
    ]:
        with pytest.raises(InputError, match=f"row 7: .*{said}"):
            conversation(wrong, "row 7")


def test_files_within_a_data_set(family, files):
    """Bytes, as hub data sets carry them."""
    _, processor = family("qwen2_5_vl")
    encode = Encoder(processor, Limits(max_frames=4), files)
    packed = row("5.mp4") | {"videos": [{"path": None, "bytes": (files / "5.mp4").read_bytes()}]}
    wanted, found = encode(row("5.mp4")), encode(packed)
    assert torch.equal(found["pixel_values_videos"], wanted["pixel_values_videos"])


# ---- files that are no good


def test_broken_files_end_the_run_with_their_name(family, files, tmp_path):
    _, processor = family("qwen2_5_vl")
    encode = Encoder(processor, Limits(max_frames=2), files)
    rows = [row("5.mp4"), row("broken.mp4"), row("gone.mp4"), row("150.mp4")]
    with pytest.raises(BadVideo, match=r"broken\.mp4.*raise max_bad_videos"):
        VideoSamples(rows, encode, BadVideos(tmp_path / "none.txt"))[1]
    assert not (tmp_path / "none.txt").exists()
    bad = BadVideos(tmp_path / "bad.txt", 2)
    samples = VideoSamples(rows, encode, bad)
    wanted = samples[3]["pixel_values_videos"]
    assert torch.equal(samples[1]["pixel_values_videos"], wanted)  # the next that is good
    assert torch.equal(samples[2]["pixel_values_videos"], wanted)
    assert [line.split(":")[0].rsplit("/", 1)[1] for line in bad.listed()] == ["broken.mp4", "gone.mp4"]
    again = VideoSamples(rows, encode, BadVideos(tmp_path / "bad.txt", 2))  # as another worker, or a resumed run, does
    assert again[1] and len(bad.listed()) == 2
    with pytest.raises(BadVideo, match="max_bad_videos=1"):
        VideoSamples([row("gone.mp4"), row("gone2.mp4")], encode, BadVideos(tmp_path / "one.txt", 1))[0]


def test_workers_count_together(family, files, tmp_path):
    _, processor = family("qwen2_5_vl")
    encode = Encoder(processor, Limits(max_frames=2), files)
    rows = [row("5.mp4"), row("broken.mp4")] * 4
    bad = BadVideos(tmp_path / "bad.txt", 1)
    loader = torch.utils.data.DataLoader(
        VideoSamples(rows, encode, bad), 2, collate_fn=VideoCollator(0), num_workers=2
    )
    assert sum(len(batch["input_ids"]) for batch in loader) == 8
    assert len(bad.listed()) == 1


# ---- processors


def test_a_processor_is_saved_whole(family, tmp_path):
    """What is saved loads again, and says of videos what the checkpoint said."""
    for name in FAMILIES:
        folder, processor = family(name)
        processor.save_pretrained(tmp_path / name)
        again = load_processor(str(tmp_path / name), AutoConfig.from_pretrained(folder))
        assert again.video_processor.settings == processor.video_processor.settings
        assert again.chat_template == processor.chat_template
        saved = json.loads((tmp_path / name / "processor_config.json").read_text())
        assert saved["video_processor"]["video_processor_type"] == processor.video_processor.family.processor


def test_a_language_model_is_no_video_model(family, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="llama: AutoModelForImageTextToText has no such type"):
        load_processor(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(InputError, match="do_normalize=False: install torchvision"):
        TorchVideoProcessor("qwen2_5_vl", {"do_normalize": False})


def test_a_worker_s_error_is_one_sentence(family, files, tmp_path, capsys):
    """Data loaders hand on their workers' errors with a traceback before them."""
    _, processor = family("qwen2_5_vl")
    encode = Encoder(processor, Limits(max_frames=2), files)
    samples = VideoSamples([row("broken.mp4")], encode, BadVideos(tmp_path / "none.txt"))
    loader = torch.utils.data.DataLoader(samples, 1, collate_fn=VideoCollator(0), num_workers=1)
    with pytest.raises(SystemExit) as ended:
        run(lambda: list(loader))
    said = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert len([line for line in said if line.startswith("error: ")]) == 1
    assert said[-1].startswith(f"error: {files / 'broken.mp4'}: not a readable video") and "Traceback" not in said[-1]


@pytest.mark.slow
def test_without_av_the_recipe_names_the_extra_and_estimates_run():
    hidden = "import sys; sys.modules['av'] = None\n"
    path = str(ROOT / "recipes" / "video_sft.py")
    recipe = f"{hidden}import runpy\ntry:\n    runpy.run_path({path!r}, run_name='__main__')"
    ended = f"{recipe}\nexcept SystemExit as ended:\n    assert ended.code == 2\nimport hf_memopt.estimator.api"
    done = run_process(sys.executable, "-c", ended)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].partition(": pip install ")[0].endswith("av, which is not installed")


def test_a_torchvision_that_does_not_fit_torch_is_one_sentence(capsys):
    def import_transformers():
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'Trainer'.") from error

    with pytest.raises(SystemExit) as ended:
        run(import_transformers)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and line.startswith("error: the installed torchvision does not fit")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_few_logits_leave_the_loss_as_it_is(name, family, files):
    """Those of answers alone, or, for VideoLLaMA3, whose forward takes no `logits_to_keep`, a loss in chunks."""
    folder, processor = family(name)
    model = AutoModelForImageTextToText.from_pretrained(folder).train()
    take_videos_of_any_length(model)
    encode = Encoder(processor, Limits(max_frames=4), files)
    batch = VideoCollator(processor.tokenizer.pad_token_id)(
        [encode(row("150.mp4")), encode(row("1.mp4", answer="red"))]
    )
    wanted = model(**batch).loss
    memory_args = with_few_logits(MemoryArguments(), model.config)
    assert memory_args.logits_to_keep is (name != "video_llama_3")
    assert (memory_args.loss_chunk_size is not None) is (name == "video_llama_3")
    apply_levers(model, memory_args)
    torch.testing.assert_close(model(**batch).loss, wanted, rtol=1e-5, atol=1e-6)


class _Counting:
    """An encoder whose rows are numbers of tokens, and of pixels beside an image; None is a bad file's row."""

    media = SimpleNamespace(outline=lambda medium: SimpleNamespace(pixels=medium.source))

    def __call__(self, row, where):
        if row is None:
            raise BadVideo(f"{where}: not a video")
        return {"input_ids": [0] * row}

    def read(self, row, where):
        return None, [Medium("video", len(self(row, where)["input_ids"])), Medium("image", 100)]


def test_a_bad_files_row_counts_as_the_one_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "outline_encoder", lambda encode: encode)
    bad = BadVideos(tmp_path / "bad.txt", max_bad_videos=2)
    data = VideoSamples([3, None, 5, None], _Counting(), bad)
    assert data.lengths() == [len(data[index]["input_ids"]) for index in range(4)] == [3, 5, 5, 3]
    assert data.sizes() == [3, 0, 5, 0] and data.sizes(2) == [3, 0, 0, 0] and len(bad.listed()) == 2
    for beyond in (-1, 4):
        with pytest.raises(IndexError, match=f"row {beyond} of 4"):
            data[beyond]
    for of_all in (
        VideoSamples(rows, _Counting(), BadVideos(tmp_path / "all.txt", 2)) for rows in ([None], [None, None])
    ):
        with pytest.raises(BadVideo, match=f"none of the {len(of_all)} rows has"):
            of_all.lengths()
        with pytest.raises(BadVideo, match=f"none of the {len(of_all)} rows has"):
            of_all[0]
    with pytest.raises(BadVideo, match="2 before it already reach max_bad_videos=2"):
        VideoSamples([1, 1, 1, 1, None], _Counting(), bad).lengths()


def test_the_outline_of_a_clip_has_its_frames_and_times():
    outline = SimpleNamespace(frames=4, height=8, width=6, total=10, rate=2.0)
    clip = samples.OutlineEncoder.decode(SimpleNamespace(outline=lambda medium: outline), Medium("video", "a.mp4"))
    assert (clip.indices, clip.timestamps) == ((0, 3, 6, 9), (0.0, 1.5, 3.0, 4.5))
    assert (len(clip.frames), clip.total, clip.duration, clip.height, clip.width) == (4, 10, 5.0, 8, 6)
