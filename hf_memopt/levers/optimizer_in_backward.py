"""The optimizer steps in backward, weight by weight, and frees each gradient as soon as it is used."""


def step_in_backward(optimizer) -> None:
    """Have a torch optimizer update each weight at the moment its gradient is complete.

    Its own step() afterwards finds no gradients and does nothing; schedulers and checkpoints work as ever. There must
    be one micro-batch a step and no clipping by the norm of all gradients, which are never there together.
    """
    for number, group in enumerate(optimizer.param_groups):
        for weight in group["params"]:
            weight.register_post_accumulate_grad_hook(_stepping(optimizer, number))


def _stepping(optimizer, number: int):
    numbered = hasattr(optimizer, "mng")  # bitsandbytes finds settings by a weight's number within its groups

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
