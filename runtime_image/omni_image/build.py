"""Carries out an image plan: gathers digests, prepares context folders, calls the engine, loads the result."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from omni_cluster.errors import MissingPrerequisite, StepFailed
from omni_cluster.paths import cache_dir
from omni_cluster.progress import say, step
from omni_image import content, debian, dockerfile, environment, pins, process
from omni_image.engines import Build, Engine
from omni_image.plan import KINDS, Digests, ImageKind, ImagePlan, Tier, context_parts, plan_image, plan_work, short_name

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALL = "runtime_image/install"
#: Small files that every context has.
SCRIPTS = ("pyproject.toml", "constraints.txt", "scripts/overrides.txt", INSTALL)


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """What came out. `name` as a pod's spec has it; `size` in bytes, uncompressed; `built` tells whether anything was done."""

    kind: str
    name: str
    size: int
    built: bool


def images_dir() -> Path:
    return cache_dir() / "images"


def models_dir() -> Path:
    """Where `omni models prepare` puts the packaged models."""
    return cache_dir() / "models"


def requirements_of(extra: str, root: Path = ROOT) -> list[str]:
    """What one extra or dependency group asks for; the same code runs inside the Dockerfiles."""
    import tomllib

    return list(_requirements_module(root).requirements(tomllib.loads((root / "pyproject.toml").read_text()), extra))


def _requirements_module(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("omni_image_requirements", root / INSTALL / "requirements.py")
    if spec is None or spec.loader is None:
        raise MissingPrerequisite(f"{root} is no checkout of the repository; images are built from one")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins_of(extra: str, root: Path = ROOT) -> tuple[str, ...]:
    overrides = (root / "scripts/overrides.txt").read_text()
    return pins.closure(requirements_of(extra, root), overrides)


def observe_digests(kind: ImageKind, base: str | None, root: Path = ROOT) -> Digests:
    """Read everything that names the image. `base`: a base image given by the user instead of Debian."""
    for name in kind.sources:
        if not (root / name).is_dir():
            raise MissingPrerequisite(
                f"{root / name} does not exist; images are built from a checkout of the repository"
            )
    # What prepares packages on the host decides what is inside as much as the scripts that run inside.
    tools = ["environment", *(["stubs"] if kind.stub_cuda else [])]
    host = content.tree_digest(root, [f"runtime_image/omni_image/{name}.py" for name in tools])
    models = ""
    if "models" in kind.targets:
        prepared = sorted(
            path.name for path in models_dir().glob("*") if path.is_dir() and not path.name.startswith(".")
        )
        models = content.tree_digest(models_dir(), prepared)
    return Digests(
        debian=base or debian.recipe(),
        pins=content.text_digest([*pins_of(kind.extra, root), host]),
        recipes=observe_recipes(kind, root),
        models=models,
        sources=content.tree_digest(root, kind.sources),
    )


def observe_recipes(kind: ImageKind, root: Path = ROOT) -> dict[str, str]:
    """A digest for each stage of the Dockerfile: its instructions and the scripts they run, comments left out."""
    file = dockerfile.parse((root / kind.dockerfile).read_text())
    recipes = {}
    for target in kind.targets:
        instructions = file.stage(target)
        # pyproject.toml is read for a few of its lines; as a whole it would rebuild gigabytes for a linter's setting.
        scripts = [name for name in dockerfile.context_files(instructions) if name != "pyproject.toml"]
        lines = [f"{item.word} {item.value}" for item in instructions]
        recipes[target] = content.text_digest([*lines, content.tree_digest(root, scripts)])
    return recipes


def plan(kind: ImageKind, base: str | None = None, root: Path = ROOT) -> ImagePlan:
    """The plan of a kind of image for the checkout as it is now."""
    return plan_image(kind, observe_digests(kind, base, root))


def prepare_models() -> None:
    """Unpack the packaged models once. In a process of its own: it imports torch and returns the memory afterwards."""
    command = [sys.executable, "-m", "omni_runtime.cli", "models", "prepare", "--target", str(models_dir())]
    with step("demo models"):
        result = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
        if result.returncode:
            raise StepFailed("`omni models prepare` failed; its output is above")


def build_image(kind: ImageKind, engine: Engine, base: str | None = None, root: Path = ROOT) -> BuiltImage:
    """Build what is missing of one image. Safe to call from several processes; unchanged images cost a second."""
    if "models" in kind.targets:
        prepare_models()
    with _lock(kind.name):
        planned = plan(kind, base, root)
        existing = engine.images()
        work = plan_work(planned, existing)
        if not work:
            say(f"  ✓ {short_name(planned.image)} is up to date")
            return BuiltImage(kind.name, short_name(planned.image), engine.size(planned.image), built=False)
        log = process.log_path(kind.name)
        log.write_bytes(b"")
        lowest = work[0] is planned.tiers[0]
        if lowest and base is None and planned.debian not in existing:
            _build_debian(planned.debian, engine, log)
        for tier in work:
            _build_tier(planned, tier, engine, base, root, log)
        return BuiltImage(kind.name, short_name(planned.image), engine.size(planned.image), built=True)


def build_images(names: Sequence[str], engine: Engine, base: str | None = None) -> list[BuiltImage]:
    return [build_image(KINDS[name], engine, base) for name in names]


def _build_debian(image: str, engine: Engine, log: Path) -> None:
    with scratch("debian") as folder:
        rootfs = folder / "rootfs"
        debian.prepare_rootfs(rootfs, log)
        with step("Debian -> image"):
            engine.import_rootfs(rootfs, image, log)


def _build_tier(planned: ImagePlan, tier: Tier, engine: Engine, base: str | None, root: Path, log: Path) -> None:
    kind = planned.kind
    with scratch(f"{kind.name}-{tier.target}") as context:
        _copy_scripts(kind, context, root)
        for part in context_parts(kind, tier.target):
            if part == "environment":
                environment.prepare(context / part, pins_of(kind.extra, root), stub_cuda=kind.stub_cuda, log=log)
            elif part == "models":
                shutil.copytree(models_dir(), context / part, copy_function=_link_or_copy, ignore=_hidden)
            else:
                _copy_sources(root / part, context / part)
        path = context / kind.dockerfile
        path.write_text(dockerfile.single_stage(dockerfile.parse(path.read_text()), tier.target))
        lower = base if base is not None and tier is planned.tiers[0] else tier.base
        build = Build(
            dockerfile=path,
            context=context,
            target=tier.target,
            image=tier.image,
            arguments={"BASE": lower},
            final=tier is planned.tiers[-1],
            log=log,
        )
        with step(f"{kind.name}: {tier.target} ({engine.name})") as waiting_for:
            engine.build(build, waiting_for)


def _copy_scripts(kind: ImageKind, context: Path, root: Path) -> None:
    for name in (*SCRIPTS, kind.dockerfile):
        source, target = root / name, context / name
        if source.is_dir():
            _copy_sources(source, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def _copy_sources(source: Path, target: Path) -> None:
    """Files that count as content, with modes that any user can read: a checkout may have a tight umask."""
    for relative in content.files_below(source):
        to = target / relative
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, to)
        to.chmod(0o755 if (source / relative).stat().st_mode & 0o100 else 0o644)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _hidden(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(".")]


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """An empty folder beside the cache (hard links need the same file system), deleted afterwards."""
    folder = images_dir() / "work" / f"{name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(name: str) -> Iterator[None]:
    path = images_dir() / f".{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(f"wait for another build of {name}"):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def prune() -> int:
    """Delete final images, and the layers only they have, that are not of this checkout; returns the bytes freed."""
    from omni_image import layout

    keep = {plan(kind).image for kind in KINDS.values()}
    folder = images_dir() / "layout"
    return layout.prune(folder, keep & set(layout.image_names(folder)))
