"""The part of recipes/dpo.py that other recipes lack: TRL's arguments, pairs of answers, the reward accuracy."""

import logging
from dataclasses import dataclass, field

from hf_memopt.data.pairs import pair_judge
from hf_memopt.data.sources import USUAL_HELD_OUT
from hf_memopt.errors import InputError, choose
from hf_memopt.recipe.auto import plans_here
from hf_memopt.recipe.job import Job
from hf_memopt.recipe.recipe_arguments import RecipeArguments
from hf_memopt.recipe.rows import load_job_rows

logger = logging.getLogger(__name__)
# What DPOTrainer._compute_loss of TRL 1.16 knows; it asks only when it trains.
_LOSSES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "sft"),
    *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop"),
)
_ACCURACY, _MARGIN = "eval_rewards/accuracies", "eval_rewards/margins"  # as TRL 1.16 logs them


@dataclass
class PreferenceArguments(RecipeArguments):
    """The recipe's arguments; streaming is refused, which TRL's DPOTrainer does not do."""

    held_out: float = field(
        default=USUAL_HELD_OUT,
        metadata={"help": "Pairs held out for the reward accuracy: a share below 1, or a number."},
    )

    @staticmethod
    def prepare(job: Job, training: dict, parsed, own_model: bool) -> dict:
        """Refuse what pairs exclude. There is no plan for the memory that is free here: `hf-memopt plan --task dpo`.

        Raises:
            InputError: an argument that goes without pairs only.
        """
        if job.recipe.streaming:
            raise InputError("streaming=True: pairs are padded and read whole; leave it out")
        if job.recipe.config_name:
            raise InputError("config_name starts from random weights: preferences need model_name_or_path")
        losses = training.get("loss_type", ())
        for loss in [losses] if isinstance(losses, str) else losses:
            if loss not in _LOSSES:
                raise choose("loss_type", loss, _LOSSES)
        if own_model and plans_here(job.recipe.preset):
            logger.warning(
                "no plan for pairs of answers: the sizes are those of the preset %s; hf-memopt plan --task dpo",
                job.preset.name,
            )
        return {}


def load_pairs(job: Job, tokenizer):
    """Pairs to train on and pairs held out (None where there are none), in TRL's forms, checked row by row."""
    source = job.recipe.dataset_name or "builtin:preferences"
    with job.args.main_process_first(desc="preparing data"):
        train, held_out, _ = load_job_rows(job, source, lambda *rows: pair_judge(tokenizer), pairs=True)
    return train, held_out


def show_rewards(job: Job, trainer) -> None:
    """Print how often the chosen answer of a held-out pair has the higher reward, first and last."""
    history = [entry for entry in trainer.state.log_history if _ACCURACY in entry]
    if job.args.process_index or not history:
        return
    first, last = history[0], history[-1]
    print(
        f"reward accuracy on held-out pairs: {first[_ACCURACY]:.2f} at step {first['step']} → "
        f"{last[_ACCURACY]:.2f} at step {last['step']} (chance is 0.50; before training all rewards are 0), "
        f"margin {first[_MARGIN]:.3f} → {last[_MARGIN]:.3f}"
    )
