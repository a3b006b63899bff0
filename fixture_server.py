#!/usr/bin/env python3
"""A loopback server that answers chat-completion requests in every way a streaming client should be tested against.

Each mode of ``MODES`` is one way to answer: what it sends, what a correct client must conclude, and the specification or
public report that it comes from.  The mode is the server's, or the request's own when its model is ``mode:NAME``, so that
one running fixture serves all.  Every answer carries the header field ``X-Stream-Fixture``: it is synthetic.

A mode yields steps: bytes to write, seconds to pause (PAUSE stands for the server's delay), or one of the ends RESET,
HOLD and CUT; without one the connection is closed in good order.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import re
import signal
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MAX_REQUEST_BYTES = 65_536
CLIENT_TIMEOUT_S = 10.0  # for a client that does not send its request, or does not read
HOLD_S = 30.0  # the longest that a mode keeps a client waiting, and the longest that an endless one goes on
PATH = '/v1/chat/completions'
FIELD = 'X-Stream-Fixture'

PAUSE = -1.0
RESET, HOLD, CUT = 'reset', 'hold', 'cut'
Step = bytes | float | str


class Request(NamedTuple):
    """What a mode may know of the request: the id that its chunks carry and the model's name, both JSON-escaped."""

    id: bytes
    model: bytes

    def fill(self, piece: bytes) -> bytes:
        """The piece with ``$ID`` and ``$MODEL`` replaced."""
        return piece.replace(b'$ID', self.id).replace(b'$MODEL', self.model)


# --- building blocks ----------------------------------------------------------------------------------------------------


def chunk(delta: Any = None, finish: Any = None, **members: Any) -> dict[str, Any]:
    """A chat.completion.chunk with one choice; ``members`` replace or add members of the chunk."""
    choice = {'index': 0, 'delta': {} if delta is None else delta, 'logprobs': None, 'finish_reason': finish}
    return {'id': 'chatcmpl-$ID', 'object': 'chat.completion.chunk', 'created': 1790000000, 'model': '$MODEL',
            'choices': [choice], **members}  # fmt: skip


def choice(**members: Any) -> dict[str, Any]:
    """A chunk whose choice has exactly the given members."""
    return chunk(choices=[members])


def event(data: Any, eol: str = '\r\n', kind: str = '') -> bytes:
    """An event with this data: a str as it is, anything else as JSON in raw UTF-8."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(',', ':'))
    return (f'event: {kind}{eol}' if kind else '').encode() + f'data: {text}{eol}{eol}'.encode('utf-8', 'surrogatepass')


def text(content: str, **members: Any) -> bytes:
    """An event with a piece of answer text."""
    return event(chunk({'content': content}, **members))


COMMENT = b': fixture\r\n\r\n'
ROLE = event(chunk({'role': 'assistant', 'content': ''}))
READY = text('READY ')
CHECK = text('✓')
STOP = event(chunk(finish='stop'))
COUNTS = {'prompt_tokens': 9, 'completion_tokens': 3, 'total_tokens': 12}
USAGE = event(chunk(choices=[], usage=COUNTS))
DONE = event('[DONE]')
START = (COMMENT, ROLE, PAUSE, READY, PAUSE, CHECK)
END = (STOP, USAGE, DONE)
EVENT_STREAM = ('Content-Type: text/event-stream; charset=utf-8',)
CHUNKED = 'Transfer-Encoding: chunked'


def head(*fields: str, status: str = '200 OK', version: str = '1.1') -> bytes:
    """Status line and header fields; the fixture's own field is always among them."""
    return '\r\n'.join((f'HTTP/{version} {status}', f'{FIELD}: 1', *fields, '', '')).encode('latin-1')


def framed(piece: bytes, extension: bytes = b'') -> bytes:
    """One chunk of the chunked transfer coding."""
    return b'%x%s\r\n%s\r\n' % (len(piece), extension, piece)


LAST = b'0\r\n\r\n'
Steps = 'Callable[[Request], Iterable[Step]]'


def raw(*steps: Step) -> Callable[[Request], Iterator[Step]]:
    """Steps sent as they are, but for ``$ID`` and ``$MODEL``."""

    def run(request: Request) -> Iterator[Step]:
        for step in steps:
            yield request.fill(step) if isinstance(step, bytes) else step

    return run


def chunks(*pieces: Step, end: Sequence[Step] = (LAST,), fields: Sequence[str] = EVENT_STREAM, status: str = '200 OK',
           extension: bytes = b'') -> Callable[[Request], Iterator[Step]]:  # fmt: skip
    """A head, each piece as one chunk, and then ``end`` as it is."""

    def run(request: Request) -> Iterator[Step]:
        yield head(*fields, CHUNKED, status=status)
        for piece in pieces:
            yield framed(request.fill(piece), extension) if isinstance(piece, bytes) else piece
        yield from end

    return run


def sized(*pieces: Step, more: int = 0, fields: Sequence[str] = EVENT_STREAM, status: str = '200 OK',
          end: Sequence[Step] = ()) -> Callable[[Request], Iterator[Step]]:  # fmt: skip
    """A head with Content-Length, which claims ``more`` bytes than come, and then the pieces."""

    def run(request: Request) -> Iterator[Step]:
        filled = [request.fill(p) if isinstance(p, bytes) else p for p in pieces]
        length = sum(len(p) for p in filled if isinstance(p, bytes)) + more
        yield head(*fields, f'Content-Length: {length}', status=status)
        yield from filled
        yield from end

    return run


def until_close(*pieces: Step, version: str = '1.1') -> Callable[[Request], Iterator[Step]]:
    """A body that only the close of the connection ends."""
    return raw(head(*EVENT_STREAM, 'Connection: close', version=version), *pieces)


def json_error(status: str, body: Any, *fields: str) -> Callable[[Request], Iterator[Step]]:
    """An answer with an error status and a JSON body."""
    return sized(json.dumps(body).encode(), fields=('Content-Type: application/json', *fields), status=status)


def repeated(before: Iterable[Step], piece: Callable[[int], bytes], every: float, most: int = 100_000_000) -> Callable[
        [Request], Iterator[Step]]:  # fmt: skip
    """``before`` and then a piece again and again, for as long as the client stays (and at most HOLD_S seconds)."""

    def run(request: Request) -> Iterator[Step]:
        yield from raw(*before)(request)
        stop = time.monotonic() + HOLD_S
        for at in range(most):
            yield request.fill(piece(at))
            if every:
                yield every
            if time.monotonic() > stop:
                return

    return run


def dripped(data: bytes, every: float) -> Iterator[Step]:
    """One byte at a time."""
    for at in range(len(data)):
        yield data[at : at + 1]
        yield every


# --- the catalogue ------------------------------------------------------------------------------------------------------


class Mode(NamedTuple):
    """One way to answer. ``expect`` is ``passed`` or the failure code that a correct client must come to."""

    group: str
    expect: str
    sends: str
    source: str
    steps: Callable[[Request], Iterable[Step]]
    text: str | None = 'READY ✓'  # the answer text that must be kept; None where it depends on time


ANSWER = (*START, *END)
ERROR = {'message': 'EngineCore encountered an issue.', 'type': 'InternalServerError', 'param': None, 'code': 500}
MODES: dict[str, Mode] = {}


def group(name: str, *rows: tuple[Any, ...]) -> None:
    """Add rows of (name, expect, sends, source, steps[, text]) to the catalogue."""
    for key, expect, sends, source, steps, *kept in rows:
        assert key not in MODES, key
        MODES[key] = Mode(name, expect, sends, source, steps, *kept)


group(
    'whole answers',
    ('ok', 'passed', 'comment, role, two pieces of text, stop, usage, [DONE]; CRLF', 'OpenAI API, chat.completion.chunk',
     chunks(*ANSWER)),
)  # fmt: skip
group(
    'incomplete answers',
    ('broken', 'no_done', 'the body ends after the text', 'BerriAI/litellm#40260', chunks(*START)),
    ('length', 'finish_not_accepted', 'finish_reason length', 'OpenAI API, finish_reason',
     chunks(*START, event(chunk(finish='length')), USAGE, DONE)),
)  # fmt: skip
group(
    'wrong content',
    ('http-error', 'http_status', 'status 503 and a JSON error', 'RFC 9110 section 15.6.4',
     json_error('503 Service Unavailable', {'error': {'message': 'fixture: no capacity', 'type': 'unavailable', 'code': 503}}), ''),
)  # fmt: skip
group(
    'chunk shapes',
    ('malformed', 'not_json', 'an event that is not JSON after the text', 'RFC 8259', chunks(*START, event('{invalid}'), *END)),
)  # fmt: skip


# --- server -------------------------------------------------------------------------------------------------------------


class FixtureServer(ThreadingHTTPServer):
    """``.mode`` and ``.delay`` (seconds) may be changed while it runs; they hold for requests that name no mode."""

    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, port: int, mode: str, delay: float) -> None:
        self.mode, self.delay = mode, delay
        super().__init__(('127.0.0.1', port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no event worth a traceback; anything else is one line."""
        kind = sys.exc_info()[0]
        if kind and not issubclass(kind, OSError):
            print(f'fixture_server.py: {kind.__name__} while answering', file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """One connection. Errors are JSON; nothing is logged."""

    protocol_version = 'HTTP/1.1'
    timeout = CLIENT_TIMEOUT_S
    disable_nagle_algorithm = True
    server: FixtureServer

    def do_GET(self) -> None:
        """``/v1/models`` lists the modes."""
        if self.path != '/v1/models':
            return self.send_error(404)
        self._json(200, {'object': 'list', 'data': [
            {'id': f'mode:{name}', 'object': 'model', 'created': 1790000000, 'owned_by': 'fixture'} for name in MODES]})  # fmt: skip

    def do_POST(self) -> None:
        """The one endpoint."""
        length = self.headers.get('Content-Length', '')
        if self.path != PATH:
            return self._refuse(404, f'only POST {PATH} is here')
        if not re.fullmatch('[0-9]{1,18}', length):
            return self._refuse(411, 'Content-Length is missing or malformed')
        if int(length) > MAX_REQUEST_BYTES:
            return self._refuse(413, f'the request is larger than {MAX_REQUEST_BYTES} bytes')
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            return self._refuse(400, 'the request is not JSON')
        if not isinstance(body, dict) or body.get('stream') is not True:
            return self._refuse(400, 'stream must be true')
        model = body.get('model')
        if not isinstance(model, str):
            return self._refuse(400, 'model must be a string')
        name = model[5:] if model.startswith('mode:') else self.server.mode
        if name not in MODES:
            return self._refuse(404, f'there is no mode {name[:80]!a}')
        given = re.sub('[^A-Za-z0-9._-]', '', self.headers.get('X-Request-Id', ''))[:128]
        request = Request(given.encode() or b'fixture', json.dumps(model)[1:-1].encode())
        self.close_connection = True
        with contextlib.suppress(OSError):
            self._answer(MODES[name].steps(request))

    def _answer(self, steps: Iterable[Step]) -> None:
        connection = self.connection
        for step in steps:
            if isinstance(step, bytes):
                connection.sendall(step)
            elif isinstance(step, float):
                time.sleep(self.server.delay if step == PAUSE else step)
            elif step == RESET:
                time.sleep(0.05)  # let what was sent arrive: a reset may overtake it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
                return
            else:
                self._wait(HOLD_S)
                return
        connection.shutdown(socket.SHUT_WR)
        self._wait(2.0)

    def _wait(self, seconds: float) -> None:
        """Until the client closes, so that no unread byte of it turns our close into a reset."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.connection.settimeout(left)
            if not self.connection.recv(65536):
                return

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(data)))
        self.send_header(FIELD, '1')
        if self.close_connection:
            self.send_header('Connection', 'close')
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str) -> None:
        """Answer at once, then read what the client still sends, so that it can read the answer."""
        self.close_connection = True
        self._json(status, {'error': {'message': message, 'type': 'invalid_request_error', 'code': status}})
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._wait(2.0)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """http.server's own refusals (bad request line, unknown method) as JSON."""
        with contextlib.suppress(OSError):
            if not hasattr(self, 'request_version') or self.request_version == 'HTTP/0.9':
                self.request_version = 'HTTP/1.1'
            self._refuse(code, message or self.responses.get(code, ('error', ''))[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the client's record is the log."""


def server(port: int = 18080, mode: str = 'ok', delay: float = 0.05) -> FixtureServer:
    """A fixture bound to 127.0.0.1 (``.server_port``, ``.mode``, ``.delay``); call ``serve_forever`` to run it.

    ``port`` 0 picks a free one; ``delay`` is the pause around text, in seconds. Raises ValueError for an unknown mode, a
    bad port or delay, OSError when the port is taken.
    """
    if mode not in MODES:
        raise ValueError(f'there is no mode {mode!r}')
    if not 0 <= port <= 65535:
        raise ValueError('the port must be from 0 to 65535')
    if not 0 <= delay <= HOLD_S:
        raise ValueError(f'the delay must be from 0 to {HOLD_S:g} seconds')
    return FixtureServer(port, mode, delay)


def mode_rows() -> list[dict[str, str]]:
    """The catalogue as a list of objects: ``mode``, ``group``, ``sends``, ``expect`` and ``source``."""
    return [{'mode': name, 'group': m.group, 'sends': m.sends, 'expect': m.expect, 'source': m.source}
            for name, m in MODES.items()]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit status 0, or 2 for arguments it refuses or a port that is taken."""
    parser = argparse.ArgumentParser(prog='fixture_server.py', allow_abbrev=False, description=__doc__.split('\n')[0])
    parser.add_argument('--port', type=int, default=18080, help='0 picks a free one (default 18080)')
    parser.add_argument('--mode', default='ok', help='default ok; a request may name its own with the model mode:NAME')
    parser.add_argument('--delay', type=float, default=0.05, metavar='S', help='pause around text (default 0.05)')
    parser.add_argument('--list-modes', action='store_true', help='what each mode sends and what must be concluded')
    parser.add_argument('--json', action='store_true', help='with --list-modes: a JSON array')
    args = parser.parse_args(argv)
    if args.list_modes:
        if args.json:
            print(json.dumps(mode_rows(), indent=1))
        else:
            for row in mode_rows():
                print(f'{row["mode"]:24} {row["expect"]:20} {row["sends"]} [{row["source"]}]')
        return 0
    try:
        fixture = server(args.port, args.mode, args.delay)
    except (ValueError, OSError) as exc:
        what = f'port {args.port} cannot be used: {exc.strerror}' if isinstance(exc, OSError) else exc
        print(f'fixture_server.py: {what}', file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: threading.Thread(target=fixture.shutdown).start())
    print(f'fixture in mode {args.mode} on http://127.0.0.1:{fixture.server_port}', flush=True)
    with fixture:
        fixture.serve_forever(0.05)
    return 0


if __name__ == '__main__':
    sys.exit(main())
