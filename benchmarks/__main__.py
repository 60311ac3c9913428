"""The command line of the benchmarks: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import sys

from vram.cli.results import print_result
from vram.cli.tables import bench_tables, show_table
from vram.errors import VramError

from . import GPU_NAMES, NAMES, run_benchmarks


def main() -> None:
    """Run what is named, and print tables or JSON; an error is one line, and exit status 1."""
    listed = [("the benchmarks:", NAMES), ("with --device cuda:0:", GPU_NAMES)]
    lines = [line for title, names in listed for line in (title, *(f"  {n:<12} {what}" for n, what in names.items()))]
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="Measure against rivals, side by side in one run.",
        epilog="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks, of those below; default all")
    parser.add_argument("--device", default="host", help='what memory to measure: "host", or a GPU, such as "cuda:0"')
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: shows that it runs")
    parser.add_argument("--tune", metavar="FILE", help="have allreduce on GPUs measure a table of routes, kept in FILE")
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="allreduce and decoder: groups of N GPUs only, not 2, 4, 8"
    )
    parser.add_argument("--json", action="store_true", help="print for programs")
    given = parser.parse_args()
    try:
        results = run_benchmarks(
            given.names,
            quick=given.quick,
            progress=not given.json,
            device=given.device,
            tune=given.tune,
            gpus=given.gpus,
        )
    except (VramError, OSError, MemoryError) as error:
        print("benchmarks:", "; ".join([str(error), *getattr(error, "__notes__", ())]), file=sys.stderr)
        raise SystemExit(1) from None
    if given.json:
        print_result(results, True, "")
        return
    print(results[0].machine)
    for table in bench_tables(results):
        show_table(table)


if __name__ == "__main__":
    main()
