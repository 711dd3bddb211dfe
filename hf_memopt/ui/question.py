"""A question as a form and its share link hold it, and as a command line."""

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from hf_memopt.errors import InputError, brief
from hf_memopt.units import read_number

_AMOUNTS = ("tokens", "price")
CONFIG = "job.yaml"  # the file that a configuration is written to


def read_length(text: str, where: str) -> int | None:
    """A number of tokens as people write it, 2048 or 2k; None of an empty text.

    Args:
        where: begins an error's message.

    Raises:
        InputError: another text, a fraction, or a number that no sample has.
    """
    if not text.strip():
        return None
    tokens = read_number(text, thousand=1024, of="tokens")
    if tokens is None or tokens != int(tokens) or not 0 < tokens < 10**9:
        raise InputError(f"{where}={brief(text)} must be a whole number above 0, as in 2048 or 2k")
    return int(tokens)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A form's question.

    Attributes:
        model: as `estimate` takes it.
        hardware: as `estimate --hardware` takes it.
        method: full, lora or qlora; any, of plans alone.
        seq_len: tokens per sample; None for the preset's.
        tokens, price: to train on, and of a device for an hour, as the command line takes them; empty where not asked.
        settings: KEY=VALUE, as `--set` takes them.
        config: the YAML of another tool, which says model, method and length; no link holds it.
    """

    model: str
    hardware: str = "rtx_4090"
    method: str = "lora"
    seq_len: int | None = None
    tokens: str = ""
    price: str = ""
    settings: tuple[str, ...] = ()
    config: str = ""

    @classmethod
    def from_query(cls, query: str) -> "Question":
        """The question of a share link; what the link leaves out has its default.

        Raises:
            InputError: an unknown field, no model, a length that is no number, or too many fields.
        """
        try:
            pairs = parse_qsl(query.removeprefix("?"), max_num_fields=40)
        except ValueError as error:
            raise InputError("link: more than 40 fields; leave some out") from error
        fields = {name: value for name, value in pairs if name != "set"}
        if unknown := fields.keys() - {"model", "hardware", "method", "seq_len", *_AMOUNTS}:
            raise InputError(
                f"link: {brief(min(unknown))} is not model, hardware, method, seq_len, tokens, price or set"
            )
        if not fields.get("model"):
            raise InputError("link: name the model, as in model=llama-3.1-8b")
        length = read_length(fields.pop("seq_len", None) or "", "link: seq_len")
        settings = tuple(value for name, value in pairs if name == "set")
        return cls(**fields, seq_len=length, settings=settings)

    def to_query(self) -> str:
        """The query string of a link that asks this."""
        pairs = [("model", self.model), ("hardware", self.hardware), ("method", self.method)]
        pairs += [("seq_len", str(self.seq_len))] if self.seq_len is not None else []
        pairs += [(name, value) for name in _AMOUNTS if (value := getattr(self, name))]
        return urlencode([*pairs, *(("set", setting) for setting in self.settings)])

    def argv(self, command: str, *extra: str) -> list[str]:
        """Arguments of hf-memopt.

        Args:
            command: estimate or plan.
            more: options of the command beside the question's.
        """
        options = [f"--hardware={self.hardware}"]
        if not self.config:
            options += [f"--method={self.method}"]
            options += [f"--seq-len={self.seq_len}"] if self.seq_len is not None else []
        options += [f"--{name}={value}" for name in _AMOUNTS if (value := getattr(self, name))]
        options += [f"--set={setting}" for setting in self.settings]
        return [command, *options, *extra, "--json", "--", CONFIG if self.config else self.model]
