"""Part 3: this card plays smaller ones (set_per_process_memory_fraction): does a job fit where it is said to?"""

import tempfile

from benchmarks.gpu.case import Case
from hf_memopt.contrib.calibration.processes import Skip

GIB = 2**30
METHODS = ("full", "lora", "qlora")
TINY_BATCH = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "dataloader_num_workers": 0}
TINY_BATCH |= {"use_cpu": True, "bf16": False, "fp16": False, "optim": "adamw_torch"}
QUIET = {"max_steps": 2, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}


def cases(rehearse: bool) -> list[Case]:
    """Every NVIDIA preset of one device and every method, on the reference model of the preset."""
    from hf_memopt.presets import get_preset, list_presets
    from hf_memopt.presets.reference import reference_estimate

    found = []
    for name in list_presets():
        for method in METHODS:
            preset = get_preset(name, method)
            predicted = reference_estimate(preset)
            if preset.hardware.backend != "cuda" or preset.processes != 1 or predicted is None:
                continue
            settings = {"preset": name, "method": method, "predicted": predicted}
            found.append(Case("smaller", f"{name} {method}", 25 + 11 * len(found), settings, rehearse=rehearse))
    return found[:2] if rehearse else found


def measure(case: Case) -> dict:
    """Two steps of the preset's own settings, with as much memory as its card would leave to the allocator."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, default_data_collator

    from hf_memopt.contrib.calibration.readings import peaks
    from hf_memopt.contrib.calibration.training import TINY, Setting, load_model_config, release
    from hf_memopt.estimator import overheads
    from hf_memopt.hardware import configure_allocator
    from hf_memopt.levers.adapters import add_adapters
    from hf_memopt.presets import get_preset

    configure_allocator()
    preset, predicted = get_preset(case.settings["preset"], case.settings["method"]), case.settings["predicted"]
    on_card = torch.cuda.is_available()
    if on_card:
        total = torch.cuda.get_device_properties(0).total_memory
        limit = preset.hardware.memory - overheads.context(preset.hardware)
        if limit > total:
            raise Skip(f"the card has {total / GIB:.1f} GiB, less than {preset.hardware.label} leaves")
    if preset.method == "qlora" and not on_card:
        raise Skip("the rehearsal has no 4-bit model of a preset")
    sizes = {} if on_card else {**TINY, "tiny": 1}
    config = load_model_config(Setting("smaller", predicted["model"], sizes=sizes))
    length = predicted["seq_len"] if on_card else 32
    micro = {} if on_card else TINY_BATCH
    outcome = "trained"
    with tempfile.TemporaryDirectory() as folder, peaks() as found:
        try:
            with torch.device("cuda" if on_card else "cpu"):
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, preset.dtype))
            if preset.method == "qlora":
                model.save_pretrained(folder)
                model = None
                release()
                model = AutoModelForCausalLM.from_pretrained(folder, **preset.model_kwargs("sdpa"))
            if on_card:  # from here on: the whole model in 16 bits, of which QLoRA's was made, may be larger than it
                torch.cuda.set_per_process_memory_fraction(limit / total)
            if preset.method != "full":
                model = add_adapters(model, preset.peft_config())
            args = preset.training_arguments(folder, world_size=1, **QUIET, **micro)
            row = {"input_ids": [7] * length, "labels": [7] * length}
            Trainer(model, args, train_dataset=[row] * 512, data_collator=default_data_collator).train()
        except torch.OutOfMemoryError:
            outcome = "out of memory"
    return {
        "outcome_of_training": outcome,
        "predicted_to_fit": predicted["fits"],
        "as_predicted": predicted["fits"] == (outcome == "trained"),
        **found,
        "predicted_allocated_bytes": predicted["peak_allocated_bytes"],
        "predicted_device_bytes": predicted["device_bytes"],
    }
