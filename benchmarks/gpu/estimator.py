"""Part 1: allocated, reserved and the driver's bytes of real training beside the prediction."""

import dataclasses
import tomllib
from pathlib import Path

from benchmarks.gpu.case import Case
from hf_memopt.contrib.calibration.training import Setting, train

NOT_REENTRANT = {"activation_checkpointing_kwargs": {"use_reentrant": False}}


def load_settings(part: str) -> dict[str, Setting]:
    """The training jobs of a part, most valuable first."""
    rows = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))[part]
    settings = {name: Setting(**row) for name, row in rows.items()}
    for setting in settings.values():
        if setting.fields.get("activation_checkpointing"):
            setting.fields.update({**NOT_REENTRANT, **setting.fields})
    return settings


def cases(rehearse: bool) -> list[Case]:
    """Every setting, alternating with other parts from the tenth on."""
    found = []
    for number, (name, setting) in enumerate(load_settings("estimator").items()):
        setting = setting.rehearsed() if rehearse else setting
        # Anything but expandable_segments keeps configure_allocator() from switching it on.
        env = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"} if setting.kind == "allocator" else {}
        worth = number if number < 10 else 10 * number - 80
        found.append(Case("estimator", name, worth, dataclasses.asdict(setting), env, rehearse=rehearse))
    return found


def measure(case: Case) -> dict:
    """Train it."""
    return train(Setting(**case.settings))
