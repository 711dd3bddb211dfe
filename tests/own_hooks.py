"""Hooks, functions and callbacks around models of transformers: cases of own_losses.py."""

import own_models  # noqa: F401  adds its cases before these
import torch
from own_losses import CASES, case
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, TrainerCallback


def bert(**fields):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=32, num_labels=4, **sizes, **dropout, **fields)
    ).double()


def llama(kind=LlamaForCausalLM):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return kind(LlamaConfig(vocab_size=32, **sizes)).double()


KNOWN = {"BERT classifier", "BERT regression", "BERT multi-label", "Llama", "Llama, labels smoothed", "Llama, NEFTune"}
case("BERT classifier")(lambda base, common: base(model=bert(), **_tokens(common, "class")))
case("BERT regression")(lambda base, common: base(model=bert(problem_type="regression"), **_tokens(common, "vector")))
case("BERT multi-label")(
    lambda base, common: base(model=bert(problem_type="multi_label_classification"), **_tokens(common, "vector"))
)
case("Llama")(lambda base, common: base(model=llama(), **_tokens(common)))
case("Llama, labels smoothed")(lambda base, common: base(model=llama(), **_tokens(common, label_smoothing_factor=0.1)))
case("Llama, NEFTune")(lambda base, common: base(model=llama(), **_tokens(common, neftune_noise_alpha=5.0)))


def _tokens(common, labels="tokens", **fields):
    rows = [
        {
            "input_ids": row["ids"],
            "labels": {
                "tokens": row["ids"].masked_fill(torch.arange(6) >= 2 + row["labels"], -100),
                "class": row["labels"],
                "vector": torch.nn.functional.one_hot(row["labels"], 4).double(),
            }[labels],
        }
        for row in common["train_dataset"]
    ]
    for name, value in fields.items():
        setattr(common["args"], name, value)
    return {**common, "train_dataset": rows, "eval_dataset": rows[: len(common["eval_dataset"])]}


def around_llama(name: str):
    def add(change):
        def make(base, common):
            trainer = base(model=llama(), **_tokens(common))
            change(trainer)
            return trainer

        case(name)(make)
        return change

    return add


@around_llama("forward pre-hook that counts")
def _pre_hook(trainer):
    calls = []

    def hook(module, args, kwargs):
        calls.append(1)
        mask = torch.ones_like(kwargs["input_ids"])
        mask[:, 0] = len(calls) % 2
        return args, {**kwargs, "attention_mask": mask}

    trainer.model.register_forward_pre_hook(hook, with_kwargs=True)


@around_llama("forward hook that mixes the batch")
def _mixing(trainer):
    trainer.model.model.layers[0].register_forward_hook(lambda module, args, output: output - output.mean(0))


@around_llama("forward hook that keeps features")
def _keeping(trainer):
    trainer.features = {}
    trainer.model.model.norm.register_forward_hook(lambda module, args, out: trainer.features.update(last=out))


@around_llama("gradient hook that clamps")
def _clamping(trainer):
    for weight in trainer.model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _clamp_gradient(weight) -> None:
    weight.grad.clamp_(-1e-3, 1e-3)


@around_llama("gradients clamped when accumulated")
def _accumulated(trainer):
    for weight in trainer.model.parameters():
        weight.register_post_accumulate_grad_hook(_clamp_gradient)


@around_llama("backward hook")
def _backward_hook(trainer):
    trainer.model.lm_head.register_full_backward_hook(
        lambda module, given, taken: tuple(g and None if g is None else g.clamp(-1e-3, 1e-3) for g in given)
    )


@around_llama("forward replaced, with a schedule")
def _replaced_forward(trainer):
    forward, calls = trainer.model.model.layers[0].mlp.forward, []

    def scheduled(x):
        calls.append(1)
        return forward(x) * (1 + 0.01 * len(calls))

    trainer.model.model.layers[0].mlp.forward = scheduled


@around_llama("loss_function replaced")
def _loss_function(trainer):
    usual = trainer.model.loss_function

    def largest(logits, labels, **kwargs):
        return usual(logits, labels, **kwargs) + 0.01 * logits.amax()

    trainer.model.loss_function = largest


@around_llama("a layer of one's own")
def _layer(trainer):
    class Centered(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x - x.mean(0, keepdim=True))

    trainer.model.lm_head = Centered(trainer.model.lm_head)


@around_llama("compute_loss_func over the batch")
def _function(trainer):
    def spread(outputs, labels, num_items_in_batch=None):
        each = functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none").mean(1)
        return each.mean() + each.std(correction=0)

    trainer.compute_loss_func = spread


@case("a subclass of Llama with a term over the batch")
def _subclass(base, common):
    class Own(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.loss = outputs.loss + 0.01 * outputs.logits.mean(0).square().mean()
            return outputs

    return base(model=llama(Own), **_tokens(common))


def with_callback(name: str):
    def add(kind):
        CASES[name] = lambda base, common: base(model=llama(), callbacks=[kind()], **_tokens(common))
        return kind

    return add


@with_callback("callback that changes gradients between micro-batches")
class _Substep(TrainerCallback):
    def on_substep_end(self, args, state, control, model=None, **kwargs):
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5)


@with_callback("callback that freezes layers by step (LISA)")
class _Freezes(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for weight in model.model.layers[0].parameters():
            weight.requires_grad_(state.global_step % 2 == 0)


@with_callback("callback that scales gradients before the update")
class _Scales(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5)


@with_callback("callback that averages weights (EMA)")
class _Averages(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.999)


@with_callback("callback that clamps weights before a step")
class _ClampsWeights(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model.lm_head.weight.clamp_(-0.05, 0.05)


KNOWN |= {
    "callback that freezes layers by step (LISA)",
    "callback that scales gradients before the update",
    "callback that averages weights (EMA)",
    "callback that clamps weights before a step",
}
