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

from hf_memopt.trainer.checkpoints.consolidation import consolidate

sys.path.insert(0, str(ROOT / "benchmarks"))
import engines

# Of DeepSpeed's CPU optimizer. All engines start within the first test's time.
pytestmark = [pytest.mark.engines, pytest.mark.needs_compiler, pytest.mark.timeout(1800)]
# In tensor parallelism what is exchanged lives until gloo's threads are done with it: of this model's logits 3 % each,
# three at once were seen.
NEAR = {"tp2": 0.15, "tp2_hsdp1": 0.15}
# Weights on a disk come back by no checkpoint of DeepSpeed 0.19.8's.
UNSAVED = ("fsdp2", "fsdp2_offload_cpu", "zero3_offload_nvme")


# One size of each in CI. The other strategies have parts of these: replicas, states alone sharded, states on
# the host.
USUAL = {"zero2": 2, "zero3": 4, "zero3_offload_cpu": 2, "fsdp2": 2, "fsdp2_offload_cpu": 2, "hsdp2": 4, "tp2": 2}
# Ulysses: activations of half the tokens each. Two processes: torch 2.13's exchange between some of several fails over
# gloo, which takes their ranks for others.
SHARED = [("zero2", 2, {})]
SHARED += [(name, 2, {"sequence_parallel": 2, "name": f"shared-{name}"}) for name in ("zero2", "zero3")]
CHUNKED = {"sequence_parallel": 2, "memory": {"loss_chunk_size": 32}}
SHARED += [(name, 2, {**CHUNKED, "name": f"shared-chunked-{name}"}) for name in ("zero2", "zero3")]
QLORA = [("zero3", 2, {"qlora": True, "name": "qlora"})]
QLORA += [("fsdp2_offload_cpu", 2, {"qlora": True, "name": "qlora-fsdp2_offload_cpu"})]


def cases_of(item) -> list[tuple[str, int, dict]]:
    """Strategy, processes and more of a test's cases."""
    if item.originalname == "test_an_engine":
        strategy, size = (item.callspec.params[name] for name in ("strategy", "size"))
        return [(strategy, size, {"saved": strategy not in UNSAVED})]
    return SHARED if "share_the_tokens" in item.name else QLORA


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return engines.save_model(tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture(scope="module")
def ranks(request, model, tmp_path_factory):
    """Name -> case, its folder and what its ranks measured; all cases of the selected tests, from one start."""
    items = [item for item in request.session.items if "ranks" in getattr(item, "fixturenames", ())]
    asked = [case for item in items for case in cases_of(item)]
    made = [engines.case("none", 1, model)]
    made += [engines.case(strategy, size, model, **more) for strategy, size, more in asked]
    cases = {}
    for case in made:
        cases[case["name"]] = cases.get(case["name"], {}) | case
    folder = tmp_path_factory.mktemp("engines")
    found = engines.run(folder, list(cases.values()))
    return {name: (cases[name], folder / name, found[name]) for name in cases}


@pytest.fixture
def alone(ranks) -> list[float]:
    """The losses of one process without an engine."""
    losses = ranks["none-1"][2][0]["losses"]
    assert len(losses) == engines.STEPS and losses[0] != losses[-1]
    return losses


def engine(strategy: str, size: int):
    swept, libaio = USUAL.get(strategy) != size, strategy.endswith("nvme")
    return pytest.param(strategy, size, marks=[pytest.mark.sweep] * swept + [pytest.mark.needs_libaio] * libaio)


@pytest.mark.parametrize(
    ("strategy", "size"), [engine(strategy, size) for strategy, sizes in engines.ENGINES.items() for size in sizes]
)
def test_an_engine(strategy, size, ranks, alone):
    case, folder, found = ranks[f"{strategy}-{size}"]
    near = NEAR.get(strategy, 0.01)
    for rank, reported in enumerate(found):
        assert reported["losses"] == pytest.approx(alone, rel=1e-5), rank
        assert reported["tensors"] == pytest.approx(engines.predicted(case, rank), rel=near), rank
    largest = max(reported["tensors"] for reported in found)
    assert engines.predicted(case) == pytest.approx(largest, rel=near), "of the rank that needs the most"
    if strategy not in UNSAVED:
        _check_saved(folder, strategy)


def test_processes_share_the_tokens_of_a_batch(ranks, alone):
    """Each has the activations of half the tokens, the bytes that are predicted, and one process's losses."""
    for name in (more["name"] for _, _, more in SHARED[1:]):
        case, _, found = ranks[name]
        for rank, reported in enumerate(found):
            assert reported["losses"] == pytest.approx(alone, rel=1e-5), name
            assert reported["tensors"] == pytest.approx(engines.predicted(case, rank), rel=0.01), (name, rank)
    whole, shared = (max(reported["tensors"] for reported in ranks[name][2]) for name in ("zero2-2", "shared-zero2"))
    assert shared < 0.95 * whole


@pytest.mark.parametrize("name", [case["name"] for _, _, case in QLORA])
def test_layers_of_4_bits_are_gathered(name, ranks):
    case, _, found = ranks[name]
    for rank, reported in enumerate(found):
        assert len(reported["losses"]) == engines.STEPS
        assert reported["tensors"] == pytest.approx(engines.predicted(case, rank), rel=0.01)


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


@pytest.mark.parametrize("shared", [4, pytest.param(2, marks=pytest.mark.sweep)])
def test_four_processes_go_on_where_two_left_off(shared, jsonl, tmp_path):
    """Two that share the weights, then four that share them, or two pairs of replicas: one run's losses."""
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
    shutil.copytree(tmp_path / "two" / "checkpoint-2", tmp_path / "four" / "checkpoint-2")
    assert len(two) == 4 and losses("four", 4, shared) == pytest.approx(two, rel=1e-5)
