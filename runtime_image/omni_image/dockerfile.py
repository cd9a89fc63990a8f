"""Parses Dockerfiles and checks the rules that our images keep. Pure.

Only what the rules need is understood: stages, arguments, instructions with continuation lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its word in capitals, the rest joined to one line, and its first line (from 1)."""

    word: str
    value: str
    line: int


@dataclass(frozen=True, slots=True)
class Dockerfile:
    instructions: tuple[Instruction, ...]

    def of(self, *words: str) -> tuple[Instruction, ...]:
        return tuple(item for item in self.instructions if item.word in words)

    @property
    def final_stage(self) -> tuple[Instruction, ...]:
        """Instructions after the last FROM."""
        start = max((index for index, item in enumerate(self.instructions) if item.word == "FROM"), default=-1)
        return self.instructions[start + 1 :]

    def stage(self, name: str) -> tuple[Instruction, ...]:
        """Instructions of one stage, with its FROM. Raises KeyError when there is none of this name."""
        found: list[Instruction] = []
        inside = False
        for item in self.instructions:
            if item.word == "FROM":
                inside = bool(re.search(rf"\bAS\s+{re.escape(name)}$", item.value, re.IGNORECASE))
            if inside:
                found.append(item)
        if not found:
            raise KeyError(name)
        return tuple(found)

    @property
    def stages(self) -> tuple[str, ...]:
        names = (re.search(r"\bAS\s+(\S+)", item.value, re.IGNORECASE) for item in self.of("FROM"))
        return tuple(match.group(1) if match else "" for match in names)


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    line: int
    problem: str
    fix: str


def parse(text: str) -> Dockerfile:
    """Raises ValueError for a line that is no instruction."""
    instructions: list[Instruction] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        start = start if pending else number
        pending = f"{pending} {raw.strip()}".strip()
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip()
            continue
        match = re.fullmatch(r"([A-Za-z]+)\s+(.*)", pending)
        if match is None:
            raise ValueError(f"line {start}: {pending[:60]!r} is no Dockerfile instruction")
        instructions.append(Instruction(match[1].upper(), match[2], start))
        pending = ""
    if pending:
        raise ValueError(f"line {start}: the last instruction ends in a continuation")
    return Dockerfile(tuple(instructions))


def single_stage(file: Dockerfile, name: str) -> str:
    """A Dockerfile of one stage, on top of whatever image BASE names: builds a tier without running those below it."""
    _, *rest = file.stage(name)
    return "\n".join(["ARG BASE", f"FROM ${{BASE}} AS {name}", *(f"{item.word} {item.value}" for item in rest)]) + "\n"


def context_files(instructions: Iterable[Instruction]) -> tuple[str, ...]:
    """Files of the build context that RUN instructions use through their bind mount at /context."""
    words = (word for item in instructions if item.word == "RUN" for word in item.value.split())
    return tuple(sorted({word.removeprefix("/context/") for word in words if word.startswith("/context/")}))


def exec_form(value: str) -> bool:
    """Whether a command is a JSON list of strings: then it is run directly and gets the container's signals."""
    try:
        words = json.loads(value)
    except ValueError:
        return False
    return isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)


Rule = Callable[[Dockerfile], Iterator[Finding]]


def user_is_not_root(file: Dockerfile) -> Iterator[Finding]:
    """A number, because the kubelet cannot tell for a name whether it is root (runAsNonRoot)."""
    users = [item for item in file.final_stage if item.word == "USER"]
    if not users:
        yield Finding("non-root", len(file.instructions), "the final stage has no USER", "end with USER 65532:65532")
    elif not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1].value):
        yield Finding("non-root", users[-1].line, f"USER {users[-1].value} is not numeric non-root", "USER 65532:65532")


def entrypoint_gets_signals(file: Dockerfile) -> Iterator[Finding]:
    """In shell form /bin/sh is the first process and keeps SIGTERM to itself; pods then end by SIGKILL."""
    commands = [item for item in file.final_stage if item.word in ("ENTRYPOINT", "CMD")]
    if not any(item.word == "ENTRYPOINT" for item in commands):
        yield Finding("signals", len(file.instructions), "there is no ENTRYPOINT", 'ENTRYPOINT ["program"]')
    for item in commands:
        if not exec_form(item.value):
            yield Finding(
                "signals", item.line, f"{item.word} is in shell form", 'write it as a list: ["program", "argument"]'
            )


def nothing_is_fetched_by_address(file: Dockerfile) -> Iterator[Finding]:
    """ADD of a URL is neither cached nor checked, and does not work without a network."""
    for item in file.of("ADD"):
        yield Finding("no-add", item.line, f"ADD {item.value[:60]}", "COPY from the build context")
    for item in file.of("RUN"):
        if match := re.search(r"\b(curl|wget)\b|https?://", item.value):
            yield Finding("no-add", item.line, f"RUN fetches with {match[0]}", "put the file into the build context")


def base_is_an_argument(file: Dockerfile) -> Iterator[Finding]:
    """A team builds on its own base; the default has a version, so that a rebuild gives the same image."""
    declared = {item.value.partition("=")[0]: item for item in file.instructions if item.word == "ARG"}
    stages: set[str] = set()
    for item, name in zip(file.of("FROM"), file.stages, strict=True):
        source = item.value.split()[0]
        if match := re.fullmatch(r"\$\{?(\w+)\}?", source):
            argument = declared.get(match[1])
            default = argument.value.partition("=")[2] if argument else ""
            if not re.search(r":[^/]*\d|@sha256:", default):
                yield Finding(
                    "pinned-base",
                    item.line,
                    f"the default of {match[1]} is {default or 'absent'}",
                    "ARG NAME=image:1.2.3",
                )
        elif source not in stages:
            yield Finding("pinned-base", item.line, f"FROM {source} is fixed", "ARG BASE=image:1.2.3 and FROM ${BASE}")
        stages.add(name)


def no_latest(file: Dockerfile) -> Iterator[Finding]:
    for item in file.instructions:
        if re.search(r":latest\b", item.value):
            yield Finding("no-latest", item.line, "`latest` means another image every week", "name a version")


def no_shell_tricks(file: Dockerfile) -> Iterator[Finding]:
    """apt-get without clean-up, and sudo, have no place; packages go through install/system.sh."""
    for item in file.of("RUN"):
        if re.search(r"\bsudo\b|apt-get|apk add|dnf |yum ", item.value):
            yield Finding(
                "packages", item.line, "RUN installs packages by itself", "use runtime_image/install/system.sh"
            )


RULES: tuple[Rule, ...] = (
    user_is_not_root,
    entrypoint_gets_signals,
    nothing_is_fetched_by_address,
    base_is_an_argument,
    no_latest,
    no_shell_tricks,
)


def lint(file: Dockerfile, rules: Iterable[Rule] = RULES) -> tuple[Finding, ...]:
    return tuple(finding for rule in rules for finding in rule(file))
