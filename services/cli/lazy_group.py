"""A group of commands whose modules are imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import NamedTuple

import click


class LazyCommand(NamedTuple):
    """Where a command is, as MODULE:NAME, and one line about it for the help of its group."""

    where: str
    summary: str

    def load(self) -> click.Command:
        """Import the command."""
        module, _, name = self.where.partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


class LazyCommands(MutableMapping[str, click.Command]):
    """The commands of a group by name."""

    def __init__(self, lazy: Mapping[str, LazyCommand]) -> None:
        """Import nothing yet."""
        self.lazy = dict(lazy)
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        """Import a command."""
        if name not in self._loaded:
            self._loaded[name] = self.lazy[name].load()
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        """Add a command that is there already."""
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        """Remove a command."""
        del self.lazy[name]

    def __iter__(self) -> Iterator[str]:
        """List the names."""
        return iter({**self.lazy, **self._loaded})

    def __len__(self) -> int:
        """Count the commands."""
        return len({**self.lazy, **self._loaded})


class LazyGroup(click.Group):
    """A group whose help imports none of its commands."""

    def __init__(self, *, lazy: Mapping[str, LazyCommand], **attributes: object) -> None:
        """Take where the commands are, by name."""
        super().__init__(**attributes)  # type: ignore[arg-type]
        self._lazy = lazy
        self.commands = LazyCommands(lazy)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as click has it
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name].summary) for name in sorted(self._lazy)])
