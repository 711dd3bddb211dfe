"""The phases of TRL's trainers that generate (GRPO, RLOO), which a step passes one after the other.

Generation, the log-probabilities of the old and the reference model, and rewards run before the forward pass of a
step, and what one of them takes is free in the next. The trainer's own code runs in all of them. Only
transformers' generate() is shortened to its two extremes: the first forward pass, of the whole prompt, and the last
one, of one token beside a full cache.
"""

import copy
import functools
import sys
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.known_values import set_value
from hf_memopt.estimator.accounting.ledger import GENERATION, LOG_PROBS, REWARDS, Ledger
from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.trl_tasks import unscored
from hf_memopt.levers.language_model import inner_model
from hf_memopt.stack.vocabulary import CACHE


def generates(trainer) -> bool:
    """True if a trainer generates the completions that it trains on, as TRL's GRPO and RLOO do (TRL 1.16)."""
    return hasattr(trainer, "_generate_and_score_completions")


def check_rollouts(trainer) -> None:
    """Refuse what the phases do not cover.

    Raises:
        InputError: with what to estimate instead.
    """
    name = type(trainer).__name__
    if getattr(trainer, "_generate_single_turn", None) is None or not hasattr(
        trainer, "_get_per_token_logps_and_entropies"
    ):
        raise InputError(f"{name} generates text within its steps in a way of its own: GRPO and RLOO are modelled")
    unknown = {
        "tools": "completions of several turns",
        "environment_factories": "environments",
        "rollout_func": "a rollout of your own",
        "use_transformers_continuous_batching": "a paged cache of a share of the free memory",
    }
    for attribute, label in unknown.items():
        if getattr(trainer, attribute, None):
            raise InputError(
                f"{name} with {attribute}: {label} are not modelled; estimate it without, with max_completion_length "
                "as long as everything that follows the prompt"
            )
    if {"image", "images"} & set(getattr(trainer.train_dataset, "column_names", None) or ()):
        raise InputError(f"{name} on images: prompts with images are not modelled; estimate it on their text")
    beams = getattr(getattr(trainer, "generation_config", None), "num_beams", None) or 1
    if beams > 1:
        raise InputError(f"generation_kwargs.num_beams={beams}: beam search is not modelled; use num_beams=1")


_GATHERED = Part.ROLLOUTS.replaces(
    "accelerate.utils:gather_object(object)",
    why="pickles tensors to gather texts and the names of metrics, of which no other process has any",
    until="torch's fake process group gathers objects",
)


def own_objects_only(trainer) -> AbstractContextManager:
    """Texts and names of metrics of one process in the place of all processes': they are in host memory."""
    own = next(kind for kind in type(trainer).__mro__ if "_generate_and_score_completions" in vars(kind))
    return _GATHERED.replaced([sys.modules[own.__module__]], gather_object=lambda objects: objects)


def follow_rollouts(trainer, ledger: Ledger, accumulation: int) -> None:
    """Have a traced trainer announce its phases, and generate without its loop over tokens.

    Args:
        accumulation: gradient_accumulation_steps of the real job, of which fewer are traced.
    """
    in_phase = functools.partial(_in_phase, ledger)
    trainer.reward_funcs = [_reward(function) for function in trainer.reward_funcs]
    trainer.log_completions = False

    from transformers import TrainerCallback

    class Renewal(TrainerCallback):  # every traced step generates: in the first there are no optimizer states yet
        def on_step_begin(self, *args, **kwargs):
            trainer._buffered_inputs = None

    trainer.add_callback(Renewal())
    trainer._calculate_rewards = in_phase(REWARDS, trainer._calculate_rewards)
    trainer._get_per_token_logps_and_entropies = _announced(trainer, ledger)
    trainer._generate_and_score_completions = _with_accumulation(trainer, accumulation)
    trainer.get_high_entropy_mask = functools.partial(_high_entropy_mask, trainer)
    if trainer.use_vllm:
        trainer._generate_single_turn = functools.partial(_written_elsewhere, trainer)
        return
    trainer._generate_single_turn = in_phase(GENERATION, trainer._generate_single_turn)
    trainer.model.generate = functools.partial(_first_and_last, trainer, ledger)


def _high_entropy_mask(trainer, entropies, mask, threshold: float):
    """GRPOTrainer's, without the choice of the tokens that count by values: of a trace all do."""
    ordered = trainer.accelerator.gather(entropies.float().flatten()).sort().values
    return (entropies * mask.float() >= ordered[int(threshold * (len(ordered) - 1))]) & mask.bool()


def _in_phase(ledger: Ledger, phase: str, function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        before, work = ledger.phase, ledger.work
        ledger.begin(phase, "activations")
        ledger.work = None  # of a few of many tokens: the kernels that a plan compares are the training step's
        try:
            return function(*args, **kwargs)
        finally:
            ledger.work = work
            ledger.begin(before, "other")

    return run


def _announced(trainer, ledger: Ledger):
    """Log-probabilities with gradients are the step's forward pass, which announces itself."""
    compute = trainer._get_per_token_logps_and_entropies
    without_gradients = _in_phase(ledger, LOG_PROBS, compute)

    @functools.wraps(compute)
    def run(*args, **kwargs):
        return compute(*args, **kwargs) if torch.is_grad_enabled() else without_gradients(*args, **kwargs)

    return run


def _with_accumulation(trainer, accumulation: int):
    """TRL needs old log-probabilities where a generation batch serves more than one optimizer step, which it asks the
    arguments for."""
    score = trainer._generate_and_score_completions

    @functools.wraps(score)
    def run(*args, **kwargs):
        with mock.patch.object(trainer.args, "gradient_accumulation_steps", accumulation):
            return score(*args, **kwargs)

    return run


def _reward(function):
    """A reward model; in the place of a function, which may ask a server or run code, rewards without a meaning."""
    if isinstance(function, torch.nn.Module):
        return function
    return functools.update_wrapper(functools.partial(unscored), function, updated=())


class _OneToken(BaseException):
    """Raised where generate() asks whether to stop, whose answer has no value here."""


def _first_and_last(trainer, ledger: Ledger, input_ids, attention_mask, generation_config, **inputs):
    """The peaks of generate(): its first forward pass and its last, in whose cache are all tokens but the last."""
    length = trainer.max_completion_length
    samples, prompt = input_ids.shape
    cache = _one_token(trainer.model, generation_config, input_ids, attention_mask, **inputs)
    if length > 1:
        with ledger.counting_as("activations"):
            _lengthen(cache, prompt + length - 2)
        longest = torch.empty((samples, prompt + length - 1), dtype=torch.int64)
        mask = torch.cat([attention_mask, attention_mask.new_ones((samples, length - 1))], dim=1)
        config = copy.copy(generation_config)
        config.cache_implementation = None  # it is the cache's
        _one_token(trainer.model, config, longest, mask, **{CACHE: cache})
    return _completed(trainer, input_ids)


def _one_token(model, config, input_ids, attention_mask, **inputs):
    """Generate one token; the cache."""
    caches = []
    try:
        with inner_model(model).register_forward_hook(lambda *args: caches.append(args[-1][CACHE])):
            type(model).generate(
                model,
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                stopping_criteria=[_stop],
                **inputs,
            )
    except _OneToken as stopped:
        stopped.__traceback__ = None  # its frames hold tensors
    return caches[-1]


def _stop(input_ids, scores, **kwargs):
    raise _OneToken


def _lengthen(cache: Any, tokens: int) -> None:
    """Give a cache the size that it has after so many tokens. Caches of a fixed size, static ones and states of linear
    attention, have it already."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    for layer in getattr(cache, "layers", ()):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None:
            continue
        length = tokens
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length, length = tokens, min(tokens, layer.sliding_window - 1)
        for name in ("keys", "values"):
            states = getattr(layer, name)
            shape = (*states.shape[:-2], length, states.shape[-1])
            setattr(layer, name, None)
            setattr(layer, name, states.new_empty(shape))
            del states


def _completed(trainer, prompts: torch.Tensor) -> torch.Tensor:
    """Prompts and completions, of the full length for the first sample alone: every micro-batch is padded, as real
    ones are, wherever TRL's shuffling puts it."""
    length, ends = trainer.max_completion_length, trainer.eos_token_ids
    with unset_fake_temporarily():
        token = next(number for number in range(len(ends) + 1) if number not in ends)
        values = torch.full((len(prompts), prompts.shape[1] + length), token)
        values[1:, -2:] = ends[0] if length > 1 and ends else token
    return set_value(torch.empty(values.shape, dtype=torch.int64), values)


def _written_elsewhere(trainer, prompt_ids, *args, **kwargs):
    """Completions of vLLM, which are lists of token ids in host memory: a colocated engine's memory is arithmetic
    (estimator.colocation)."""
    completions = [[0] * trainer.max_completion_length for _ in prompt_ids]
    if not hasattr(trainer, "vllm_importance_sampling_correction"):  # RLOO takes no log-probabilities
        return completions
    return completions, [[0.0] * len(ids) for ids in completions]
