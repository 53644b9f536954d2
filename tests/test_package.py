"""The package: its requirements, the contents of its wheel, and its commands after a real installation.

The wheel is built from a copy of the tracked files, and built and installed without a network.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")

import bass_core
from bass_core.machine.cuda import OLD_BUILDS

# Packages that are imported only if an option asks for them. Each of these packages has a separate requirements
# file.
OPTIONAL = {"ray", "flash_attn", "spaces"}
OURS = {"app", "bass_core", "kernels", "ui"}
# A string that names a module of this tree, or an object in one.
BY_NAME = re.compile(r"(kernels|ui)(\.\w+)+(:\w+)?")
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
# Packages whose distribution has another name.
NAMES = {"pynvml": "nvidia-ml-py", "llvmlite": "numba"}


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def listed(file: str) -> list[str]:
    """Return the requirements in a file, without those of the files that it names."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", "-r", "-c"))]


def normal(requirement: str) -> str:
    return requirement.replace('"', "'").replace(" ", "")


def project() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return settings


def test_the_extras_equal_the_requirements_files() -> None:
    extras = project()["project"]["optional-dependencies"]
    for extra, file in (("gpu", "requirements-gpu.txt"), ("ray", "requirements-ray.txt")):
        assert sorted(map(normal, extras[extra])) == sorted(map(normal, listed(file)))
    both = {normal(line) for line in extras["dev"] + extras["bench"]} - {"bass-core[bench]"}
    assert both == set(map(normal, listed("requirements-dev.txt")))


def test_every_text_names_one_build_for_older_gpus() -> None:
    """The refusals and docs/gpu.md install the same build, within the bound of requirements.txt."""
    (bound,) = re.findall(r"^torch\S*?<=([\d.]+)$", (ROOT / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    (build,) = re.findall(r'^"torch<=([\d.]+)" ', OLD_BUILDS)
    assert [int(part) for part in build.split(".")] <= [int(part) for part in bound.split(".")]
    assert OLD_BUILDS in (ROOT / "docs" / "gpu.md").read_text("utf-8")


def test_ci_installs_one_torch_that_the_requirements_allow() -> None:
    """The newest would bring CUDA into every environment of CI."""
    packaging = pytest.importorskip("packaging.requirements")
    (pin,) = map(packaging.Requirement, listed(".ci/constraints.txt"))
    (version,) = pin.specifier
    (allowed,) = (packaging.Requirement(line) for line in listed("requirements.txt") if line.startswith("torch>"))
    assert (pin.name, version.operator) == ("torch", "==") and allowed.specifier.contains(version.version)
    assert "-c .ci/constraints.txt" in (ROOT / "requirements-dev.txt").read_text("utf-8").splitlines()


def test_every_imported_package_is_required() -> None:
    """An import must not rely on another package's dependencies, which may change with its next version."""
    imported = set()
    for name in tracked():
        if name == "app.py" or (name.startswith(("bass_core/", "kernels/", "ui/")) and name.endswith(".py")):
            for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(str(node.module).split(".")[0])
    others = imported - set(sys.stdlib_module_names) - OURS - OPTIONAL
    assert {"torch", "numpy", "gradio"} <= others
    required = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in listed("requirements.txt")}
    assert {NAMES.get(name, name).lower().replace("_", "-") for name in others} <= required


SYSTEMS = (("linux", "Linux"), ("win32", "Windows"), ("darwin", "Darwin"))
Wanted = tuple[str, str, frozenset[str], str, tuple[bool, ...]]


def wanted(requirement: Any, extra: str = "") -> Wanted:
    """Return everything about a requirement that decides what is installed.

    Args:
        requirement: A packaging.requirements.Requirement.
        extra: The extra of our package that lists the requirement.

    Returns:
        The required package's name, `extra`, the extras and versions of that package, and whether the requirement
        applies on each of SYSTEMS.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    marker = requirement.marker
    holds = tuple(
        marker is None or marker.evaluate({"sys_platform": platform, "platform_system": system, "extra": extra})
        for platform, system in SYSTEMS
    )
    name = canonicalize_name(requirement.name)
    return name, extra, frozenset(requirement.extras), str(SpecifierSet(str(requirement.specifier))), holds


def test_the_lock_file_has_these_requirements_and_only_files_of_pypi() -> None:
    """If this fails, run `uv lock`: `uv sync` with an old lock file would install versions that nobody tried."""
    packaging = pytest.importorskip("packaging.requirements")
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    facts = project()["project"]
    assert lock["requires-python"].replace(" ", "") == facts["requires-python"].replace(" ", "")
    by_source: dict[str, list[Any]] = {}
    for package in lock["package"]:
        by_source.setdefault(str(package["source"]), []).append(package)
    (ours,) = by_source.pop("{'editable': '.'}")
    assert set(by_source) == {"{'registry': 'https://pypi.org/simple'}"}
    for package in by_source.popitem()[1]:
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        assert files, package["name"]
        for file in files:
            assert file["url"].startswith("https://files.pythonhosted.org/packages/"), file["url"]
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", file["hash"]), file["url"]
    required = {wanted(packaging.Requirement(line.split("#")[0])) for line in listed("requirements.txt")}
    for extra, lines in facts["optional-dependencies"].items():
        required |= {wanted(packaging.Requirement(line), extra) for line in lines}
    locked = set()
    for entry in ours["metadata"]["requires-dist"]:
        extras = f"[{','.join(entry['extras'])}]" if "extras" in entry else ""
        marker = f"; {entry['marker']}" if "marker" in entry else ""
        match = re.search(r"extra == '(\w+)'", marker)
        requirement = packaging.Requirement(f"{entry['name']}{extras}{entry.get('specifier', '')}{marker}")
        locked.add(wanted(requirement, match[1] if match else ""))
    assert locked == required


def test_installed_versions_meet_the_requirements() -> None:
    packaging = pytest.importorskip("packaging.requirements")
    for line in listed("requirements.txt"):
        requirement = packaging.Requirement(line.split("#")[0])
        if requirement.marker is None or requirement.marker.evaluate():
            version = metadata.version(requirement.name)
            assert requirement.specifier.contains(version, prereleases=True), f"{line}: {version} is installed"


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed, without this tree on Python's path."""
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=known | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        target = folder / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "tree", cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_one_complete_package(wheel: Path) -> None:
    assert wheel.name == f"bass_core-{bass_core.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert {name.split("/")[0].split("-")[0] for name in names} == {"bass_core"}
        for needed in (
            "py.typed", "__main__.py", "app.py", "kernels/plan.py", "kernels/cpu/forward.py", "ui/page/page.py",
            "ui/static/page/page.js", "ui/recordings/shipped/win.json.xz", "drafts/smollm2/model.safetensors",
            "drafts/smollm2/config.json", "docs/usage.md",
        ):  # fmt: skip
            assert f"bass_core/{needed}" in names
        assert not [name for name in names if name.endswith((".pyc", ".nbc", ".nbi"))]
        for name in names:
            if name.endswith(".py"):
                for node in ast.walk(ast.parse(archive.read(name))):
                    if isinstance(node, ast.ImportFrom) and not node.level:
                        assert str(node.module).split(".")[0] not in ("kernels", "ui", "app"), name
                    elif isinstance(node, ast.Import):
                        assert not {alias.name.split(".")[0] for alias in node.names} & {"kernels", "ui", "app"}, (
                            name
                        )
                    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                        assert not BY_NAME.fullmatch(node.value), f"{name}: {node.value}"
        assert b'import_module("bass_core.app")' in archive.read("bass_core/__main__.py")
        (facts,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
        assert "Requires-Dist: transformers" in facts and "Provides-Extra: gpu" in facts


@pytest.mark.slow
def test_the_installed_commands_work(wheel: Path, tmp_path: Path) -> None:
    """They run in a new environment outside this tree, which also has this environment's packages."""
    from tests.support.page import save_tiny_pair

    target, draft = save_tiny_pair(tmp_path / "pair")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    bin_folder = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    (packages,) = (tmp_path / "venv").rglob("site-packages")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--python",
        bin_folder / "python",
    )
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel, cwd=tmp_path)
    # --system-site-packages would show the packages of the base Python, not of this environment.
    (packages / "shared.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")))
    pair = ("--pair", target, "--draft", draft, "--device", "cpu", "--dtype", "float32")
    by_command = run(bin_folder / "bass", "generate", "Hello", *pair, "--max-new-tokens", "12", cwd=tmp_path)
    assert by_command.stdout.strip() and "acceptance rate" in by_command.stderr
    by_module = (bin_folder / "python", "-m", "bass_core")
    table = run(*by_module, "race", "Hello", *pair, "-n", "2", "--max-new-tokens", "8", cwd=tmp_path).stdout
    assert [line.split()[0] for line in table.splitlines()] == ["lane", "regular", "speculative", "bass"]
    assert "--root-path" in run(bin_folder / "bass", "serve", "--help", cwd=tmp_path).stdout
    output = run(
        bin_folder / "python", "-c",
        "import bass_core, importlib.util as u; from bass_core.model.loading import catalogue as c;"
        "print(bass_core.__file__, (c.REPOSITORY / 'drafts/smollm2/model.safetensors').is_file(),"
        "[name for name in ('kernels', 'ui', 'app') if u.find_spec(name)]);"
        "from bass_core.machine import gpu_kernels as g;"
        "print(all(map(u.find_spec, (g.COMPILER_MODULE, g.LAUNCHES.split(':')[0]))), "
        "(g.SOURCES / 'ahead.py').is_file())",
        cwd=tmp_path,
    ).stdout  # fmt: skip
    assert str(packages) in output and output.split()[1:] == ["True", "[]", "True", "True"]
