"""Out of memory: what ran out, when, why, and what to change; from a run's folder, a log, or a pasted error.

Of a folder of a run that did not run out: what holds it up.
"""

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.files import is_there, read_bytes
from hf_memopt.levers import changes
from hf_memopt.levers.changes import JobFacts
from hf_memopt.monitor.growth import ADVICE
from hf_memopt.oom.causes import LATER_CHANGES, Failure, explain, parse_figures
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose_text
from hf_memopt.redaction import redact_text
from hf_memopt.reports.log import read_log
from hf_memopt.reports.run import LOG, OOM, REPORT_FILE, read_oom_report, read_run
from hf_memopt.reports.slow import why_slow
from hf_memopt.terminal import plain

LARGEST_TEXT = 16 * 2**20  # bytes that are read of a log, its end: some 150,000 lines
_LARGEST_TRACEBACK = 2**20  # characters that are searched for the place of the failure
_LONGEST_MESSAGE = 500  # characters
SLOW = "slow"  # an Advice's `what` where memory sufficed
_HOLDS_UP = {
    "data": "it fits, and waits for its data",
    "disk": "it fits, and waits for the disk that its data are on",
    "device": "it fits, and leaves its device idle",
}
_MOST_LOGS = 8  # of a folder that are read, the newest

# Traceback frames and messages -> where a run was. The innermost that is known counts, so the last match in the text.
_STAGES = [
    ("load", r"in from_pretrained|_load_pretrained_model|in load_checkpoint|model\.to\(|in _move_model_to_device"),
    ("resume", r"in _load_from_checkpoint|in _load_optimizer_and_scheduler|in load_state_dict"),
    ("eval", r"in evaluation_loop|in evaluate\b|in prediction_step|in nested_concat|stage.{0,4}eval"),
    ("save", r"in _save_checkpoint|in save_model|in _save_optimizer_and_scheduler|in save_pretrained"),
    (
        "optimizer",
        # Gaps are bounded here and below, so that a line's length costs linear time.
        r"in _init_group|in _multi_tensor_adam|optim(izer)?\.py.{0,99}in step|in optimizer_update|"
        r"initialize_optimizer",
    ),
    ("backward", r"in backward\b|run_backward|autograd/__init__"),
    ("forward", r"in forward\b|in compute_loss"),
]
# Steps of tqdm's bar, of the Trainer's log, of MemoryTrainer's; of at most 12 digits.
_STEP = re.compile(
    r"\|\s{0,20}(\d{1,12})/\d{1,12} \[|[\"']step[\"']: (\d{1,12})\b|out of memory in \w{1,20} of step (\d{1,12})\b"
    r"|(?:^|\s)step (\d{1,12}):"
)
_GROWTH = re.compile(rf"memory grows: ({'|'.join(ADVICE)})")


@dataclass(frozen=True)
class Advice:
    """What is known of a failure, or of a slow run.

    Attributes:
        what: whose memory ran out (oom.classify.OomKind), or SLOW, and, in words, what that means.
        stage: load, forward, backward, optimizer, eval, save or resume; None where the text does not tell.
        step: optimizer steps that had been done; None where the text does not tell.
        why: the likely cause.
        changes: dicts with `change`, and `saved_bytes` where it was predicted.
        figures: bytes that the message names.
        message: the failure's own line.
    """

    what: str
    cause: str
    stage: str | None
    step: int | None
    why: str
    changes: list[dict[str, Any]]
    message: str
    figures: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As one JSON object."""
        return asdict(self)


def advise(source: str) -> Advice | None:
    """What a folder, a log file or a text tells; None where it tells of no failure of memory, and of no slow run.

    Args:
        source: a run's folder, a file, or the text itself.

    Raises:
        InputError: a folder without anything that a run writes, or a file that cannot be read.
    """
    path = _as_path(source)
    if path is None:
        return advise_on_text(source)
    if path.is_dir():
        return _of_folder(path)
    return advise_on_text(_end_of(path))


def advise_on_text(text: str) -> Advice | None:
    """What a log or a pasted error tells."""
    found = diagnose_text(text)
    if not found.cause:
        return None
    figures = parse_figures(text)
    stage, step = _stage(text), _step(text)
    grown = _GROWTH.findall(text)  # the monitor has named it before
    why, usual = explain(
        Failure(diagnosis=found, stage=stage, step=step, figures=figures, grown=grown[-1] if grown else None)
    )
    return Advice(str(found.kind), found.cause, stage, step, why, _unpredicted(usual), _quoted(found.message), figures)


def _quoted(message: str) -> str:
    """A message of others, as it may be printed."""
    return redact_text(plain(message[: 2 * _LONGEST_MESSAGE]))[:_LONGEST_MESSAGE]


def _as_path(source: str) -> Path | None:
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
    except RuntimeError:  # `~name` of nobody here
        pass
    except (OSError, ValueError):  # too long for a file's name, so a text
        return None
    if "\n" not in source and len(source.split()) == 1:
        raise InputError(
            f"{source}: no such folder or file; to give the error itself, paste it whole or pipe it in: "
            "hf-memopt advise -"
        )
    return None


def _end_of(path: Path) -> str:
    return decode_log(read_bytes(path, LARGEST_TEXT, tail=True))


def decode_log(content: bytes) -> str:
    """A log as text: in whatever encoding, with every state of a progress bar on a line of its own."""
    return content.decode("utf-8", errors="replace").replace("\r", "\n")


def _of_folder(folder: Path) -> Advice | None:
    """oom_report.json, which MemoryTrainer writes at the end; else recovered failures; else the newest log; else what
    made the run slow."""
    if ended := read_oom_report(folder):
        return _of_report(ended)
    events = _events(folder)
    if events:
        return _of_event(events[-1])
    logs = [log for ending in ("log", "out", "err") for log in folder.glob(f"*.{ending}") if log.is_file()]
    for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True)[:_MOST_LOGS]:
        if found := advise_on_text(_end_of(log)):
            return found
    if any(is_there(folder / name) for name in (LOG, REPORT_FILE)):
        return _of_slow(folder)
    if not logs:
        raise InputError(
            f"{folder} has none of {OOM}, {LOG}, {REPORT_FILE} and *.log: give the run's output_dir, or its log"
        )
    return None


def _of_slow(folder: Path) -> Advice | None:
    run = read_run(folder)
    slow = why_slow(run)
    if slow is None:
        return None
    step = run.readings[-1]["step"] if run.readings else None
    return Advice(SLOW, _HOLDS_UP[slow.cause], "training", step, slow.why, _unpredicted(slow.changes), "")


def _events(folder: Path) -> list[dict[str, Any]]:
    """Failures that a run recovered from, and growth that it named."""
    log = folder / LOG
    events = read_log(log)[1].to_list() if is_there(log) else []
    return [event for event in events if event["event"] in ("oom_recovered", "memory_grows", "micro_batch_lowered")]


def _of_report(report: dict[str, Any]) -> Advice:
    stage, step, message = report.get("stage"), report.get("step"), report.get("message", "")
    found = Diagnosis(OomKind(report.get("kind", "device")), True, report.get("cause", ""), message)
    figures = parse_figures(found.message)
    why, usual = explain(Failure(diagnosis=found, stage=stage, step=step, figures=figures))
    why = report.get("reason") or why  # the trainer knew more
    proposed = [{"saved_bytes": None, **change} for change in report.get("next", ()) if change.get("change")]
    proposed = proposed or _unpredicted(usual)
    return Advice(str(found.kind), found.cause, stage, step, why, proposed[:3], _quoted(message), figures)


def _of_event(event: dict[str, Any]) -> Advice:
    if event["event"] == "memory_grows":
        label = event.get("label", "")
        return Advice(
            "device",
            f"memory grows: {label}",
            "training",
            event.get("step"),
            ADVICE.get(label, ""),
            _unpredicted(changes.advice(JobFacts(), LATER_CHANGES)),
            "",
        )
    message = event.get("message", "")
    found = diagnose_text(message)
    cause = found.cause or f"{event['event'].replace('_', ' ')}, and the run went on"
    stage, step, figures = event.get("stage"), event.get("step"), parse_figures(message)
    why, usual = explain(Failure(diagnosis=found, stage=stage, step=step, figures=figures))
    if after := event.get("micro_batch_after"):
        usual = [
            f"per_device_train_batch_size={after}, with more gradient_accumulation_steps: it then fits at once",
            *usual,
        ]
    return Advice(str(found.kind), cause, stage, step, why, _unpredicted(usual), _quoted(message), figures)


def _unpredicted(texts: list[str]) -> list[dict[str, Any]]:
    return [{"change": text, "saved_bytes": None} for text in texts[:3]]


def _stage(text: str) -> str | None:
    """Where the last traceback was."""
    start = text.rfind("Traceback (most recent call last)")
    last = text[max(0, start) :][-_LARGEST_TRACEBACK:]
    places = {stage: match.start() for stage, pattern in _STAGES for match in re.finditer(pattern, last)}
    if not places:
        return None
    outer = [stage for stage in ("eval", "save", "load", "resume", "optimizer") if stage in places]
    return outer[0] if outer else max(places, key=places.get)


def _step(text: str) -> int | None:
    steps = [int(next(filter(None, match.groups()))) for match in _STEP.finditer(text) if any(match.groups())]
    return steps[-1] if steps else None
