"""How icl is installed: from its clone, under a name that is nobody else's, and found from any folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import icl

ROOT = Path(__file__).parents[2]
SCRIPT = "import site, sys; site.addsitedir(sys.argv[1]); import icl; print(icl.__file__, icl.load_spec.__module__)"
FROM_INDEX = re.compile(r"pip3? install(?: +-\S+)* +['\"]?icl(?![/\w])(?!\S* @ )|(?<![-\w])icl\[[a-z]")
TEXTS = ("", ".md", ".py", ".toml", ".txt", ".json", ".yaml")


def test_an_editable_install_is_found_from_the_folder_above_a_clone_called_icl(tmp_path: Path) -> None:
    """There Python sees the clone as an empty package of the same name, which an import hook would come after."""
    clone, built, site = tmp_path / "icl", tmp_path / "built", tmp_path / "site"
    shutil.copytree(ROOT / "icl", clone / "icl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    built.mkdir()
    build = f"import setuptools.build_meta as backend; backend.build_editable({str(built)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = built.iterdir()
    assert wheel.name.startswith(f"icl_regression-{icl.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # -S, and the dependencies by PYTHONPATH: no other editable install is looked at.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    command = [sys.executable, "-S", "-c", SCRIPT, str(site)]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.split() == [str(clone / "icl" / "__init__.py"), "icl.io.codec"], found.stderr


def test_nothing_says_to_install_icl_from_the_package_index() -> None:
    """Where `icl` is another project, and any other name may become one: it is installed from a clone."""
    files = [ROOT / "Makefile", ROOT / ".ci" / "run", *ROOT.iterdir()]
    for folder in ("icl", "docs", "specs", "benchmarks", "tests"):
        files += (ROOT / folder).rglob("*")
    texts = {path: path.read_text() for path in files if _is_text(path)}
    assert [(str(path), match[0]) for path, text in texts.items() for match in FROM_INDEX.finditer(text)] == []
    assert all(
        FROM_INDEX.search(f"Run {told} then.") for told in ("pip install icl", "pip install -U 'icl'", "`icl[ray]`")
    )
    assert FROM_INDEX.search("pip install 'icl-regression[tpu]'")


def _is_text(path: Path) -> bool:
    return path.suffix in TEXTS and path.is_file() and path != Path(__file__)
