"""The page: a form, its answers, files to download and a link that asks the same again."""

import json
import shlex
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

import gradio as gr
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

from hf_memopt.errors import InputError, accepted, choose
from hf_memopt.estimator.architectures import list_architectures
from hf_memopt.field_values import check_value
from hf_memopt.files import shipped
from hf_memopt.hardware import list_hardware
from hf_memopt.presets import METHODS
from hf_memopt.ui.limited_process import ask
from hf_memopt.ui.limits import Limits
from hf_memopt.ui.question import CONFIG, Question, read_length
from hf_memopt.ui.shown import show_error, show_estimate, show_plan

_FEATURES = {
    "Activation checkpointing": "gradient_checkpointing=true",
    "Loss in chunks": "loss_chunk_size=1024",
    "MLPs in tiles": "mlp_tile_size=1024",
    "Activations in 8 bits": "activation_compression=int8",
}
_MOST_WAITING = 20  # questions; another gets the queue's own refusal
_FILES_KEPT_SECONDS = 3600  # time to download an answer's files
_FIELD = 240  # pixels; on a phone each field has its own row
# System fonts: nothing is fetched from elsewhere.
_FONTS = ["system-ui", "sans-serif"]
_CSS = """
.memopt table { width: 100%; border: 0; border-collapse: collapse; margin: 0.5em 0; }
.memopt caption { text-align: left; font-weight: 600; padding: 0.5em 0; }
.memopt tr { border: 0; border-bottom: 1px solid var(--border-color-primary); }
.memopt th, .memopt td { border: 0; text-align: left; padding: 0.25em 0.75em 0.25em 0; vertical-align: middle; }
.memopt th { font-weight: 500; } .memopt td.memopt-size { white-space: nowrap; }
.memopt td { overflow-wrap: anywhere; } .memopt td:first-child { min-width: 6em; }
.memopt .memopt-bar { width: 40%; } .memopt .memopt-bar div { height: 1em; min-width: 2px; }
.memopt figure { margin: 0.5em 0; } .memopt figcaption { font-size: 0.85em; }
.memopt pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: 0.75em; font-size: 0.9em;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
.memopt pre span { display: inline-block; max-width: 100%; } /* an option and its value stay together */
.memopt h3 { font-weight: 600; padding-top: 0.5em; }
@media (max-width: 480px) {
  .memopt table { font-size: 0.8em; } .memopt th, .memopt td { padding-right: 0.4em; }
}
.memopt p { font-size: 1.1em; overflow-wrap: anywhere; }
.memopt .memopt-yes { border-left: 4px solid #2e7d32; padding-left: 0.5em; }
.memopt .memopt-no { border-left: 4px solid #b22222; padding-left: 0.5em; }
"""


def build_page(limits: Limits) -> gr.Blocks:
    """The page, not served yet.

    Args:
        limits: of each question.
    """
    with gr.Blocks(
        title="hf_memopt: does it fit?",
        analytics_enabled=False,
        delete_cache=(_FILES_KEPT_SECONDS, _FILES_KEPT_SECONDS),
    ) as page:
        gr.Markdown("# Does it fit?\nThe memory of a Hugging Face training job, predicted before it runs.")
        with gr.Row():
            model = gr.Dropdown(
                list_architectures(),
                min_width=_FIELD,
                value="llama-3.1-8b",
                label="Model",
                info="A name or a hub id",
                allow_custom_value=True,
            )
            card = gr.Dropdown(
                list_hardware(),
                min_width=_FIELD,
                value="rtx_4090",
                label="Card",
                info="Several: rtx_4090x2",
                allow_custom_value=True,
            )
        with gr.Row():
            method = gr.Radio(
                ["any", *METHODS], min_width=_FIELD, value="lora", label="Method", info="any: Plan chooses"
            )
            # A gr.Number that nobody touched is 0 (gradio 6.31), and cannot be emptied.
            length = gr.Textbox(label="Tokens per sample", info="Empty: the preset's", max_lines=1, min_width=_FIELD)
        with gr.Row():
            tokens = gr.Textbox(label="Tokens to train on", info="For the time: 10M; may be empty", max_lines=1)
            price = gr.Textbox(label="Price of a device", info="Of an hour, for the cost; may be empty", max_lines=1)
        features = gr.CheckboxGroup(list(_FEATURES), label="Memory features", info="Of the estimate and the plan")
        others = gr.Textbox(
            label="Other settings", info="KEY=VALUE, separated by spaces, as in lora.r=8 optim=adamw_8bit"
        )
        # Strangers' files may name paths of this machine (limits.py).
        with gr.Accordion("A YAML of another tool instead", open=False, visible=not limits.public):
            config = gr.Textbox(
                label="YAML",
                info="Of axolotl, LLaMA-Factory, ms-swift, torchtune or TRL: it says model, method and tokens",
                lines=6,
                max_lines=20,
            )
        with gr.Row():
            fit, plan = gr.Button("Does it fit?", variant="primary"), gr.Button("Plan")
        answer = gr.HTML(label="Answer", elem_classes="memopt", min_height=80)
        link = gr.HTML(label="Link", elem_classes="memopt")
        files = gr.File(label="Files to download", file_count="multiple", interactive=False, visible=False)
        form = [model, card, method, length, tokens, price, features, others, config]
        # One id for both buttons: one question runs at a time, whichever it is.
        # Not preprocessed: what gradio's components refuse becomes an error without a text.
        queued = {
            "concurrency_limit": 1,
            "concurrency_id": "question",
            "api_visibility": "private",
            "preprocess": False,
        }
        for button, command in ((fit, "estimate"), (plan, "plan")):
            button.click(_answering(command, limits), form, [answer, link, files], **queued)
        page.load(_read_link, None, [*form, answer], api_visibility="private")
    return page.queue(max_size=_MOST_WAITING, api_open=False)


def launch_page(page: gr.Blocks, host: str, port: int, share: bool = False, wait: bool = True) -> str:
    """Serve a page.

    Args:
        share: whether gradio opens a tunnel to it.
        wait: until it is interrupted.

    Returns:
        Its address on this machine.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    # Its own orange would be that of activations.
    theme = gr.themes.Default(primary_hue="slate", font=_FONTS, font_mono=["ui-monospace", "monospace"])
    # Its own greys have less contrast than WCAG asks for (4.5 to 1).
    theme.set(block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300")
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        share=share,
        prevent_thread_lock=not wait,
        theme=theme,
        css=_CSS,
        footer_links=[],
        ssr_mode=False,
        run_history=False,
        app_kwargs={"middleware": [Middleware(SmallRequests)]},
    )
    return address


def _answering(command: str, limits: Limits):
    """The function of a button: yields what is being done, then the answer, the link and the files."""

    def answered(*fields) -> Iterator[tuple]:
        nothing = gr.File(visible=False)
        try:
            question = _question(*fields)
        except InputError as error:
            yield show_error(str(error)), "", nothing
            return
        link = "" if question.config else f'<a href="?{escape(question.to_query())}">Link to this question</a>'
        doing = {"estimate": "Tracing the training steps", "plan": "Comparing settings, which takes a minute or two"}
        yield f'<p role="status">{doing[command]} …</p>', link, nothing
        # gradio copies the files into its cache before it resumes this generator, which then removes the folder.
        with TemporaryDirectory(prefix="hf-memopt-ui-") as folder:
            try:
                shown, written = _ask(question, command, limits, Path(folder))
            except InputError as error:
                yield show_error(str(error)), link, nothing
                return
            yield shown, link, gr.File([str(file) for file in written], visible=True)

    return answered


def _question(model, card, method, length, tokens, price, features, others, config) -> Question:
    """The form's question; a request that did not come from the form may hold anything.

    Raises:
        InputError: a field that is empty, or of another type than the form's.
    """
    check_value("YAML", str | None, config)
    config = (config or "").strip()
    for name, value in (("model", model), ("card", card)):
        check_value(name, str | None, value)
        if not value and not (config and name == "model"):
            raise InputError(f"{name}: choose one")
    check_value("method", str | None, method)
    method = accepted("method", method, ("any", *METHODS))
    for name, value in (("tokens to train on", tokens), ("price", price)):
        check_value(name, str | None, value)
    check_value("features", list[str] | None, features)
    if unknown := [name for name in features or () if name not in _FEATURES]:
        raise choose("memory feature", unknown[0], _FEATURES)
    check_value("other settings", str | None, others)
    settings = [_FEATURES[name] for name in features or ()] + (others or "").split()
    seq_len = read_length("" if length is None else str(length), "tokens per sample")
    amount = {"tokens": (tokens or "").strip(), "price": (price or "").strip()}
    return Question(
        model=model or "",
        hardware=card,
        method=method,
        seq_len=seq_len,
        settings=tuple(settings),
        config=config,
        **amount,
    )


def _ask(question: Question, command: str, limits: Limits, folder: Path) -> tuple[str, list[Path]]:
    """The answer as HTML, and its files, which are written to a folder."""
    if command == "estimate" and question.method == "any" and not question.config:
        raise InputError("method=any is chosen by Plan: press it, or choose a method")
    picture, answer, config = folder / "timeline.html", folder / f"{command}.json", folder / CONFIG
    options = [f"--plot={picture}"] if command == "estimate" else []
    result = ask(question, command, limits, *options)
    for profile in result.get("profiles", ()):
        if profile["launch"]:  # as in a clone, instead of in this machine's folders
            profile["launch"] = profile["launch"].replace(f"{shipped('recipes').parent}/", "")
    if question.config:
        config.write_text(question.config, encoding="utf-8")
    answer.write_text(json.dumps(result, indent=2), encoding="utf-8")
    script = folder / "hf_memopt.sh"
    argv = [word for word in question.argv(command) if word != "--json"]
    script.write_text(f"#!/bin/sh\n{shlex.join(['hf-memopt', *argv])}\n", encoding="utf-8")
    shown = show_estimate(result, picture) if command == "estimate" else show_plan(result)
    return shown, [file for file in (answer, picture, config, script) if file.is_file()]


def _read_link(request: gr.Request) -> list:
    """The form as the page's address asks, and a sentence where the address is faulty."""
    query = str(request.request.url.query) if request.request else ""
    # gradio's own fields, as a Space's __theme, are not part of the question.
    query = "&".join(part for part in query.split("&") if part and not part.startswith("__"))
    if not query:
        return [gr.skip()] * 10
    try:
        question = Question.from_query(query)
    except InputError as error:
        return [*[gr.skip()] * 9, show_error(str(error))]
    names = {setting: name for name, setting in _FEATURES.items()}
    features = [names[setting] for setting in question.settings if setting in names]
    others = " ".join(setting for setting in question.settings if setting not in names)
    return [
        question.model,
        question.hardware,
        question.method,
        question.seq_len and str(question.seq_len),
        question.tokens,
        question.price,
        features,
        others,
        gr.skip(),
        gr.skip(),
    ]


_MOST_BYTES = 64 * 1024  # of a request's body; a question has a few hundred
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")


class SmallRequests:
    """ASGI middleware that refuses uploads and large requests before anything of them is read.

    A server takes no more of a body than its content-length says, so that it need not be counted.
    """

    def __init__(self, app) -> None:
        self._app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["method"] not in _WITHOUT_BODY and (refusal := _refusal(scope)):
            await PlainTextResponse(refusal, status_code=413, headers={"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(scope) -> str | None:
    headers = {name.lower(): value for name, value in scope["headers"]}
    if scope["path"].endswith("/upload") or headers.get(b"content-type", b"").startswith(b"multipart/"):
        return "this page takes no files"
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or int(length) > _MOST_BYTES:
        return f"this page takes questions of at most {_MOST_BYTES} bytes, and their content-length"
    return None
