"""Replaces the CUDA libraries that torch's ordinary build links to by stubs, for images that run on CPUs only.

The package index carries torch with CUDA only: 4 GB of libraries that a CPU never calls, yet the dynamic linker wants them.
Each is replaced by a small library with the same name, symbols and symbol versions whose functions return an error
status. Where a CPU build of torch is to be had, this is not needed; it is no part of the Dockerfiles.

What was tried and does not work: a stub in place of libtorch_cuda.so itself (C++ static initialisers register operators),
and `patchelf --remove-needed` (torch's Python code looks the symbols up).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from omni_cluster.errors import StepFailed
from omni_cluster.prerequisites import ensure_packages

#: Small (8 MB together) and called when torch is imported: kept as they are.
KEPT = frozenset({"libcudart.so.13", "libcupti.so.13", "libcufile.so.0"})
#: Who links to the CUDA libraries, as patterns below site-packages.
USERS = (
    "torch/lib/*.so",
    "torch/*.so",
    "torchvision/*.so",
    "torchaudio/**/*.so",
    "torchcodec/*.so",
    "vllm/*.so",
)
MESSAGE = "CUDA library removed from this image"
#: Functions whose answer is checked on import; versions are those of the libraries that are replaced.
ANSWERS: Mapping[str, str] = {
    "cudnnGetVersion": "long cudnnGetVersion(void) { return 92000; }",
    "cudnnGetCudartVersion": "long cudnnGetCudartVersion(void) { return 13000; }",
    "cudnnGetProperty": "int cudnnGetProperty(int what, int *value) { *value = what == 0 ? 9 : what == 1 ? 20 : 0; return 0; }",
    "ncclGetVersion": "int ncclGetVersion(int *version) { *version = 22907; return 0; }",
}
_TEXT = re.compile(r"ErrorString|StatusString|StatusName|LastError")


@dataclass(frozen=True, slots=True)
class Symbol:
    """One dynamic symbol that a library defines. `size` in bytes; `version` is '' where symbols are unversioned."""

    name: str
    is_object: bool
    size: int
    version: str


@dataclass(frozen=True, slots=True)
class Stub:
    """Source of one stub: C code and, where symbols are versioned, a linker version script."""

    code: str
    version_script: str


def parse_symbols(readelf: str) -> tuple[tuple[Symbol, ...], frozenset[str]]:
    """Defined symbols and names of undefined ones, from `readelf --wide --dyn-syms`."""
    defined, undefined = [], set()
    for line in readelf.splitlines():
        fields = line.split()
        if len(fields) < 8 or not re.fullmatch(r"\d+:", fields[0]):
            continue
        name, _, version = fields[7].partition("@")
        if fields[6] == "UND":
            undefined.add(name)
        else:
            defined.append(Symbol(name, fields[3] == "OBJECT", int(fields[2], 0), version.lstrip("@")))
    return tuple(defined), frozenset(undefined)


def parse_needed(readelf: str) -> frozenset[str]:
    """Libraries that a file links to, from `readelf --wide --dynamic`."""
    return frozenset(re.findall(r"\(NEEDED\).*\[(.*?)\]", readelf))


def build_stub(symbols: Iterable[Symbol]) -> Stub:
    """Code with the given symbols; functions return 1, an error status in every CUDA library."""
    chosen = sorted({symbol.name: symbol for symbol in symbols}.values(), key=lambda symbol: symbol.name)
    lines = []
    for symbol in chosen:
        if symbol.is_object:
            lines.append(f"char {symbol.name}[{max(symbol.size, 8)}] __attribute__((aligned(16)));")
        elif symbol.name in ANSWERS:
            lines.append(ANSWERS[symbol.name])
        elif _TEXT.search(symbol.name):
            lines.append(f'const char *{symbol.name}(void) {{ return "{MESSAGE}"; }}')
        else:
            lines.append(f"int {symbol.name}(void) {{ return 1; }}")
    versions = sorted({symbol.version for symbol in chosen if symbol.version})
    script = "\n".join(
        f"{version} {{ global: {' '.join(s.name + ';' for s in chosen if s.version == version)} }};"
        for version in versions
    )
    return Stub("\n".join(lines) + "\n", script)


def replace_cuda_libraries(packages: Path, waiting_for: Callable[[str], None]) -> int:
    """Replace `nvidia/` below site-packages by stubs of what its users need; returns the bytes saved.

    Never writes into an existing file: they may be hard links into a shared cache. Needs gcc and readelf.
    """
    ensure_packages({"gcc": "gcc", "libc6-dev": "/usr/include/stdio.h", "binutils": "readelf"})
    nvidia = packages / "nvidia"
    if not nvidia.is_dir():
        return 0  # a CPU build of torch
    real = {path.name: path for path in nvidia.glob("*/lib/*.so*")}
    users = [path for pattern in USERS for path in packages.glob(pattern)] + [
        real[name] for name in KEPT if name in real
    ]
    wanted: set[str] = set()
    undefined: set[str] = set()
    for user in users:
        wanted |= {name for name in parse_needed(_readelf("--dynamic", user)) if name in real and name not in KEPT}
        undefined |= parse_symbols(_readelf("--dyn-syms", user))[1]
    before = sum(path.lstat().st_size for path in nvidia.rglob("*") if not path.is_dir())
    with tempfile.TemporaryDirectory(prefix="omni-stubs-") as folder:
        kept = Path(folder) / "nvidia"
        for name in sorted(wanted):
            waiting_for(name)
            defined, _ = parse_symbols(_readelf("--dyn-syms", real[name]))
            stub = build_stub(symbol for symbol in defined if symbol.name in undefined)
            _compile(stub, name, kept / real[name].relative_to(nvidia))
        for name in sorted(KEPT & real.keys()):
            target = kept / real[name].relative_to(nvidia)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(real[name], target)
        shutil.rmtree(nvidia)
        shutil.copytree(kept, nvidia)
    return before - sum(path.lstat().st_size for path in nvidia.rglob("*") if not path.is_dir())


def _readelf(what: str, path: Path) -> str:
    return subprocess.run(["readelf", "--wide", what, str(path)], capture_output=True, text=True, check=False).stdout


def _compile(stub: Stub, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source, script = target.with_suffix(".c"), target.with_suffix(".map")
    source.write_text(stub.code)
    command = ["gcc", "-w", "-shared", "-fPIC", "-O1", "-s", f"-Wl,-soname,{name}", "-o", str(target), str(source)]
    if stub.version_script:
        script.write_text(stub.version_script)
        command.append(f"-Wl,--version-script={script}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise StepFailed(f"the stub of {name} does not compile: {result.stderr[-2000:]}")
    source.unlink()
    script.unlink(missing_ok=True)
