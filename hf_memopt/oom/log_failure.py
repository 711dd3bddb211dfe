"""The failure of memory in a log: which line reports it, what ran before it, and what only cleaned up after it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_memopt.monitor.growth import ADVICE
from hf_memopt.oom.causes import Failure, guess_job
from hf_memopt.oom.classify import OomKind, Row, diagnosed, find_row
from hf_memopt.oom.failing_frames import find_frame, frame_match, read_frames
from hf_memopt.oom.figures import parse_figures
from hf_memopt.oom.log_lines import Line, read_lines

# Steps in the Trainer's bar, in its log and in MemoryTrainer's messages; at most 12 digits. The Trainer's bar has no
# name before it, unlike those of datasets, of transformers' loading and of downloads, which count no steps.
_BAR = re.compile(
    r"(?P<name>[^|]{0,200}?)\d{1,3}%\|[^|]{0,300}\| {0,20}(?P<done>\d{1,12})/(?P<total>\d{1,12}) "
    r"\[(?P<rate>[^\]]{0,99})"
)
_TRAINING_BAR = re.compile(
    r"\s{0,9}(steps?|train(ing)?|epoch[\s\d/]{0,20}|train(ing)? epoch[\s\d/]{0,20})?:?\s{0,9}", re.IGNORECASE
)
_OTHER_RATE = re.compile(
    r"(?i)(example|sample|doc|row|file|batch|ba|shard|token|[kMG]?i?B)(s|es)?/s|s/(example|sample|file|ba)"
)
_STEP = re.compile(
    r"[\"']step[\"']: (\d{1,12})\b|out of memory in \w{1,20} of step (\d{1,12})\b|^step (\d{1,12}):"
    r"|global_?step[\"']?\s?[:=]\s?(\d{1,12})\b"
)
_LOADING = re.compile(r"Loading (checkpoint shards|weights|safetensors)", re.IGNORECASE)
_GROWTH = re.compile(rf"memory grows: ({'|'.join(ADVICE)})")
_RANKS = re.compile(r"local_rank|\brank\d|world_size|deepspeed|torchrun|elastic|subprocess\.CalledProcessError")
# Of warnings, what FSDP says of a state dict for which there is no memory is the failure itself.
_WARNING = re.compile(
    r"\b(User|Future|Deprecation|Runtime)Warning\b(?!: Failed to clone)|Triggered internally at|\bTip: |\bHint: "
)
# Memory that may run out, and has not.
_HYPOTHETICAL = re.compile(
    r"(?i)\b(avoid\w*|prevent\w*|if|in case of|may|might|could|can|would|potential|risk of|against|reduces?|without|"
    r"handle[sd]?|until|before|whether|when)\b[^.:;]{0,60}\b(out[ -]of[ -]memory|oom)\b"
)
# What ends a run for another reason: the launcher then kills the other ranks.
_OTHER_REASON = re.compile(
    r"^(?!.{0,200}(ChildFailedError|CalledProcessError|DistBackendError|DistNetworkError|BrokenPipeError|EOFError|"
    r"Connection(Reset)?Error|RendezvousConnectionError|Connection (reset|closed)|Broken pipe|remote process exited))"
    r"(\w{1,60}\.){0,9}([A-Z]\w{0,60}(Error|Exception)|KeyboardInterrupt|SystemExit)\b(:|$)"
    r"|^\^C|KeyboardInterrupt|CANCELLED AT|DUE TO (TIME LIMIT|PREEMPTION)|caught collective operation timeout"
    r"|(got|received) signal: (2|15)\b|Received (2|15|SIGTERM|SIGINT) ?(death )?signal|device-side assert"
    r"|Assertion `.{0,200}` failed|Received SIG(TERM|INT)|[Ss]egmentation fault|\bSIGSEGV\b"
    r"|\bexitcode\s{0,9}: -(6|11)\b|failed \(exitcode: (?!-9\b|137\b)-?\d{1,4}\)"
    r"|exits with return code = (?!-9\b|137\b)-?\d"
)
# The launcher ends ranks itself; that is no one's limit.
_CLEANUP = re.compile(r"forcefully exiting via|Unable to shutdown process|Sending process \d{1,9} closing signal")
# Every line that _OTHER_REASON matches has one of these, in lower case.
_REASON_HINTS = (
    *("error", "exception", "interrupt", "exit", "cancelled", "due to", "timeout", "signal", "assert", "sig", "^c"),
    "segmentation",
)
_MOST_KILLED = 64  # processes that are reported last


@dataclass(frozen=True)
class _Fault:
    at: int
    row: Row


@dataclass(frozen=True)
class _Step:
    at: int
    done: int
    total: int | None = None


def find_failure(text: str) -> Failure | None:
    """The failure of memory that ended the run of a log; None where there is none."""
    lines = read_lines(text)
    faults, steps, reason = _scan(lines)
    fault = _decisive(faults, steps, reason)
    if fault is None:
        return None
    diagnosis = diagnosed(fault.row, lines[fault.at].text)
    message = _message(lines, fault.at)
    frames = read_frames(lines, fault.at)
    frame = find_frame(frames, pinned="error: out of memory" in diagnosis.message)
    if frame is not None and frame.pinned:
        diagnosis = replace(diagnosis, kind=OomKind.HOST, smaller_batch_helps=False, cause=frame.why)
    grown = next((found[1] for line in reversed(lines) if (found := _GROWTH.search(line.text))), None)
    stage = fault.row.stage or (frame.stage if frame else _stage_before(lines, fault))
    return Failure(
        diagnosis=diagnosis,
        stage=stage,
        step=_last_step(steps, fault.at, stage),
        grown=grown,
        frame=frame if frame and frame.why else None,
        figures=parse_figures(message),
        job=guess_job(message, frames),
        offloads="offload" in text or "cpu_adam" in text,
        ranks=any(line.source.isdigit() or _RANKS.search(line.text) for line in lines),
    )


def _scan(lines: Sequence[Line]) -> tuple[list[_Fault], list[_Step], int | None]:
    """Failures of memory, training steps, and the first line after the last step that ends a run otherwise."""
    faults: list[_Fault] = []
    steps: list[_Step] = []
    reason, in_code = None, False
    for at, line in enumerate(lines):
        text = line.text
        if (step := _step(at, text)) is not None:
            steps.append(step)
            if reason is not None and _went_on(steps[-2:], reason):
                reason = None
        if frame_match(text):
            in_code = True  # the next line is the frame's source, which may quote a message
            continue
        quoted, in_code = in_code, False
        if (quoted and "Error" not in text.partition(" ")[0]) or _WARNING.search(text) or _CLEANUP.search(text):
            continue
        row = find_row(text)
        if row is not None and not _HYPOTHETICAL.search(text):
            faults.append(_Fault(at, row))
        elif row is None and reason is None and any(hint in text.lower() for hint in _REASON_HINTS):
            reason = at if _OTHER_REASON.search(text) else None
    return faults, steps, reason


def _went_on(steps: Sequence[_Step], at: int) -> bool:
    """True if training went on after a line: by more than the step that another rank still ended, or from anew."""
    before = next((step.done for step in reversed(steps) if step.at <= at), 0)
    return any(step.at > at and not 0 <= step.done - before <= 1 for step in steps)


def _decisive(faults: list[_Fault], steps: Sequence[_Step], reason: int | None) -> _Fault | None:
    """The fault that ended the run: the last that a message reports, else a process that was killed for no other
    reason, else one that the run survived."""
    reported = [fault for fault in faults if not fault.row.indirect]
    # NCCL fails too once torch holds everything.
    own = [fault for fault in reported if fault.row.kind is not OomKind.COMMUNICATION]
    for last in filter(None, (own[-1:], reported[-1:])):
        if not _went_on(steps, last[0].at):
            return last[0]
    killed = [fault for fault in faults if fault.row.indirect][-_MOST_KILLED:]
    killed = [fault for fault in killed if not _went_on(steps, fault.at)]
    if killed and (reason is None or killed[0].at < reason):
        return killed[0]
    return reported[-1] if reported and reason is None and not killed else None


def _message(lines: Sequence[Line], at: int) -> str:
    """The failure's message: its line, and what the same process wrote on the next few, where it is wrapped."""
    parts = [lines[at].text]
    for line in lines[at + 1 : at + 12]:
        if line.source == lines[at].source:
            if frame_match(line.text) or find_row(line.text) or "Traceback (most" in line.text:
                break
            parts.append(line.text)
    return " ".join(parts)


def _stage_before(lines: Sequence[Line], fault: _Fault) -> str | None:
    """The stage that the last progress bar before a fault without frames shows."""
    for line in reversed(lines[: fault.at + 1]):
        if match := _BAR.search(line.text):
            return "load" if match["done"] != match["total"] and _LOADING.search(match["name"]) else None
    return None


def _step(at: int, text: str) -> _Step | None:
    """The training step that a line shows."""
    if "|" in text:
        for bar in reversed(list(_BAR.finditer(text))):
            name = re.split(r"[\]}]", bar["name"])[-1]
            if _TRAINING_BAR.fullmatch(name) and not _OTHER_RATE.search(bar["rate"]):
                return _Step(at, int(bar["done"]), int(bar["total"]))
    found = _STEP.search(text)
    return _Step(at, int(next(filter(None, found.groups())))) if found else None


def _last_step(steps: Sequence[_Step], at: int, stage: str | None) -> int | None:
    """The training step before a line. The bar of an evaluation has no name either, and comes after training's."""
    before = [step for step in steps if step.at <= at]
    if before and stage in ("eval", "generate"):
        before = [step for step in before if step.total != before[-1].total] or before
    return before[-1].done if before else None
