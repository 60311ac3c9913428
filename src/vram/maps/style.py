"""The colours of maps, light and dark, for SVG and for pages alike."""

from __future__ import annotations

_LIGHT = {
    "paper": "#ffffff", "ink": "#1b1f24", "soft": "#57606a", "line": "#d0d7de", "bar": "#f3f4f6",
    "array": "#79b8ff", "view": "#9fd3c7", "mapped": "#8fd19e", "shared": "#f2b56b", "private": "#c8b6ff",
    "asleep": "#b8c0cc", "parked": "#d6c4a8", "reserved": "#e9ecef", "retired": "#e5a3a3", "opaque": "#c5cbd3",
}  # fmt: skip
_DARK = {
    "paper": "#0d1117", "ink": "#e6edf3", "soft": "#9da7b3", "line": "#30363d", "bar": "#161b22",
    "array": "#2f6fb5", "view": "#2c7a6b", "mapped": "#2f7d41", "shared": "#a8651a", "private": "#6a53b5",
    "asleep": "#4b5563", "parked": "#7a6748", "reserved": "#21262d", "retired": "#8f3f3f", "opaque": "#3d444d",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--vm-{name}:{colour};" for name, colour in colours.items())


LIGHT_AND_DARK = (
    f".vram-map{{{_variables(_LIGHT)}}}@media (prefers-color-scheme: dark){{.vram-map{{{_variables(_DARK)}}}}}"
)
