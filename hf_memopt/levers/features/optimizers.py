"""adam_mini, optimizer_cpu_offload and optimizer_in_backward: fewer states, states on the host, no gradients kept."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from hf_memopt.levers.change import Change
from hf_memopt.levers.feature import Feature, Knob

OPTIMIZER_OFFLOAD = Change(
    # The fused AdamW has a fast step on the host; OptimizerOffload.refused() lists what has none.
    settings={"optimizer_cpu_offload": True, "optim": "adamw_torch_fused"},
    applies=lambda job: (
        job.setup.method == "full" and job.discrete_memory and not job.memory_args.optimizer_cpu_offload
    ),
    effect="optimizer states in host memory, for one device",
)


def _no_states(kinds, growing, sketch, choice) -> None:
    kinds["optimizer_states"] = 0


def _largest_gradient(kinds, growing, sketch, choice) -> None:
    """Of one weight at a time, the largest of which is outside the layers."""
    kinds["gradients"] = min(kinds.get("gradients", 0), sketch.largest_weight)


@dataclass
class AdamMiniStates(Feature):
    adam_mini: bool = field(
        default=False, metadata={"help": "Use Adam-mini instead of `optim`: one second moment per block of weights."}
    )

    of_optimizer: ClassVar = True

    @staticmethod
    def refused(on, facts):
        if on.adam_mini and not facts.engine.plain:
            yield f"adam_mini needs unsharded weights, and {facts.setup.strategy} shards them: leave it out"

    @staticmethod
    def choose_optimizer(trainer):
        from hf_memopt.levers.adam_mini import AdamMini, settings_for

        trainer.optimizer_cls_and_kwargs = AdamMini, settings_for(trainer.model, trainer.args)


@dataclass
class OptimizerOffload(Feature):
    optimizer_cpu_offload: bool = field(
        default=False,
        metadata={"help": "Keep optimizer states in host memory and step on the CPU. For a single device."},
    )
    planned: ClassVar = (
        Knob(
            name="optimizer_cpu_offload",
            settings={"optimizer_cpu_offload": True},
            words="optimizer in host memory",
            family="optimizer states in host memory",
            short="optimizer on host",
            bytes=_no_states,
            host=lambda sketch, choice: 8 * sketch.trained,
            on_host=True,
            of_states=True,
        ),
    )
    of_optimizer: ClassVar = True

    @staticmethod
    def refused(on, facts):
        if not on.optimizer_cpu_offload:
            return
        if not facts.engine.alone:
            yield (
                f"optimizer_cpu_offload supports a single device: leave it out under {facts.setup.strategy}, "
                "and use strategy zero2_offload_cpu"
            )
        if on.optimizer_in_backward:
            yield "optimizer_in_backward and optimizer_cpu_offload both replace the optimizer step: use one of them"
        if facts.fields.get("fp16"):
            yield "optimizer_cpu_offload does not support the gradient scaler of fp16: use bf16=True"
        optim = facts.fields.get("optim")
        optim = getattr(optim, "value", optim) or ""
        if any(part in optim for part in ("bit", "bnb", "lomo", "layerwise")):
            yield f"optim={optim} has no fast CPU step for optimizer_cpu_offload: use adamw_torch_fused"

    @staticmethod
    def put_on_optimizer(optimizer, host):
        from hf_memopt.levers.optimizer_cpu_offload import keep_on_host

        keep_on_host(optimizer, **host)


@dataclass
class OptimizerInBackward(Feature):
    optimizer_in_backward: bool = field(
        default=False,
        metadata={
            "help": "Update each weight during backward and free its gradient at once. Needs "
            "gradient_accumulation_steps=1 and max_grad_norm=0."
        },
    )
    planned: ClassVar = (
        Knob(
            name="optimizer_in_backward",
            settings={"optimizer_in_backward": True},
            words="weights updated in backward",
            bytes=_largest_gradient,
            of_states=True,
        ),
    )
    of_optimizer: ClassVar = True

    @staticmethod
    def refused(on, facts):
        if not on.optimizer_in_backward:
            return
        fields = facts.fields
        if not facts.engine.alone:
            name = facts.setup.strategy
            yield f"optimizer_in_backward would use gradients before {name} has reduced them: leave it out"
        if fields.get("gradient_accumulation_steps", 1) > 1:
            yield (
                "optimizer_in_backward updates weights in every backward pass: set gradient_accumulation_steps=1, "
                "with a larger per_device_train_batch_size"
            )
        if fields.get("max_grad_norm", 1.0):
            yield (
                "optimizer_in_backward never holds all gradients at once and cannot clip their norm: set "
                "max_grad_norm=0"
            )
        if fields.get("fp16"):
            yield "optimizer_in_backward cannot unscale fp16's gradients: use bf16=True"

    @staticmethod
    def put_on_optimizer(optimizer, host):
        step_in_backward(optimizer)


def step_in_backward(optimizer) -> None:
    """Make a torch optimizer update each weight as soon as its gradient is complete, and free each gradient at once.

    The regular step() then finds no gradients and does nothing; schedulers and checkpoints are not affected. Requires
    one micro-batch per step, and no clipping by the global norm, since the gradients never exist all at once.
    """
    for number, group in enumerate(optimizer.param_groups):
        for weight in group["params"]:
            weight.register_post_accumulate_grad_hook(partial(_step_one, optimizer, number))


def _step_one(optimizer, number: int, weight) -> None:
    """Update a weight of the group with this number."""
    if hasattr(optimizer, "mng"):  # bitsandbytes looks settings up by a weight's index in the param_groups
        optimizer.step()
    else:
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[number], "params": [weight]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
    weight.grad = None
