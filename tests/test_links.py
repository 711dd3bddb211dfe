"""A file of a foreign folder that is a link to elsewhere is refused by each reader; the hub's cache is not."""

import json
from types import SimpleNamespace

import pytest
from runs import ENDED, reading, report, write_run

from hf_memopt.contrib.merging.merge import find_folder
from hf_memopt.errors import InputError
from hf_memopt.estimator.architectures import load_config
from hf_memopt.files import check_links
from hf_memopt.recipe.job import load_tokenizer
from hf_memopt.reports.advice import advise
from hf_memopt.reports.run import LOG, OOM, REPORT_FILE, read_run
from hf_memopt.trainer.intact import check_intact, checkpoint_fault

LEAVES = "is a link that leaves its folder"


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "elsewhere" / "secret"
    file.parent.mkdir()
    file.write_text('{"model_type": "gpt2"}')
    return file


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return folder


def test_models_and_adapters(model, secret):
    assert load_config(str(model)).model_type == "gpt2" and find_folder(model) == model
    (model / "chat_template.jinja").symlink_to(model / "config.json")  # within the folder
    assert load_config(str(model)).model_type == "gpt2"
    (model / "tokenizer_config.json").symlink_to(secret)
    job = SimpleNamespace(recipe=SimpleNamespace(tokenizer_name=str(model), trust_remote_code=False), model_name="")
    for read in (load_config, find_folder, lambda name: load_tokenizer(job)):
        with pytest.raises(InputError, match=f"tokenizer_config.json {LEAVES}"):
            read(str(model))


def test_checkpoints(tmp_path, secret):
    checkpoint = tmp_path / "out" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "rng_state.pth").symlink_to(secret)
    assert LEAVES in checkpoint_fault(checkpoint)
    with pytest.raises(InputError, match=LEAVES):
        check_intact(checkpoint)


def test_consolidation(tmp_path, secret):
    from hf_memopt.trainer.consolidation import consolidate

    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / "pytorch_model_fsdp_0").mkdir(parents=True)
    (checkpoint / "pytorch_model_fsdp_0" / ".metadata").touch()
    (checkpoint / "config.json").symlink_to(secret)
    with pytest.raises(InputError, match=LEAVES):
        consolidate(checkpoint, tmp_path / "out", trusted=True)


@pytest.mark.parametrize("name", [REPORT_FILE, LOG, OOM])
def test_runs(name, tmp_path, secret):
    folder = write_run(tmp_path / "run", report(), [reading(10)], ENDED)
    (folder / "weights.bin").symlink_to(secret)  # which nobody reads
    assert read_run(folder).report and advise(str(folder))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    for read in (read_run, lambda folder: advise(str(folder))):
        with pytest.raises(InputError, match=LEAVES):
            read(folder)


def test_logs(tmp_path, secret):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.log").symlink_to(secret)
    with pytest.raises(InputError, match=LEAVES):
        advise(str(tmp_path / "run"))


def test_the_hubs_cache(tmp_path, secret):
    repository = tmp_path / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "f00").write_text(json.dumps({"model_type": "gpt2"}))
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/f00")
    assert load_config(str(snapshot)).model_type == "gpt2"
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)  # the folder itself may be a link
    assert check_links(linked) == linked
    (snapshot / "tokenizer.json").symlink_to(secret)
    with pytest.raises(InputError, match=f"tokenizer.json {LEAVES}"):
        check_links(snapshot)


def test_a_link_to_itself(model):
    (model / "loop").symlink_to(model / "loop")
    with pytest.raises(InputError, match="loop"):
        check_links(model)
