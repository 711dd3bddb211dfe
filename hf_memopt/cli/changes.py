"""What `hf-memopt estimate` proposes for a job that does not fit: what a plan of the same step would change."""

from collections.abc import Callable
from dataclasses import replace

from hf_memopt.cli.output import working
from hf_memopt.errors import InputError
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.estimator.suggestions import IN_EVALUATION, Saving, largest_savings, smallest_combination
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.estimator.trainer_job import TrainerJob
from hf_memopt.foreign.edits import in_words
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.planner.choice_jobs import choice_job
from hf_memopt.planner.plan import plan_job
from hf_memopt.planner.proposals import Proposal, differences, set_words
from hf_memopt.planner.settle import left_open

_MOST = 4  # proposals


def fitting_changes(
    asked: JobSpec, settled: JobSpec, job: Job, samples: int, estimate: Estimate, settle: Callable[[JobSpec], JobSpec]
) -> list[Saving]:
    """The changes with which a job fits, best first; where no plan describes the job, those that save most.

    Args:
        asked: as its user asked for it.
        settled: with its preset.
        samples: of a process, in an optimizer step.
        estimate: the job's, which does not fit.
        settle: makes `settled` of `asked`.
    """
    if estimate.phase == "eval" and (saving := smallest_combination(job, estimate, on_all_cores, IN_EVALUATION)):
        return [saving]  # which changes nothing of the training
    try:
        plan = plan_job(_planned(asked, settled, job, samples), working)
    except InputError:  # an engine's own settings, a task that plans do not know, samples that devices share
        working("looking for the smallest combination of changes that fits")
        # A Trainer's batch is made.
        savings = [] if isinstance(job, TrainerJob) else largest_savings(job, estimate, map_fn=on_all_cores)
        if not any(saving.fits for saving in savings):
            savings = [*filter(None, [smallest_combination(job, estimate, on_all_cores)]), *savings]
        return savings
    return [
        Saving(_words(proposal, asked, settled, settle), estimate.device_bytes - proposal.device_bytes, True)
        for proposal in plan.fitting[:_MOST]
    ]


def _planned(asked: JobSpec, settled: JobSpec, job: Job, samples: int) -> JobSpec:
    """The same step, as `plan` is asked for it."""
    spec = replace(
        asked,
        preset=None,
        hardware=asked.hardware or asked.preset or "auto",
        seq_len=asked.seq_len or (None if settled.video else job.seq_len),
        effective_batch_size=samples * settled.preset.batches(job.world_size),
        memory_args=asked.memory_args or MemoryArguments(),
    )
    return left_open(spec) if spec.tool else spec


def _words(proposal: Proposal, asked: JobSpec, settled: JobSpec, settle) -> str:
    """A proposal as a command line takes it, to the last setting."""
    spec, choice, changes = proposal.spec, proposal.choice, list(proposal.changes)
    if choice is None:
        return " and ".join(changes)
    strategy = choice.strategy if choice.strategy != settled.preset.strategy else asked.strategy
    own_keys = spec.tool and spec.tool.keys
    named = any("strategy" in change for change in changes) or (own_keys and not spec.tool.launched)
    if strategy != asked.strategy and not named:
        changes.append(f"--strategy {strategy}")
    if own_keys:
        return " and ".join(filter(None, [*changes, in_words(own_keys(choice.settings))]))
    changes += [f"--sequence-parallel {choice.shared}"] * (choice.shared > 1)
    moved = {
        "method": spec.method,
        "strategy": strategy,
        "world_size": spec.preset.processes,
        "sequence_parallel": choice.shared,
    }
    lora = spec.lora if spec.method != "full" else {}
    try:
        base = spec_job(settle(replace(asked, **moved, seq_len=spec.seq_len, lora=lora)))
    except InputError:  # the named preset is of another number of devices
        return " and ".join(changes)
    own = set_words({f"lora.{name}": value for name, value in lora.items() if asked.lora.get(name) != value})
    words = [word for word in [*own, *differences(base, choice_job(spec, choice))] if word not in " ".join(changes)]
    return " and ".join([*changes, " ".join(words)] if words else changes)
