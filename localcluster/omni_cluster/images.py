from pathlib import Path
def as_archive(image: str, name_as: str | None, folder: Path) -> Path:
    raise NotImplementedError
