"""Real text in every Python installation: the standard library's documentation.

Nothing is downloaded; docstrings are parsed from source files, whose modules are not imported.
"""

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Tests, demos and vendored packages: no documentation worth training on.
_SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo", "ensurepip"}


@cache
def documents() -> tuple[str, ...]:
    """The reference topics and the docstrings of every public module, one text each: about 2 MB, in a fixed order."""
    from pydoc_data.topics import topics

    reference = [topics[name].strip() for name in sorted(topics)]
    modules = []
    for module, tree in _modules():
        parts = [f"{module}\n{'=' * len(module)}", ast.get_docstring(tree) or ""]
        parts += [f"{signature}\n{_indented(text)}" for signature, text in _documented(module, tree)]
        modules.append("\n\n".join(part for part in parts if part))
    return tuple(reference + modules)


@cache
def questions() -> tuple[tuple[str, str], ...]:
    """Pairs of a question about a documented function or class of the standard library, and its answer."""
    pairs = []
    for module, tree in _modules():
        for signature, text in _documented(module, tree):
            answer = text.split("\n\n")[0].strip()
            name = signature.split("(")[0]
            if 20 <= len(answer) <= 600:
                pairs.append((f"What does {name} do?", f"{' '.join(answer.split())}\n\nSignature: {signature}"))
    return tuple(pairs)


# What stands around an answer that is chosen, and around one that is rejected: as many words.
_FRAMES = (
    ("According to the documentation: ", "As far as I can remember: "),
    ("The standard library says: ", "Some people may say: "),
    ("In short, it does this: ", "Well, perhaps it does this: "),
    ("Its purpose is documented. ", "Its purpose is unclear. "),
)


@cache
def preferences() -> tuple[tuple[str, str, str], ...]:
    """A question, an answer with its source, which is chosen, and the same answer said as a guess."""
    pairs = []
    for number, (question, answer) in enumerate(questions()[::8]):  # enough to learn it
        summary = answer.split("\n\nSignature: ")[0]
        chosen, rejected = _FRAMES[number % len(_FRAMES)]
        pairs.append((question, chosen + summary, rejected + summary))
    return tuple(pairs)


def _modules() -> Iterator[tuple[str, ast.Module]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if _SKIPPED & set(parts) or any(part.startswith("_") for part in parts if part != "__init__"):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        yield ".".join(part for part in parts if part != "__init__"), tree


def _documented(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Signature and docstring of each public function, class and method, in source order."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if text := ast.get_docstring(node):
            yield f"{module}.{_signature(node)}", text
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                public = isinstance(member, ast.FunctionDef) and not member.name.startswith("_")
                if public and (text := ast.get_docstring(member)):
                    yield f"{module}.{node.name}.{_signature(member)}", text


def _signature(node) -> str:
    if isinstance(node, ast.ClassDef):
        return node.name
    return f"{node.name}({' '.join(ast.unparse(node.args).split())})"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())
