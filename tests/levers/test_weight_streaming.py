"""Streamed weights: the same losses and gradients from copies that come as late as they may, few alive at a time."""

import dataclasses
import weakref

import pytest
import torch
from conftest import refused
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, MemoryTrainer, estimate
from hf_memopt.engines import engine_named
from hf_memopt.estimator.api import run_trace
from hf_memopt.estimator.job import describe
from hf_memopt.estimator.tracing.fake_quantization import loaded_tensors
from hf_memopt.levers import weight_streaming
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.refusals import check_with_trl
from hf_memopt.levers.streamed_loading import streams_on_load, weights_streamed_on_load
from hf_memopt.levers.weight_streaming import Lanes, LanesAtOnce, stream_weights, streamer_of

LAYERS = 4
FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
)
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


class LateLanes(LanesAtOnce):
    """Stand-in streams: a copy happens when it is waited for, and until then its destination is not a number. A
    ledger of the "device" holds the bytes there.

    Attributes:
        alive, most: bytes on the device now, and at most.
        copied: bytes that went to the device.
    """

    def __init__(self):
        self.sizes = weakref.WeakKeyDictionary()
        self.most = self.copied = 0

    @property
    def alive(self):
        return sum(self.sizes.values())

    def resize(self, tensor, size):
        super().resize(tensor, size)
        self.sizes[tensor.untyped_storage()] = size
        self.most = max(self.most, self.alive)

    def copy(self, destination, source):
        destination.fill_(float("nan") if destination.is_floating_point() else 255)
        self.copied += source.numel() * source.element_size()
        return destination, source

    def wait(self, event):
        destination, source = event
        assert destination.untyped_storage().nbytes(), "freed before its copy came"
        destination.copy_(source)


def llama(tied=False, **more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=LAYERS, tie_word_embeddings=tied, **more)).train()


def with_lora(model):
    torch.manual_seed(1)
    return add_adapters(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()


def streamed(model, ratio=1.0):
    stream_weights(model, ratio)
    lanes = LateLanes()
    streamer_of(model).place(lanes)
    return lanes


def gradients(model, checkpointed=False, passes=1):
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": checkpointed == "reentrant"})
        if checkpointed == "reentrant":
            model.enable_input_require_grads()
    losses = []
    for number in range(passes):
        ids = (torch.arange(2 * 12).reshape(2, 12) * (number + 1)) % 64
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses), {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}


def assert_same(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys() and wanted[1]
    for name, gradient in wanted[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.drawn(2)
@pytest.mark.parametrize("checkpointed", [False, "reentrant", "not reentrant"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_gradients_are_the_same_to_the_bit(ratio, tied, checkpointed):
    """Over two accumulated micro-batches."""
    wanted = gradients(with_lora(llama(tied)), checkpointed, passes=2)
    model = with_lora(llama(tied))
    lanes = streamed(model, ratio)
    assert_same(gradients(model, checkpointed, passes=2), wanted)
    assert lanes.alive == 0


def layer_bytes(model):
    layer = model.get_base_model().model.layers[0]
    return sum(w.numel() * w.element_size() for w in layer.parameters() if w.dim() == 2 and not w.requires_grad)


def test_two_layers_are_alive_at_a_time():
    model = with_lora(llama())
    one, embedding = layer_bytes(model), 64 * 32 * 4
    lanes = streamed(model)
    assert lanes.alive == 0
    gradients(model, "not reentrant")
    assert lanes.most <= max(2 * one, one + embedding)
    # Forward and backward: recomputation has no copies of its own. The head stays from forward to backward.
    assert lanes.copied == 2 * LAYERS * one + 2 * embedding


def test_layers_that_stay():
    model = with_lora(llama())
    one = layer_bytes(model)
    lanes = streamed(model, 0.5)
    gradients(model)
    assert lanes.copied == LAYERS * one + 2 * 64 * 32 * 4


def test_partial_fine_tuning():
    """Two trained layers above frozen ones: these have no backward pass, and their weights come once."""

    def model():
        model = llama()
        for name, weight in model.named_parameters():
            weight.requires_grad_("layers.2" in name or "layers.3" in name)
        return model

    other = model()
    lanes = streamed(other)
    assert_same(gradients(other), gradients(model()))
    frozen = sum(w.numel() * 4 for w in other.model.layers[0].parameters() if w.dim() == 2)
    assert lanes.copied == 2 * frozen + 2 * 64 * 32 * 4 and lanes.alive == 0


def test_evaluation_generation_and_two_forwards_before_a_backward():
    model, ids = with_lora(llama()), torch.arange(12)[None]
    other = with_lora(llama())
    lanes = streamed(other)
    with torch.no_grad():
        assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
        assert lanes.alive == 0
    both = [each(input_ids=ids, labels=ids).loss + each(input_ids=ids + 1, labels=ids).loss for each in (model, other)]
    for loss in both:
        loss.backward()
    for (name, weight), own in zip(other.named_parameters(), model.parameters(), strict=True):
        assert weight.grad is None or torch.equal(weight.grad, own.grad), name
    generated = [each.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False) for each in (model, other)]
    assert torch.equal(*generated) and lanes.alive == 0


def test_a_step_that_failed_leaves_nothing_behind():
    model = with_lora(llama())
    lanes = streamed(model)
    layer = model.get_base_model().model.layers[2]
    hook = layer.mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradients(model)
    hook.remove()
    assert_same(gradients(model), gradients(with_lora(llama())))
    assert lanes.alive == 0


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_states_are_whole(tied, tmp_path):
    plain, model = with_lora(llama(tied)), with_lora(llama(tied))
    lanes = streamed(model)
    wanted, found = plain.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    adapters = get_peft_model_state_dict(plain)
    assert saved.keys() == adapters.keys() and all(torch.equal(saved[name], adapters[name]) for name in saved)
    model.load_state_dict({name: weight * 2 for name, weight in wanted.items()})
    assert lanes.alive == 0
    assert all(torch.equal(model.state_dict()[name], weight * 2) for name, weight in wanted.items())


def test_a_model_without_adapters_is_saved_whole(tmp_path):
    model = llama(tied=True)
    for weight in model.model.layers[:3].parameters():
        weight.requires_grad_(False)
    streamed(model)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in llama(tied=True).state_dict().items())


def test_four_bits_travel_as_they_are():
    """bitsandbytes' own layers, on the CPU."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def model():
        model = llama()
        for layer in model.model.layers:
            plain = layer.mlp.up_proj.weight.data
            four = bitsandbytes.nn.Linear4bit(32, 48, bias=False, quant_type="nf4", compute_dtype=torch.float32)
            four.weight = bitsandbytes.nn.Params4bit(plain, requires_grad=False, quant_type="nf4", module=four)
            layer.mlp.up_proj = four.to("cpu")
        return with_lora(model)

    other = model()
    weight = other.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    assert weight.dtype is torch.uint8 and weight.numel() == 32 * 48 // 2
    streamed(other)
    assert weight.untyped_storage().nbytes() == 0
    assert_same(gradients(other, "not reentrant"), gradients(model(), "not reentrant"))


def trainer_of(folder, model=None, **memory):
    rows = [{"input_ids": (torch.arange(12) + n) % 64, "labels": (torch.arange(12) + n) % 64} for n in range(8)]
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        learning_rate=0.01,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False},
    )
    memory_args = MemoryArguments(loss_chunk_size=8, **memory)
    model = model or with_lora(llama())
    return MemoryTrainer(model, args, default_data_collator, rows, memory_args=memory_args)


@pytest.mark.slow
def test_a_run_and_its_resumption(tmp_path, monkeypatch):
    plain = trainer_of(tmp_path / "plain")
    plain.train()
    wanted = plain.model.state_dict()
    monkeypatch.setattr(weight_streaming, "make_lanes", lambda _: LateLanes())
    trainer = trainer_of(tmp_path / "streamed", weight_streaming=True)
    trainer.train()
    assert streamer_of(trainer.model).lanes.copied
    again = trainer_of(tmp_path / "streamed", weight_streaming=True)
    again.train(resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-2"))
    for each in (trainer, again):
        assert all(torch.equal(each.model.state_dict()[name], weight) for name, weight in wanted.items())


def test_a_model_that_is_moved_or_converted():
    """To where it is already, as accelerate does; anything else would read weights that are empty."""
    model = with_lora(llama())
    wanted = gradients(with_lora(llama()))
    streamed(model)
    model.to(torch.device("cpu", 0))
    assert_same(gradients(model), wanted)
    for move in (lambda: model.to("meta"), model.half):
        with pytest.raises(InputError, match="save it and load it again"):
            move()


@pytest.mark.slow
def test_of_half_the_layers_an_estimate_holds_half():
    def weights(ratio: float | None) -> int:
        streamed = {} if ratio is None else {"weight_streaming": True, "weight_streaming_ratio": ratio}
        fields = {"per_device_train_batch_size": 1, "bf16": True, "activation_checkpointing": True}
        lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        job = {"peft_config": lora, "memory_args": MemoryArguments(**streamed)}
        return estimate("llama-3.1-8b", fields, 512, "rtx_4090", **job).breakdown["parameters"]

    whole, half, quarter, none = map(weights, (None, 0.5, 0.75, 1.0))
    layer = (whole - none) / 32
    assert half == pytest.approx(none + 16 * layer, abs=4 * layer)
    assert quarter == pytest.approx(none + 8 * layer, abs=4 * layer)


def test_what_is_refused():
    on = MemoryArguments(weight_streaming=True)
    assert list(refused(on, {}, engine_named("ddp"))) == []
    assert "leave it out under fsdp2" in next(refused(on, {}, engine_named("fsdp2")))
    assert "zero3_offload_cpu" in next(refused(on, {}, engine_named("zero3")))
    assert "torch_compile would compile" in next(refused(on, {"torch_compile": True}, engine_named("none")))
    assert "no effect without" in next(refused(MemoryArguments(weight_streaming_ratio=0.5), {}, engine_named("none")))
    with pytest.raises(InputError, match="weight_streaming goes without DPOTrainer"):
        check_with_trl(on, "DPOTrainer")
    with pytest.raises(InputError, match="weight_streaming_ratio=0 must lie above 0"):
        MemoryArguments(weight_streaming=True, weight_streaming_ratio=0)
    with pytest.raises(InputError, match="no layer of LlamaForCausalLM that it would stream has any: train adapters"):
        stream_weights(llama())


def test_adapters_are_not_merged_into_empty_weights():
    model = with_lora(llama())
    stream_weights(model)
    model.merge_adapter()  # nothing has moved yet
    model.unmerge_adapter()
    streamer_of(model).place(LateLanes())
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(InputError, match=r"^merge_.*\(\) would change weights .* by hf-memopt merge$"):
            merge()


def test_other_quantized_weights_are_refused():
    class Int8Params(torch.nn.Parameter):
        pass

    model = llama().requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight = Int8Params(torch.zeros(48, 32), requires_grad=False)
    with pytest.raises(InputError, match="not Int8Params: use load_in_4bit=True"):
        stream_weights(model)


def test_without_a_device_of_its_own_nothing_moves(caplog):
    model = with_lora(llama())
    stream_weights(model)
    assert_same(gradients(model), gradients(with_lora(llama())))
    assert "weight_streaming has no effect here" in caplog.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_card():
    """Wide enough that copies take longer than layers."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096}

    def model():
        torch.manual_seed(0)
        config = LlamaConfig(**SMALL | wide, num_hidden_layers=6)
        return with_lora(LlamaForCausalLM(config))

    def run(model):
        ids = torch.arange(64, device="cuda")[None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item(), [w.grad.cpu() for w in model.parameters() if w.grad is not None]

    wanted = run(model().cuda())
    other = model()
    stream_weights(other)
    streamer_of(other).place(Lanes(torch.device("cuda")), torch.device("cuda"))
    other.cuda()
    for _ in range(2):
        other.zero_grad()
        found = run(other)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(found[1], wanted[1], strict=True))
    assert torch.cuda.memory_allocated() < sum(w.numel() * w.element_size() for w in model().parameters())


@pytest.mark.slow
@pytest.mark.parametrize("layers", [4, 12], ids=["traced whole", "extended"])
def test_the_estimator_sees_it(layers):
    """Two layers and the adapters are what the device holds of the weights, whatever the depth."""
    config = LlamaConfig(**SMALL | {"hidden_size": 512, "intermediate_size": 1024}, num_hidden_layers=layers)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    fields = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    memory_args = MemoryArguments(weight_streaming=True)
    found = estimate(config, fields, 128, "rtx-4090", peft_config=lora, memory_args=memory_args)
    layer = 4 * (4 * 512 * 512 + 3 * 512 * 1024)
    adapters = 4 * layers * 8 * (4 * 1024 + 3 * (512 + 1024))
    assert found.breakdown["parameters"] == pytest.approx(2 * layer + adapters, rel=0.03)
    assert found.phases["load"] == pytest.approx(adapters, rel=0.2)


class HostLanes(LanesAtOnce):
    """Copies at once between the "device", whose memory is torch's allocator's, and a host that it does not count."""

    def buffer(self, size):
        return torch.frombuffer(bytearray(size), dtype=torch.uint8)


@pytest.mark.slow
def test_the_device_holds_what_is_predicted(tmp_path, monkeypatch):
    """On a CPU whose host memory is apart, as in the trace."""
    monkeypatch.setattr(weight_streaming, "make_lanes", lambda _: HostLanes())
    wide = LlamaConfig(**SMALL | {"hidden_size": 256, "intermediate_size": 512}, num_hidden_layers=LAYERS)
    trainer = trainer_of(tmp_path, with_lora(LlamaForCausalLM(wide)), weight_streaming=True)
    storages = [tensor.untyped_storage() for tensor in loaded_tensors(trainer.model)]
    resident = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    measured = resident + allocator_peak(trainer.train)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    fields = {name: value for name, value in trainer.args.to_dict().items() if name in FIELDS}
    job = describe(wide, fields, 12, "cpu", peft_config=lora, memory_args=trainer.memory_args)
    peaks = run_trace(dataclasses.replace(job.at_depth(LAYERS), discrete_memory=True)).peaks
    assert max(peak.total for peak in peaks.values()) == pytest.approx(measured, rel=0.03)
    assert min(peak.host for peak in peaks.values()) >= 0.9 * sum(
        weight.numel() * 4 for weight in trainer.model.parameters() if not weight.requires_grad
    )


@pytest.mark.slow
def test_ddp_adds_its_buckets_alone():
    wide = LlamaConfig(**SMALL | {"hidden_size": 256, "intermediate_size": 512}, num_hidden_layers=LAYERS)
    lora, on = (
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        MemoryArguments(weight_streaming=True),
    )
    one, two = (
        estimate(wide, {"bf16": True}, 64, "rtx_4090", lora, memory_args=on, **several).peak_allocated_bytes
        for several in ({}, {"world_size": 2, "strategy": "ddp"})
    )
    trained = sum(
        weight.numel() * 4 for weight in with_lora(LlamaForCausalLM(wide)).parameters() if weight.requires_grad
    )
    assert 0 <= two - one <= 1.5 * trained + 2**20


def load_in_4_bits(folder, memory_args, peft_config):
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with weights_streamed_on_load(memory_args, quantization, peft_config):
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantization)


@pytest.mark.slow
def test_four_bits_leave_the_device_while_they_are_loaded(tmp_path, monkeypatch):
    """The device holds scales, embeddings and one weight; what is then trained is what a loaded model trains."""
    monkeypatch.setattr(weight_streaming, "make_lanes", lambda _: HostLanes())
    wide = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**wide, num_hidden_layers=6)).to(torch.bfloat16).save_pretrained(tmp_path)
    on, lora, kept = MemoryArguments(weight_streaming=True), LoraConfig(r=4, target_modules="all-linear"), []
    resident = allocator_peak(lambda: kept.append(load_in_4_bits(tmp_path, MemoryArguments(), lora)))
    streamed_peak = allocator_peak(lambda: kept.append(load_in_4_bits(tmp_path, on, lora)))
    plain, model = kept
    weights = [w for w in model.parameters() if w.dtype is torch.uint8]
    assert weights and not any(w.untyped_storage().nbytes() for w in weights)
    four_bits = sum(w.nbytes for w in weights)
    assert resident - streamed_peak > 0.5 * four_bits  # how many files' tensors wait to be quantized varies
    torch.manual_seed(1)
    plain = add_adapters(plain, lora).train()
    torch.manual_seed(1)
    model = add_adapters(model, lora).train()
    stream_weights(model)
    wanted = gradients(plain, "not reentrant")
    assert_same(gradients(model, "not reentrant"), wanted)


def test_weights_that_adapters_are_made_from_are_loaded_to_the_device():
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    on = MemoryArguments(weight_streaming=True)
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    assert streams_on_load(on, quantization, LoraConfig(init_lora_weights="gaussian"))
    assert not streams_on_load(on, quantization, LoraConfig(use_dora=True))
    assert not streams_on_load(on, quantization, LoraConfig(init_lora_weights="pissa"))
    assert not streams_on_load(on, None, LoraConfig())
    plain = AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]
    for memory_args, replaced in ((on, True), (MemoryArguments(), False)):
        with weights_streamed_on_load(memory_args, quantization):
            quantizer = AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]
            assert (quantizer is not plain) is replaced and issubclass(quantizer, plain)
    assert AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] is plain
