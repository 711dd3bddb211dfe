"""Where a traced job is: hooks and a callback that announce layers, phases and optimizer steps to the ledger."""

import torch

from hf_memopt.estimator.accounting.engine_tensors import follow_engine, tensors_in
from hf_memopt.estimator.accounting.ledger import HOST, STACK, Ledger


def announce_layers(batch: dict, model: torch.nn.Module, stacks: list, ledger: Ledger) -> None:
    """Have every layer begin a segment of its own, in forward and in backward.

    Module backward hooks insert nodes into the autograd graph, which keep tensors alive. A weight's hook for its
    finished gradient does not, so backward is followed by those.

    Args:
        batch: name -> (shape, dtype).
        stacks: as repeated_layers() returns them.
    """
    places: dict[int, tuple[str, int | None]] = {}  # id of a weight -> its layer's name and number
    for number, layers in enumerate(stacks):
        for index, layer in enumerate(layers):
            position = "first" if index == 0 else "last" if index == len(layers) - 1 else "between"
            layer.place_in_model = (
                f"layer {position}" + (f" of stack {number}" if number else ""),
                index + number * STACK,
            )
            places |= {id(weight): layer.place_in_model for weight in layer.parameters()}
            _announce_layer(layer, ledger, is_last=index == len(layers) - 1)
    model.register_forward_pre_hook(lambda *_: _begin(ledger, "forward"))
    model.register_forward_hook(lambda *_: _begin(ledger, "backward"))
    config = model.config.get_text_config()
    ledger.vocabulary = (config.vocab_size, _recognisable_width(getattr(config, "hidden_size", 0), batch))
    for name, weight in model.named_parameters():
        segment, layer = places.get(id(weight), (name, None))
        ledger.tag(weight, layer)
        if weight.requires_grad:
            _announce_gradient(weight, segment, layer, ledger)


def _announce_layer(layer: torch.nn.Module, ledger: Ledger, is_last: bool) -> None:
    name, number = layer.place_in_model
    after = None if is_last else number
    layer.register_forward_pre_hook(lambda *_: ledger.enter(f"{ledger.phase}: {name}", layer=number))
    layer.register_forward_hook(lambda *_: ledger.enter(f"{ledger.phase}: after {name}", layer=after))


def _announce_gradient(weight: torch.nn.Parameter, segment: str, layer: int | None, ledger: Ledger) -> None:
    def complete(weight):
        if weight.grad is not None:  # DeepSpeed moves it to a bucket and sets it to None
            ledger.classify(weight.grad, "gradients")
        ledger.enter(f"{ledger.phase}: gradients of {segment}", layer=layer)

    weight.register_post_accumulate_grad_hook(complete)


def _begin(ledger: Ledger, phase: str) -> None:
    if ledger.phase != "eval":
        ledger.begin(phase, "activations")


def _recognisable_width(hidden: int, batch: dict) -> int:
    """The hidden size, which distinguishes the head's weight from logits; 0 where a batch has as many tokens."""
    samples, tokens = next(iter(batch.values()))[0][:2]
    return 0 if hidden in (tokens, samples * tokens) else hidden


def repeated_layers(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """A model's longest lists of modules of one kind: its decoder layers, or its encoder and decoder layers."""
    lists = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    # Experts are lists within layers: of nested lists the outermost counts.
    inner = {id(part) for layers in lists for layer in layers for part in layer.modules() if part is not layer}
    outer = [layers for layers in lists if layers and not any(id(layer) in inner for layer in layers)]
    # A vision tower may have more layers than the text model, whose number the configuration says.
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    text = [layers for layers in outer if len(layers) == depth] or outer
    longest = max(map(len, text), default=0)
    return [layers for layers in text if len(layers) == longest]


def make_phase_callback(ledger: Ledger, trainer):
    """A TrainerCallback that tells the ledger when the optimizer steps, and which tensors are its states."""
    from transformers import TrainerCallback

    class Phases(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            engine = trainer.model_wrapped
            if hasattr(engine, "zero_optimization"):
                follow_engine(engine, ledger)
            elif args.max_steps == 1 and not trainer.steps_on_host:
                self._create_states(optimizer, args, state, control)

        def _create_states(self, optimizer, *state) -> None:
            """Step once with empty gradients."""
            ledger.begin("backward", "gradients")
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = torch.empty_like(weight)
                    ledger.tag(weight.grad, ledger.layer_of(weight))
            self.on_pre_optimizer_step()
            if hasattr(optimizer.optimizer, "train"):  # schedule-free optimizers step in train mode only
                optimizer.optimizer.train()
            optimizer.optimizer.step()
            self.on_optimizer_step(*state, optimizer=optimizer)
            optimizer.optimizer.zero_grad()

        def on_step_begin(self, *args, **kwargs):
            ledger.step += 1

        def on_pre_optimizer_step(self, *args, **kwargs):
            for weight in trainer.model.parameters():
                if hasattr(weight.grad, "_local_tensor"):  # DTensor gradients come without the hooks above
                    ledger.classify(weight.grad, "gradients")
            ledger.begin("optimizer", HOST if trainer.steps_on_host else "workspace")

        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            by_engine = hasattr(trainer.model_wrapped, "zero_optimization")  # follow_engine() classifies DeepSpeed's
            if not by_engine and not trainer.steps_on_host:
                for tensor in _state_tensors(getattr(optimizer, "optimizer", optimizer)):
                    ledger.classify(tensor, "optimizer_states")
            ledger.begin("between", "other")

    return Phases()


def _state_tensors(optimizer):
    """An optimizer's states; for transformers' layer-wise ones those of the optimizer that each weight has."""
    layerwise = getattr(optimizer, "optimizer_dict", None)
    for each in layerwise.values() if layerwise else [optimizer]:
        for states in each.state.values():
            yield from tensors_in(states)
