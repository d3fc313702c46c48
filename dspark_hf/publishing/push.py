"""A drafter's folder onto the Hub: what goes up, the checks before it, and the Hub's refusals in one line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError, safe_open

from ..loading.files import is_hub_id
from ..loading.pairs import hub_is_reachable
from ..model import modeling_dspark
from ..model.configuration_dspark import DSparkConfig
from ..model.modeling_dspark import DSparkDraftModel
from .card import CARD, TRAINING, check_drafter, read_card

AUTO_MAP = {
    cls._auto_class: f"{cls.__module__.split('.')[-1]}.{cls.__name__}" for cls in (DSparkConfig, DSparkDraftModel)
}
_MADE = ["*.tmp", "*.tmp/*", "*.lock", "*.incomplete", "__pycache__/*", "*/__pycache__/*", ".*", "*/.*"]
_WORK = [
    "rounds.jsonl",
    "*/rounds.jsonl",
    "answers.jsonl",
    "invented_prompts.jsonl",
    "training_log.jsonl",
    "features.*",
]
_CHECKPOINTS = ["checkpoint-*/*", "*-work/*", "*.pt", "*.pth", "*.bin", "*.pkl"]
IGNORED = [*_MADE, *_WORK, *_CHECKPOINTS]
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Upload:
    """A finished or (commit `None`) planned upload; `files` gives their sizes in bytes."""

    repo: str
    revision: str
    private: bool
    url: str
    files: dict[str, int]
    commit: str | None = None


def code_files() -> dict[str, Path]:
    """The code that travels with a drafter by name, so that it loads without this package; it imports nothing else of it."""
    return {file.name: file for file in sorted(Path(modeling_dspark.__file__).parent.glob("*_dspark.py"))}


def planned_files(folder: Path) -> dict[str, Path | bytes]:
    """Everything that goes up, by its path there: the folder's files, its config with `auto_map`, and the code.

    Raises:
        OSError, ValueError: the folder is no whole drafter, or has no card that names a licence.
    """
    check_drafter(folder)
    DSparkConfig.from_pretrained(folder)
    _check_weights(folder)
    card = _checked_card(folder)
    names = (file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file())
    files: dict[str, Path | bytes] = {n: folder / n for n in filter_repo_objects(names, ignore_patterns=IGNORED)}
    return files | code_files() | _json_files(folder, card.data.base_model)


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    token: str | None = None,
    revision: str | None = None,
    dry_run: bool = False,
) -> Upload:
    """Upload a drafter's folder in one commit; the repository and the branch are made where there are none.

    With `dry_run` everything is checked here and nothing is sent.

    Raises:
        OSError: the Hub can't be reached, or refused; the message says what to do.
        ValueError: `repo` is not owner/name, or the folder is not fit to be published.
    """
    if not _REPO.fullmatch(repo):
        raise ValueError(f"REPO must be of the form owner/name, e.g. me/my-drafter; got {repo!r}.")
    files = planned_files(folder)
    sizes = {name: len(f) if isinstance(f, bytes) else f.stat().st_size for name, f in files.items()}
    plan = Upload(repo, revision or constants.DEFAULT_REVISION, private, f"{constants.ENDPOINT}/{repo}", sizes)
    if dry_run:
        return plan
    token = token or get_token()
    if not token:
        raise OSError("No token for the Hub: log in with `hf auth login`, set HF_TOKEN, or give --token.")
    if not hub_is_reachable():
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise OSError(f"The Hub at {constants.ENDPOINT} can't be reached{offline}. Nothing was uploaded.")
    api = HfApi(endpoint=constants.ENDPOINT, token=token)
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        if plan.revision != constants.DEFAULT_REVISION:
            api.create_branch(repo, branch=plan.revision, exist_ok=True)
        operations = [CommitOperationAdd(name, f if isinstance(f, bytes) else str(f)) for name, f in files.items()]
        done = api.create_commit(repo, operations, commit_message="Upload a DSpark drafter", revision=plan.revision)
    except HTTPError as error:
        raise OSError(_refusal(error, repo)) from None
    return replace(plan, commit=done.oid)


def _json_files(folder: Path, base_model: str | list[str] | None) -> dict[str, Path | bytes]:
    """config.json with `auto_map`; in it and in training.json the target's Hub id where they hold a path of this machine."""
    files: dict[str, Path | bytes] = {}
    for name, key, added in (
        ("config.json", "target_model_name_or_path", {"auto_map": AUTO_MAP}),
        (TRAINING, "target", {}),
    ):
        if (folder / name).is_file():
            stored = json.loads((folder / name).read_text(encoding="utf-8")) | added
            if isinstance(base_model, str) and not is_hub_id(stored.get(key)):
                stored[key] = base_model
            files[name] = (json.dumps(stored, indent=2) + "\n").encode()
    return files


def _check_weights(folder: Path) -> None:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(
            f"{folder} has no weights in safetensors. Load the drafter and write it with save_pretrained; no other form "
            "is uploaded."
        )
    for file in weights:
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except SafetensorError as error:
            raise OSError(
                f"{file} can't be read ({error}): it is damaged or not whole. Write or copy it again."
            ) from None


def _checked_card(folder: Path) -> ModelCard:
    card = read_card(folder)
    if card is None:
        raise ValueError(f"{folder} has no card. Make one: dspark-hf card {folder} --licence apache-2.0")
    if not card.data.license:
        raise ValueError(
            f"The card {folder / CARD} names no licence. Put `license: ...` among the lines at its top, or make it "
            f"again: dspark-hf card {folder} --licence apache-2.0 --force"
        )
    return card


def _refusal(error: HTTPError, repo: str) -> str:
    """What the Hub's answer means here."""
    response = error.response if isinstance(error, HfHubHTTPError) else None
    if response is None:
        return f"The connection to the Hub broke ({error}). Run it again: what arrived is not sent twice."
    said = f" It says: {error.server_message}" if error.server_message else ""
    if response.status_code == 401:
        return f"The Hub did not accept the token (401).{said} Log in with `hf auth login`, or give --token."
    if response.status_code == 403:
        return (
            f"This token may not write to {repo} (403).{said} Use a token with write access, and a name or organisation "
            "of yours before the slash."
        )
    if isinstance(error, RepositoryNotFoundError) or response.status_code == 404:
        return f"No such repository: {repo} (404).{said} Check the name before the slash, and that the token sees it."
    return f"The Hub refused the upload ({response.status_code}).{said} {error}"
