"""plan(task=…): TRL's trainers, with the reference's part, groups of completions and vLLM's share as choices."""

import dataclasses
from types import SimpleNamespace

import pytest
from test_plan import config, spec_for

from hf_memopt import InputError, plan
from hf_memopt.hardware import get_hardware
from hf_memopt.planner.choice_jobs import start_search
from hf_memopt.planner.choices import list_choices
from hf_memopt.planner.launch import as_dict, recipe_command, training_arguments
from hf_memopt.planner.trl_choices import TrlSpace, trl_space
from hf_memopt.units import GIB

# TRL 1.16 reads names that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def space(task="grpo", method="full", devices=1, **fixed) -> TrlSpace:
    return TrlSpace(task=task, method=method, devices=devices, fixed=fixed)


def spec(task, method="full", batch=16, hardware="rtx_4090", **fields):
    made = spec_for(config(4), method, 96, hardware, batch)
    short = {"max_completion_length": 32} if task in ("grpo", "rloo") else {}
    return dataclasses.replace(made, task=task, training=made.training | short | fields)


def test_vllm_gets_the_weights_and_the_cache_of_its_completions():
    """Arithmetic: 4 layers × 2 heads of 16, keys and values of 2 bytes are 512 bytes a token."""
    made, weights = spec("grpo", use_vllm=True), 6 * GIB
    (choice, *_) = (one for one in list_choices(made) if one.micro_batch == 16)
    job = SimpleNamespace(config=config(4), seq_len=2**16, device=get_hardware("rtx_4090"))
    shares = {
        (one.trl.waves, one.trl.share, one.trl.sleeps) for one in trl_space(made).with_shares(choice, job, weights)
    }
    cache = 16 * 2**16 * 512
    for waves, share, _ in shares:
        least = 1.1 * (weights + cache / waves)
        assert least <= share * job.device.memory <= least + 1.2 * GIB
    assert {sleeps for *_, sleeps in shares} == {False, True} and min(shares)[0] == 1
    fixed = space(use_vllm=True, vllm_gpu_memory_utilization=0.25, vllm_enable_sleep_mode=True)
    assert [one.trl.share for one in fixed.with_shares(choice, job, weights)] == [0.25]
    assert not list(trl_space(made).with_shares(choice, job, 30 * GIB)), "more than the card"


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("grpo", {"effective_batch_size": 12}, "must be a multiple of num_generations=8"),
        ("grpo", {"training": {"num_generations": 1}}, "num_generations=1 must be at least 2"),
        ("grpo", {"hardware": "rtx_4090x2", "strategy": "zero3"}, "gathers to generate is not modelled"),
        ("rloo", {"hardware": "rtx_4090x2", "strategy": "fsdp2"}, "beside a sharded one is not modelled: set beta=0"),
    ],
)
def test_what_a_plan_cannot_do_is_one_sentence(task, settings, message):
    with pytest.raises(InputError, match=message):
        plan(config(4), **{"hardware": "rtx_4090", "method": "full", "seq_len": 96, **settings}, task=task)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "any"], "task=dpo is planned for one card"),
        (["--frames", "max"], "--frames max counts the frames of videos: leave --task dpo out"),
    ],
)
def test_the_command_refuses_it_too(command, words, message):
    code, _, errors = command("plan", "llama-3.2-1b", "--task", "dpo", *words)
    assert code == 2 and message in errors


def test_micro_batches_of_kto_have_two_samples():
    assert min(choice.micro_batch for choice in list_choices(spec("kto"))) == 2


def test_losses_are_left_to_trl():
    assert not any("loss_chunk_size" in choice.knobs for choice in list_choices(spec("dpo", method="lora")))
    assert dict(space("dpo").left_out()).keys() == {"padding_free", "use_liger_kernel"}
    assert not space("reward").left_out()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "grpo", pytest.param("reward", marks=pytest.mark.sweep)])
def test_sketches_are_near_estimates(task):
    """A sketch only chooses what is estimated; where it is far off, plans are slow or miss what would fit.
    In a model as small as this one the tiles of the head, whose size has a limit, are most of it."""
    made = spec(task)
    search = start_search(made, lambda text: None)
    some = search.choices[:: max(1, len(search.choices) // 3)][:3]
    search.estimate(some)
    for choice in some:
        sketched, _ = search.sketch.device_bytes(choice)
        assert sketched == pytest.approx(search.estimates[choice].device_bytes, rel=0.35), choice


@pytest.mark.slow
def test_a_reference_that_does_not_fit_is_precomputed(tmp_path):
    config(4, hidden_size=512, intermediate_size=2048, vocab_size=32000).save_pretrained(tmp_path)
    wide = str(tmp_path)
    settings = {"method": "full", "seq_len": 96, "effective_batch_size": 4, "task": "dpo"}
    ample = plan(wide, "rtx_4090", **settings)
    assert all(profile.choice.trl.reference for profile in ample), "the pass over the data takes time"
    least = min(profile.estimate.device_bytes for profile in ample)
    tight = plan(wide, "rtx_4090", memory=int(least * 0.9), training={"optim": "adamw_torch_fused"}, **settings)
    assert tight.profiles[0].choice.trl.precomputed
    assert training_arguments(tight.spec, tight.profiles[0])["precompute_ref_log_probs"] is True
    assert "--precompute_ref_log_probs true" in " ".join(recipe_command(tight.spec, tight.profiles[0]))


@pytest.mark.slow
def test_a_plan_of_grpo_says_what_is_generated_and_what_vllm_leaves():
    training = {"use_vllm": True, "max_completion_length": 32}
    made = plan(config(4), "rtx_4090", 16, 96, "full", task="grpo", training=training)
    profile, notes = made.profiles[0], " ".join(made.notes)
    arguments = as_dict(made.spec, profile)["training_arguments"]
    assert arguments["vllm_gpu_memory_utilization"] == profile.choice.trl.share == 0.05
    assert arguments["steps_per_generation"] * arguments["per_device_train_batch_size"] == 16
    assert "16 completions, 2 prompts × num_generations=8: generated 16 at once" in notes
    assert "which leaves 22.46 GiB to training" in notes


@pytest.mark.slow
def test_the_command_of_a_plan_is_what_the_recipe_reads(tmp_path):
    from hf_memopt.levers.refusals import check_with_trl
    from hf_memopt.presets.trl_configs import trl_class
    from hf_memopt.recipe.answers import AnswerArguments
    from hf_memopt.recipe.recipe_arguments import parse

    config(2).save_pretrained(tmp_path)
    training = {"optim": "adamw_torch", "packing": True}
    made = plan(str(tmp_path), "rtx_4090", 8, 64, "lora", task="sft", training=training)
    for profile in made.profiles:
        script, *words = recipe_command(made.spec, profile)
        assert script.endswith("recipes/sft.py")
        parsed = parse(words, own=AnswerArguments, config_class=trl_class("SFTConfig"))
        assert parsed.recipe.max_length == 64 and parsed.training["packing"] is True
        check_with_trl(parsed.memory, "SFTTrainer")
