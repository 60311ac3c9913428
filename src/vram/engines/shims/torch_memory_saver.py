"""Found as the package torch_memory_saver where this directory comes first in ``sys.path``."""

from vram.engines.torch_memory_saver import install

install()
