"""Announce where a traced job is: hooks and a callback name layers, phases and optimizer steps to the ledger."""

from math import prod

import torch

from hf_memopt.estimator.accounting.engine_tensors import follow_engine, tensors_in
from hf_memopt.estimator.accounting.ledger import HOST, ROLLOUT_PHASES, STACK, Ledger
from hf_memopt.estimator.tracing.extrapolate import read_config
from hf_memopt.estimator.tracing.fake_quantization import loaded_tensors
from hf_memopt.levers.language_model import inner_model

# Phases whose forward passes are not a training step's.
WITHOUT_STEP = ("eval", *ROLLOUT_PHASES)
_LATER_STEP = 100  # of schedule-free RAdam, which is Adam from the sixth step on (rho_t > 4 in radam_schedulefree.py)


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
            name = _position(index, layers) + (f" of stack {number}" if number else "")
            layer.place_in_model = (name, index + number * STACK)
            places |= {id(weight): layer.place_in_model for weight in layer.parameters()}
            for tensor in loaded_tensors(layer):
                ledger.tag(tensor, layer.place_in_model[1])
            _announce_layer(layer, ledger, is_last=index == len(layers) - 1)
    model.register_forward_pre_hook(lambda *_: _begin(ledger, "forward"))
    model.register_forward_hook(lambda *_: _begin(ledger, "backward"))
    config = read_config(model).get_text_config()
    ledger.vocabulary = (
        getattr(config, "vocab_size", 0),
        _recognisable_width(getattr(config, "hidden_size", 0), batch),
    )
    for name, weight in model.named_parameters():
        segment, layer = places.get(id(weight), (name, None))
        if weight.requires_grad:
            _announce_gradient(weight, segment, layer, ledger)


def announce_held(model: torch.nn.Module, stacks: list, ledger: Ledger) -> None:
    """Note to which layers the weights of a model beside the trained one belong, and which tensors are its gradients.

    Args:
        stacks: of the trained model.
    """
    places: dict[int, str] = {}
    for layers in repeated_layers(model):
        for index, layer in enumerate(layers):
            if stacks and len(layers) == len(stacks[0]):
                for weight in layer.parameters():
                    ledger.tag(weight, index)
                    places[id(weight)] = f"{_position(index, layers)} beside the model"
    for name, weight in model.named_parameters():
        if weight.requires_grad and id(weight) not in ledger.without_gradient:  # a loss may hold the trained model
            _announce_gradient(weight, places.get(id(weight), name), ledger.find_layer(weight), ledger)


def _position(index: int, layers: torch.nn.ModuleList) -> str:
    return "layer first" if index == 0 else "layer last" if index == len(layers) - 1 else "layer between"


def _announce_layer(layer: torch.nn.Module, ledger: Ledger, is_last: bool) -> None:
    name, number = layer.place_in_model
    after = None if is_last else number
    layer.register_forward_pre_hook(lambda *_: ledger.enter(f"{ledger.phase}: {name}", layer=number))
    layer.register_forward_hook(lambda *_: ledger.enter(f"{ledger.phase}: after {name}", layer=after))


def _announce_gradient(weight: torch.nn.Parameter, segment: str, layer: int | None, ledger: Ledger) -> None:
    ledger.without_gradient.add(id(weight))

    def complete(weight):
        ledger.without_gradient.discard(id(weight))
        if weight.grad is not None:  # DeepSpeed moves it to a bucket and sets it to None
            ledger.classify(weight.grad, "gradients")
        ledger.enter(f"{ledger.phase}: gradients of {segment}", layer=layer)

    weight.register_post_accumulate_grad_hook(complete)


def _begin(ledger: Ledger, phase: str) -> None:
    if ledger.phase not in WITHOUT_STEP:
        ledger.begin(phase, "activations")


def _recognisable_width(hidden: int, batch: dict) -> int:
    """The hidden size, which distinguishes the head's weight from logits; 0 where a batch has as many tokens."""
    shapes = [shape for shape, dtype in batch.values() if not dtype.is_floating_point]
    return 0 if any(hidden in (*shape, prod(shape)) for shape in shapes) else hidden


def repeated_layers(model: torch.nn.Module) -> list[torch.nn.ModuleList]:
    """A model's longest lists of modules of one kind: its decoder layers, or its encoder and decoder layers."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    # A shallow copy notes which: with few layers others, such as a vision tower, may have as many.
    if repeating := [layers for layers in lists if getattr(layers, "repeats", False)]:
        return repeating
    # Experts are lists within layers: of nested lists the outermost counts.
    inner = {id(part) for layers in lists for layer in layers for part in layer.modules() if part is not layer}
    outer = [layers for layers in lists if layers and not any(id(layer) in inner for layer in layers)]
    # A vision tower may have more layers than the text model, whose number the configuration says; with few layers it,
    # or what lies between (Qwen3-VL's three mergers), may have as many.
    config = read_config(model)
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    text = [layers for layers in outer if len(layers) == depth] or outer
    if config.get_text_config() is not config and not config.is_encoder_decoder:
        decoder = getattr(inner_model(model), "get_decoder", lambda: None)()
        inside = {id(module) for module in decoder.modules()} if isinstance(decoder, torch.nn.Module) else set()
        text = [layers for layers in text if id(layers[0]) in inside] or text
    return [layers for layers in text if len(layers) == max(map(len, text))]


def make_phase_callback(ledger: Ledger, trainer):
    """A TrainerCallback that tells the ledger when the optimizer steps, and which tensors are its states."""
    from transformers import TrainerCallback

    class Phases(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            engine = trainer.model_wrapped
            if hasattr(engine, "zero_optimization"):
                follow_engine(engine, ledger)
                return
            inner = getattr(optimizer, "optimizer", optimizer)
            # Let every step be like later ones that take more than the first: GaLore projects again, beside all
            # states, and schedule-free RAdam, which begins as SGD, has Adam's denominators.
            for group in (group for each in _optimizers(inner) for group in each.param_groups):
                if "update_proj_gap" in group:
                    group["update_proj_gap"] = 1
                if "silent_sgd_phase" in group:
                    group["k"] = _LATER_STEP
            for tensor in _state_tensors(inner):  # AdaLomo's are there at once
                ledger.classify(tensor, "optimizer_states")
            if args.max_steps == 1 and not trainer.steps_on_host:
                self._create_states(optimizer, args, state, control)

        def _create_states(self, optimizer, *state) -> None:
            """Step once with empty gradients, which all exist before there are states: a segment of its own, because
            a backward pass begins with none."""
            ledger.begin("backward", "gradients")
            ledger.enter("backward: before the first step")
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    if weight.requires_grad:  # an optimizer of the user's own may hold frozen weights, too
                        weight.grad = torch.empty_like(weight)
                        ledger.tag(weight.grad, ledger.find_layer(weight))
            self.on_pre_optimizer_step()
            if hasattr(optimizer.optimizer, "train"):  # schedule-free optimizers step in train mode only
                optimizer.optimizer.train()
            optimizer.optimizer.step()
            self.on_optimizer_step(*state, optimizer=optimizer)
            optimizer.optimizer.zero_grad()
            self.on_step_end()

        def on_step_begin(self, *args, **kwargs):
            ledger.step += 1

        def on_pre_optimizer_step(self, *args, **kwargs):
            for weight in trainer.model.parameters():
                # DTensor gradients come without the hooks above
                if hasattr(weight.grad, "_local_tensor") and not ledger.on_host(weight.grad):
                    ledger.classify(weight.grad, "gradients")
            ledger.begin("optimizer", HOST if trainer.steps_on_host else "workspace")

        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            by_engine = hasattr(trainer.model_wrapped, "zero_optimization")  # follow_engine() classifies DeepSpeed's
            if not by_engine and not trainer.steps_on_host:
                for tensor in _state_tensors(getattr(optimizer, "optimizer", optimizer)):
                    ledger.classify(tensor, "optimizer_states")
            ledger.begin("between", "other")

        def on_step_end(self, *args, **kwargs):
            # Gradients are gone, the next batches not fetched: a peak with either is a moment of its own, as one is
            # higher in a deep model and the other in a shallow one.
            if ledger.phase == "between":
                ledger.begin("between", "other")

    return Phases()


def _optimizers(optimizer) -> list:
    """An optimizer, or for transformers' layer-wise ones the optimizers of the weights."""
    layerwise = getattr(optimizer, "optimizer_dict", None)
    return list(layerwise.values()) if layerwise else [optimizer]


def _state_tensors(optimizer):
    """An optimizer's states. GaLore's and APOLLO's are also in objects; GrokAdamW's in its groups, AdaLomo's in
    attributes."""
    for each in _optimizers(optimizer):
        state_values = [*each.state.values(), *(group.get("state", {}) for group in each.param_groups)]
        state_values += [value for name, value in vars(each).items() if name.startswith("exp_avg")]
        for states in state_values:
            yield from tensors_in(states)
            for part in states.values() if isinstance(states, dict) else ():
                if hasattr(part, "ortho_matrix"):
                    yield from tensors_in(part.ortho_matrix)
