"""How a connection to a keeper, or to a lender, begins: who listens there is verified, and each says hello."""

from __future__ import annotations

import contextlib
import os

from ..errors import AccessDeniedError, PeerGoneError, ProtocolError, WaitTimeoutError
from ..sharing.channel import Channel
from . import messages as m
from .failures import raised, silent_words
from .paths import check_directory, check_server, check_socket, how_to_be_let_in, how_to_start, may_connect
from .rules import clip_host, clip_label

GREETINGS = 3  # connections that are made before it counts that they were hung up on


class HungUpError(PeerGoneError):
    """The listener hung up in place of a greeting."""


def open_channel(path: str, chosen: bool, timeout: float) -> Channel:
    """Connect to whoever listens at `path`, and make sure that they are to be trusted."""
    if not chosen:
        check_directory(os.path.dirname(path))
    try:
        return Channel.connect(path, timeout, lambda server: check_server(path, chosen, server))
    except PeerGoneError as error:
        check_socket(path)
        raise PeerGoneError(f"no keeper: {error}; {how_to_start(path)}") from None
    except AccessDeniedError:
        if may_connect(path):  # it is who listens that was refused, by check_server
            raise
        raise AccessDeniedError(f"may not connect to {path}: {how_to_be_let_in(path)}") from None


def own_host() -> str:
    """Return what this process's host is called: in a container its own name, unless it was given another's."""
    return clip_host(os.uname().nodename)


def greet(channel: Channel, path: str, label: str, timeout: float) -> m.Welcome:
    """Say hello and return what the keeper answers; see :meth:`RpcConnection.connect` for the errors."""
    with contextlib.suppress(PeerGoneError):  # it may have said why it hung up
        channel.send(m.encode(m.Hello(m.PROTOCOL, clip_label(label), own_host())), timeout=max(0.01, timeout))
    try:
        payload, _ = channel.take(timeout=max(0.01, timeout))
        reply = m.decode_reply(payload)
    except WaitTimeoutError:
        raise WaitTimeoutError(
            f"what listens at {path} did not answer: a keeper that hangs, or no keeper. {silent_words(channel.peer())}"
        ) from None
    except PeerGoneError:
        raise HungUpError(f"what listens at {path} hung up: a keeper that stops, or no keeper") from None
    except ProtocolError as error:
        raise ProtocolError(f"what listens at {path} is no keeper ({error})") from None
    if isinstance(reply, m.Error):
        raise raised(reply)
    if isinstance(reply, m.Recovered):
        raise HungUpError(f"the keeper at {path} was killed before it had greeted, and another goes on: connect again")
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"what listens at {path} is no keeper: it answered {type(reply).__name__}")
    return reply
