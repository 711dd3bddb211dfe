"""Every place that could run code of others is in SECURITY.md's table, and nothing else is."""

import ast
import re
from collections.abc import Iterator

import pytest
from conftest import ROOT

FOLDERS = ("hf_memopt", "recipes", "benchmarks")
# Loaders that run what a file holds, functions that run code, and other libraries' functions that use such loaders.
UNRESTRICTED = {
    *(
        f"{module}.{name}"
        for module in ("pickle", "_pickle", "cPickle", "cloudpickle", "dill")
        for name in ("load", "loads", "Unpickler", "_Unpickler")
    ),
    *("torch.load", "torch.serialization.load", "torch.distributed.checkpoint.load", "joblib.load", "shelve.open"),
    *("torch.distributed.checkpoint.load_state_dict", "torch.distributed.checkpoint.state_dict_loader.load"),
    *("torch.distributed.checkpoint.format_utils.dcp_to_torch_save", "torch.jit.load", "torch.hub.load"),
    *("marshal.load", "marshal.loads", "numpy.load", "pandas.read_pickle", "jsonpickle.decode"),
    *(f"yaml.{name}" for name in ("load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all")),
    *("runpy.run_path", "runpy.run_module", "importlib.util.spec_from_file_location", "os.system", "os.popen"),
    *("builtins.exec", "builtins.eval", "builtins.compile", "builtins.__import__", "code.interact"),
    "accelerate.utils.merge_fsdp_weights",
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
}
_MAKES_SAFE = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}
_SWITCHES = {"trust_remote_code": True, "shell": True, "allow_pickle": True, "weights_only": False}


def places(text: str) -> Iterator[tuple[str, str]]:
    """Functions or classes of a source text, and what they use of UNRESTRICTED, or switch on."""
    tree = ast.parse(text)
    names = {name: f"builtins.{name}" for name in ("exec", "eval", "compile", "__import__")} | _imported(tree)
    yield from _inside(tree, "", names)


def _imported(tree: ast.AST) -> dict[str, str]:
    """Name in the file -> what it stands for, of all imports, wherever they are."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                names[one.asname or one.name.partition(".")[0]] = (
                    one.name if one.asname else one.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def _inside(node: ast.AST, where: str, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}".lstrip(".")
    if isinstance(node, ast.Call):
        yield from ((where, name) for name in _switched_on(node))
        if _is_safe(node, names):
            for argument in (*node.args, *node.keywords):
                yield from _inside(argument, where, names)
            return
    if isinstance(node, ast.Name | ast.Attribute) and (name := _full_name(node, names)) in UNRESTRICTED:
        yield where, name
        return
    for child in ast.iter_child_nodes(node):
        yield from _inside(child, where, names)


def _full_name(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, names)}.{node.attr}"
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def _is_safe(call: ast.Call, names: dict[str, str]) -> bool:
    wanted = _MAKES_SAFE.get(_full_name(call.func, names))
    given = {one.arg: one.value.value for one in call.keywords if isinstance(one.value, ast.Constant)}
    return wanted is not None and given.get(wanted[0]) is wanted[1]


def _switched_on(call: ast.Call) -> Iterator[str]:
    """Keywords by which other libraries' functions run code, as constants; what a user says is passed on otherwise."""
    for one in call.keywords:
        if isinstance(one.value, ast.Constant) and one.arg in _SWITCHES and one.value.value is _SWITCHES[one.arg]:
            yield f"{one.arg}={one.value.value}"


def listed() -> set[tuple[str, str, str]]:
    """The rows of SECURITY.md's table: file, function and what it calls."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.partition("## Where code could be run")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`|]+)` \| `([^`|]+)` \| `([^`|]+)` \| \S", section, re.M))


@pytest.mark.slow
def test_the_table_is_complete_and_true():
    found = {
        (str(file.relative_to(ROOT)), where, name)
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for where, name in places(file.read_text(encoding="utf-8"))
    }
    assert found == listed()
    assert len(found) >= 5


def test_what_is_found(subtests):
    for text, place in [
        ("import torch\ndef f(x):\n    torch.load(x)", ("f", "torch.load")),
        ("import torch\ntorch.load(x, weights_only=False)", ("", "torch.load")),
        ("import torch\ntorch.load(x, weights_only=flag)", ("", "torch.load")),
        ("import torch\nload = torch.load", ("", "torch.load")),
        ("from torch import load as read\nclass A:\n    def f(self):\n        read(3)", ("A.f", "torch.load")),
        ("import pickle\npickle.loads(b'')", ("", "pickle.loads")),
        ("import pickle as p\nclass A(p.Unpickler): pass", ("A", "pickle.Unpickler")),
        ("def f():\n    from pickle import load\n    load(x)", ("f", "pickle.load")),
        ("import yaml\nyaml.load(x, yaml.SafeLoader)", ("", "yaml.load")),
        ("import torch.distributed.checkpoint as dcp\ndcp.load(x)", ("", "torch.distributed.checkpoint.load")),
        ("exec(text)", ("", "builtins.exec")),
        ("map(eval, texts)", ("", "builtins.eval")),
        ("import numpy as np\nnp.load(x)", ("", "numpy.load")),
        ("A.from_pretrained(x, trust_remote_code=True)", ("", "trust_remote_code=True")),
        ("load(x, weights_only=False)", ("", "weights_only=False")),
        ("import subprocess\nsubprocess.run(x, shell=True)", ("", "shell=True")),
    ]:
        with subtests.test(text=text, place=place):
            assert place in list(places(text))


def test_what_is_let_pass(subtests):
    for text in [
        *("import torch\ntorch.load(x, weights_only=True)", "model.eval()", "import re\nre.compile(x)"),
        *("import json\njson.load(x)", "import pickle\npickle.dumps(x)", "import yaml\nyaml.safe_load(x)"),
        *("f(x, trust_remote_code=args.trust_remote_code)", "import numpy as np\nnp.load(x, allow_pickle=False)"),
        "import pickle\ntry: pass\nexcept pickle.UnpicklingError: pass",
    ]:
        with subtests.test(text=str(text)):
            assert not list(places(text))


def test_code_of_models_is_off_unless_asked_for():
    from hf_memopt.recipe.recipe_arguments import RecipeArguments
    from hf_memopt.recipe.video import VideoArguments

    assert RecipeArguments().trust_remote_code is False and VideoArguments().trust_remote_code is False
