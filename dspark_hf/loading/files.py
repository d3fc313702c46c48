"""Files and folders that are whole or not there at all, and where this package keeps its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants


def cache_folder() -> Path:
    """`dspark` in the Hugging Face cache folder: converted models, step-rate tables."""
    return Path(constants.HF_HOME) / "dspark"


def is_hub_id(name: str | None) -> bool:
    """Whether a name has the Hub's form owner/name and is no folder here."""
    if not name or name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        return False
    return not Path(name).is_dir()


def write_bytes(data: bytes, path: Path) -> None:
    """Write under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(text: str, path: Path) -> None:
    """`text` in UTF-8, written as a whole."""
    write_bytes(text.encode(), path)


def write_json(data: Any, path: Path) -> None:
    """`data` as indented JSON, written as a whole."""
    write_text(json.dumps(data, indent=2) + "\n", path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; {} where there is none, or the file is damaged."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def holds_drafter(folder: Path) -> bool:
    """Whether a folder holds a drafter in this package's own form."""
    return read_json(folder / "config.json").get("model_type") == "dspark"


def refuse_other_models(folder: Path, option: str) -> None:
    """Raise where `folder` holds a model that is no drafter of ours, which writing there would overwrite."""
    if (folder / "config.json").is_file() and not holds_drafter(folder):
        raise ValueError(f"{folder} holds another model. Give {option} a new folder, or one of a drafter's.")


def move_files(temporary: Path, folder: Path) -> None:
    """Put each file of `temporary` in its place in `folder`, and remove `temporary`; other files there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in temporary.iterdir():
        file.chmod(0o644)
        os.replace(file, folder / file.name)
    temporary.rmdir()


def reserve_space(path: Path, num_bytes: int, what: str) -> None:
    """Make `path` at least `num_bytes` long with its blocks taken, so that writing into it can't run out of disk.

    What it holds stays. Where the file system can't take blocks, the free space is compared.

    Raises:
        OSError: there is too little room; the file is as it was before, or not there.
    """
    held = path.stat().st_size if path.exists() else None
    free = shutil.disk_usage(path.parent).free
    fits = num_bytes - (held or 0) <= free
    try:
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        return
    except AttributeError:  # there is none on macOS and Windows
        pass
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fits = False
        elif error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    if fits:
        return
    if held is None:
        path.unlink()
    else:
        os.truncate(path, held)
    raise OSError(
        f"No room for {what} in {path.parent}: {num_bytes / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB are free. Make room "
        "and start again; what was finished is kept."
    )


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to write into, which becomes `folder` (absent or empty) if the block ends well, and is gone if not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", suffix=".tmp", dir=folder.parent))
    try:
        yield temporary
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
