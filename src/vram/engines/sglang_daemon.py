"""SGLang's weight cache daemon, with vram's transport: ``python -m vram.engines.sglang_daemon --model-path MODEL``.

``python -m sglang.srt.weight_cache.daemon`` of SGLang 0.5.23 loads no plug-ins, and neither do the processes that it
starts, one for each GPU: they would go on with ``torch_ipc``. This one takes the same options, but for those of a
single rank, and loads them. Its children do so, too: multiprocessing imports the main module first in each of them.
"""

from __future__ import annotations

import argparse

__all__ = ["main"]


def load() -> None:
    """Load SGLang's plug-ins in this process, vram's among them also where vram is not installed but only found."""
    from sglang.srt.plugins import load_plugins

    from vram.engines.sglang import register

    register()
    load_plugins()


def main() -> None:
    """Run the daemons of this machine's GPUs."""
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.weight_cache.daemon import WeightCacheDaemonArgs, launch_weight_cache_daemons

    parser = argparse.ArgumentParser(add_help=False)
    WeightCacheDaemonArgs.add_cli_args(parser)
    mine, theirs = parser.parse_known_args()
    options = WeightCacheDaemonArgs.from_cli_args(mine)
    if options.gpu_id is not None or options.tp_rank is not None:
        parser.error("this starts the daemons of all ranks on this machine: leave --gpu-id and --tp-rank out")
    launch_weight_cache_daemons(
        prepare_server_args(theirs),
        dist_init_method=options.dist_init_method,
        timeout=options.timeout,
        force=options.force,
    )


if __name__ in ("__main__", "__mp_main__"):
    load()
if __name__ == "__main__":
    main()
