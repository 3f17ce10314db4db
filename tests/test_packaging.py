"""One import package, however it is installed, and imports that go one way.

`kernels/` and `sharding/` stand at the root of the checkout but are `cp_engine.kernels` and `cp_engine.sharding`.
Hugging Face's package is called `kernels` too, and `transformers` imports it where it is installed.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"cp_engine": "cp_engine", "kernels": "cp_engine.kernels", "sharding": "cp_engine.sharding"}

# Ends every probe: which of this checkout's (or wheel's) files are loaded, under which names.
REPORT = """
import json, sys
loaded = {}
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None):
        loaded.setdefault(module.__file__, []).append(name)
kernels = sys.modules.get("kernels")
print(json.dumps({
    "loaded": loaded,
    "kernels": None if kernels is None else kernels.__file__,
    "torch": "torch" in sys.modules,
}))
"""

HIDE_INSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""


def source_files() -> dict[Path, str]:
    """Every source file of the import package and the name of its module (for `__init__.py` of its package)."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[path] = ".".join([package, *(part for part in parts if part != "__init__")])
    return found


def probe(code: str, cwd: Path, path: tuple[Path, ...] = (), installed: bool = True, **env: str) -> dict:
    """Run ``code`` in a new Python in ``cwd`` and return its `REPORT`.

    Args:
        path: folders of PYTHONPATH, beside whatever this Python runs with.
        installed: False hides an editable installation of this project.
    """
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*map(str, path), *inherited]), **env)
    script = ("" if installed else HIDE_INSTALLED) + code + REPORT
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def files_of(report: dict, root: Path) -> dict[str, list[str]]:
    """Loaded files below ``root`` (but not in an environment inside it) and their module names.

    Modules that are no files, such as torch.ops, give a relative path.
    """
    return {
        file: names
        for file, names in report["loaded"].items()
        if Path(file).is_absolute() and Path(file).resolve().is_relative_to(root) and "site-packages" not in file
    }


def assert_ours_is_one_package(report: dict, root: Path) -> None:
    ours = files_of(report, root)
    assert ours, "the probe loaded nothing of this project"
    assert all(len(names) == 1 for names in ours.values()), ours
    names = {name for names in ours.values() for name in names}
    assert all(name.split(".")[0] in ("cp_engine", "__main__") for name in names), names


@pytest.fixture
def hub_kernels(tmp_path) -> Path:
    """A folder that looks like an installed Hugging Face `kernels`, of a version that this transformers takes."""
    from transformers.utils import import_utils

    version = import_utils.KERNELS_MIN_VERSION
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text(
        textwrap.dedent(
            """
            class _Meta(type):
                def __getattr__(cls, name):
                    if name.startswith("__"):
                        raise AttributeError(name)
                    return cls()

            class _Anything(metaclass=_Meta):
                '''Constructs from anything; as a decorator it returns what it decorates.'''

                def __init__(self, *args, **kwargs): ...

                def __call__(self, decorated=None, *args, **kwargs):
                    return decorated

            def __getattr__(name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return _Anything
            """
        )
    )
    info = site / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return site


RUN_CLI = """
import runpy, sys
sys.argv = ["cp_engine", "--help"]
try:
    runpy.run_module("cp_engine", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    assert not stop.code, stop.code
import cp_engine.engine, transformers
from transformers.models.qwen3_5 import modeling_qwen3_5
"""


def test_the_command_line_starts_beside_hugging_faces_kernels(hub_kernels):
    report = probe(RUN_CLI, ROOT, (hub_kernels,))
    assert report["kernels"] == str(hub_kernels / "kernels" / "__init__.py"), "transformers loads the other `kernels`"
    assert_ours_is_one_package(report, ROOT)


def test_the_command_line_starts_without_hugging_faces_kernels():
    """transformers then finds our folder as a namespace package, which runs none of our code."""
    report = probe(RUN_CLI, ROOT)
    assert report["kernels"] is None or "site-packages" in report["kernels"]
    assert_ours_is_one_package(report, ROOT)


def test_python_m_prints_help_from_the_root():
    done = subprocess.run([sys.executable, "-m", "cp_engine", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("train", "verify", "plan"))


IMPORT_PLANNING = (
    "import cp_engine.sharding.plan\nassert 'torch' not in sys.modules\nimport cp_engine.kernels.attention\n"
)


def test_a_checkout_that_is_only_on_the_path_works(tmp_path):
    report = probe("import sys\n" + IMPORT_PLANNING, tmp_path, (ROOT,), installed=False)
    assert_ours_is_one_package(report, ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of this checkout, built from a copy so that nothing is left in the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=skip)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return copy / "dist" / done.stdout.splitlines()[-1]


def test_the_wheel_holds_one_top_level_package_with_every_file(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"cp_engine"}
    assert {name for name in names if name.endswith(".py")} == {
        name.replace(".", "/") + ("/__init__.py" if path.stem == "__init__" else ".py")
        for path, name in source_files().items()
    }


def test_the_wheel_works_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(site)
    report = probe("import sys\n" + IMPORT_PLANNING, tmp_path, (site,), installed=False)
    assert_ours_is_one_package(report, site)
    assert not files_of(report, ROOT)


def test_every_package_folder_is_listed():
    files = source_files()
    folders = {name if path.stem == "__init__" else name.rpartition(".")[0] for path, name in files.items()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = settings["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    # The two mapped folders hold packages, whether or not a module stands directly in them.
    assert folders | set(FOLDERS.values()) == set(listed)


def test_mapped_folders_have_no_init_of_their_own():
    """With one, `import kernels` from the root would run it in the place of Hugging Face's."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "sharding" / "__init__.py").exists()


HIDE_TRITON = """
import sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTriton())
"""


@pytest.mark.parametrize("triton", ["installed", "hidden"])
def test_everything_imports_without_a_gpu(triton):
    # `__main__` would run the command line.
    modules = {path: name for path, name in source_files().items() if path.name != "__main__.py"}
    code = "import importlib\n" + "".join(f"importlib.import_module({name!r})\n" for name in modules.values())
    report = probe((HIDE_TRITON if triton == "hidden" else "") + code, ROOT, CUDA_VISIBLE_DEVICES="")
    assert_ours_is_one_package(report, ROOT)
    assert {Path(file) for file in files_of(report, ROOT)} == set(modules)


def imported_modules(path: Path, package: str) -> set[str]:
    """Absolute names of all modules that a file imports anywhere, for a file inside ``package``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def is_below(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def forbidden_imports(folder: str, path: Path) -> set[str]:
    package = ".".join([FOLDERS[folder], *path.parent.relative_to(ROOT / folder).parts])
    names = imported_modules(path, package)
    never = {name for name in names if is_below(name, ("kernels", "sharding", "launch", "benchmarks", "tests"))}
    if folder == "cp_engine":
        return never
    never |= {name for name in names if is_below(name, ("cp_engine",)) and not is_below(name, (FOLDERS[folder],))}
    if folder == "sharding" and not is_below(package, ("cp_engine.sharding.exchange",)):
        never |= {name for name in names if is_below(name, ("torch", "cp_engine.sharding.exchange"))}
    return never


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder):
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := forbidden_imports(folder, path))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("folder", "line", "name"),
    [
        ("kernels", "from cp_engine.sharding import plan", "cp_engine.sharding.plan"),
        ("kernels", "import cp_engine.engine", "cp_engine.engine"),
        ("kernels", "from ..sharding import plan", "cp_engine.sharding.plan"),
        ("kernels", "from cp_engine import sharding", "cp_engine.sharding"),
        ("sharding", "def f():\n    import torch.distributed", "torch.distributed"),
        ("sharding", "from cp_engine.kernels.gdn import api", "cp_engine.kernels.gdn.api"),
        ("cp_engine", "from kernels import attention", "kernels.attention"),
        ("cp_engine", "import tests.ranks", "tests.ranks"),
    ],
)
def test_a_wrong_import_is_seen(folder, line, name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / "module.py"
    path.write_text(line)
    assert forbidden_imports(folder, path) == {name}
