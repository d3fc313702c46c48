"""What the sub-commands share: the app, consoles, common options and checks."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from ..loading import AUTO, DEFAULT_TARGET
from .flags import with_options

if TYPE_CHECKING:
    from ..loading.pairs import Pair


class _App(typer.Typer):
    """Commands may take dataclasses (`flags`), and torch is loaded when one begins, not when its `--help` is shown."""

    def command(self, *names: Any, **settings: Any) -> Callable[[Callable], Callable]:  # type: ignore[override]
        def decorate(function: Callable) -> Callable:
            @functools.wraps(function)
            def run(**values: Any) -> Any:
                _start_work()
                return function(**values)

            typer.Typer.command(self, *names, **settings)(with_options(run))
            return function

        return decorate


app = _App(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Faster generation with Hugging Face language models, token for token the same.",
)
# In a file or a pipe, rich would squeeze tables into 80 columns.
# Without markup: what we print holds names, paths and errors, whose brackets are to be seen.
out = Console(width=None if sys.stdout.isatty() else 130, markup=False, highlight=False)
err = Console(stderr=True, markup=False, highlight=False)

_DRAFTER = "Drafter: a Hub id or a folder; auto is the target's known one (see dspark-hf drafters)."
TargetOption = Annotated[str, typer.Option(help="Target model: a Hub id or a folder.")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16."),
]
DeviceOption = Annotated[str | None, typer.Option(help="Device, e.g. cpu or cuda; an accelerator where there is one.")]


@dataclass(frozen=True)
class PairOptions:
    """A target and its drafter."""

    target: TargetOption = DEFAULT_TARGET
    drafter: Annotated[str, typer.Option(help=_DRAFTER)] = AUTO
    device: DeviceOption = None
    dtype: DtypeOption = "auto"

    def load(self) -> Pair:
        from ..loading.pairs import load_pair

        return load_pair(self.target, self.drafter, self.device, self.dtype)


def _start_work() -> None:
    import dspark_hf

    dspark_hf.register()
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights; work of ours has bars of its own


def at_least(value: float | None, low: float, option: str) -> None:
    if value is not None and not low <= value < math.inf:
        raise ValueError(f"{option} must be at least {low:g} and finite, got {value:g}.")


def existing_file(path: Path | None) -> None:
    """Refuse a file that is not there."""
    if path is not None and not path.is_file():
        raise OSError(f"No such file: {path}.")


def writable_file(path: Path | None) -> None:
    """Refuse a file that can't be written, before the work whose result it is to hold."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise OSError(f"{path} can't be written: give a file in a folder of yours.")


def need_modules(*names: str, extra: str = "eval") -> None:
    """Refuse early, before hours of work, where an optional library is missing."""
    import importlib.util

    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise OSError(
            f"This needs {' and '.join(missing)}: pip install 'dspark-hf[{extra}]' (in a checkout: -e .[{extra}])."
        )
