"""Nothing here may reach a hub: models and data are made by the tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".pytest_cache"

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(CACHE / "huggingface")
os.environ["HF_MEMOPT_CACHE"] = str(CACHE / "hf_memopt")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests, with the same numbers, on every machine
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at once, some with two processes

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No test sees what a launcher would export."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")) or name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def builtin_model() -> Path:
    from hf_memopt.data.builtin_model import builtin_model

    return builtin_model()


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows to a jsonl file and returns its path."""

    def write(rows: list[dict], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def command(monkeypatch, capsys):
    """hf-memopt in this process, which has imported everything: exit code, output and errors."""

    def call(*words):
        from hf_memopt.cli import main

        monkeypatch.setattr(sys, "argv", ["hf-memopt", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def recipe():
    """A recipe's main(argv), from recipes/."""
    import importlib.util

    def load(name: str):
        spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.main

    return load


def run(*command, cwd=ROOT, env=None, timeout=300) -> subprocess.CompletedProcess:
    """Run a command with the test environment's programs first on the path; output is kept as text."""
    environment = {**os.environ, **(env or {})}
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, timeout=timeout, capture_output=True, text=True
    )


def launch(config, script, *arguments, cwd=ROOT) -> str:
    """`accelerate launch` to its end; returns what it printed. A transformers FutureWarning is a failure."""
    done = run(
        "accelerate", "launch", "--config_file", config, "--main_process_port", 0, script, *arguments, cwd=cwd
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert not re.search(r"transformers/\S+: FutureWarning", output)
    return output
