"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from .completion import entry_names

Socket = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="The keeper's socket; default $VRAM_KEEPER or the user's own."),
]
EntryName = Annotated[str, typer.Argument(help="An entry.", autocompletion=entry_names)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
