"""plan --frames max: the inverse of the estimate."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest
import video_models
from conftest import flags

from hf_memopt import MemoryArguments
from hf_memopt.cli.plan import frames_job
from hf_memopt.cli.settings import command_spec
from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.job import describe
from hf_memopt.estimator.result import Estimate
from hf_memopt.planner import first_fit
from hf_memopt.planner.samples import frames
from hf_memopt.planner.samples.frames import most_frames
from hf_memopt.video.inputs import VideoInputs, parse_frame_size


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return video_models.make("qwen2_5_vl", tmp_path_factory.mktemp("qwen"), weights=False)


@pytest.fixture(scope="module")
def job(folder):
    fields = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    video = VideoInputs(height=56, width=56, settings={"size": {"shortest_edge": 784, "longest_edge": 3136}})
    memory = MemoryArguments(logits_to_keep=True)
    return describe(str(folder), fields, 8, "cpu", memory_args=memory, frozen=("vision",), video=video)


def test_settings_are_those_of_the_command_line(folder):
    def job_of(*settings):
        return frames_job(command_spec(settings, model=str(folder), hardware="rtx_4090"))

    assert job_of().memory_args.logits_to_keep
    assert not job_of("logits_to_keep=false").memory_args.logits_to_keep
    assert job_of().fields["per_device_train_batch_size"] == 1
    assert job_of("per_device_train_batch_size=2").fields["per_device_train_batch_size"] == 2
    assert job_of("packed=true").packed and job_of("task=image-text-to-text").task == "image-text-to-text"
    assert job_of("model.vocab_size=1000").config.get_text_config().vocab_size == 1000


def with_frames(job, frames: int):
    return dataclasses.replace(job, video=dataclasses.replace(job.video, frames=frames))


@pytest.mark.slow
def test_the_answer_fits_and_two_more_do_not(job):
    room = estimate_job(with_frames(job, 40)).device_bytes + 1000
    (fit,) = most_frames(job, room)  # frames of 56 × 56 are below every cap
    assert fit.max_frames == 40 and fit.max_pixels_per_frame is None
    assert fit.estimate.device_bytes <= room < estimate_job(with_frames(job, 42)).device_bytes
    assert fit.seq_len == with_frames(job, 40).video.batch(job.config, 1)["input_ids"].shape[1]


def test_a_second_size_of_frame_starts_where_the_first_ended(job, monkeypatch):
    """Memory follows the tokens: one more size takes an estimate or two, not the search from its beginning."""
    large = dataclasses.replace(
        job,
        video=VideoInputs(height=720, width=1280, settings={"size": {"shortest_edge": 784, "longest_edge": 10**7}}),
    )
    estimated = []

    def linear(job, map_fn):
        estimated.append(job.video.frames)
        size = 10**6 + 1000 * job.seq_len
        kinds = {"parameters": 10**6, "activations": 1000 * job.seq_len}
        return Estimate(size, size, size, 0, "backward", kinds, {"backward": size}, None, {}, ())

    monkeypatch.setattr(first_fit, "estimate_job", linear)
    notes = []
    budget = 10**6 + 1000 * frames._tokens(large, 40)
    first, *others = most_frames(large, budget, notes.append)
    assert first.max_frames == 40
    assert all(fit.seq_len <= first.seq_len for fit in others) and len(others) == 2
    assert len(estimated) == len(notes) <= 2 + 2 and notes[0].startswith("size 1 of 3")
    for fit in (first, *others):
        assert fit.estimate.device_bytes == 10**6 + 1000 * fit.seq_len == sum(fit.estimate.breakdown.values())
    assert [fit.max_frames in estimated for fit in others] == [
        not fit.estimate.notes or "interpolated" not in fit.estimate.notes[0] for fit in others
    ]


@pytest.mark.slow
def test_no_frame_fits(job):
    (fit,) = most_frames(job, 1000)
    assert fit.max_frames == 0 and fit.estimate.device_bytes > 1000


@pytest.mark.slow
def test_smaller_frames_leave_room_for_more(job):
    large = dataclasses.replace(
        job,
        video=VideoInputs(height=720, width=1280, settings={"size": {"shortest_edge": 784, "longest_edge": 10**7}}),
    )
    room = estimate_job(with_frames(large, 6)).device_bytes
    fits = list(most_frames(large, room))
    assert [fit.max_pixels_per_frame for fit in fits] == [None, 448 * 448, 224 * 224]
    assert fits[0].max_frames == 6 < fits[1].max_frames < fits[2].max_frames


@pytest.mark.slow
def test_the_command_line(folder, command):
    code, out, err = command(
        "plan", folder, *flags(hardware="rtx_3070", method="lora", frames="max", set="frame_size=56x56"), "--json"
    )
    assert code == 0, err
    (row,) = json.loads(out)["frames"]
    assert row["max_frames"] > 1000 and row["seq_len"] <= 32768  # a tiny model runs out of positions first
    assert row["estimate"]["fits"] is True
    assert command("plan", folder, "--frames", "7")[0] == 2
    code, _, err = command("plan", folder, "--hardware", "rtx_9999", "--frames", "max")
    assert code == 2 and "unknown hardware 'rtx_9999'" in err


@pytest.mark.slow
def test_estimate_takes_frames_and_their_size(folder, command):
    def told(*settings):
        words = [word for setting in settings for word in ("--set", setting)]
        return command("estimate", folder, "--preset", "cpu", *words, "--json")

    few, many = (json.loads(told(f"max_frames={frames}", "frame_size=56x56")[1]) for frames in (8, 64))
    assert few["peak_allocated_bytes"] < many["peak_allocated_bytes"]
    assert "64 frames of 56 × 56" in " ".join(many["notes"])
    whole = json.loads(told("max_frames=8", "frame_size=56x56", "logits_to_keep=false")[1])
    assert few["breakdown"]["logits"] <= whole["breakdown"]["logits"]
    code, _, err = told("max_frames=none")
    assert code == 2 and "max_frames='none' must be a whole number" in err


@pytest.mark.parametrize("text", ["640", "640x", "axb", "0x5", "1x2x3"])
def test_sizes_are_written_as_width_and_height(text):
    with pytest.raises(InputError, match="write width and height in pixels, as 640x360"):
        parse_frame_size(text)
    assert parse_frame_size("640x360") == parse_frame_size("640 × 360") == (640, 360)


def test_a_model_with_few_positions_has_few_frames(job, monkeypatch):
    """Fewer than the first estimate has."""
    config = copy.deepcopy(job.config)
    config.get_text_config().max_position_embeddings = frames._tokens(job, 10)
    monkeypatch.setattr(
        first_fit, "estimate_job", lambda job, map_fn: Estimate(1, 1, 1, 0, "backward", {}, {}, None, {}, ())
    )
    (fit,) = most_frames(dataclasses.replace(job, config=config), 10**9)
    assert fit.max_frames == 10


def test_the_most_frames_that_are_looked_at_are_those_of_the_models_positions(monkeypatch, subtests):
    for two, four, positions, merged, most in [
        *((20, 40, 1000, 2, 100), (20, 40, 1009, 1, 100), (20, 40, 1010, 1, 101), (20, 40, 19, 2, 0)),
        (20, 40, 20, 2, 2),
    ]:
        with subtests.test(positions=positions, merged=merged):
            monkeypatch.setattr(frames, "_tokens", lambda job, count: {2: two, 4: four}[count])  # noqa: B023
            text = SimpleNamespace(max_position_embeddings=positions)
            video = SimpleNamespace(temporal_patch_size=lambda config: merged)  # noqa: B023
            job = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), video=video)  # noqa: B023
            search = frames._search(job, 10**9, lambda text: None)
            assert max(search.candidates, default=0) == most and search.tokens(12) == two + 5 * (four - two)
            assert set(search.candidates) == set(range(merged, most + 1, merged))
