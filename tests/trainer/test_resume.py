"""Checkpoints that are damaged, of another model, or hostile: what resumes, from where, and what is refused."""

import contextlib
import io
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import run as command
from conftest import slow, sweep
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_runs import TINY, llama, train
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hf_memopt.errors import InputError
from hf_memopt.trainer.checkpoints.intact import check_intact, newest_intact
from hf_memopt.trainer.checkpoints.load_states import SafeLoad
from hf_memopt.trainer.checkpoints.resuming import SafeResume
from hf_memopt.trainer.checkpoints.safe_load import without_code

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of MemoryTrainer with checkpoint-2 and checkpoint-4, and one of plain Trainer."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder / "memory", **SAVING)
    train(folder / "plain", kind=Trainer, **SAVING)
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A copy of such a run to damage."""

    def copy(kind: str = "memory") -> Path:
        return shutil.copytree(saved / kind, tmp_path / kind)

    return copy


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def other_tensors(file: Path) -> None:
    save_file({f"of.another.model.{name}": value for name, value in load_file(file).items()}, file, {"format": "pt"})


def other_bytes(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


DAMAGE = {"cut short": cut, "missing": Path.unlink, "changed": other_bytes}
FILES = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "config.json",
    "memory_state.json",
)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_older_checkpoint_resumes(name, how, run, caplog):
    folder = run()
    DAMAGE[how](folder / "checkpoint-4" / name)
    assert newest_intact(folder) == folder / "checkpoint-2"
    assert f"checkpoint-4 is damaged ({'no ' * (how == 'missing')}{name}" in caplog.text
    assert "resuming from checkpoint-2 instead" in caplog.text
    with pytest.raises(InputError, match=rf"checkpoint-4 is damaged \((no )?{name}.*: name checkpoint-2, which is"):
        check_intact(folder / "checkpoint-4")


@pytest.mark.parametrize("how", ["cut short", "missing"])
@pytest.mark.parametrize("name", FILES[:-1])
def test_the_same_without_a_manifest(name, how, run, caplog):
    """What plain Trainer wrote: a changed byte cannot be seen."""
    folder = run("plain")
    assert newest_intact(folder) == folder / "checkpoint-4"
    DAMAGE[how](folder / "checkpoint-4" / name)
    if how == "missing" and name in ("config.json", "rng_state.pth"):  # a model may have none; Trainer takes the other
        assert newest_intact(folder) == folder / "checkpoint-4"
        assert ("has no rng_state.pth" in caplog.text) == (name == "rng_state.pth")
        return
    assert newest_intact(folder) == folder / "checkpoint-2"


@pytest.mark.parametrize("change", [{"global_step": "4"}, {"global_step": None}, {"globl_step": 4}])
def test_a_state_of_another_form_is_damage(change, run):
    folder = run("plain")
    file = folder / "checkpoint-4" / "trainer_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert newest_intact(folder) == folder / "checkpoint-2"


@pytest.mark.slow
def test_training_resumes_from_the_intact_one_to_the_same_weights(run, tmp_path):
    wanted = train(tmp_path / "wanted", kind=Trainer, **SAVING)
    folder = run()
    cut(folder / "checkpoint-4" / "optimizer.pt")
    found = train(folder, resume=True, **SAVING)
    assert torch.equal(found.weights, wanted.weights)
    assert newest_intact(folder) == folder / "checkpoint-4"


@pytest.mark.slow
def test_a_finished_run_takes_no_further_step(run, tmp_path, caplog):
    """A relauncher starts the same command again; plain Trainer trains a step beyond max_steps then."""
    wanted = train(tmp_path / "wanted", kind=Trainer, **SAVING)
    found = train(run(), resume=True, **SAVING)
    assert found.step == 4 and torch.equal(found.weights, wanted.weights)
    assert "all 4 steps are done already" in caplog.text


def test_nothing_intact_is_refused_and_nothing_at_all_is_none(run, tmp_path):
    folder = run()
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / "rng_state.pth").unlink()
    with pytest.raises(InputError, match=r"no checkpoint that is intact \(checkpoint-4: no rng_state.pth; checkpoint"):
        train(folder, resume=True, **SAVING)
    assert newest_intact(tmp_path / "nowhere") is None
    with pytest.raises(InputError, match="holds no checkpoint-N folder"):
        train(tmp_path / "nowhere", resume=True, **SAVING)


@pytest.mark.parametrize("content", ["{}", '{"effective_batch_size": "8", "world_size": 1}', "[]", "nonsense"])
def test_a_damaged_note_of_batches_is_refused(content, run):
    folder = run()
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / "memory_manifest.json").unlink()
        (checkpoint / "memory_state.json").write_text(content)
    with pytest.raises(InputError, match=r"memory_state\.json"):
        train(folder, resume=True, **SAVING)


_CONTENT = sorted([*FILES, "training_args.bin", "generation_config.json", "memory_manifest.json"])


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(name=st.sampled_from(_CONTENT), at=st.floats(0, 1), content=st.binary(max_size=40), keep=st.booleans())
@pytest.mark.parametrize("manifest", [True, slow(False)])
def test_any_damage_is_refused_or_harmless(manifest, saved, name, at, content, keep):
    """Any bytes anywhere in any file: with a manifest the older checkpoint resumes; without one, training ends as it
    should have or in one sentence."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(saved / "memory", Path(temporary) / "run"))
        file = folder / "checkpoint-4" / name
        before = file.read_bytes()
        place = int(at * len(before))
        file.write_bytes(before[:place] + content + (before[place + len(content) :] if keep else b""))
        changed = file.read_bytes() != before
        if not manifest:
            (folder / "checkpoint-4" / "memory_manifest.json").unlink(missing_ok=True)
        else:
            found = newest_intact(folder).name
            if changed and name in ("memory_manifest.json", "trainer_state.json"):  # it may be as good as before
                assert found in ("checkpoint-4", "checkpoint-2")
            else:
                assert found == ("checkpoint-2" if changed else "checkpoint-4")
        with contextlib.suppress(InputError):
            assert train(folder, resume=True, **SAVING | {"max_steps": 5}).step == 5


@pytest.mark.parametrize(
    ("errors", "devices"),
    [([], ["meta"]), ([torch.OutOfMemoryError("CUDA out of memory.")], ["meta", "cpu"]), ([KeyError()], ["meta"])],
)
def test_states_that_do_not_fit_twice_are_loaded_through_host_memory(errors, devices, tmp_path):
    class Loads:
        def _load_optimizer_and_scheduler(self, checkpoint):
            loaded.append(torch.load(checkpoint, map_location="meta").device.type)
            if remaining:
                raise remaining.pop()

    class Own(SafeLoad, Loads):
        pass

    file, loaded, remaining = tmp_path / "optimizer.pt", [], list(errors)
    torch.save(torch.zeros(2), file)
    with pytest.raises(KeyError) if isinstance([*errors, None][0], KeyError) else contextlib.nullcontext():
        diagnosis = Own()._load_states(file)
        assert (diagnosis is not None) == bool(errors)
    assert loaded == devices


def test_what_another_trainer_wrote_over_it_is_not_damage(run, saved):
    """Plain Trainer, or MemoryTrainer that pushes to the hub, writes into the old folder and leaves the manifest."""
    folder = run()
    for file in (saved / "plain" / "checkpoint-4").iterdir():
        shutil.copyfile(file, folder / "checkpoint-4" / file.name)
    state = folder / "checkpoint-4" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"total_flos": 1.0}))
    manifest = (folder / "checkpoint-4" / "memory_manifest.json").stat().st_mtime_ns
    for later, found in ((2**62, "checkpoint-4"), (manifest + 10**6, "checkpoint-4"), (manifest, "checkpoint-2")):
        os.utime(state, ns=(later, later))
        assert newest_intact(folder).name == found


def test_a_second_training_knows_nothing_of_the_first(tmp_path):
    def twice(trainer):
        assert trainer._ending.updates._lock is None, "Ray Tune pickles a trainer before it trains"
        trainer._newest = tmp_path / "checkpoint-7"
        trainer._runner.resume_states = {7: None}

    assert train(tmp_path, prepare=twice, max_steps=1).step == 1
    assert not (tmp_path / "checkpoint-7").exists()


# ---- of another model or optimizer


@pytest.mark.parametrize("kind", ["memory", "plain"])
def test_weights_of_other_names_are_not_taken_for_this_models(kind, run):
    """Trainer says so in a warning, and trains what the model was made with."""
    folder = run(kind)
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / "memory_manifest.json").unlink(missing_ok=True)
        other_tensors(checkpoint / "model.safetensors")
    with pytest.raises(InputError, match=r"lacks 21 of the model.s.* weights .*of another model"):
        train(folder, resume=True, **SAVING)


def wider():
    return LlamaForCausalLM(LlamaConfig(**TINY | {"hidden_size": 32})).double()


def test_another_model_or_optimizer_is_one_sentence(run):
    folder = run()
    with pytest.raises(InputError, match=r"checkpoint-4 cannot be loaded into this model and optimizer: .*size mis"):
        train(folder, resume=True, model=wider, **SAVING)
    with pytest.raises(InputError, match=r"optimizer\.pt is of another optimizer: it lacks beta1"):
        train(folder, resume=True, **SAVING | {"optim": "adafactor"})


def test_tied_weights_are_saved_once_and_resume(tmp_path, caplog):
    def tied():
        model = llama()
        model.config.tie_word_embeddings = True
        model.tie_weights()
        return model

    wanted = train(tmp_path, model=tied, **SAVING)
    assert "lm_head.weight" not in load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    shutil.rmtree(tmp_path / "checkpoint-4")
    caplog.clear()
    found = train(tmp_path, model=tied, resume=True, **SAVING)
    assert "missing keys" not in caplog.text
    assert torch.equal(found.weights, wanted.weights)


@pytest.mark.slow
def test_weights_that_a_model_computes_are_not_missing(tmp_path):
    """transformers leaves Marian's positions out of its files."""

    def computes():
        model = llama()
        model._keys_to_ignore_on_save = ["model.norm.weight"]
        return model

    wanted = train(tmp_path, model=computes, **SAVING)
    shutil.rmtree(tmp_path / "checkpoint-4")
    found = train(tmp_path, model=computes, resume=True, **SAVING)
    assert found.step == wanted.step == 4


# ---- hostile


class Runs:
    """A pickle that makes a file when it is read."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_resuming_runs_nothing(name, run, tmp_path):
    folder = run()
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / "memory_manifest.json").unlink()
        torch.save({"state": Runs(tmp_path / "proof")}, checkpoint / name)
    with pytest.raises(InputError, match=r"is not loaded, since it could run code: GLOBAL posix\.mkdir"):
        train(folder, resume=True, **SAVING | {"max_steps": 5})
    assert not (tmp_path / "proof").exists()


def test_metadata_of_a_distributed_checkpoint_run_nothing(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = {"weight": torch.arange(4.0), "groups": [{"lr": 0.1}], "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "states")
    found = {"weight": torch.zeros(4), "groups": [{"lr": 0.0}], "step": 0}
    with without_code("checkpoint-2"):
        dcp.load(found, checkpoint_id=tmp_path / "states")
    assert torch.equal(found["weight"], state["weight"]) and found["groups"] == state["groups"] and found["step"] == 3

    (tmp_path / "states" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "proof")))
    with pytest.raises(InputError, match=r"checkpoint-2 is not loaded.*posix\.mkdir"), without_code("checkpoint-2"):
        dcp.load(found, checkpoint_id=tmp_path / "states")
    # A class of torch's that is allowed, called through another module that has imported it, is not.
    (tmp_path / "states" / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.metadata\nos\n.")
    with pytest.raises(InputError), without_code("checkpoint-2"):
        dcp.load(found, checkpoint_id=tmp_path / "states")
    assert not (tmp_path / "proof").exists()


class PickledByGetattr:
    """Pickled as Python 3.11.0 to 3.11.3 do with a member of an enumeration."""

    def __init__(self, owner, name: str) -> None:
        self.as_pickled = getattr, (owner, name)

    def __reduce__(self):
        return self.as_pickled


def test_members_of_enumerations_are_read_however_they_were_pickled(tmp_path):
    import torch.distributed.checkpoint as dcp

    member = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert reread(PickledByGetattr(type(member), member.name)) is member
    file = tmp_path / "state.pt"
    zero = pytest.importorskip("deepspeed").runtime.zero.config.ZeroStageEnum
    torch.save({"stage": PickledByGetattr(zero, "gradients")}, file)
    with without_code("checkpoint-2"):
        assert torch.load(file) == {"stage": zero.gradients}
    for kind in (dcp.metadata.TensorProperties, torch.Size):
        with pytest.raises(InputError, match=r"could run code: GLOBAL builtins\.getattr of"):
            reread(PickledByGetattr(kind, "__init__"))


def reread(value):
    """A value from the metadata of a distributed checkpoint."""
    from torch.distributed.checkpoint import filesystem

    with without_code("checkpoint-2"):
        return filesystem.pickle.load(io.BytesIO(pickle.dumps(value)))


@pytest.mark.parametrize("stage", [1, sweep(2), 3])  # the files of stages 1 and 2 are written and read by one class
@pytest.mark.engines
def test_zero_checkpoints_are_read_without_running_what_is_in_them(stage, tmp_path):
    """A real DeepSpeed process saves, resumes, and meets a checkpoint with code in it."""
    script = Path(__file__).parents[1] / "zero_resume.py"
    done = command(
        "torchrun", "--standalone", "--nproc_per_node", 1, script, tmp_path / "out", tmp_path / "proof", stage
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {"resumed": 4, "refused": True}
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(("step", "runs"), [(3, True), (4, False), (5, False)])
def test_no_step_is_trained_beyond_the_last(step, runs, caplog):
    class Epochs:
        def _run_epoch(self, *args):
            return "ran", args

    class Resumed(SafeResume, Epochs):
        pass

    trainer = object.__new__(Resumed)
    trainer.state = SimpleNamespace(global_step=step, max_steps=4)
    trainer.control = SimpleNamespace(should_training_stop=False)
    assert trainer._run_epoch(1) == (("ran", (1,)) if runs else None)
    assert trainer.control.should_training_stop is not runs
    assert ("all 4 steps are done already" in caplog.text) is not runs
