"""Part 2: tokens a second beside the planner's cost model, which promises ratios and no seconds."""

import dataclasses

from benchmarks.gpu.case import Case
from benchmarks.gpu.estimator import load_settings
from hf_memopt.contrib.calibration.training import Setting, train


def cases(rehearse: bool) -> list[Case]:
    """Every setting; of tiny ones a few, since they are the estimator's own but for their sizes."""
    found = []
    for number, (name, setting) in enumerate(load_settings("speed").items()):
        setting = setting.rehearsed() if rehearse else setting
        found.append(Case("speed", name, 12 + 9 * number, dataclasses.asdict(setting), rehearse=rehearse))
    return found[:3] if rehearse else found


def measure(case: Case) -> dict:
    """Train it; the row has tokens_per_second."""
    return train(Setting(**case.settings))
