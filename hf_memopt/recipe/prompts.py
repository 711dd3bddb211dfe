"""The part of recipes/grpo.py that other recipes lack: TRL's arguments, prompts with answers, rewards for them."""

import logging
import random
import re
from dataclasses import dataclass, field, fields

from hf_memopt.compatibility import world_size
from hf_memopt.data.columns import Judge
from hf_memopt.data.pairs import check_prompt
from hf_memopt.data.sources import say_once
from hf_memopt.errors import InputError
from hf_memopt.presets.training_arguments import resolve
from hf_memopt.presets.trl_configs import trl_class
from hf_memopt.recipe.auto import plans_here
from hf_memopt.recipe.job import Job
from hf_memopt.recipe.recipe_arguments import RecipeArguments
from hf_memopt.recipe.rows import load_job_rows

logger = logging.getLogger(__name__)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SUMS = 400  # built-in questions


@dataclass
class RolloutArguments(RecipeArguments):
    """The recipe's arguments; streaming is refused, and nothing is held out unless asked for."""

    held_out: float = field(default=0, metadata={"help": "Rows held out for evaluation, which generates, too."})

    @staticmethod
    def prepare(job: Job, training: dict, parsed, own_model: bool) -> dict:
        """Refuse what prompts exclude. The memory that is free here is not planned for: `hf-memopt plan --task grpo`.

        Raises:
            InputError: an argument that goes without prompts only.
        """
        if job.recipe.streaming:
            raise InputError("streaming=True: prompts are completed within a step; leave it out")
        if job.recipe.config_name:
            raise InputError("config_name starts from random weights: GRPO needs model_name_or_path")
        if own_model and plans_here(job.recipe.preset):
            logger.warning(
                "no plan for GRPO: the sizes are those of the preset %s; hf-memopt plan --task grpo", job.preset.name
            )
        # Fields of GRPOConfig whose defaults would leave a batch with a part of a prompt's completions, which it
        # refuses.
        config_class = trl_class("GRPOConfig")
        usual = {field.name: field.default for field in fields(config_class)}
        sizes = usual | resolve(job.preset, world_size(), training, config_class)
        together = sizes["per_device_train_batch_size"] * world_size()
        batch = sizes["generation_batch_size"] or together * (
            sizes["steps_per_generation"] or sizes["gradient_accumulation_steps"]
        )
        changed, group = {}, sizes["num_generations"]
        smaller = [count for count in range(2, group) if batch % count == 0]
        if batch % group and smaller and "num_generations" not in job.given:
            changed["num_generations"] = group = smaller[-1]
            say_once("note: num_generations: %d, which divide the batch of %d completions", group, batch)
        group = sizes["num_generations_eval"] or group
        evaluated = sizes["per_device_eval_batch_size"] * world_size()
        if training["eval_strategy"] != "no" and evaluated % group and "per_device_eval_batch_size" not in job.given:
            changed["per_device_eval_batch_size"] = group  # whole groups, on any number of processes
        return changed


def load_prompts(job: Job):
    """Prompts with their answers to train on, and held out (None where there are none).

    Raises:
        InputError: data without prompts and answers.
    """
    from datasets import Dataset

    source, needed = job.recipe.dataset_name, job.args.generation_batch_size // job.args.num_generations
    if source is None:
        return Dataset.from_list(sums(_SUMS)), None
    with job.args.main_process_first(desc="preparing data"):
        train, held_out, _ = load_job_rows(job, source, _prompt_judge)
    if len(train) < needed:  # TRL drops a generation batch that is not full, and would train nothing
        say_once("note: the %d prompts are repeated to fill a generation batch of %d", len(train), needed)
        train = train.select([place % len(train) for place in range(needed)])
    return tuple(rows and rows.rename_column("completion", "answer") for rows in (train, held_out))


def _prompt_judge(source: str, rows, form: str) -> Judge:
    if not {"prompt", "completion"} <= set(rows.column_names):
        raise InputError(
            f"data set {source!r} has the columns {', '.join(rows.column_names)}; GRPO needs prompt, and completion "
            "with the right answer"
        )
    return check_prompt


def sums(count: int) -> list[dict[str, str]]:
    """Questions of arithmetic, each with its answer."""
    generator = random.Random(0)
    pairs = [(generator.randrange(10), generator.randrange(10)) for _ in range(count)]
    return [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a, b in pairs]


def correct(completions, answer, **_) -> list[float]:
    """1 where the last number of a completion is that of the answer."""
    pairs = zip(_texts(completions), _texts(answer), strict=True)
    return [float(_last_number(text) == _last_number(right) is not None) for text, right in pairs]


def numeric(completions, **_) -> list[float]:
    """The share of digits in a completion: a reward that a model without arithmetic can earn, too."""
    return [sum(map(str.isdigit, text)) / max(1, len(text.strip())) for text in _texts(completions)]


def show_rewards(job: Job, trainer) -> None:
    """Print each reward's mean over the first and the last tenth of the steps."""
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    if job.args.process_index or not history:
        return
    part = max(1, len(history) // 10)
    for name in trainer.reward_func_names:
        first, last = (
            sum(entry[f"rewards/{name}/mean"] for entry in entries) / part
            for entries in (history[:part], history[-part:])
        )
        steps = history[part - 1]["step"], history[-1]["step"]
        print(f"reward {name}: {first:.3f} at step {steps[0]} → {last:.3f} at step {steps[1]}")


def _texts(completions) -> list[str]:
    """The texts of completions or answers, which are messages where prompts are."""
    return [text if isinstance(text, str) else text[-1]["content"] for text in completions]


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None
