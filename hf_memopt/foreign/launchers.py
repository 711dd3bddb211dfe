"""What stands before a program on a command line, and how many processes it starts."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.errors import InputError, brief
from hf_memopt.foreign.shell import Word
from hf_memopt.hardware.allocator import SPELLINGS
from hf_memopt.yaml_values import read_yaml

# Program that runs the command after it -> its options that have a value, each in a word of its own.
PREFIXES = {
    **dict.fromkeys(("then", "do", "else", "if", "!", "{", "time", "exec", "command", "nohup", "setsid"), ""),
    **{"sudo": "-u -g", "env": "-u -C", "nice": "-n", "ionice": "-c -n -p", "stdbuf": "-i -o -e", "timeout": "-k -s"},
    "numactl": "-m -N -C --cpunodebind --membind",
    "uv run": "--with --extra --group --python -p --project --directory --package --index",
    "uvx": "--with --from --python -p --index",
    "poetry run": "-C -P",
    "pdm run": "-p",
    "pixi run": "-e --environment",
    "conda run": "-n -p --name --prefix",
}
POSITIONALS = {"timeout": 1}  # words that a prefix takes itself
# Launcher -> its options without a value, and those with one (torch.distributed.run, deepspeed.launcher.runner). Of
# accelerate.commands.launch, engine_of_launch() knows those with one.
LAUNCHERS = {
    "accelerate": (
        "-h -q -m --quiet --cpu --debug --downcast_bf16 --dynamo_use_dynamic --dynamo_use_fullgraph "
        "--dynamo_use_regional_compilation --enable_cpu_affinity --fp8_use_autocast_during_eval --module --multi_gpu "
        "--no_python --no_tpu_cluster --same_network --tpu --tpu_cluster --tpu_use_sudo --use_deepspeed --use_fsdp "
        "--use_megatron_lm --use_parallelism_config",
        "",
    ),
    "torchrun": (
        "-m --module --no_python --run_path --standalone --virtual_local_rank",
        "--nnodes --nproc_per_node --rdzv_backend --rdzv_endpoint --rdzv_id --rdzv_conf --max_restarts "
        "--monitor_interval --start_method --event_log_handler --role --log_dir -r --redirects -t --tee "
        "--local_ranks_filter --node_rank --master_addr --master_port --local_addr --logs_specs --numa_binding",
    ),
    "deepspeed": (
        "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid --bind_cores_to_rank",
        "-i --include --num_nodes --num_gpus --num_accelerators --master_port --master_addr --node_rank --launcher "
        "--launcher_args --enable_each_rank_log --bind_core_list --ssh_port --venv_script",
    ),
    "python": ("-m -u -O -OO -B -I -s -S -E -P -q -v", "-W -X"),
}


@dataclass(frozen=True)
class Launch:
    """How the processes of a training command start.

    Attributes:
        by: accelerate, torchrun, deepspeed or python; or the tool that starts them itself.
        options: of the launcher.
    """

    by: str
    options: dict[str, Any] = field(default_factory=dict)


def take_options(words: Sequence[Word], has_value: Callable[[str], bool]) -> tuple[dict[str, Any], Sequence[Word]]:
    """The options before the first other word, and the words from there.

    Args:
        has_value: True of an option that takes the word after it.
    """
    options: dict[str, Any] = {}
    while words and words[0].text.startswith("-"):
        name, equals, value = words[0].text.partition("=")
        name = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
        if equals and not has_value(name):
            break  # an option that is not known here
        words = words[1:]
        if name == "--":
            break
        if not equals and has_value(name):
            value, words = words[0].text if words else "", words[1:]
        options[name.lstrip("-")] = argument_value(value) if equals or has_value(name) else True
    return options, words


def argument_value(word: str) -> Any:
    """A value as YAML reads it; what is not YAML stays a text, and 1:2, which YAML 1.1 reads to base 60."""
    if re.fullmatch(r"\d+(:\d+)+", word):
        return word
    try:
        return read_yaml(word, "value")
    except InputError:
        return word


def launcher_options(launcher: str, words: Sequence[Word]) -> tuple[dict[str, Any], Sequence[Word]]:
    """The options of a launcher, and the words after them."""
    switches = LAUNCHERS[launcher][0].split()
    return take_options(words, lambda name: name not in switches and (name.startswith("--") or len(name) == 2))


# Modules that are launchers.
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}


def is_launcher(word: str) -> bool:
    """True if a command's first word starts a script rather than being one."""
    return _program(word) in LAUNCHERS


def split_launch(words: Sequence[str]) -> tuple[Launch | None, list[str], list[str]]:
    """The launcher of a command, its own words, and those from the script on; None where the script stands alone.

    Raises:
        InputError: a launcher without a script.
    """
    if not is_launcher(words[0]):
        return None, [], list(words)
    by, rest = _program(words[0]), list(words[1:])
    if by == "python" and len(rest) > 1 and rest[0] == "-m":
        by, rest = MODULES.get(rest[1], by).partition(" ")[0], rest[2:]
    elif by == "accelerate" and rest[:1] == ["launch"]:
        rest = rest[1:]
    options, after = launcher_options(by, [Word(word, 0, 0) for word in rest])
    if not after:
        raise InputError(f"{' '.join(words)}: names no script")
    return Launch(by, options), rest[: len(rest) - len(after)], [word.text for word in after]


def _program(word: str) -> str:
    return re.sub(r"^python[\d.]*$", "python", word.rpartition("/")[2])


def refuse_unknown(launch: Launch) -> None:
    """Refuse an option of a launcher that may say how many processes it starts.

    Raises:
        InputError: one that is not known.
    """
    switches, valued = LAUNCHERS.get(launch.by, ("", ""))
    known = {name.lstrip("-") for name in f"{switches} {valued}".split()}
    if valued and (unknown := next(iter(launch.options.keys() - known), None)):
        raise InputError(f"{launch.by}: {unknown}={brief(launch.options[unknown])}: this option is not modelled")


def count_processes(launch: Launch, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """The processes of a launch, None where all devices that there are have one; and its nodes if not counted in that.

    Raises:
        InputError: an elastic launch, or one that is not modelled.
    """
    visible, options = visible_devices(environment), launch.options
    counts = {
        "accelerate": _accelerate,
        "torchrun": _torchrun,
        "deepspeed": _deepspeed,
        "LLaMA-Factory": _llama_factory,
        "ms-swift": _swift,
        "torchtune": _torchrun if options else lambda *_: ((1 if visible else None), ""),
    }
    return counts.get(launch.by, _python)(options, environment, visible)


def visible_devices(environment: Mapping[str, str]) -> int | None:
    """The devices that CUDA_VISIBLE_DEVICES leaves; None where it does not say.

    Raises:
        InputError: it leaves none.
    """
    names = next((environment[name] for name in _VISIBLE if name in environment), None)
    if names is None or "$" in names:
        return None
    if names.strip() in ("", "-1"):
        raise InputError(f"CUDA_VISIBLE_DEVICES={names} leaves no device to train on")
    return len(names.strip(" ,").split(","))


ON = ("true", "y", "1")  # of a variable, as LLaMA-Factory reads it
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Variables that count_processes() answers, the last two of LLaMA-Factory and ms-swift.
COUNTED = (*_VISIBLE, "NNODES", "NPROC_PER_NODE", "FORCE_TORCHRUN")
_Count = tuple[int | None, str]


def _whole(name: str, value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f"{name}={brief(value)} is no number of {'nodes' if 'nodes' in name.lower() else 'processes'}: write it"
        )
    return value


def _times(nodes: Any, name: str, each: int | None) -> _Count:
    """Processes of all nodes, where both are known."""
    if "$" in str(nodes) or (each is None and nodes not in (1, "1")):
        return each, str(nodes)
    return (each * _whole(name, nodes) if each else None), ""


def _accelerate(options: Mapping[str, Any], _: Mapping[str, str], visible: int | None) -> _Count:
    if (processes := options.get("num_processes")) is not None:
        return _whole("num_processes", processes), ""  # of all machines
    if options.get("gpu_ids") not in (None, "all") and "config_file" not in options:
        raise InputError(
            f"gpu_ids={brief(options['gpu_ids'])}: without --num_processes accelerate launch starts one for each "
            "device of the machine, whatever --gpu_ids says: pass --num_processes"
        )
    return visible, ""


def _torchrun(options: Mapping[str, Any], _: Mapping[str, str], visible: int | None) -> _Count:
    nodes = options.get("nnodes", 1)
    if ":" in str(nodes):
        raise InputError(f"nnodes={nodes}: an elastic launch has no number of devices: write how many nodes train")
    each = options.get("nproc_per_node", 1)
    return _times(nodes, "nnodes", visible if each in ("gpu", "auto") else _whole("nproc_per_node", each))


def _deepspeed(options: Mapping[str, Any], _: Mapping[str, str], visible: int | None) -> _Count:
    if include := str(options.get("include", options.get("i", ""))):
        hosts = [host.partition(":")[2] for host in include.split("@")]
        if not all(hosts):
            raise InputError(f"include={include} names no devices: write HOST:0,1")
        return sum(len(devices.split(",")) for devices in hosts), ""
    each = options.get("num_gpus", options.get("num_accelerators", visible))
    return _times(options.get("num_nodes", 1), "num_nodes", _whole("num_gpus", each) if each else None)


def _llama_factory(_: Mapping[str, Any], environment: Mapping[str, str], visible: int | None) -> _Count:
    """src/llamafactory/launcher.py: torchrun where it is forced, or where there are several devices."""
    if "RDZV_ID" in environment and "MIN_NNODES" in environment:
        raise InputError("MIN_NNODES: an elastic launch has no number of devices: write NNODES")
    forced = environment.get("FORCE_TORCHRUN", "0").lower() in ON
    if visible == 1 and not forced:
        return 1, ""
    each = environment.get("NPROC_PER_NODE", visible)
    return _times(environment.get("NNODES", 1), "NNODES", _whole("NPROC_PER_NODE", each) if each else None)


def _swift(_: Mapping[str, Any], environment: Mapping[str, str], visible: int | None) -> _Count:
    """swift/cli/main.py: torchrun where either variable is there."""
    if {"NPROC_PER_NODE", "NNODES"} & environment.keys():
        options = {"nproc_per_node": environment.get("NPROC_PER_NODE", 1), "nnodes": environment.get("NNODES", 1)}
        return _torchrun(options, environment, visible)
    return (1 if visible else None), ""


def _python(_: Mapping[str, Any], __: Mapping[str, str], visible: int | None) -> _Count:
    if visible and visible > 1:
        raise InputError(
            f"CUDA_VISIBLE_DEVICES leaves {visible} devices to one process, which a Trainer splits batches among "
            "(torch.nn.DataParallel): not modelled: start one for each with accelerate launch or torchrun"
        )
    return visible, ""


def allocator_setting(environment: Mapping[str, str]) -> tuple[bool | None, str]:
    """Whether segments expand, None where it is not said; and the allocator's other settings."""
    text = next((environment[name] for name in SPELLINGS if environment.get(name)), "")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    expandable = [part for part in parts if part.startswith("expandable_segments:")]
    others = ",".join(part for part in parts if part not in expandable)
    return (expandable[-1].partition(":")[2].strip().lower() == "true" if expandable else None), others
