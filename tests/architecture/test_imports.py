"""Who may import whom, read from the syntax trees (DESIGN: data goes one way)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "icl"
MODULES = sorted(ROOT.rglob("*.py"))
MAY_IMPORT = {
    "core": {"core"},
    "machine": set(),
    "backends": {"backends", "core", "machine"},
    "io": {"io", "core", "machine"},
    "testing": {"backends", "core", "testing"},
    "profiling": set(),
    "batches": {"core"},
    "resume": {"core", "io"},
    "late": {"batches", "core", "io", "resume"},
    "effects": {"core", "profiling", "resume"},
    "options": set(),
    "record": {"core", "io", "machine"},
    "member": {"batches", "core", "effects", "io", "late", "options", "profiling", "record", "resume"},
    "loop": {"backends", "core", "io", "machine", "member", "options", "profiling"},
    "predictor": {"core"},
    "progress": set(),
    "results": {"backends", "core", "io", "loop", "predictor", "progress", "stopping"},
    "output": set(),
    "exit_codes": set(),
    "stopping": {"exit_codes"},
    "attempt": {"core", "exit_codes", "io", "loop", "output"},
    "run": {"attempt", "backends", "core", "exit_codes", "io", "machine", "profiling", "progress", "stopping"},
    "store": {"attempt", "core", "exit_codes", "io"},
    "engines": {"attempt", "backends", "core", "engines", "exit_codes", "io", "machine", "output", "stopping"},
    "fleet": {"attempt", "core", "engines", "exit_codes", "io", "sweep"},
    "sweep": {"attempt", "core", "engines", "exit_codes", "io", "machine", "stopping"},
}
LAZY_ONLY = {"torch_xla", "wandb", "gcsfs", "ray", "pandas", "tqdm"}
XLA_ONLY = {"backends/xla.py", "backends/xla_program.py"}  # the second is itself imported on use, by the first alone
IMPURE = {
    "os",
    "sys",
    "time",
    "datetime",
    "random",
    "io",
    "pathlib",
    "fsspec",
    "socket",
    "subprocess",
    "logging",
    "threading",
}


def imports(module: Path) -> list[tuple[str, bool]]:
    """Every imported module, and whether it is imported when the file is."""
    tree = ast.parse(module.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def eager(node: ast.AST) -> bool:
        while node in parents:
            node = parents[node]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return False
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                return False
        return True

    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, eager(node)) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found.append((node.module or "", eager(node)))
    return found


def part(module: Path) -> str:
    return module.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m.parent != ROOT or m.stem != "__init__"], ids=lambda m: str(m.relative_to(ROOT))
)
def test_imports_go_one_way(module: Path) -> None:
    ours = {name.split(".")[1] for name, _ in imports(module) if name.startswith("icl.")}
    assert ours <= MAY_IMPORT[part(module)]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(ROOT)))
def test_heavy_packages_are_imported_on_use(module: Path) -> None:
    for name, eager in imports(module):
        package = name.split(".")[0]
        here = str(module.relative_to(ROOT))
        assert here == "backends/xla_program.py" or not (eager and package in LAZY_ONLY), f"{name} at import"
        assert here in XLA_ONLY or package != "torch_xla"
        assert name != "icl.backends.xla_program" or (here == "backends/xla.py" and not eager)


@pytest.mark.parametrize("name", ["icl", "icl.run", "icl.store", "icl.sweep", "icl.fleet", "icl.engines.wandb_agent"])
def test_a_command_line_loads_torch_only_to_train(name: str) -> None:
    """Half a second instead of three for --help, --check, --list and ls, and for a sweep before its workers start."""
    reached, ahead = set[str](), [name]
    while ahead:
        reached.add(here := ahead.pop())
        path = ROOT.parent / here.replace(".", "/")
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        eager = {found for found, at_once in imports(module) if at_once}
        assert not eager & {"torch", "safetensors.torch"}, module
        ahead += [found for found in eager if found.split(".")[0] == "icl" and found not in reached]
    assert name == "icl" or "icl.core.spec" in reached


def test_core_has_no_clock_files_environment_or_print() -> None:
    for module in (ROOT / "core").rglob("*.py"):
        assert not {name.split(".")[0] for name, _ in imports(module)} & IMPURE, module
        calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
        names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        attributes = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
        assert not names & {"print", "open", "input"}, module
        assert not attributes & {"item", "tolist", "manual_seed", "cuda"}, module


BOTH_HALVES = {"spec.py", "plan.py", "estimate.py"}  # the cadences, and what a run takes on a machine


def test_core_computes_from_the_experiment_and_never_sees_how_it_is_run() -> None:
    """mypy knows that an `Experiment` has no `run`, so no store, heartbeat or cadence reaches a pure function."""
    for module in (ROOT / "core").rglob("*.py"):
        nodes = ast.walk(ast.parse(module.read_text()))
        used = {a.name for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "icl.core.spec" for a in n.names}
        run_half = used & {"Spec", "RunSpec", "StepsSpec", "WandbSpec"}
        assert not run_half or str(module.relative_to(ROOT / "core")) in BOTH_HALVES, f"{module}: {run_half}"


def test_adapters_do_not_import_each_other() -> None:
    adapters = {"cpu", "cuda", "xla"}
    for module in (ROOT / "backends").glob("*.py"):
        if module.stem in adapters:
            assert not {name for name, _ in imports(module)} & {f"icl.backends.{other}" for other in adapters}


def test_nothing_asks_a_backend_what_it_is() -> None:
    for module in MODULES:
        text = module.read_text()
        assert "isinstance(backend" not in text
        assert "hasattr(backend" not in text
        assert "backend.name ==" not in text


def test_no_pickle_on_any_path() -> None:
    """PyTorch's own files are the earlier trainer's format: export writes them, import reads tensors only."""
    for module in MODULES:
        tree = ast.parse(module.read_text())
        picklers = {name for name, _ in imports(module)} & {"pickle", "cloudpickle", "dill", "joblib"}
        calls = {node: ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if module != ROOT / "io" / "formats.py":
            assert not picklers, module
            assert not {"torch.load", "torch.save"} & set(calls.values()), module
            continue
        names = [
            a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module in picklers for a in n.names
        ]
        assert (picklers, names) == ({"pickle"}, ["UnpicklingError"])
        for call in (call for call, name in calls.items() if name == "torch.load"):
            assert "weights_only=True" in map(ast.unparse, call.keywords)
