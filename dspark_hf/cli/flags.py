"""Options of a command from a dataclass: its fields are the options, their `metadata` the help, `__post_init__` the check."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer


def numbers(text: str, kind: Callable[[str], Any], option: str) -> tuple:
    """What stands between the commas of `text`, each part read by `kind`."""
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas between them, got {text!r}.") from None


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as typer takes it: of each parameter whose type is a dataclass, the fields become options.

    A field is an option if its `metadata` has a "help", or if it is annotated with typer's; other fields keep their default.
    `metadata["flag"]` is the option's name where it is not the field's ("--out", "--stream/--no-stream"). Types are typer's, so
    a `Literal` is a choice. A tuple of numbers, or one whose `metadata` has "commas", is one text with commas between; other
    tuples are options that may be given again.

    A `ValueError` of `__post_init__` names fields in backticks; the user sees the options in their place.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, dict[str, _Option]] = {}  # by parameter, then by field
    for name, parameter in inspect.signature(function).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            types = get_type_hints(hints[name], include_extras=True)
            fields = [(field, types[field.name]) for field in dataclasses.fields(hints[name])]
            groups[name] = {
                f.name: _Option(f, t) for f, t in fields if "help" in f.metadata or get_origin(t) is Annotated
            }
            parameters += [option.parameter for option in groups[name].values()]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        for name, options in groups.items():
            given = {field: option.read(values.pop(field)) for field, option in options.items()}
            try:
                values[name] = hints[name](**given)
            except ValueError as error:
                raise ValueError(_as_flags(str(error), options)) from None
        return function(**values)

    del command.__wrapped__  # type: ignore[attr-defined]  # typer would look behind it
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _as_flags(message: str, options: dict[str, _Option]) -> str:
    flags = {f"`{field}`": option.flag.split("/")[0] for field, option in options.items()}
    return re.sub(r"`\w+`", lambda word: flags.get(word[0], word[0]), message)


class _Option:
    """One field as an option: the `parameter` that typer sees, and `read`, from what typer gives to the field's value."""

    def __init__(self, field: dataclasses.Field, hint: Any) -> None:
        default: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        self.flag = field.metadata.get("flag") or "--" + field.name.replace("_", "-")
        self.read: Callable[[Any], Any] = lambda value: value
        tuples = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is tuple]
        if tuples:
            item: Any = get_args(tuples[0])[0]
            preset = default
            if item in (int, float) or field.metadata.get("commas"):
                self.read = lambda text: numbers(text, item, self.flag) if text else preset
                if default not in (None, dataclasses.MISSING):
                    default = ",".join(f"{part:g}" if item is float else str(part) for part in default)
                hint = str | None
            else:
                self.read = lambda values: tuple(values or ())
                default = default or None
                hint = list[item] | None
        if "help" in field.metadata:
            hint = Annotated[hint, typer.Option(self.flag, help=field.metadata["help"])]
        self.parameter = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
            annotation=hint,
        )
