"""One command-line option a setting, made from the settings themselves: name, legal values, meaning and default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape

from trt_backend.config import ConfigError
from trt_backend.settings import FIELDS, SERVER, flag_of, is_secret, legal_values, read_settings

errors = Console(stderr=True, highlight=False)
PARAMETER = "settings"
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file with settings.", rich_help_panel="Settings", show_default=False),
]


@contextmanager
def readable_errors() -> Iterator[None]:
    """What an operator can put right is one message and exit code 1, never a traceback."""
    try:
        yield
    except ConfigError as error:
        errors.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def takes_settings(
    server: bool = False, preset: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `--config` and an option for each setting in place of its parameter `settings`.

    With `server` it takes those of the server, too. `preset` has defaults of this command alone. Values travel as
    text: whichever way a setting comes, it is judged in one place.
    """
    keys = [key for key, field in FIELDS.items() if (server or not key.startswith(SERVER)) and not is_secret(field)]
    names = {key.rpartition(".")[2]: key for key in keys}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name != PARAMETER]
        file = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
        options = [_option(name, key, FIELDS[key]) for name, key in names.items()]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            flags = {key: given.pop(name) for name, key in names.items()}
            with readable_errors():
                settings = read_settings(
                    given.pop("config"),
                    {key: value for key, value in flags.items() if value is not None},
                    preset=preset,
                )
                command(**given, **{PARAMETER: settings})

        run.__signature__ = signature.replace(parameters=[*own, file, *options])  # type: ignore[attr-defined]
        return run

    return decorate


def _option(name: str, key: str, field: FieldInfo) -> inspect.Parameter:
    legal = legal_values(field)
    default = "" if field.default is None else f"; default {_shown(field.default)}"
    flag = flag_of(key)
    is_switch = field.annotation is bool
    option = typer.Option(
        f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag,
        metavar=None if is_switch else name.rpartition("_")[2].upper(),
        help=escape(f"{field.description}{f' ({legal})' if legal else ''}{default}"),
        rich_help_panel=f"Settings of the {'server' if key.startswith(SERVER) else 'deployment'}",
        show_default=False,
    )
    kind = bool | None if is_switch else str | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
