"""What people look at, in a real browser and as a site: make test-pages."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, ROOT, flags, run_forked
from runs import ENDED, reading, report, write_run

pytestmark = pytest.mark.pages
_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]
WIDTHS = {"phone": 360, "desktop": 1280}


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("needs Chromium (apt-get install chromium), then make test-pages")
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=_FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser, request):
    """A page of a width; whatever the console says, and any request beyond files, fails the test."""
    width = getattr(request, "param", 1280)
    opened = browser.new_page(viewport={"width": width, "height": 800})
    said = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on(
        "request", lambda asked: said.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None
    )
    yield opened
    assert said == []
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Every kind of page that is written: a real run's, one that ended out of memory, runs compared, a snapshot's."""
    folder = tmp_path_factory.mktemp("pages")
    real = folder / "real"
    done = run_forked(
        sys.executable,
        ROOT / "recipes" / "sft.py",
        *flags(preset="cpu", max_steps=6, logging_steps=2, held_out=8, snapshot_steps="2-3", output_dir=real),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    failed = write_run(folder / "failed", report(), [reading(step, peak=20 + step / 20) for step in range(40)], ENDED)
    made = {
        "real": real / "memory_report.html",
        "failed": failed / "memory_report.html",
        "compared": folder / "compared.html",
        "snapshot": folder / "snapshot.html",
    }
    for command in (
        ("report", failed),
        ("report", real, failed, "--output", made["compared"]),
        ("snapshot", real / "memory_snapshot_step_3.json.gz", "--plot", made["snapshot"]),
    ):
        done = run_forked("hf-memopt", *command)
        assert done.returncode == 0, done.stderr
    return made


SHOWN = {
    "real": ("Memory of real", "Ran 6 steps", "What to try next", "Predicted and measured", "optimizer states"),
    "failed": ("Ended out of memory in forward of step 8", "loss_chunk_size=512", "emergency"),
    "compared": ("2 runs compared", "real", "failed", "per_device_train_batch_size"),
    "snapshot": ("Memory snapshot: step 3", "The peak", "activations", "Growth between steps"),
}


_CLIPPED = """() => [...document.querySelectorAll('.scroll')]
    .filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth).map(one => one.ariaLabel)"""


@pytest.mark.parametrize("page", WIDTHS.values(), ids=WIDTHS, indirect=True)
@pytest.mark.parametrize("kind", SHOWN)
def test_a_page_reads_well(kind, page, pages):
    page.goto(pages[kind].as_uri())
    text = page.inner_text("body")
    for sentence in SHOWN[kind]:
        assert sentence in text
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    if (kind, width) == ("real", WIDTHS["desktop"]):
        assert page.evaluate("document.documentElement.scrollHeight") < 2500, "it is read to the end"
        tops = page.evaluate(
            "[...document.querySelectorAll('.facts div')].map(one => one.getBoundingClientRect().top)"
        )
        assert len(tops) >= 7 and len(set(tops)) == 1, "the facts stand in a row"
    if kind == "real":  # a comparison has a column a run, a snapshot lines of code: both scroll
        assert page.evaluate(_CLIPPED) == [], "all columns of the tables are seen"
    drawings = page.locator("figure svg")
    shown = [number for number in range(drawings.count()) if drawings.nth(number).is_visible()]
    assert len(shown) == drawings.count() / 2, "of each pair of drawings one is shown"
    for number in shown:
        box = drawings.nth(number).bounding_box()
        assert box["width"] > 0.8 * min(width, 900) and box["height"] > 100


_FACTS = """() => {
    const all = wanted => [...document.querySelectorAll(wanted)];
    return {
        language: document.documentElement.lang, title: document.title, main: all('main').length,
        heads: all('h1,h2,h3').map(head => +head.tagName[1]),
        unnamed: all('figure,[role=region]').filter(one => !one.ariaLabel).length,
        loose: all('svg').filter(one => one.getAttribute('aria-hidden') !== 'true').length,
        tables: all('table').filter(one => !one.caption || !one.querySelector('th')).length,
    };
}"""


@pytest.mark.parametrize("kind", SHOWN)
def test_keyboard_and_screen_readers(kind, page, pages):
    page.goto(pages[kind].as_uri())
    facts = page.evaluate(_FACTS)
    assert facts["language"] == "en" and facts["title"] and facts["main"] == 1
    assert facts["heads"][0] == 1 and facts["heads"].count(1) == 1
    assert all(after - before <= 1 for before, after in zip(facts["heads"], facts["heads"][1:], strict=False))
    assert facts["unnamed"] == facts["loose"] == facts["tables"] == 0
    places = sum(one.is_visible() for one in page.locator("[tabindex='0'], summary, a[href]").all())
    reached = set()
    for _ in range(places):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert len(reached) == places, "Tab reaches everything that scrolls or opens"
    closed = page.locator("details:not([open]) > summary").first
    if closed.count():
        closed.focus()
        page.keyboard.press("Enter")
        assert page.locator("details[open]").count() >= 1


def test_contrast_of_text(page, pages):
    """At least 4.5 to 1 between text and what is behind it (WCAG 2.2, 1.4.3), of every colour of the page."""
    page.goto(pages["failed"].as_uri())
    colours = page.evaluate(
        """() => [...new Set([...document.querySelectorAll('main *:not(svg *)')]
            .filter(one => one.innerText).map(one => getComputedStyle(one).color))]"""
    )
    for colour in colours:
        parts = [int(part) / 255 for part in colour.strip("rgb()").split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        assert 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05) >= 4.5, colour


# ---- the page to click on


@pytest.fixture(scope="module")
def ui():
    yield from _served(public=False)


@pytest.fixture(scope="module")
def public_ui():
    yield from _served(public=True)


def _served(public: bool):
    """The address of a page that is closed afterwards."""
    from hf_memopt.ui.limits import Limits
    from hf_memopt.ui.page import build_page, launch_page

    page = build_page(Limits(public=public))
    yield launch_page(page, "127.0.0.1", None, wait=False)
    page.close()


_UNNAMED = """() => {
    const named = one => one.labels?.length || one.ariaLabel || one.alt || one.title || one.innerText;
    return [...document.querySelectorAll('button,input,textarea,img')]
        .filter(one => one.checkVisibility() && !named(one)).map(one => one.outerHTML.slice(0, 200));
}"""


def test_a_question_is_asked_and_answered(browser, ui):
    """On a phone by its link; the answer stays in the window on a wide screen, too."""
    from urllib.parse import urlencode

    from hf_memopt.data.builtin_model import builtin_model

    page = browser.new_page(viewport={"width": WIDTHS["phone"], "height": 800})
    page.set_default_timeout(120_000)  # of a loaded machine
    asked, faults = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"{ui}?{urlencode({'model': builtin_model(), 'hardware': 'rtx_4090', 'method': 'full', 'seq_len': 64})}")
    length = page.get_by_label("Tokens per sample")
    page.wait_for_function("element => element.value === '64'", arg=length.element_handle())
    page.get_by_role("button", name="Does it fit?").focus()
    page.keyboard.press("Enter")
    page.get_by_text("Yes, it fits").wait_for(timeout=240_000)
    page.get_by_text("Files to download").first.wait_for()
    assert page.get_by_text("What fills the memory at the peak").is_visible()
    picture = page.get_by_alt_text("Predicted memory")
    assert picture.is_visible()
    narrow = picture.evaluate("one => one.currentSrc")
    assert page.get_by_text("tokens per second, predicted").is_visible()
    assert "seq_len=64" in page.get_by_role("link", name="Link to this question").get_attribute("href")
    for width in WIDTHS.values():
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    assert picture.evaluate("one => one.currentSrc") != narrow, "drawn for its width"
    assert page.evaluate(_UNNAMED) == [] and faults == []
    assert [url for url in asked if not url.startswith((ui, "data:", "blob:"))] == []
    page.close()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize(
    ("button", "answer"),
    [
        ("Does it fit?", "Yes, it fits"),
        # Half a minute; a plan by a link is below.
        pytest.param("Plan", "Yes, with lora", marks=pytest.mark.sweep),
    ],
)
def test_the_untouched_form_is_answered(browser, public_ui, button, answer, width):
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.set_default_timeout(240_000)
    page.goto(public_ui)
    page.get_by_role("button", name=button).click()
    page.get_by_text(answer).first.wait_for()
    assert page.get_by_role("alert").count() == 0
    assert "seq_len" not in page.get_by_role("link", name="Link to this question").get_attribute("href")
    page.close()


def test_a_plan_is_asked_for(browser, ui):
    """On a phone; the files to download start what was planned."""
    from urllib.parse import urlencode

    from hf_memopt.data.builtin_model import builtin_model

    page = browser.new_page(viewport={"width": WIDTHS["phone"], "height": 800})
    page.set_default_timeout(240_000)  # of a loaded machine
    page.goto(f"{ui}?{urlencode({'model': builtin_model(), 'hardware': 'rtx_3060', 'method': 'full', 'seq_len': 64})}")
    length = page.get_by_label("Tokens per sample")
    page.wait_for_function("element => element.value === '64'", arg=length.element_handle())
    page.get_by_role("button", name="Plan").click()
    page.get_by_text("Comparing settings").wait_for()
    page.get_by_role("cell", name="balanced").wait_for()
    assert page.get_by_role("cell", name="micro-batch").first.is_visible()
    for width in WIDTHS.values():
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
        assert page.evaluate(_CLIPPED.replace("'.scroll'", "'.memopt *'")) == [], "all words are seen"
    launch = page.locator(".memopt pre").inner_text()
    assert launch.startswith("accelerate launch --config_file accelerate_configs/rtx_3060.yaml recipes/")
    assert "--preset rtx_3060 --method full" in launch and str(ROOT) not in launch
    with page.expect_download() as downloaded:
        page.locator("a[href$='hf_memopt.sh']").first.click()
    assert "hf-memopt plan" in downloaded.value.path().read_text()
    page.close()


def test_a_yaml_of_another_tool_is_answered(browser, ui):
    """Its model and length, not the form's; the file to download is what was asked."""
    from hf_memopt.data.builtin_model import builtin_model

    page = browser.new_page(viewport={"width": WIDTHS["phone"], "height": 800})
    page.set_default_timeout(240_000)  # of a loaded machine
    page.goto(ui)
    page.get_by_text("A YAML of another tool").click()
    page.get_by_role("textbox", name="YAML").fill(
        f"base_model: {builtin_model()}\nadapter: lora\nlora_r: 8\nsequence_len: 64\nbf16: true\n"
    )
    page.get_by_role("button", name="Does it fit?").click()
    page.get_by_text("Yes, it fits").wait_for()
    assert page.get_by_text("read as axolotl").is_visible()
    assert "64 tokens" in page.locator("figcaption").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS["phone"], "it scrolls sideways"
    assert page.get_by_role("link", name="Link to this question").count() == 0, "a link could not hold it"
    with page.expect_download() as downloaded:
        page.locator("a[href$='job.yaml']").first.click()
    assert "sequence_len: 64" in downloaded.value.path().read_text()
    page.close()


def test_strangers_get_a_sentence_or_an_answer(browser, public_ui):
    """A path of this machine is refused, and the next question is answered."""
    page = browser.new_page(viewport={"width": WIDTHS["phone"], "height": 800})
    page.set_default_timeout(240_000)
    page.goto(f"{public_ui}?model=/etc/passwd&hardware=rtx_4090&method=lora&seq_len=64")
    model = page.get_by_label("Model")
    page.wait_for_function("element => element.value === '/etc/passwd'", arg=model.element_handle())
    page.get_by_role("button", name="Does it fit?").click()
    page.get_by_text("give a bundled model's name or a hub id").wait_for()
    page.goto(f"{public_ui}?model=smollm2-135m&hardware=rtx_4090&method=lora&seq_len=64")
    page.wait_for_function("element => element.value === 'smollm2-135m'", arg=model.element_handle())
    page.get_by_role("button", name="Does it fit?").click()
    page.get_by_text("Yes, it fits").wait_for()
    page.close()


# ---- the documentation


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built strictly: a link or an anchor that leads nowhere fails."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [BIN / "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**__import__("os").environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def test_the_site_is_whole(site):
    import yaml

    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    for entry in settings["nav"]:
        (name,) = entry.values()
        built = site / ("index.html" if name == "index.md" else f"{name.removesuffix('.md')}/index.html")
        text = built.read_text(encoding="utf-8")
        assert "<h1" in text and "<!-- =" not in text.replace("<!-- = -->", "").split("<main")[0]
    assert "MemoryTrainer" in (site / "api" / "index.html").read_text(encoding="utf-8")
    assert (site / "repository" / "benchmarks" / "results" / "levers.json.txt").is_file()


def test_everything_public_is_documented(site):
    import hf_memopt

    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    for name in hf_memopt.__all__:
        assert name == "__version__" or f".{name}" in text, name


def test_presets_are_seen_at_a_glance(browser, site):
    page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": 800})
    page.goto((site / "presets" / "index.html").as_uri())
    heights = page.evaluate("[...document.querySelectorAll('tbody tr')].map(row => row.offsetHeight)")
    assert 800 / (sum(heights) / len(heights)) > 10, "rows on a screen"
    page.close()


@pytest.mark.parametrize("page", [WIDTHS["phone"]], indirect=True)
def test_commands_and_answers_wrap_on_a_phone(page, site):
    for name in ("on_wsl", "commands"):
        page.goto((site / name / "index.html").as_uri())
        blocks = page.evaluate(
            """() => [...document.querySelectorAll(':is(.language-bash, .language-text) pre > code')]
                .map(one => one.scrollWidth - one.clientWidth)"""
        )
        assert blocks and max(blocks) == 0
    broken = "[...document.querySelectorAll('pre .option')].filter(one => one.getClientRects().length > 1)"
    assert page.evaluate("document.querySelectorAll('pre .option').length") > 5
    assert page.evaluate(f"{broken}.map(one => one.innerText)") == []


@pytest.mark.parametrize("page", WIDTHS.values(), ids=WIDTHS, indirect=True)
def test_the_site_in_a_browser(page, site):
    page.goto((site / "memory" / "index.html").as_uri())
    assert "6,738,415,616 weights" in page.inner_text("main")
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def test_the_notebook_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "docs" / "quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "fits: False" in said and "fits: True" in said and "maximum" in said and "memory_report.html" in said


# ---- commands of the pages, for real


_WITHOUT_WEIGHTS = tuple(f"hf-memopt {name}" for name in ("estimate", "plan", "show", "presets", "export", "doctor"))


def _commands():
    """A line for each set of options that no other line has, too; those that benchmarks/questions.py answers run
    there, in minutes."""
    from test_docs import commands

    benchmark = (ROOT / "benchmarks" / "questions.py").read_text(encoding="utf-8")
    unlike = {}
    for line in sorted({words for _, words in commands() if words.startswith(_WITHOUT_WEIGHTS)}):
        if f'"{line.removeprefix("hf-memopt ")}"' not in benchmark:
            _, name, *words = line.split()
            unlike.setdefault((name, frozenset(word for word in words if word.startswith("--"))), line)
    return sorted(
        line
        for (name, options), line in unlike.items()
        if not any(name == other and options < more for other, more in unlike)
    )


# Plans take half a minute each: test_plan_printed.py has small ones, and test_docs.py parses every command.
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.sweep] * line.startswith("hf-memopt plan"), id=line)
        for line in _commands()
    ],
)
def test_commands_run(line, command, tmp_path, monkeypatch):
    """Those that need no weights; hub names are their bundled architectures."""
    import shlex

    words = shlex.split(line)[1:]
    if "my_accelerate.yaml" in words:
        words[words.index("my_accelerate.yaml")] = str(ROOT / "accelerate_configs" / "cpu.yaml")
    words = [str(ROOT / word) if word.startswith("accelerate_configs/") else word for word in words]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "accelerate_configs").symlink_to(ROOT / "accelerate_configs")
    (tmp_path / "prices.toml").symlink_to(ROOT / "benchmarks" / "data" / "questions" / "prices.toml")
    turns = [{"role": role, "content": "a few words"} for role in ("user", "assistant")]
    (tmp_path / "my_chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    code, output, errors = command(*words)
    assert code in (0, 1), errors
    assert output and "Traceback" not in output
    if "--json" in words:
        json.loads(output)
