"""Borders of the memory features: what is just taken and what just not, asked of the functions."""

from types import SimpleNamespace

import pytest
import torch

from hf_memopt import InputError, MemoryArguments
from hf_memopt.engines import engine_named
from hf_memopt.levers import activation_offload, attention_pattern, sliding_window, weight_streaming
from hf_memopt.levers.activation_compression import Compressor
from hf_memopt.levers.adam_mini import _blocks
from hf_memopt.levers.change import Change, chunk_tokens, micro_batch_tokens
from hf_memopt.levers.changes import advice
from hf_memopt.levers.facts import Facts
from hf_memopt.levers.features import activations, loss_chunks, optimizers
from hf_memopt.levers.saved_tensors import is_dense, location


def test_values_that_are_just_allowed(subtests):
    taken = (
        {"target_memory_utilization": 0.9, "warning_threshold": 0.9, "critical_threshold": 0.9},
        {"emergency_threshold": 1.0},
        *({"checkpoint_ratio": 0.0}, {"checkpoint_ratio": 1.0}, {"weight_streaming_ratio": 1.0}),
        *({"num_local_blocks": 0}, {"num_global_blocks": 0}, {"max_batch_size": 2, "min_batch_size": 2}),
        *({"adjustment_frequency": 1}, {"max_memory_gib": 0.1}, {"loss_chunk_size": 1}, {"sliding_window": 1}),
    )
    refused = (
        ({"target_memory_utilization": 0.0}, "must rise"),
        ({"emergency_threshold": 1.01}, "must rise"),
        ({"warning_threshold": 0.96}, "must rise"),
        ({"target_memory_utilization": 0.93}, "must rise"),
        ({"checkpoint_ratio": -0.1}, "checkpoint_ratio=-0.1 must lie between 0"),
        ({"checkpoint_ratio": 1.1}, "checkpoint_ratio=1.1 must lie between 0"),
        ({"weight_streaming_ratio": 0.0}, "weight_streaming_ratio=0.0 must lie above 0"),
        ({"weight_streaming_ratio": 1.1}, "weight_streaming_ratio=1.1 must lie above 0"),
        ({"num_local_blocks": -1}, "num_local_blocks=-1 must be 0 or more"),
        ({"max_batch_size": 1, "min_batch_size": 2}, "max_batch_size=1 is below min_batch_size=2"),
        *(({name: 0}, f"{name}=0 must be above 0") for name in ("adjustment_frequency", "min_batch_size")),
        *(({name: 0}, f"{name}=0 must be above 0") for name in ("sliding_window", "mlp_tile_size", "max_memory_gib")),
        ({"loss_reduction": "mean"}, "loss_reduction"),
    )
    for fields in taken:
        with subtests.test(**fields):
            assert all(getattr(MemoryArguments(**fields), name) == value for name, value in fields.items())
    for fields, says in refused:
        with subtests.test(**fields), pytest.raises(InputError, match=says):
            MemoryArguments(**fields)
    assert MemoryArguments(max_memory_gib=1.5).max_memory_bytes == 3 * 2**29 and not MemoryArguments().max_memory_bytes
    on = MemoryArguments(frozen_without_grad=False, adam_mini=True, min_batch_size=2, reduce_eval_logits=True)
    assert on.levers() == {"reduce_eval_logits": True, "adam_mini": True, "frozen_without_grad": False}


def test_which_tensors_are_compressed():
    """Of a batch of 6 tokens in a model with a vocabulary of 50."""
    model = torch.nn.Linear(80, 64)
    model.config = SimpleNamespace(vocab_size=50)
    for tensor, taken in (
        (torch.ones(4096), True),
        (torch.ones(4095), False),
        (torch.ones(64, 64, dtype=torch.float64), False),
        (torch.ones(64, 64, dtype=torch.bfloat16), True),
        (torch.ones(64, 64, dtype=torch.int32), False),
        (torch.ones(100, 50), False),
        (torch.ones(100, 51), True),
        (torch.ones(5000, 1), False),
        (torch.ones(1, 64).expand(64, 64), False),
        (torch.ones(2, 1, 64, 64), False),
        (torch.ones(2, 1, 65, 64), True),
        (torch.ones(2, 1, 1, 4096), True),
        (torch.ones(2, 2, 64, 64), True),
        (torch.ones(64, 80), False),
        (torch.ones(80, 64), True),
        (torch.ones(64, 80).t(), False),
        (model.weight.detach(), False),
        (model.weight.detach()[:60], False),
    ):
        compressor = Compressor()
        compressor.begin(model, (torch.ones(2, 3, 9), torch.ones(4), torch.ones(1, 2)))
        assert compressor._tokens == 6
        assert compressor._is_compressible(tensor) is taken, (tensor.shape, tensor.stride(), tensor.dtype)
    compressor.begin(model, (torch.ones(2, 32),))
    assert compressor._is_compressible(torch.ones(64, 80)), "as many rows as tokens: activations"
    compressor.begin(model, ())
    assert compressor._tokens == 0


def test_elements_that_lie_together():
    whole = torch.arange(24.0).view(2, 3, 4)
    for tensor, dense in (
        (whole, True),
        (whole.transpose(0, 2), True),
        (whole[:, :2], False),
        (whole[1:], True),
        (whole[..., ::2], False),
        (whole[:, :, :1], False),
        (torch.ones(3, 1).expand(3, 4), False),
        (torch.ones(()), True),
        (torch.ones(5)[2:3], True),
    ):
        assert is_dense(tensor) is dense
    assert location(whole) == location(whole.view(6, 4)) == location(whole.transpose(0, 1)) != location(whole[1:])
    part = whole[:, :2]
    assert location(part) == location(whole[:, :2]) != location(part.transpose(0, 1))
    before = location(whole)
    whole.add_(1)
    assert location(whole) != before


def test_buffers_for_tensors_of_many_sizes():
    sizes = [activation_offload._buffer_bytes(size) for size in range(1, 5000)]
    assert all(size <= room <= 1.26 * size + 8 for size, room in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert len(set(sizes)) < 60, "few sizes, so that buffers are used again"


def test_blocks_of_adam_mini():
    for path, kind, shape, head, found in (
        ("a.q_proj", "Linear", (8, 6), 4, ((2, 4, 6), (1, 2))),
        ("a.v_proj", "Linear", (8, 6), 4, ((8, 6), (1,))),
        ("a.q_proj", "Linear", (9, 6), 4, ((9, 6), (1,))),
        ("a.q_proj", "Linear", (8, 6), None, ((8, 6), (1,))),
        ("a.q_proj", "Linear", (8,), 4, ((8,), (0,))),
        ("a.q_proj.x", "Linear", (4, 8, 6), 4, ((4, 8, 6), (2,))),
        ("a.c_attn", "Conv1D", (8, 6), 4, ((8, 6), (0,))),
        ("a", "Norm", (), 4, ((), ())),
    ):
        assert _blocks(path.split("."), kind, shape, head) == found


def test_which_tokens_a_pattern_masks():
    blocks = SimpleNamespace(sparse_block_size=4, num_local_blocks=1, num_global_blocks=1)
    for config, reach, query, seen in (
        (SimpleNamespace(sliding_window=3), 3, 9, [7, 8, 9]),
        (blocks, 12, 13, [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]),
        (SimpleNamespace(sparse_block_size=4, num_local_blocks=0, num_global_blocks=0), 4, 9, [8, 9]),
        (SimpleNamespace(sparse_block_size=2, num_local_blocks=2, num_global_blocks=0), 6, 9, [4, 5, 6, 7, 8, 9]),
    ):
        overlay, length = attention_pattern._overlay(config)
        keys = torch.arange(query + 1)
        assert length == reach and keys[overlay(0, 0, torch.tensor(query), keys)].tolist() == seen
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    for config, given, lengths, positions in (
        (SimpleNamespace(sliding_window=3), mask, (4, 4), None),
        (blocks, mask, (4, 4), [[0, 0, 0, 1], [0, 1, 2, 2]]),
        (blocks, mask, (4, 5), None),
        (blocks, mask[None], (4, 4), None),
        (blocks, None, (4, 4), [[0, 1, 0, 1]]),
        (blocks, None, (1, 4), None),
        (blocks, None, (5, 5), None),
    ):
        token = attention_pattern._POSITIONS.set(torch.tensor([[0, 1, 0, 1]]))
        found = attention_pattern._positions(config, given, *lengths)
        attention_pattern._POSITIONS.reset(token)
        assert (found if found is None else found.tolist()) == positions


def test_a_window_of_an_architecture_of_its_own():
    """(layer types, whether the configuration may leave its window out) -> what configuration and layers have."""
    for kinds, switch, everywhere in (
        (["full_attention"] * 2, True, True),
        (["sliding_attention", "full_attention"], True, False),
        (None, False, False),
    ):
        config = SimpleNamespace(layer_types=kinds, sliding_window=None)
        if switch:
            config.use_sliding_window = False
        layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer, window, kind in zip(layers, (9, None), kinds or ("x", "y"), strict=True):
            layer.sliding_window, layer.attention_type, layer.has_sliding_layers = window, kind, False
        sliding_window._set_own_window(layers, config, 4)
        assert config.sliding_window == 4
        assert [layer.sliding_window for layer in layers] == [4, 4 if everywhere else None]
        assert config.layer_types == (["sliding_attention"] * 2 if everywhere else kinds)
        assert [layer.attention_type for layer in layers] == (config.layer_types or ["x", "y"])
        assert all(layer.has_sliding_layers for layer in layers)
        assert getattr(config, "use_sliding_window", None) is (everywhere if switch else None)


def test_what_features_add_to_a_sketch():
    def sketch(tokens=2048, **fields):
        job = SimpleNamespace(fields=fields, seq_len=tokens, device=SimpleNamespace(backend="cuda"))
        return SimpleNamespace(job=job, largest_weight=7, trained=5, activations=lambda choice: 300)

    choice = SimpleNamespace(micro_batch=2)
    for fields, left in (({"bf16": True}, 51.6), ({"fp16": True}, 51.6), ({}, 25.8)):
        kinds = {"activations": 150.0}
        activations._compressed_bytes(kinds, 100, sketch(**fields), choice)
        assert kinds["activations"] == pytest.approx(50 + left)
    activations._offloaded_bytes(kinds, 20, None, None)
    assert kinds["activations"] == pytest.approx(50 + left - 20)
    cost = SimpleNamespace(sketch=sketch(), memory_rate=100)
    assert activations._compressed_seconds(2.0, cost, choice) == 2 + 4 * 300 / 100
    cost.sketch.job.device.backend = "cpu"
    assert activations._compressed_seconds(2.0, cost, choice) == pytest.approx(2.88)
    for tokens, logits in ((512, 800), (1024, 400), (256, 800)):
        kinds = {"logits": 800}
        loss_chunks._bytes(kinds, 0, sketch(tokens), choice)
        assert kinds["logits"] == logits
    loss_chunks._bytes(empty := {}, 0, sketch(), choice)
    assert empty == {"logits": 0}
    for gradients, left in ((9, 7), (3, 3)):
        kinds = {"gradients": gradients, "optimizer_states": 4}
        optimizers._largest_gradient(kinds, 0, sketch(), choice)
        optimizers._no_states(kinds, 0, sketch(), choice)
        assert kinds == {"gradients": left, "optimizer_states": 0}
    assert optimizers.OptimizerOffload.planned[0].host(sketch(), choice) == 40
    for tokens, at_once in ((1, 1024), (32 * 1024, 1024), (32 * 1024 + 32, 1025), (64 * 1024, 2048)):
        assert chunk_tokens(tokens) == at_once
    for training, length, tokens in (({}, 7, 7), ({"per_device_train_batch_size": 3}, 7, 21), ({}, None, 0)):
        assert micro_batch_tokens(Facts(training=training, seq_len=length)) == tokens


def test_what_the_optimizers_features_go_without():
    def refused(fields, engine="none", **memory):
        facts = Facts.of_settings(MemoryArguments(**memory), fields, engine_named(engine))
        return [reason.split(":")[0][:44] for reason in facts.feature_refusals()]

    quiet = {"max_grad_norm": 0.0}
    for fields, engine, memory, reasons in (
        (quiet, "none", {"optimizer_in_backward": True}, []),
        ({}, "none", {"optimizer_in_backward": True}, ["optimizer_in_backward never holds all gradie"]),
        (
            {"max_grad_norm": 1.0},
            "none",
            {"optimizer_in_backward": True},
            ["optimizer_in_backward never holds all gradie"],
        ),
        ({**quiet, "gradient_accumulation_steps": 1}, "none", {"optimizer_in_backward": True}, []),
        (
            {**quiet, "gradient_accumulation_steps": 2},
            "none",
            {"optimizer_in_backward": True},
            ["optimizer_in_backward updates weights in eve"],
        ),
        (quiet, "ddp", {"optimizer_in_backward": True}, ["optimizer_in_backward would use gradients be"]),
        (
            {**quiet, "fp16": True},
            "none",
            {"optimizer_in_backward": True},
            ["optimizer_in_backward cannot unscale fp16's "],
        ),
        ({}, "none", {"optimizer_cpu_offload": True}, []),
        ({"fp16": True}, "none", {"optimizer_cpu_offload": True}, ["optimizer_cpu_offload does not support the g"]),
        (
            {"optim": "adamw_8bit"},
            "none",
            {"optimizer_cpu_offload": True},
            ["optim=adamw_8bit has no fast CPU step for op"],
        ),
        ({"optim": "lomo"}, "none", {"optimizer_cpu_offload": True}, ["optim=lomo has no fast CPU step for optimize"]),
        (
            {"optim": "adamw_torch"},
            "ddp",
            {"optimizer_cpu_offload": True},
            ["optimizer_cpu_offload supports a single devi"],
        ),
        ({}, "none", {"adam_mini": True}, []),
        ({}, "ddp", {"adam_mini": True}, []),
        ({}, "zero2", {"adam_mini": True}, ["adam_mini needs unsharded weights, and zero2"]),
        ({}, "ddp", {"weight_streaming": True}, []),
        ({"torch_compile": True}, "ddp", {"weight_streaming": True}, ["torch_compile would compile weights that are"]),
        ({}, "none", {"weight_streaming_ratio": 0.5}, ["weight_streaming_ratio=0.5 has no effect wit"]),
        ({}, "fsdp2", {"quantized_experts": True}, ["quantized_experts needs whole weights, and f"]),
        ({}, "none", {"quantized_experts": True}, []),
        ({"torch_compile": True}, "none", {"quantized_experts": False}, []),
    ):
        assert refused(fields, engine, **memory) == reasons, (fields, engine, memory)


def test_advice_is_the_first_changes_that_apply():
    rows = [Change(label=str(number), applies=lambda job, number=number: number != 1) for number in range(6)]
    rows[2] = Change(settings={"bf16": True, "seq_len": 5}, effect="less")
    assert advice(Facts(), rows) == ["0", "bf16=true, seq_len=5: less", "3"] and len(advice(Facts(), rows, 9)) == 5


def test_a_storage_leaves_the_device():
    lanes = weight_streaming.LanesAtOnce()
    for mapped, own in ((False, True), (True, False)):
        weight = torch.nn.Parameter(torch.ones(3, 2), requires_grad=False)
        if mapped:
            weight.data = torch.ones(9, 2)[3:6]  # a part of a file's storage
        storage = weight.untyped_storage()._cdata
        weights = weight_streaming.Weights(weight)
        weights.leave(lanes, torch.device("cpu"))
        assert torch.equal(weights.host, torch.ones(3, 2)) and weight.untyped_storage().nbytes() == 0
        assert (weight.untyped_storage()._cdata == storage) is own
        weights.fetch(lanes, "a"), weights.fetch(lanes, "b")
        assert weight.tolist() == [[1, 1]] * 3 and weights._travels
        weights.release(lanes, "a"), weights.release(lanes, "c")
        assert weight.untyped_storage().nbytes() == 24
        weights.release(lanes, "b")
        assert weight.untyped_storage().nbytes() == 0 and not weights._travels
