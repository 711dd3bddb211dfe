"""Names of other libraries that a trace replaces or relies on, although the libraries do not promise to keep them.

Each is declared beside the code that uses it. A release that renames one must end in a sentence, not in a wrong
number: `check` compares a part's names with what is installed before the first trace that needs them, and
`hf-memopt doctor` compares all of them.
"""

import functools
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from typing import Any
from unittest import mock

from hf_memopt.errors import IncompatibleLibrary, one_line
from hf_memopt.stack.versions import has


class Use(Enum):
    """The use of a name by a trace."""

    REPLACED = "replaced"
    CALLED = "called or read"
    INSTANCE = "set by the class on its instances"


class Part(Enum):
    """A part of a traced job: its label in messages, and the modules of this folder that declare names for it.

    A declaration is a global of the module that replaces, calls or reads the names. They are written `module:name` or
    `module:Class.name`; a function's is followed by the parameters that are relied on, as `inspect.signature` orders
    them: `module:name(first, second)`. Functions written in C have none.
    """

    EVERY_JOB = (
        "every job",
        "accounting.fake_outputs",
        "accounting.known_values",
        "patches.fake_cluster",
        "tracing.fake_tensors",
        "tracing.model",
        "tracing.process_state",
        "tracing.tasks",
        "tracing.trainer_copy",
    )
    ACCELERATOR = "an accelerator's job", "patches.accelerator_operators"
    SEVERAL_DEVICES = "several devices", "patches.fake_cluster"
    LAUNCH = "a script's launcher", "scripts.launched"
    DDP = "ddp", "patches.fake_cluster"
    FSDP2 = "fsdp2", "patches.fake_cluster"
    CONTEXT_PARALLEL = "context parallelism", "patches.ring_attention"
    MESH = "sharding by transformers", "patches.fake_cluster"
    DEEPSPEED = "deepspeed", "accounting.engine_tensors", "patches.fake_cluster", "patches.ulysses"
    BITSANDBYTES = (
        "4-bit weights and 8-bit optimizers",
        "accounting.kernels",
        "tracing.fake_tensors",
        "tracing.fake_quantization",
    )
    PEFT = "adapters of peft", "patches.fake_adapters"
    FP8 = "FP8 weights", "tracing.fake_tensors"
    OPTIMIZERS = "optimizers by formula", "tracing.untraced_optimizers"
    FLASH_ATTENTION = "flash attention", "patches.flash_attention"
    LIGER = "Liger's kernels", "patches.liger"
    VISION = "vision towers", "patches.vision_windows"
    DETECTION = "detection and segmentation", "tracing.fake_tensors"
    ROLLOUTS = "TRL's trainers that generate", "patches.trl_trainers", "tracing.rollouts"
    LEVERS = "memory features", "tracing.trace"
    OFFLOADED_INPUTS = "checkpointed layers whose inputs are in host memory", "tracing.trace"
    TRL = "TRL's trainers", "patches.trl_trainers", "patches.trl_offloading"
    DRY_RUN = "dry-run", "scripts.dry_run", "fake_pretrained", "scripts.scratch_libraries"
    WITHOUT_DEEPSPEED = "no deepspeed", "tracing.process_state"

    def __init__(self, label: str, *modules: str):
        self.label = label
        self.modules = modules

    def replaces(self, *names: str, why: str, until: str = "never", since: str = "0") -> "PrivateNames":
        """Declare names of one library that a trace replaces for one reason."""
        return PrivateNames(self, Use.REPLACED, names, why, until, since)

    def relies_on(
        self, *names: str, why: str, until: str = "never", since: str = "0", use: Use = Use.CALLED
    ) -> "PrivateNames":
        """Declare names of one library that a trace calls or reads for one reason."""
        return PrivateNames(self, use, names, why, until, since)


# Parts that no declaration could mend: an older torch has other fake tensors, an older DeepSpeed fills its buckets by
# hooks that no trace calls.
_OLDEST = {Part.EVERY_JOB: ("torch", "2.13"), Part.DEEPSPEED: ("deepspeed", "0.19.4")}


@dataclass(frozen=True)
class PrivateNames:
    """Names of one library that a trace uses for one reason.

    Attributes:
        part: of the jobs that need them.
        names: with parameters, as in Part.
        why: what the trace needs from them.
        until: when the declaration can go.
        since: the first version of the library that has what is replaced; older ones need no replacement.
    """

    part: Part
    use: Use
    names: tuple[str, ...]
    why: str
    until: str
    since: str

    @property
    def library(self) -> str:
        """The package that the names belong to."""
        return self.names[0].partition(":")[0].partition(".")[0]

    @property
    def needed(self) -> bool:
        """True if the installed version has what is replaced."""
        return has(self.library, self.since)

    @property
    def signatures(self) -> dict[str, str | None]:
        """Path -> parameters; None where they are not compared."""
        split = (name.partition("(") for name in self.names)
        return {path: parameters.removesuffix(")") if opens else None for path, opens, parameters in split}

    @contextmanager
    def replaced(self, importers: Sequence[Any] | None = None, /, **replacements: Any) -> Iterator[None]:
        """A context in which some of the names are replaced.

        Args:
            importers: modules that have imported the names from their owner, and call their own copies.
            replacements: name -> what takes its place.
        """
        check(self.part)
        with ExitStack() as stack:
            for name, new in replacements.items() if self.needed else ():
                owners = [resolve(self.path(name)[: -len(name) - 1])] if importers is None else importers
                for owner in owners:
                    stack.enter_context(mock.patch.object(owner, name, new))
            yield

    def original(self, name: str) -> Any:
        """Return what a name stands for now.

        Raises:
            IncompatibleLibrary: the installed library does not have it.
        """
        check(self.part)
        return resolve(self.path(name))

    def path(self, name: str) -> str:
        """`module:name` or `module:Class.name` of one of the names."""
        return next(path for path in self.signatures if path.partition(":")[2].rpartition(".")[2] == name)


@functools.cache
def check(part: Part) -> None:
    """Compare a part's names with the installed libraries, once a process.

    Raises:
        IncompatibleLibrary: a name is missing, or does not take the parameters that the trace relies on.
    """
    for fault in faults(part):
        raise IncompatibleLibrary(fault)


def declared(part: Part) -> list[PrivateNames]:
    """Every declaration of a part."""
    modules = [importlib.import_module(f"{__package__}.{name}") for name in part.modules]
    values = [value for module in modules for value in vars(module).values()]
    return [value for value in values if isinstance(value, PrivateNames) and value.part is part]


def faults(part: Part) -> Iterator[str]:
    """One sentence for every name of a part that the installed libraries do not have as it is declared."""
    library, oldest = _OLDEST.get(part, ("", ""))
    if library and not has(library, oldest):
        yield f"predictions of {part.label} need {library} {oldest} or newer, and {version(library)} is installed"
        return
    broken = set()
    for names in declared(part):
        library = names.library
        if not names.needed or library in broken or importlib.util.find_spec(library) is None:
            continue  # whoever needs a missing library says so
        try:
            importlib.import_module(library)
        except Exception as error:  # of any kind: a broken installation raises what it likes
            broken.add(library)
            yield f"{library} {version(library)} cannot be imported: {type(error).__name__}: {one_line(error)}"
            continue
        for path, parameters in names.signatures.items():
            if (reason := _fault(path, parameters, names.use)) is not None:
                yield f"hf_memopt does not know {library} {version(library)}: {path.replace(':', '.')} {reason}"


def version(library: str) -> str:
    """The installed version of a library."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # this package, where it runs from its repository
        return "(not installed)"


def resolve(path: str) -> Any:
    """Return the module, class, function or value that a path stands for now."""
    # import_module and not attributes: `deepspeed.comm.torch` as an attribute is torch itself.
    return pkgutil.resolve_name(path) if ":" in path else importlib.import_module(path)


def _fault(path: str, parameters: str | None, use: Use) -> str | None:
    """The fault of a name, as a sentence; None if there is none."""
    try:
        if use is Use.INSTANCE:
            owner, _, name = path.rpartition(".")
            functions = (value for value in vars(resolve(owner)).values() if inspect.isfunction(value))
            return None if any(name in function.__code__.co_names for function in functions) else "is missing"
        found = resolve(path)
    except (ImportError, AttributeError):
        return "is missing"
    if parameters is None:
        return None
    known = [name for name in parameters.split(", ") if name]
    actual = list(inspect.signature(found).parameters)
    return None if actual[: len(known)] == known else f"takes ({', '.join(actual)}) instead of ({parameters}, …)"
