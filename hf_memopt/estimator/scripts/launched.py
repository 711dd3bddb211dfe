"""A script's process as its launcher would have started it: environment, rank 0 of all, a fake process group.

accelerate is asked for its environment: its own launch_command() reads files and options, and is stopped where it
would start processes.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

from hf_memopt.errors import InputError, as_input_error, one_line
from hf_memopt.estimator.patches.fake_cluster import fake_accelerator, process_group, rank_variables
from hf_memopt.estimator.private_names import Part
from hf_memopt.foreign.launchers import Launch, count_processes
from hf_memopt.hardware.catalog import DEVICES_PER_HOST


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What a launcher does for each process.

    Attributes:
        processes: that train together.
        environment: beside this process's own.
    """

    processes: int
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of rank 0."""
        if self.processes == 1:
            return dict(self.environment)
        return {**self.environment, **rank_variables(self.processes, 0, min(self.processes, DEVICES_PER_HOST))}


class _Starting(BaseException):
    """accelerate starts its processes; carries their environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.environment = dict(environment)


@dataclass(frozen=True)
class ScriptCommand:
    """A script and what starts it.

    Attributes:
        script, arguments: as its users write them.
        launch: of the command; None where the script stands alone.
        words: the launcher's own.
        devices: that the user named beside the command.
    """

    script: str
    arguments: Sequence[str] = ()
    launch: Launch | None = None
    words: Sequence[str] = ()
    devices: int | None = None


def read_launched(command: ScriptCommand) -> Launched:
    """What starts for a command.

    Raises:
        InputError: a command that the launcher refuses, or that starts another number of processes than the devices
            that the user named.
    """
    launch, devices = command.launch, command.devices
    if launch is None or launch.by == "python":
        return Launched(processes=devices or 1)
    if launch.by == "accelerate":
        launched = _by_accelerate([*command.words, command.script], devices)
    else:
        count, nodes = count_processes(launch, {})  # the variables of this machine say nothing of that one's
        if nodes:
            raise InputError(f"{launch.by}: {nodes} nodes of an unknown number of devices: name both")
        launched = Launched(processes=count or devices or 1)
    if devices not in (None, 1, launched.processes):
        raise InputError(
            f"{launch.by} starts {launched.processes} process(es), and --hardware or --world-size say {devices}: "
            "leave one of the two out"
        )
    return launched


_POPEN = Part.LAUNCH.replaces(
    "accelerate.commands.launch:subprocess",
    why="a script of one process is started by Popen, whose environment is what a dry run needs",
    until="accelerate tells the environment of a launch without starting it",
)
_ELASTIC = Part.LAUNCH.replaces(
    "torch.distributed.run:run(args)",
    why="starts a script's processes, in the environment that a dry run needs",
    until="accelerate tells the environment of a launch without starting it",
)
_PORT = Part.LAUNCH.replaces(
    "accelerate.utils.launch:is_port_in_use(port)",
    why="opens a socket, which a confined process cannot",
    until="accelerate tells the environment of a launch without starting it",
)


def _by_accelerate(words: Sequence[str], devices: int | None) -> Launched:
    from accelerate.commands import launch as command

    def start(*args, env=None, **kwargs):
        raise _Starting(os.environ if env is None else env)

    with as_input_error("accelerate launch", ValueError, TypeError, KeyError, OSError, ImportError):
        try:
            args = command.launch_command_parser().parse_args([*words])
        except SystemExit as end:  # argparse has said why
            raise InputError(f"accelerate launch {' '.join(words)} is refused by its own parser") from end
        if devices and args.num_processes is None and args.config_file is None:
            args.num_processes = devices
        before = dict(os.environ)
        with (
            _POPEN.replaced(subprocess=SimpleNamespace(Popen=start)),
            _ELASTIC.replaced(run=start),
            _PORT.replaced(is_port_in_use=lambda port=None: False),
            mock.patch.object(command.logger, "warning", lambda *said, **how: None),
        ):
            try:
                command.launch_command(args)
            except _Starting as starting:
                changed = {name: value for name, value in starting.environment.items() if before.get(name) != value}
                return Launched(processes=args.num_processes or 1, environment=changed)
            except SystemExit as end:
                raise InputError(f"accelerate launch {' '.join(words)}: {one_line(end)}") from end
    raise InputError(f"accelerate launch {' '.join(words)} starts no process")


@contextlib.contextmanager
def as_launched(launched: Launched) -> Iterator[None]:
    """Be rank 0 of the processes: libraries find their variables, and a process group whose collectives do nothing."""
    several = launched.processes > 1
    with (
        mock.patch.dict(os.environ, launched.variables),
        process_group(launched.processes, rank=0) if several else contextlib.nullcontext(),
        fake_accelerator() if several else contextlib.nullcontext(),
    ):
        yield
