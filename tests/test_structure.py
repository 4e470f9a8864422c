"""The shape of the source that no linter checks: where optional libraries are imported, how files are opened."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("recipes", "callbacks", "lightning_recipes")
FILES = sorted([*(file for name in PACKAGES for file in ROOT.glob(f"{name}/**/*.py")), ROOT / "train.py"])
OPTIONAL = {
    "deepspeed",
    "huggingface_hub",
    "matplotlib",
    "onnxruntime",
    "optuna",
    "rich",
    "sklearn",
    "submitit",
    "tensorboard",
    "transformers",
    "wandb",
    "wandb_workspaces",
}
# imported lazily themselves
IMPORTS_OPTIONAL = {"callbacks/progress/bar.py", "callbacks/report/charts/png.py"}
# into folders that are new, temporary, or renamed once complete
WRITES_NEW_FILES = {
    "recipes/config/check/strategy.py",
    "recipes/data/conversations/store.py",
    "recipes/data/text/token_cache.py",
    "recipes/data/token_file.py",
    "recipes/entry/spawn.py",
    "recipes/logger/wandb/logger.py",
    "recipes/model/weights/huggingface.py",
}


def _top_level_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_optional_libraries_are_imported_inside_the_functions_that_need_them() -> None:
    for path in FILES:
        name = str(path.relative_to(ROOT))
        # recipes/ has rich as a dependency; callbacks/ has not
        optional = OPTIONAL - ({"rich"} if name.startswith("recipes") else set())
        wrong = _top_level_imports(path) & optional
        assert not wrong or name in IMPORTS_OPTIONAL, (name, wrong)


def test_every_module_opens_with_a_line_that_says_what_it_is() -> None:
    for path in FILES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path} has no docstring"
        assert len(docstring.splitlines()[0]) > 20, f"{path}: {docstring.splitlines()[0]!r}"


def test_every_text_file_is_opened_with_its_encoding() -> None:
    """The default is that of the locale, which may be ASCII."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _opens_text(node)
    ]
    assert not wrong


def _opens_text(call: ast.Call) -> bool:
    """Return whether a call reads or writes text in the encoding of the locale."""
    function = call.func
    name = getattr(function, "attr", None) or getattr(function, "id", None)
    if any(keyword.arg in ("encoding", None) for keyword in call.keywords):
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) == (0 if name == "read_text" else 1)
    if name != "open" or (isinstance(function, ast.Attribute) and ast.unparse(function.value) == "os"):
        return False
    mode = call.args[0 if isinstance(function, ast.Attribute) else 1 :][:1]
    return not mode or (isinstance(mode[0], ast.Constant) and "b" not in str(mode[0].value))


def test_recipes_and_callbacks_have_one_writer_of_files() -> None:
    """Neither package may import the other, so each has the file: cp recipes/files.py callbacks/."""
    assert (ROOT / "callbacks/files.py").read_text() == (ROOT / "recipes/files.py").read_text()


def test_nothing_else_writes_files_in_place() -> None:
    """A file that is truncated to be written again is lost on a full disk; see recipes/files.py."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        if path.name != "files.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("write_text", "write_bytes") and str(path.relative_to(ROOT)) not in WRITES_NEW_FILES
        if not ast.unparse(node.func.value).startswith("unfinished")
    ]
    assert not wrong


def test_every_heavy_test_file_is_there() -> None:
    lines = (ROOT / "tests/heavy.txt").read_text().splitlines()[1:]
    assert [line for line in lines if not (ROOT / "tests" / line).is_file()] == []


def test_private_modules_of_torch_are_imported_in_one_file() -> None:
    """A new version of torch is then tried in one place."""
    private = re.compile(r"^\s*(?:from|import) torch(?:\.[a-z]\w*)*\._\w+", re.MULTILINE)
    found = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "recipes").rglob("*.py")
        if private.search(path.read_text())
    ]
    assert found == ["recipes/torch_internals.py"]


def test_every_slow_test_is_there() -> None:
    """A line of slow.txt that names nothing would hide that a test has come back to `make test`."""
    lines = [line for line in (ROOT / "tests/slow.txt").read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        file, _, name = line.partition(" ")[2].partition("[")[0].partition("::")
        assert f"def {name.rpartition('::')[2]}" in (ROOT / file).read_text(), line
