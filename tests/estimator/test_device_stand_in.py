"""The card that a dry-run script finds: what torch says of it, and what stays on the CPU."""

import frozen
import pytest
import torch
from dry_runs import MODEL, caught, prepare, refusal

from hf_memopt.estimator import device_stand_in, estimate_trainer
from hf_memopt.estimator.device_stand_in import seen_by_script
from hf_memopt.hardware import detection, get_hardware

# peft (0.21.2) and trl (1.16) use the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return prepare(tmp_path, monkeypatch)


CARDS = (
    *("rtx_4090", "t4", "v100_32gb", "a100_40gb", "h100_80gb", "b200", "l40s", "mi300x", "rx_7900_xtx", "rx_6750_xt"),
)


def test_a_card_is_recognised_by_what_torch_says_of_it(subtests):
    for name in CARDS:
        with subtests.test(f"{name}"):
            card = get_hardware(name)
            with seen_by_script(card):
                assert torch.cuda.is_available() and torch.cuda.device_count() == 1
                assert bool(torch.version.hip) == (card.backend == "rocm") != bool(torch.version.cuda)
                seen = detection._cuda(torch.cuda.get_device_properties(0), torch.version.hip)
                assert (seen.name, seen.memory, seen.native_bf16) == (card.name, card.memory, card.native_bf16)
                assert torch.cuda.mem_get_info() == (card.memory, card.memory)
                assert torch.cuda.is_bf16_supported(including_emulation=False) == card.native_bf16
                assert detection.detect() is card
            assert not torch.cuda.is_initialized()


def test_answers_of_every_kind_of_device():
    """To all that torch's modules of devices are asked, and the device in whose place a CPU stands."""
    found = {}
    cards = ("rtx_4090", "t4", "b200", "mi300x", "rx_7900_xtx", "radeon_8060s_64gb", "dgx_spark", "arc_b580")
    for name in (*cards, "apple_m2_16gb", "cpu"):
        for module, answers in device_stand_in._answers(get_hardware(name), 3):
            for asked, answer in answers.items():
                value = answer("asked") if callable(answer) and not isinstance(answer, type) else answer
                if module is torch.version:  # this build's own, where it has one
                    value = value is not None
                found[f"{name} {module.__name__}.{asked}"] = str(value)
        if get_hardware(name).backend in ("cuda", "rocm"):
            asks = device_stand_in._cuda_answers(get_hardware(name), 1)["is_bf16_supported"]
            found[f"{name} bf16"] = [asks(), asks(including_emulation=False)]
    devices = (True, 0, 3, "cuda:1", "cuda", "mps", "xpu", "hip", "cpu", "meta", None, torch.device("cuda", 1))
    found["stands"] = {str(device): str(device_stand_in._stand_in(device)) for device in devices}
    frozen.check("device_answers", found)


def test_a_described_card_of_which_only_the_memory_is_known():
    with seen_by_script(get_hardware('{"memory": "24 GiB", "backend": "rocm"}')):
        assert torch.cuda.get_device_properties(0).total_memory == 24 * 2**30 and torch.version.hip


def test_properties_of_a_card(subtests):
    for name, capability, architecture, warp in [
        *(("rtx_4090", (8, 9), "", 32), ("b200", (10, 0), "", 32), ("mi300x", (9, 4), "gfx942", 64)),
        ("rx_7900_xtx", (11, 0), "gfx1100", 32),
    ]:
        with subtests.test(name=name), seen_by_script(get_hardware(name)):
            seen = torch.cuda.get_device_properties(0)
            assert (seen.major, seen.minor) == torch.cuda.get_device_capability() == capability
            assert (seen.gcnArchName, seen.warp_size, seen.is_integrated) == (architecture, warp, False)


def test_libraries_ask_again():
    from transformers.utils import (
        is_torch_bf16_gpu_available,
        is_torch_cuda_available,
        is_torch_mps_available,
        is_torch_tf32_available,
    )

    def answers():
        asked = (is_torch_cuda_available, is_torch_bf16_gpu_available, is_torch_tf32_available, is_torch_mps_available)
        return tuple(bool(ask()) for ask in asked)

    here = answers()
    for name, seen in (
        *(("a100_80gb", (True, True, True, False)), ("t4", (True, True, False, False))),
        *(("mi300x", (True, True, False, False)), ("apple_m2_16gb", (False, True, False, True))),
        ("cpu", (False, False, False, False)),
    ):
        with seen_by_script(get_hardware(name)):
            assert answers() == seen, name
            current = torch.accelerator.current_accelerator()
            assert current == {"apple_m2_16gb": torch.device("mps"), "cpu": None}.get(name, torch.device("cuda"))
            assert torch.accelerator.is_available() == (name != "cpu")
            assert torch.accelerator.device_count() == (name != "cpu")
    assert answers() == here


def test_tensors_stay_on_the_cpu():
    with seen_by_script(get_hardware("rtx_4090")):
        made = torch.ones(2, device="cuda")
        assert {made.device, made.cuda().device, made.to("cuda:0").device, made.to(0, torch.float16).device} == {
            torch.device("cpu")
        }
        assert made.to(0, torch.float16).dtype is torch.float16
        assert torch.nn.Linear(2, 2).to("cuda").weight.device.type == "cpu"
        torch.cuda.empty_cache()
        torch.cuda.set_device(0)
        torch.cuda.manual_seed_all(0)


@pytest.mark.parametrize("hardware", ["a100_80gb", "mi300x", "apple_m4_max_64gb"])
def test_bf16_on_another_machine(hardware, folder):
    script = MODEL + 'train(AutoModelForCausalLM.from_pretrained("model").to("cuda"), bf16=True)'
    with caught(script, hardware) as trainer:
        assert trainer.args.bf16 and next(trainer.model.parameters()).dtype is torch.bfloat16
        assert estimate_trainer(trainer, hardware).fits


def test_the_trainers_own_checks_are_about_the_card(folder):
    with caught(MODEL + 'train(AutoModelForCausalLM.from_pretrained("model"), tf32=True, bf16=True)', "rtx_4090"):
        pass
    said = refusal(MODEL + 'train(AutoModelForCausalLM.from_pretrained("model"), tf32=True)', "t4")
    assert "ValueError: --tf32 requires Ampere" in said


@pytest.mark.parametrize("name", ["rtx_4090", "auto"])
def test_a_preset_in_the_script_is_the_cards(name, folder):
    script = f"""
    from hf_memopt import get_preset
    from transformers import AutoModelForCausalLM, Trainer, default_data_collator

    preset = get_preset("{name}", method="qlora")
    assert preset.name == "rtx_4090"
    model = AutoModelForCausalLM.from_pretrained("model", **preset.model_kwargs())
    from peft import get_peft_model
    model = get_peft_model(model, preset.peft_config())
    args = preset.training_arguments(output_dir="out", report_to="none")
    rows = [{{"input_ids": [7] * 16, "labels": [7] * 16}}] * 64
    Trainer(model, args, train_dataset=rows, data_collator=default_data_collator).train()
    """
    with caught(script, "rtx_4090") as trainer:
        assert trainer.args.bf16 and trainer.args.optim == "paged_adamw_8bit"
        assert trainer.model.is_loaded_in_4bit
