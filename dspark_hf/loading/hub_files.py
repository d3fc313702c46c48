"""Whether the Hub can be reached, and how models are loaded where it can't.

Owns: the check, loading arguments for a folder or Hub id, one-line errors for what is not to be had.
Does not own: loading, pushing (`publishing.hub`).
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

_CONNECT_SECONDS = 2.0


def hub_is_reachable(seconds: float = _CONNECT_SECONDS) -> bool:
    """Whether the Hub answers within about `seconds`, name look-up included; offline mode counts as no."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever goes wrong on the way, the Hub is not reachable
            get_session().head(constants.ENDPOINT, timeout=seconds)
            answers.append(True)

    # In a thread, because a look-up of the name alone can block for longer than any timeout given here.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + 1.0)
    return bool(answers)


def where_to_load(
    source: str, what: str, *, revision: str | None = None, cache_dir: Any = None, local_files_only: bool = False
) -> dict[str, Any]:
    """Loading arguments for a folder or Hub id: an id is taken from the cache alone where the Hub can't be reached.

    The client would try again for about 20 seconds with each file of the model.

    Raises:
        OSError: neither a folder, nor of the form owner/name, nor to be had.
    """
    if Path(source).expanduser().is_dir():
        return {}
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise OSError(
            f"No {what} at {source}: give a folder that holds config.json, or a Hub id of the form owner/name."
        )
    if not local_files_only and hub_is_reachable():
        return {}
    if not isinstance(try_to_load_from_cache(source, "config.json", cache_dir, revision), str):
        more = f" --revision {revision}" if revision else ""
        raise OSError(
            f"The {what} {source} is neither a folder here nor in the cache, and the Hugging Face Hub can't be reached. "
            f"Fetch it where there is a network: hf download {source}{more}"
        )
    return {"local_files_only": True}
