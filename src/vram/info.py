"""Information on entries, versions and leases: the values that the verbs of administration return.

``vram.list_entries`` and ``vram.entry`` return an :class:`EntryInfo`, with its :class:`VersionInfo` and
:class:`ArrayInfo`; ``vram.holders`` and ``Lending.holders`` return :class:`HolderInfo`, ``vram.revoke`` and
``Lending.revoke`` a :class:`RevokeInfo`, and ``vram.statistics`` a :class:`StatisticsInfo`, with a :class:`LimitInfo`
for everything that has a ceiling.
"""

from __future__ import annotations

from .keeper.reports import ArrayInfo, EntryInfo, HolderInfo, LimitInfo, RevokeInfo, StatisticsInfo, VersionInfo

__all__ = ["ArrayInfo", "EntryInfo", "HolderInfo", "LimitInfo", "RevokeInfo", "StatisticsInfo", "VersionInfo"]
