"""Every engine on two and four real processes: losses, every rank's peak, and what its checkpoints hold.

Run by `make test-engines`. What stands for an accelerator, which accelerate wants for FSDP2 and for tensor
parallelism, is said in benchmarks/engine_ranks.py.
"""

import json
import shutil
import sys

import pytest
import torch
from conftest import ROOT, flags, run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_memopt.trainer.consolidation import consolidate

sys.path.insert(0, str(ROOT / "benchmarks"))
import engines

pytestmark = [pytest.mark.engines, pytest.mark.needs_compiler]  # of DeepSpeed's CPU optimizer
# In tensor parallelism what is exchanged lives until gloo's threads are done with it: of this model's logits 3 % each,
# three at once were seen.
NEAR = {"tp2": 0.15, "tp2_hsdp1": 0.15}
# Weights on a disk come back by no checkpoint of DeepSpeed 0.19.8's.
UNSAVED = ("fsdp2", "zero3_offload_nvme")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return engines.save_model(tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> list[float]:
    """The losses of one process without an engine."""
    found = engines.run(tmp_path_factory.mktemp("alone"), [engines.case("none", 1, model)])
    return found["none-1"][0]["losses"]


# Their parts are those of the others: replicas, states alone sharded, states on the host.
SWEPT = ("ddp", "zero1", "zero2_offload_cpu", "zero3_offload_nvme", "tp2_hsdp1")


def marks(strategy: str) -> list:
    swept, libaio = strategy in SWEPT, strategy.endswith("nvme")
    return [pytest.mark.sweep] * swept + [pytest.mark.needs_libaio] * libaio


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=marks(name)) for name in engines.ENGINES])
def test_an_engine(strategy, model, alone, tmp_path):
    cases = [engines.case(strategy, size, model, saved=strategy not in UNSAVED) for size in engines.ENGINES[strategy]]
    found, near = engines.run(tmp_path, cases), NEAR.get(strategy, 0.01)
    for case in cases:
        ranks = found[case["name"]]
        assert len(alone) == engines.STEPS and alone[0] != alone[-1]
        for rank, reported in enumerate(ranks):
            assert reported["losses"] == pytest.approx(alone, rel=1e-5), case
            assert reported["tensors"] == pytest.approx(engines.predicted(case, rank), rel=near), (case, rank)
        largest = max(reported["tensors"] for reported in ranks)
        assert engines.predicted(case) == pytest.approx(largest, rel=near), "of the rank that needs the most"
        if case["saved"]:
            _check_saved(tmp_path / case["name"], strategy)


def test_processes_share_the_tokens_of_a_batch(model, alone, tmp_path):
    """Ulysses: activations of half the tokens each, and one process's losses.

    (Two processes: torch 2.13's exchange between some of several fails over gloo, which takes their ranks for others.)
    """
    cases = [engines.case("zero2", 2, model)]
    cases += [
        {**engines.case(name, 2, model, sequence_parallel=2), "name": f"shared-{name}"} for name in ("zero2", "zero3")
    ]
    found = engines.run(tmp_path, cases)
    for case in cases[1:]:
        for reported in found[case["name"]]:
            assert reported["losses"] == pytest.approx(alone, rel=1e-5), case
    whole, shared = (max(reported["tensors"] for reported in found[name]) for name in ("zero2-2", "shared-zero2"))
    assert shared < 0.95 * whole


def test_layers_of_4_bits_are_gathered_by_zero_3(model, tmp_path):
    cases = [{**engines.case("zero3", 2, model, qlora=True), "name": "qlora"}]
    for rank, reported in enumerate(engines.run(tmp_path, cases)["qlora"]):
        assert len(reported["losses"]) == engines.STEPS
        assert reported["tensors"] == pytest.approx(engines.predicted(cases[0], rank), rel=0.01)


def _check_saved(folder, strategy: str) -> None:
    """A checkpoint, whole or put together again, holds the weights that were gathered, and loads."""
    checkpoint = folder / "out" / f"checkpoint-{engines.STEPS}"
    if strategy.startswith("zero"):
        consolidate(checkpoint, folder / "merged", trusted=True)
        checkpoint = folder / "merged"
    gathered = load_file(folder / "out" / "model.safetensors")
    reloaded = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert gathered.keys() <= reloaded.keys()
    assert all(torch.equal(reloaded[name], weight) for name, weight in gathered.items())


def test_four_processes_go_on_where_two_left_off(jsonl, tmp_path):
    """Two that share the weights, then four that share them, and two pairs of replicas: one run's losses."""
    done = run("hf-memopt", "export", "cpu_x2", tmp_path / "run", "--strategy", "hsdp2", "--recipe", "sft")
    assert done.returncode == 0, done.stderr
    settings = tmp_path / "run" / "training_arguments.json"
    given = json.loads(settings.read_text())
    settings.write_text(json.dumps({name: value for name, value in given.items() if "accumulation" not in name}))
    data = jsonl([{"prompt": f"What is {n} plus {n}?", "completion": f" It is {2 * n}."} for n in range(60)])
    words = [
        ROOT / "recipes" / "sft.py",
        *flags(
            preset="cpu_x2",
            effective_batch_size=8,
            config=settings,
            dataset_name=data,
            held_out=0,
            samples=0,
            max_length=32,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
        ),
    ]

    def losses(name, processes, shared):
        done = run(
            "accelerate",
            "launch",
            *flags(config_file=tmp_path / "run" / "accelerate.yaml", num_processes=processes, main_process_port=0),
            *words,
            *flags(fsdp_size=shared, output_dir=tmp_path / name),
            env={"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        history = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry]

    two = losses("two", 2, 2)
    for name, shared in (("four", 4), ("pairs", 2)):
        shutil.copytree(tmp_path / "two" / "checkpoint-2", tmp_path / name / "checkpoint-2")
        assert len(two) == 4 and losses(name, 4, shared) == pytest.approx(two, rel=1e-5)
