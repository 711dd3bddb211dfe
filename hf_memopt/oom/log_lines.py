"""A log's lines as the program wrote them, without what launchers, containers and terminals put around them."""

import re
from dataclasses import dataclass

from hf_memopt.files import parse_json
from hf_memopt.terminal import plain

_LONGEST_JSON = 2**16  # characters of a line that is read as a JSON record
_MESSAGE_KEYS = ("log", "message", "msg", "textPayload", "text", "line")
# Each is taken off at most a few times: a scheduler's time stamp before a container's before the launcher's rank.
_PREFIX = re.compile(
    r"""\s{0,40}(?:
        \[(?:rank|default)(?P<rank>\d{1,6})\]:\s?                              # torch, torchrun --tee
      | \[\d{1,4},(?P<mpi>\d{1,6})\]<std(?:out|err)>:\s?                       # mpirun --tag-output
      | (?P<srun>\d{1,5}):\s(?=\s|Traceback|torch|\w{1,60}Error)               # srun --label
      | \((?P<ray>[\w.:]{1,60}\spid=\d{1,9})[^)]{0,60}\)\s?                    # Ray
      | (?P<service>[\w.-]{1,60})\s{1,20}\|\s                                  # docker compose
      | (?:INFO|ERROR|WARNING|DEBUG|CRITICAL)\s\d\d-\d\d\s[\d:]{8}\s\[[\w.]{1,60}:\d{1,6}\]\s?  # vLLM
      | \[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?(?:\s-)?\s?  # ISO 8601
      | \[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?\s
      | std(?:out|err)\s[FP]\s                                                 # Kubernetes (CRI)
    )""",
    re.VERBOSE,
)
_MOST_PREFIXES = 5


@dataclass(frozen=True)
class Line:
    """One line of a log.

    Attributes:
        text: what the program wrote, without its indentation.
        source: the rank, process or service that the launcher names; "" where it names none.
    """

    text: str
    source: str


def read_lines(text: str) -> list[Line]:
    """The lines of a log: plain text, each state of a progress bar on its own, JSON records unpacked."""
    return [_without_prefixes(part) for raw in re.split(r"[\r\n]", text) if raw.strip() for part in _unpacked(raw)]


def _unpacked(line: str) -> list[str]:
    """The lines that a JSON record, or a text with escaped line ends, holds."""
    if len(line) <= _LONGEST_JSON and (begin := line.find("{")) >= 0 and line.rstrip().endswith("}"):
        try:
            record = parse_json(line[begin:].strip())
        except ValueError:
            record = None
        if isinstance(record, dict):
            texts = [value for key in _MESSAGE_KEYS if isinstance(value := record.get(key), str)]
            if texts:
                source = str(record.get("rank", ""))
                prefix = f"[rank{source}]: " if source.isdigit() else ""
                return [prefix + part for part in re.split(r"[\r\n]", texts[0]) if part.strip()]
    if r"\n" in line and "File " in line:
        return line.replace(r"\"", '"').replace(r"\r", "").split(r"\n")
    return [line]


def _without_prefixes(line: str) -> Line:
    line, source = plain(line), ""
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(line)
        if match is None:
            break
        source = next(filter(None, match.groups()), source)
        line = line[match.end() :]
    return Line(line.strip(), source)
