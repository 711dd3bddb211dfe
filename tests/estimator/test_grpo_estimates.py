"""TRL's GRPO and RLOO, estimated and really trained: the same peak in every phase."""

import functools
import random
from types import SimpleNamespace

import pytest
import torch
import trl
from conftest import slow
from datasets import Dataset
from test_trl_estimates import VOCABULARY, llama, lora, tokenizer
from torch.profiler import record_function
from transformers import TrainerCallback
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from benchmarks.profiled_peak import allocator_peaks
from hf_memopt import InputError, MemoryTrainerMixin, estimate, estimate_trainer
from hf_memopt.estimator.tracing.rollouts import _lengthen

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PHASES = ("generation", "log_probs", "rewards", "forward", "backward", "optimizer")


class MemoryGRPOTrainer(MemoryTrainerMixin, trl.GRPOTrainer):
    pass


def prompts() -> Dataset:
    """Long and short ones in turn, so that every generation batch is padded."""
    generator = random.Random(0)

    def words(count):
        return " ".join(f"w{generator.randrange(3, VOCABULARY)}" for _ in range(count))

    return Dataset.from_list([{"prompt": words(20 if row % 2 else 8)} for row in range(16)])


def lengths(completions, **_):
    return [float(len(text)) for text in completions]


def make(folder, kind=trl.GRPOTrainer, model=None, peft_config=None, rewards=lengths, **fields):
    fields = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 24,
        "max_steps": 2,
        "shuffle_dataset": False,
        "activation_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **fields,
    }
    config = trl.RLOOConfig if kind is trl.RLOOTrainer else trl.GRPOConfig
    return kind(
        model=model or llama(),
        reward_funcs=rewards,
        args=config(str(folder), **fields),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def measured(make_trainer) -> dict[str, int]:
    """The peaks of a real run, in all and in each phase."""

    class Optimizer(TrainerCallback):
        def on_train_begin(self, *args, optimizer, **kwargs):
            optimizer.step = named("optimizer", optimizer.step)

    def train():
        trainer = make_trainer()
        compute = trainer._get_per_token_logps_and_entropies
        without = named("log_probs", compute)
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
            compute(*args, **kwargs) if torch.is_grad_enabled() else without(*args, **kwargs)
        )
        trainer._generate_single_turn = named("generation", trainer._generate_single_turn)
        trainer._calculate_rewards = named("rewards", trainer._calculate_rewards)
        trainer._compute_loss = named("forward", trainer._compute_loss)
        trainer.accelerator.backward = named("backward", trainer.accelerator.backward)
        trainer.add_callback(Optimizer())
        trainer.train()

    return allocator_peaks(train, PHASES)


def named(phase: str, function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        with record_function(phase):
            return function(*args, **kwargs)

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A model by its name, from which TRL makes a reference model."""
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    return str(folder)


REFERENCE = {"model": "saved", "beta": 0.1}
CASES = {
    **{"GRPO": {}, "reference model": REFERENCE, "RLOO": {"model": "saved", "kind": trl.RLOOTrainer}},
    **{"LoRA": {"beta": 0.1, "peft_config": lora}, "accumulated": {"gradient_accumulation_steps": 4}},
    "generated again beside gradients": {"gradient_accumulation_steps": 3, "steps_per_generation": 1},
    "old log-probabilities": {"num_iterations": 2, "max_steps": 3},
    "long completions": {"per_device_train_batch_size": 8, "max_completion_length": 64},
    **{"tokens of most entropy": {"top_entropy_quantile": 0.5}, "static cache": {"cache_implementation": "static"}},
    **{"bf16": {"bf16": True}, "memory trainer": {"kind": MemoryGRPOTrainer}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["GRPO", *(slow(case) for case in CASES if case != "GRPO")])
def test_every_phase_is_predicted_as_measured(case, tmp_path, saved):
    settings = {name: saved if value == "saved" else value for name, value in CASES[case].items()}
    if "peft_config" in settings:
        settings["peft_config"] = settings["peft_config"]()
    predicted = estimate_trainer(make(tmp_path, **settings), "cpu")
    peaks = measured(lambda: make(tmp_path, **settings))
    assert predicted.peak_allocated_bytes == pytest.approx(peaks.pop(""), rel=0.02)
    assert set(predicted.phases) >= set(peaks) > {"generation", "rewards"}
    for phase, size in peaks.items():
        assert predicted.phases[phase] == pytest.approx(size, rel=0.03), phase


@pytest.mark.slow
def test_a_trainer_stays_as_it_was(tmp_path):
    """And its reward functions are not called, which may ask a server."""

    def judge(**_):
        raise AssertionError

    trainer = make(tmp_path, rewards=judge)
    before = dict(vars(trainer))
    assert estimate_trainer(trainer, "cpu").phases["rewards"] > 0
    assert vars(trainer) == before


@pytest.mark.slow
def test_evaluation_generates_too(tmp_path):
    trainer = make(tmp_path, do_eval=True, per_device_eval_batch_size=8)
    trainer.eval_dataset = prompts()
    assert estimate_trainer(trainer, "cpu").phases["eval"] > 0


@pytest.mark.slow
def test_an_engine_of_vllm_is_left_alone(tmp_path):
    """An object that cannot be copied stands for the engine, which is not here."""

    class Engine:
        def __copy__(self):
            raise AssertionError

    trainer = make(tmp_path)
    trainer.use_vllm, trainer.vllm_generation = True, Engine()
    trainer.args.use_vllm = True
    phases = estimate_trainer(trainer, "a100_80gb").phases
    assert phases["generation"] > 0.3 * 2**30 and phases["log_probs"]


@pytest.mark.slow
def test_longer_completions_grow_the_cache_alone(tmp_path):
    """Generation takes two forward passes to trace, however long completions are."""
    short, long = (
        estimate_trainer(make(tmp_path, max_completion_length=length), "a100_80gb").phases["generation"]
        for length in (64, 64 + 8192)
    )
    cache = 8192 * 4 * 8 * 2 * (2 * 16) * 4  # tokens, samples, layers, keys and values, heads × their size, bytes
    assert long - short == pytest.approx(cache * 17 / 16, rel=0.1)  # one layer's is copied while it grows


def task(name="grpo", seq_len=64, hardware="a100_80gb", model=None, peft_config=None, world_size=None, **fields):
    fields = {"per_device_train_batch_size": 4, "max_completion_length": 32, "num_generations": 4, **fields}
    return estimate(
        model or llama().config, fields, seq_len, hardware, peft_config=peft_config, world_size=world_size, task=name
    )


@pytest.mark.slow
def test_a_task_is_the_trainer_that_it_stands_for(tmp_path):
    """A prompt of 20 and a completion of 24 tokens."""
    made = {"num_generations": 2, "max_completion_length": 24, "bf16": False, "activation_checkpointing": False}
    phases = task(seq_len=44, hardware="cpu", **made).phases
    assert phases == pytest.approx(estimate_trainer(make(tmp_path), "cpu").phases, rel=0.01)


@pytest.mark.slow
def test_the_reference_of_a_task_is_counted_unless_there_are_adapters():
    own = sum(weight.numel() * 4 for weight in llama().parameters())
    alone, beside = (task(beta=beta).breakdown["parameters"] for beta in (0.0, 0.1))
    assert beside - alone == pytest.approx(own, rel=0.01)
    adapted = task("rloo", peft_config=lora())
    assert adapted.breakdown["parameters"] < alone * 1.1


@pytest.mark.slow
def test_states_of_the_optimizer_are_there_while_it_generates():
    for fields in ({}, {"beta": 0.1}, {"gradient_accumulation_steps": 8}):
        phases = task(hardware="cpu", **fields).phases
        assert phases["generation"] > phases["between"] * 0.74, fields  # which holds gradients, too


@pytest.mark.slow
def test_groups_may_be_spread_over_devices():
    """A sample a device, four of which are a group."""
    one = {"per_device_train_batch_size": 1}
    assert task(world_size=4, **one).phases["generation"]
    with pytest.raises(InputError, match=r"generation_batch_size .1. must be divisible by num_generations .4."):
        task(**one)


@pytest.mark.slow
def test_vllm_takes_its_share_where_it_colocates():
    """Arithmetic, as in test_colocation.py: vLLM is not here."""
    alone, server, awake, asleep = (
        task(**fields)
        for fields in (
            *({}, {"use_vllm": True, "vllm_mode": "server"}, {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5}),
            {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5, "vllm_enable_sleep_mode": True},
        )
    )
    share = alone.capacity_bytes // 2
    assert server.phases["generation"] == server.phases["between"], "the server generates on other cards"
    for phase in ("backward", "optimizer"):
        assert awake.phases[phase] - server.phases[phase] == pytest.approx(share, abs=2)
        assert asleep.phases[phase] == server.phases[phase]
    assert asleep.phases["generation"] == awake.phases["generation"]
    assert asleep.phase == "generation" and asleep.peak_allocated_bytes == asleep.phases["generation"]
    weights = asleep.phases["weight_sync"] - asleep.phases["between"]
    assert weights == sum(weight.numel() * 2 for weight in llama().parameters()), "a second time, in 16 bits"
    assert any("arithmetic, not measured" in note for note in awake.notes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_completion_length": 64}, "max_completion_length=64 must be from 1 to 63: seq_len=64 is the prompt"),
        ({"generation_batch_size": 6}, "generation_batch_size=6 must be a multiple of the 4 samples"),
        ({"num_generation": 4}, "unknown GRPOConfig field 'num_generation'"),
    ],
)
def test_settings_of_a_task_that_cannot_be_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        task(**fields)


@slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp2"])
def test_engines(strategy, tmp_path):
    phases = estimate_trainer(make(tmp_path), "a100_80gb", world_size=4, strategy=strategy).phases
    assert all(phases[name] for name in ("generation", "rewards", "forward", "backward", "optimizer"))


@pytest.mark.parametrize(
    ("strategy", "fields", "message"),
    [
        ("zero3", {}, "under ZeRO-3: what it gathers to generate is not modelled"),
        (None, {"generation_kwargs": {"num_beams": 2}}, "generation_kwargs.num_beams=2: beam search"),
    ],
)
def test_what_is_not_modelled_is_refused(strategy, fields, message, tmp_path):
    with pytest.raises(InputError, match=message):
        estimate_trainer(make(tmp_path, **fields), "a100_80gb", world_size=4 if strategy else 1, strategy=strategy)


def test_a_cache_is_as_long_as_its_completions_but_for_a_sliding_window():
    cache = SimpleNamespace(layers=[DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=8)])
    for layer in cache.layers:
        layer.update(torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 4))
    _lengthen(cache, 20)
    assert [layer.keys.shape for layer in cache.layers] == [(2, 3, 20, 4), (2, 3, 7, 4)]
    assert [layer.values.shape for layer in cache.layers] == [(2, 3, 20, 4), (2, 3, 7, 4)]
