"""Losses, models, hooks and callbacks as people write them around a Trainer, each a function that makes a trainer.

CASES maps a name to such a function: (base trainer class, common keyword arguments) -> trainer; own_models.py and
own_hooks.py add theirs. MEANS has the
loss_reduction of those that really are a mean of their samples or tokens, so that their micro-batches can be split.
"""

import copy

import torch
from torch import nn
from torch.nn import functional

CASES, MEANS = {}, {}


def case(name: str, mean: str | None = None):
    def add(make):
        CASES[name] = make
        if mean:
            MEANS[name] = mean
        return make

    return add


# ---- a model of one's own, and losses over it


class Net(nn.Module):
    """A classifier of 8 features, whose loss is a mean over samples; returns what own losses need."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 4)
        self.double()

    def features(self, x):
        return torch.tanh(self.body(x))

    def forward(self, x, labels, weight=None):
        features = self.features(x)
        logits = self.head(self.drop(features))
        each = functional.cross_entropy(logits, labels, reduction="none")
        return {"loss": each.mean(), "logits": logits, "each": each, "features": features}


def over_net(compute, base, common, model=Net, **fields):
    """A trainer whose compute_loss is `compute(trainer, model, inputs, outputs)`."""

    class Own(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = compute(self, model, inputs, outputs)
            return (loss, {"loss": loss, "logits": outputs["logits"]}) if return_outputs else loss

    for name, value in fields.items():
        setattr(Own, name, value)
    return Own(model=model(), **common)


def own_loss(name: str, mean: str | None = None, model=Net, **fields):
    def add(compute):
        case(name, mean)(lambda base, common: over_net(compute, base, common, model, **fields))
        return compute

    return add


def _pairwise(features):
    normed = functional.normalize(features, dim=1)
    return normed @ normed.T / 0.2


own_loss("cross entropy", "sample_mean")(lambda trainer, model, inputs, out: out["loss"])
own_loss("focal loss", "sample_mean")(
    lambda trainer, model, inputs, out: ((1 - (-out["each"]).exp()) ** 2 * out["each"]).mean()
)
own_loss("label smoothing", "sample_mean")(
    lambda trainer, model, inputs, out: functional.cross_entropy(out["logits"], inputs["labels"], label_smoothing=0.1)
)
own_loss("schedule by global_step", "sample_mean")(
    lambda trainer, model, inputs, out: out["loss"] * (0.1 + 0.1 * trainer.state.global_step)
)
own_loss("deep supervision", "sample_mean")(
    lambda trainer, model, inputs, out: (
        out["loss"] + functional.cross_entropy(model.head(out["features"].relu()), inputs["labels"])
    )
)
own_loss("L1 penalty on features", "sample_mean")(
    lambda trainer, model, inputs, out: out["loss"] + 0.01 * out["features"].abs().mean()
)
own_loss("cosine to a fixed target", "sample_mean")(
    lambda trainer, model, inputs, out: (
        1 - functional.cosine_similarity(out["features"], torch.ones(16).double()).mean()
    )
)
own_loss("class weights, weighted mean")(
    lambda trainer, model, inputs, out: functional.cross_entropy(
        out["logits"], inputs["labels"], weight=torch.tensor([1.0, 1.0, 3.0, 5.0]).double()
    )
)
own_loss("sample weights, weighted mean")(
    lambda trainer, model, inputs, out: (out["each"] * inputs["weight"]).sum() / inputs["weight"].sum()
)
own_loss("sum instead of mean")(lambda trainer, model, inputs, out: out["each"].sum())
own_loss("hardest four")(lambda trainer, model, inputs, out: out["each"].topk(min(4, len(out["each"]))).values.mean())
own_loss("hardest half")(
    lambda trainer, model, inputs, out: (
        out["each"].sort(descending=True).values[: max(1, len(out["each"]) // 2)].mean()
    )
)
own_loss("worst sample")(lambda trainer, model, inputs, out: out["each"].max())
own_loss("median")(lambda trainer, model, inputs, out: out["each"].median())
own_loss("log of the mean")(lambda trainer, model, inputs, out: out["each"].mean().log())
own_loss("standard deviation added")(lambda trainer, model, inputs, out: out["loss"] + out["each"].std(correction=0))
own_loss("standardized per batch")(
    lambda trainer, model, inputs, out: (out["each"] / (out["each"].detach().mean() + 1e-6)).square().mean()
)
own_loss("SimCLR")(
    lambda trainer, model, inputs, out: functional.cross_entropy(
        _pairwise(out["features"]), torch.arange(len(out["features"]))
    )
)
own_loss("contrastive in training only")(
    lambda trainer, model, inputs, out: (
        out["loss"]
        + 0.5 * model.training * functional.cross_entropy(_pairwise(out["features"]), torch.arange(len(out["each"])))
    )
)
own_loss("variance of features (VICReg)")(
    lambda trainer, model, inputs, out: out["loss"] + (1 - out["features"].std(dim=0, correction=0)).relu().mean()
)
own_loss("decorrelation (Barlow Twins)")(
    lambda trainer, model, inputs, out: (
        out["loss"] + 0.1 * (out["features"].T @ out["features"] / len(out["each"])).square().mean()
    )
)
own_loss("balance of predictions")(
    lambda trainer, model, inputs, out: out["loss"] - 0.1 * torch.special.entr(out["logits"].softmax(1).mean(0)).sum()
)
own_loss("neighbours in the batch")(
    lambda trainer, model, inputs, out: out["loss"] + (out["features"] - out["features"].roll(1, 0)).square().mean()
)
own_loss("mixup")(lambda trainer, model, inputs, out: _mixup(model, inputs))
own_loss("R-Drop", model=lambda: Net(0.3))(
    lambda trainer, model, inputs, out: out["loss"] + functional.mse_loss(model(**inputs)["logits"], out["logits"])
)
own_loss("noise on inputs")(
    lambda trainer, model, inputs, out: model(inputs["x"] + torch.randn_like(inputs["x"]), inputs["labels"])["loss"]
)


def _mixup(model, inputs):
    order, share = torch.randperm(len(inputs["x"])), torch.rand(())
    mixed = share * inputs["x"] + (1 - share) * inputs["x"][order]
    first, second = (model(mixed, labels)["loss"] for labels in (inputs["labels"], inputs["labels"][order]))
    return share * first + (1 - share) * second


@own_loss("supervised contrastive")
def _supervised_contrastive(trainer, model, inputs, out):
    scores, same = _pairwise(out["features"]), inputs["labels"][:, None] == inputs["labels"]
    itself = torch.eye(len(scores), dtype=torch.bool)
    positive = same & ~itself
    chances = functional.log_softmax(scores.masked_fill(itself, -1e9), dim=1)
    return out["loss"] - ((chances * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


@own_loss("triplets, hardest in batch")
def _triplets(trainer, model, inputs, out):
    distance, same = torch.cdist(out["features"], out["features"]), inputs["labels"][:, None] == inputs["labels"]
    return (distance.masked_fill(~same, 0).amax(1) - distance.masked_fill(same, 1e3).amin(1) + 1).relu().mean()


@own_loss("two tasks over subsets")
def _two_tasks(trainer, model, inputs, out):
    first = inputs["labels"] < 2
    parts = [out["each"][chosen].mean() for chosen in (first, ~first) if chosen.any()]
    return torch.stack(parts).sum()


# ---- state that a loss keeps


@own_loss("counter, warm-up", "sample_mean", calls=0)
def _counter(trainer, model, inputs, out):
    trainer.calls += 1
    return out["loss"] * min(1.0, 0.1 + 0.05 * trainer.calls)


@case("counter that counts before the model runs", "sample_mean")
def _counts_first(base, common):
    class Own(base):
        calls = 0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.calls += 1
            outputs = model(**inputs)
            loss = outputs["loss"] * min(1.0, 0.1 + 0.05 * self.calls)
            return (loss, {"loss": loss, "logits": outputs["logits"]}) if return_outputs else loss

    return Own(model=Net(), **common)


@own_loss("running mean of the loss", scale=1.0)
def _running_mean(trainer, model, inputs, out):
    trainer.scale = 0.9 * trainer.scale + 0.1 * float(out["loss"])
    return out["loss"] / trainer.scale


@own_loss("history in a list", history=None)
def _history(trainer, model, inputs, out):
    trainer.history = [*(trainer.history or []), float(out["loss"])]
    return out["loss"] * (1 + 0.01 * len(trainer.history))


@own_loss("history appended to", history=[])
def _appended(trainer, model, inputs, out):
    if trainer.state.global_step == 0:
        trainer.history = []
    trainer.history.append(float(out["loss"]))
    return out["loss"] * (1 + 0.01 * len(trainer.history))


@own_loss("EMA teacher", teacher=None)
def _teacher(trainer, model, inputs, out):
    if trainer.teacher is None:
        trainer.teacher = copy.deepcopy(model).requires_grad_(False)
        trainer.teacher.__dict__.pop("forward", None)
    with torch.no_grad():
        aim = trainer.teacher.features(inputs["x"])
        for theirs, ours in zip(trainer.teacher.parameters(), model.parameters(), strict=True):
            theirs.data.mul_(0.9).add_(ours.data, alpha=0.1)
    return out["loss"] + functional.mse_loss(out["features"], aim)


@own_loss("frozen teacher", "sample_mean", teacher=None)
def _frozen_teacher(trainer, model, inputs, out):
    if trainer.teacher is None:
        torch.manual_seed(5)
        trainer.teacher = Net().requires_grad_(False)
    return out["loss"] + functional.mse_loss(out["features"], trainer.teacher.features(inputs["x"]))


@own_loss("queue of negatives (MoCo)", queue=None)
def _queue(trainer, model, inputs, out):
    keys = functional.normalize(out["features"], dim=1)
    queue = trainer.queue if trainer.queue is not None else torch.ones(8, 16).double() / 4
    loss = out["loss"] + (keys @ queue.T).logsumexp(1).mean()
    trainer.queue = torch.cat([keys.detach(), queue])[:8]
    return loss


@own_loss("a second optimizer steps in the loss (GAN)", critic=None)
def _gan(trainer, model, inputs, out):
    if trainer.critic is None:
        torch.manual_seed(5)
        trainer.critic = nn.Linear(16, 1).double()
        trainer.critic_optimizer = torch.optim.SGD(trainer.critic.parameters(), lr=0.1)
    if torch.is_grad_enabled():
        trainer.critic(out["features"].detach()).mean().backward()
        trainer.critic_optimizer.step()
        trainer.critic_optimizer.zero_grad()
    return out["loss"] - 0.1 * trainer.critic(out["features"]).mean()


@own_loss("backward within the loss")
def _backward(trainer, model, inputs, out):
    if torch.is_grad_enabled():
        out["each"][0].backward(retain_graph=True)
    return out["loss"]


@own_loss("gradient penalty")
def _penalty(trainer, model, inputs, out):
    if not torch.is_grad_enabled():
        return out["loss"]
    x = inputs["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x, inputs["labels"])["loss"], x, create_graph=True)
    return out["loss"] + gradient.square().sum(1).sqrt().mean()


@own_loss("weights clamped in the loss (WGAN)")
def _clamped(trainer, model, inputs, out):
    with torch.no_grad():
        model.head.weight.clamp_(-0.2, 0.2)
    return model(**inputs)["loss"]
