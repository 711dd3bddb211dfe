"""Step the optimizer during backward, weight by weight, and free each gradient at once."""


def step_in_backward(optimizer) -> None:
    """Make a torch optimizer update each weight as soon as its gradient is complete.

    The regular step() then finds no gradients and does nothing; schedulers and checkpoints are not affected. Requires
    one micro-batch per step, and no clipping by the global norm, since the gradients never exist all at once.
    """
    for number, group in enumerate(optimizer.param_groups):
        for weight in group["params"]:
            weight.register_post_accumulate_grad_hook(_stepping(optimizer, number))


def _stepping(optimizer, number: int):
    numbered = hasattr(optimizer, "mng")  # bitsandbytes looks settings up by a weight's index in the param_groups

    def step(weight) -> None:
        if numbered:
            optimizer.step()
        else:
            groups = optimizer.param_groups
            optimizer.param_groups = [{**groups[number], "params": [weight]}]
            try:
                optimizer.step()
            finally:
                optimizer.param_groups = groups
        weight.grad = None

    return step
