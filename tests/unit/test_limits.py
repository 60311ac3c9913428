"""The ceilings of a keeper: how they are written, read, and told to who is over one."""

from __future__ import annotations

import pytest

from vram.errors import QuotaError, UsageError
from vram.keeper.limits import LIMITS, OPTIONS, Quotas, limit_called, over, parse_limit, written_limit

FLAGS = {option.flag: option for option in OPTIONS}


def test_each_quantity_has_a_ceiling_for_all_and_one_for_each_user() -> None:
    assert sorted(option.field for option in OPTIONS) == sorted(Quotas.__struct_fields__)
    for option in OPTIONS:
        whose = "-per-user" if option.of_user else ""
        assert option.flag == f"--max-{option.limit.name.replace('_', '-')}{whose}"
        assert option.limit.option(of_user=option.of_user) == option.flag
        assert limit_called(option.limit.name) is option.limit
    assert {limit.name: limit.metric for limit in LIMITS if limit.metric != limit.name} == {"bytes": "memory"}


def test_what_holds_where_nothing_is_chosen() -> None:
    defaults = {field: value for field in Quotas.__struct_fields__ if (value := getattr(Quotas(), field)) is not None}
    assert defaults == {"user_entries": 32_768}
    assert {flag: option.default for flag, option in FLAGS.items() if option.default} == {
        "--max-entries-per-user": " [default: 32768]",
        "--max-descriptors": " [default: by RLIMIT_NOFILE]",
        "--max-descriptors-per-user": " [default: half of them]",
        "--max-connections": " [default: by RLIMIT_NOFILE]",
        "--max-connections-per-user": " [default: half of them]",
    }


@pytest.mark.parametrize(
    ("chosen", "connections", "descriptors"),
    [
        ({}, (100, 50), (1000, 500)),
        ({"max_connections": 40, "user_connections": 30}, (40, 30), (1000, 500)),
        ({"max_connections": 40, "user_connections": 60}, (40, 40), (1000, 500)),
        ({"max_connections": 400, "max_descriptors": 31}, (100, 50), (31, 15)),
    ],
)
def test_what_a_process_can_have_at_most(
    chosen: dict[str, int], connections: tuple[int, int], descriptors: tuple[int, int]
) -> None:
    found = Quotas(max_bytes=7, **chosen).within(100, 1000)
    assert (found.max_connections, found.user_connections) == connections
    assert (found.max_descriptors, found.user_descriptors) == descriptors
    assert (found.max_bytes, found.user_entries) == (7, 32_768)


@pytest.mark.parametrize(
    ("text", "flag", "limit"),
    [
        ("none", "--max-bytes", None),
        (" NONE ", "--max-connections-per-user", None),
        ("2 GiB", "--max-bytes", 2 << 30),
        ("0", "--max-bytes-per-user", 0),
        ("0", "--max-entries", 0),
        ("9" * 18, "--max-entries", 10**18 - 1),
    ],
)
def test_a_limit_is_read_and_written(text: str, flag: str, limit: int | None) -> None:
    assert parse_limit(text, flag) == limit
    assert parse_limit(written_limit(FLAGS[flag], limit), flag) == limit


@pytest.mark.parametrize(
    ("text", "flag", "said"),
    [
        ("9" * 19, "--max-entries", f"--max-entries '{'9' * 19}' is not a number of entries: 0 or more, or \"none\""),
        (
            "x" * 50,
            "--max-connections",
            f"--max-connections '{'x' * 40}' is not a number of connections: 0 or more, or \"none\"",
        ),
        ("-1", "--max-entries", "--max-entries '-1' is not a number"),
        ("\u0661", "--max-entries", "is not a number"),
        ("1.5", "--max-entries", "is not a number"),
        ("much", "--max-bytes", "--max-bytes"),
    ],
)
def test_what_is_no_limit_is_refused(text: str, flag: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_limit(text, flag)
    assert said in str(caught.value)


def test_who_is_over_a_ceiling_is_told_what_it_holds_and_what_to_do() -> None:
    memory = over(limit_called("bytes"), "uid 7", 2 << 20, 1 << 20, 3 << 20, of_user=True, more="; see there")
    assert isinstance(memory, QuotaError)
    assert str(memory) == (
        "no room for 3 MiB more: uid 7 may hold 2 MiB (--max-bytes-per-user), holds 1 MiB and would hold 4 MiB; "
        "remove entries (vram rm), wait for readers of old versions, or raise the keeper's limit "
        "(vram keep --takeover --max-bytes-per-user ...); see there"
    )
    entries = over(limit_called("entries"), "the keeper", 5, 5, 1, would=4, of_user=False)
    assert str(entries) == (
        "no room for 1 entry more: the keeper may hold 5 entries (--max-entries), holds 5 and would hold 4; remove "
        "entries (vram rm), wait for readers of old versions, or raise the keeper's limit (vram keep --takeover "
        "--max-entries ...)"
    )
