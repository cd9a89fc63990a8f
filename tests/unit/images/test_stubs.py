"""Stubs of CUDA libraries: same symbols and versions, functions that report an error, files of others untouched."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from omni_image import stubs
from omni_image.stubs import Symbol

READELF = """\
Symbol table '.dynsym' contains 4 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     0: 0000000000000000     0 NOTYPE  LOCAL  DEFAULT  UND
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND malloc@GLIBC_2.2.5 (2)
     2: 0000000000001100    16 FUNC    GLOBAL DEFAULT   12 cublasCreate_v2@@libcublas.so.13
     3: 0000000000004010  0x10 OBJECT  GLOBAL DEFAULT   24 table
"""


def test_symbols_are_read_with_their_versions() -> None:
    defined, undefined = stubs.parse_symbols(READELF)
    assert defined == (
        Symbol("cublasCreate_v2", is_object=False, size=16, version="libcublas.so.13"),
        Symbol("table", is_object=True, size=16, version=""),
    )
    assert undefined == {"malloc"}


def test_needed_libraries() -> None:
    text = " 0x1 (NEEDED)  Shared library: [libcudnn.so.9]\n 0xe (SONAME) Library soname: [x]\n"
    assert stubs.parse_needed(text) == {"libcudnn.so.9"}


def test_source_of_a_stub() -> None:
    stub = stubs.build_stub(
        [
            Symbol("doWork", False, 8, "v1"),
            Symbol("workErrorString", False, 8, "v1"),
            Symbol("table", True, 4, "v2"),
            Symbol("cudnnGetVersion", False, 8, "v1"),
        ]
    )
    assert "int doWork(void) { return 1; }" in stub.code
    assert "const char *workErrorString" in stub.code
    assert "char table[8]" in stub.code
    assert "92000" in stub.code
    assert stub.version_script.splitlines() == [
        "v1 { global: cudnnGetVersion; doWork; workErrorString; };",
        "v2 { global: table; };",
    ]


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("readelf")), reason="needs gcc and binutils")
def test_a_library_is_replaced_and_its_hard_link_is_not(tmp_path: Path) -> None:
    packages, cache = tmp_path / "site-packages", tmp_path / "cache"
    for folder in (packages / "nvidia/blas/lib", packages / "torch/lib", cache):
        folder.mkdir(parents=True)
    (tmp_path / "real.c").write_text("int used(void) { return 7; } int unused(void) { return 7; }")
    (tmp_path / "user.c").write_text("int used(void); int call(void) { return used(); }")
    real, user = packages / "nvidia/blas/lib/libblas.so.1", packages / "torch/lib/user.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libblas.so.1", "-o", str(real), str(tmp_path / "real.c")], check=True
    )
    subprocess.run(
        [
            "gcc", "-shared", "-fPIC", "-o", str(user), str(tmp_path / "user.c"), str(real),
            f"-Wl,-rpath,{real.parent}",
        ],
        check=True,
    )  # fmt: skip
    os.link(real, cache / "libblas.so.1")
    before = (cache / "libblas.so.1").read_bytes()

    stubs.replace_cuda_libraries(packages, lambda _: None)

    assert (cache / "libblas.so.1").read_bytes() == before
    assert ctypes.CDLL(str(cache / "libblas.so.1")).used() == 7
    assert ctypes.CDLL(str(real)).used() == 1
    assert not hasattr(ctypes.CDLL(str(real)), "unused")


def test_a_cpu_build_of_torch_is_left_alone(tmp_path: Path) -> None:
    assert stubs.replace_cuda_libraries(tmp_path, lambda _: None) == 0
