"""The house's rules: rooms are subpackages, what is imported is declared, what is declared is pinned, no file knows a machine."""

import ast
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPING = {name: ROOT / folder for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()}
ROOMS = {folder.name for name, folder in MAPPING.items() if name != "jetrl_jax"}
MADE_HERE = {"build", "runs", "__pycache__"}  # not ours to read, nor are hidden folders such as .venv


def sources(*suffixes: str) -> Iterator[Path]:
    """The project's own files with these suffixes."""
    for folder, inner, names in ROOT.walk():
        inner[:] = sorted(name for name in inner if name not in MADE_HERE and not name.startswith(".") and not name.endswith(".egg-info"))
        yield from (folder / name for name in sorted(names) if name.endswith(suffixes))


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Every absolutely imported module of a file, with its statement."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node


def imports_of_rooms(path: Path) -> list[int]:
    """Lines that import a room by its bare name."""
    return [node.lineno for name, node in imports(path) if name.split(".")[0] in ROOMS]


def test_no_room_is_imported_from_the_root():
    wrong = [f"{path}:{line}" for path in sources(".py") for line in imports_of_rooms(path)]
    assert wrong == [], "write `from jetrl_jax.models import …`, never `import models`"


def test_the_rule_above_sees_every_form(tmp_path):
    path = tmp_path / "x.py"
    lines = ["import models.config", "from jetrl_jax.models import config", "import jax, train", "def f():", "  from rollout import cache"]
    path.write_text("\n".join(lines))
    assert sorted(imports_of_rooms(path)) == [1, 3, 5]


def test_rooms_import_under_their_names_and_every_folder_of_modules_is_mapped():
    assert list(MAPPING) == PROJECT["tool"]["setuptools"]["packages"]
    for name, folder in MAPPING.items():
        assert Path(importlib.import_module(name).__path__[0]) == folder
        unmapped = {p.parent for p in folder.rglob("*.py")} - set(MAPPING.values())
        assert unmapped == set(), f"name these in pyproject.toml: {unmapped}"


def test_an_ordinary_install_has_every_module_and_data_file(tmp_path):
    """What `make lint` type-checks and a wheel holds."""
    command = [sys.executable, "-c", "import setuptools; setuptools.setup()", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name, folder in MAPPING.items():
        there = tmp_path / name.replace(".", "/")
        ours = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        assert [p for p in ours if not (there / p.relative_to(folder)).exists()] == [], "name their suffix in pyproject.toml's package-data"


def requirements() -> dict[str, list[Requirement]]:
    """Declared requirements: under "" the core's, under each extra's name its own."""
    project = PROJECT["project"]
    declared = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(r) for r in rs] for extra, rs in declared.items()}


def test_what_is_imported_is_declared():
    """At the top of a module only the core; inside a function an extra's package too, and in modules of kernels triton. torch nowhere."""
    distributions = importlib.metadata.packages_distributions()
    core = {canonicalize_name(r.name) for r in requirements()[""]}
    extra = {canonicalize_name(r.name) for rs in requirements().values() for r in rs}
    for folder in MAPPING.values():
        for path in folder.glob("*.py"):
            for name, node in imports(path):
                package = name.split(".")[0]
                if package in sys.stdlib_module_names or package in ("jetrl_jax", "__future__"):
                    continue
                of_kernels = package == "triton" and (path.parent.name == "kernels" or path.name == "plain_triton.py")
                allowed = core if node.col_offset == 0 and not of_kernels else extra
                found = {canonicalize_name(d) for d in distributions.get(package, [package])}
                assert found & allowed, f"{path.relative_to(ROOT)}:{node.lineno} imports {package}, which pyproject.toml does not declare"
    assert "torch" not in extra


def test_constraints_pin_every_declared_dependency_and_hold_no_address():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    pins: dict[str, str] = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines)
    for needed in (r for rs in requirements().values() for r in rs):
        assert needed.specifier.contains(pins[canonicalize_name(needed.name)]), needed
    assert pins["jax"] == pins["jaxlib"] == pins["jax-cuda13-plugin"] == pins["jax-cuda13-pjrt"]


def test_files_name_no_package_index_and_no_path_of_a_machine():
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "--index" + "-url", "--extra-index" + "-url", "--find" + "-links"]
    folders = [f"/{name}/" for name in ("root", "home", "work", "mnt", "Users")]
    for path in [*sources(".py", ".md", ".toml", ".txt", ".sh"), ROOT / "Makefile", ROOT / ".ci" / "run"]:
        text = path.read_text()
        found = [h for h in hosts if h in text] + [f for f in folders if re.search(rf"(?<![\w.\-/]){f}", text)]
        assert found == [] or path == Path(__file__), path


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("good", "chosen"), [((), None), (("python3",), "python3"), (("python3", "python3.12"), "python3.12")])
def test_the_makefile_finds_a_new_enough_python(tmp_path, good, chosen):
    (tmp_path / "bin").mkdir()
    for name in ("python3.12", "python3"):
        body = "mkdir -p .venv" if name in good else "exit 1"
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    run = subprocess.run(["make", ".venv/.made"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    if chosen:
        assert (run.returncode, run.stdout) == (0, f"making .venv with {chosen}\n")
    else:
        assert run.returncode != 0
        assert run.stderr.startswith("jetrl needs Python 3.12 or newer, and none of 'python3.12 python3' is one: install it")


def test_the_licence_is_apache():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"
