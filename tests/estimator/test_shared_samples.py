"""Samples that several devices share, by Ulysses and around a ring: what estimates say of them.
test_engines.py runs the former; the latter needs an accelerator, and its attention alone runs here."""

import json
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import replace

import pytest
from accelerate import ParallelismConfig
from conftest import ROOT, run
from transformers import AutoConfig

from hf_memopt import InputError, MemoryArguments
from hf_memopt.estimator import estimate
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.presets import preset_by_name

sys.path.insert(0, str(ROOT / "benchmarks"))
from types import SimpleNamespace

from long_samples import ROWS, compared

from hf_memopt.estimator.timing.step_time import _sent_for_sharing

MODEL = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 28, "num_key_value_heads": 4}
CONFIG = AutoConfig.for_model(**MODEL, hidden_size=3584, vocab_size=500, max_position_embeddings=131072)


def shared(count: int = 4, config=CONFIG, strategy="zero3", fields=None, seq_len=8192, ring=False, **settings):
    """The estimate of a job whose samples devices share.

    Args:
        ring: by context parallelism in place of Ulysses.
    """
    shards = settings.get("world_size", 8) // count
    sizes = {"cp_size": count, "dp_shard_size": shards} if ring else {"sp_size": count, "sp_backend": "deepspeed"}
    given = {"parallelism_config": ParallelismConfig(**sizes), **(fields or {})}
    settings = {"dtype": "bfloat16", "world_size": 8, **settings}
    return estimate(
        config, {"per_device_train_batch_size": 1, **given}, seq_len, "a100_80gb", strategy=strategy, **settings
    )


@pytest.mark.slow
def test_each_device_has_its_part_of_the_activations():
    """Half of them under four devices when shared by eight; the engine's part stays, and all tokens are trained on."""
    config = AutoConfig.for_model(**{**MODEL, "num_attention_heads": 32}, hidden_size=512, vocab_size=500)
    found = [shared(count, config, fields={"bf16": True}) for count in (8, 4)]
    eighth, quarter = (each.breakdown["activations"] + each.breakdown["logits"] for each in found)
    assert 1.8 < quarter / eighth < 2.2
    assert found[0].breakdown["optimizer_states"] == found[1].breakdown["optimizer_states"]
    assert "samples shared by 8, 1 × 1 × 1" in found[0].estimated
    assert found[0].speed_kind == "samples that devices share" and found[0].speed_error is None
    assert found[0].tokens_per_second == 8192 / found[0].step_seconds


@pytest.mark.slow
def test_evaluation_has_whole_samples():
    evaluated = {"bf16": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    found, whole = shared(fields=evaluated), shared(1, fields=evaluated)
    assert found.phases["eval"] == pytest.approx(whole.phases["eval"], rel=0.02)
    assert found.phases["backward"] < 0.8 * whole.phases["backward"]


@pytest.mark.slow
@pytest.mark.parametrize("task", [None, "sft"])
def test_around_a_ring_each_device_has_its_part(task):
    """As with Ulysses, for any number of heads; evaluation, too, has parts."""
    config = AutoConfig.for_model(**{**MODEL, "num_attention_heads": 6, "num_key_value_heads": 2}, hidden_size=384)
    fields = {"bf16": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    settings = {"strategy": "fsdp2", "ring": True, "fields": fields, "task": task, "seq_len": 32768}
    eighth, half = (shared(count, config, **settings) for count in (8, 2))
    for phase in ("backward", "eval") if task is None else ("backward",):
        assert half.phases[phase] > 2.5 * eighth.phases[phase]
    assert eighth.breakdown["optimizer_states"] == half.breakdown["optimizer_states"]
    assert "samples shared by 8, 1 × 1 × 1" in eighth.estimated and "not compared" in " ".join(eighth.notes)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}, {row['offload']}")
def test_a_million_tokens_on_eight_devices(row):
    """A published peak of an unsaid kind: above the tensors, below all that the device needs."""
    found = compared(row)
    assert 0.9 * row["peak_gb"] < found["allocated_bytes"] / 1e9 < row["peak_gb"]
    assert row["peak_gb"] < found["device_bytes"] / 1e9 < 1.15 * row["peak_gb"]
    for seconds in row.get("step_seconds", []):
        assert found["predicted_seconds"] == pytest.approx(seconds, rel=0.1)


@pytest.mark.slow
def test_attention_around_a_ring_is_that_of_whole_samples(tmp_path):
    """Two real processes, each with a quarter of the tokens from the start and one from the end."""
    script = tmp_path / "ring.py"
    script.write_text(textwrap.dedent(ATTENTION))
    ran = run("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    assert ran.returncode == 0, ran.stderr


ATTENTION = """
    import torch
    from torch import distributed
    from torch.nn.functional import scaled_dot_product_attention
    from hf_memopt.estimator.patches.ring_attention import attention_around

    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 32, 8, requires_grad=True) for _ in range(3)]
    expected = scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    quarters = [distributed.get_rank(), 3 - distributed.get_rank()]

    def part(tensor):
        return torch.cat([tensor.detach().chunk(4, 2)[quarter] for quarter in quarters], 2)

    parts = [part(tensor).requires_grad_() for tensor in whole]
    found = attention_around(distributed.group.WORLD)(*parts, is_causal=True)
    found.square().sum().backward()
    torch.testing.assert_close(found, part(expected))
    for mine, theirs in zip(parts, whole):
        torch.testing.assert_close(mine.grad, part(theirs.grad))
    distributed.destroy_process_group()
"""


def _layers(*kinds):
    return AutoConfig.for_model(**{**MODEL, "model_type": "qwen3", "hidden_size": 3584, "layer_types": [*kinds]})


REFUSED = [
    ({"strategy": "fsdp2"}, "sp_size=4 needs DeepSpeed, and the strategy is fsdp2: use zero1, zero2 or zero3"),
    ({"count": 3, "world_size": 9}, "does not divide the model's 28 attention heads"),
    ({"world_size": 6}, "does not divide the 6 processes"),
    ({"config": AutoConfig.for_model("gpt2"), "seq_len": 1024}, "reads num_key_value_heads of the configuration"),
    ({"config": AutoConfig.for_model("mixtral")}, "reads head_dim of the configuration, which has none"),
    ({"padded": True}, "without padding"),
    ({"memory_args": MemoryArguments(logits_to_keep=True)}, "logits_to_keep needs whole samples"),
    ({"fields": {"parallelism_config": ParallelismConfig(cp_size=2)}}, "cp_size=2 needs FSDP2, .* zero3: use fsdp2"),
    ({"config": _layers("sliding_attention", "full_attention")}, "set attn_implementation=flash_attention_2"),
    ({"config": _layers("linear_attention", "full_attention")}, "linear attention passes a state"),
]
RING = {"ring": True, "strategy": "fsdp2", "count": 2, "world_size": 4}
REFUSED += [
    ({**RING, "strategy": "ddp"}, "under DeepSpeed and FSDP2, and the strategy is ddp: use zero1"),
    ({**RING, "seq_len": 8190}, "divides samples of a multiple of 4 tokens: 8190 is none"),
    ({**RING, "padded": True}, "without padding"),
    ({**RING, "world_size": 5}, "multiply to 4, and there are 5 processes"),
    ({**RING, "attn_implementation": "flash_attention_2"}, "under FSDP2 needs attn_implementation=sdpa"),
    (
        {**RING, "config": _layers("sliding_attention", "full_attention")},
        "causal attention alone, .* sliding_attention",
    ),
    ({**RING, "memory_args": MemoryArguments(loss_chunk_size=64)}, "loss_chunk_size needs whole samples"),
    ({**RING, "fields": {"parallelism_config": ParallelismConfig(cp_size=2, tp_size=2)}}, "as strategy=tp2"),
    ({**RING, "fields": {"parallelism_config": ParallelismConfig(tp_size=4)}}, "as strategy=tp4"),
    (
        {**RING, "fields": {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}},
        "as strategy=hsdpN",
    ),
    (
        {**RING, "fields": {"parallelism_config": ParallelismConfig(cp_size=2)}},
        "multiply to 2, and there are 4 processes: accelerate refuses it; set dp_shard_size=2",
    ),
    ({**RING, "task": "dpo"}, "predicted with task=sft under fsdp2, and without a task"),
    ({**RING, "task": "sft", "fields": {"packing": True}}, "packing=true needs whole samples"),
]


def test_what_cannot_be_shared_is_refused(subtests):
    for settings, reason in REFUSED:
        with subtests.test(settings=settings, reason=reason), pytest.raises(InputError, match=reason):
            shared(**settings)


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("window", "refused"), [(4096, True), (8192, False)])
def test_a_window_of_every_layer_is_dropped_unless_it_holds_the_sample(window, refused):
    config = AutoConfig.for_model(**{**MODEL, "model_type": "mistral"}, hidden_size=3584, sliding_window=window)
    context = pytest.raises(InputError, match="drops the masks of sliding_attention") if refused else nullcontext()
    with context:
        shared(config=config)


def test_a_preset_that_shares_samples_keeps_doing_so():
    preset = replace(preset_by_name("h100_80gb_x8", "full", "zero3"), sequence_parallel=4)
    job = spec_job(preset_spec(preset, CONFIG))
    assert (job.shared, job.fields["gradient_accumulation_steps"]) == (4, preset.gradient_accumulation_steps)


@pytest.mark.slow
def test_the_command_line_shares_samples(command, tmp_path):
    CONFIG.save_pretrained(tmp_path)
    words = [
        *("estimate", str(tmp_path), "--hardware", "a100_80gbx4", "--seq-len", "8192", "--strategy", "zero3"),
        "--json",
    ]
    code, output, _ = command(*words, "--sequence-parallel", "4", "--json")
    assert code == 0 and "samples shared by 4" in json.loads(output)["estimated"]
    code, _, message = command(*words, "--sequence-parallel", "4", "--task", "sft")
    assert code == 2 and "sequence_parallel=4 is predicted with task=sft under fsdp2" in message


def sharing(**changes) -> SimpleNamespace:
    """What is asked of a job whose samples of 100 tokens are shared by four, of 2 layers with 8 heads of 16."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=2, hidden_size=128, num_attention_heads=8, num_key_value_heads=2
    )
    job = {"shared": 4, "config": config, "micro_batch_tokens": 100, "fields": {}, "shares_heads": True}
    return SimpleNamespace(**job | {"engine": SimpleNamespace(checkpointing=False)} | changes)


def test_what_processes_that_share_samples_send():
    """Elements of 16 bits: queries and outputs of all heads, keys and values of two, repeated for each of the four."""
    assert _sent_for_sharing(sharing(shared=1)) == {}
    once = 2 * 16 * 100 * (2 * 8 + 2 * 4)
    assert _sent_for_sharing(sharing()) == {"sent": 2 * 2 * once, "messages": 4 * 2 * 2}
    again = sharing(fields={"activation_checkpointing": True})
    assert _sent_for_sharing(again) == {"sent": 2 * 3 * once, "messages": 4 * 2 * 3}
    around = 2 * 2 * 16 * 100 * 4  # keys and values have two heads, and reach all four
    assert _sent_for_sharing(sharing(shares_heads=False)) == {
        "sent": 2 * (2 * 2 + 4) * around,
        "messages": 2 * (2 + 4),
    }
