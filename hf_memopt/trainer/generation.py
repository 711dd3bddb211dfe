"""Generation within a step (TRL's GRPO and RLOO) that runs out of memory continues in smaller groups of prompts."""

import traceback
from itertools import chain

from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose, free_memory
from hf_memopt.stack.vocabulary import (
    CHECKPOINTING_KWARGS,
    ENABLE_CHECKPOINTING,
    IS_CHECKPOINTING,
    checkpoints_activations,
)
from hf_memopt.trainer.step.known_code import defined_by_user
from hf_memopt.trainer.step.recoverability import holds_whole_model


class GenerationRecovery:
    """The part of MemoryTrainerMixin that is about generation.

    Completions that are there already stay. A smaller group draws other random numbers than a larger one, from the
    same distribution, and samples of a group are independent of each other: rewards, advantages and losses are
    computed on all of them as before.
    """

    _generated_at_once: int | None = None

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        """TRL's (1.16): the completions of a generation batch, and with GRPO their log-probabilities, if any."""
        generate = super()._generate_single_turn
        if not self._splits_generation(images, multimodal_fields):
            return generate(prompt_ids, images, multimodal_fields, *args, **kwargs)
        groups, start = [], 0
        while start < len(prompt_ids):
            size = min(self._generated_at_once or len(prompt_ids), len(prompt_ids) - start)
            try:
                groups.append(generate(prompt_ids[start : start + size], images, multimodal_fields, *args, **kwargs))
                start += size
                continue
            except Exception as error:
                diagnosis = diagnose(error)
                if diagnosis.kind is OomKind.NOT_MEMORY:
                    raise
                traceback.clear_frames(error.__traceback__)  # the frames hold the cache
            # TRL switches activation checkpointing off while it generates, and on again only after a success
            # (trl 1.16, unwrap_model_for_generation).
            model = self.accelerator.unwrap_model(self.model)
            if checkpoints_activations(self.args) and not getattr(model, IS_CHECKPOINTING):
                getattr(model, ENABLE_CHECKPOINTING)(getattr(self.args, CHECKPOINTING_KWARGS))
            # Outside of `except`: while the exception is handled, it keeps its traceback and so the cache alive.
            free_memory()
            self._halve_generation(diagnosis, size)
        if isinstance(groups[0], list):  # RLOO's
            return list(chain.from_iterable(groups))
        # GRPO's, with None, since only vLLM returns log-probabilities
        return list(chain.from_iterable(completions for completions, _ in groups)), None

    def _splits_generation(self, images, multimodal_fields) -> bool:
        """True if prompts may be completed in groups: each process by itself, by transformers' generate(), in
        code that keeps nothing between two calls."""
        own = defined_by_user(type(self), "_generate_single_turn"), getattr(self, "rollout_func", None)
        engines = (self.use_vllm, getattr(self, "use_transformers_continuous_batching", False), *own)
        alone = holds_whole_model(self) and images is None and not multimodal_fields
        return self.memory_args.oom_recovery and alone and not any(engines)

    def _halve_generation(self, diagnosis: Diagnosis, size: int) -> None:
        if size == 1 or not diagnosis.helps_on(self.args.device):
            why = "one completion at a time does not fit" if size == 1 else "no smaller group of prompts helps there"
            self._ending.end_run("generation", diagnosis, why=why)
        self._generated_at_once = size // 2
        self._recovered("generation", diagnosis, size, size // 2)
