"""frozen_without_grad (levers/frozen_modules.py): frozen modules store no activations where nothing needs them."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.feature import Feature


@dataclass
class Frozen(Feature):
    frozen_without_grad: bool = field(
        default=True, metadata={"help": "Run frozen modules under no_grad where no input requires a gradient."}
    )
    order: ClassVar = -1

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.frozen_without_grad:
            from hf_memopt.levers.frozen_modules import run_frozen_without_grad

            run_frozen_without_grad(model)
