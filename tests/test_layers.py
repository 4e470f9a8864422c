"""The table of layers, kept: who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
L3 = {
    "build",
    "check",
    "compose",
    "launch",
    "launcher",
    "mode",
    "out_of_memory",
    "rank",
    "ranks",
    "signature",
    "start_ranks",
    "sweep",
}
L2_FOLDERS = {"task", "strategy", "checkpoint", "logger"}
L2_FILES = {
    "recipes/data/datamodule.py",
    "recipes/strategy/precision_plugin.py",
    "recipes/strategy/torch_native.py",
    "recipes/strategy/deepspeed/train_state.py",
    "recipes/strategy/deepspeed/loss_scale.py",
    "recipes/strategy/deepspeed/partition.py",
    "recipes/strategy/deepspeed/step_guard.py",
}
C1 = {
    f"callbacks/{name}.py"
    for name in (
        "axis",
        "bottleneck_rules",
        "compare",
        "compare_page",
        "compare_parallel",
        "compare_runs",
        "compare_table",
        "compare_values",
        "compile_tap",
        "curves",
        "curves_data",
        "curves_png",
        "curves_svg",
        "curves_thin",
        "dashboard",
        "flop_count",
        "host_memory",
        "late_numbers",
        "matmul_peak",
        "memory_picture",
        "peak_flops",
        "phase_times",
        "progress_text",
        "report_config",
        "report_head",
        "report_page",
        "report_plan",
        "report_shell",
        "report_tables",
        "report_words",
        "run_record",
        "snapshot",
        "spike_detector",
        "spike_ladder",
        "spike_watch",
        "stopwatch",
    )
}
FILES = sorted([*ROOT.glob("recipes/**/*.py"), *ROOT.glob("callbacks/**/*.py"), ROOT / "train.py"])


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _forbidden(name: str) -> set[str]:
    """Prefixes of modules that a file must not import."""
    parts = Path(name).parts
    room = parts[1].removesuffix(".py") if len(parts) > 1 else ""
    if name == "train.py":
        return {"torch", "lightning", "callbacks"}
    if parts[0] == "callbacks":
        return {"recipes", "hydra", "omegaconf"} | ({"lightning"} if name in C1 else set())
    l3 = {f"recipes.{module}" for module in L3}
    if room in {"check", "compose", "signature"}:  # they answer before anything heavy is imported
        return {"callbacks", "torch", "lightning"}
    if room in L3:
        return {"callbacks"}
    if room in L2_FOLDERS or name in L2_FILES:
        return {"hydra", "callbacks", "omegaconf"} | l3
    l2 = {f"recipes.{folder}" for folder in L2_FOLDERS} | {"recipes.data.datamodule"}
    return {"lightning", "hydra", "omegaconf", "wandb", "deepspeed", "callbacks"} | l3 | l2


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    forbidden = _forbidden(name)
    wrong = {
        module
        for module in _imports(path)
        for prefix in forbidden
        if module == prefix or module.startswith(f"{prefix}.")
    }
    assert not wrong, f"{name} imports {wrong}"


def test_every_name_in_the_tables_above_is_a_file() -> None:
    assert all((ROOT / name).is_file() for name in C1 | L2_FILES)
    rooms = [ROOT / "recipes" / name for name in L3 | L2_FOLDERS]
    assert all(room.is_dir() or room.with_suffix(".py").is_file() for room in rooms)


def test_optional_libraries_are_imported_where_they_are_used() -> None:
    optional = {"wandb", "wandb_workspaces", "tensorboard", "deepspeed", "sklearn", "transformers"}
    optional |= {"huggingface_hub", "matplotlib", "optuna", "submitit"}
    for path in FILES:
        top = ast.parse(path.read_text()).body
        imports = [node for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {
            alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names
        }
        names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
        wrong = {name for name in names if name.split(".")[0] in optional}
        assert not wrong or path.name == "curves_png.py", (path.name, wrong)


def test_functions_stay_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= 50
    }
    assert not long


def test_strategies_do_not_import_each_other() -> None:
    for path in ROOT.glob("recipes/strategy/*.py"):
        siblings = {name for name in _imports(path) if name.startswith("recipes.strategy.")}
        assert not siblings, f"{path.name} imports {siblings}"


def test_every_module_opens_with_a_line_that_says_what_it_is() -> None:
    for path in FILES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path} has no docstring"
        assert len(docstring.splitlines()[0]) > 20, f"{path}: {docstring.splitlines()[0]!r}"


def test_files_stay_one_idea_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if (lines := len(path.read_text().splitlines())) > 260
    }
    assert not long
