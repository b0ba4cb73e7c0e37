"""Who may import whom: `sens` and `models` at the bottom, then `analysis`, then `train`, then the command line."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"sens", "models", "analysis", "train"}
MAY_IMPORT = {
    "sens": {"sens"},
    "models": {"models"},
    "analysis": {"analysis", "models", "sens"},
    "train": {"train", "analysis", "models", "sens"},
}
FILES = sorted(path.relative_to(ROOT) for package in sorted(OURS) for path in (ROOT / package).rglob("*.py"))
DOOR = [path for path in FILES if path == Path("sens/__main__.py") or path.is_relative_to("sens/commands")]


def imports(tree: ast.AST) -> set[str]:
    """The first name of every absolute import anywhere in the file; relative ones stay in their package."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
    return names


def test_the_files_are_found():
    assert {path.parts[0] for path in FILES} == OURS
    assert len(DOOR) > 1


@pytest.mark.parametrize("path", [path for path in FILES if path not in DOOR], ids=str)
def test_a_module_imports_only_what_stands_below_it(path):
    found = imports(ast.parse((ROOT / path).read_text(encoding="utf-8"))) & OURS
    assert found <= MAY_IMPORT[path.parts[0]]


@pytest.mark.parametrize("path", DOOR, ids=str)
def test_the_door_imports_the_others_only_when_it_is_used(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    at_once = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], [])
    assert not imports(at_once) & ((OURS | {"jax", "tyro"}) - {"sens"})


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sens", ("models", "analysis", "train", "flax", "optax", "orbax", "grain", "polars", "matplotlib", "tyro")),
        ("sens.__main__", ("models", "analysis", "train", "matplotlib", "tyro", "tokenizers")),
        ("models", ("sens", "analysis", "train")),
        ("analysis.report", ("train", "optax", "orbax", "grain")),
    ],
)
def test_importing_a_package_loads_nothing_above_it(module, absent):
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
