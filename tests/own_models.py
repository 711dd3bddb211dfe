"""Models of one's own, and ways around a Trainer's step: cases of own_losses.py."""

import torch
from own_losses import Net, case
from torch import nn


class _SpectralNorm(Net):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.body)


class _RunningMean(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16).double())

    def features(self, x):
        features = super().features(x)
        if self.training:
            self.mean.data = 0.9 * self.mean + 0.1 * features.detach().mean(0)
        return features - self.mean


class _BatchNorm(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16).double()

    def features(self, x):
        return self.norm(super().features(x))


class _CountsPasses(Net):
    passes = 0

    def features(self, x):
        self.passes += 1
        return super().features(x) * (1 + 0.01 * self.passes)


class _Centered(Net):
    def features(self, x):
        features = super().features(x)
        return features - features.mean(0)


for _name, _model in {
    "spectral norm": _SpectralNorm,
    "running mean in a buffer": _RunningMean,
    "batch norm": _BatchNorm,
    "a model that counts its passes": _CountsPasses,
    "features centered over the batch": _Centered,
}.items():
    case(_name)(lambda base, common, model=_model: base(model=model(), **common))
case("a model of one's own", "sample_mean")(lambda base, common: base(model=Net(), **common))
case("parts frozen", "sample_mean")(lambda base, common: base(model=_frozen(), **common))


def _frozen():
    model = Net()
    model.body.requires_grad_(False)
    return model


@case("own training_step, gradient of two batches (SAM)")
def _sam(base, common):
    class Own(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            with torch.no_grad():
                moves = [0.01 * weight.grad.sign() for weight in model.parameters()]
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.add_(move)
            super().training_step(model, dict(inputs), num_items_in_batch)
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.sub_(move)
            return loss

    return Own(model=Net(), **common)


@case("own training_step that counts")
def _counting_step(base, common):
    class Own(base):
        steps = 0

        def training_step(self, model, inputs, num_items_in_batch=None):
            self.steps += 1
            with torch.no_grad():
                model.head.bias.add_(0.01 * self.steps)
            return super().training_step(model, inputs, num_items_in_batch)

    return Own(model=Net(), **common)


@case("own _prepare_inputs that counts")
def _counting_inputs(base, common):
    class Own(base):
        batches = 0

        def _prepare_inputs(self, inputs):
            self.batches += 1
            return super()._prepare_inputs({**inputs, "x": inputs["x"] * (1 + 0.01 * self.batches)})

    return Own(model=Net(), **common)


@case("compute_loss replaced on the instance")
def _replaced(base, common):
    trainer = base(model=Net(), **common)

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs["loss"] + outputs["each"].max()
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = compute_loss
    return trainer


@case("own prediction_step that counts", "sample_mean")
def _counting_prediction(base, common):
    class Own(base):
        seen = 0

        def prediction_step(self, model, inputs, *args, **kwargs):
            self.seen += len(inputs["x"])
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
            return loss * self.seen, logits, labels

    return Own(model=Net(), **common)
