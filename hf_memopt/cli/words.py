"""A command line's words, judged by bundled tables and the libraries' source before any library is imported.

A wrong word is answered in a fraction of the seconds that torch and transformers take to import.
"""

from collections.abc import Iterable
from dataclasses import replace

from hf_memopt.errors import InputError, choose, respell
from hf_memopt.estimator.architectures import check_reachable, read_name
from hf_memopt.estimator.tracing.tasks import named_tasks
from hf_memopt.estimator.trl_tasks import TRL_TASKS
from hf_memopt.field_values import fit
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.devices import split_count
from hf_memopt.presets import METHODS
from hf_memopt.presets.named_presets import check_strategy
from hf_memopt.stack.declared import declared_hints, declared_values
from hf_memopt.stack.vocabulary import declared_arguments, newest
from hf_memopt.video.frame_limits import parse_frame_size


def check_words(spec: JobSpec, methods: Iterable[str] = METHODS) -> JobSpec:
    """The job of a command line with its model's name as it is looked up.

    Args:
        methods: that the command takes.

    Raises:
        InputError: a word that names nothing, or a setting that its configuration lacks.
    """
    if spec.method not in methods:
        raise choose("method", spec.method, methods)
    if spec.strategy is not None:
        check_strategy(spec.strategy)
    if spec.task is not None and spec.task not in TRL_TASKS:
        named_tasks(spec.task)
    for name in filter(None, (spec.hardware, spec.preset)):
        if isinstance(name, str) and name.lower() != "any":
            split_count(name)
    # Another tool's fields have been translated; whose fields those of a data set's task are, its rows say.
    if spec.tool is None and (spec.task or not spec.dataset):
        _check_fields(spec)
    for name in ("frame_size", "image_size"):
        if name in spec.clips:
            parse_frame_size(spec.clips[name], name)
    if not spec.is_named:
        return spec
    model = read_name(spec.model)
    check_reachable(model)
    return replace(spec, model=model)


def _check_fields(spec: JobSpec) -> None:
    """Refuse fields that the installed classes do not declare, and values that are not of their types."""
    kind = TRL_TASKS[spec.task].config if spec.task in TRL_TASKS else "TrainingArguments"
    if known := declared_arguments(kind):
        known["effective_batch_size"] = int | None  # which presets.arguments.resolve() takes
        fields = newest(spec.training)
        for name in fields.keys() - known.keys():
            raise choose(f"{kind} field", name, known.keys() - {"effective_batch_size"})
        fit(known, fields)
    optimizers, optim = declared_values("OptimizerNames"), spec.training.get("optim")
    if optimizers and isinstance(optim, str) and respell("optim", optim, optimizers) not in optimizers:
        raise choose("optim", optim, optimizers)
    if spec.lora and spec.method == "full":
        raise InputError("lora.* applies to method=lora only, and to its 4-bit form qlora")
    if hints := declared_hints("LoraConfig"):
        for name in spec.lora.keys() - hints.keys():
            raise choose("key of lora", name, hints)
        fit(hints, spec.lora, "lora.")
