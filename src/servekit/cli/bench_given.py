"""Refuses options that the chosen mode of a command would not read: nothing is given and then ignored."""

from collections.abc import Iterable

import typer

from servekit.errors import ConfigError


def refuse_given(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise ConfigError for the first of these parameters that stands on the command line."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.replace('_', '-')} {why}", param=name)


def refuse_all_but(context: typer.Context, allowed: Iterable[str], why: str) -> None:
    """Raise ConfigError for the first parameter on the command line that is not `allowed`."""
    refuse_given(context, [name for name in context.params if name not in set(allowed)], why)
