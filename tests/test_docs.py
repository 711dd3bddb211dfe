"""What the documentation says: numbers, links, commands, names and code. As a site: tests/ui/test_pages.py."""

import json
import re
import shlex
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture
def benchmarks(monkeypatch):
    """benchmarks/ as a place to import from."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


# ---- numbers


@pytest.mark.kept
@pytest.mark.slow
def test_every_number_is_the_measured_predicted_or_recomputed_one(benchmarks):
    """`make docs` was run after the benchmarks."""
    import fill_docs

    stale = [page.name for page in fill_docs.pages() if fill_docs.filled(page) != page.read_text(encoding="utf-8")]
    assert not stale, "run make docs"
    used = {name for text in TEXTS.values() for name in re.findall(r"<!-- =([\w.]+) -->", text)}
    assert used == set(fill_docs.FIGURES), "a figure that no page shows, or the other way round"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"date": "2026-11-02", "commit": "0123abcd+"}, "2026-11-02 (0123abcd)"),
        ({"date": "2026-11-01"}, "2026-11-01, **more than a month before the newest figures**,"),
    ],
)
def test_a_page_says_how_old_its_figures_are(result, expected, benchmarks, monkeypatch):
    from datetime import date

    from docs_tables import markdown

    monkeypatch.setattr(markdown, "newest", lambda: date(2026, 12, 3))
    assert markdown.when(result) == expected


def test_the_weights_that_formulas_begin_with(benchmarks):
    """Counted from the bundled architectures."""
    import figures

    from hf_memopt.estimator.architectures import load_config

    assert _weights(load_config("llama-2-7b")) == figures.WEIGHTS_7B
    assert _weights(load_config("llama-3.1-70b")) == figures.WEIGHTS_70B


def _weights(config) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.slow
def test_formulas_agree_with_the_estimator():
    """Bytes a weight, of a model in each type, as docs/memory.md has them."""
    from transformers import LlamaConfig

    from hf_memopt import estimate

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=1024
    )
    weights = _weights(config)
    for dtype, optim, each in (
        ("float32", "adamw_torch", (4, 4, 8)),
        ("bfloat16", "adamw_torch", (2, 2, 4)),
        ("float32", "sgd", (4, 4, 0)),
    ):
        fields = {"per_device_train_batch_size": 1, "optim": optim}
        found = estimate(config, fields, 64, "cpu", dtype=dtype)
        held = found.breakdown
        assert held["parameters"] == pytest.approx(weights * each[0], rel=0.01)
        assert held["optimizer_states"] == pytest.approx(weights * each[2], rel=0.01, abs=1000)
        # At the peak, in backward, the embedding's gradient is not there yet.
        assert weights * each[1] - 1024 * 256 * each[1] <= held["gradients"] <= weights * each[1] * 1.01


# A number with a unit in running text that nobody measured: what it is by definition, or whose claim.
_UNIT = re.compile(r"(?<![\w.])[−+]?\d[\d,.]*\s?(?:%|GiB|MiB|GB|MB|KB|million|seconds|minutes|s)(?!\w)")
_DEFINED = {
    "index.md": set(),
    "on_wsl.md": {"12 GB"},  # of a card's name
    "README.md": {"95 %"},  # what the table calls tight
    "quickstart.md": {"24 GB", "192 GB", "95 %"},  # names of cards, and what is called tight
    "memory.md": {
        "112 GB",
        "443 MB",
        "6 GB",
        "1.2 GB",
        "100 MB",
        "60 GB",
        "80 GB",
        "1.5 GB",
        "12 GB",
        # guides' claims above; a definition of theirs below
        "10 %",
        "40 %",
        "30 %",
        "5 %",
        "20 MiB",
    },  # c10/cuda/CUDACachingAllocator.h
    "claims.md": {"1.5 GB", "443 MB", "60 GB", "80 GB", "24 GB"},
    "troubleshooting.md": set(),
    "plans.md": {"5 %", "10 %", "85 %", "90 %", "92 %", "94 %", "48 GiB", "256 GiB", "36 GiB", "256 MiB", "1 GiB"}
    | {
        *("12 GB", "24 GB", "40 GB", "32 GiB"),  # cards, hosts
        *("128 GB", "2,904 s", "672 s"),  # Answer.AI's
        "140 GB",  # 70B weights of two bytes
    },
    "training.md": {"256 MB"},
    "video.md": {"8 GB", "16 GB", "24 GB", "90 %"},
    "clusters.md": {"100 million", "200 million"},  # what the shipped file says
}


def test_no_number_is_typed_by_hand(subtests):
    """Outside code, tables that are made, inline figures, and what is a definition or a claim of somebody's."""
    for name in TEXTS:
        with subtests.test(name=name):
            text = CODE.sub("", TEXTS[name])
            text = re.sub(r"<!-- ([\w ]+) -->\n.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
            text = re.sub(r"<!-- =[\w.]+ -->.*?<!-- = -->", "", text, flags=re.DOTALL)
            text = re.sub(r"^#.*$", "", re.sub(r"`[^`]*`", "", text), flags=re.MULTILINE)
            found = {" ".join(number.split()) for number in _UNIT.findall(text)} - _DEFINED.get(name, set())
            assert not found, "measure it, compute it in benchmarks/figures.py, or say whose it is"


# ---- links


def test_links_lead_somewhere(subtests):
    for page in PAGES:
        with subtests.test(page=page):
            text = CODE.sub("", page.read_text(encoding="utf-8"))
            for target in re.findall(r"\]\(([^)\s]+)\)", text):
                if target.startswith(("http:", "https:")):
                    continue
                path, _, anchor = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                assert file.exists(), target
                if anchor:
                    assert anchor in _anchors(file), target


def _anchors(file: Path) -> set[str]:
    """Of headings, as MkDocs and GitHub make them."""
    heads = re.findall(r"^#+ (.+)$", CODE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower())).strip("-") for head in heads}


# ---- names


def test_every_key_of_the_shipped_files_is_explained():
    explained = set(re.findall(r"`([\w]+)`", TEXTS["configs.md"]))

    def keys(content):
        for key, value in content.items():
            yield key
            if isinstance(value, dict):
                yield from keys(value)

    for file in (ROOT / "accelerate_configs").rglob("*.*"):
        if file.suffix in (".yaml", ".json"):
            content = yaml.safe_load(file.read_text()) if file.suffix == ".yaml" else json.loads(file.read_text())
            assert not set(keys(content)) - explained, file.name


def test_settings_that_others_are_translated_to_exist():
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from trl import SFTConfig

    from hf_memopt import MemoryArguments
    from hf_memopt.recipe.recipe_arguments import RecipeArguments
    from hf_memopt.recipe.video import VideoArguments

    known = {
        item.name for kind in (SFTConfig, MemoryArguments, RecipeArguments, VideoArguments) for item in fields(kind)
    }
    known |= {f"lora.{item.name}" for item in fields(LoraConfig)}
    known |= {f"quantization.{name}" for name in BitsAndBytesConfig().to_dict()}
    values = {"lora", "qlora", "all-linear", "group_by_length", "false", "use_reentrant", "PYTORCH_ALLOC_CONF"}
    by_hand, _, _ = TEXTS["migration.md"].partition("## Other tools' keys")  # the generated tables follow
    rows = re.findall(r"^\| .+? \| (.+) \|$", by_hand, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert len(rows) > 15
    commands = {name for name in named if name.startswith(("recipes/", "hf-memopt ", "accelerate "))}
    assert not named - known - values - commands - {"dtype", "--config_file"}
    whole = yaml.safe_load(next(code for kind, code in CODE.findall(TEXTS["migration.md"]) if kind == "yaml"))
    assert not set(whole) - known - {"lora"} and not {f"lora.{key}" for key in whole["lora"]} - known


def test_error_messages_are_known():
    """Each heading about memory is a message that advise() knows; the others stand in the libraries' source."""
    from hf_memopt.reports.advice import advise_on_text

    text = TEXTS["troubleshooting.md"]
    device, host = text.index("\n## Device memory"), text.index("\n## Settings")
    messages = re.findall(r"^### `(.+)`$", text[device:host], re.MULTILINE)
    assert len(messages) >= 10
    for message in messages:
        assert advise_on_text(message) is not None, message
    import accelerate
    import torch
    import transformers

    for library, file, words in (
        (transformers, "training_args.py", "Your setup doesn't support bf16/gpu."),
        (transformers, "modeling_utils.py", "has been toggled on, but it cannot be used due to the following error"),
        (accelerate, "utils/dataclasses.py", "When using `deepspeed_config_file`, the following accelerate config"),
        (accelerate, "utils/memory.py", "No executable batch size found, reached zero."),
        (torch, "amp/grad_scaler.py", "Attempting to unscale FP16 gradients."),
        (torch, "utils/checkpoint.py", "Recomputed values for the following tensors"),
    ):
        assert words in (Path(library.__file__).parent / file).read_text(encoding="utf-8")
        assert words in text


# ---- commands


def commands() -> list[tuple[str, str]]:
    """Every command line of the pages, continued lines joined, with the page it stands on."""
    found = {}
    for name, text in TEXTS.items():
        for kind, code in CODE.findall(text):
            if kind in ("", "bash"):
                for line in code.replace("\\\n", " ").splitlines():
                    words = " ".join(line.split("#")[0].split("&&")[0].split())
                    ours = words.startswith("hf-memopt ") and "…" not in words
                    if ours or words.startswith("accelerate launch"):
                        found.setdefault(words, name)
    return sorted((page, words) for words, page in found.items())


@pytest.mark.kept
@pytest.mark.slow
def test_commands_are_understood(subtests):
    """Parsed by the command line itself and by the recipes, and the files that they name are there."""
    for page, line in commands():
        with subtests.test(page=page, line=line):
            words = shlex.split(line)
            if words[0] == "accelerate":
                _launch(words)
                continue
            _parse(words)


def test_commands_for_coding_agents_are_understood():
    """SKILL.md's commands, its front matter, and what AGENTS.md links to."""
    skill = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    _, front, text = skill.split("---\n", 2)
    header = yaml.safe_load(front)
    assert header["name"] == "hf-memopt" and len(header["description"]) < 1024  # the format's limit
    lines = [line for line in re.findall(r"`(hf-memopt [^`]+)`", text) if len(line.split()) > 2]
    assert len(lines) > 9
    for line in lines:
        _parse(shlex.split(line))
    for link in re.findall(r"\]\((\w+\.md)\)", (ROOT / "AGENTS.md").read_text(encoding="utf-8")):
        assert (ROOT / link).is_file()


def _parse(words: list[str]) -> None:
    """What the command line itself reads; an unknown option raises."""
    import typer

    from hf_memopt.cli.app import app

    group = typer.main.get_command(app)
    group.get_command(None, words[1]).make_context(words[1], words[2:], resilient_parsing=False)


def _launch(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    from hf_memopt.presets.trl_configs import trl_class
    from hf_memopt.recipe.answers import AnswerArguments
    from hf_memopt.recipe.preference import PreferenceArguments
    from hf_memopt.recipe.recipe_arguments import RecipeArguments, parse
    from hf_memopt.recipe.video import VideoArguments

    given = launch_command_parser().parse_args(words[2:])
    if given.config_file is not None:
        copied = ROOT / "accelerate_configs" / Path(given.config_file).name  # pages copy shipped files into a project
        assert (ROOT / given.config_file).is_file() or copied.is_file()
    if given.training_script.startswith("recipes/"):
        assert (ROOT / given.training_script).is_file()
        own, config = {
            "dpo": (PreferenceArguments, "DPOConfig"),
            "sft": (AnswerArguments, "SFTConfig"),
            "video_sft": (VideoArguments, None),
        }.get(Path(given.training_script).stem, (RecipeArguments, None))
        config_class = config and trl_class(config)
        parse(given.training_script_args, own=own, config_class=config_class)


# ---- code


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What code blocks take for granted, real and tiny."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

    folder = tmp_path_factory.mktemp("code")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=96,
        max_position_embeddings=8192,
    )
    config.architectures = ["LlamaForCausalLM"]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]

    def fresh() -> dict:
        args = TrainingArguments(str(folder / "out"), use_cpu=True, max_steps=1, report_to=[])
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = AutoModelForCausalLM.from_config(config)
        return {
            "args": args,
            "data": rows,
            "model": model,
            "name": str(folder / "model"),
            "lora": lora,
            "SomeTrainer": Trainer,
            "trainer": Trainer(model=model, args=args, train_dataset=rows),
        }

    return folder, fresh


def _blocks() -> list[tuple[str, int, str]]:
    return [
        (name, number, code)
        for name, text in TEXTS.items()
        for number, (kind, code) in enumerate(CODE.findall(text))
        if kind == "python"
    ]


@pytest.mark.pages
@pytest.mark.parametrize(("page", "number", "code"), _blocks(), ids=lambda value: str(value)[:20])
def test_code_runs(page, number, code, names, monkeypatch):
    """On real objects; hub names are folders, hardware is this machine's where weights would be loaded."""
    folder, fresh = names
    monkeypatch.chdir(folder)
    local = re.sub(r'"(Qwen|meta-llama|HuggingFaceTB)/[^"]+"', repr(str(folder / "model")), code)
    local = local.replace('get_preset("rtx_4090", method="qlora")', 'get_preset("cpu", method="lora")')
    local = local.replace("MemoryTrainer(...,", "MemoryTrainer(model=model, args=args, train_dataset=data,")
    values = fresh() | {
        "AutoModelForCausalLM": __import__("transformers").AutoModelForCausalLM,
        "get_peft_model": __import__("peft").get_peft_model,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21.2 asks transformers by an old name
        exec(compile(local, f"{page}:{number}", "exec"), values)
