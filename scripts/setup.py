#!/usr/bin/env python3
"""Prepares a checkout: `make setup`. Standard library only, so that it runs before anything is installed.

The third-party packages (gigabytes) go to `<cache>/env-<hash of the pins>`, once per machine and set of pins.
`.venv` in the checkout is light: its .pth file points at those packages and at the source folders, so a second
checkout or a pulled commit with unchanged pins is ready in seconds. Nothing half-built is ever used: both are
built under a temporary name and renamed.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV_VERSION = "0.13.9"
SOURCE_FOLDERS = ("crds", "operator", "webhooks", "runtime", "localcluster", "runtime_image")
#: Bump when the layout of the environments below changes.
LAYOUT = 1
#: Command line tools of the environment that get a script in .venv/bin: name -> "module:function".
TOOLS = {
    "lint-imports": "importlinter.cli:lint_imports_command",
    "mypy": "mypy.__main__:console_entry",
    "pytest": "pytest:main",
}
#: Shared libraries that packages link to and do not bring: name -> (Debian package, who needs it).
LIBRARIES = {
    "libcurl.so.4": ("libcurl4", "the transfer engine of Mooncake"),
    "libibverbs.so.1": ("libibverbs1", "the transfer engine of Mooncake"),
    "libnuma.so.1": ("libnuma1", "vLLM"),
}
#: Extras of images for accelerators. "cuda" has another build of a module that "cpu" has: the one installed last wins.
FOR_IMAGES = frozenset({"accelerator", "cuda"})
#: Compiled tools, linked.
BINARIES = ("ruff",)
#: Written into an environment once its packages are compiled to bytecode.
COMPILED = ".bytecode"


class SetupError(Exception):
    """Something that the user can fix; the message says how."""


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    say(f"{name} ...")
    start = time.monotonic()
    yield
    say(f"{name}: {time.monotonic() - start:.1f} s")


def cache_dir() -> Path:
    """Same rule as omni_cluster.paths.cache_dir, which cannot be imported yet."""
    if chosen := os.environ.get("OMNI_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "omni-operator"
    return Path.home() / ".cache" / "omni-operator"


def run(command: Sequence[str], **extra: str) -> None:
    try:
        subprocess.run(list(command), check=True, env={**os.environ, **extra}, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise SetupError(f"{command[0]} is not installed: {error}") from error
    except subprocess.CalledProcessError as error:
        raise SetupError(f"`{' '.join(command)}` ended with {error.returncode}; its output is above") from error


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """One builder at a time per cache folder; a second one waits and then finds the work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another setup holds {path}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------------------------------------ hashing


def requirement_lines(text: str) -> list[str]:
    """Lines of a requirements file without comments and blanks, sorted: what matters for the result."""
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return sorted(line for line in lines if line)


def extras(pyproject: str) -> dict[str, list[str]]:
    """The extras of pyproject.toml that a checkout's environment has."""
    import tomllib

    optional = tomllib.loads(pyproject)["project"]["optional-dependencies"]
    return {name: optional[name] for name in sorted(optional) if name not in FOR_IMAGES}


def dependency_tables(pyproject: str) -> str:
    """The dependency lists of pyproject.toml, so that tool settings do not rebuild the environment."""
    import tomllib

    project = tomllib.loads(pyproject)["project"]
    return repr((sorted(project["dependencies"]), list(extras(pyproject).items())))


def environment_hash(constraints: str, overrides: str, pyproject: str, interpreter: str) -> str:
    """Names an environment by what goes into it (12 hex digits)."""
    parts = [
        str(LAYOUT),
        interpreter,
        *requirement_lines(constraints),
        "overrides",
        *requirement_lines(overrides),
        "dependencies",
        dependency_tables(pyproject),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def interpreter_tag() -> str:
    return f"{sys.implementation.cache_tag}-{sys.platform}-{platform.machine()}"


# ------------------------------------------------------------------------------------------------ third-party packages


def has_venv_module() -> bool:
    """Debian splits it off its Python."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


def has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def install_packages(names: Sequence[str]) -> None:
    """Debian's. Raises SetupError where that is not for this process to do."""
    if not shutil.which("apt-get"):
        raise SetupError(f"install what your system calls {', '.join(names)}")
    if os.geteuid() != 0:
        raise SetupError(f"run `sudo apt-get install {' '.join(names)}`")
    with step(f"apt-get install {' '.join(names)}"):
        run(["apt-get", "update", "-q"])
        run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *names], DEBIAN_FRONTEND="noninteractive")


def ensure_venv_module() -> None:
    """As root on Debian it is installed, else the user is told."""
    if has_venv_module():
        return
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    try:
        install_packages([package])
    except SetupError as error:
        raise SetupError(f"{sys.executable} has no venv module: {error}, then `make setup` again") from None


def ensure_libraries() -> None:
    """Without them most things work; what does not is said."""
    missing = sorted({LIBRARIES[name] for name in LIBRARIES if not has_library(name)})
    if not missing:
        return
    try:
        install_packages([package for package, _ in missing])
    except SetupError as error:
        for package, user in missing:
            say(f"{user} cannot be loaded without {package}")
        say(f"to have it: {error}")


def ensure_uv(cache: Path) -> Path:
    """uv of the pinned version, from the PATH or brought by pip into `<cache>/boot-uv-<version>`."""
    boot = cache / f"boot-uv-{UV_VERSION}"
    uv = boot / "bin" / "uv"
    if uv.exists():
        return uv
    ensure_venv_module()
    with step(f"uv {UV_VERSION}"):
        building = Path(f"{boot}.tmp-{os.getpid()}")
        shutil.rmtree(building, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(building)])
        run([str(building / "bin" / "python"), "-m", "pip", "install", "-q", f"uv=={UV_VERSION}"])
        shutil.rmtree(boot, ignore_errors=True)
        building.rename(boot)
    return uv


def ensure_environment(cache: Path, root: Path = ROOT) -> Path:
    """`<cache>/env-<hash>` with every third-party package; returns its folder."""
    constraints, overrides, pyproject = (
        root / "constraints.txt",
        root / "scripts" / "overrides.txt",
        root / "pyproject.toml",
    )
    digest = environment_hash(constraints.read_text(), overrides.read_text(), pyproject.read_text(), interpreter_tag())
    environment = cache / f"env-{digest}"
    if environment.exists():
        say(f"third-party packages: {environment} (already there)")
        return environment
    uv = ensure_uv(cache)
    building = Path(f"{environment}.tmp-{os.getpid()}")
    remove_abandoned(environment)
    with step(f"third-party packages into {environment} (about 2.6 GB to download the first time)"):
        run([str(uv), "venv", "-q", "--python", sys.executable, "--relocatable", str(building)])
        install = [str(uv), "pip", "install", "--python", str(building / "bin" / "python"), "-r", str(pyproject)]
        install += [f"--extra={name}" for name in extras(pyproject.read_text())]
        install += ["-c", str(constraints), "--override", str(overrides)]
        run(install, UV_LINK_MODE=os.environ.get("UV_LINK_MODE", "hardlink"), UV_HTTP_TIMEOUT="180")
        building.rename(environment)
    return environment


def ensure_bytecode(environment: Path) -> None:
    """Compiles the packages once, also in an environment that an older setup made.

    Without it the first import of torch and vLLM takes minutes, and every import does where
    PYTHONDONTWRITEBYTECODE is set. A stopped run is continued: compileall skips what is up to date.
    """
    marker = environment / COMPILED
    if marker.exists():
        return
    packages = site_packages(environment)
    with step("bytecode of the packages"):
        compiler = [str(environment / "bin" / "python"), "-m", "compileall", "-qq", "-j", "0"]
        compiler += ["-x", rf"{re.escape(str(packages))}/.*/tests?/", str(packages)]
        # 1 means that a file does not compile: packages ship templates and code for other versions of Python.
        done = subprocess.run(compiler, stdin=subprocess.DEVNULL, check=False)
        if done.returncode not in (0, 1):
            raise SetupError(f"`{' '.join(compiler)}` ended with {done.returncode}; its output is above")
    marker.touch()


def remove_abandoned(environment: Path) -> None:
    """Deletes what a setup that was stopped half-way left; the lock says that nobody builds it now."""
    for left in environment.parent.glob(f"{environment.name}.tmp-*"):
        say(f"removing {left}, left by a setup that was stopped")
        shutil.rmtree(left, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ the checkout's .venv


def site_packages(prefix: Path) -> Path:
    return prefix / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def pth_lines(environment: Path, root: Path) -> list[str]:
    """Source folders first, so that a checkout wins over a package of the same name.

    `addsitedir` and not a bare path: packages of the environment ship .pth files of their own.
    """
    sources = [str(root / folder) for folder in SOURCE_FOLDERS]
    return [*sources, f"import site; site.addsitedir({str(site_packages(environment))!r})"]


def script(python: Path, target: str) -> str:
    module, function = target.split(":")
    return textwrap.dedent(f"""\
        #!{python}
        import sys
        from {module} import {function}
        sys.exit({function}())
        """)


def project_scripts(pyproject: str) -> dict[str, str]:
    import tomllib

    return dict(tomllib.loads(pyproject)["project"]["scripts"])


def write_metadata(folder: Path, pyproject: str) -> None:
    """A dist-info, so that importlib.metadata knows the version in a checkout as in an image."""
    import tomllib

    project = tomllib.loads(pyproject)["project"]
    name = re.sub(r"[-.]+", "_", project["name"])
    info = folder / f"{name}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "INSTALLER").write_text("omni-setup\n")
    entries = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    (info / "entry_points.txt").write_text(f"[console_scripts]\n{entries}")


def build_checkout_venv(environment: Path, root: Path = ROOT) -> Path:
    """`.venv` of the checkout: an interpreter, one .pth file and a few scripts."""
    final = root / ".venv"
    building = root / f".venv.tmp-{os.getpid()}"
    for left in root.glob(".venv.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    # Without pip: nothing is ever installed into it, so ensurepip is not needed either.
    run([sys.executable, "-m", "venv", "--without-pip", str(building)])
    packages = site_packages(building)
    pyproject = (root / "pyproject.toml").read_text()
    (packages / "_omni.pth").write_text("\n".join(pth_lines(environment, root)) + "\n")
    write_metadata(packages, pyproject)
    for name, target in {**TOOLS, **project_scripts(pyproject)}.items():
        path = building / "bin" / name
        path.write_text(script(final / "bin" / "python", target))
        path.chmod(0o755)
    for name in BINARIES:
        (building / "bin" / name).symlink_to(environment / "bin" / name)
    for path in building.glob("bin/[aA]ctivate*"):  # they hold the folder's name, which is about to change
        path.write_text(path.read_text().replace(str(building), str(final)).replace(building.name, final.name))
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    return final


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print-environment", action="store_true", help="print the folder of the packages and stop")
    options = parser.parse_args(arguments)
    cache = cache_dir()
    if options.print_environment:
        texts = [(ROOT / name).read_text() for name in ("constraints.txt", "scripts/overrides.txt", "pyproject.toml")]
        print(cache / f"env-{environment_hash(texts[0], texts[1], texts[2], interpreter_tag())}")
        return 0
    start = time.monotonic()
    try:
        with lock(cache / "setup.lock"):
            ensure_libraries()
            environment = ensure_environment(cache)
            ensure_bytecode(environment)
        with step("this checkout's .venv"):
            build_checkout_venv(environment)
    except SetupError as error:
        print(f"[setup] {error}", file=sys.stderr)
        return 1
    say(f"ready in {time.monotonic() - start:.1f} s: .venv/bin/omni")
    return 0


if __name__ == "__main__":
    sys.exit(main())
