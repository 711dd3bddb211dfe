"""Nothing that is printed holds control characters of arguments, paths or files."""

import io
import json
import sys

import pytest

from hf_memopt.cli.app import main
from hf_memopt.program import run
from hf_memopt.terminal import PlainStream, console, only_plain_text

ODD = "a\x1b]0;title\x07\x1b[31mb\u202ec"
COMMANDS = {
    "export": ["export", "rtx_4090", ODD],
    "export a yaml": ["export", "rtx_4090", ODD, "--yaml-only"],
    "export to a cloud": ["export", "rtx_4090", ODD, "--target", "kubernetes"],
    "an unknown preset": ["show", ODD],
    "an unknown model": ["estimate", ODD, "--hardware", "rtx_4090"],
    "an unknown option": ["estimate", f"--{ODD}"],
    "an unknown command": [ODD],
    "a file": ["doctor", f"{ODD}.yaml"],
    "a wrong setting": ["estimate", "gpt2", "--set", f"{ODD}=5"],
    "a run": ["report", ODD],
    "a log": ["advise", ODD],
    "merge": ["merge", ODD, "out"],
    "a snapshot": ["snapshot", ODD],
}


def _run(argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf-memopt", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert out + err
    for text in (out, err):
        assert text.replace("\n", "").isprintable(), repr(text)
    return ended.value.code, out


@pytest.mark.parametrize("name", COMMANDS)
def test_arguments(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _ = _run(COMMANDS[name], monkeypatch, capsys)
    assert code == (0 if name.startswith("export") else 2)


def test_a_file_and_the_folder_that_it_lies_in(monkeypatch, capsys, tmp_path):
    folder = tmp_path / ODD.replace("/", "")
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": ODD, "architectures": [ODD]}))
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {ODD: ODD, "stage": ODD}}))
    (folder / "a.yaml").write_text(json.dumps({ODD: ODD, "distributed_type": ODD}))
    for argv in (["estimate", str(folder), "--hardware", "rtx_4090"], ["doctor", "ds.json"], ["doctor", "a.yaml"]):
        assert _run(argv, monkeypatch, capsys)[0] == 2
    assert _run(["export", "rtx_4090", "."], monkeypatch, capsys)[0] == 0


def test_recipes(capsys):
    run(lambda: print(f"output_dir={ODD}"))
    assert capsys.readouterr().out == "output_dir=a]0;titlebc\n"


def test_counters_and_colours_of_our_own_stay():
    stream = io.StringIO()
    PlainStream(stream).write(f"\r3/5 {ODD}")
    assert stream.getvalue() == "\r3/5 a]0;titlebc"
    before = sys.stdout
    with only_plain_text():
        assert console().file is before
    assert sys.stdout is before
