"""Several devices: DeepSpeed, FSDP2 and DDP on a fake process group, against themselves and against real processes."""

import os
import sys
from random import Random

import pytest
import torch
from conftest import ROOT, slow, sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, LlamaConfig

from hf_memopt import InputError
from hf_memopt.errors import ImpossibleEstimate
from hf_memopt.estimator import estimate
from hf_memopt.estimator.accounting import fake_outputs
from hf_memopt.estimator.allocator.caching import CachingAllocator
from hf_memopt.estimator.allocator.replay import replay
from hf_memopt.estimator.api import run_trace
from hf_memopt.estimator.assembly import missing_layers
from hf_memopt.estimator.job import describe
from hf_memopt.estimator.tracing import extrapolate
from hf_memopt.estimator.tracing.model import count_weights
from hf_memopt.hardware import get_hardware

sys.path.insert(0, str(ROOT / "benchmarks"))
import engines

CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
SHAPE = {
    **{"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": 8000},
}
MIB = 2**20


def _config(layers=8):
    return AutoConfig.for_model(num_hidden_layers=layers, **SHAPE)


@pytest.mark.engines
@pytest.mark.sweep  # test_engines.py compares every rank of the same engines
def test_levers_under_engines(tmp_path):
    """Every rank of two real processes, with features of memory and in bf16."""
    model = engines.save_model(tmp_path / "model")
    settings = {
        "ddp": ({}, {"activation_compression": "int8"}),
        "zero2": ({"bf16": True}, {}),
        "zero3": ({**CHECKPOINTED, "bf16": True}, {"loss_chunk_size": 32}),
    }
    cases = [engines.case(strategy, 2, model, memory=memory) for strategy, (_, memory) in settings.items()]
    for case in cases:
        case["fields"] |= settings[case["strategy"]][0]
    for name, ranks in engines.run(tmp_path, cases).items():
        (case,) = [case for case in cases if case["name"] == name]
        for number, rank in enumerate(ranks):
            assert engines.predicted(case, number) == pytest.approx(rank["tensors"], rel=0.01), (name, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", *map(slow, ("fsdp2", "fsdp2_offload_cpu", "zero2", "zero3", "zero3_offload_cpu"))]
)
def test_extending_equals_tracing_all_layers(strategy, monkeypatch):
    def found():
        fields = {**CHECKPOINTED, "bf16": True, "per_device_train_batch_size": 1}
        return estimate(_config(14), fields, 256, "a100_80gb", world_size=4, strategy=strategy)

    extended = found()
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    whole = found()
    # ZeRO-2's flat partitions begin with the embeddings: only nearly a straight line.
    error = 0.01 if strategy == "zero2" else 0.002
    assert extended.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=error)
    assert extended.host_bytes == pytest.approx(whole.host_bytes, rel=0.002)


def _random_job(random: Random) -> tuple[LlamaConfig, dict, int, str]:
    """A job whose weights may outweigh its activations, or not: what is gathered ahead, or what is kept, decides."""
    heads = random.choice((4, 8, 16))
    width = heads * random.choice((32, 128))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * random.choice((1, 3, 6)),
        num_hidden_layers=random.choice((8, 9, 11)),
        num_attention_heads=heads,
        num_key_value_heads=random.choice((2, heads)),
        vocab_size=random.choice((512, 8192, 65536)),
        tie_word_embeddings=random.choice((True, False)),
    )
    fields = {
        "bf16": random.choice((True, False)),
        "per_device_train_batch_size": random.choice((1, 2)),
        "gradient_accumulation_steps": random.choice((1, 2)),
        "activation_checkpointing": random.choice((True, False)),
        "optim": random.choice(("adamw_torch_fused", "sgd")),
    }
    return config, fields, random.choice((64, 512)), random.choice(("bfloat16", "float32"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(3, 12))])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_offload_cpu", "tp2"])
def test_any_shape_extends_to_its_own_depth(strategy, seed, monkeypatch):
    """Weights of layers are gathered ahead of them: in the lowest two layers' backward pass nothing more is."""
    config, fields, seq_len, dtype = _random_job(Random(f"{strategy} {seed}"))

    def found():
        return estimate(config, fields, seq_len, "a100_80gb", dtype=dtype, world_size=8, strategy=strategy)

    extended = found().peak_allocated_bytes
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert extended == pytest.approx(found().peak_allocated_bytes, rel=0.001)


MIXED = [
    ("deepseek_v3", 12, {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}),
    ("qwen3_moe", 14, {"mlp_only_layers": [0, 1]}),
    ("qwen3_moe", 14, {"mlp_only_layers": [13]}),
    ("qwen3_moe", 14, {"decoder_sparse_step": 2}),
    ("ernie4_5_moe", 14, {"moe_layer_start_index": 2, "moe_num_experts": 16, "moe_k": 2, "moe_layer_interval": 2}),
    ("deepseek_v3", 20, {"first_k_dense_replace": 3, "n_group": 4, "topk_group": 2}),
    ("glm4_moe", 14, {"first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}),
    ("llama4_text", 14, {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 256, "head_dim": 16}),
]


@pytest.mark.parametrize("strategy", ["none", "fsdp2"])
@pytest.mark.parametrize(
    ("kind", "layers", "more"), [*(slow(*row) for row in MIXED[:4]), *(sweep(*row) for row in MIXED[4:])]
)
def test_layers_of_several_kinds_extend(kind, layers, more, strategy, monkeypatch):
    """Dense layers below and among those of experts, whose weights are many times theirs."""
    experts = {"n_routed_experts": 16, "num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2}
    shape = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 256}
    config = AutoConfig.for_model(
        kind,
        num_hidden_layers=layers,
        moe_intermediate_size=512,
        vocab_size=500,
        pad_token_id=0,
        **shape,
        **experts,
        **more,
    )
    processes = {"none": 1, "fsdp2": 8}[strategy]

    def found():
        fields = {"bf16": True, "per_device_train_batch_size": 1, "optim": "sgd"}
        return estimate(config, fields, 128, "a100_80gb", world_size=processes, strategy=strategy)

    extended = found().peak_allocated_bytes
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert extended == pytest.approx(found().peak_allocated_bytes, rel=0.001)


@pytest.mark.slow
def test_a_line_that_is_not_the_models_is_no_estimate(monkeypatch):
    """Where a layer is unlike the others and extrapolate.py does not know it, the replay of all layers shows it."""
    monkeypatch.setattr("hf_memopt.engines.engine.Engine.unlike_layers", 0)
    config = AutoConfig.for_model(num_hidden_layers=60, **SHAPE | {"hidden_size": 1024, "intermediate_size": 6144})
    with pytest.raises(ImpossibleEstimate, match="by the growth of the peak from layer to layer"):
        estimate(config, {"per_device_train_batch_size": 1}, 16, "a100_80gb", world_size=8, strategy="fsdp2")


@pytest.mark.slow
def test_head_and_embedding_grow_apart(monkeypatch):
    """With few layers backward's peak beside the layers is at the head, with more at the embedding."""
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=640,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=12800,
        intermediate_size=1728,
        tie_word_embeddings=False,
        pad_token_id=0,
    )

    def found():
        fields = {**CHECKPOINTED, "per_device_train_batch_size": 4}
        return estimate(config, fields, 128, "rtx_3090", dtype="bfloat16", world_size=2, strategy="fsdp2")

    extended = found().peak_allocated_bytes
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert extended == pytest.approx(found().peak_allocated_bytes, rel=0.005)


@pytest.mark.slow
def test_the_root_that_is_reduced_last_is_not_the_heads_moment(monkeypatch):
    """FSDP2 reduces its root group after the embedding: in a deep model that is higher than the head's own moment."""
    config = AutoConfig.for_model(
        "gpt_oss",
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=20000,
        layer_types=["sliding_attention", "full_attention"] * 6,
    )

    def found():
        fields = {**CHECKPOINTED, "bf16": True, "per_device_train_batch_size": 1}
        return estimate(config, fields, 256, "a100_80gb", dtype="bfloat16", world_size=4, strategy="fsdp2")

    extended = found().peak_allocated_bytes
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    assert extended == pytest.approx(found().peak_allocated_bytes, rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1_000_000, 0])  # axolotl's has 0: one weight at a time
def test_the_limits_of_zero_3_hold_at_full_depth(group, monkeypatch):
    """Gathered weights and the optimizer's groups stop growing where the JSON says so."""
    zero = {
        **{"stage": 3, "sub_group_size": group, "stage3_max_live_parameters": 3_000_000},
        **{"stage3_max_reuse_distance": 3_000_000, "stage3_prefetch_bucket_size": "auto"},
        **{"reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
    }
    fields = {
        "per_device_train_batch_size": 1,
        "bf16": True,
        "deepspeed": {"zero_optimization": zero, "bf16": {"enabled": "auto"}},
    }

    def phases():
        return estimate(_config(20), fields, 32, "a100_80gb", world_size=4).phases

    extended = phases()
    monkeypatch.setattr(extrapolate, "_TRACED_WHOLE", 99)
    whole = phases()
    for phase in ("forward", "backward", "optimizer"):
        assert extended[phase] == pytest.approx(whole[phase], rel=0.03), phase


@pytest.mark.slow
def test_what_zero_init_makes_is_not_remembered_as_the_operators(monkeypatch):
    """zero.Init makes 16 bits of what torch.ones() returns; jobs that come later in a process have their own."""
    monkeypatch.setattr(FakeTensorMode, "cache", {})
    monkeypatch.setattr(fake_outputs, "_remembered", {})
    fields = {"bf16": True, "per_device_train_batch_size": 1}
    estimate(_config(2), fields, 32, "a100_80gb", world_size=4, strategy="zero3")
    made = [row for key, row in fake_outputs._remembered.items() if key[0] is torch.ops.aten.ones.default]
    assert [row.fresh[0][2] for row in made] == [torch.float32]
    with FakeTensorMode():
        assert torch.ones(SHAPE["hidden_size"]).dtype is torch.float32


@pytest.mark.slow
def test_sharding_divides_what_it_says():
    """Bytes a weight in fp32 with AdamW: 4 for the weight, 8 for two states; ZeRO-2 keeps the weights whole."""
    fields = {"bf16": True, "per_device_train_batch_size": 1}
    weights = estimate(_config(), fields, 32, "a100_80gb").breakdown["parameters"] / 4

    def parts(strategy, world_size=8):
        return estimate(_config(), fields, 32, "a100_80gb", world_size=world_size, strategy=strategy)

    ddp, fsdp2, zero2, zero3 = map(parts, ("ddp", "fsdp2", "zero2", "zero3"))
    assert ddp.breakdown["optimizer_states"] == pytest.approx(8 * weights, rel=0.01)
    assert ddp.breakdown["communication"] == pytest.approx(4 * weights, rel=0.01)
    assert fsdp2.breakdown["parameters"] == pytest.approx(4 * weights / 8, rel=0.1)
    assert fsdp2.breakdown["optimizer_states"] == pytest.approx(8 * weights / 8, rel=0.01)
    assert zero2.breakdown["parameters"] == pytest.approx(2 * weights, rel=0.01)
    assert zero3.breakdown["parameters"] == pytest.approx(2 * weights / 8, rel=0.1)
    assert zero3.breakdown["optimizer_states"] == pytest.approx(12 * weights / 8, rel=0.1), "with fp32 master weights"


@pytest.mark.slow
def test_fsdp_checkpoints_by_its_own_configuration():
    """accelerate's wrapper around each layer saves what transformers' own checkpointing saves."""
    fields = {"bf16": True, "per_device_train_batch_size": 4}

    def activations(**more):
        found = estimate(_config(12), {**fields, **more}, 512, "a100_80gb", world_size=2, strategy="fsdp2")
        return found.breakdown["activations"]

    by_fsdp = activations(fsdp_config={"activation_checkpointing": True})
    assert by_fsdp == activations(**CHECKPOINTED) < activations() / 2


@pytest.mark.slow
def test_offload_moves_states_to_the_host():
    fields = {"bf16": True, "per_device_train_batch_size": 1}
    here = estimate(_config(), fields, 32, "a100_80gb", world_size=2, strategy="zero2")
    offloaded = estimate(_config(), fields, 32, "a100_80gb", world_size=2, strategy="zero2_offload_cpu")
    weights = here.breakdown["parameters"] / 2
    assert offloaded.breakdown["optimizer_states"] == 0
    assert offloaded.host_bytes - here.host_bytes > 12 * weights / 2 - 4 * weights, "fp32 weights and two states"
    swapped = estimate(_config(), fields, 32, "a100_80gb", world_size=2, strategy="zero3_offload_nvme")
    assert swapped.breakdown["optimizer_states"] == 0


@pytest.mark.slow
def test_fsdp2_offloads_weights_gradients_and_states():
    """Devices compute with copies; the host holds fp32 weights and gradients, pinned, and both states."""
    fields = {"bf16": True, "per_device_train_batch_size": 1}
    here, offloaded = (
        estimate(_config(), fields, 32, "a100_80gb", dtype="bfloat16", world_size=2, strategy=strategy)
        for strategy in ("fsdp2", "fsdp2_offload_cpu")
    )
    kinds = ("parameters", "gradients", "optimizer_states")
    assert max(offloaded.breakdown[kind] for kind in kinds[1:]) == 0
    assert offloaded.phases["optimizer"] < here.phases["optimizer"] / 4
    assert offloaded.peak_allocated_bytes < here.peak_allocated_bytes
    share = count_weights(_config(), "causal-lm") / 2
    held = offloaded.host_bytes - (here.host_bytes - here.phases["load"])
    assert 16 * share < held < 24 * share, "pinned memory is rounded up to powers of two, states are not"


@pytest.mark.slow
def test_a_quantized_model_is_whole_on_every_host_while_fsdp2_shards_it():
    """The recipes load it there (Preset.model_kwargs)."""
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    settings = {"peft_config": LoraConfig(), "quantization_config": quantization, "dtype": "bfloat16"}
    hosts = [
        estimate(
            _config(),
            {"bf16": True, "per_device_train_batch_size": 1},
            32,
            "a100_80gb",
            world_size=size,
            strategy=strategy,
            **settings,
        ).host_bytes
        for size, strategy in ((2, "fsdp2_offload_cpu"), (8, "fsdp2_offload_cpu"), (8, "fsdp2"))
    ]
    assert hosts[1:] == pytest.approx(hosts[:1] * 2, rel=0.005)


@pytest.mark.slow
def test_zero_3_saves_no_packed_weights():
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    quantized = {"peft_config": LoraConfig(), "quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    found = {
        strategy: estimate(_config(), {}, 32, "a100_80gb", world_size=2, strategy=strategy, **quantized)
        for strategy in ("zero2", "zero3")
    }
    assert found["zero3"].peak_allocated_bytes > 0.95 * found["zero2"].peak_allocated_bytes
    assert any("loads the 4-bit weights whole" in note for note in found["zero3"].notes)
    assert not any("4-bit weights whole" in note for note in found["zero2"].notes)


@pytest.mark.slow
def test_nothing_of_the_fake_cluster_stays():
    """A real job in this process finds its process group, DeepSpeed's numbering and its environment as they were."""
    import torch
    import torch.distributed as dist
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        register = DeepSpeedZeRoOffload._register_deepspeed_module

        def state():
            numbers = (
                *(torch.nn.functional.linear, Init.param_id, list(register.__defaults__[0]), comm.cdb),
                dict(os.environ),
            )
            return dist.get_world_size(), dist.get_process_group_ranks(dist.group.WORLD), numbers

        before = state()
        for strategy in ("zero3", "fsdp2", "ddp"):
            estimate(_config(2), {"per_device_train_batch_size": 1}, 32, "a100_80gb", world_size=8, strategy=strategy)
        assert state() == before
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("fields", [{}, slow({**CHECKPOINTED, "bf16": True})])
def test_the_replayed_timeline_reaches_the_predicted_peak(fields, world_size):
    """The deep model's events, made from a shallow trace, add up to the same peak as the segments do."""
    strategy = "fsdp2" if world_size > 1 else None
    job = describe(
        _config(20),
        {"per_device_train_batch_size": 2, **fields},
        256,
        "v100_32gb",
        world_size=world_size,
        strategy=strategy,
    )
    depths = job.depths()
    traces = [run_trace(job.at_depth(layers)) for layers in depths]
    peaks = extrapolate.extrapolate_peaks(job.config, depths, [trace.moments for trace in traces])
    replayed = replay(traces[1], *missing_layers(job.config, depths), get_hardware("v100_32gb"))
    assert replayed.allocated == pytest.approx(max(peak.total for peak in peaks.values()), rel=1e-3)
    for reserved in replayed.reserved.values():
        assert replayed.allocated <= reserved <= 1.2 * replayed.allocated + 64 * MIB
    assert max(size for _, size in replayed.timeline) == replayed.allocated


def test_segments_of_the_caching_allocator():
    """The rules of c10/cuda/CUDACachingAllocator.cpp, one by one."""
    cache = CachingAllocator(expandable=False)
    small = cache.allocate(1)
    assert cache.reserved == 2 * MIB and small.size == 512
    cache.allocate(MIB)
    assert cache.reserved == 2 * MIB, "the second small request is served from the first segment"
    cache.allocate(3 * MIB)
    assert cache.reserved == 22 * MIB, "below 10 MiB from a segment of 20 MiB"
    large = cache.allocate(21 * MIB + 1)
    assert cache.reserved == 22 * MIB + 22 * MIB, "from a segment of its own, rounded to 2 MiB"
    cache.release(large)
    cache.allocate(21 * MIB)
    assert cache.reserved == 44 * MIB, "the cached segment is taken again"


def test_fragments_of_the_caching_allocator():
    def churn(expandable):
        cache = CachingAllocator(expandable)
        blocks = [cache.allocate(12 * MIB) for _ in range(8)]
        for block in blocks[:4]:
            cache.release(block)
        cache.allocate(40 * MIB)
        return cache.reserved

    assert churn(False) == (8 * 12 + 40) * MIB, "free segments of 12 MiB cannot serve 40 MiB"
    assert churn(True) == 100 * MIB, "neighbours that are free are one block; pages are of 20 MiB"


@pytest.mark.parametrize("expandable", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.booleans(), st.sampled_from([1, MIB, 3 * MIB, 15 * MIB, 40 * MIB, 70 * MIB])), max_size=60
    )
)
def test_the_books_of_the_caching_allocator_balance(expandable, requests):
    """Whatever is taken and given back, below the limit or beyond: nothing is reserved that is not there."""
    cache, live = CachingAllocator(expandable, limit=100 * MIB), []
    for take, size in requests:
        if take or not live:
            live.append((cache.allocate(size), size))
        else:
            cache.release(live.pop(size % len(live))[0])
        taken = sum(block.size for block, _ in live)
        free = sum(size for pool in cache._free.values() for size, _ in pool)
        assert cache.reserved == taken + free
        assert taken >= sum(size for _, size in live)


def test_cached_segments_are_given_back_before_the_limit():
    cache = CachingAllocator(expandable=False, limit=100 * MIB)
    cache.release(cache.allocate(80 * MIB))
    cache.allocate(90 * MIB)
    assert cache.reserved == 90 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("offload", "fused"), [({}, "AdamW"), ({"offload_optimizer": {"device": "cpu"}}, "AdamW")])
def test_an_optimizer_of_the_deepspeed_json_is_traced(offload, fused):
    """DeepSpeed's own fused kernels read bytes, which fake tensors have none of: they ended the process."""
    engine = {"zero_optimization": {"stage": 2, **offload}, "bf16": {"enabled": True}}
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    states = [
        estimate(config, {"deepspeed": engine | more, "bf16": True}, seq_len=32, hardware="a100_80gb", world_size=2)
        for more in ({}, {"optimizer": {"type": fused, "params": {"lr": "auto"}}})
    ]
    own, theirs = (found.breakdown["optimizer_states"] for found in states)
    assert theirs == pytest.approx(own, rel=0.01)


def test_an_optimizer_of_deepspeeds_that_cannot_be_traced_is_refused():
    engine = {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Lion", "params": {}},
    }
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    with pytest.raises(InputError, match="Lion, whose kernels cannot be traced"):
        estimate(config, {"deepspeed": engine, "bf16": True}, seq_len=32, hardware="a100_80gb", world_size=2)


@pytest.mark.parametrize(
    ("model", "method", "bucket", "depths"),
    [
        ("qwen3-1.7b", "full", 5e8, (28,)),  # ten layers of 50 million a bucket: of the first ten none is reduced
        ("qwen3-1.7b", "full", "auto", (10, 11)),
        ("qwen3-1.7b", "lora", 5e8, (10, 11)),  # whose gradients fill no bucket
        ("llama-3.1-8b", "full", 5e8, (10, 11)),  # two layers a bucket
    ],
)
def test_zero2_is_traced_whole_where_gradients_of_many_layers_wait(model, method, bucket, depths):
    zero = {"stage": 2, "contiguous_gradients": True, "reduce_bucket_size": bucket}
    fields = {"per_device_train_batch_size": 1, "bf16": True, "deepspeed": {"zero_optimization": zero}}
    adapters = LoraConfig(target_modules="all-linear") if method == "lora" else None
    job = describe(model, fields, 64, "h200", world_size=8, dtype="bfloat16", peft_config=adapters)
    assert job.depths() == depths
