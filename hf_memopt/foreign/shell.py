"""Shell text as simple commands: words with their places and the variables that are exported; nothing is run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hf_memopt.errors import InputError, brief

_SUBSTITUTION = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # parentheses to the third level
_TOKEN = re.compile(
    rf"""(?P<space>(?:[ \t\r]|\\\r?\n)+)
    |(?P<comment>\#[^\n]*)
    |(?P<document><<-?[ \t]*['"]?(?P<mark>\w+)['"]?)
    |(?P<redirection>(?:\d*(?:>>|>\||>&|<&|<<<|[<>])|&>>?)[ \t]*)
    |(?P<end>\n|;;?|&&?|\|[|&]?|[()])
    |(?P<word>(?:{_SUBSTITUTION}|\$\{{[^}}]*\}}|`[^`]*`|\\.|'[^']*'|"(?:{_SUBSTITUTION}|\\.|[^"\\])*"|[^\s;&|<>()'"\\])+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PIECE = re.compile(
    rf"""'([^']*)'|"((?:{_SUBSTITUTION}|\\.|[^"\\])*)"|\\(.)|({_SUBSTITUTION}|\$\{{[^}}]*\}}|\$\w+|.)""", re.S
)
_SUM = re.compile(r"\$\((?:expr\s+|\(\s*)([\w${}]+)\s*(\\?[-+*/])\s*([\w${}]+)\s*\)?\)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_ARGUMENTS = re.compile(r"""(["']?)\$(?:[@*]|\{[@*]\})\1""")  # of the script, which are none
_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')


@dataclass(frozen=True)
class Word:
    """A word of a command, and the text from `start` to `end` that it stands for."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Simple:
    """A simple command: its words, and the variables that it sees."""

    words: list[Word]
    environment: dict[str, str]


def simple_commands(text: str) -> Iterator[Simple]:
    """The simple commands of a text, in order, as a shell makes them of it: without redirections and comments.

    Raises:
        InputError: a quote that is not closed.
    """
    variables: dict[str, str | list[str]] = {}
    exported: set[str] = set()
    for raw in _raw_commands(text):
        own: dict[str, str] = {}
        while raw and (assignment := _ASSIGNMENT.fullmatch(raw[0].text)):
            name, more, value = assignment.groups()
            before = own.get(name) or variables.get(name, "") if more else ""
            if value.startswith("(") and more != "+":
                within = [word.text for line in _raw_commands(value.strip("()")) for word in line]
                variables[name] = [word for part in within for word in _expanded(part, variables)]
            else:
                own[name] = f"{before}{' '.join(_expanded(value, variables | own, split=False))}"
            raw = raw[1:]
        if not raw:
            variables |= own
            continue
        words = [Word(text, word.start, word.end) for word in raw for text in _expanded(word.text, variables)]
        name, *rest = [word.text for word in words] or [""]
        if name in ("export", "unset"):
            pairs = [word.partition("=") for word in rest]
            variables |= {key: value for key, equals, value in pairs if equals}
            names = {key for key, _, _ in pairs}
            exported = exported | names if name == "export" else exported - names
        else:
            seen = {key: value for key, value in variables.items() if key in exported and isinstance(value, str)}
            yield Simple(words, seen | own)


def _raw_commands(text: str) -> Iterator[list[Word]]:
    """Words of each simple command as they are written."""
    words: list[Word] = []
    at, documents, target = 0, [], False
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            line = text[at:].splitlines()[0]
            raise InputError(f"{brief(line)} is not readable as a command: a quote or a bracket is not closed")
        start, at = at, match.end()
        if match["document"]:
            documents.append(match["mark"])
        elif match["redirection"] and text[at : at + 1] == "(":
            raise InputError(f"{brief(text[start:].splitlines()[0])}: no command is run: write a file in its place")
        elif match["word"] and not target:
            if match["word"].endswith("=") and text[at : at + 1] == "(":  # NAME=(…), an array
                at = text.find(")", at) + 1 or len(text)
            words.append(Word(text[start:at], start, at))
        elif match["end"]:
            yield words
            words = []
            while match["end"] == "\n" and documents:
                body = re.compile(rf"^\s*{documents.pop(0)}[ \t]*$", re.MULTILINE).search(text, at)
                at = body.end() if body else len(text)
        target = bool(match["redirection"])
    yield words


def _expanded(raw: str, variables: dict[str, str | list[str]], split: bool = True) -> list[str]:
    """The words that a word becomes: quotes removed, variables of the script and sums of them replaced.

    A variable that the script does not set stays as it is written.
    """
    if _ARGUMENTS.fullmatch(raw):
        return []
    if (array := _ARRAY.fullmatch(raw)) and isinstance(values := variables.get(array[1]), list):
        return values
    fields, quoted = [""], False
    for single, double, escaped, plain in (match.groups() for match in _PIECE.finditer(raw)):
        quoted = quoted or plain is None
        if plain is None:
            inner = re.sub(r'\\(["\\$`])', r"\1", _value(double, variables)) if double is not None else None
            fields[-1] += next(part for part in (single, inner, escaped) if part is not None)
        elif (value := _value(plain, variables)) == plain or not split:
            fields[-1] += value
        else:
            first, *others = re.split(r"\s+", value)
            fields[-1] += first
            fields += others
    return [field for field in fields if field or quoted]


def _value(text: str, variables: dict[str, str | list[str]]) -> str:
    """A text with its variables, and the sums of two of them, replaced."""

    def variable(match: re.Match[str]) -> str:
        value = variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])
        return value if isinstance(value, str) else match[0]

    def total(match: re.Match[str]) -> str:
        left, right = (_VARIABLE.sub(variable, _named(match[side])) for side in (1, 3))
        if not (left.isdecimal() and right.isdecimal() and int(right)):
            return match[0]
        operator = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[match[2][-1]]
        return str(operator(int(left), int(right)))

    return _VARIABLE.sub(variable, _SUM.sub(total, text))


def _named(text: str) -> str:
    """A variable's name within $((…)), which needs no $."""
    return f"${text}" if re.match(r"[A-Za-z_]", text) else text
