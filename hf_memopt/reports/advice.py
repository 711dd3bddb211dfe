"""Advice on memory that ran out, when, why, and what to change, from a run's folder, a log or a pasted error.

For the folder of a run that did not run out of memory: what makes it slow.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.files import check_links, is_there, read_bytes
from hf_memopt.levers import changes
from hf_memopt.levers.facts import Facts
from hf_memopt.monitor.growth import ADVICE
from hf_memopt.oom.causes import LATER_CHANGES, Failure, explain
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose_text
from hf_memopt.oom.figures import parse_figures
from hf_memopt.oom.log_failure import find_failure
from hf_memopt.redaction import redact_text
from hf_memopt.reports.log import read_log
from hf_memopt.reports.next_steps import why_slow
from hf_memopt.reports.run import LOG, OOM, REPORT_FILE, read_oom_report, read_run
from hf_memopt.terminal import plain

LARGEST_TEXT = 16 * 2**20  # bytes read from the end of a log: some 150,000 lines
_LONGEST_MESSAGE = 500  # characters
SLOW = "slow"  # Advice.what of a run that did not run out of memory
_BOTTLENECKS = {
    "data": "it fits, but waits for its data",
    "disk": "it fits, but waits for the disk its data is on",
    "device": "it fits, but leaves its device idle",
}
_MOST_LOGS = 8  # log files read in a folder, the newest


@dataclass(frozen=True)
class Advice:
    """The facts of a failure, or of a slow run.

    Attributes:
        what: whose memory ran out (oom.classify.OomKind), or SLOW.
        cause: the same as a sentence.
        stage: load, forward, backward, generate, optimizer, eval, save or resume; None where the text shows none.
        step: optimizer steps done before; None where the text does not show it.
        why: the likely reason.
        changes: dicts of `change`, and of `saved_bytes` where that was predicted.
        message: the line that reports the failure.
        figures: the bytes that the message names.
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
        """The advice as one JSON object."""
        return asdict(self)


def advise(source: str) -> Advice | None:
    """Advice from a folder, a log file or a text; None where it shows neither a failure of memory nor a slow run.

    Args:
        source: a run's folder, a file, or the text itself.

    Raises:
        InputError: a folder that no run wrote to, or a file that cannot be read.
    """
    path = _as_path(source)
    if path is None:
        return advise_on_text(source)
    if path.is_dir():
        # From oom_report.json; else from recovered failures; else from the newest log; else on a slow run.
        logs = [log for ending in ("log", "out", "err") for log in path.glob(f"*.{ending}") if log.is_file()]
        check_links(path, {REPORT_FILE, LOG, OOM, *(log.name for log in logs)})
        if ended := read_oom_report(path):
            return _advise_on_report(ended)
        events = read_log(path / LOG)[1].to_list() if is_there(path / LOG) else []
        for event in reversed(events):
            if event["event"] in ("oom_recovered", "memory_grows", "micro_batch_lowered"):
                return _advise_on_event(event)
        for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True)[:_MOST_LOGS]:
            if advice := advise_on_text(_read_end(log)):
                return advice
        if any(is_there(path / name) for name in (LOG, REPORT_FILE)):
            run = read_run(path)
            if (slow := why_slow(run)) is None:
                return None
            step = run.readings[-1]["step"] if run.readings else None
            return Advice(SLOW, _BOTTLENECKS[slow.cause], "training", step, slow.why, _unpredicted(slow.changes), "")
        if not logs:
            raise InputError(
                f"{path} has none of {OOM}, {LOG}, {REPORT_FILE} and *.log: give the run's output_dir, or its log"
            )
        return None
    return advise_on_text(_read_end(path))


def advise_on_text(text: str) -> Advice | None:
    """Advice from a log or a pasted error; None where neither shows a failure of memory."""
    failure = find_failure(text)
    if failure is None:
        return None
    diagnosis, (why, usual) = failure.diagnosis, explain(failure)
    return Advice(
        str(diagnosis.kind),
        diagnosis.cause.partition(": ")[0],
        failure.stage,
        failure.step,
        why,
        _unpredicted(usual),
        _quote(diagnosis.message),
        dict(failure.figures),
    )


def _quote(message: str) -> str:
    """A foreign message, safe to print: shortened, without secrets and control characters."""
    return redact_text(plain(message[: 2 * _LONGEST_MESSAGE]))[:_LONGEST_MESSAGE]


def _as_path(source: str) -> Path | None:
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
    except RuntimeError:  # `~name` of an unknown user
        pass
    except (OSError, ValueError):  # too long for a file name, so it is text
        return None
    if "\n" not in source and len(source.split()) == 1:
        raise InputError(
            f"{source}: no such folder or file; to give the error itself, paste it whole or pipe it in: "
            "hf-memopt advise -"
        )
    return None


def _read_end(path: Path) -> str:
    return decode_log(read_bytes(path, LARGEST_TEXT, tail=True))


def decode_log(content: bytes) -> str:
    """A log as text, whatever its encoding, with each state of a progress bar on its own line."""
    return content.decode("utf-8", errors="replace").replace("\r", "\n")


def _advise_on_report(report: dict[str, Any]) -> Advice:
    stage, step, message = report.get("stage"), report.get("step"), report.get("message", "")
    diagnosis = Diagnosis(OomKind(report.get("kind", "device")), True, report.get("cause", ""), message)
    figures = parse_figures(message)
    why, usual = explain(Failure(diagnosis=diagnosis, stage=stage, step=step, figures=figures))
    why = report.get("reason") or why  # the trainer knew whether memory grew, and whether this batch was the largest
    named = [{"saved_bytes": None, **change} for change in report.get("next", ()) if change.get("change")]
    proposed = named or _unpredicted(usual)
    return Advice(str(diagnosis.kind), diagnosis.cause, stage, step, why, proposed[:3], _quote(message), figures)


def _advise_on_event(event: dict[str, Any]) -> Advice:
    if event["event"] == "memory_grows":
        label = event.get("label", "")
        return Advice(
            "device",
            f"memory grows: {label}",
            "training",
            event.get("step"),
            ADVICE.get(label, ""),
            _unpredicted(changes.advice(Facts(), LATER_CHANGES)),
            "",
        )
    message = event.get("message", "")
    diagnosis = diagnose_text(message)
    cause = diagnosis.cause or f"{event['event'].replace('_', ' ')}, and the run continued"
    stage, step, figures = event.get("stage"), event.get("step"), parse_figures(message)
    why, usual = explain(Failure(diagnosis=diagnosis, stage=stage, step=step, figures=figures))
    if after := event.get("micro_batch_after"):
        usual = [
            f"per_device_train_batch_size={after}, with more gradient_accumulation_steps: fits from the start",
            *usual,
        ]
    return Advice(str(diagnosis.kind), cause, stage, step, why, _unpredicted(usual), _quote(message), figures)


def _unpredicted(texts: list[str]) -> list[dict[str, Any]]:
    return [{"change": text, "saved_bytes": None} for text in texts[:3]]
