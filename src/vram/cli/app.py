"""The commands. Each calls a verb of the library; here are only its options and its output."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from .. import __version__
from ..bench import GPU_NAMES, NAMES
from ..errors import UsageError, VramError
from ..keeper.limits import OPTIONS, parse_limit
from ..programs import python
from ..spec import format_count, format_size, printable
from . import nodes
from .completion import benchmark_names, entry_names
from .options import AsJson, EntryName, Socket
from .results import print_list, print_result

app = typer.Typer(
    name="vram",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"vram {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Memory with one stable address: shared by name, grown in place, alive after its maker has died."""


def run() -> None:
    """Run the command line. An error of the library, or of the system, is one line on stderr and exit status 1."""
    try:
        app()
    except (VramError, OSError, MemoryError) as error:
        what = str(error) or type(error).__name__
        print("vram:", "; ".join(_one_line(line) for line in (what, *getattr(error, "__notes__", ()))), file=sys.stderr)
        raise SystemExit(1) from None


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _with_limits(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each ceiling, which it gets by keyword: typer reads them off the signature."""
    signature = inspect.signature(command, eval_str=True)
    *others, _ = signature.parameters.values()
    limits = [
        inspect.Parameter(
            option.field,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(option.flag, metavar="SIZE" if option.limit.is_size else "N", help=option.help),
            ],
        )
        for option in OPTIONS
    ]
    command.__signature__ = signature.replace(parameters=[*others, *limits])  # type: ignore[attr-defined]
    return command


@app.command()
@_with_limits
def keep(
    socket: Socket = None,
    mode: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="Permissions of the socket, octal [default: 0600; a restart keeps them]."),
    ] = None,
    group: Annotated[str | None, typer.Option(metavar="GROUP", help="Group of the socket.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve its numbers to Prometheus there, from a process of its own."),
    ] = None,
    persist: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Save your entries there, and publish them at the next start [default: none; a restart keeps it].",
        ),
    ] = None,
    persist_prefix: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only entries whose names begin like this.")
    ] = None,
    log: Annotated[
        Literal["json", "text"] | None, typer.Option(help="A line on stderr for each event; attaches are none.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(help="The least that --log writes [default: info]."),
    ] = None,
    survive: Annotated[
        bool,
        typer.Option(
            "--survive/--ephemeral",
            help="Whether the next keeper goes on with everything when this one dies, or what is kept dies with it.",
        ),
    ] = True,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", help="Restart the running keeper, with this version: what it has stays."),
    ] = False,
    background: Annotated[
        bool,
        typer.Option(
            "--background",
            help="Return once it serves, and say its pid; `vram stop` ends it. It stays in no directory, and needs no "
            "terminal: send a --log to a file (2> FILE).",
        ),
    ] = False,
    **limits: str | None,
) -> None:
    """Run a keeper in the foreground, until SIGTERM, Ctrl-C, or the end of its terminal. Without one (nohup, setsid, a
    service, --background) it ignores SIGHUP.
    """
    _fill_standard_files()
    from ..keeper.disk import own_folder
    from ..keeper.paths import absolute
    from ..keeper.rules import check_prefix

    if log_level is not None and log is None:
        raise UsageError("--log-level says what of a log is written: give --log json or --log text as well")
    if background and metrics is not None:
        raise UsageError("--metrics serves beside a keeper in the foreground: start `vram metrics --listen` by itself")
    if background and log is not None and sys.stderr.isatty():
        raise UsageError(
            "--log writes to stderr, here a terminal, which a keeper in the background does not keep: 2> FILE"
        )
    if takeover and not survive:
        raise UsageError("--takeover with --ephemeral: a keeper goes on after a restart as after a crash")
    if mode is not None and not re.fullmatch(r"0?[0-7]{1,3}", mode):
        raise UsageError(f"--mode {mode!r} is not an octal mode such as 0660")
    # -P: what lies in the current directory is no part of the library
    command = [python(), "-P", "-m", "vram.keeper"]
    if mode is not None:
        command += ["--mode", mode]
    if socket is not None:
        command += ["--socket", absolute(socket, "--socket") if background else socket]
    if group is not None:
        command += ["--group", group]
    for option in OPTIONS:
        text = limits[option.field]
        if text is not None:
            parse_limit(text, option.flag)  # a mistake is said here, in one line
            command += [option.flag, text]
    if persist is not None:
        command += ["--persist", persist if persist == "none" else own_folder(persist)]  # a mistake is said here
    if persist_prefix is not None:
        if persist is None and not takeover:
            raise UsageError("--persist-prefix says which entries go to the folder of --persist: name that as well")
        command += ["--persist-prefix", check_prefix(persist_prefix)]
    if log is not None:
        command += ["--log", log, "--log-level", log_level or "info"]
    command.append("--survive" if survive else "--ephemeral")
    if takeover:
        command.append("--takeover")
    if background:
        _start(command, logs=log is not None)
        return
    if metrics is not None:
        _export_metrics(metrics, socket)
    sys.stdout.flush()
    os.execv(command[0], command)  # the keeper stays small: nothing of this program remains in it


def _fill_standard_files() -> None:
    """Open to nowhere what of descriptors 0 to 2 is closed: the next file would have that number, and be written over.

    That is also before anything of this program or of the keeper writes to a file that there is not.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, open(fd, "w" if fd else "r"))  # noqa: SIM115  (it was None, and stays open to the end)


def _start(command: list[str], *, logs: bool) -> None:
    """Start a keeper that goes on without this process, and wait until it serves. A log goes where stderr goes.

    Without a log it writes to nowhere once it serves (`--ready-fd`); what it says before is passed on here. It keeps no
    directory from being unmounted or removed.
    """
    environment = _without_relative_paths(os.environ)
    told, tells = os.pipe()
    with open(told, "rb", closefd=True) as heard, tempfile.TemporaryFile() as trouble:
        try:
            keeper = subprocess.Popen(
                [*command, "--ready-fd", str(tells)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what waits for the end of a pipe would wait for the keeper's
                stderr=None if logs else trouble,
                start_new_session=True,
                cwd="/",
                env=environment,
                pass_fds=[tells],
            )
        finally:
            os.close(tells)
        said = os.read(heard.fileno(), 1 << 16)  # in one piece; the other end stays open in a guardian (--survive)
        if said:
            sys.stdout.write(said.decode())
            return
        status = keeper.wait()
        trouble.seek(0)
        why = trouble.read().decode(errors="replace")
        sys.stderr.write(why or f"vram keep: {command[0]} ended with status {status} before a keeper served\n")
        raise typer.Exit(status or 1)


def _without_relative_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a keeper looks at in another directory than this, such that it means what it means here."""
    from ..keeper.paths import absolute

    found = dict(environment)
    for key in ("VRAM_KEEPER", "TMPDIR", "XDG_RUNTIME_DIR", "PYTHONPATH"):
        if value := environment.get(key):
            parts = value.split(os.pathsep) if key == "PYTHONPATH" else [value]
            found[key] = os.pathsep.join([absolute(part, key) for part in parts if part])
    return found


def _export_metrics(address: str, socket: str | None) -> None:
    """Start ``vram metrics`` for the keeper that this process becomes: it ends when this process does."""
    from ..keeper.paths import absolute
    from ..metrics import check_installed
    from ..nodes.address import parse_address

    check_installed()
    parse_address(address)
    ours, theirs = os.pipe()
    command = [python(), "-P", "-m", "vram.metrics", "--listen", address, "--parent-fd", str(ours)]
    if socket is not None:
        command += ["--socket", absolute(socket, "--socket")]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[ours])
    os.close(ours)
    os.set_inheritable(theirs, True)  # the keeper has it, knows nothing of it, and it closes when the keeper ends


@app.command()
def stop(
    force: Annotated[bool, typer.Option("--force", help="Also if something that it keeps is leased.")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Seconds that it has to end.")] = 30.0,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """End a keeper of yours. If anything is leased, it says who holds what and ends nothing, with exit status 1."""
    from ..entries.stop import stop as end

    stopped = end(force=force, timeout=timeout, keeper=socket)
    if stopped.is_stopped or as_json:
        print_result(
            dataclasses.asdict(stopped),
            as_json,
            f"the keeper at {stopped.path} (pid {stopped.pid}) has ended: it let go of "
            f"{format_count(stopped.versions, 'version')}, {format_size(stopped.nbytes)}",
        )
    else:
        from .tables import holder_table, show_table

        print("not ended, since this is leased (--force ends it all the same; what is mapped stays mapped):")
        show_table(holder_table(stopped.holders))
    if not stopped.is_stopped:
        raise typer.Exit(1)


@app.command()
def metrics(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to answer scrapes.")] = "127.0.0.1:9464",
    socket: Socket = None,
) -> None:
    """Serve the keeper's numbers to Prometheus until Ctrl-C or SIGTERM; so does `vram keep --metrics`."""
    from ..metrics.__main__ import main as serve

    arguments = ["--listen", listen, *(() if socket is None else ("--socket", socket))]
    if serve(arguments):
        raise typer.Exit(1)


@app.command()
def top(
    socket: Socket = None,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Seconds between two looks.")
    ] = 1.0,
    sort: Annotated[str, typer.Option(metavar="COLUMN", help="What to sort by: name, size, leases, age, ...")] = "name",
    once: Annotated[bool, typer.Option("--once", help="Print one table, of one interval, and leave.")] = False,
) -> None:
    """Show a keeper's entries, rates and latencies, live. Its key h says what its keys do."""
    from .top import run_top

    run_top(socket, interval=interval, sort=sort, once=once)


@app.command()
def publish_file(
    name: Annotated[str, typer.Argument(help="What readers will attach.", autocompletion=entry_names)],
    files: Annotated[list[Path], typer.Argument(help="A safetensors file, several, an index, or a folder.")],
    device: Annotated[str, typer.Option(help='Where to keep it: "host", or a GPU, such as "cuda:0".')] = "host",
    meta: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="For readers to ask for; repeatable.")
    ] = None,
    writable: Annotated[bool, typer.Option("--writable", help="Let readers write to it.")] = False,
    ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="Seconds until it is retired.")] = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Publish the tensors of safetensors files under a name: of one, or of a checkpoint in several."""
    from ..entries import publish_file as entries
    from ..progress import show_progress

    notes = _pairs(meta or [])
    with show_progress():
        what = files if len(files) > 1 else files[0]
        published = entries.publish_file(
            name, what, device=device, meta=notes, writable=writable, ttl=ttl, keeper=socket
        )
    print_result(
        published,
        as_json,
        f"{name} version {published.version}: {format_count(published.arrays, 'array')}, "
        f"{format_size(published.nbytes)} on {device}, "
        + ("read into shared memory" if published.zero_copy else f"{len(published.copied)} of them copied"),
    )


@app.command()
def save(
    name: Annotated[str, typer.Argument(help="The entry.", autocompletion=entry_names)],
    path: Annotated[Path, typer.Argument(help="A file that ends with .safetensors, or a folder.")],
    version: Annotated[int | None, typer.Option(help="Its version, by default the current one.")] = None,
    shard: Annotated[str, typer.Option(metavar="SIZE", help="The most that a file in a folder has.")] = "5GiB",
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Write an entry to disk, from which publish-file brings back the same."""
    from ..entries import save as entries
    from ..progress import show_progress

    with show_progress():
        files = entries.save(name, path, version=version, shard=shard, keeper=socket)
    print_result(files, as_json, "\n".join(files))


@app.command(name="ls")
def list_(
    prefix: Annotated[str, typer.Argument(help="Only names that begin like this.", autocompletion=entry_names)] = "",
    holders: Annotated[bool, typer.Option("--holders", "-l", help="One line for each lease: who holds what.")] = False,
    users: Annotated[bool, typer.Option("--users", help="One line for each user: how much of each ceiling.")] = False,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """List what is published. Under "holders": the leases on all versions of a name / the memory of those versions."""
    from ..entries import administration

    if users:
        if holders or prefix:
            raise UsageError("--users lists what each user has of everything: neither a prefix nor --holders")
        found, all_have = administration.usage(keeper=socket)
        if as_json:
            print_list(found)
            return
        from .tables import show_table, user_table

        show_table(user_table(found, all_have))
        return
    if holders:
        held = administration.holders(prefix, keeper=socket)
        if as_json:
            print_list(held)
            return
        from .tables import holder_table, show_table

        if held:
            show_table(holder_table(held))
        else:
            print("nothing is leased")
        return
    if as_json:
        print_list(administration.list_entries(prefix, keeper=socket))
        return
    from .tables import show_entries

    entries = administration.list_entries(prefix, keeper=socket)
    if entries:
        show_entries(entries)
    else:
        print("nothing is published" + (f" under a name that begins with {prefix}" if prefix else ""))
    if not prefix:
        held_now = administration.statistics(keeper=socket)
        if (older := held_now.versions - held_now.entries) > 0:
            # Their lists of arrays included. A version that is published meanwhile is in one count alone.
            more = max(0, held_now.nbytes - sum(entry.nbytes for entry in entries))
            print(f"{format_count(older, 'older version')} held by leases, {format_size(more)}: vram ls -l")
        print(f"keeper {held_now.keeper_version or 'of an older version'}, pid {held_now.pid}")


@app.command()
def show(
    name: EntryName,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Show an entry: its versions, what was said about it, who holds it, and the arrays in it."""
    from ..entries import administration

    details = administration.entry(name, keeper=socket)
    if as_json:
        print_result(details, True, "")
        return
    from .tables import detail_tables, show_table

    for table in detail_tables(details):
        show_table(table)


@app.command(name="map")
def map_(
    what: Annotated[str, typer.Argument(metavar="NAME|PID", help="An entry, or a process: a number is a PID.")],
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it as SVG; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it as a page; - is stdout.")] = None,
    entry: Annotated[bool, typer.Option("--entry", help="NAME is an entry, also if it is a number.")] = False,
    socket: Socket = None,
) -> None:
    """Draw an entry or a process's memory to scale: what is reserved, mapped, asleep and shared, and by whom.

    The map of a process has its host memory, its leases and its publications. The memory on its GPUs and what is asleep
    only the process itself can draw, by vram.memory_map().
    """
    from ..maps import memory_map
    from ..maps.drawing import write_whole

    if svg is None and html is None:
        raise UsageError("name a file to draw to: --svg FILE, --html FILE, or both")
    if svg is not None and svg == html:
        raise UsageError("--svg and --html name the same file")
    number = what.isascii() and what.isdigit() and not entry
    drawn = memory_map(int(what[:12]) if number else what, keeper=socket)
    for file, draw in ((svg, drawn.svg), (html, drawn.html)):
        if file is not None and str(file) == "-":
            sys.stdout.write(draw())
        elif file is not None:
            write_whole(str(file), draw())
            print(f"{_one_line(str(file))}: {drawn!r}")


@app.command()
def rm(
    name: EntryName,
    version: Annotated[int | None, typer.Option(help="Only this version.")] = None,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Retire an entry. Its memory is freed with the last lease."""
    from ..entries import administration

    administration.remove(name, version=version, keeper=socket)
    which = "" if version is None else f" version {version}"
    print_result({"removed": name, "version": version}, as_json, f"removed {name}{which}")


@app.command()
def park(
    name: EntryName,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds to wait until nobody holds it.")] = 10.0,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Move an entry of yours from its GPU to the host, until a program attaches it with wake=True."""
    from ..entries.park import park as move
    from ..progress import show_progress

    with show_progress():
        report = move(name, timeout=timeout, keeper=socket)
    said = [f"parked {name} version {report.version}: {format_size(report.freed)} freed"]
    said += [f"not freed as long as this holds it: {holder}" for holder in report.holders]
    print_result(dataclasses.asdict(report), as_json, "\n".join(said))


@app.command()
def revoke(
    name: EntryName,
    version: Annotated[int | None, typer.Option(help="Only this version.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds to wait for its readers.")] = 10.0,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Retire an entry, ask its readers to let go, and wait. Exit status 1 if some still hold it: it says who."""
    from ..entries import administration

    left = administration.revoke(name, version=version, timeout=timeout, keeper=socket)
    which = name if version is None else f"{name} version {version}"
    if as_json or not left.holders:
        print_result(left, as_json, f"revoked {which}: nobody holds it any more")
    else:
        from .tables import holder_table, show_table

        print(f"revoked {which}; {format_size(left.nbytes)} still held by:")
        show_table(holder_table(left.holders))
        _print_more(left.more)
    if left.holders:
        raise typer.Exit(1)


for command in (nodes.carry, nodes.replicate, nodes.follow):
    app.command()(command)


@app.command()
def demo(
    device: Annotated[str, typer.Option(help='"host", "cuda:0", or "auto", which says what it chose.')] = "host",
    weights: Annotated[Path | None, typer.Option(help="A safetensors file to use, else random weights.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="How many processes attach.")] = 4,
) -> None:
    """Show all of it: publish, kill the publisher, attach from workers, check every byte, grow, replace."""
    from .demo import run_demo

    run_demo(device=device, weights=weights, workers=workers)


@app.command()
def doctor(
    need: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help='Exit with status 1 unless this works: an area ("gpu") or a check ("cuda:0 fabric").'
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Seconds that the driver of the GPUs has to answer.")
    ] = 60.0,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Say what works here, what does not, why, and what to do. Exit status 1 if something is broken or missing."""
    from ..doctor import examine, unmet

    found = examine(socket, timeout=timeout)
    left = unmet(found, need or ())
    if as_json:
        print_result({"findings": found, "unmet": left}, True, "")
    else:
        from .tables import show_findings

        show_findings(found)
        for line in left:
            print(f"needed: {_one_line(line)}")
    if left or any(one.verdict == "broken" for one in found):
        raise typer.Exit(1)


def _benchmarks() -> str:
    """List the benchmarks. \\b: the lines of a paragraph stay as they are."""
    parts = (("The benchmarks:", NAMES), ("With --device cuda:0:", GPU_NAMES))
    return "\n\n".join(
        "\n".join(["\b", title, *(f"  {name:<12} {what}" for name, what in names.items())]) for title, names in parts
    )


@app.command(epilog=_benchmarks())
def bench(
    only: Annotated[
        list[str] | None,
        typer.Argument(help="Which benchmarks, of those below; default all.", autocompletion=benchmark_names),
    ] = None,
    device: Annotated[str, typer.Option(help='What memory to measure: "host", or a GPU, such as "cuda:0".')] = "host",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds: shows that it runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: against raw system or driver calls and the usual alternatives, side by side in one run.
    A clone of vram has more: python -m benchmarks.
    """
    from ..bench import run_benchmarks

    results = run_benchmarks(only or [], quick=quick, progress=not as_json, device=device)
    if as_json:
        print_result(results, True, "")
        return
    from .tables import bench_tables, show_table

    print(results[0].machine)
    for table in bench_tables(results):
        show_table(table)


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--meta {text!r} is not KEY=VALUE")
        pairs[key] = value
    return pairs


def _print_more(leases: int) -> None:
    if leases:
        print(f"and {leases} more leases: vram ls --holders lists all")


@app.command()
def route(
    src: Annotated[str, typer.Argument(help='From where: "host" or "cuda:0".')],
    dst: Annotated[str, typer.Argument(help="To where.")],
    size: Annotated[str, typer.Option(help="The size of a transfer: latency decides for small ones.")] = "64MiB",
    as_json: AsJson = False,
) -> None:
    """Measure the ways to move bytes between two places, rank them, and say why: what vram.transports.select finds.
    Exit status 1 if there is none. Which way the memory of one object would be shared is what vram.explain says.
    """
    from .. import transports

    found = transports.select(src, dst, nbytes=size)
    usable = found.routes[0].is_available
    if as_json:
        routes = msgspec.to_builtins(found.routes)
        best = found.routes[0].kind if usable else None
        print_result(
            {"src": str(found.src), "dst": str(found.dst), "nbytes": found.nbytes, "best": best, "routes": routes},
            True,
            "",
        )
    else:
        from .tables import route_table, show_table

        show_table(route_table(found))
    if not usable:
        raise typer.Exit(1)
