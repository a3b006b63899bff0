"""Tests of the client and its fixture: standard library only; hypothesis, httpx and jsonschema are used where installed.

    python3 -m unittest -v test_stream.py

Tables and real bytes on loopback sockets.  STREAM_LONG=1 adds the long sweeps.  ``python3 test_stream.py --write-tables``
renews the tables in README.md that are generated from the code.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import functools
import html
import http.client
import importlib.util
import io
import itertools
import json
import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
import urllib.parse
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import fixture_server
import stream_client
import stream_report
from stream_client import (
    FAILURES,
    WARNINGS,
    Body,
    ChatCompletion,
    ChatStream,
    Clock,
    Event,
    Events,
    Framing,
    Policy,
    Refused,
    Secret,
    StreamFailure,
    framing_of,
    parse_url,
    stream,
    strict_json,
)
from stream_report import SCHEMA, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parent
CLIENT = str(ROOT / 'stream_client.py')
FIXTURE = str(ROOT / 'fixture_server.py')
REPORT = str(ROOT / 'stream_report.py')
CAPTURES = ROOT / '.ci' / 'captures'
KEY = 'sk-not/a"real\\key-0123456789'
# For runs that coverage cannot measure: of a file that will be gone, or under a limit that would cut its data.
UNMEASURED = {name: '' for name in os.environ if name.startswith('COVERAGE')}
HAS_HYPOTHESIS = importlib.util.find_spec('hypothesis') is not None
HAS_HTTPX = importlib.util.find_spec('httpx') is not None
LONG = os.environ.get('STREAM_LONG') == '1'


# --- every record is one --------------------------------------------------------------------------------------------------

INVALID: list[str] = []  # what was wrong with records that any test made
_build_record = stream_client.build_record


def note_invalid(record: dict[str, Any]) -> dict[str, Any]:
    """Hold a record against the schema; it comes to light at the end, since the client takes an exception for a fault of its own."""
    wrong = invalid(record, SCHEMA)
    if wrong:
        INVALID.append(f'{record.get("outcome")}: {wrong}')
    return record


def setUpModule() -> None:
    stream_client.build_record = lambda run: note_invalid(_build_record(run))


def tearDownModule() -> None:
    stream_client.build_record = _build_record
    assert not INVALID, INVALID[:5]


# --- helpers ------------------------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """The environment without what would change a run."""
    left_out = ('MODEL_API_KEY', 'NO_COLOR', 'SSLKEYLOGFILE', 'TERM')
    return {k: v for k, v in os.environ.items() if k not in left_out} | {'PYTHONDONTWRITEBYTECODE': '1'} | more


def run(*args: str, env: dict[str, str] | None = None, program: str = CLIENT, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """The client as a command, in a directory of the caller's choice (cwd=)."""
    kwargs = {'capture_output': True, 'text': True, 'timeout': 60, **kwargs}
    done = subprocess.run([sys.executable, program, *args], env=environment(**(env or {})), **kwargs)
    if '-' in args and (done.stdout or '').startswith('{"ok": ') and '"schema_version": ' in done.stdout:
        note_invalid(json.loads(done.stdout))
    return done


def patched(code: str, *args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """The client's main() in a process of its own, after some code was run in it."""
    program = f'import sys; sys.path.insert(0, {str(ROOT)!r}); import stream_client, socket, os\n{code}\nsys.exit(stream_client.main(sys.argv[1:]))'
    kwargs = {'capture_output': True, 'text': True, 'timeout': 60, **kwargs}
    return subprocess.run([sys.executable, '-c', program, *args], env=environment(), **kwargs)


@contextlib.contextmanager
def fixture(mode: str = 'ok', delay: float = 0.01, **options: Any) -> Iterator[str]:
    """A running fixture; yields the endpoint's URL."""
    with fixture_server.server(0, mode, delay, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f'http{"s" if options.get("certificate") else ""}://127.0.0.1:{server.server_port}{fixture_server.PATH}'
        finally:
            server.shutdown()
            thread.join(10)


class Raw:
    """A raw server: ``script`` gets each accepted connection, after its request was read (unless ``read`` is False)."""

    def __init__(self, script: Callable[[socket.socket], None], read: bool = True, buffer: int = 0) -> None:
        self.script, self.read = script, read
        self.requests: list[bytes] = []
        self.socket = socket.socket()
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.bind(('127.0.0.1', 0))
        self.socket.listen(64)
        self.port = self.socket.getsockname()[1]
        self.url = f'http://127.0.0.1:{self.port}/v1/chat/completions'

    def __enter__(self) -> Raw:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._one, args=(self.socket.accept()[0],), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(20)
            if self.read:
                self.requests.append(read_request(connection))
            self.script(connection)


def read_request(connection: socket.socket) -> bytes:
    """One request with its body."""
    got = bytearray()
    due: int | None = None
    while due is None or len(got) < due:
        more = connection.recv(65536)
        if not more:
            break
        got += more
        at = got.find(b'\r\n\r\n')
        if due is None and at >= 0:
            length = re.search(rb'(?i)content-length: *([0-9]+)', got)
            due = at + 4 + (int(length[1]) if length else 0)
    return bytes(got)


def sending(*steps: bytes | float) -> Callable[[socket.socket], None]:
    """A script that sends bytes and waits seconds, and then lets the client close."""

    def script(connection: socket.socket) -> None:
        for step in steps:
            if isinstance(step, float):
                time.sleep(step)
            else:
                connection.sendall(step)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    return script


def resetting(connection: socket.socket) -> None:
    """A script that resets the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))


def data(*events: object, eol: str = '\n') -> bytes:
    """An event stream of these event data."""
    return b''.join(fixture_server.event(e, eol) for e in events)


def chunk(content: object = None, finish: object = None, **members: Any) -> dict[str, Any]:
    """A chunk with its text, in the smallest form."""
    return {'choices': [{'index': 0, 'delta': {'content': content}, 'finish_reason': finish}], **members}


def cut(raw: bytes, cuts: Iterable[int]) -> list[bytes]:
    """The bytes cut at these offsets."""
    edges = [0, *sorted(cuts), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


def judge(pieces: Iterable[bytes], framing: Framing | None = None, **options: Any) -> dict[str, Any]:
    """What the layers without I/O say of a body that came in these reads and then ended: all that must not depend on the cuts."""
    body, chat = Body(framing or Framing(False, None)), ChatCompletion(**options)
    texts: list[str] = []
    failure = None
    try:
        for piece in [*filter(None, pieces), b'']:
            found = body.feed(piece)
            if not piece:
                body.feed_eof()
            texts += chat.feed(found)
            if body.failure and not chat.done:
                raise body.failure
            if chat.done or body.end:
                break
        chat.end(body.end)
    except StreamFailure as exc:
        failure = exc
    return {
        'outcome': failure.code if failure else 'passed', 'boundary': failure and failure.boundary,
        'message': failure and failure.message, 'event': failure and failure.event, 'text': chat.text,
        'shown': ''.join(texts), 'finish_reason': chat.finish_reason, 'done': chat.done, 'usage': chat.usage,
        'content_events': chat.content_events, 'events': chat.seen, 'error': chat.server_error, 'id': chat.id,
        'reasoning': (chat.reasoning_events, chat.reasoning_chars),
        'warnings': {k: v for k, v in chat.warnings.items() if k != 'after_done'},
    }


def invariant(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what may depend on time, on how the bytes were cut, or on what followed the failure or [DONE]."""
    kept = {k: v for k, v in record.items() if k not in ('started_at', 'first_text_ms', 'duration_ms', 'event_gaps_ms', 'marks_ms')}
    kept['warnings'] = [w for w in record['warnings'] if w['code'] not in ('after_done', 'unclean_end')]
    kept['gaps'] = len(record['event_gaps_ms'])
    kept['request'] = {k: v for k, v in record['request'].items() if k not in ('url', 'run_id')}
    kept['response'] = {k: v for k, v in record['response'].items() if k != 'peer'}
    kept['delivery'] = {k: record['delivery'][k] for k in ('events', 'reasoning_events', 'reasoning_chars')}
    return kept


RECORD_SCHEMA: Any = None  # where jsonschema is installed, it judges every record too
if importlib.util.find_spec('jsonschema'):
    import jsonschema

    RECORD_SCHEMA = jsonschema.Draft202012Validator(SCHEMA)
RECORD_KEYS = {
    'ok', 'model', 'text', 'first_text_ms', 'duration_ms', 'content_events', 'event_gaps_ms', 'finish_reason', 'done',
    'completion_tokens', 'error', 'schema_version', 'outcome', 'failure', 'warnings', 'request', 'response', 'marks_ms',
    'delivery', 'usage', 'client', 'started_at', 'label', 'notes', 'synthetic', 'input',
}


def check_record(case: unittest.TestCase, record: dict[str, Any]) -> None:
    """What is true of every record, whatever happened."""
    case.assertEqual(set(record), RECORD_KEYS)
    case.assertEqual(record['ok'], record['outcome'] == 'passed')
    case.assertEqual(record['ok'], record['failure'] is None)
    case.assertEqual(record['error'], record['failure'] and record['failure']['message'])
    if record['failure']:
        case.assertEqual(record['failure']['code'], record['outcome'])
        kind = FAILURES[record['outcome']]
        case.assertEqual(record['failure']['hint'], kind.hint)
        case.assertIn(record['failure']['boundary'], [kind.boundary] if kind.boundary else stream_client.BOUNDARIES)
    else:
        policy = (record['input'] or record['request'])['policy']
        case.assertTrue(record['done'] or policy['tolerate'])
        case.assertIn(record['finish_reason'], policy['accept_finish'])
    case.assertEqual(record['input'] is None, bool(record['request']))
    if record['input'] and record['input']['kind'] == 'body':
        case.assertEqual((set(record['marks_ms'].values()), record['event_gaps_ms'], record['duration_ms']), ({None}, [], None))
    else:
        case.assertEqual(len(record['event_gaps_ms']), max(0, record['content_events'] - 1))
    case.assertIsNone(invalid(record, SCHEMA))
    if RECORD_SCHEMA is not None:
        RECORD_SCHEMA.validate(record)
    for warning in record['warnings']:
        case.assertEqual(set(warning), {'code', 'count', 'message'})
    marks = [record['marks_ms'][k] for k in ('resolved', 'connected', 'secured', 'sent', 'head', 'first_byte', 'first_event', 'done', 'end')]
    reached = [m for m in marks if m is not None]
    case.assertEqual(reached, sorted(reached))


def plain(record: dict[str, Any]) -> tuple[Any, ...]:
    """The facts of the original interface."""
    return tuple(record[k] for k in ('ok', 'text', 'finish_reason', 'done', 'completion_tokens'))


def judged_offline(source: Path | str | int, model: str | None = None, **options: Any) -> dict[str, Any]:
    """The record of a recorded body."""
    with stream_client.Recording(source, model, **options) as answer:
        list(answer)
    return answer.record


# --- wire to body -------------------------------------------------------------------------------------------------------


class BodyTest(unittest.TestCase):
    """The framing layer: RFC 9112 sections 6 and 7."""

    WHOLE: ClassVar = [
        # framing, bytes, body, end
        (Framing(True, None), b'5\r\nhello\r\n0\r\n\r\n', b'hello', 'last_chunk'),
        (Framing(True, None), b'5;a="x;y"\r\nhello\r\n3 \t\r\n wo\r\n000\r\nX: y\r\n\r\n', b'hello wo', 'last_chunk'),
        (Framing(True, None), b'00aA\r\n' + b'x' * 170 + b'\r\n0\r\n\r\n', b'x' * 170, 'last_chunk'),
        (Framing(True, None), b'0\r\n\r\ntrailing', b'', 'last_chunk'),
        (Framing(False, 5), b'hellomore', b'hello', 'length'),
        (Framing(False, 0), b'more', b'', 'length'),
        (Framing(False, None), b'hello', b'hello', 'closed'),
    ]
    BROKEN: ClassVar = [
        # framing, bytes, body before the fault, code, message
        (Framing(True, None), b'5\r\nhelloX', b'hello', 'chunk_malformed',
         "expected CRLF after the chunk data, found byte 0x58 ('X') at offset 8 of the framed body"),
        (Framing(True, None), b'5\r\nhello\rX', b'hello', 'chunk_malformed',
         "expected CRLF after the chunk data, found byte 0x58 ('X') at offset 9 of the framed body"),
        (Framing(True, None), b'5\r\nhello\n', b'hello', 'chunk_malformed',
         "expected CRLF after the chunk data, found byte 0x0a ('\\n') at offset 8 of the framed body"),
        (Framing(True, None), b'HTTP/1.1 502 Bad Gateway\r\n', b'', 'chunk_malformed',
         "expected a chunk size in hexadecimal, found byte 0x48 ('H') at offset 0 of the framed body"),
        (Framing(True, None), b'0_9\r\n', b'', 'chunk_malformed',
         "expected a chunk size in hexadecimal, found byte 0x5f ('_') at offset 1 of the framed body"),
        (Framing(True, None), b'-5\r\n', b'', 'chunk_malformed',
         "expected a chunk size in hexadecimal, found byte 0x2d ('-') at offset 0 of the framed body"),
        (Framing(True, None), b'\r\n', b'', 'chunk_malformed',
         "expected a chunk size in hexadecimal, found byte 0x0d ('\\r') at offset 0 of the framed body"),
        (Framing(True, None), b'5\nhello', b'', 'chunk_malformed',
         "expected a chunk size in hexadecimal, found byte 0x0a ('\\n') at offset 1 of the framed body"),
        (Framing(True, None), b'1' * 17, b'', 'chunk_malformed',
         "expected a chunk size in hexadecimal, found byte 0x31 ('1') at offset 16 of the framed body"),
        (Framing(True, None), b'1;' + b'x' * 5000, b'', 'chunk_malformed',
         'expected a chunk size in hexadecimal, found a line of over 4096 bytes'),
        (Framing(True, None), b'0\r\nno field\r\n', b'', 'chunk_malformed',
         "expected a trailer field or the final CRLF, found byte 0x20 (' ') at offset 5 of the framed body"),
        (Framing(True, None), b'0\r\n' + b'X: y\r\n' * 11000, b'', 'chunk_malformed', 'trailer is longer than 65536 bytes'),
        (Framing(True, None), b'5\r\nhel', b'hel', 'body_cut', 'connection closed after 3 body bytes with 2 bytes of a chunk due'),
        (Framing(True, None), b'5\r\nhello\r\n', b'hello', 'body_cut', 'connection closed after 5 body bytes with the last chunk missing'),
        (Framing(True, None), b'5\r\nhello\r\n0\r\n', b'hello', 'body_cut',
         'connection closed after 5 body bytes with the last chunk missing'),
        (Framing(False, 9), b'hello', b'hello', 'body_cut', 'connection closed after 5 of 9 body bytes'),
    ]

    def feed(self, framing: Framing, pieces: Iterable[bytes], **options: Any) -> tuple[bytes, str | None, StreamFailure | None]:
        body = Body(framing, **options)
        out = b''.join(body.feed(piece) for piece in pieces)
        body.feed_eof()
        self.assertEqual(body.bytes, len(out))
        return out, body.end, body.failure

    def test_whole_bodies_in_every_two_way_cut(self) -> None:
        for framing, raw, want, end in self.WHOLE:
            for at in range(len(raw) + 1):
                with self.subTest(raw=raw[:40], at=at):
                    self.assertEqual(self.feed(framing, cut(raw, [at])), (want, end, None))
            self.assertEqual(self.feed(framing, cut(raw, range(len(raw)))), (want, end, None))

    def test_broken_bodies_fail_the_same_in_every_cut(self) -> None:
        for framing, raw, want, code, message in self.BROKEN:
            cuts: list[Iterable[int]] = [[], range(len(raw)), *([at] for at in range(0, len(raw), max(1, len(raw) // 100)))]
            for at in cuts:
                with self.subTest(raw=raw[:40], at=at):
                    out, end, failure = self.feed(framing, cut(raw, at))
                    self.assertEqual((out, end), (want, None))
                    assert failure
                    self.assertEqual((failure.code, failure.message), (code, message))

    def test_the_limit_hands_over_what_it_allows(self) -> None:
        for framing, raw in ((Framing(False, None), b'hello'), (Framing(False, 5), b'hello'), (Framing(True, None), b'5\r\nhello\r\n0\r\n\r\n')):
            for pieces in ([raw], cut(raw, range(len(raw)))):
                out, end, failure = self.feed(framing, pieces, max_bytes=4)
                assert failure
                self.assertEqual((out, end, failure.message), (b'hell', None, 'body is longer than the limit of 4 bytes (--max-stream-bytes)'))

    def test_framing_of_header_fields(self) -> None:
        chunked, length = ('Transfer-Encoding', 'Chunked'), ('content-length', ' 5 ')
        for fields, http_1_0, want in [
            ([], False, Framing(False, None)), ([chunked], False, Framing(True, None)), ([length], True, Framing(False, 5)),
            ([length, ('Content-Length', '5, 5')], False, Framing(False, 5)), ([chunked], True, 'length_conflict'),
            ([chunked, length], False, 'length_conflict'), ([length, ('Content-Length', '6')], False, 'length_conflict'),
            ([('Content-Length', '+5')], False, 'length_conflict'), ([('Content-Length', '')], False, 'length_conflict'),
            ([('Content-Length', '\u0665')], False, 'length_conflict'), ([chunked, chunked], False, 'length_conflict'),
            ([('Transfer-Encoding', 'identity')], False, 'length_conflict'), ([('Transfer-Encoding', '')], False, 'length_conflict'),
            ([('Transfer-Encoding', 'gzip, chunked')], False, 'encoded_body'), ([('Transfer-Encoding', ' chunked,')], False, Framing(True, None)),
            *(([('Content-Length', f'{blank}5')], False, 'length_conflict') for blank in '\x0b\x0c\x1f\x85\xa0'),
            *(([('Transfer-Encoding', f'{blank}chunked')], False, 'length_conflict') for blank in '\x0b\x0c\x1f\x85\xa0'),
        ]:
            with self.subTest(fields=fields, http_1_0=http_1_0):
                if isinstance(want, str):
                    with self.assertRaises(StreamFailure) as caught:
                        framing_of(fields, http_1_0)
                    self.assertEqual(caught.exception.code, want)
                else:
                    self.assertEqual(framing_of(fields, http_1_0), want)


# --- bytes to events ----------------------------------------------------------------------------------------------------


def events_of(pieces: Iterable[bytes], **options: Any) -> tuple[list[str], list[str], str | None]:
    """Data, types and message of the failure, if any, of bytes that came in these reads."""
    parser, found = Events(**options), []
    try:
        for piece in pieces:
            found += parser.feed(piece)
        parser.finish()
    except StreamFailure as exc:
        return found, [getattr(e, 'type', 'message') for e in found], exc.message
    return found, [getattr(e, 'type', 'message') for e in found], None


class EventsTest(unittest.TestCase):
    """The event-stream parser: WHATWG HTML, server-sent events."""

    TABLE: ClassVar = [
        # bytes, data, types
        (b'data: YHOO\ndata: +2\ndata: 10\n\n', ['YHOO\n+2\n10'], ['message']),  # the examples of the standard
        (b': test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n', ['first event', 'second event'], None),
        (b'data\n\ndata\ndata\n\ndata:', ['', '\n'], None),
        (b'data:test\n\ndata: test\n\n', ['test', 'test'], None),
        (b'event: add\ndata: 73857293\n\nevent:remove\ndata: 2153\n\n', ['73857293', '2153'], ['add', 'remove']),
        (b'event: x\n\ndata: y\n\n', ['y'], ['message']),  # a type lasts for one block, also without data
        (b'event: message\ndata: y\n\nevent:\ndata: z\n\n', ['y', 'z'], ['message', 'message']),
        (b'data: a\r\rdata: b\r\n\r\ndata: c\n\n', ['a', 'b', 'c'], None),
        (b'data: a\r\n\rdata: b\n\r\n', ['a', 'b'], None),
        (b'data: a\r\n', [], None),  # CR LF is one terminator
        (b'\xef\xbb\xbfdata: a\n\n', ['a'], None),
        (b'\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: \xef\xbb\xbfb\n\n', ['\ufeffb'], None),
        ('data: a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\n\n'.encode(), ['a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg'], None),
        (b'data: [DONE]', [], None),  # an event that no blank line ends is none
        (b'data: [DONE]\n', [], None),
        (b' data: a\n\nDATA: b\n\ndata : c\n\n\tdata: d\n\n', [], None),
        (b'data: \x00\n\n', ['\x00'], None),
        ('data: ✓🙂\n\n'.encode(), ['✓🙂'], None),
        (b'error: {"x":1}\n\ndata: a\n\n', ['a'], None),
        (b'', [], None),
    ]
    BROKEN: ClassVar = [
        # bytes, data before, message
        (b'data: a\n\ndata: \xff\n\n', ['a'], 'byte 0xff at body offset 15 is not UTF-8: invalid start or continuation byte'),
        (b'data: a\n\n\xe2\x28', ['a'], 'byte 0xe2 at body offset 9 is not UTF-8: invalid start or continuation byte'),
        (b': \xed\xa0\x80', [], 'byte 0xed at body offset 2 is not UTF-8: invalid start or continuation byte'),
        (b'data: a\n\ndata: \xe2\x9c', ['a'], 'byte 0xe2 at body offset 15 is not UTF-8: unexpected end of data'),
        (b'data: a\n\n' + b'x' * 21, ['a'], 'line is longer than the limit of 20 characters (--max-line-chars)'),
        (b'data: a\n\n:' + b'x' * 20 + b'\n', ['a'], 'line is longer than the limit of 20 characters (--max-line-chars)'),
        (b'data: a\n\n' + b'data: 1234567890\n' * 4, ['a'], 'event is longer than the limit of 40 characters (--max-event-chars)'),
        (b'data: a\n\n' + b'data\n' * 42, ['a'], 'event is longer than the limit of 40 characters (--max-event-chars)'),
        (b'x' * 21 + b'\xff', [], 'line is longer than the limit of 20 characters (--max-line-chars)'),
        (b'x' * 20 + b'\xff', [], 'byte 0xff at body offset 20 is not UTF-8: invalid start or continuation byte'),
    ]

    def test_tables_in_every_two_way_cut(self) -> None:
        for raw, want, types in self.TABLE:
            for at in range(len(raw) + 1):
                with self.subTest(raw=raw[:60], at=at):
                    found, kinds, message = events_of(cut(raw, [at]))
                    self.assertEqual((found, message), (want, None))
                    self.assertEqual(kinds, types or ['message'] * len(want))
            self.assertEqual(events_of(cut(raw, range(len(raw))))[0], want)
            self.assertEqual(events_of([p for b in cut(raw, range(len(raw))) for p in (b, b'')])[0], want)

    def test_broken_streams_hand_over_what_was_whole_and_fail_the_same_in_every_cut(self) -> None:
        for raw, want, message in self.BROKEN:
            for cuts in ([], list(range(len(raw))), *[[at] for at in range(len(raw))]):
                with self.subTest(raw=raw[:40], cuts=cuts):
                    found, _, said = events_of(cut(raw, cuts), max_line_chars=20, max_event_chars=40)
                    self.assertEqual((found, said), (want, message))

    def test_an_event_is_dispatched_at_the_first_terminator_of_its_blank_line(self) -> None:
        parser = Events()
        self.assertEqual(parser.feed(b'data: a\r\n\r'), ['a'])
        self.assertEqual(parser.feed(b'\ndata: b\n\n'), ['b'])

    def test_lines_at_the_limits_are_whole(self) -> None:
        line = b'x' * (stream_client.MAX_LINE_CHARS - 6)
        self.assertEqual(len(events_of([b'data: ' + line + b'\n\n'])[0][0]), len(line))
        self.assertIsNotNone(events_of([b'data: x' + line + b'\n\n'])[2])
        lines = [b'data: ' + b'y' * 16383 + b'\n'] * 64
        self.assertEqual(len(events_of([*lines, b'\n'])[0][0]), stream_client.MAX_EVENT_CHARS - 1)
        self.assertEqual(len(events_of([*lines, b'data\n\n'])[0][0]), stream_client.MAX_EVENT_CHARS)
        self.assertIsNotNone(events_of([*lines, b'data\ndata\n\n'])[2])

    def test_a_failure_is_absorbing(self) -> None:
        parser = Events()
        self.assertEqual(parser.feed(b'data: a\n\n\xff'), ['a'])
        for call in (lambda: parser.feed(b'data: b\n\n'), lambda: parser.feed(b''), parser.finish):
            with self.assertRaises(UnicodeDecodeError):
                call()
        with self.assertRaises(ValueError):
            Events().feed(b'\xff')

    def test_finish_raises_unicode_decode_error_on_a_cut_character(self) -> None:
        parser = Events()
        parser.feed(b'data: \xf0\x9f')
        with self.assertRaises(UnicodeDecodeError) as caught:
            parser.finish()
        self.assertIsInstance(caught.exception, StreamFailure)

    def test_what_else_was_seen(self) -> None:
        parser = Events()
        parser.feed(b': a\n:\nx\nid: 1\nretry: 30\ndata: a\n\nerror: first\nerror: second\nretry: 3x\nid: n\0\nid: 2\nfoo: 1\n')
        self.assertEqual((parser.comments, parser.unknown_fields, parser.reconnection_ms), (2, 2, 30))
        self.assertEqual((parser.last_event_id, parser.error_field), ('1', (1, 'first')))
        parser.feed(b'\n')
        self.assertEqual(parser.last_event_id, '2')

    def test_time_does_not_grow_with_the_square(self) -> None:
        """Ten times the bytes in one-byte reads takes about ten times the time; a square would take a hundred."""

        def cost(size: int) -> float:
            raw, best = b'data: ' + b'x' * size, float('inf')
            for _ in range(3):
                parser = Events(max_line_chars=10**7)
                start = time.process_time()
                for at in range(len(raw)):
                    parser.feed(raw[at : at + 1])
                best = min(best, time.process_time() - start)
            return best

        self.assertLess(cost(40_000), 40 * cost(4_000))


# --- events to verdict --------------------------------------------------------------------------------------------------


class JsonTest(unittest.TestCase):
    """Strict JSON, the same on every Python."""

    def test_what_is_json(self) -> None:
        for text in ('{"a":1,"a":1}', '[' * 100 + ']' * 100, '9' * 4300, '-' + '9' * 4300, '{"a":"[[[{{{"}', ' {} ', '1e999', '"\\ud800"',
                     '{"a":{"b":[1,2]},"a":{"b":[1,2]}}', '"' + '[' * 500 + '"'):
            with self.subTest(text=text[:40]):
                strict_json(text)

    def test_what_is_not(self) -> None:
        for text, code in [
            ('', 'not_json'), ('{', 'not_json'), ('NaN', 'not_json'), ('{"a":Infinity}', 'not_json'), ('{"a":-Infinity}', 'not_json'),
            ("{'a':1}", 'not_json'), ('{"a":1}x', 'not_json'), ('"\x00"', 'not_json'), ('01', 'not_json'), ('\ufeff{}', 'not_json'),
            ('[' * 101 + ']' * 101, 'json_limits'), ('[' * 100_000, 'json_limits'), ('{"a":' * 101 + '1' + '}' * 101, 'json_limits'),
            ('9' * 4301, 'json_limits'), ('{"a":-' + '9' * 4301 + '}', 'json_limits'),
            ('{"a":1,"a":2}', 'repeated_key'), ('{"a":1,"a":1.0}', 'repeated_key'), ('{"a":1,"a":true}', 'repeated_key'),
            ('{"a":[{"b":null,"b":0}]}', 'repeated_key'), ('{"a":1,"\\u0061":2}', 'repeated_key'),
        ]:
            with self.subTest(text=text[:40]):
                with self.assertRaises(StreamFailure) as caught:
                    strict_json(text)
                self.assertEqual(caught.exception.code, code)

    def test_hostile_json_takes_time_in_proportion(self) -> None:
        """Inputs that a quadratic check would need minutes or hours for."""
        nested = '[' + '0,' * 200_000 + '0]'
        for _ in range(90):
            nested = '{"x":' + nested + ',"b":1,"b":1}'
        for text in ('{"choices":[]' + ',"":0' * 200_000 + '}', '[' + '[],' * 340_000 + '[]]', '[' * 101 + '"' + '\\"' * 500_000, '"' + '\\"' * 500_000 + '[' * 101, nested, '[' * 50 + '"[' * 300_000):
            start = time.process_time()
            with contextlib.suppress(StreamFailure):
                strict_json(text)
            self.assertLess(time.process_time() - start, 5)

    def test_the_quick_way_finds_what_the_checked_one_finds(self) -> None:
        """A repeated key is found wherever it stands in a chunk, whatever else the chunk holds."""
        for members in ('"id":"a","id":"b"', '"choices":[{"index":0,"delta":{"content":"x","content":"y"}}]', '"x":{"k":1,"k":2}',
                        '"choices":[{"index":0,"delta":{},"finish_reason":null,"finish_reason":"stop"}]',
                        '"choices":[],"usage":{"completion_tokens":1,"completion_tokens":2}', '"id" :"a","id" :"b"',
                        '"a":{},"id":"a","id":"b"', '"choices":[{"index":0,"delta":{"content":"a:b"}}],"id":1,"id":2'):
            with self.subTest(members=members):
                self.assertEqual(judge([data('{' + members + '}')])['outcome'], 'repeated_key')


TEXT, STOP, DONE = chunk('Hi'), chunk(finish='stop'), '[DONE]'
HEAD = b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n'  # of an answer that closing ends


class ChatTest(unittest.TestCase):
    """The state machine, one rule a row."""

    TABLE: ClassVar[list[tuple[Any, ...]]] = [
        # what it shows, events, outcome, text, finish_reason, done, warnings
        ('a whole answer', [TEXT, STOP, DONE], 'passed', 'Hi', 'stop', True, []),
        ('finish with text', [chunk('Hi', 'stop'), DONE], 'passed', 'Hi', 'stop', True, []),
        ('text of a failing finish is kept', [chunk('Hi', 7), DONE], 'bad_shape', 'Hi', None, False, []),
        ('error beats everything in its chunk', [TEXT, {**chunk(7), 'error': 'x', 'usage': 3}], 'server_error', 'Hi', None, False, []),
        ('usage before choices', [TEXT, {**chunk(7), 'usage': 3}], 'bad_usage', 'Hi', None, False, []),
        ('usage of a failing chunk counts', [STOP, {**chunk('Hi'), 'usage': {'completion_tokens': 4}}], 'text_after_finish', '', 'stop', False, []),
        ('an error inside a delta is one', [TEXT, chunk(choices=[{'index': 0, 'delta': {'content': 'x', 'error': 'died'}}]), STOP, DONE], 'server_error', 'Hi', None, False, []),
        ('an error null inside a delta is none', [chunk(choices=[{'index': 0, 'delta': {'content': 'Hi', 'error': None}}]), STOP, DONE], 'passed', 'Hi', 'stop', True, []),
        ('an earlier failure stands', [TEXT, {'choices': 3}, {'error': 'x'}], 'bad_shape', 'Hi', None, False, []),
        ('nothing after [DONE] changes it', [TEXT, STOP, DONE, 'junk', {'error': 'x'}], 'passed', 'Hi', 'stop', True, []),
        ('a second stop', [TEXT, STOP, STOP, DONE], 'passed', 'Hi', 'stop', True, ['finish_repeated']),
        ('a second stop with text', [TEXT, STOP, chunk('x', 'stop'), DONE], 'text_after_finish', 'Hi', 'stop', False, []),
        ('another model', [{**TEXT, 'model': 'b'}, STOP, DONE], 'passed', 'Hi', 'stop', True, ['model_differs']),
        ('another object type', [{**TEXT, 'object': 'text_completion'}, STOP, DONE], 'passed', 'Hi', 'stop', True, ['object_differs']),
        ('an empty object type', [{**TEXT, 'object': ''}, STOP, DONE], 'passed', 'Hi', 'stop', True, []),
        ('neither choices nor usage', [{}, TEXT, STOP, DONE], 'passed', 'Hi', 'stop', True, ['empty_chunk']),
        ('"" is no finish', [chunk('Hi', ''), STOP, DONE], 'passed', 'Hi', 'stop', True, ['finish_empty']),
        ('"null" is no finish', [chunk('Hi', 'null'), DONE], 'no_finish', 'Hi', None, True, ['finish_empty']),
        ('empty data', ['', TEXT, STOP, DONE], 'passed', 'Hi', 'stop', True, ['empty_event']),
        ('U+FFFD', [chunk('H\ufffd'), STOP, DONE], 'passed', 'H\ufffd', 'stop', True, ['replacement_character']),
        ('id on other chunks changes', [{**TEXT, 'id': 'a'}, {**STOP, 'id': 'b'}, DONE], 'passed', 'Hi', 'stop', True, ['id_differs']),
        ('id of text changes', [{**TEXT, 'id': 'a'}, {**TEXT, 'id': 'b'}, STOP, DONE], 'id_changed', 'Hi', None, False, []),
        ('ids that are absent are skipped', [{**TEXT, 'id': 'a'}, TEXT, {**TEXT, 'id': ''}, {**TEXT, 'id': 'a'}, STOP, DONE], 'passed',
         'HiHiHiHi', 'stop', True, []),
        ('more tokens than asked for', [TEXT, STOP, {'choices': [], 'usage': {'completion_tokens': 9}}, DONE], 'passed', 'Hi', 'stop', True,
         ['max_tokens_exceeded']),
        ('no tokens although text came', [TEXT, STOP, {'choices': [], 'usage': {'completion_tokens': 0}}, DONE], 'passed', 'Hi', 'stop', True,
         ['usage_contradicts']),
        ('private use and unassigned are visible', [chunk('\ue000'), STOP, DONE], 'passed', '\ue000', 'stop', True, []),
        ('a noncharacter is not', [chunk('\ufdd0\uffff\U0001fffe'), STOP, DONE], 'no_visible_text', '\ufdd0\uffff\U0001fffe', 'stop', True, []),
        ('a tool call hides no text before it', [TEXT, {'choices': [{'index': 0, 'delta': {'tool_calls': [{}]}}]}], 'tool_call', 'Hi', None,
         False, []),
        ('reasoning is no text', [{'choices': [{'index': 0, 'delta': {'reasoning': 'Hm', 'content': ''}}]}, STOP, DONE], 'no_visible_text', '',
         'stop', True, []),
        ('refusal null is none', [{'choices': [{'index': 0, 'delta': {'content': 'Hi', 'refusal': ''}}]}, STOP, DONE], 'passed', 'Hi', 'stop',
         True, []),
        ('error null is none', [{**TEXT, 'error': None}, STOP, DONE], 'passed', 'Hi', 'stop', True, []),
        ('detail beside choices is none', [{**TEXT, 'detail': 'x', 'code': 1, 'message': 'y'}, STOP, DONE], 'passed', 'Hi', 'stop', True, []),
        ('no events', [], 'no_done', '', None, False, []),
    ]

    def test_table(self) -> None:
        for name, events, outcome, text, finish, done, warned in self.TABLE:
            with self.subTest(name):
                got = judge([data(*events)], model='a', max_tokens=8)
                self.assertEqual((got['outcome'], got['text'], got['finish_reason'], got['done'], list(got['warnings'])),
                                 (outcome, text, finish, done, warned))

    def test_whole_messages(self) -> None:
        rows: list[tuple[Any, ...]] = [
            ([TEXT, STOP], 'the body ended before [DONE], by closing, after 2 events; finish_reason: "stop"'),
            ([TEXT, 'oops'], 'event 2: not JSON: "oops"'),
            ([TEXT, '[]'], 'event 2 is JSON but no object: "[]"'),
            ([{'error': {'message': 'full\x1b[2J', 'type': 'T', 'code': 500}}], 'error in the stream: full\\x1b[2J, type T, code 500'),
            ([{'error': {'error': {'message': 'deep'}}}], 'error in the stream: deep'), ([{'error': 'null'}], 'error in the stream: null'),
            ([{'detail': [{'msg': 'bad'}]}], 'error in the stream: [{"msg":"bad"}]'),
            ([chunk(finish='length'), DONE], 'finish_reason is "length", expected "stop"'),
            ([chunk('a', 'stop'), chunk('b')], 'text after finish_reason "stop"'),
            ([chunk('a', 'stop'), chunk(finish='length')], 'a second finish_reason after "stop"'),
            ([{'choices': [{'index': 2, 'delta': {}}]}], 'event 1: the choice has index 2, expected 0'),
            ([{'choices': [{'delta': {}}]}], 'event 1: the choice has no index'),
            ([{'choices': [{}, {}]}], 'event 1 has 2 choices, expected one'),
            ([{'usage': {'completion_tokens': '7'}}], 'event 1: completion_tokens 7 is no whole number from 0 up'),
            ([chunk('\u200b'), STOP, DONE], 'no visible character in 1 characters of text, 0 of reasoning'),
            ([{**TEXT, 'id': 'a'}, {**TEXT, 'id': 'b'}], 'event 2 carries text under id "b", earlier text had "a"'),
            ([TEXT, DONE], '[DONE] came after 1 content events without a finish_reason'),
        ]
        for events, message in rows:
            with self.subTest(message):
                self.assertEqual(judge([data(*events)])['message'], message)

    def test_the_end_of_the_body_says_what_was_cut(self) -> None:
        for raw, tail in [
            (data(TEXT, STOP) + b'data: [DONE]', '; "data: [DONE]" stands at the end, but no blank line ends that event'),
            (data(TEXT, STOP) + b'data: [DONE]\n', '; "data: [DONE]" stands at the end, but no blank line ends that event'),
            (data(TEXT, STOP) + b'data: {"choi', '; an event of 6 characters was cut'),
        ]:
            with self.subTest(raw=raw[-20:]):
                self.assertEqual(judge([raw])['message'], 'the body ended before [DONE], by closing, after 2 events; finish_reason: "stop"' + tail)
        self.assertIn('2 lines were no event-stream fields', judge([b'{"a":1}\n{"b":2}\n'])['message'])

    def test_policy(self) -> None:
        length, answer = [TEXT, chunk(finish='length'), DONE], [TEXT, STOP]
        two_ids, no_index = [{**TEXT, 'id': 'a'}, {**TEXT, 'id': 'b'}, STOP, DONE], [{'choices': [{'delta': {'content': 'Hi'}}]}, STOP, DONE]
        closed, whole = Framing(False, None), Framing(False, len(data(*answer)))
        rows: list[tuple[Any, ...]] = [
            (length, closed, Policy(('length',)), 'passed', {}),
            ([TEXT, STOP, DONE], closed, Policy(('length',)), 'passed', {}),
            (answer, whole, Policy(tolerate=('no_done',)), 'passed', {'no_done': 1}),
            (answer, closed, Policy(tolerate=('no_done',)), 'no_done', {}),
            ([TEXT], Framing(False, len(data(TEXT))), Policy(tolerate=('no_done',)), 'no_done', {}),
            *((rest, Framing(False, len(data(*answer)) + len(rest)), Policy(tolerate=('no_done',)), 'no_done', {})
              for rest in (b'data: {bad', b'data: {"error":"boom"}\n', b'error: boom', b'd')),
            (two_ids, closed, Policy(tolerate=('id_changed',)), 'passed', {'id_changed': 1}),
            (no_index, closed, Policy(tolerate=('missing_index',)), 'passed', {'missing_index': 1}),
            ([{}, TEXT, STOP, DONE], closed, Policy(fail_on=('empty_chunk',)), 'warning_refused', {'empty_chunk': 1}),
            ([{}, TEXT, STOP, DONE], closed, Policy(fail_on=('no_usage',)), 'passed', {'empty_chunk': 1}),
            (length, closed, Policy(fail_on=('no_usage',)), 'finish_not_accepted', {}),
        ]
        for events, framing, policy, outcome, warned in rows:
            with self.subTest(policy=policy, outcome=outcome):
                raw = data(*answer) + events if isinstance(events, bytes) else data(*events)
                got = judge([raw], framing, policy=policy)
                self.assertEqual((got['outcome'], got['warnings']), (outcome, warned))

    def test_usage_is_the_last_count(self) -> None:
        use = [{'usage': u} for u in ({'completion_tokens': 1, 'prompt_tokens': 5}, {'completion_tokens': None}, None, {},
                                      {'completion_tokens': 2, 'prompt_tokens': -1, 'prompt_tokens_details': {'cached_tokens': 3},
                                       'completion_tokens_details': {'reasoning_tokens': True}})]
        got = judge([data(*use, TEXT, STOP, DONE)], usage_asked=True)
        self.assertEqual(got['usage'], {'completion_tokens': 2, 'prompt_tokens': None, 'cached_tokens': 3, 'reasoning_tokens': None})
        self.assertNotIn('no_usage', got['warnings'])
        self.assertIn('no_usage', judge([data(TEXT, STOP, DONE)], usage_asked=True)['warnings'])

    def test_reasoning_under_both_names_counts_once(self) -> None:
        both = {'choices': [{'index': 0, 'delta': {'reasoning': 'Hm', 'reasoning_content': 'Hm'}}]}
        self.assertEqual(judge([data(both, both)])['reasoning'], (2, 4))

    def test_surrogate_halves_are_joined_and_shown_whole(self) -> None:
        halves = [f'{{"choices":[{{"index":0,"delta":{{"content":"{c}"}}}}]}}' for c in ('a\\ud83d', '\\ude42b\\ud83d', '\\ude43')]
        got = judge([data(*halves, STOP, DONE)])
        self.assertEqual((got['outcome'], got['text'], got['shown']), ('passed', 'a🙂b🙃', 'a🙂b🙃'))

    def test_an_error_field_counts_where_it_stands(self) -> None:
        line = b'error: {"message":"slot"}\n'
        for raw, outcome, text in [
            (data(TEXT) + line + b'\n' + data(STOP, DONE), 'server_error', 'Hi'),
            (line + data(TEXT, STOP, DONE), 'server_error', ''),
            (data(TEXT, STOP, DONE) + line, 'passed', 'Hi'),
            (data(TEXT, STOP) + b'data: [DONE]\n' + line + b'\n', 'server_error', 'Hi'),
            (data(TEXT) + line + b'\xff', 'server_error', 'Hi'), (data(TEXT) + b'error: null\n', 'server_error', 'Hi'),
            (data(TEXT) + b'event: error\ndata: null\n\n', 'server_error', 'Hi'),
        ]:
            for pieces in ([raw], cut(raw, range(len(raw)))):
                with self.subTest(raw=raw[:60], pieces=len(pieces)):
                    got = judge(pieces)
                    self.assertEqual((got['outcome'], got['text']), (outcome, text))

    def test_a_failure_is_absorbing(self) -> None:
        chat = ChatCompletion()
        with self.assertRaises(StreamFailure) as first:
            chat.take('oops')
        for call in (lambda: chat.take(json.dumps(TEXT)), chat.end, lambda: list(chat.feed(data(TEXT)))):
            with self.assertRaises(StreamFailure) as again:
                call()
            self.assertIs(again.exception, first.exception)

    def test_the_answer_has_a_limit(self) -> None:
        got = judge([data(chunk('1234'), chunk('5678'), chunk('9'))], max_answer_chars=8)
        self.assertEqual((got['outcome'], got['text'], got['message']),
                         ('answer_too_long', '12345678', 'answer is longer than the limit of 8 characters (--max-answer-chars)'))

    def test_every_state_and_input_is_a_transition_or_a_violation(self) -> None:
        inputs = {step for _, step in stream_client.TRANSITIONS}
        for state in ('open', 'finished'):
            for step in inputs:
                reached = (state, step) in stream_client.TRANSITIONS or (state, step) in stream_client.VIOLATIONS
                self.assertTrue(reached or (state, step) == ('open', 'finish again'), (state, step))


# --- the two invariants -------------------------------------------------------------------------------------------------


def offline(raw: bytes) -> tuple[bytes, Framing]:
    """Body bytes and framing of a recorded answer with status 200."""
    head, _, body = raw.partition(b'\r\n\r\n')
    fields = list(http.client.parse_headers(io.BytesIO(head.partition(b'\r\n')[2] + b'\r\n\r\n')).items())
    return body, framing_of(fields, head.startswith(b'HTTP/1.0'))


def recorded_answers() -> Iterator[tuple[str, bytes]]:
    """Every mode of the fixture and every capture that is one event stream of a few KiB."""
    request = fixture_server.Request(b'fixture', b'fixture', KEY)
    for name, mode in fixture_server.MODES.items():
        if mode.group not in ('time', 'size') and not name.endswith('-endless'):
            yield name, b''.join(s for s in mode.steps(request) if isinstance(s, bytes))
    for path in sorted(CAPTURES.glob('*.http')):
        yield path.stem, path.read_bytes()


class Parsing(ChatCompletion):
    """The state machine without its hot path: every chunk is parsed."""

    def _learn(self, data: str, chunk: dict[str, Any], text: str) -> None:
        pass


class LikeTest(unittest.TestCase):
    """A chunk judged by its likeness to an earlier one is judged as if it had been parsed."""

    TEXTS = ('a', 'a', 'b c', ' ', '你好', '🙂', 'a\\nb', '\\"', '\\u0041', '\\ud83d', '\\ude42', '\u2028', '\x7f', '\ufeff', '\x01', '\t', '', 'x:y', '{', '\ufffd')
    TURNS = ('{"id":"1","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}',) * 6 + (
        '{"id":"2","object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}',
        '{"id":"1","object":"chat.completion.chunk","model":"n","choices":[{"index":0,"delta":{"content":"%s"}}]}',
        '{"id":"1","object":"other","model":"m","choices":[{"index":0,"delta":{"content":"%s"}}]}',
        '{"id":"1","object":"chat.completion.chunk","model":"n","choices":[]}', '{"choices":[{"delta":{"content":"%s"}}]}', '{"choices":[],"usage":{"completion_tokens":2}}',
        '{"choices":[{"index":0,"delta":{"content":"%s"}}]}', '{"choices":[{"index":0,"delta":{"content":"%s"}}],"usage":{"completion_tokens":1}}',
        '{"choices":[{"index":0,"delta":{"content":"%s","content":"a"}}]}', '{"choices":[{"index":0,"delta":{"content":"a","content":"%s"}}]}',
        '{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"%s"}]}}]}', '{"choices":[{"index":0,"delta":{"content":"%s"},"x":"a"}]}',
        '{"choices":[{"index":0,"delta":{"content":"%s","reasoning":"r"}}]}', '{"choices":[{"index":0,"delta":{"content":"%s","role":"assistant"}}]}',
        '{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":"stop"}]}', '{"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":""}]}',
        '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}', '{"choices":[{"index":0,"delta":{"content":"%s"}}]} ', '[DONE]', '"%s"', '\n%s\n',
        '{"choices":[{"index":0,"delta":{"content":"%s"}}],"error":{"message":"a"}}', '{"choices":[{"index":0,"delta":{"content":"%s"}}')

    def facts(self, kind: type[ChatCompletion], turns: Iterable[str], policy: Policy) -> dict[str, Any]:
        chat = kind(model='m', max_tokens=9, usage_asked=True, policy=policy, max_answer_chars=60)
        shown = []
        with contextlib.suppress(StreamFailure):
            for data in turns:
                shown += [chat.take(data)]
            chat.end()
        facts = {k: v for k, v in vars(chat).items() if k not in ('events', 'secret', '_like', '_learn_from', '_answer', 'failure')}
        return {**facts, 'shown': shown, 'text': chat.text, 'failure': chat.failure and (chat.failure.code, chat.failure.message, chat.failure.event)}

    def alike(self, turns: list[str], policy: Policy = Policy()) -> None:  # noqa: B008  # immutable
        self.assertEqual(self.facts(ChatCompletion, turns, policy), self.facts(Parsing, turns, policy), turns)

    def test_random_streams(self) -> None:
        draw = random.Random(20261130)
        policies = (Policy(), Policy((), ('id_changed', 'missing_index', 'no_done'), ()))
        for _ in range(6000 if LONG else 1500):
            usual = draw.choice(self.TURNS)
            turns = [usual if draw.random() < 0.7 else draw.choice(self.TURNS) for _ in range(draw.randrange(2, 40))]
            self.alike([t.replace('%s', draw.choice(self.TEXTS)) for t in turns], draw.choice(policies))

    def test_every_pair_of_turns_behind_a_learned_one(self) -> None:
        for first, second in itertools.product(self.TURNS[5:], repeat=2):
            for text in ('a', 'b'):
                again = [turn.replace('%s', t) for turn, t in ((first, text), (second, 'c'), (first, 'b'))]
                for turns in ([self.TURNS[0] % 'a', self.TURNS[0] % 'b', *again, self.TURNS[0] % 'd'], again):
                    self.alike(turns, Policy((), ('id_changed', 'missing_index'), ()))

    def test_every_turn_again_with_every_text(self) -> None:
        for turn, text in itertools.product(self.TURNS, self.TEXTS):
            self.alike([turn.replace('%s', t) for t in ('a', 'a', text, 'b', text)], Policy((), ('id_changed', 'missing_index'), ()))

    def test_only_a_short_chunk_is_learned(self) -> None:  # one of a MiB took seconds to search
        for text, learned in (('z', True), ('z' * 4096, False), ('z' + '"\\\\' * 4000, False)):
            chat = ChatCompletion()
            chat.take(json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]}))
            self.assertEqual(chat._like != stream_client.NOTHING_ALIKE, learned)

    def test_an_event_of_type_message_is_a_chunk(self) -> None:
        chat = ChatCompletion()
        self.assertEqual(chat.take(Event(self.TURNS[0] % 'a', 'message')), 'a')
        with self.assertRaises(StreamFailure) as caught:
            chat.take(Event('{"error":{"message":"boom"}}', 'message'))
        self.assertEqual(caught.exception.code, 'server_error')

    def test_it_is_taken(self) -> None:
        parsed: list[str] = []

        class Counting(ChatCompletion):
            def _parse(self, data: str) -> dict[str, Any]:
                parsed.append(data)
                return super()._parse(data)

        chat = Counting()
        for at in range(1000):
            chat.take(self.TURNS[0] % f'{at} ')
        self.assertEqual((len(parsed), chat.content_events, chat.data_events), (1, 1000, 1000))
        for at in range(64):  # where every chunk differs, it is tried once in 16
            chat.take((self.TURNS[0] % 'x')[:-1] + f',"other":{at}}}')
        self.assertEqual(len(parsed), 65)


class CutTest(unittest.TestCase):
    """Contract: the verdict and the record do not depend on how the bytes were cut; text before a failure is kept."""

    def test_every_two_way_cut_of_every_short_answer(self) -> None:
        judged = 0
        for name, raw in recorded_answers():
            if not re.match(rb'HTTP/1\.[01] 200 ', raw) or len(raw) > 6000:
                continue
            try:
                body, framing = offline(raw)
            except (StreamFailure, http.client.HTTPException):
                continue
            whole = judge([body], framing)
            judged += 1
            step = max(1, len(body) // (10_000 if LONG else 50))
            rng = random.Random(name)
            cuts = [[at] for at in range(rng.randrange(step), len(body), step)]
            cuts += [list(range(len(body))), *(sorted(rng.sample(range(len(body)), min(len(body), 9))) for _ in range(20))]
            for at in cuts:
                if judge(cut(body, at), framing) != whole:
                    self.assertEqual(judge(cut(body, at), framing), whole, f'{name} cut at {at[:10]}')
        self.assertGreater(judged, 200)

    def test_a_read_that_holds_everything_keeps_the_text_before_each_failure(self) -> None:
        for name, mode in fixture_server.MODES.items():
            if mode.group == 'chunk shapes':
                raw = b''.join(s for s in mode.steps(fixture_server.Request(b'i', b'm', KEY)) if isinstance(s, bytes))
                with self.subTest(name):
                    got = judge([offline(raw)[0]], offline(raw)[1])
                    self.assertEqual((got['outcome'], got['text']), (mode.expect, mode.text))

    def test_captures_of_real_servers(self) -> None:
        """Each through a real socket, whole, by lines and dribbled: one record, and the one that is expected."""
        expect = json.loads((CAPTURES / 'expect.json').read_text())
        for path in sorted(CAPTURES.glob('*.http')):
            raw = path.read_bytes()
            head, gap, body = raw.partition(b'\r\n\r\n')
            records = []
            for pieces in ([body], body.splitlines(keepends=True), cut(body, range(0, len(body), 5))):
                with Raw(sending(head + gap, *pieces)) as server:
                    records.append(stream(server.url, 'tiny', 'x', idle=5, deadline=10, token='test-key'))
            with self.subTest(path.stem):
                check_record(self, records[0])
                self.assertEqual({k: records[0][k] for k in expect[path.name]}, expect[path.name])
                for record in records[1:]:
                    self.assertEqual(invariant(record), invariant(records[0]))
        self.assertGreater(len(expect), 50)


@unittest.skipUnless(HAS_HYPOTHESIS, 'hypothesis is not installed')
class HypothesisTest(unittest.TestCase):
    """The invariants over generated streams, and no exception but ours over any bytes."""

    def test_generated(self) -> None:
        from hypothesis import HealthCheck, given, settings
        from hypothesis import strategies as st

        piece = st.one_of(
            st.sampled_from([data(TEXT), data(STOP), data(DONE), data(TEXT, eol='\r\n'), data(STOP, eol='\r'), b': c\n', b'\n', b'\r', b'\r\n',
                             b'data', b'data:', b'event: error\n', b'error: x\n', b'\xef\xbb\xbf', b'\xe2', '✓'.encode(), b'id: 1\n', b'0',
                             data({'error': 'x'}), data(json.dumps(chunk('\ud83d'))), b'data: {"choices":[]}\n\n']),
            st.binary(max_size=12), st.text(max_size=12).map(str.encode))
        framings = st.sampled_from([Framing(False, None), Framing(True, None), Framing(False, 100)])

        @settings(max_examples=2000 if LONG else 300, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(piece, max_size=30).map(b''.join), framings, st.data())
        def cuts_do_not_matter(raw: bytes, framing: Framing, draw: Any) -> None:
            cuts = draw.draw(st.lists(st.integers(0, len(raw)), max_size=20))
            wire = b'%x\r\n%s\r\n0\r\n\r\n' % (len(raw), raw) if framing.chunked and raw else raw
            self.assertEqual(judge(cut(wire, cuts), framing), judge([wire], framing))
            self.assertEqual(judge(cut(raw, range(len(raw))), framing), judge([raw], framing))

        @settings(max_examples=1000 if LONG else 200, deadline=None)
        @given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                                st.sampled_from(['choices', 'delta', 'index', 'content', 'finish_reason', 'usage', 'error', 'id', 'object']) |
                                st.text(max_size=3), inner, max_size=5), max_leaves=20))
        def any_json_gives_a_verdict(value: Any) -> None:
            got = judge([data(TEXT, json.dumps(value), STOP, DONE)])
            self.assertTrue(got['text'].startswith('Hi'))
            self.assertIn(got['outcome'], ('passed', *FAILURES))

        cuts_do_not_matter()
        any_json_gives_a_verdict()


# --- time, policy, python interface -------------------------------------------------------------------------------------


class ClockTest(unittest.TestCase):
    """The clocks on an injected time."""

    def test_the_earliest_end_wins_and_says_what_it_waited_for(self) -> None:
        now = [100.0]
        clock = Clock(2, 5, 3, 1.5, now=lambda: now[0])
        clock.enter('head', 'waiting for the head')
        self.assertEqual(clock.remaining(), 2)
        now[0] = 101.0
        clock.moved = clock.event_at = 101.0
        self.assertEqual(clock.due(), (102.5, 'stall_timeout'))
        for at, moved, event_at, code, message in [
            (102.5, 102.0, 101.0, 'stall_timeout', 'no event with data for 1.5 s (--stall 1.5)'),
            (103.5, 101.5, None, 'first_text_timeout', 'no visible text after 3 s (--first-text 3)'),
            (102.1, 100.0, None, 'idle_timeout', 'no byte for 2 s (--idle 2)'),
        ]:
            now[0], clock.moved, clock.event_at = at, moved, event_at
            with self.assertRaises(StreamFailure) as caught:
                clock.remaining()
            self.assertEqual((caught.exception.code, caught.exception.boundary), (code, 'head'))
            self.assertEqual(caught.exception.message, f'{message} while waiting for the head; nothing had arrived')
        clock.text_seen, clock.moved, now[0] = True, 105.0, 105.0
        with self.assertRaises(StreamFailure) as caught:
            clock.remaining()
        self.assertEqual(caught.exception.code, 'deadline')

    def test_a_grace_ends_quietly_and_never_outlives_the_deadline(self) -> None:
        now = [0.0]
        clock = Clock(1, 5, now=lambda: now[0])
        now[0] = 4.9
        clock.grace(0.25)
        self.assertAlmostEqual(clock.remaining(), 0.1)
        now[0] = 5.0
        with self.assertRaises(stream_client._GraceOver):
            clock.remaining()


BAD_URLS = [
    '', 'x', 'ftp://127.0.0.1/', 'http:127.0.0.1', 'http://', 'http:///v1', 'http://example.com/v1', 'http://10.0.0.1/', 'http://0.0.0.0/',
    'http://127.1/', 'http://2130706433/', 'http://0x7f.0.0.1/', 'http://127.0.0.1.nip.io/', 'http://localhost.example/', 'http://[::2]/',
    'http://[::ffff:10.0.0.1]/', 'http://[::1%25lo]/', 'http://[::1/', 'http://::1/', 'https://u:SECRET@h/', 'https://SECRET@h/', 'https://@h/',
    'https://h/?k=SECRET', 'https://h/?', 'https://h/#SECRET', 'https://h/#', 'https://h:0/', 'https://h:65536/', 'https://h:SECRET/', 'https://h:/',
    'https://h:-1/', 'https://h\\x/', 'https://h/a b', 'https://h/\u00e9', 'https://h/\n', 'https://h/\x7f', 'https://bücher.example/', ' https://h/',
    'https://a..b/', 'https://.h/', 'https://h../', 'https://./', 'http://localhost./', 'https://' + 'l' * 64 + '/', 'http://127.0.0.1\t/', 'https://h:80:80/', 'https://[12345::]/', 'https://' + 'h' * 254 + '/', 'https://h/' + 'x' * 5000,
]


class PolicyTest(unittest.TestCase):
    """URLs, keys and other arguments: what is refused before anything is sent."""

    def test_good_urls(self) -> None:
        for url, want in [
            ('http://127.0.0.1:8000/v1/chat/completions', ('127.0.0.1', 8000, '/v1/chat/completions')),
            ('HTTP://LOCALHOST/x', ('LOCALHOST', 80, '/x')), ('http://[::1]:81/x', ('::1', 81, '/x')), ('http://127.9.9.9', ('127.9.9.9', 80, '/')),
            ('https://gpu_host-1.example:8443/v1;p=1', ('gpu_host-1.example', 8443, '/v1;p=1')), ('https://[2001:db8::1]/', ('2001:db8::1', 443, '/')),
            ('https://gpu.svc.cluster.local./v1', ('gpu.svc.cluster.local.', 443, '/v1')),
        ]:
            target = parse_url(url)
            self.assertEqual((target.host, target.port, target.path), want)

    def test_bad_urls_are_refused_and_never_echoed(self) -> None:
        for url in BAD_URLS:
            with self.subTest(url=url[:60]):
                with self.assertRaises(Refused) as caught:
                    stream(url, 'm', 'p')
                self.assertNotIn('SECRET', str(caught.exception))

    def test_arguments_that_are_refused(self) -> None:
        url = 'http://127.0.0.1:9/x'
        rows: list[tuple[str, dict[str, Any]]] = [
            ('model', {'model': ''}), ('model', {'model': 7}), ('model', {'model': '\ud800'}), ('prompt', {'prompt': ''}), ('prompt', {'prompt': 'a\udfff'}),
            ('prompt', {'prompt': None}), ('max_tokens', {'max_tokens': 0}), ('max_tokens', {'max_tokens': 32769}), ('max_tokens', {'max_tokens': True}),
            ('max_tokens', {'max_tokens': 1.0}), ('idle', {'idle': 0}), ('idle', {'idle': -1}), ('idle', {'idle': float('nan')}),
            ('idle', {'idle': float('inf')}), ('idle', {'idle': '1'}), ('idle', {'idle': True}), ('deadline', {'deadline': 86401}),
            ('deadline', {'deadline': None}), ('stall', {'stall': 0}), ('first_text', {'first_text': 'x'}), ('token', {'token': 'a b'}),
            ('token', {'token': 'a\r\nX: y'}), ('token', {'token': 'é'}), ('token', {'token': 7}), ('ca_file', {'ca_file': '/nonexistent'}),
            ('connect_to', {'connect_to': 'example.com:80'}), ('connect_to', {'connect_to': '127.0.0.1'}), ('connect_to', {'connect_to': 5}),
            ('run_id', {'run_id': 'a b'}), ('run_id', {'run_id': ''}), ('label', {'label': ''}), ('note', {'notes': {'a b': 'c'}}),
            ('note', {'notes': {'a': ''}}), ('note', {'notes': {f'k{n}': 'v' for n in range(65)}}), ('tolerate', {'tolerate': ('no_finish',)}),
            ('tolerate', {'tolerate': 'no_done'}), ('tolerate', {'tolerate': None}), ('accept_finish', {'accept_finish': 5}), ('note', {'notes': 5}),
            ('token', {'token': 0}), ('extra_body', {'extra_body': []}), ('on_text', {'on_text': 5}), ('fail_on', {'fail_on': ('after_done',)}), ('fail_on', {'fail_on': ('no_done',)}), ('accept_finish', {'accept_finish': ('',)}),
            ('messages', {'messages': []}), ('messages', {'messages': [{}], 'prompt': None}), ('messages', {'messages': [], 'prompt': None}),
            ('messages', {'messages': [{'role': 'user', 'content': float('nan')}], 'prompt': None}), ('system', {'system': ''}),
            ('extra_body', {'extra_body': {'n': 2}}), ('extra_body', {'extra_body': {'stream': False}}),
            ('extra_body', {'extra_body': {'x': {1, 2}}}), ('max_line_chars', {'max_line_chars': 0}), ('extra_body', {'extra_body': [1]}),
        ]
        for argument, options in rows:
            with self.subTest(options=options):
                with self.assertRaises(Refused) as caught:
                    given: dict[str, Any] = {'model': 'm', 'prompt': 'p', **options}
                    stream(url, given.pop('model'), given.pop('prompt'), **given)
                self.assertEqual(caught.exception.argument, argument)
                self.assertIsInstance(caught.exception, ValueError)
        with self.assertRaises(TypeError):
            stream(url, 'm', 'p', idel=1)  # type: ignore[call-arg]  # that is the point

    def test_the_key_is_masked_in_every_form_before_a_text_is_cut(self) -> None:
        secret = Secret(KEY)
        twice = json.dumps(json.dumps(KEY)[1:-1])[1:-1]
        for form in (KEY, json.dumps(KEY)[1:-1], json.dumps(KEY)[1:-1].replace('/', '\\/'), twice, 'sk%2Dnot%2Fa%22real%5Ckey%2D0123456789',
                     'sk-not%2fa%22real%5ckey-0123456789', html.escape(KEY), ''.join(f'\\u{ord(c):04X}' for c in KEY),
                     ''.join(f'&#x{ord(c):x};' for c in KEY), KEY[:7] + '\r\n\t' + KEY[7:]):
            shown = secret.quote('x' * 280 + form, 300)
            self.assertNotIn('sk', shown)
        for key in ('sk\\\\abcdefgh', 'sk%25abcdefgh', 'sk&amp;abcdefgh', 'abcd\\u005cfgh', '33bcdefghij'):
            for form in (key, '%' + key, json.dumps(key)[1:-1]):
                self.assertIn('[key]', Secret(key).mask(f'x {form} y'), (key, form))
        self.assertEqual(Secret('uvicorn-1234567').quote('uvicorn'), 'uvicorn')
        self.assertEqual(secret.mask_cut('bad ' + KEY[:9]), 'bad [key]')
        self.assertEqual(secret.mask_cut('bad ' + html.escape(KEY)[:16] + '\ufffd'), 'bad [key]')
        self.assertEqual(secret.mask_cut('not a start: sk'), 'not a start: sk')
        self.assertEqual(Secret('short').mask('a short word'), 'a short word')
        self.assertEqual(secret.quote('a\x1b\u202e\ud800\n', 300), 'a\\x1b\\u202e\\ud800\\x0a')


class InterfaceTest(unittest.TestCase):
    """stream(), ChatStream and the request that goes out."""

    def test_the_request(self) -> None:
        with Raw(sending(b'HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n')) as server:
            stream(server.url, 'm', 'é', token=KEY, run_id='run-1', system='s', extra_body={'temperature': 1, 'seed': 7})
        head, _, body = server.requests[0].partition(b'\r\n\r\n')
        lines = head.decode().split('\r\n')
        self.assertEqual(lines[0], 'POST /v1/chat/completions HTTP/1.1')
        self.assertEqual(dict(line.split(': ', 1) for line in lines[1:]), {
            'Host': f'127.0.0.1:{server.port}', 'Content-Length': str(len(body)), 'Content-Type': 'application/json', 'Accept': 'text/event-stream',
            'Accept-Encoding': 'identity', 'User-Agent': f'stream-client/{stream_client.__version__}', 'X-Request-Id': 'run-1',
            'Connection': 'close', 'Authorization': f'Bearer {KEY}'})
        self.assertEqual(json.loads(body), {
            'model': 'm', 'messages': [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'é'}], 'stream': True,
            'stream_options': {'include_usage': True}, 'max_tokens': 128, 'temperature': 1, 'n': 1, 'seed': 7})
        self.assertEqual(len(server.requests), 1)  # and never a second try

    def test_ipv6_and_localhost(self) -> None:
        with fixture() as url:
            self.assertTrue(stream(url.replace('127.0.0.1', 'localhost'), 'm', 'p')['ok'])
        try:
            listener = socket.create_server(('::1', 0), family=socket.AF_INET6)
        except OSError:
            self.skipTest('no IPv6 on this machine')
        with listener:
            port = listener.getsockname()[1]
            host = []

            def answer() -> None:
                connection = listener.accept()[0]
                host.append(re.search(rb'Host: (.*)\r\n', read_request(connection))[1])  # type: ignore[index]
                sending(b'HTTP/1.1 204 No\r\n\r\n')(connection)
                connection.close()

            threading.Thread(target=answer, daemon=True).start()
            record = stream(f'http://[::1]:{port}/x', 'm', 'p')
            self.assertEqual((record['outcome'], record['response']['peer'], host), ('http_status', f'[::1]:{port}', [f'[::1]:{port}'.encode()]))

    def test_on_text_sees_the_text_and_its_exceptions_end_the_run(self) -> None:
        with fixture() as url:
            seen: list[str] = []
            self.assertTrue(stream(url, 'm', 'p', on_text=seen.append)['ok'])
            self.assertEqual(seen, ['READY ', '✓'])

            def fail(_: str) -> None:
                raise LookupError('mine')

            with self.assertRaises(LookupError):
                stream(url, 'm', 'p', on_text=fail)

    def test_time_spent_in_on_text_counts(self) -> None:
        with fixture('one-chunk-all') as url:
            start = time.monotonic()
            record = stream(url, 'm', 'p', on_text=lambda _: time.sleep(0.6), idle=0.5)
            self.assertEqual((record['outcome'], record['text']), ('idle_timeout', 'READY '))
            record = stream(url, 'm', 'p', on_text=lambda _: time.sleep(0.6), deadline=0.5)
            self.assertEqual((record['outcome'], record['text']), ('deadline', 'READY '))
            record = stream(url, 'm', 'p', on_text=lambda _: time.sleep(0.6), first_text=0.5, stall=5)
            self.assertEqual(record['outcome'], 'passed')  # the text had come in time
            self.assertLess(time.monotonic() - start, 10)

    def test_leaving_early_closes_the_connection_and_says_so(self) -> None:
        closed = threading.Event()

        def script(connection: socket.socket) -> None:
            connection.sendall(HEAD + data(TEXT))
            if not connection.recv(1):
                closed.set()

        with Raw(script) as server:
            with ChatStream(server.url, 'm', 'p') as answer:
                self.assertEqual(answer.record['outcome'], 'unfinished')
                for text in answer:
                    self.assertEqual(text, 'Hi')
                    break
            self.assertTrue(closed.wait(1.0))
        check_record(self, answer.record)
        self.assertEqual((answer.record['outcome'], answer.record['text']), ('interrupted', 'Hi'))
        self.assertEqual(list(answer), [])

    def test_a_stream_that_is_never_asked_for_text_sends_nothing(self) -> None:
        with Raw(sending()) as server, ChatStream(server.url, 'm', 'p') as answer:
            pass
        self.assertEqual((answer.record['outcome'], server.requests), ('interrupted', []))

    def test_a_run_cut_while_it_books_a_read_has_a_whole_record(self) -> None:
        booked = ChatStream._book_text
        calls: list[float] = []

        def cut_short(run: ChatStream, at: float) -> None:
            calls.append(at)
            if len(calls) == 2:
                raise KeyboardInterrupt
            booked(run, at)

        with fixture() as url, unittest.mock.patch.object(ChatStream, '_book_text', cut_short):
            answer = ChatStream(url, 'm', 'p')
            with self.assertRaises(KeyboardInterrupt):
                list(answer)
        check_record(self, answer.record)
        self.assertEqual(answer.record['outcome'], 'interrupted')

    def test_a_fault_of_ours_is_a_record(self) -> None:
        with fixture() as url, unittest.mock.patch.object(ChatCompletion, 'take', side_effect=ZeroDivisionError(KEY)):
            record = stream(url, 'm', 'p')
        self.assertEqual((record['outcome'], record['error']), ('internal', 'ZeroDivisionError in the client'))
        check_record(self, record)

    def test_threads_do_not_disturb_each_other_and_no_global_is_touched(self) -> None:
        before = signal.getsignal(signal.SIGINT), socket.getdefaulttimeout()
        with fixture() as url, concurrent.futures.ThreadPoolExecutor(32) as pool:
            records = list(pool.map(lambda n: stream(url, f'mode:{"ok" if n % 2 else "length"}', 'p'), range(64)))
        self.assertEqual([r['ok'] for r in records], [bool(n % 2) for n in range(64)])
        self.assertEqual((signal.getsignal(signal.SIGINT), socket.getdefaulttimeout()), before)

    def test_oddities_of_the_head(self) -> None:
        whole = data(TEXT, STOP, DONE)
        for fields, outcome in [
            (b'Content-Type: multipart/mixed; boundary=x', 'not_event_stream'), (b'Content-Type: text/event-stream\r\n ', 'passed'),
            (b'Content-Type: text/event-stream\r\nContent-Type: text/event-stream; charset=x', 'passed'),
            (b'Content-Type: text/event-stream\r\nContent-Type: text/plain', 'not_event_stream'), (b'Content-Type:text/event-stream', 'passed'),
            (b'Content-Type: text/event-stream\r\nVia: 1\r\nvia: 2', 'passed'), (b' Content-Type: text/event-stream', 'head_malformed'),
            (b'Content-Type: text/event-stream\r\nContent-Encoding: identity', 'passed'),
            (b'Content-Type: text/event-stream\r\nContent-Encoding: \x0bgzip', 'encoded_body'), (b'Content-Type: text /event-stream', 'not_event_stream'),
        ]:
            with self.subTest(fields=fields), Raw(sending(b'HTTP/1.1 200 OK\r\n' + fields + b'\r\n\r\n' + whole)) as server:
                record = stream(server.url, 'm', 'p')
                self.assertEqual(record['outcome'], outcome, record['error'])
                if b'Via' in fields:
                    self.assertEqual(record['response']['headers']['via'], '1, 2')

    def test_buffered_delivery_is_noticed(self) -> None:
        whole = data(*[chunk('a')] * 40, STOP, DONE)
        with Raw(sending(HEAD, 1.2, whole)) as server:
            self.assertIs(stream(server.url, 'm', 'p')['delivery']['buffered'], True)
        with Raw(sending(HEAD, whole)) as server:
            self.assertIs(stream(server.url, 'm', 'p')['delivery']['buffered'], False)
        with Raw(sending(HEAD, data(TEXT, STOP, DONE))) as server:
            self.assertIsNone(stream(server.url, 'm', 'p')['delivery']['buffered'])

    def test_times_are_those_of_the_reads(self) -> None:
        with Raw(sending(HEAD, 0.3, data(chunk('a'), chunk('b')), 0.3, data(chunk('c')), 0.3, data(STOP, DONE))) as server:
            record = stream(server.url, 'm', 'p')
        marks = record['marks_ms']
        self.assertEqual(record['event_gaps_ms'][0], 0.0)
        self.assertGreater(record['event_gaps_ms'][1], 200)
        self.assertEqual((marks['first_byte'], marks['first_event']), (marks['first_text'], record['first_text_ms']))
        self.assertGreater(marks['first_text'] - marks['head'], 200)
        self.assertGreater(marks['finish'] - marks['last_text'], 200)
        self.assertEqual((record['delivery']['content_reads'], record['content_events']), (2, 3))


# --- the catalogue ------------------------------------------------------------------------------------------------------


class CatalogueTest(unittest.TestCase):
    """Every mode of the fixture, whole and cut: the outcome and the text that the catalogue says, in time, and offline again."""

    IDLE, DEADLINE, MARGIN = 2.0, 5.0, 3.0

    def test_every_mode(self) -> None:
        with contextlib.ExitStack() as stack:
            urls = [stack.enter_context(fixture(delay=0.01, fragment=f, seed=7)) for f in ((None, 1, 'random') if LONG else (None, 'random'))]
            here = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            waiting = stack.enter_context(concurrent.futures.ThreadPoolExecutor(90))  # they mostly sleep
            working = stack.enter_context(concurrent.futures.ThreadPoolExecutor(3))

            def one(name: str, url: str, deadline: float) -> tuple[dict[str, Any], dict[str, Any] | None, float]:
                start = time.monotonic()
                most = 4_000_000 if fixture_server.MODES[name].expect == 'body_too_large' else stream_client.MAX_STREAM_BYTES
                run = ChatStream(url, f'mode:{name}', 'p', idle=self.IDLE, deadline=deadline, token=KEY, run_id='run', max_stream_bytes=most)
                capture = here / f'{name}-{urls.index(url)}'
                if url == urls[-1] or LONG:
                    run.capture = stream_client.Capture(str(capture), run.secret, 4 * most)
                with run:
                    list(run)
                seconds = time.monotonic() - start
                if not run.capture:
                    return run.record, None, seconds
                with working_offline:
                    again = judged_offline(capture, token=KEY, max_stream_bytes=most)
                capture.unlink()
                return run.record, again, seconds

            working_offline = threading.Lock()  # the clocks of the others are real
            answers = {}
            for name, mode in fixture_server.MODES.items():  # the deadline is for those that are about time, on a busy machine too
                pool, deadline = (waiting, self.DEADLINE) if mode.group == 'time' else (working, 60.0)
                answers[name] = [pool.submit(one, name, url, deadline) for url in urls]
            done = {name: [f.result() for f in each] for name, each in answers.items()}
        for name, each in done.items():
            mode = fixture_server.MODES[name]
            for record, again, seconds in each:
                with self.subTest(name):
                    check_record(self, record)
                    if again:
                        self.assert_same(record, again)
                    self.assertEqual(record['outcome'], mode.expect, record['error'])
                    if mode.text is not None:
                        self.assertEqual(record['text'], mode.text)
                    self.assertTrue(record['synthetic'] or FAILURES[record['outcome']].boundary == 'head' or record['outcome'] == 'idle_timeout'
                                    or name.startswith('drip-'))
                    if mode.group == 'time':
                        self.assertLess(seconds, self.DEADLINE + self.MARGIN)
                    self.assertNotIn('0123456789', json.dumps(record))
                    if not name.startswith(('endless-', 'drip-')):  # where those end is a matter of time
                        self.assertEqual(invariant(record), invariant(each[0][0]))

    def assert_same(self, live: dict[str, Any], again: dict[str, Any]) -> None:
        """A capture judged offline says what the live run said."""
        check_record(self, again)
        told: list[dict[str, Any]] = [{**r, **{f'delivery.{k}': v for k, v in r['delivery'].items() if k not in ('body_sha256', 'buffered', 'longest_gap_ms')},
                 'response': {**r['response'], **dict.fromkeys(('http_version', 'interim', 'peer', 'body_excerpt', 'id_carries_run_id'))},
                 'failure': r['failure'] and (r['failure']['code'], r['failure']['boundary'], r['failure']['event'])} for r in (live, again)]
        times = [[*(r['marks_ms'][k] for k in ('head', 'first_byte', 'first_event', 'first_text', 'last_text', 'finish', 'done')),
                  *r['event_gaps_ms']] for r in (live, again)]
        for one, other in zip(*times, strict=True):
            self.assertTrue(one is other is None or abs(one - other) < 0.01, times)  # a read's time counts from the head there
        for left in ('request', 'delivery', 'input', 'client', 'duration_ms', 'first_text_ms', 'event_gaps_ms', 'marks_ms'):
            for r in told:
                r.pop(left)
        if live['response']['status'] is None:  # no head, so the capture tells nothing but the end
            for r in told:
                r.pop('synthetic')
        live_told, again_told = (json.loads(re.sub(r'\*{9,}', '[key]', json.dumps(r))) for r in told)
        self.assertEqual(live_told, again_told)

    def test_the_catalogue_is_in_order(self) -> None:
        seen: dict[tuple[Any, ...], str] = {}
        for name, mode in fixture_server.MODES.items():
            with self.subTest(name):
                self.assertRegex(name, '^[a-z0-9-]+$')
                self.assertIn(mode.expect, ('passed', *FAILURES))
                self.assertTrue(mode.sends and mode.source)
                steps = tuple(step for step, _ in zip(mode.steps(fixture_server.Request(b'i', b'm', KEY)), range(30), strict=False))
                self.assertTrue(steps not in seen, f'sends the same as {seen.get(steps)}')
                seen[steps] = name
        self.assertGreaterEqual(len(seen), 90)


# --- every failure code -------------------------------------------------------------------------------------------------


# Throw-away certificates, valid until 2126 (one until 2021), and the key of the three that are no CA.
CA = '''\
-----BEGIN CERTIFICATE-----
MIIBpzCCAU2gAwIBAgIURG16BYQ49DpnHpfUgr43Y/9u5q4wCgYIKoZIzj0EAwIw
IDEeMBwGA1UEAwwVc3RyZWFtLWNsaWVudCB0ZXN0IENBMCAXDTIwMDEwMTAwMDAw
MFoYDzIxMjYwMTAxMDAwMDAwWjAgMR4wHAYDVQQDDBVzdHJlYW0tY2xpZW50IHRl
c3QgQ0EwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAASW3miPvSi8Ypo63aZg6d8o
xhijSQkVyMrHDNuVUp2Bh+Unkl/fWIvWCEWb8VvWAqM9tQYu1eAWQLn0VrPDgvtp
o2MwYTAPBgNVHRMBAf8EBTADAQH/MA4GA1UdDwEB/wQEAwIBBjAdBgNVHQ4EFgQU
j6DK4oYTcF6ysiDOPw90kBOJaT0wHwYDVR0jBBgwFoAUj6DK4oYTcF6ysiDOPw90
kBOJaT0wCgYIKoZIzj0EAwIDSAAwRQIgfJml1L7CUCegt5k9belShD/e5XmOMl8b
U/8FCKSQt3ACIQCdaP4djQ2Eh6tVmVEyhDUPs4y6VygVjsKq8nG7dBQXRw==
-----END CERTIFICATE-----
'''
GOOD = '''\
-----BEGIN CERTIFICATE-----
MIIByzCCAXGgAwIBAgIUWn4Lz60B6GAwJ2MgDzLuNg+SnVMwCgYIKoZIzj0EAwIw
IDEeMBwGA1UEAwwVc3RyZWFtLWNsaWVudCB0ZXN0IENBMCAXDTIwMDEwMTAwMDAw
MFoYDzIxMjYwMTAxMDAwMDAwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcq
hkjOPQIBBggqhkjOPQMBBwNCAAQg8NTC43u8dhjcKx6lk6VtWaXB7ySL/UMpCjHM
7tLnF47iWAZybC9nE1vUdvyPdi5Ah9QRD6jziFMDa30Km3tAo4GSMIGPMAwGA1Ud
EwEB/wQCMAAwDgYDVR0PAQH/BAQDAgeAMB0GA1UdDgQWBBTKT/A+HhAWPeLQwd78
O4f0zEx5bzAfBgNVHSMEGDAWgBSPoMrihhNwXrKyIM4/D3SQE4lpPTAaBgNVHREE
EzARgglsb2NhbGhvc3SHBH8AAAEwEwYDVR0lBAwwCgYIKwYBBQUHAwEwCgYIKoZI
zj0EAwIDSAAwRQIhAKP7y20FhkSROHhsUJrYHvWDcExYRS9otcmfMNOUInXRAiAS
EsMpAk855HXIh7YCF5+YYTba91n2JfQA/8tgqUoVoA==
-----END CERTIFICATE-----
'''
EXPIRED = '''\
-----BEGIN CERTIFICATE-----
MIIByjCCAW+gAwIBAgIUEPTTZJ1K3314SZKU25zMWojyTw0wCgYIKoZIzj0EAwIw
IDEeMBwGA1UEAwwVc3RyZWFtLWNsaWVudCB0ZXN0IENBMB4XDTIwMDEwMTAwMDAw
MFoXDTIxMDEwMTAwMDAwMFowFDESMBAGA1UEAwwJbG9jYWxob3N0MFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAEIPDUwuN7vHYY3CsepZOlbVmlwe8ki/1DKQoxzO7S
5xeO4lgGcmwvZxNb1Hb8j3YuQIfUEQ+o84hTA2t9Cpt7QKOBkjCBjzAMBgNVHRMB
Af8EAjAAMA4GA1UdDwEB/wQEAwIHgDAdBgNVHQ4EFgQUyk/wPh4QFj3i0MHe/DuH
9MxMeW8wHwYDVR0jBBgwFoAUj6DK4oYTcF6ysiDOPw90kBOJaT0wGgYDVR0RBBMw
EYIJbG9jYWxob3N0hwR/AAABMBMGA1UdJQQMMAoGCCsGAQUFBwMBMAoGCCqGSM49
BAMCA0kAMEYCIQCS9+uPUqD6UxX2UIwcty0iKYxpLfSuulryCbhCJ7ZXMwIhAJzU
aBQTudE0IevSlp/qWYpevJm6HIPNG4IXkBM3wVI5
-----END CERTIFICATE-----
'''
OTHER_NAME = '''\
-----BEGIN CERTIFICATE-----
MIIB1TCCAXugAwIBAgIUBLEarcPimacdkn+E67WL21jRwXwwCgYIKoZIzj0EAwIw
IDEeMBwGA1UEAwwVc3RyZWFtLWNsaWVudCB0ZXN0IENBMCAXDTIwMDEwMTAwMDAw
MFoYDzIxMjYwMTAxMDAwMDAwWjAcMRowGAYDVQQDDBFncHUtaG9zdC5pbnRlcm5h
bDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABCDw1MLje7x2GNwrHqWTpW1ZpcHv
JIv9QykKMczu0ucXjuJYBnJsL2cTW9R2/I92LkCH1BEPqPOIUwNrfQqbe0CjgZQw
gZEwDAYDVR0TAQH/BAIwADAOBgNVHQ8BAf8EBAMCB4AwHQYDVR0OBBYEFMpP8D4e
EBY94tDB3vw7h/TMTHlvMB8GA1UdIwQYMBaAFI+gyuKGE3BesrIgzj8PdJATiWk9
MBwGA1UdEQQVMBOCEWdwdS1ob3N0LmludGVybmFsMBMGA1UdJQQMMAoGCCsGAQUF
BwMBMAoGCCqGSM49BAMCA0gAMEUCIQCYwNXh7DWHoId0THiPDIZF1F3t9G2b0edO
ePtYCt4F3AIgdxrE6ksAXBQ0LIfTYz2hAJTnkShfUB2jmrUtfJRwb8k=
-----END CERTIFICATE-----
'''
CERTIFICATE_KEY = '''\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgQzee3ZNtr5yX6eIM
vZIkRK4mN3gaN9tQGKXHxFRFuFGhRANCAAQg8NTC43u8dhjcKx6lk6VtWaXB7ySL
/UMpCjHM7tLnF47iWAZybC9nE1vUdvyPdi5Ah9QRD6jziFMDa30Km3tA
-----END PRIVATE KEY-----
'''


class FailureCodeTest(unittest.TestCase):
    """Each code, through bytes on a real socket and the command: code, boundary and exit status."""

    directory: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.directory = temporary.name
        for name, text in (('ca', CA), ('good', GOOD + CERTIFICATE_KEY), ('expired', EXPIRED + CERTIFICATE_KEY),
                           ('other', OTHER_NAME + CERTIFICATE_KEY)):
            Path(cls.directory, name).write_text(text)

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def outcome(self, done: subprocess.CompletedProcess[str]) -> tuple[str, str, int]:
        """Code, boundary and exit status, from the record on stdout."""
        self.assertNotIn('Traceback', done.stderr)
        record = json.loads(done.stdout)
        check_record(self, record)
        return record['outcome'], record['failure']['boundary'], done.returncode

    def special(self) -> dict[str, Callable[[], subprocess.CompletedProcess[str]]]:
        """The codes that no mode of the fixture produces, each with the command that does."""
        ask = ('--model', 'm', '--output', '-', '--idle', '3', '--deadline', '8')
        https = 'https://127.0.0.1:{}/v1/chat/completions'

        def tls(certificate: str, *more: str) -> subprocess.CompletedProcess[str]:
            with fixture(certificate=self.path(certificate)) as url:
                return run('--url', url, *ask, *more)

        def refused() -> subprocess.CompletedProcess[str]:
            with socket.create_server(('127.0.0.1', 0)) as listener:
                port = listener.getsockname()[1]
            return run('--url', f'http://127.0.0.1:{port}/x', *ask)

        def resolving(answer: str) -> Callable[[], subprocess.CompletedProcess[str]]:
            return lambda: patched(f'def look_up(*a, **k):\n {answer}\nsocket.getaddrinfo = look_up', '--url', 'http://localhost:9/x', *ask)

        def plain_on_tls() -> subprocess.CompletedProcess[str]:
            with Raw(sending(b'HTTP/1.1 400 Bad\r\n\r\n'), read=False) as server:
                return run('--url', https.format(server.port), *ask)

        def send_broken() -> subprocess.CompletedProcess[str]:
            def script(connection: socket.socket) -> None:
                time.sleep(0.3)
                resetting(connection)

            Path(self.path('long')).write_text(json.dumps([{'role': 'user', 'content': 'x' * 600_000}]))
            with Raw(script, read=False, buffer=4096) as server:
                return run('--url', server.url, *ask, '--messages-file', self.path('long'))

        def in_fixture(mode: str, *more: str) -> Callable[[], subprocess.CompletedProcess[str]]:
            return lambda: run('--fixture', mode, '--output', '-', *more)

        return {
            'resolve_failed': resolving('raise socket.gaierror(-2, "Name or service not known")'),
            'not_loopback': resolving('return [(socket.AF_INET, 1, 6, "", ("192.0.2.1", 9))]'),
            'connect_refused': refused,
            'connect_failed': resolving('return [(socket.AF_INET, 1, 132, "", ("127.0.0.1", 9))]'),  # SCTP: no socket for it
            'tunnel_failed': lambda: run('--url', 'http://127.0.0.1:9/x', *ask, '--ssh', 'denied', env=stand_in_ssh(self.directory)),
            'tls_untrusted': lambda: tls('good'),
            'tls_expired': lambda: tls('expired', '--ca-file', self.path('ca')),
            'tls_name': lambda: tls('other', '--ca-file', self.path('ca')),
            'tls_failed': plain_on_tls,
            'send_failed': send_broken,
            'first_text_timeout': in_fixture('stall-before-event', '--first-text', '0.5'),
            'stall_timeout': in_fixture('endless-comments', '--stall', '0.5'),
            'warning_refused': in_fixture('model-differs', '--fail-on', 'model_differs'),
            'internal': lambda: patched('def take(*a): raise ZeroDivisionError\nstream_client.ChatCompletion.take = take',
                                        '--fixture', 'ok', '--output', '-'),
            'body_too_large': in_fixture('flood', '--max-stream-bytes', '2000000'),
            'interrupted': lambda: self.ended(signal.SIGTERM),
            'unfinished': lambda: self.ended(signal.SIGKILL),
        }

    def ended(self, number: int) -> subprocess.CompletedProcess[str]:
        """A run ended by a signal in mid-stream, with the record that it left as its output."""
        output = self.path(f'ended-{number}.json')
        with fixture('stall-after-text') as url:
            process = subprocess.Popen([sys.executable, CLIENT, '--url', url, '--model', 'm', '--output', output, '--show-text'],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
            assert process.stderr
            shown = b''
            while '✓'.encode() not in shown:
                shown += os.read(process.stderr.fileno(), 100)
            process.send_signal(number)
            process.communicate(timeout=30)
        return subprocess.CompletedProcess([], process.returncode, Path(output).read_text(), '')

    def test_every_code_is_produced(self) -> None:
        special, first = self.special(), dict[str, str]()
        for name, mode in fixture_server.MODES.items():
            first.setdefault(mode.expect, name)
        codes = [code for code in FAILURES if code in special or code in first]
        self.assertEqual(codes, list(FAILURES))  # the set produced is the set declared
        statuses = {'interrupted': 128 + signal.SIGTERM, 'unfinished': -signal.SIGKILL}

        def produce(code: str) -> subprocess.CompletedProcess[str]:
            if code in special:
                return special[code]()
            return run('--fixture', first[code], '--output', '-', '--idle', '1.5', '--deadline', '2.5')

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for code, done in zip(FAILURES, pool.map(produce, FAILURES), strict=True):
                with self.subTest(code):
                    got = self.outcome(done)
                    boundary = FAILURES[code].boundary or got[1]
                    self.assertEqual(got, (code, boundary, statuses.get(code, 1)), done.stdout)

    def test_good_tls_through_connect_to(self) -> None:
        for name in ('localhost', 'localhost.'):  # an absolute name is certified without its dot
            with fixture(certificate=self.path('good')) as url:
                port = url.split(':')[2].split('/')[0]
                done = run('--url', f'https://{name}:4/{url.split("/", 3)[3]}', '--connect-to', f'127.0.0.1:{port}', '--ca-file', self.path('ca'),
                           '--model', 'm', '--output', '-', env={'SSLKEYLOGFILE': self.path('keys')})
            record = json.loads(done.stdout)
            self.assertTrue(record['ok'], record['error'])
            self.assertEqual((record['request']['path_taken'], record['response']['peer']), ('connect-to', f'127.0.0.1:{port}'))
            self.assertEqual((record['response']['tls_version'][:5], record['response']['certificate_expires']), ('TLSv1', '2126-01-01T00:00:00Z'))
            self.assertEqual(len(record['response']['certificate_sha256']), 64)
            self.assertFalse(os.path.exists(self.path('keys')))

    def test_tls_cut_short_is_no_clean_end(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path('good'))
        for whole, outcome in ((data(TEXT, STOP, DONE), 'passed'), (data(TEXT, STOP), 'body_cut')):

            def script(connection: socket.socket, whole: bytes = whole) -> None:
                with context.wrap_socket(connection, server_side=True) as secured:
                    read_request(secured)
                    secured.sendall(HEAD + whole)
                    secured.shutdown(socket.SHUT_WR)  # without close_notify

            with Raw(script, read=False) as server:
                record = stream(server.url.replace('http:', 'https:'), 'm', 'p', ca_file=self.path('ca'))
            self.assertEqual(record['outcome'], outcome, record['error'])
            self.assertEqual([w['code'] for w in record['warnings']], ['unclean_end', 'no_usage'] if record['ok'] else [])

    def test_what_is_no_tls_record_after_the_handshake(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path('good'))
        for before in (b'', HEAD + data(TEXT)):

            def script(connection: socket.socket, before: bytes = before) -> None:
                with context.wrap_socket(connection, server_side=True) as secured, socket.socket(fileno=os.dup(secured.fileno())) as under:
                    read_request(secured)
                    secured.sendall(before)
                    under.sendall(b'HTTP/1.1 400 Bad Request\r\n\r\n')
                    time.sleep(0.5)

            with Raw(script, read=False) as server:
                record = stream(server.url.replace('http:', 'https:'), 'm', 'p', ca_file=self.path('ca'))
            self.assertEqual((record['outcome'], record['failure']['boundary']), ('tls_failed', 'tls'), record['error'])

    def test_old_tls_is_refused(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path('good'))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # that it is old is the point
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with Raw(lambda c: context.wrap_socket(c, server_side=True).close(), read=False) as server:
            record = stream(server.url.replace('http:', 'https:'), 'm', 'p', ca_file=self.path('ca'))
        self.assertEqual(record['outcome'], 'tls_failed')


# --- deadlines ----------------------------------------------------------------------------------------------------------


def dripping(*steps: bytes | float, drip: bytes, every: float = 0.1) -> Callable[[socket.socket], None]:
    """A script that sends the steps and then one more byte again and again."""

    def script(connection: socket.socket) -> None:
        for step in steps:
            connection.sendall(step) if isinstance(step, bytes) else time.sleep(step)
        while True:
            for at in range(len(drip)):
                connection.sendall(drip[at : at + 1])
                time.sleep(every)

    return script


STAND_IN = r"""#!{python}
import json, os, select, signal, socket, subprocess, sys, time
words = sys.argv[1:]
host, out = words[-1], sys.stdout.buffer
def end(*said):
    print(*said, sep='\r\n', file=sys.stderr)
    os._exit(255)
with open(os.environ.get('SPY', os.devnull), 'w') as spy:
    print(json.dumps([os.getpid(), words, dict(os.environ)]), file=spy)
if host == 'denied':
    end('Warning: Permanently added', '@@@@', 'first', 'second', '', 'Permission denied (publickey).\x1b[2J')
if host == 'mute':
    os._exit(255)
if host == 'early':
    os._exit(0)
if host == 'telling':  # the key, across what one read takes
    key = bytes.fromhex(os.environ['TELL'])
    os.write(2, b'x\n' * 2040 + b' ' * 10 + key + b'\n')
    time.sleep(0.1)
    os.write(2, b' ' * 900 + key + b'\n')
    os._exit(255)
if host == 'signalling':  # at the moment it is told to end, and then it does not end
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGTERM))
if host == 'leaving':
    subprocess.Popen(['sh', '-c', 'trap "" TERM; exec 0<&- 1>&- 2>&-; sleep 60'])
    os._exit(255)
if host == 'stubborn':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(['sleep', '60'])
    time.sleep(60)
if host == 'late':
    time.sleep(0.6)
name, port = words[words.index('-W') + 1].rsplit(':', 1)
far = socket.create_connection((name.strip('[]'), int(port)))
due, ends = 600 if host == 'cut' else 10**9, [0, far]
while ends:
    for ready in select.select(ends, [], [])[0]:
        data = os.read(0, 65536) if ready == 0 else far.recv(min(due, 65536))
        if not data:
            ends.remove(ready)
            if ready == 0:
                os._exit(0)
            os.close(1)
        elif ready == 0:
            far.sendall(data)
        else:
            os.write(1, data)
            due -= len(data)
            if not due:
                end('client_loop: send disconnect: Broken pipe')
"""


def stand_in_ssh(directory: str) -> dict[str, str]:
    """An environment in which ``ssh`` is a program that behaves as its destination says, with the ends of the real one."""
    path = Path(directory, 'bin', 'ssh')
    if not path.exists():
        path.parent.mkdir()
        path.write_text(STAND_IN.replace('{python}', sys.executable))
        path.chmod(0o755)
    return {'PATH': f'{path.parent}:{os.environ["PATH"]}'}


class TunnelTest(unittest.TestCase):
    """``--ssh`` with a stand-in for ssh; test_interop.py has the real one."""

    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.spy = os.path.join(temporary.name, 'spy')
        self.env = {**stand_in_ssh(temporary.name), 'SPY': self.spy}

    def ask(self, url: str, destination: str, **options: Any) -> dict[str, Any]:
        with unittest.mock.patch.dict(os.environ, self.env):
            record = stream(url, 'm', 'p', ssh=destination, **options)
        check_record(self, record)
        self.assertEqual((record['request']['path_taken'], record['request']['ssh']), ('ssh', destination))
        return record

    def ended(self) -> None:
        """No process of the stand-in is left."""
        group = json.loads(Path(self.spy).read_text())[0]
        for _ in range(100):
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            states = []  # of its processes: zombies that nobody has waited for are none
            for path in Path('/proc').glob('[0-9]*/stat'):
                with contextlib.suppress(OSError):
                    state, _, its_group, *_ = path.read_text().rpartition(')')[2].split()
                    states += [state] if its_group == str(group) else []
            if Path('/proc/self').exists() and not set(states) - {'Z', 'X'}:
                return
            time.sleep(0.02)
        self.fail('a process is left')

    def test_every_framing_comes_to_the_same_verdict(self) -> None:
        for mode in ('ok', 'until-close', 'content-length', 'done-kept-open', 'cut-in-chunk', 'close-midway', 'malformed', 'http-error', 'closed-at-once'):
            with self.subTest(mode), fixture(mode) as url:
                record = self.ask(url, 'relay')
                self.assertEqual((record['outcome'], record['text']), (fixture_server.MODES[mode].expect, fixture_server.MODES[mode].text))
                self.ended()

    def test_the_command(self) -> None:
        with fixture() as url:
            self.assertTrue(self.ask(url, 'me@relay:2222', ssh_option=['User=you', 'Port 22'], token=KEY)['ok'])
        self.assertEqual(json.loads(Path(self.spy).read_text())[1], [
            '-W', url.split('/')[2], '-p', '2222', '-l', 'me', '-o', 'batchmode=yes', '-o', 'controlmaster=no', '-o', 'controlpath=none',
            '-o', 'loglevel=INFO', '-o', 'permitlocalcommand=no', '-o', 'User=you', '-o', 'Port 22', '--', 'relay'])

    def test_the_child_never_sees_the_key(self) -> None:
        self.env |= {'MODEL_API_KEY': 'x', 'OTHER': f'Bearer {KEY}', 'HARMLESS': 'yes'}
        with fixture() as url:
            self.assertTrue(self.ask(url, 'relay', token=KEY)['ok'])
        words, seen = json.loads(Path(self.spy).read_text())[1:]
        self.assertFalse([text for text in (*words, *seen.values()) if KEY in text])
        self.assertNotIn('MODEL_API_KEY', seen)
        self.assertEqual(seen['HARMLESS'], 'yes')

    def test_a_child_that_fails_is_quoted(self) -> None:
        for destination, error in (('denied', 'first; second; Permission denied (publickey).\\x1b[2J; 0 bytes of the answer had arrived'),
                                   ('mute', 'ssh ended and said nothing: status 255; 0 bytes of the answer had arrived'),
                                   ('early', 'ssh ended and said nothing: status 0; 0 bytes of the answer had arrived')):
            with fixture() as url:
                record = self.ask(url, destination)
            self.assertEqual((record['outcome'], record['error'], record['marks_ms']['connected']), ('tunnel_failed', error, None))
            self.assertEqual(record['failure']['boundary'], 'tunnel')

    def test_the_key_is_masked_in_what_ssh_says_however_it_is_read(self) -> None:
        for key in (KEY, 'KEY' + 'k3Y' * 400):
            self.env['TELL'] = key.encode().hex()
            with fixture() as url:
                record = self.ask(url, 'telling', token=key)
            self.assertEqual(record['outcome'], 'tunnel_failed')
            self.assertNotIn(key[:9], json.dumps(record))
            self.assertIn('[key]', record['error'])

    def test_a_tunnel_cut_in_mid_stream_keeps_the_text(self) -> None:
        with fixture('steady-text') as url:
            record = self.ask(url, 'cut')
        self.assertEqual((record['outcome'], record['error'].split(';')[0]), ('tunnel_failed', 'client_loop: send disconnect: Broken pipe'))
        with fixture('until-close') as url:
            record = self.ask(url, 'cut')
        self.assertEqual((record['outcome'], record['text']), ('tunnel_failed', 'READY '))

    def test_a_request_longer_than_every_buffer(self) -> None:
        for destination, outcome in (('relay', 'http_status'), ('denied', 'tunnel_failed')):  # the fixture takes 64 KiB
            with fixture() as url, unittest.mock.patch.dict(os.environ, self.env):
                record = stream(url, 'm', 'word ' * 200_000, ssh=destination)
            self.assertEqual(record['outcome'], outcome, record['error'])

    def test_tls_through_it(self) -> None:
        Path(self.spy + '.ca').write_text(CA)
        Path(self.spy + '.pem').write_text(GOOD + CERTIFICATE_KEY)
        with fixture(certificate=self.spy + '.pem') as url:
            record = self.ask(url.replace('127.0.0.1', 'localhost'), 'late', ca_file=self.spy + '.ca')
        self.assertEqual(record['outcome'], 'passed', record['error'])
        self.assertGreater(record['marks_ms']['connected'], 550)
        self.assertGreater(record['marks_ms']['secured'], record['marks_ms']['connected'])
        with fixture() as url:
            record = self.ask(url.replace('http', 'https'), 'denied', ca_file=self.spy + '.ca')
        self.assertEqual(record['outcome'], 'tunnel_failed', record['error'])

    def test_clocks_cover_it_and_its_processes_end(self) -> None:
        for options, outcome in (({'idle': 1.0}, 'idle_timeout'), ({'deadline': 1.0}, 'deadline')):
            with fixture() as url:
                started = time.monotonic()
                record = self.ask(url, 'stubborn', **options)
                self.assertLess(time.monotonic() - started, 3)
            self.assertEqual((record['outcome'], record['failure']['boundary']), (outcome, 'tunnel'))
            self.assertIn('while opening the SSH tunnel', record['error'])
            self.ended()

    def test_what_a_dead_child_has_left_is_ended_too(self) -> None:
        with fixture() as url:
            self.assertEqual(self.ask(url, 'leaving')['outcome'], 'tunnel_failed')
        self.ended()

    def test_another_thread_may_close_it(self) -> None:
        for destination in ('relay', 'stubborn'):
            with fixture('stall-after-text') as url, unittest.mock.patch.dict(os.environ, self.env):
                answer = ChatStream(url, 'm', 'p', ssh=destination)
                timer = threading.Timer(0.7, answer.close)
                timer.start()
                list(answer)
                timer.join()
            self.assertEqual(answer.record['outcome'], 'interrupted', answer.record['error'])
            self.ended()

    def test_leaving_early_ends_it(self) -> None:
        with fixture('steady-text') as url, unittest.mock.patch.dict(os.environ, self.env), ChatStream(url, 'm', 'p', ssh='relay') as answer:
            next(iter(answer))
        self.assertEqual(answer.record['outcome'], 'interrupted')
        self.ended()

    def test_a_signal_ends_it(self) -> None:
        for destination in ('relay', 'stubborn', 'signalling'):
            with fixture('stall-after-text') as url:
                process = subprocess.Popen([sys.executable, CLIENT, '--url', url, '--model', 'm', '--output', '-', '--ssh', destination],
                                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(**self.env))
                Path(self.spy).unlink(missing_ok=True)
                for _ in range(200):
                    if os.path.exists(self.spy) and Path(self.spy).read_text().endswith('\n'):
                        break
                    time.sleep(0.02)
                process.send_signal(signal.SIGTERM)
                record = json.loads(process.communicate(timeout=30)[0])
            self.assertEqual((process.returncode, record['outcome']), (128 + signal.SIGTERM, 'interrupted'))
            self.ended()

    def test_what_is_refused(self) -> None:
        for options in ({'ssh': '-oProxyCommand=x'}, {'ssh': ''}, {'ssh': 'a b'}, {'ssh': '-l@host'}, {'ssh': 'host:0'}, {'ssh': 'host:99999'},
                        {'ssh': 'host:'}, {'ssh': '::1'}, {'ssh': 'a@b@c'}, {'ssh': 'host\n'}, {'ssh': 7}, {'ssh': 'host', 'ssh_option': 'A=1'},
                        {'ssh': 'host', 'ssh_option': ['A']}, {'ssh': 'host', 'ssh_option': ['-A=1']}, {'ssh': 'host', 'ssh_option': ['A=1\nB=2']},
                        {'ssh': 'host', 'ssh_option': ['forkAfterAuthentication yes']}, {'ssh': 'host', 'ssh_option': ['LogLevel=QUIET']}, {'ssh_option': ['A=1']}):
            with self.subTest(options), unittest.mock.patch.dict(os.environ, self.env), self.assertRaises(Refused):
                ChatStream('http://127.0.0.1:9/x', 'm', 'p', **options)
        with unittest.mock.patch.dict(os.environ, {'PATH': self.spy}), self.assertRaisesRegex(Refused, 'there is none'):
            ChatStream('http://127.0.0.1:9/x', 'm', 'p', ssh='host')
        for destination in ('host', 'me@host', 'me@host:22', '[::1]:22', '127.0.0.1', 'alias_of_mine'):
            with unittest.mock.patch.dict(os.environ, self.env):
                ChatStream('http://127.0.0.1:9/x', 'm', 'p', ssh=destination)


class DeadlineTest(unittest.TestCase):
    """The deadline holds in every phase, and the clock that ran out is named with the boundary it was reached at."""

    HEAD = b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n'
    overshoots: ClassVar[list[tuple[str, float]]] = []
    CHUNKED = HEAD + b'Transfer-Encoding: chunked\r\n\r\n'

    def check(self, url: str, outcome: str, boundary: str, limit: float, **options: Any) -> dict[str, Any]:
        with ChatStream(url, 'm', options.pop('prompt', 'p'), **options) as run:  # with TLS, the trust store is loaded here
            start = time.monotonic()
            for _ in run:
                pass
            seconds = time.monotonic() - start
        record = run.record
        self.assertEqual((record['outcome'], record['failure']['boundary']), (outcome, boundary), record['error'])
        self.assertGreater(seconds, limit * 0.95)
        self.assertLess(seconds, limit + 1.0)
        self.overshoots.append((f'{outcome} at {boundary}: {record["error"].split(";")[0]}', seconds - limit))
        return record

    def test_phases(self) -> None:
        long = [{'role': 'user', 'content': 'x' * 600_000}]
        stuck = threading.Event()
        self.addCleanup(stuck.set)

        def waiting(_: socket.socket) -> None:
            stuck.wait(20)

        cases: list[tuple[Callable[[socket.socket], None], bool, str, str, dict[str, Any]]] = [
            (dripping(drip=b'HTTP/1.1 200 ' + b'K' * 90), True, 'deadline', 'head', {}),
            (dripping(self.HEAD, drip=b'X: ' + b'y' * 90), True, 'deadline', 'head', {}),
            (dripping(drip=b'HTTP/1.1 100 Continue\r\n\r\n', every=0.02), True, 'deadline', 'head', {}),
            (dripping(self.CHUNKED, drip=b'5;' + b'x' * 90), True, 'deadline', 'framing', {}),
            (dripping(self.CHUNKED + b'3\r\n:\n\n\r\n', drip=b'3\r\n:\n\n\r\n'), True, 'deadline', 'events', {}),
            (dripping(self.HEAD + b'\r\n' + data(TEXT), drip=b':\n'), True, 'deadline', 'protocol', {}),
            (dripping(self.HEAD + b'\r\n' + data(TEXT, STOP), drip=b':\n'), True, 'deadline', 'completion', {}),
            (dripping(self.CHUNKED + b'0\r\n', drip=b'X: y\r\n'), True, 'deadline', 'framing', {}),
            (waiting, False, 'deadline', 'send', {'prompt': None, 'messages': long}),
            (waiting, True, 'idle_timeout', 'head', {'idle': 1, 'deadline': 9}),
            (dripping(drip=b'\x16\x03\x03\x40\x00' + b'\0' * 90), False, 'deadline', 'tls', {'tls': True}),
            (waiting, False, 'deadline', 'tls', {'tls': True}),
            (waiting, False, 'idle_timeout', 'tls', {'tls': True, 'idle': 1, 'deadline': 9}),
            (sending(self.CHUNKED, 0.9, b'1\r\n:', 0.9, b'\r\n', 20.0), True, 'idle_timeout', 'events', {'idle': 1.2, 'deadline': 9, 'limit': 3.0}),
        ]

        def one(case: tuple[Callable[[socket.socket], None], bool, str, str, dict[str, Any]]) -> None:
            script, read, outcome, boundary, options = case
            options = {'idle': 5, 'deadline': 1, **options}
            limit = options.pop('limit', min(options['idle'], options['deadline']))
            with Raw(script, read, buffer=4096) as server:
                url = server.url.replace('http:', 'https:') if options.pop('tls', False) else server.url
                self.check(url, outcome, boundary, limit, **options)

        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            for case, future in [(c, pool.submit(one, c)) for c in cases]:
                with self.subTest(outcome=case[2], boundary=case[3]):
                    future.result()

    def test_a_stuck_resolver_is_abandoned_and_cannot_hold_the_process(self) -> None:
        for clock, code in ((('--idle', '5', '--deadline', '1'), 'deadline'), (('--idle', '1', '--deadline', '5'), 'idle_timeout')):
            start = time.monotonic()
            done = patched('import time; socket.getaddrinfo = lambda *a, **k: time.sleep(30)', '--url', 'http://localhost:9/x', '--model', 'm',
                           '--output', '-', *clock)
            self.assertLess(time.monotonic() - start, 5)
            record = json.loads(done.stdout)
            self.assertEqual((done.returncode, record['outcome'], record['failure']['boundary']), (1, code, 'resolve'))

    @unittest.skipUnless(sys.platform == 'linux', 'a full backlog answers no SYN on Linux')
    def test_several_dead_addresses_share_the_deadline(self) -> None:
        """Listeners whose backlog is full answer no SYN: each address gets its share, and a live last one is reached."""
        with contextlib.ExitStack() as stack:
            dead = []
            for _ in range(3):
                listener = stack.enter_context(socket.socket())
                listener.bind(('127.0.0.1', 0))
                listener.listen(0)
                dead.append(listener.getsockname()[1])
                for _ in range(4):
                    filler = stack.enter_context(socket.socket())
                    filler.setblocking(False)
                    filler.connect_ex(listener.getsockname())
            with fixture() as url:
                live = parse_url(url).port
                rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, '', ('127.0.0.1', port)) for port in (*dead, live)]
                with unittest.mock.patch('socket.getaddrinfo', return_value=rows):
                    record = stream('http://localhost:1/v1/chat/completions', 'm', 'p', idle=5, deadline=2.4)
                self.assertTrue(record['ok'], record['error'])
                self.assertEqual(record['response']['peer'], f'127.0.0.1:{live}')
                with unittest.mock.patch('socket.getaddrinfo', return_value=rows[:3]):
                    self.check('http://localhost:1/x', 'deadline', 'connect', 1, idle=5, deadline=1)

    def test_a_slow_but_steady_upload_is_not_idle(self) -> None:
        def script(connection: socket.socket) -> None:
            size = 0
            while size < 100_000:
                size += len(connection.recv(60_000))
                time.sleep(0.1)
            sending(b'HTTP/1.1 204 No\r\n\r\n')(connection)

        with Raw(script, read=False, buffer=4096) as server:
            record = stream(server.url, 'm', 'x' * 110_000, idle=1.5, deadline=30)
        self.assertEqual(record['outcome'], 'http_status', record['error'])
        self.assertGreater(record['duration_ms'], 1500)

    def test_an_answer_before_the_request_is_whole_is_read(self) -> None:
        """Whatever comes while nobody reads the request: a final answer ends the sending, an interim one does not, however it is cut."""
        long = [{'role': 'user', 'content': 'x' * 600_000}]
        refusal = b'HTTP/1.1 413 Content Too Large\r\nContent-Length: 4\r\n\r\nlong'
        interim = b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n'
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as here:
            (Path(here) / 'good').write_text(GOOD + CERTIFICATE_KEY)
            (Path(here) / 'ca').write_text(CA)
            context.load_cert_chain(Path(here) / 'good')

            def server(pieces: Sequence[bytes], then_read: bool, secured: bool) -> Callable[[socket.socket], None]:
                def script(plain: socket.socket) -> None:
                    with context.wrap_socket(plain, server_side=True) if secured else plain as connection:
                        for piece in pieces:
                            connection.sendall(piece)
                            time.sleep(0.3)
                        if then_read:
                            read_request(connection)
                            connection.sendall(b'HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n')
                        time.sleep(1)

                return script

            rows: list[tuple[list[bytes], bool, int]] = [
                ([refusal], False, 413), ([interim], True, 401), ([b'HTTP/1.', interim[7:]], True, 401), ([interim[:30], interim[30:]], True, 401),
                ([interim + refusal], False, 413), ([interim, refusal[:9], refusal[9:]], False, 413)]

            def one(row: tuple[list[bytes], bool, int], secured: bool) -> tuple[Any, ...]:
                with Raw(server(row[0], row[1], secured), read=False, buffer=4096) as raw:
                    url = raw.url.replace('http:', 'https:') if secured else raw.url
                    record = stream(url, 'm', None, messages=long, idle=3, deadline=20, ca_file=f'{here}/ca' if secured else None)
                return row, secured, record['outcome'], record['response']['status']

            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                for row, secured, outcome, status in pool.map(one, rows * 2, [False] * len(rows) + [True] * len(rows)):
                    with self.subTest(row=row, secured=secured):
                        self.assertEqual((outcome, status), ('http_status', row[2]))
        whole = HEAD + data(TEXT, STOP, DONE)
        with Raw(server([whole, b'', b'', b''], False, False), read=False, buffer=4096) as raw:
            self.assertEqual(stream(raw.url, 'm', None, messages=long, idle=3, deadline=8)['outcome'], 'send_failed')
        with fixture() as url:
            self.assertIn('413', stream(url, 'm', 'x' * 1_000_000)['error'])

    def test_a_finished_body_is_not_waited_on(self) -> None:
        for mode, limit in (('kept-open', 1.0), ('done-kept-open', 1.3), ('drip-after-done', 1.3), ('http-401-stalled', 1.6)):
            with fixture() as url:
                start = time.monotonic()
                stream(url, f'mode:{mode}', 'p')
                self.assertLess(time.monotonic() - start, limit, mode)

    def test_a_clock_that_ends_in_the_wait_after_done_changes_nothing(self) -> None:
        with Raw(sending(self.HEAD + b'\r\n', 0.9, data(TEXT, STOP, DONE), 5.0)) as server:
            start = time.monotonic()
            record = stream(server.url, 'm', 'p', idle=5, deadline=1.05)
        self.assertTrue(record['ok'], record['error'])
        self.assertEqual(record['delivery']['body_end'], 'open')
        self.assertLess(time.monotonic() - start, 2.0)

    def test_the_connection_is_closed_at_once_on_a_failure(self) -> None:
        closed: list[float] = []

        def script(connection: socket.socket) -> None:
            connection.sendall(self.HEAD + b'\r\n' + data('oops'))
            start = time.monotonic()
            with contextlib.suppress(OSError):
                connection.recv(1)
            closed.append(time.monotonic() - start)

        with Raw(script) as server:
            self.assertEqual(stream(server.url, 'm', 'p')['outcome'], 'not_json')
            time.sleep(0.3)
        self.assertLess(closed[0], 1.0)


# --- evidence -----------------------------------------------------------------------------------------------------------


class Directory(unittest.TestCase):
    """A test with a directory of its own."""

    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.here = Path(temporary.name)

    def tearDown(self) -> None:
        for path in self.here.glob('*.json'):
            raw = path.read_bytes() if path.is_file() else b''
            if raw.startswith(b'{\n "ok": '):
                note_invalid(json.loads(raw))

    def names(self) -> list[str]:
        """What stands in the directory."""
        return sorted(os.listdir(self.here))

    def start(self, *args: str, **kwargs: Any) -> subprocess.Popen[bytes]:
        """The client as a command that goes on while the test looks."""
        kwargs = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'cwd': self.here, 'env': environment(), **kwargs}
        return subprocess.Popen([sys.executable, CLIENT, '--model', 'm', *args], **kwargs)

    def wait_for(self, fact: Callable[[], object], seconds: float = 20.0) -> None:
        """Until a fact holds."""
        until = time.monotonic() + seconds
        while not fact():
            self.assertLess(time.monotonic(), until, 'it never came')
            time.sleep(0.005)

    def read(self, name: str) -> dict[str, Any]:
        """A record, checked."""
        record: dict[str, Any] = json.loads((self.here / name).read_text())
        check_record(self, record)
        return record


class EvidenceTest(Directory):
    """The record survives; nothing is overwritten; the file is absent or valid JSON at any moment."""

    def test_what_exists_is_refused_before_a_byte_is_sent(self) -> None:
        (self.here / 'file').write_text('mine')
        (self.here / 'directory').mkdir()
        (self.here / 'dangling').symlink_to('nowhere')
        os.mkfifo(self.here / 'fifo')
        before = self.names()
        with Raw(sending()) as server:
            for name in ('file', 'directory', 'dangling', 'fifo', 'missing/x', 'directory/', 'new/', 'file/x', 'n' * 300):
                with self.subTest(name=name[:20]):
                    done = run('--url', server.url, '--model', 'm', '--output', name, cwd=self.here)
                    self.assertEqual((done.returncode, done.stdout, done.stderr.count('\n')), (2, '', 1), done.stderr)
                    self.assertIn('--output', done.stderr)
        self.assertEqual((self.names(), server.requests, (self.here / 'file').read_text()), (before, [], 'mine'))

    def test_a_second_run_with_the_same_output_is_refused(self) -> None:
        with fixture() as url:
            first = run('--url', url, '--model', 'm', '--output', 'run.json', cwd=self.here)
            record = (self.here / 'run.json').read_bytes()
            second = run('--url', url, '--model', 'm', '--output', 'run.json', cwd=self.here)
        self.assertEqual((first.returncode, second.returncode, self.names()), (0, 2, ['run.json']))
        self.assertEqual((self.here / 'run.json').read_bytes(), record)
        self.assertEqual(stat.S_IMODE((self.here / 'run.json').stat().st_mode), 0o600)

    def test_the_name_holds_an_unfinished_record_while_the_run_goes_on(self) -> None:
        with fixture('stall-after-text') as url:
            process = self.start('--url', url, '--output', 'run.json')
            self.wait_for(lambda: 'run.json' in self.names())
            record = self.read('run.json')
            self.assertEqual((record['outcome'], record['ok'], record['text']), ('unfinished', False, ''))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
        record = self.read('run.json')
        self.assertEqual((process.returncode, record['outcome'], record['error']), (130, 'interrupted', 'ended by SIGINT'))
        self.assertEqual(self.names(), ['run.json'])

    def test_signals_at_random_moments(self) -> None:
        def one(at: int) -> str:
            number, rng = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[at % 3], random.Random(at)
            process = self.start('--url', url, '--output', f'{at}.json')
            if at % 2:  # half of them in the run itself, however long a loaded machine takes to come there
                self.wait_for((self.here / f'{at}.json').exists)
            time.sleep(rng.uniform(0, 0.5))
            process.send_signal(number)
            if at % 4 == 0:
                process.send_signal(number)
            _, err = process.communicate(timeout=20)
            if not (self.here / f'{at}.json').exists():  # it had not come so far; Python itself may have been starting
                self.assertTrue(process.returncode in (128 + number, -number) or err.endswith(b'KeyboardInterrupt\n') or b'runtime state' in err, err)
                return 'none'
            record = self.read(f'{at}.json')
            # Python's own start may drop the signal, and show a traceback of its own modules for it
            self.assertNotIn(b'stream_client.py"', err)
            self.assertEqual(process.returncode, 128 + number if record['outcome'] == 'interrupted' else 0, record['outcome'])
            return str(record['outcome'])

        with fixture('slow-text', delay=0.01) as url, concurrent.futures.ThreadPoolExecutor(4) as pool:
            self.assertIn('interrupted', list(pool.map(one, range(200 if LONG else 12))))
        self.assertEqual([n for n in self.names() if n.endswith('.tmp')], [])

    def captured(self, name: str) -> bool:
        """Whether this capture holds an event already."""
        return (self.here / name).exists() and b'data: ' in (self.here / name).read_bytes()

    def test_a_process_that_was_stopped_wakes_to_its_deadline_also_where_bytes_wait(self) -> None:
        for clocks, first, outcome, text in (
                (('--deadline', '3'), TEXT, 'deadline', 'Hi'), (('--first-text', '3'), chunk(''), 'first_text_timeout', ''),
                (('--idle', '2', '--stall', '2'), TEXT, 'passed', 'HiHi')):  # the bytes that wait are progress
            with self.subTest(outcome), Raw(sending(HEAD + data(first), 1.0, data(TEXT, STOP, DONE))) as server:
                process = self.start('--url', server.url, '--output', f'{outcome}.json', '--capture', outcome, *clocks)
                self.wait_for(functools.partial(self.captured, outcome))
                process.send_signal(signal.SIGSTOP)
                time.sleep(4)
                process.send_signal(signal.SIGCONT)
                process.communicate(timeout=30)
                record = self.read(f'{outcome}.json')
                self.assertEqual((record['outcome'], record['text']), (outcome, text), record['error'])

    def test_a_signal_that_python_drops_ends_the_run_all_the_same(self) -> None:
        # Raised in a finalizer, so that it is "ignored"; the run looks once a second
        code = """
import os, signal, threading
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
judge = stream_client.ChatStream._judge
def losing(self, data, at):
    Finalized()
    yield from judge(self, data, at)
stream_client.ChatStream._judge = losing
"""
        done = patched(code, '--fixture', 'stall-after-text', '--output', '-', '--idle', '20')
        self.assertIn('Exception ignored', done.stderr)
        record = json.loads(done.stdout)
        self.assertEqual((done.returncode, record['outcome']), (128 + signal.SIGTERM, 'interrupted'))
        self.assertLess(record['duration_ms'], 10_000)

    def test_a_signal_in_the_wait_after_done_leaves_the_verdict(self) -> None:
        with Raw(sending(HEAD, data(TEXT, STOP, DONE), 1.0)) as server:
            code = """
import os, signal
drain = stream_client.ChatStream._drain
def ended(self, wire, body):
    os.kill(os.getpid(), signal.SIGTERM)
    drain(self, wire, body)
stream_client.ChatStream._drain = ended
"""
            done = patched(code, '--url', server.url, '--model', 'm', '--output', '-')
        record = json.loads(done.stdout)
        self.assertEqual((done.returncode, record['ok'], record['delivery']['body_end']), (128 + signal.SIGTERM, True, 'open'))

    def test_kill_9_at_random_moments(self) -> None:
        def one(at: int) -> None:
            process = self.start('--url', url, '--output', f'{at}.json')
            if at % 2:
                self.wait_for((self.here / f'{at}.json').exists)
            time.sleep(random.Random(at).uniform(0, 0.5))
            process.kill()
            process.communicate(timeout=20)
            if (self.here / f'{at}.json').exists():
                self.assertIn(self.read(f'{at}.json')['outcome'], ('unfinished', 'passed'))

        with fixture('slow-text', delay=0.01) as url, concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(200 if LONG else 8)))

    def test_a_signal_that_is_ignored_at_start_stays_ignored(self) -> None:
        with fixture(delay=0.5) as url:
            process = self.start('--url', url, '--output', 'run.json', preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
            self.wait_for(lambda: 'run.json' in self.names())
            process.send_signal(signal.SIGHUP)
            process.communicate(timeout=20)
        self.assertEqual((process.returncode, self.read('run.json')['ok']), (0, True))

    def test_a_record_that_cannot_be_put_in_place_goes_to_stdout(self) -> None:
        def remove() -> None:
            (self.here / 'd' / 'run.json').unlink()

        def replace() -> None:
            (self.here / 'd' / 'new').write_text('theirs')
            (self.here / 'd' / 'new').rename(self.here / 'd' / 'run.json')

        def move() -> None:
            (self.here / 'd').rename(self.here / 'e')

        for act, left in ((remove, []), (replace, ['run.json']), (move, None)):
            with self.subTest(act.__name__), fixture(delay=0.5) as url:
                shutil.rmtree(self.here / 'd', ignore_errors=True)
                (self.here / 'd').mkdir()
                process = self.start('--url', url, '--output', 'd/run.json')
                self.wait_for((self.here / 'd' / 'run.json').exists)
                act()
                out, err = process.communicate(timeout=20)
                record = json.loads(out)
                check_record(self, record)
                self.assertEqual((process.returncode, record['ok'], out.count(b'\n')), (3, True, 1))
                self.assertIn(b'could not be written', err)
                if left is not None:
                    self.assertEqual(os.listdir(self.here / 'd'), left)
                if left:
                    self.assertEqual((self.here / 'd' / 'run.json').read_text(), 'theirs')

    def test_a_file_size_limit(self) -> None:
        with fixture('events-of-20000') as url:
            for limit, status in ((100, 2), (20_000, 3)):
                done = run('--url', url, '--model', 'm', '--output', f'{limit}.json', cwd=self.here,
                           env=UNMEASURED, preexec_fn=functools.partial(set_file_size, limit))
                self.assertEqual(done.returncode, status, done.stderr)
                if status == 2:
                    self.assertEqual(self.names(), [])
                else:
                    self.assertEqual(self.read(f'{limit}.json')['outcome'], 'unfinished')
                    self.assertTrue(json.loads(done.stdout)['ok'])

    def test_a_file_system_without_hard_links(self) -> None:
        code = 'def link(*a, **k): raise PermissionError(1, "no links here")\nos.link = link'
        done = patched(code, '--fixture', 'ok', '--output', 'run.json', cwd=self.here)
        self.assertEqual((done.returncode, self.read('run.json')['ok'], self.names()), (0, True, ['run.json']))
        self.assertEqual(patched(code, '--fixture', 'ok', '--output', 'run.json', cwd=self.here).returncode, 2)

    def test_a_directory_that_is_gone(self) -> None:
        (self.here / 'd').mkdir()
        done = subprocess.run(['sh', '-c', f'cd d && rmdir ../d && exec {shlex.quote(os.path.realpath(sys.executable))} {shlex.quote(CLIENT)} --fixture ok'],
                              capture_output=True, text=True, cwd=self.here, env=environment(**UNMEASURED), timeout=30)
        self.assertEqual((done.returncode, done.stdout, done.stderr.count('\n')), (2, '', 1), done.stderr)

    def test_eight_processes_and_one_name(self) -> None:
        with fixture() as url:
            processes = [self.start('--url', url, '--output', 'run.json') for _ in range(8)]
            for process in processes:
                process.communicate(timeout=30)
        self.assertEqual(sorted(p.returncode for p in processes), [0] + [2] * 7)
        self.assertTrue(self.read('run.json')['ok'])
        self.assertEqual(self.names(), ['run.json'])

    def test_the_size_is_bounded_by_the_text_and_the_events(self) -> None:
        done = run('--fixture', 'events-of-20000', '--output', 'run.json', cwd=self.here)
        self.assertEqual(done.returncode, 0)
        record = self.read('run.json')
        self.assertLess((self.here / 'run.json').stat().st_size, len(record['text'].encode()) + 30 * record['content_events'] + 8192)

    def test_stdout_and_stderr_closed_full_or_blocked_change_nothing(self) -> None:
        with fixture() as url, self.sink('pipe') as blocked:
            waiting = self.start('--url', url, '--output', '-', stdout=blocked)  # for five seconds, while the others run
            full = '/dev/full' if os.path.exists('/dev/full') else 'pipe'
            for at, (out, err) in enumerate([(None, None), (full, full), ('pipe', 'pipe'), ('gone', 'gone'), (None, 'pipe')]):
                with self.subTest(out=out, err=err):
                    with contextlib.ExitStack() as stack:
                        opened = [stack.enter_context(self.sink(kind)) for kind in (out, err)]
                        process = self.start('--url', url, '--output', f'{at}.json', '--show-text', stdin=subprocess.DEVNULL,
                                             stdout=opened[0], stderr=opened[1],
                                             preexec_fn=functools.partial(close_fds, out is None, err is None))
                        self.assertEqual(process.wait(20), 0)
                    self.assertTrue(self.read(f'{at}.json')['ok'])
            _, said = waiting.communicate(timeout=20)
            self.assertEqual((waiting.returncode, said.splitlines()[-1]), (3, b'stream_client.py: the record could not be written to stdout'))

    def test_a_slow_reader_of_stdout_has_the_whole_record(self) -> None:
        code = 'written = stream_client._written\nstream_client._written = lambda output, data, _: written(output, data, 0.7)'
        with subprocess.Popen([sys.executable, '-c', f'import sys; sys.path.insert(0, {str(ROOT)!r}); import stream_client\n{code}\nsys.exit(stream_client.main())',
                               '--fixture', 'events-of-20000', '--output', '-'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()) as process:
            assert process.stdout
            read = b''
            while piece := os.read(process.stdout.fileno(), 10_000):
                read += piece
                time.sleep(0.1)
        self.assertEqual((process.returncode, json.loads(read)['content_events']), (0, 20_002))

    def test_a_record_that_the_memory_does_not_hold(self) -> None:
        record_short = 'once = stream_client.build_record\ndef short(run):\n if run.chat.text: raise MemoryError\n return once(run)\nstream_client.build_record = short'
        for code in (record_short,
                     'once = stream_client.to_json\ndef short(record, **more):\n if record["ok"]: raise MemoryError\n return once(record, **more)\nstream_client.to_json = short',
                     'def short(*_): raise MemoryError\nstream_client.View.text = short'):
            for output in ('-', 'run.json'):
                done = patched(code, '--fixture', 'ok', '--output', output, cwd=self.here)
                record = json.loads(done.stdout) if output == '-' else self.read(output)
                self.assertEqual((done.returncode, record['outcome'], record['ok'], record['text']), (1, 'internal', False, ''), code)
                self.assertNotIn('Traceback', done.stderr)
            (self.here / 'run.json').unlink()
        done = patched(record_short, '--fixture', 'ok', '--output', '-', '--capture', 'c', cwd=self.here)
        self.assertEqual((done.returncode, json.loads((self.here / 'c').read_text().splitlines()[-1])['outcome']), (1, 'internal'))

    def test_the_key_given_as_a_finish_reason(self) -> None:
        done = run('--fixture', 'ok', '--accept-finish', KEY, '--output', '-', env={'MODEL_API_KEY': KEY})
        self.assertEqual(json.loads(done.stdout)['request']['policy']['accept_finish'], ['stop', '[key]'])

    def test_a_verdict_does_not_depend_on_the_limit_of_digits_in_the_environment(self) -> None:
        with Raw(sending(HEAD + data({**TEXT, 'created': int('9' * 4000)}, STOP, DONE))) as server:
            done = run('--url', server.url, '--model', 'm', '--output', '-', env={'PYTHONINTMAXSTRDIGITS': '640'})
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_content_type_that_came_twice(self) -> None:
        for types, outcome in (('text/event-stream, text/event-stream; charset=utf-8', 'passed'), ('text/event-stream; x="a,b"', 'passed'),
                               ('text/event-stream, text/html', 'not_event_stream'), ('text/event-stream,', 'not_event_stream'),
                               ('text/event-stream; charset=utf-8, application/json', 'not_event_stream'), ('text/event-stream,text/event-stream; a="x,y"', 'passed')):
            with Raw(sending(HEAD.replace(b'text/event-stream', types.encode()) + data(TEXT, STOP, DONE))) as server:
                self.assertEqual(stream(server.url, 'm', 'p')['outcome'], outcome, types)

    def test_whether_the_id_of_the_stream_carries_the_one_of_the_run(self) -> None:
        for given, carries in (('chatcmpl-run.1', True), ('run.1', True), ('chatcmpl-run.1-0', True), ('chatcmpl-run.17', False), ('chatcmpl-xrun.1', False)):
            with Raw(sending(HEAD + data({**TEXT, 'id': given}, STOP, DONE))) as server:
                self.assertEqual(stream(server.url, 'm', 'p', run_id='run.1')['response']['id_carries_run_id'], carries, given)

    def test_a_capture_needs_a_name_of_its_own(self) -> None:
        for name, said in (('-', 'names a file, and - is none'), ('./run.json', 'and --output name one file')):
            done = run('--fixture', 'ok', '--output', 'run.json', '--capture', name, cwd=self.here)
            self.assertEqual((done.returncode, done.stderr, self.names()), (2, f'stream_client.py: --capture: {said}\n', []))

    def test_a_view_that_nobody_reads_costs_no_time(self) -> None:
        reader, writer = os.pipe()
        with open(writer, 'wb', buffering=0) as output:
            view = stream_client.View(output, True)
            start = time.process_time()
            for _ in range(100_000):
                view.text('abcdefghijkl')
            self.assertLess(time.process_time() - start, 5)
            os.set_blocking(reader, False)
            os.read(reader, 1_000_000)
            view.text('again')
            self.assertGreater(len(os.read(reader, 1_000_000)), 1000)
        os.close(reader)

    def test_a_slow_reader_of_stderr_changes_neither_verdict_nor_time(self) -> None:
        with fixture('line-of-60000') as url:
            process = self.start('--url', url, '--output', 'run.json', '--show-text', '--idle', '3', '--deadline', '4')
            assert process.stderr
            time.sleep(1.5)
            shown = b''
            while piece := os.read(process.stderr.fileno(), 4096):
                shown += piece
                time.sleep(0.005)
            self.assertEqual(process.wait(20), 0)
            process.communicate()
        self.assertLess(self.read('run.json')['duration_ms'], 1000)
        self.assertTrue(shown.startswith('| READY ✓yyy'.encode()))

    @contextlib.contextmanager
    def sink(self, kind: str | None) -> Iterator[Any]:
        """A stream that takes nothing: a file that is full, a pipe that is full, or one whose reader is gone."""
        if kind in (None, '/dev/full'):
            with open(kind or '/dev/null', 'wb') as file:
                yield file
            return
        reader, writer = os.pipe()
        if kind == 'pipe':
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, b'x' * 4096)
            os.set_blocking(writer, True)
        else:
            os.close(reader)
        try:
            yield writer
        finally:
            os.close(writer)
            if kind == 'pipe':
                self.assertNotIn(b'{', os.read(reader, 1_000_000))
                os.close(reader)


def set_file_size(limit: int) -> None:
    """Limit the size of files that this process writes."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def close_fds(out: bool, err: bool) -> None:
    """Close stdout or stderr, as ``>&-`` does."""
    for fd, close in ((1, out), (2, err)):
        if close:
            os.close(fd)


# --- command line -------------------------------------------------------------------------------------------------------


class CommandTest(Directory):
    """The command: what it prints, what it refuses."""

    def test_the_fixture_is_synthetic_where_no_head_comes_too(self) -> None:
        for mode in ('closed-at-once', 'ok'):
            done = run('--fixture', mode, '--output', '-', cwd=self.here)
            self.assertTrue(json.loads(done.stdout)['synthetic'])

    def test_the_walk_through(self) -> None:
        process = subprocess.Popen([sys.executable, FIXTURE, '--port', '0', '--mode', 'ok', '--delay', '0.05'], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, env=environment())
        self.addCleanup(process.communicate)
        self.addCleanup(process.terminate)
        assert process.stdout
        port = re.search(r'127\.0\.0\.1:([0-9]+)$', process.stdout.readline())
        assert port
        url = f'http://127.0.0.1:{port[1]}/v1/chat/completions'
        for mode, status, facts, error in [
            ('ok', 0, (True, 'READY ✓', 'stop', True, 3), None),
            ('broken', 1, (False, 'READY ✓', None, False, None),
             'the body ended before [DONE], by its last chunk, after 3 events; finish_reason: none'),
            ('length', 1, (False, 'READY ✓', 'length', True, 3), 'finish_reason is "length", expected "stop"'),
            ('malformed', 1, (False, 'READY ✓', None, False, None), 'event 4: not JSON: "{invalid}"'),
            ('http-error', 1, (False, '', None, False, None),
             'POST /v1/chat/completions: HTTP status 503 Service Unavailable: "fixture: no capacity"'),
        ]:
            with self.subTest(mode):
                done = run('--url', url, '--model', f'mode:{mode}', '--output', f'{mode}.json', cwd=self.here)
                record = self.read(f'{mode}.json')
                self.assertEqual((done.returncode, plain(record), record['error'], record['synthetic']), (status, facts, error, True))
                line = json.loads(done.stdout)
                self.assertEqual(line, {k: record[k] for k in ('ok', 'outcome', 'first_text_ms', 'duration_ms', 'finish_reason', 'error')}
                                 | {'output': f'{mode}.json'})
                self.assertEqual(done.stderr.count('\n'), 1)
                if mode == 'ok':
                    self.assertEqual((record['content_events'], len(record['event_gaps_ms'])), (2, 1))
                    self.assertTrue(0 < record['first_text_ms'] < record['duration_ms'])
        self.assertEqual(run('--url', url, '--model', 'm', '--output', 'ok.json', cwd=self.here).returncode, 2)

    def inside(self, *args: str) -> subprocess.CompletedProcess[str]:
        """main() in this process, in the test's directory: quicker where there are many to try."""
        saved = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        was, out, err = Path.cwd(), io.StringIO(), io.StringIO()
        os.chdir(self.here)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = stream_client.main(args)
        finally:
            os.chdir(was)
            for number, handler in saved.items():
                signal.signal(number, handler)
        return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())

    def test_what_is_refused(self) -> None:
        (self.here / 'empty').write_text('')
        (self.here / 'latin').write_bytes(b'\xe9')
        (self.here / 'key').write_text('a b\n')
        (self.here / 'object').write_text('{}')
        (self.here / 'twice').write_text('[{"role":"user","role":"system"}]')
        before = self.names()
        for flag, args in [
            ('--model', []), ('--model', ['--model', '']), ('--url', ['--model', 'm', '--url', 'http://example.com/']), ('--url', ['--model', 'm', '--url', '']),
            ('--url', ['--model', 'm', '--url', 'https://SECRET@h/']), ('--idle', ['--model', 'm', '--idle', '0']), ('--idle', ['--model', 'm', '--idle', 'nan']),
            ('--idle', ['--model', 'm', '--idle', '1e3']), ('--idle', ['--model', 'm', '--idle', '1_0']), ('--idle', ['--model', 'm', '--idle', '٣']),
            ('--deadline', ['--model', 'm', '--deadline', '86401']), ('--deadline', ['--model', 'm', '--deadline', '-1']),
            ('--max-tokens', ['--model', 'm', '--max-tokens', '0']), ('--max-tokens', ['--model', 'm', '--max-tokens', '9.5']), ('--prompt', ['--model', 'm', '--prompt', '']),
            ('--prompt-file', ['--model', 'm', '--prompt-file', 'empty']), ('--prompt-file', ['--model', 'm', '--prompt-file', 'latin']),
            ('--prompt-file', ['--model', 'm', '--prompt-file', 'missing']), ('--prompt-file', ['--model', 'm', '--prompt', 'x', '--prompt-file', 'empty']),
            ('--messages-file', ['--model', 'm', '--messages-file', 'object']), ('--messages-file', ['--model', 'm', '--messages-file', 'twice']),
            ('--messages-file', ['--model', 'm', '--messages-file', 'empty']), ('--extra-body', ['--model', 'm', '--extra-body', '{"n":2}']),
            ('--extra-body', ['--model', 'm', '--extra-body', '[]']), ('--extra-body', ['--model', 'm', '--extra-body', '{"a":NaN}']),
            ('--api-key-file', ['--model', 'm', '--api-key-file', 'empty']), ('--api-key-file', ['--model', 'm', '--api-key-file', 'key']),
            ('--ca-file', ['--model', 'm', '--ca-file', 'empty']), ('--ca-file', ['--model', 'm', '--url', 'https://h/', '--ca-file', 'empty']),
            ('--ca-file', ['--model', 'm', '--url', 'https://h/', '--ca-file', '.']), ('--ca-file', ['--model', 'm', '--url', 'https://h/', '--ca-file', 'missing']),
            ('--connect-to', ['--model', 'm', '--connect-to', '10.0.0.1:80']), ('--note', ['--model', 'm', '--note', 'x']),
            ('--note', ['--model', 'm', '--note', 'a=1', '--note', 'a=2']), ('--fixture', ['--fixture', 'nonsense']), ('--url', ['--fixture', 'ok', '--url', 'x']),
            ('--tolerate', ['--model', 'm', '--tolerate', 'no_finish']), ('--fail-on', ['--model', 'm', '--fail-on', 'x']), ('--output', ['--model', 'm', '--output', '']),
            ('--run-id', ['--model', 'm', '--run-id', 'a b']), ('--label', ['--model', 'm', '--label', '']), ('arguments', ['--model', 'm', '--idl', '3']),
            ('arguments', ['--model', 'm', '--token', 'SECRET']), ('arguments', ['--model', 'm', '--token=SECRET']), ('arguments', ['--model', 'm', 'SECRET']), ('arguments', ['--model', 'm', '-kSECRET']), ('arguments', ['--model', 'm', '--sk-SECRET-12']),
            ('--idle', ['--model', 'm', '--idle']),
        ]:
            with self.subTest(args=args):
                done = self.inside(*args)
                self.assertEqual((done.returncode, done.stdout, done.stderr.count('\n')), (2, '', 1), done.stderr)
                self.assertTrue(done.stderr.startswith('stream_client.py: ' + flag), done.stderr)
                self.assertNotIn('SECRET', done.stderr)
        self.assertEqual(self.names(), before)
        for key in ('a b', 'k\u00e9y', 'x\ny'):
            done = run('--model', 'm', env={'MODEL_API_KEY': key}, cwd=self.here)
            self.assertEqual((done.returncode, done.stderr),
                             (2, 'stream_client.py: MODEL_API_KEY: the key may only have characters from 0x21 to 0x7e\n'))

    def test_help_and_version(self) -> None:
        done = run('--help')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('exit status: 0 passed', done.stdout)
        self.assertEqual(run('--version').stdout, f'stream-client {stream_client.__version__}\n')

    def test_the_fixture_in_this_process_shows_text_and_names_the_record_itself(self) -> None:
        done = run('--fixture', 'ok', cwd=self.here)
        self.assertEqual(done.returncode, 0)
        (name,) = self.names()
        self.assertRegex(name, '^stream-[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}\\.json$')
        self.assertEqual(json.loads(done.stdout)['output'], name)
        self.assertTrue(done.stderr.startswith('| READY ✓\npassed 2 content events, first text after '), done.stderr)
        self.assertTrue(self.read(name)['synthetic'])

    def test_the_fixture_is_not_needed_beside_the_client(self) -> None:
        (self.here / 'stream_client.py').write_bytes(Path(CLIENT).read_bytes())
        done = run('--fixture', 'ok', program=str(self.here / 'stream_client.py'), cwd=self.here, env=UNMEASURED)
        self.assertEqual((done.returncode, done.stderr), (2, 'stream_client.py: --fixture: needs fixture_server.py beside this file\n'))
        with fixture() as url:
            self.assertEqual(run('--url', url, '--model', 'm', '--output', '-', program=str(self.here / 'stream_client.py'), env=UNMEASURED).returncode, 0)
            done = subprocess.run([sys.executable, '-', '--url', url, '--model', 'm', '--output', '-'], input=Path(CLIENT).read_text(), text=True,
                                  capture_output=True, env=environment(), cwd=self.here, timeout=30)
        self.assertEqual((done.returncode, json.loads(done.stdout)['client']['source_sha256']), (0, None), done.stderr)

    def test_the_record_as_one_line_on_stdout(self) -> None:
        done = run('--fixture', 'separators', '--output', '-', cwd=self.here)
        self.assertEqual((done.returncode, len(done.stdout.splitlines()), self.names()), (0, 1, []))
        record = json.loads(done.stdout)
        check_record(self, record)
        self.assertEqual(record['text'], fixture_server.MODES['separators'].text)

    def test_inputs_and_what_is_recorded_of_them(self) -> None:
        (self.here / 'prompt').write_text('from é file')
        (self.here / 'messages').write_text('[{"role":"user","content":[{"type":"text","text":"x"}]}]')
        with Raw(sending(b'HTTP/1.1 503 No\r\n\r\n')) as server:
            ask = ['--url', server.url, '--model', 'm']
            run(*ask, '--prompt-file', 'prompt', '--system', 'sys', '--label', 'l', '--note', 'model=r1', '--note', 'k=', '--output', 'a', cwd=self.here)
            run(*ask, '--prompt-file', 'prompt', '--system', 'sys', '--label', 'l', '--note', 'model=r=1', '--output', 'b', cwd=self.here)
            run(*ask, '--prompt-file', '-', '--output', 'c', cwd=self.here, input='from stdin')
            run(*ask, '--messages-file', 'messages', '--output', 'd', cwd=self.here)
            run(*ask, '--prompt', 'prömpt', '--label', 'größe', '--output', 'e', cwd=self.here, env={'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'})
            run(*ask, '--output', 'f', '--extra-body', '{"top_p":0.5}', '--run-id', 'r1', '--max-tokens', '7', cwd=self.here)
        sent = [json.loads(r.partition(b'\r\n\r\n')[2]) for r in server.requests]
        self.assertEqual([m['messages'] for m in sent], [
            [{'role': 'system', 'content': 'sys'}, {'role': 'user', 'content': 'from é file'}], [{'role': 'user', 'content': 'from stdin'}],
            [{'role': 'user', 'content': [{'type': 'text', 'text': 'x'}]}], [{'role': 'user', 'content': 'prömpt'}],
            [{'role': 'user', 'content': stream_client.DEFAULT_PROMPT}]])
        self.assertNotIn('a', self.names())  # an empty note is refused
        record = self.read('b')
        self.assertEqual((record['label'], record['notes']), ('l', {'model': 'r=1'}))
        self.assertNotIn('from é file', json.dumps(record, ensure_ascii=False))
        self.assertEqual(self.read('e')['label'], 'größe')
        record = self.read('f')
        self.assertEqual(record['request']['sampling'], {'stream_options': {'include_usage': True}, 'max_tokens': 7, 'temperature': 0, 'top_p': 0.5})
        self.assertEqual(record['request']['run_id'], 'r1')

    def test_a_key_file(self) -> None:
        with Raw(sending(b'HTTP/1.1 401 No\r\n\r\n')) as server:
            for text in (KEY, KEY + '\n', KEY + '\r\n'):
                (self.here / 'key').write_bytes(text.encode())
                done = run('--url', server.url, '--model', 'm', '--output', '-', '--api-key-file', 'key', cwd=self.here, env={'MODEL_API_KEY': 'other'})
                self.assertEqual(done.returncode, 1)
        self.assertTrue(all(f'Authorization: Bearer {KEY}\r\n'.encode() in r for r in server.requests) and len(server.requests) == 3)
        (self.here / 'key').write_text(KEY + '\n\n')
        self.assertEqual(run('--model', 'm', '--api-key-file', 'key', cwd=self.here).returncode, 2)

    def test_the_key_is_in_no_output(self) -> None:
        echo = json.dumps(KEY)[1:-1].encode()
        raw = KEY.encode()
        answers = [
            b'HTTP/1.1 401 ' + raw + b'\r\nContent-Length: %d\r\n\r\n' % (4090 + len(raw)) + b'x' * 4090 + raw,
            b'HTTP/1.1 401 No\r\nContent-Length: 900\r\n\r\n' + b'x' * 50 + raw[:20],  # cut inside the key
            b'HTTP/1.1 302 Found\r\nLocation: https://h/' + raw + b'\r\n\r\n', raw + b' 200\r\n\r\n', b'HTTP/1.1 200 OK\r\n' + raw + b'\r\n\r\n',
            b'HTTP/1.1 200 OK\r\nContent-Type: ' + raw + b'\r\nContent-Encoding: identity\r\n\r\n' + raw,
            b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: ' + raw + b'\r\n\r\n',
            b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: ' + raw + b'\r\n\r\n',
            b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: ' + raw + b'\r\n\r\n',
            b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n' + raw,
        ]
        events = [b'{"error":"' + echo + b'"}', echo, b'["' + echo + b'"]', b'{"error":{"code":"' + echo + b'"},"id":"' + echo + b'","model":"' + echo + b'"}',
                  b'{"choices":[{"index":"' + echo + b'"}]}', b'{"choices":[{"index":0,"delta":{"refusal":"' + echo + b'"}}]}',
                  b'{"usage":{"completion_tokens":"' + echo + b'"}}', b'{"system_fingerprint":"' + echo + b'","object":"' + echo + b'","model":"' + echo + b'"}',
                  b'{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"' + echo + b'"}]}\n\ndata: [DONE]']
        answers += [b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ' + e + b'\n\n' for e in events]
        for answer in answers:
            with Raw(sending(answer)) as server, self.subTest(answer=answer[:80]):
                with unittest.mock.patch.dict(os.environ, MODEL_API_KEY=KEY):
                    done = self.inside('--url', server.url, '--model', 'm', '--output', 'run.json', '--show-text', '--note', f'key={KEY}')
                self.assertEqual(done.returncode, 1)
                for text in (done.stdout, done.stderr, (self.here / 'run.json').read_text()):
                    self.assertNotIn('a"real', text)
                    self.assertNotIn('real\\', text.replace('\\\\', '\\'))
                    self.assertNotIn('0123456789', text)
                    self.assertNotIn(KEY[:12], text)
                (self.here / 'run.json').unlink()

    def test_the_key_is_in_no_record_wherever_a_server_message_is_cut(self) -> None:
        message = json.dumps({'error': {'message': f'invalid key {KEY}, sorry', 'code': KEY}}).encode()
        start = message.index(b'sk-')
        for at in range(start, len(message), 3):
            for answer in (b'HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n' % len(message) + message[:at],
                           b'HTTP/1.1 401 No\r\n\r\n' + b'x' * (4096 - at) + message,
                           b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ' + message[:at] + b'\n\n'):
                with Raw(sending(answer)) as server:
                    record = json.dumps(stream(server.url, 'm', 'p', token=KEY))
                self.assertFalse(any(KEY[:n] in record for n in (7, 9, 12)), record)
                self.assertNotIn('0123456', record)

    def test_the_summary_stays_under_4_kib(self) -> None:
        name = 'd/' + '\u65e5' * 80
        (self.here / 'd').mkdir()
        with Raw(sending(b'HTTP/1.1 400 No\r\n\r\n' + ('\u65e5' * 4000).encode())) as server:
            done = run('--url', server.url, '--model', 'm', '--output', name, cwd=self.here)
        self.assertLess(len(done.stdout), 4096)
        self.assertEqual(json.loads(done.stdout)['output'], name)
        record = {'ok': False, 'outcome': 'x', 'first_text_ms': None, 'duration_ms': 1, 'finish_reason': '\u65e5' * 64, 'error': '\u65e5' * 999}
        line = stream_client.summary(record, '\u65e5' * 4000)
        self.assertLess(len(line), 4096)
        self.assertEqual(json.loads(line)['outcome'], 'x')

    def test_accept_and_tolerate(self) -> None:
        self.assertEqual(run('--fixture', 'length', '--accept-finish', 'length,abort', '--output', '-').returncode, 0)
        done = run('--fixture', 'eof-after-finish', '--tolerate', 'no_done', '--output', '-')
        record = json.loads(done.stdout)
        self.assertEqual((done.returncode, record['done'], [w['code'] for w in record['warnings']], record['request']['policy']),
                         (0, False, ['no_done'], {'accept_finish': ['stop'], 'tolerate': ['no_done'], 'fail_on': []}))
        self.assertIn('warnings: no_done', done.stderr)
        done = run('--fixture', 'eof-after-finish', '--tolerate', 'no_done', '--fail-on', 'all', '--output', '-')
        self.assertEqual(json.loads(done.stdout)['outcome'], 'warning_refused')

    def test_main_in_process_returns_the_status(self) -> None:
        done = self.inside('--fixture', 'ok', '--output', 'run.json')
        self.assertEqual((done.returncode, json.loads(done.stdout)['ok']), (0, True))
        done = self.inside('--fixture', 'ok', '--output', 'run.json')
        self.assertEqual((done.returncode, done.stdout), (2, ''))
        self.assertIn('never overwritten', done.stderr)


class OfflineTest(Directory):
    """``--input``: recorded bytes, judged offline. CatalogueTest holds captures of every mode against their runs."""

    HEAD: ClassVar[dict[str, Any]] = {'capture': 1, 'started_at': '2026-11-30T10:00:00Z', 'ms': 5.0, 'synthetic': False, 'status': 200,
                      'headers': {'content-type': 'text/event-stream', 'x-other': 'no'}}
    READS: ClassVar[list[dict[str, Any]]] = [{'ms': 10.0, 'text': data(TEXT).decode()}, {'ms': 20.5, 'text': data(STOP).decode()},
                       {'ms': 20.5, 'base64': 'ZGF0YTogW0RPTkVdCgo='}]
    END: ClassVar[dict[str, Any]] = {'end': 'last_chunk', 'outcome': 'passed', 'boundary': None, 'error': None, 'ms': 30.0}

    def judge(self, *lines: object, **options: Any) -> dict[str, Any]:
        """A capture of these lines (a str is one as it stands), judged."""
        path = self.here / 'capture'
        path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        record = judged_offline(str(path), **options)
        check_record(self, record)
        return record

    def left_open(self, body: bytes, *args: str) -> tuple[int, dict[str, Any]]:
        """The command's status and record, with these bytes on a stdin that nobody closes."""
        with subprocess.Popen([sys.executable, CLIENT, '--input', '-', '--output', '-', *args], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(), cwd=self.here) as process:
            assert process.stdin and process.stdout
            process.stdin.write(body)
            process.stdin.flush()
            record = json.loads(process.stdout.read())
            status = process.wait(30)
        check_record(self, record)
        return status, record

    def test_plain_bytes(self) -> None:
        (self.here / 'body.sse').write_bytes(data(TEXT, {**STOP, 'usage': {'completion_tokens': 3}}, DONE))
        done = run('--input', 'body.sse', '--output', 'r.json', '--label', 'old', '--note', 'from=curl', cwd=self.here)
        record = self.read('r.json')
        check_record(self, record)
        self.assertEqual((done.returncode, done.stderr), (0, 'passed 1 content events; record: r.json\n'))
        self.assertEqual(plain(record), (True, 'Hi', 'stop', True, 3))
        self.assertEqual((record['request'], record['started_at'], record['synthetic'], record['model']), ({}, None, None, None))
        self.assertEqual((record['label'], record['notes'], record['delivery']['reads']), ('old', {'from': 'curl'}, None))
        self.assertEqual(record['input']['kind'], 'body')

    def test_a_capture(self) -> None:
        record = self.judge(self.HEAD, *self.READS, self.END, model='m')
        self.assertEqual((plain(record), record['started_at']), ((True, 'Hi', 'stop', True, None), '2026-11-30T10:00:00Z'))
        self.assertEqual((record['first_text_ms'], record['duration_ms'], record['synthetic'], record['model']), (15.0, 30.0, False, 'm'))
        self.assertEqual({k: v for k, v in record['marks_ms'].items() if v is not None},
                         {'head': 5.0, 'first_byte': 15.0, 'first_event': 15.0, 'first_text': 15.0, 'last_text': 15.0, 'finish': 25.5,
                          'done': 25.5, 'end': 30.0})
        self.assertEqual((record['response']['headers'], record['delivery']['reads']), ({'content-type': 'text/event-stream'}, 3))

    def test_it_is_judged_while_it_is_written(self) -> None:
        body = data(chunk('first '), chunk('second'), STOP, DONE)
        at = body.index(b'second')
        process = subprocess.Popen([sys.executable, CLIENT, '--input', '-', '--output', 'r.json', '--show-text'], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=self.here)
        assert process.stdin and process.stderr
        process.stdin.write(body[:at])
        process.stdin.flush()
        self.assertEqual(os.read(process.stderr.fileno(), 100), b'| first ')
        self.assertEqual(self.read('r.json')['outcome'], 'unfinished')
        self.assertEqual(process.communicate(body[at:], timeout=30)[1].partition(b'\n')[0], b'second')
        self.assertEqual((process.returncode, self.read('r.json')['text']), (0, 'first second'))

    @unittest.skipUnless(shutil.which('curl'), 'needs curl')
    def test_behind_curl(self) -> None:
        with fixture() as url:
            for mode, status, outcome in (('ok', 0, 'passed'), ('broken', 1, 'no_done'), ('http-error', 1, 'not_event_stream')):
                curl = subprocess.Popen(['curl', '-sN', '-d', json.dumps({'model': f'mode:{mode}', 'stream': True}), url], stdout=subprocess.PIPE)
                done = run('--input', '-', '--output', '-', stdin=curl.stdout)
                assert curl.stdout
                curl.stdout.close()
                curl.wait(30)
                self.assertEqual((done.returncode, json.loads(done.stdout)['outcome']), (status, outcome))

    def test_every_cut_of_a_capture_is_one(self) -> None:
        whole = self.judge(self.HEAD, *self.READS, self.END)
        for size in (1, 7, 64):
            with unittest.mock.patch.object(stream_client, 'READ_BYTES', size):
                self.assertEqual(self.judge(self.HEAD, *self.READS, self.END), whole)

    def test_a_capture_whose_run_was_killed(self) -> None:
        killed = 'the capture has no last line: its run was killed'
        cases: list[tuple[list[object], str, str | None, str]] = [
            ([self.HEAD], 'unfinished', killed, ''),
            ([self.HEAD, *self.READS[:2]], 'unfinished', killed, 'Hi'),
            ([self.HEAD, *self.READS[:1], json.dumps(self.READS[1])[:30]], 'unfinished', killed, 'Hi'),
            ([self.HEAD, *self.READS], 'passed', None, 'Hi'),
            ([self.HEAD, *self.READS, json.dumps(self.END)[:20]], 'passed', None, 'Hi'),
        ]
        for lines, outcome, error, text in cases:
            record = self.judge(*lines)
            self.assertEqual((record['outcome'], record['error'], record['text']), (outcome, error, text))

    def test_what_no_body_shows_is_taken_from_the_last_line(self) -> None:
        idle = {'end': None, 'outcome': 'idle_timeout', 'boundary': 'head', 'error': 'no byte', 'ms': 2005.0}
        for reads, last, outcome, boundary, error in [
            (1, idle | {'boundary': None}, 'idle_timeout', 'protocol', 'no byte'),
            (2, idle | {'boundary': 'nowhere'}, 'idle_timeout', 'completion', 'no byte'),
            (0, idle, 'idle_timeout', 'head', 'no byte'),
            (2, {'end': None, 'outcome': 'connection_reset', 'boundary': 'tls', 'ms': 40.0}, 'connection_reset', 'framing', 'so says the capture'),
            (2, {'end': None, 'outcome': 'body_cut', 'error': f'{KEY}\x1b[2J\n', 'ms': 40.0}, 'body_cut', 'framing', '[key]\\x1b[2J\\x0a'),
            # It has no say in what the body shows
            (2, self.END, 'no_done', 'completion', 'the body ended before [DONE], by its last chunk, after 2 events; finish_reason: "stop"'),
            (2, self.END | {'end': None}, 'no_done', 'completion', 'the body ended before [DONE] after 2 events; finish_reason: "stop"'),
            (2, self.END | {'end': 'x', 'outcome': 'later'}, 'no_done', 'completion',
             'the body ended before [DONE] after 2 events; finish_reason: "stop"'),
            (3, idle, 'passed', None, None),
        ]:
            record = self.judge(self.HEAD, *self.READS[:reads], last, token=KEY)
            self.assertEqual((record['outcome'], record['failure'] and record['failure']['boundary'], record['error']), (outcome, boundary, error))
        self.assertEqual([w['code'] for w in record['warnings']], ['unclean_end'])

    def test_another_status_is_no_success(self) -> None:
        record = self.judge(self.HEAD | {'status': 503}, *self.READS, self.END)
        self.assertEqual((record['outcome'], record['text']), ('http_status', ''))
        for status in (None, '200', 200.5, 10**30):
            record = self.judge(self.HEAD | {'status': status}, self.END | {'outcome': 'passed'})
            self.assertFalse(record['ok'])
            self.assertIsNone(stream_report.invalid(record, SCHEMA))

    def test_what_is_no_event_stream_is_not_judged_and_still_kept(self) -> None:
        for excerpt, outcome, text in ((True, 'not_event_stream', ''), (False, 'passed', 'Hi')):
            record = self.judge(self.HEAD, *({**read, 'excerpt': excerpt} for read in self.READS), self.END | {'outcome': outcome})
            kept = stream_client.escaped(data(TEXT, STOP, DONE).decode()) if excerpt else None
            self.assertEqual((record['outcome'], record['text'], record['response']['body_excerpt']), (outcome, text, kept))

    def test_an_origin_that_no_head_told_is_unknown(self) -> None:
        for args, synthetic in ((('--fixture', 'closed-at-once'), True), (('--url', 'http://127.0.0.1:1/v1/chat/completions', '--model', 'm'), None)):
            run(*args, '--capture', f'{synthetic}', '--output', '-', cwd=self.here)
            self.assertIs(judged_offline(self.here / f'{synthetic}')['synthetic'], synthetic)

    def test_a_closed_stdin_is_no_body(self) -> None:
        done = subprocess.run(['sh', '-c', f'exec "{sys.executable}" "{CLIENT}" --input - --output - <&-'], capture_output=True, text=True, env=environment(), timeout=30)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (2, '', 'stream_client.py: --input: is stdin, which is closed\n'))

    def test_policy_and_limits_are_those_given_now(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [({}, 'no_done'), ({'tolerate': ['no_done']}, 'passed'), ({'max_event_chars': 5}, 'event_too_long'),
                                                   ({'max_stream_bytes': 5}, 'body_too_large')]
        for options, outcome in cases:
            record = self.judge(self.HEAD, *self.READS[:2], self.END | {'outcome': 'no_done'}, **options)
            self.assertEqual(record['outcome'], outcome)
        self.assertEqual(record['input']['limits']['max_stream_bytes'], 5)
        (self.here / 'plain').write_bytes(data(TEXT, STOP))
        self.assertEqual(judged_offline(str(self.here / 'plain'), tolerate=['no_done'])['outcome'], 'no_done')  # how it ended is not known
        for outcome in ('missing_index', 'line_too_long'):  # at which the run ended, so that nothing tells what would have followed
            record = self.judge(self.HEAD, *self.READS[:1], self.END | {'end': None, 'outcome': outcome}, tolerate=['missing_index'])
            self.assertEqual((record['outcome'], record['error'].split(',')[0]), ('unfinished', f'the capture ends where its run failed with "{outcome}"'))

    def test_warnings_that_rest_on_the_request_are_those_of_the_run(self) -> None:
        for mode, warning in (('usage-absent', 'no_usage'), ('usage-huge', 'max_tokens_exceeded'), ('model-differs', 'model_differs')):
            strict = ['--fail-on', warning, '--output', '-']
            with fixture(mode) as url:
                live = run('--url', url, '--model', 'm', *strict, '--capture', f'{mode}.capture', cwd=self.here)
            again = run('--input', f'{mode}.capture', *strict, cwd=self.here)
            self.assertEqual([(done.returncode, json.loads(done.stdout)['error']) for done in (live, again)],
                             [(1, f'{warning} (--fail-on): {WARNINGS[warning]}')] * 2)
        record = self.judge(self.HEAD | {'asked': {'model': 7, 'max_tokens': 'x', 'usage': 1}}, *self.READS, self.END)
        self.assertEqual((record['outcome'], record['model'], record['warnings']), ('passed', None, []))

    @unittest.skipUnless(sys.platform == 'linux', 'elsewhere a fifo without a writer may poll as ended')
    def test_a_fifo_that_nobody_writes_to(self) -> None:
        os.mkfifo(self.here / 'fifo')
        done = run('--input', 'fifo', '--idle', '1', '--output', '-', cwd=self.here, timeout=30)
        self.assertEqual((done.returncode, json.loads(done.stdout)['outcome']), (1, 'idle_timeout'))

    def test_the_deadline_holds_for_a_file_too(self) -> None:
        record = self.judge(self.HEAD, *([{'ms': 6.0, 'text': ''}] * 100_000), deadline=0.2)
        self.assertEqual(record['outcome'], 'deadline')

    def test_a_line_too_long_is_malformed_in_every_cut(self) -> None:
        (self.here / 'c').write_text(''.join(f'{json.dumps(line)}\n' for line in (self.HEAD, self.READS[0] | {'pad': 'A' * 530_000}, *self.READS[1:], self.END)))
        for size in (4096, 65_536, 10_000_000):
            with unittest.mock.patch.object(stream_client, 'READ_BYTES', size), self.assertRaisesRegex(Refused, 'malformed capture: line 2'):
                judged_offline(self.here / 'c')

    def test_what_follows_done_in_a_capture_changes_nothing(self) -> None:
        for later in ('garbage', '{"ms": -1, "text": ""}', 'x' * 600_000):
            record = self.judge(self.HEAD, *self.READS, later, self.END)
            self.assertEqual(record['outcome'], 'passed')

    def test_a_last_line_that_contradicts_itself_is_no_pass(self) -> None:
        for end, outcome in (('last_chunk', 'connection_reset'), ('length', 'body_cut'), ('last_chunk', 'deadline')):
            record = self.judge(self.HEAD, *self.READS[:2], self.END | {'end': end, 'outcome': outcome}, tolerate=['no_done'])
            self.assertEqual(record['outcome'], outcome)

    def test_a_capture_is_bounded(self) -> None:
        with fixture() as url:
            answer = ChatStream(url, 'mode:ok', 'p')
            answer.capture = stream_client.Capture(str(self.here / 'c'), answer.secret, 600)
            with answer:
                list(answer)
        self.assertEqual((answer.record['ok'], [w['code'] for w in answer.record['warnings']]), (True, ['capture_incomplete']))
        lines = (self.here / 'c').read_bytes().splitlines(keepends=True)
        self.assertLess(sum(len(line) for line in lines[1:-1]), 600)
        record = judged_offline(str(self.here / 'c'))
        self.assertEqual((record['outcome'], record['error']), ('unfinished', 'the capture reached its bound'))

    def test_what_is_no_event_stream_is_named(self) -> None:
        for body, error in [
            (HEAD + data(TEXT, STOP, DONE),
             'the input begins with a status line: record the body alone (curl without -i)'),
            (b'{"error": {"message": "no such model"}}', 'the input is JSON: "no such model"'),
            (b'<html><title>502 Bad Gateway</title>', 'the input is HTML: "502 Bad Gateway"'),
            (b'curl: (7) Failed to connect', 'the input is text: "curl: (7) Failed to connect"'),
            (b'{"other": 1}\n{"other": 2}\n', 'the input is NDJSON: "{"other": 1}\\x0a{"other": 2}"'),
        ]:
            (self.here / 'body').write_bytes(body)
            for size in (1, 7, 65_536):
                with unittest.mock.patch.object(stream_client, 'READ_BYTES', size):
                    record = judged_offline(str(self.here / 'body'))
                self.assertEqual((record['outcome'], record['error']), ('not_event_stream', error))
        for body, outcome in [(b'', 'no_done'), (b': alive\n\n', 'no_done'), (b'error: {"message": "x"}\n\n', 'server_error'), (b'\x1f\x8b\x08', 'not_utf8'),
                              (data(TEXT, STOP, DONE, DONE), 'passed'), (b'{"captu', 'not_event_stream'), (b'{"capture":', 'unfinished'), (b'data: {"choices"', 'no_done'), (b'HTT', 'not_event_stream')]:
            (self.here / 'body').write_bytes(body)
            for size in (1, 65_536):
                with unittest.mock.patch.object(stream_client, 'READ_BYTES', size):
                    self.assertEqual(judged_offline(str(self.here / 'body'))['outcome'], outcome, body)

    def test_more_than_the_limit_after_done_changes_nothing(self) -> None:
        body = data(TEXT, STOP, DONE)
        for size in (50, len(body) + 10, 65_536):
            (self.here / 'body').write_bytes(body + b':' * 1000)
            with unittest.mock.patch.object(stream_client, 'READ_BYTES', size):
                record = judged_offline(str(self.here / 'body'), max_stream_bytes=len(body) + 5)
            self.assertEqual((record['outcome'], [w['code'] for w in record['warnings']]), ('passed', ['unclean_end']))

    def test_a_malformed_capture_is_refused_and_leaves_nothing(self) -> None:
        good = json.dumps(self.READS[0])
        for lines, line in [
            (['{"capture": 1}', good], 1), ([json.dumps(self.HEAD | {'headers': 7}), good], 1), ([json.dumps(self.HEAD | {'ms': -1}), good], 1),
            ([json.dumps(self.HEAD), '{"ms": 1, "text": 7}', good], 2), ([json.dumps(self.HEAD), '{"ms": 1, "base64": "$"}', good], 2),
            ([json.dumps(self.HEAD), '[]', good], 2), ([json.dumps(self.HEAD), '', good], 2), ([json.dumps(self.HEAD), '{"ms": NaN, "text": ""}', good], 2),
            ([json.dumps(self.HEAD), '{"ms": "x", "text": ""}', good], 2), ([json.dumps(self.HEAD), '\udcff', good], 2),
            ([json.dumps(self.HEAD), good, json.dumps(self.END), good, good], 4), ([json.dumps(self.HEAD), good, '{"ms": 9.9, "text": ""}', good], 3),
            ([json.dumps(self.HEAD), good, json.dumps(self.END | {'ms': 14}), good], 3), ([json.dumps(self.HEAD), '{"ms": 1' + '0' * 400 + ', "text": ""}', good], 2), ([json.dumps(self.HEAD), 'x' * 600_000], 2),
        ]:
            (self.here / 'c').write_bytes('\n'.join(lines).encode('utf-8', 'surrogateescape') + b'\n')
            done = run('--input', 'c', '--output', 'r.json', cwd=self.here)
            self.assertEqual((done.returncode, done.stdout, done.stderr),
                             (2, '', f'stream_client.py: --input: is a malformed capture: line {line}\n'))
            self.assertEqual([path.name for path in self.here.iterdir()], ['c'])
        (self.here / 'c').write_text('{"capture": 2}\n')
        self.assertEqual(run('--input', 'c', '--output', '-', cwd=self.here).stderr, 'stream_client.py: --input: is a capture of a later version\n')

    def test_what_is_refused(self) -> None:
        (self.here / 'body').write_bytes(data(TEXT, STOP, DONE))
        for args, line in [
            (['--input', 'missing'], '--input: cannot be read: No such file or directory'),
            (['--input', '.'], '--input: cannot be read: Is a directory'),
            (['--input', 'body', '--prompt', 'x'], '--prompt: says nothing with --input'),
            (['--input', 'body', '--ssh', 'x'], '--ssh: says nothing with --input'),
            (['--input', 'body', '--capture', 'x'], '--capture: says nothing with --input'),
            (['--input', 'body', '--first-text', '1'], '--first-text: says nothing with --input'),
            (['--input', 'body', '--url', 'http://127.0.0.1/x'], '--url: not allowed with argument --input'),
            (['--input', '-', '--api-key-file', '-'], '--api-key-file: and --input cannot both be stdin'),
            (['--input', 'body', '--output', 'body'], '--output: body exists and is never overwritten'),
            (['--input', 'body', '--max-tokens', '0'], '--max-tokens: says nothing with --input'),
            (['--input', 'body', '--idle', '0'], '--idle: must be seconds above 0, at most 86400'),
            (['--input', 'body', '--max-line-chars', '0'], '--max-line-chars: must be a whole number from 1 to 1099511627776'),
            (['--input', ''], '--input: cannot be read: No such file or directory'),
        ]:
            done = run(*args, cwd=self.here)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (2, '', f'stream_client.py: {line}\n'))
            self.assertEqual([path.name for path in self.here.iterdir()], ['body'])
        with self.assertRaises(TypeError):
            stream_client.Recording(str(self.here / 'body'), connect_to='127.0.0.1:1')
        with self.assertRaises(Refused):
            stream_client.Recording(999)

    def test_a_pipe_that_falls_silent(self) -> None:
        for body, args, facts in [
            (data(TEXT), ('--idle', '1'), (1, 'idle_timeout', 'Hi', None)),
            (data(TEXT), ('--deadline', '1'), (1, 'deadline', 'Hi', None)),
            (data(TEXT, STOP, DONE), (), (0, 'passed', 'Hi', 'open')),
        ]:
            status, record = self.left_open(body, *args)
            self.assertEqual((status, record['outcome'], record['text'], record['delivery']['body_end']), facts)

    def test_a_signal_ends_it(self) -> None:
        process = subprocess.Popen([sys.executable, CLIENT, '--input', '-', '--output', 'r.json', '--show-text'], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=self.here)
        assert process.stdin and process.stderr
        process.stdin.write(data(TEXT))
        process.stdin.flush()
        self.assertEqual(os.read(process.stderr.fileno(), 100), b'| Hi')
        process.terminate()
        process.communicate(timeout=30)
        record = self.read('r.json')
        self.assertEqual((process.returncode, record['outcome'], record['text']), (128 + signal.SIGTERM, 'interrupted', 'Hi'))

    def test_the_key_is_masked(self) -> None:
        (self.here / 'body').write_bytes(data(TEXT, {'error': {'message': f'wrong key {KEY}'}}))
        done = run('--input', 'body', '--output', '-', cwd=self.here, env={'MODEL_API_KEY': KEY})
        self.assertEqual(json.loads(done.stdout)['error'], 'error in the stream: wrong key [key]')


class TerminalTest(Directory):
    """On a real terminal: the text as it arrives, and not one control character of the server's."""

    def on_terminal(self, *args: str, **env: str) -> str:
        main, side = pty.openpty()
        process = subprocess.Popen([sys.executable, CLIENT, *args], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=side, cwd=self.here,
                                   env=environment(TERM='xterm', **env))
        os.close(side)
        shown = b''
        with contextlib.suppress(OSError):
            while piece := os.read(main, 65536):
                shown += piece
        os.close(main)
        process.wait(20)
        return shown.decode()

    def test_controls_are_escaped(self) -> None:
        hostile = 'a\x1b[2J\x07\x00\x7f\x85\x9b31m\u202eb\u2066\u200f\ufeff\u2028c\r\nd\te'
        answer = HEAD + data(json.dumps(chunk(hostile)), STOP, DONE)
        with Raw(sending(answer)) as server:
            shown = self.on_terminal('--url', server.url, '--model', 'm', NO_COLOR='1')
        self.assertEqual(re.sub('[ -~\u00a1-\u1fff]', '', shown.replace('\r\n', '')), '')
        self.assertTrue(shown.startswith('| a\\x1b[2J\\x07\\x00\\x7f\\u0085\\u009b31m\\u202eb\\u2066\\u200f\\ufeff\\u2028c\\x0d\r\n| d    e\r\npassed '), shown)

    def test_colour_is_for_terminals_without_no_color(self) -> None:
        self.assertIn('\x1b[32mpassed\x1b[0m', self.on_terminal('--fixture', 'ok'))
        self.assertIn('\x1b[31mFAILED\x1b[0m', self.on_terminal('--fixture', 'length'))
        self.assertNotIn('\x1b', self.on_terminal('--fixture', 'error-controls', NO_COLOR='1'))
        self.assertNotIn('\x1b', run('--fixture', 'error-controls', '--output', '-').stderr)

    def test_no_mode_sends_a_control_character_through(self) -> None:
        for mode in ('error-controls', 'separators', 'spells-done', 'finish-long', 'html-200'):
            shown = self.on_terminal('--fixture', mode, NO_COLOR='1')
            self.assertEqual(stream_client._UNSAFE.sub('', shown.replace('\r\n', '')), shown.replace('\r\n', ''), mode)


# --- fixture ------------------------------------------------------------------------------------------------------------


class FixtureTest(Directory):
    """The fixture as a program and as a server."""

    def ask(self, url: str, method: str = 'POST', path: str = fixture_server.PATH, body: bytes = b'{}', **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(url.split('/')[2], timeout=10)
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        got = response.read()
        connection.close()
        return response.status, json.loads(got)

    def test_bad_requests_get_a_json_error(self) -> None:
        with fixture() as url:
            rows: list[tuple[int, dict[str, Any]]] = [
                (404, {'path': '/'}), (400, {'body': b'{'}), (400, {'body': b'[]'}), (400, {'body': b'{"model":"m"}'}), (400, {'body': b'{"stream":true}'}),
                (400, {'body': b'{"model":"m","stream":1}'}), (404, {'body': b'{"model":"mode:nonsense","stream":true}'}), (400, {'body': b'[' * 60_000}),
                (404, {'body': b'{"model":"mode:replay","stream":true}'}), (413, {'body': b'x' * 70_000}), (404, {'method': 'GET'}), (501, {'method': 'PUT'}), (400, {'body': b'\xff'}),
            ]
            for want, options in rows:
                with self.subTest(want=want, options=str(options)[:60]):
                    status, body = self.ask(url, **options)
                    self.assertEqual((status, body['error']['code']), (want, want))

    def test_models_lists_the_modes(self) -> None:
        with fixture() as url:
            status, body = self.ask(url, 'GET', '/v1/models')
        self.assertEqual((status, [m['id'] for m in body['data']]), (200, [f'mode:{name}' for name in fixture_server.MODES]))

    def test_garbage_gets_an_answer_and_no_traceback(self) -> None:
        with fixture() as url:
            port = parse_url(url).port
            for raw in (b'\x16\x03\x01\x00', b'GET\r\n\r\n', b'GET / HTTP/9\r\n\r\n', b'\r\n', b'POST /v1/chat/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n',
                        b'GET /' + b'x' * 70_000 + b' HTTP/1.1\r\n\r\n', b'GET / HTTP/1.1\r\n' + b'x: y\r\n' * 200 + b'\r\n'):
                with socket.create_connection(('127.0.0.1', port), 10) as connection, contextlib.redirect_stderr(io.StringIO()) as err:
                    connection.sendall(raw)
                    connection.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(ConnectionResetError):
                        while connection.recv(65536):
                            pass
                self.assertEqual(err.getvalue(), '')

    def test_half_open_clients_time_out(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(unittest.mock.patch.object(fixture_server.Handler, 'timeout', 0.3))
            port = parse_url(stack.enter_context(fixture())).port
            connection = stack.enter_context(socket.create_connection(('127.0.0.1', port), 10))
            connection.sendall(b'POST /v1')
            self.assertEqual(connection.recv(100), b'')

    def test_200_clients_at_once(self) -> None:
        with fixture(delay=0.5) as url:
            body = b'{"model":"m","stream":true}'
            request = b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (len(body), body)
            start = time.monotonic()
            with contextlib.ExitStack() as stack:
                clients = [stack.enter_context(socket.create_connection(('127.0.0.1', parse_url(url).port), 20)) for _ in range(200)]
                for client in clients:
                    client.sendall(request)
                got = dict.fromkeys(clients, b'')
                while any(not g.endswith(b'\r\n0\r\n\r\n') for g in got.values()):
                    self.assertLess(time.monotonic() - start, 20)
                    for client in select.select(clients, [], [], 10)[0]:
                        got[client] += client.recv(65536)
            self.assertTrue(all(b'[DONE]' in g for g in got.values()))

    def test_the_program(self) -> None:
        done = run('--list-modes', '--json', program=FIXTURE)
        rows = json.loads(done.stdout)
        self.assertEqual([r['mode'] for r in rows], list(fixture_server.MODES))
        self.assertEqual(set(rows[0]), {'mode', 'group', 'sends', 'expect', 'source'})
        self.assertIn('broken ', run('--list-modes', program=FIXTURE).stdout)
        for args, status in ((['--mode', 'x'], 2), (['--port', '99999'], 2), (['--delay', '-1'], 2), (['--fragment', '0'], 2), (['--port', 'x'], 2),
                             (['--certificate', 'missing'], 2)):
            done = run(*args, program=FIXTURE, timeout=20)
            self.assertEqual(done.returncode, status, args)
            self.assertNotIn('Traceback', done.stderr)
        with fixture() as url:
            done = run('--port', url.split(':')[2].split('/')[0], program=FIXTURE)
            self.assertEqual((done.returncode, done.stderr.count('\n'), done.stdout), (2, 1, ''))

    def test_a_capture_is_replayed(self) -> None:
        expected = {'ok': 'passed', 'broken': 'no_done', 'bad-utf8': 'not_utf8', 'reset-midway': 'connection_reset',
                    'stall-after-text': 'idle_timeout', 'http-error': 'http_status', 'closed-at-once': 'closed_before_head',
                    'stall-before-head': 'idle_timeout', 'json-200': 'not_event_stream'}
        for body in (b'x' * 9000, b'x' * (4096 + 6 * len(KEY) - 20) + KEY.encode() + b'yy', b'bad key ' + KEY[:-1].encode()):
            with Raw(sending(b'HTTP/1.1 401 No\r\n\r\n' + body)) as server:
                live = json.loads(run('--url', server.url, '--model', 'm', '--output', '-', '--capture', 'said', env={'MODEL_API_KEY': KEY}, cwd=self.here).stdout)
            self.assertNotIn(KEY[:19], (self.here / 'said').read_text().replace('\\\\', '\\'))
            if b'key' not in body:
                self.assertEqual(judged_offline(self.here / 'said')['response']['body_excerpt'], live['response']['body_excerpt'])
            (self.here / 'said').unlink()
        with fixture(delay=0.15) as url, concurrent.futures.ThreadPoolExecutor(4) as pool:
            def twice(mode: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
                kept = str(self.here / mode)
                ask = ['--model', f'mode:{mode}', '--idle', '1', '--deadline', '8', '--output', '-', '--capture', kept]
                live = json.loads(run('--url', url, *ask, env={'MODEL_API_KEY': KEY}).stdout)
                self.assertEqual(run('--url', url, *ask).returncode, 2)
                with fixture(replay=kept) as replayed:
                    return mode, live, stream(replayed, 'm', 'p', idle=1, deadline=8)

            for mode, live, again in pool.map(twice, expected):
                with self.subTest(mode):
                    capture = self.here / mode
                    self.assertEqual((live['outcome'], stat.S_IMODE(capture.stat().st_mode)), (expected[mode], 0o600))
                    lines = [json.loads(line) for line in capture.read_text().splitlines()]
                    self.assertEqual((lines[0]['status'], lines[-1]['outcome']), (live['response']['status'], expected[mode]))
                    same = ('outcome', 'text', 'content_events', 'done')
                    for other in (again, judged_offline(capture)):
                        self.assertEqual([other[k] for k in same], [live[k] for k in same])
                        self.assertEqual(other['response']['body_excerpt'], live['response']['body_excerpt'])
                    if mode == 'ok':
                        self.assertGreater(again['first_text_ms'], 100)
        (self.here / 'plain').write_bytes(data(TEXT, STOP, DONE))
        whole = '{"capture": 1, "status": 200, "headers": {}}\n'
        for name, malformed in (('bad', '{"capture": 1}\n'), ('late', whole.replace('1', '2', 1)), ('many', whole.replace('200', '1e400')),
                              ('few', whole.replace('200', '99')), ('split', whole.replace('{}', '{"server": "x\\r\\nA: b"}')),
                              ('long', f'{whole}{{"ms": 1{"0" * 400}, "text": "x"}}\n')):
            (self.here / name).write_text(malformed)
        with fixture(replay=str(self.here / 'plain')) as url:
            self.assertTrue(stream(url, 'm', 'p')['ok'])
        for name in ('bad', 'late', 'many', 'few', 'split', 'long', 'missing'):
            done = run('--replay', name, program=FIXTURE, cwd=self.here)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count('\n')), (2, '', 1))

    def test_the_key_is_masked_in_a_capture_also_where_reads_cut_it(self) -> None:
        raw = data(chunk(f'key {KEY}'), STOP, DONE)
        escaped_key = json.dumps(KEY)[1:-1].encode()
        for at in range(raw.index(escaped_key) - 1, raw.index(escaped_key) + len(escaped_key) + 1, 4):
            name = self.here / str(at)
            capture = stream_client.Capture(str(name), Secret(KEY), 1_000_000)
            for n, piece in enumerate(cut(raw, [at, at + 2])):
                capture.read(float(n), piece)
            capture.end(self.ENDED)
            kept = b''.join(json.loads(line).get('text', '').encode() for line in name.read_text().splitlines())
            self.assertEqual((len(kept), KEY.encode() in kept, b'0123456789' in kept), (len(raw), False, False))

    ENDED: ClassVar[dict[str, Any]] = {'duration_ms': 3.0, 'delivery': {'body_end': 'closed'}, 'outcome': 'passed', 'failure': None, 'error': None}
    FORMS: ClassVar[dict[str, Callable[[str], str]]] = {
        'plain': str, 'json': lambda key: json.dumps(key)[1:-1], 'slashes': lambda key: json.dumps(key)[1:-1].replace('/', '\\/'),
        'twice': lambda key: json.dumps(json.dumps(key)[1:-1])[1:-1], 'units': lambda key: ''.join(f'\\u{ord(c):04x}' for c in key),
        'units twice': lambda key: ''.join(f'\\\\u{ord(c):04X}' for c in key), 'percent': lambda key: ''.join(f'%{ord(c):02x}' for c in key),
        'quoted': lambda key: urllib.parse.quote(key, safe=''), 'html': html.escape, 'hex': lambda key: ''.join(f'&#x{ord(c):X};' for c in key),
        'decimal': lambda key: ''.join(f'&#{ord(c)};' for c in key), 'json in html': lambda key: html.escape(json.dumps(key)[1:-1]),
        'html in json': lambda key: json.dumps(html.escape(key))[1:-1], 'folded': lambda key: f'{key[:4]}\r\n \t{key[4:]}',
        'mixed': lambda key: ''.join(c if at % 2 else f'\\u{ord(c):04x}' for at, c in enumerate(key))}

    def test_a_form_of_the_key_is_masked_wherever_reads_cut_it(self) -> None:
        rng = random.Random(1)
        for key in ('sk-abcdEFGH12', 'aaaaaaab', 'abcabcabd', '/bcdEFGH12+/==', '"bcdEFGH&12', '\\bcdefgh', 'abcdefg\\', 'ab\\\\cdefgh', '\\\\abcdefg', 'abcdefg"',
                    '&abcdefg', 'abcdefg&', '%abcdefg', 'abcdefg%', 'ab%25cdefgh', 'ab&amp;cdefg', '%41%42%43', '&#x41;&#x42;', 'ab\\u0041cde', 'u000asecret', 'a%b&c\\d"e', 'n3secretkey'):
            secret = Secret(key)
            for name, of in self.FORMS.items():
                form = of(key)
                raw = f'data: {{"debug": "{form} said"}}\n\n'.encode()
                first = raw.index(form.encode())
                within = range(first - 1, first + len(form) + 2)
                cuts = [[], list(range(1, len(raw))), *([at] for at in (within if LONG else rng.sample(within, 8))), *(sorted(rng.sample(within, count)) for count in (2, 2, 3) * (40 if LONG else 3))]
                for some in cuts:
                    with unittest.mock.patch.object(stream_client.Capture, '_write') as written:
                        capture = stream_client.Capture(str(self.here / 'c'), secret, 1_000_000)
                        for n, piece in enumerate(cut(raw, some)):
                            capture.read(float(n), piece)
                        capture.end(self.ENDED)
                    (self.here / 'c').unlink()
                    lines = [json.loads(call.args[0]) for call in written.call_args_list][:-1]
                    kept = b''.join(line['text'].encode() if 'text' in line else base64.b64decode(line['base64']) for line in lines)
                    self.assertEqual((len(kept), key.encode() in kept, kept.startswith(raw[: first] + b'******')), (len(raw), False, True), (key, name, some, kept))
                if name != 'folded':
                    for at in range(first + 6 * len(form) // len(key) + 6, first + len(form)):  # cut for good
                        told = secret.quote(raw[:at].decode(), cut=True)
                        self.assertRegex(told, r'"\[key\][\\0-9a-z#;]{0,6}$', (key, name))  # the rest of a form whose beginning ended the key

    def test_a_masked_capture_is_still_json_and_never_spells_the_key(self) -> None:
        for key, text in (('90000000', 'x'), ('n3secretkey', 'foo \n3secretkey'), ('/abc/defgh', 'see /abc/defgh'), ('u000asecret', 'a\nsecret'),
                          ('"quoted-key"', 'say "quoted-key"'), ('back\\slash-key', 'a back\\slash-key'), ('nvapi-SECRET', 'a\nvapi-SECRET'), ('11111111', '11111111')):
            raw = data({**chunk(text), 'created': 1_790_000_000}, STOP, DONE, eol='\n') + f': \n{key[1:]}\n\n'.encode()
            for slashes in (raw, raw.replace(b'/', b'\\/')):
                for at in range(0, len(slashes), 7):
                    name = self.here / 'capture'
                    secret = Secret(key)
                    capture = stream_client.Capture(str(name), secret, 1_000_000)
                    capture.line({'capture': 1, 'ms': 0, 'synthetic': None, 'status': 200, 'headers': {}})
                    for n, piece in enumerate(cut(slashes, [at])):
                        capture.read(float(n), piece)
                    capture.end(self.ENDED)
                    self.assertEqual((judged_offline(name)['outcome'], set(key) == {'1'} or key in name.read_text()), ('passed', set(key) == {'1'}), (key, at))
                    name.unlink()

    def test_a_key_too_short_to_be_masked_leaves_a_capture_readable(self) -> None:
        capture = stream_client.Capture(str(self.here / 'c'), Secret('x'), 1_000_000)
        capture.read(1.0, data(chunk('xxx')))
        self.assertEqual(json.loads((self.here / 'c').read_text())['text'], data(chunk('xxx')).decode())
        capture.drop()

    def test_a_run_of_backslashes_costs_a_capture_little(self) -> None:
        start = time.process_time()
        kept = Secret('sk-abcdefghijklm').mask('sk-abcdefghijklm' + '\\' * 200_000 + 'sk-abcdefghijklm', stars=True)
        self.assertEqual(kept, '*' * 16 + '\\' * 200_000 + '*' * 16)
        self.assertLess(time.process_time() - start, 5)

    def test_a_long_key_costs_a_capture_little(self) -> None:
        secret = Secret(''.join(random.Random(1).choices('ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789', k=1500)))
        text = ''.join(random.Random(2).choices('ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 ', k=60_000))
        with unittest.mock.patch.object(secret, '_goes_on', wraps=secret._goes_on) as tried:
            self.assertEqual(secret.begins_at(text, 1), len(text))
        self.assertLess(tried.call_count, 1500)  # at each place where its first character stands, and no other
        self.assertEqual(secret.begins_at(text + secret.key[:700], 1), len(text))

    def test_a_random_schedule_is_the_same_for_the_same_seed(self) -> None:
        logs = []
        for _ in range(2):
            process = subprocess.Popen([sys.executable, FIXTURE, '--port', '0', '--mode', 'random', '--seed', '5'], stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, env=environment())
            assert process.stdout
            port = int(process.stdout.readline().rsplit(':', 1)[1])
            for _ in range(3):
                stream(f'http://127.0.0.1:{port}{fixture_server.PATH}', 'm', 'p', idle=0.3, deadline=0.3)
            process.terminate()
            logs.append(process.communicate(timeout=30)[1])
        self.assertEqual(logs[0], logs[1])
        self.assertEqual(len(re.findall('^request [1-3]: mode [a-z0-9-]+$', logs[0], re.MULTILINE)), 3)

    def test_it_ends_quietly_and_listens_on_loopback_only(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            process = subprocess.Popen([sys.executable, FIXTURE, '--port', '0', '--fragment', 'random'], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True, env=environment())
            assert process.stdout
            port = int(process.stdout.readline().rsplit(':', 1)[1])
            self.assertTrue(stream(f'http://127.0.0.1:{port}{fixture_server.PATH}', 'm', 'p')['ok'])
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
            self.assertEqual((process.returncode, err), (0, ''))
        with fixture_server.server(0) as server:
            self.assertEqual((server.server_address[0], server.mode, server.delay, server.server_port), ('127.0.0.1', 'ok', 0.05, server.server_address[1]))
        for bad in ({'mode': 'x'}, {'port': 65536}, {'delay': 99}, {'fragment': 0}):
            with self.assertRaises(ValueError):
                fixture_server.server(**{'port': 0, **bad})  # type: ignore[arg-type]  # that is the point


# --- reports ------------------------------------------------------------------------------------------------------------


@functools.cache
def a_record(mode: str) -> str:
    """The record of one run against the fixture, as JSON."""
    with fixture(mode) as url:
        return json.dumps(stream(url, 'tiny', 'Say READY.', idle=2 if mode.startswith('stall') else 30, deadline=60))


def like(mode: str = 'ok', **changes: Any) -> dict[str, Any]:
    """Such a record with members changed; ``head`` is the mark of that name."""
    record: dict[str, Any] = json.loads(a_record(mode))
    if 'head' in changes:
        record['marks_ms']['head'] = changes.pop('head')
    return record | changes


def example(mode: str, **members: Any) -> stream_report.Run:
    """A run of this mode with other members; those of ``marks_ms`` and the like are merged into what is there."""
    record = like(mode)
    for name, value in members.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    return stream_report.Run(f'{mode}.json', record)


def example_offline(mode: str) -> stream_report.Run:
    """What judging a kept body gives: no request, no times, an unknown origin."""
    run = example(mode, synthetic=None, model=None, started_at=None, duration_ms=None, first_text_ms=None, event_gaps_ms=[])
    run.record['request'] = {}
    run.record['marks_ms'] = dict.fromkeys(run.record['marks_ms'])
    return run


class ReportTest(Directory):
    """``stream_report.py``; test_interop.py has the programs that read what it writes."""

    HOSTILE = '</script><img src=x onerror=alert(1)>|`a`|*b*|@user|<!--|&amp;|\x1b[2J\n::error::x\r\n%0A\u202e\ufffe]]>##[add-mask]x'

    def report(self, *args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return run(*args, program=REPORT, cwd=self.here, **kwargs)

    def put(self, *records: dict[str, Any], to: str = 'records') -> None:
        """Each record in a file of its own."""
        (self.here / to).mkdir(exist_ok=True)
        for at, record in enumerate(records, len(os.listdir(self.here / to))):
            (self.here / to / f'{at:03}.json').write_bytes(stream_client.to_json(record))

    def refused(self, line: str, *args: str) -> None:
        """These arguments are refused with this line, and nothing changes."""
        before = {path: path.read_bytes() for path in self.here.rglob('*') if path.is_file()}
        done = self.report(*args)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (2, '', f'stream_report.py: {line}\n'))
        self.assertEqual({path: path.read_bytes() for path in self.here.rglob('*') if path.is_file()}, before)

    def test_figures(self) -> None:
        # The rows of 81 of 263 and 15 of 148 are method 3 in table I of Newcombe 1998 (Statistics in Medicine 17:857)
        for passed, runs, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718), (29, 29, 0.8830, 1)]:
            found = stream_report.wilson(passed, runs)
            self.assertEqual((round(found[0], 4), round(found[1], 4)), (low, high))
        numbers: list[tuple[list[float], float, float | None]] = [([], 0.5, None), ([7], 0.95, 7), (list(range(20, 0, -1)), 0.95, 19), ([3, 1, 2], 0.5, 2)]
        for values, q, expected in numbers:
            self.assertEqual(stream_report.quantile(values, q), expected)
        self.assertEqual(stream_report.spread([None, 4, 1, None, 2, 3]), {'n': 4, 'median': 2.5, 'p95': 4})
        self.assertEqual(stream_report.spread([None]), {'n': 0, 'median': None, 'p95': None})

    def test_the_tables(self) -> None:
        self.put(
            like('broken', label='direct', synthetic=False, started_at='2026-11-30T10:00:09Z', head=90.0, first_text_ms=91.0, duration_ms=92.0),
            *(like(label='direct', synthetic=False, first_text_ms=float(n), duration_ms=2000.0 + n, head=n / 2, started_at=f'2026-11-30T10:00:{n:02}Z')
              for n in range(1, 4)),
            like(label='大阪 e\u0301', synthetic=False, started_at='2026-11-30T10:01:00Z', head=1.0, first_text_ms=1.0, duration_ms=1.0),
            like(started_at='2026-11-30T10:02:00Z', head=5.5, first_text_ms=6.5, duration_ms=7.5),
            like(synthetic=None, started_at=None, first_text_ms=None, duration_ms=None, head=None, model=None, request={}))
        done = self.report('records')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertEqual(done.stdout, '''\
Real runs: 5

started               label   model  verdict               headers   first text   duration   events  record
2026-11-30T10:00:01Z  direct  tiny   passed                    0.5          1.0       2001        2  records/001.json
2026-11-30T10:00:02Z  direct  tiny   passed                    1.0          2.0       2002        2  records/002.json
2026-11-30T10:00:03Z  direct  tiny   passed                    1.5          3.0       2003        2  records/003.json
2026-11-30T10:00:09Z  direct  tiny   completion: no_done      90.0         91.0       92.0        2  records/000.json
2026-11-30T10:01:00Z  大阪 e\u0301  tiny   passed                    1.0          1.0        1.0        2  records/004.json

label        runs   passed            share [95 %]   headers   p95   first text   p95   duration   p95
direct          4        3    75.0% [30.1%, 95.4%]       1.0   1.5          2.0   3.0       2002  2003
大阪 e\u0301          1        1  100.0% [20.7%, 100.0%]       1.0   1.0          1.0   1.0        1.0   1.0
all labels      5        4    80.0% [37.6%, 96.4%]       1.0   1.5          1.5   3.0       2002  2003

label       boundary    code      runs
direct      completion  no_done      1
all labels  completion  no_done      1

Runs of unknown origin: 1

started  label       model  verdict   headers   first text   duration   events  record
-        (no label)  -      passed          -            -          -        2  records/006.json

label        runs   passed            share [95 %]   headers   p95   first text   p95   duration   p95
(no label)      1        1  100.0% [20.7%, 100.0%]         -     -            -     -          -     -

Synthetic runs: 1

started               label       model  verdict   headers   first text   duration   events  record
2026-11-30T10:02:00Z  (no label)  tiny   passed        5.5          6.5        7.5        2  records/005.json

label        runs   passed            share [95 %]   headers   p95   first text   p95   duration   p95
(no label)      1        1  100.0% [20.7%, 100.0%]       5.5   5.5          6.5   6.5        7.5   7.5

Times in ms: median and 95th percentile (nearest rank) of the runs that passed. Share: 95 % Wilson interval.
''')
        told = json.loads(self.report('records', '--json').stdout)
        self.assertEqual({name: part['total']['runs'] for name, part in told['origins'].items()}, {'real': 5, 'unknown': 1, 'synthetic': 1})
        direct = told['origins']['real']['labels'][0]
        self.assertEqual((direct['label'], direct['passed'], direct['first_text_ms'], direct['failures']),
                         ('direct', 3, {'n': 3, 'median': 2.0, 'p95': 3.0}, [{'boundary': 'completion', 'code': 'no_done', 'runs': 1}]))
        self.assertEqual([r['source'] for r in told['origins']['real']['runs']], [f'records/{n:03}.json' for n in (1, 2, 3, 0, 4)])

    def test_failures_stand_in_the_order_of_boundaries(self) -> None:
        self.put(*(like(mode, synthetic=False) for mode in ('broken', 'malformed', 'http-error', 'malformed', 'length')))
        total = json.loads(self.report('--json', 'records').stdout)['origins']['real']['total']
        self.assertEqual([(f['boundary'], f['code'], f['runs']) for f in total['failures']], [
            ('status', 'http_status', 1), ('json', 'not_json', 2), ('completion', 'finish_not_accepted', 1), ('completion', 'no_done', 1)])
        self.assertEqual(stream_report.BOUNDARIES, stream_client.BOUNDARIES)

    def test_where_records_are_read(self) -> None:
        self.put(like(), like('broken'))
        self.put(like(), to='records/below')
        lines = b''.join(stream_client.to_json(like(label=f'l{n}'), one_line=True) for n in range(3))
        (self.here / 'lines.jsonl').write_bytes(lines)
        (self.here / 'records' / 'lines.jsonl').write_bytes(b'\n' + lines + b'\n')
        (self.here / 'records' / '.stream-1.tmp').write_bytes(b'{')
        (self.here / 'records' / 'note.txt').write_bytes(b'?')
        os.symlink('000.json', self.here / 'records' / 'again.json')
        self.put(like(), to='records/.hidden')

        def sources(*args: str, **kwargs: Any) -> list[str]:
            told = json.loads(self.report('--json', *args, **kwargs).stdout)
            self.assertEqual(told['skipped'], [])
            return sorted(r['source'] for r in told['origins']['synthetic']['runs'])

        self.assertEqual(sources('records'), ['records/.hidden/000.json', 'records/000.json', 'records/001.json', 'records/below/000.json', *(f'records/lines.jsonl:{n}' for n in (2, 3, 4))])
        self.assertEqual(sources('records/001.json', 'records/001.json', './records/001.json'), ['records/001.json'])
        self.assertEqual(sources('lines.jsonl'), ['lines.jsonl:1', 'lines.jsonl:2', 'lines.jsonl:3'])
        self.assertEqual(sources('-', input=lines.decode()), ['standard input:1', 'standard input:2', 'standard input:3'])
        self.assertEqual(sources('-', input=stream_client.to_json(like()).decode()), ['standard input'])
        pretty = self.here / 'other.json'
        pretty.write_text(json.dumps(like(), indent=4))
        self.assertEqual(sources('other.json'), ['other.json'])

    def test_what_is_no_record_is_named_and_skipped(self) -> None:
        self.put(like())
        whole = stream_client.to_json(like())
        bad: dict[str, bytes] = {
            'half.json': whole[:300], 'empty.json': b'', 'bytes.json': b'\xff', 'nan.json': whole.replace(b'"done": true', b'"done": NaN'),
            'deep.json': b'[' * 100_000, 'list.json': b'[]', 'later.json': whole.replace(b'"schema_version": 1', b'"schema_version": 2'),
            'true.json': whole.replace(b'"schema_version": 1', b'"schema_version": true'), 'short.json': b'{"ok": true}',
            'false.json': whole.replace(b'"ok": true', b'"ok": false'), 'negative.json': whole.replace(b'"content_events": 2', b'"content_events": -1'),
            'huge.json': whole.replace(b'"completion_tokens": 3', b'"completion_tokens": ' + b'9' * 5000),
            'infinite.json': re.sub(rb'"duration_ms": [0-9.]+', b'"duration_ms": 1e999', whole),
            'code.json': stream_client.to_json(like('broken')).replace(b'"no_done"', b'"' + b'n' * 65 + b'"'), 'a:1.json': b'', 'name\x1b[2J\n.json': b'x',
        }
        for name, raw in bad.items():
            (self.here / 'records' / name).write_bytes(raw)
        (self.here / 'records' / 'gone.json').symlink_to('nowhere')
        os.mkfifo(self.here / 'records' / 'fifo.json')
        (self.here / 'records' / 'linked').symlink_to('.')
        (self.here / 'records' / 'capture.json').write_bytes(b'{"capture": 1, "status": 200, "headers": {}}\n{"ms": 1, "text": ""}\n')
        done = self.report('records', '--json')
        told = json.loads(done.stdout)
        self.assertEqual((done.returncode, told['origins']['synthetic']['total']['runs']), (0, 1))
        said = dict(re.findall(r'^stream_report\.py: skipped records/(.*?): is no record: (.*)$', done.stderr, re.MULTILINE))
        self.assertIn('records/capture.json: is no record but a capture, which stream_client.py --input judges\n', done.stderr)
        self.assertEqual(re.findall('(.*): is no regular file', done.stderr), [f'stream_report.py: skipped records/{name}.json' for name in ('fifo', 'gone')])
        self.assertIn('records/linked: is a link to a directory\n', done.stderr)
        self.assertEqual(done.stderr.count('\n'), len(bad) + 4)
        self.assertEqual(set(said), {name.replace('\x1b', '\\x1b').replace('\n', '\\x0a') for name in bad})
        self.assertEqual({name: said[name] for name in ('later.json', 'true.json', 'short.json', 'false.json', 'list.json', 'deep.json', 'bytes.json', 'nan.json',
                                                        'negative.json')}, {
            'later.json': 'schema_version 2 is later than 1, which this program knows', 'true.json': 'schema_version: true is not 1', 'short.json': 'has no outcome',
            'false.json': 'outcome: "passed" does not match ^(?!passed$)', 'list.json': 'an array is no object', 'deep.json': 'nested too deeply',
            'bytes.json': 'not UTF-8', 'nan.json': 'NaN is not JSON', 'negative.json': 'content_events: -1 is out of range'})
        self.assertEqual(len(told['skipped']), len(bad) + 4)

    def test_what_is_refused(self) -> None:
        self.put(like())
        (self.here / 'bad.json').write_text('{')
        (self.here / 'empty').mkdir()
        self.refused('no PATH: name records, directories, or - for lines on standard input')
        self.refused('missing: there is no such file or directory', 'missing')
        self.refused('unrecognized arguments: --jso', 'records', '--jso')
        self.refused('argument --compare: expected 2 arguments', 'records', '--compare', 'a')
        self.refused('--html and --junit name one file', 'records', '--html', 'x', '--junit', './x')
        with unittest.mock.patch.dict(os.environ, {'GITHUB_STEP_SUMMARY': str(self.here / 'x')}):
            self.refused('GITHUB_STEP_SUMMARY and --html or --junit name one file', 'records', '--summary', '--html', 'x')
        for out in ('--junit', '--html'):
            self.refused('records: names a directory', 'records', out, 'records')
            self.refused('bad.json: exists; --force replaces it', 'records', out, 'bad.json')
            self.refused('records/000.json: is a record that is read here', 'records', out, 'records/000.json', '--force')
            self.refused('no/where: cannot be written: No such file or directory', 'records', out, 'no/where')
        done = self.report('bad.json', 'empty')
        self.assertEqual((done.returncode, done.stdout, done.stderr.splitlines()[1:]), (2, '', [
            'stream_report.py: skipped empty: holds no .json or .jsonl file', 'stream_report.py: there is no record to report']))

    def test_files_are_created_exclusively_unless_forced(self) -> None:
        self.put(like())
        for out in ('--junit', '--html'):
            self.assertEqual(self.report('records', out, 'out').returncode, 0)
            written = (self.here / 'out').read_bytes()
            self.assertEqual(self.report('records', out, 'out').returncode, 2)
            (self.here / 'out').write_bytes(b'old')
            done = self.report('records', out, 'out', '--force')
            self.assertEqual((done.returncode, done.stdout, (self.here / 'out').read_bytes()), (0, '', written))
            self.assertEqual(self.report('records', out, '-').stdout.encode(), written)
            (self.here / 'out').unlink()
        self.assertEqual(sorted(path.name for path in self.here.iterdir()), ['records'])

    def test_two_labels_compared(self) -> None:
        for n in range(1, 5):
            self.put(like(label='direct', synthetic=False, head=float(n), first_text_ms=10.0 * n, duration_ms=100.0))
            self.put(like('ok' if n > 1 else 'broken', label='proxied', synthetic=False, head=2.0 * n, first_text_ms=30.0 * n, duration_ms=400.0))
        told = json.loads(self.report('records', '--compare', 'direct', 'proxied', '--json').stdout)
        self.assertEqual((told['a']['passed'], told['b']['passed'], told['shares_apart'], told['origin']), (4, 3, False, 'real'))
        self.assertEqual((told['a']['first_text_ms']['median'], told['b']['first_text_ms']['median']), (25.0, 90.0))
        text = self.report('records', '--compare', 'direct', 'proxied').stdout.splitlines()
        rows = {re.split('  +', line)[0]: re.split('  +', line)[1:] for line in text}
        self.assertEqual((rows['passed'], rows['time to headers, median'], rows['duration, p95'], rows['proxied']), (
            ['100.0% [51.0%, 100.0%]', '75.0% [30.1%, 95.4%]', 'intervals overlap'], ['2.5', '6.0', 'x2.4'], ['100.0', '400.0', 'x4'], ['completion', 'no_done', '1']))

    def test_what_cannot_be_compared(self) -> None:
        other = like(label='b', synthetic=False)
        changes: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
            ('origin', lambda r: r.update(synthetic=True)), ('messages', lambda r: r['request'].update(messages_sha256='0' * 64)),
            ('model', lambda r: r.update(model='other')), ('sampling', lambda r: r['request']['sampling'].update(max_tokens=1)),
            ('limits', lambda r: r['request']['limits'].update(max_line_chars=1)), ('clocks', lambda r: r['request']['clocks_s'].update(idle=1)),
            ('policy', lambda r: r['request']['policy'].update(tolerate=['no_done'])),
        ]
        for name, change in changes:
            for label in ('a', 'b'):  # the odd one may be on the first side too
                odd = like(label=label, synthetic=False)
                change(odd)
                shutil.rmtree(self.here / 'records', ignore_errors=True)
                self.put(like(label='a', synthetic=False), other, odd)
                done = self.report('records', '--compare', 'a', 'b')
                self.assertEqual((done.returncode, done.stdout), (2, ''))
                self.assertRegex(done.stderr, f'^stream_report\\.py: --compare: {name} differ(, in [a-z_]+)?: .* in records/000.json, .* in records/002.json\n$')
        one, two = like(label='a'), like(label='b')
        one['request']['sampling']['seed'], two['request']['sampling']['seed'] = 1, '1'
        shutil.rmtree(self.here / 'records')
        self.put(one, two)
        self.refused('--compare: sampling differ, in seed: 1 in records/000.json, "1" in records/001.json', 'records', '--compare', 'a', 'b')
        for name, members in (('sampling', {'seed': None}), ('limits', {'more': None}), ('policy', {'more': None})):  # null and absent are two things
            odd = like(label='b', synthetic=False)
            odd['request'][name] |= members
            shutil.rmtree(self.here / 'records')
            self.put(like(label='a', synthetic=False), other, odd)
            self.refused(f'--compare: {name} differ, in {next(iter(members))}: absent in records/000.json, null in records/002.json', 'records', '--compare', 'a', 'b')
        shutil.rmtree(self.here / 'records')
        for label, reasons in (('a', ['stop', 'length', 'eos']), ('b', ['stop', 'eos', 'length'])):
            record = like(label=label)
            record['request']['policy']['accept_finish'] = reasons
            self.put(record)
        self.assertEqual(self.report('records', '--compare', 'a', 'b').returncode, 0)
        self.put(like(label='off', request={}))
        self.refused('--compare: records/002.json was judged offline, so what was asked is not known', 'records', '--compare', 'a', 'off')
        self.refused('--compare: no record has the label c; there are: a, b, off', 'records', '--compare', 'a', 'c')
        self.refused('--compare: needs two labels', 'records', '--compare', 'a', 'a')

    def test_hostile_text_stays_text(self) -> None:
        hostile = like('broken', label=self.HOSTILE, model=self.HOSTILE, text=self.HOSTILE, error=self.HOSTILE, notes={'n': self.HOSTILE})
        hostile['failure'] |= {'message': self.HOSTILE, 'hint': self.HOSTILE}
        self.put(hostile)
        table = self.report('records').stdout
        summary = self.report('records', '--summary').stdout
        for out in (table, summary, self.report('records', '--json').stdout):
            self.assertNotIn('##[', out)
        for out in (table, summary):
            self.assertIsNone(re.search('[\x00-\x09\x0b-\x1f\x7f\u202e\ufffe]', out))
        commands = [line for line in summary.splitlines() if line.startswith('::')]
        self.assertEqual(len(commands), 1)
        self.assertRegex(commands[0], '^::error title=completion%3A no_done \\(synthetic\\)::records/000.json: .*%250A')
        self.assertTrue(all(line.count('|') in (0, 5, 11) for line in summary.splitlines() if not line.startswith('::')))
        shutil.rmtree(self.here / 'records')
        self.put(*(like('broken', label=label, text='a\n ::error::x\n::error::y') for label in ('::error::x', ' ::add-mask::e')))
        for out in ('--html', '--junit', '--compare', ''):
            args = [out, '::error::x', ' ::add-mask::e'] if out == '--compare' else [out, '-'] if out else []
            done = self.report('records', *args)
            self.assertEqual(done.returncode, 0)
            self.assertIsNone(re.search(r'^\s*::', done.stdout, re.MULTILINE), out)

    def test_labels_that_read_as_words_of_the_table(self) -> None:
        self.put(like(label='all labels'), like(label='(no label)'), like(), like(label='"all labels"'))
        told = self.report('records').stdout.split('p95\n')[1].splitlines()
        self.assertEqual([re.split('  +', line)[:2] for line in told[:5]], [['""all labels""', '1'], ['"(no label)"', '1'], ['"all labels"', '1'], ['(no label)', '1'], ['all labels', '4']])

    def test_lines_after_one_that_is_no_record(self) -> None:
        good = stream_client.to_json(like(), one_line=True).decode()
        for bad in ('{\n', '?\n', f'{" " * 70_000_000}{good}'):
            done = self.report('-', '--json', input=bad + good * 2)
            told = json.loads(done.stdout)
            self.assertEqual(([r['source'] for r in told['origins']['synthetic']['runs']], len(told['skipped'])), (['standard input:2', 'standard input:3'], 1))
        half = stream_client.to_json(like()).decode().splitlines(keepends=True)[:5]
        for bad in ('[\n', '{\n?\n', '{\n\n', '{\n}\n', '{"capture": 1}\n', ''.join(half), '\ufeff'):
            told = json.loads(self.report('-', '--json', input=bad + good + '\ufeff' + good).stdout)
            self.assertEqual(len(told['origins']['synthetic']['runs']), 2, bad)
        told = json.loads(self.report('-', '--json', input=good + ''.join(half)).stdout)
        self.assertEqual(len(told['origins']['synthetic']['runs']), 1)

    def test_a_record_behind_a_byte_order_mark(self) -> None:
        for one_line in (False, True):
            (self.here / 'r.json').write_bytes(b'\xef\xbb\xbf' + stream_client.to_json(like(), one_line=one_line))
            self.assertEqual(self.report('r.json', '--json').stderr, '')

    def test_the_summary_goes_where_github_wants_it(self) -> None:
        self.put(like(synthetic=False), *(like('broken', synthetic=False) for _ in range(12)))
        (self.here / 'records' / 'bad.json').write_text('{')
        (self.here / 'summary').write_text('before\n')
        done = self.report('records', '--summary', env={'GITHUB_STEP_SUMMARY': str(self.here / 'summary')})
        self.assertEqual([line[:9] for line in done.stdout.splitlines()], ['::error t'] * 10 + ['::warning'])
        told = (self.here / 'summary').read_text()
        self.assertTrue(told.startswith('before\n### Real runs: 1 of 13 passed\n'))
        self.assertIn('- skipped: `records/bad.json: is no record:', told)
        done = self.report('records', '--summary', env={'GITHUB_STEP_SUMMARY': '/nowhere/x'})
        self.assertEqual((done.returncode, done.stderr.splitlines()[-1]), (2, 'stream_report.py: /nowhere/x: cannot be written: No such file or directory'))

    def test_junit_keeps_failed_and_not_run_apart(self) -> None:
        with socket.socket() as closed:
            closed.bind(('127.0.0.1', 0))
            refused = stream(f'http://127.0.0.1:{closed.getsockname()[1]}/x', 'm', 'p')
        self.put(like(synthetic=False), like('broken', synthetic=False), refused)
        (self.here / 'records' / 'bad.json').write_text('{')
        root = ET.fromstring(self.report('records', '--junit', '-').stdout)
        self.assertEqual([(s.get('name'), s.get('tests'), s.get('failures'), s.get('errors'), s.get('skipped')) for s in root],
                         [('real: (no label)', '3', '1', '1', '0'), ('no records', '1', '0', '0', '1')])
        self.assertEqual([[child.tag for child in case if child.tag != 'properties'] for case in root.iter('testcase')], [[], ['failure'], ['error'], ['skipped']])

    def test_a_reader_that_leaves_and_a_full_disk(self) -> None:
        self.put(*(like(label='x' * 200) for _ in range(100)))
        with subprocess.Popen([sys.executable, REPORT, 'records'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.here, env=environment()) as process:
            assert process.stdout and process.stderr
            process.stdout.close()
            self.assertEqual((process.stderr.read(), process.wait(30)), (b'', 0))
        for closed, args, status in (('<&-', '-', 2), ('>&-', 'records', 2), ('>&-', 'records --junit x', 0), ('2>&-', 'records', 0), ('>&- 2>&-', 'nothing', 2)):
            ran = subprocess.run(f'exec {shlex.quote(sys.executable)} {REPORT} {args} {closed}', shell=True, cwd=self.here, env=environment(),
                                 capture_output=True, text=True, timeout=60)
            said = f'stream_report.py: standard {"input" if args == "-" else "output"} is closed\n' if status == 2 and '2>' not in closed else ''
            self.assertEqual((ran.returncode, ran.stderr), (status, said), closed)
        if os.path.exists('/dev/full'):
            with open('/dev/full', 'wb') as full:
                done = self.report('records', stdout=full, stderr=subprocess.PIPE, capture_output=False)
            self.assertEqual((done.returncode, done.stderr), (2, 'stream_report.py: standard output: No space left on device\n'))

    def test_nothing_that_is_read_is_written_to(self) -> None:
        lines = stream_client.to_json(like(), one_line=True)
        (self.here / 'lines.jsonl').write_bytes(lines)
        for args, env in ((('-', '--html', 'lines.jsonl', '--force'), {}), (('lines.jsonl', '--summary'), {'GITHUB_STEP_SUMMARY': 'lines.jsonl'})):
            with open(self.here / 'lines.jsonl', 'rb') as stdin:
                done = self.report(*args, env=env, stdin=stdin)
            self.assertEqual((done.returncode, done.stderr), (2, 'stream_report.py: lines.jsonl: is a record that is read here\n'))
            self.assertEqual((self.here / 'lines.jsonl').read_bytes(), lines)
        self.assertEqual(self.report('lines.jsonl', '--json', '--html', '-').stderr, 'stream_report.py: only one output can go to standard output\n')

    def test_a_page_is_for_its_owner_and_whole_or_not_at_all(self) -> None:
        self.put(*(like(label='x' * 200) for _ in range(100)))
        done = self.report('records', '--html', 'page.html', '--json')
        self.assertEqual((done.returncode, stat.S_IMODE((self.here / 'page.html').stat().st_mode)), (0, 0o600))
        with subprocess.Popen([sys.executable, REPORT, 'records', '--json', '--junit', 'j.xml'], stdout=subprocess.PIPE, cwd=self.here, env=environment()) as process:
            assert process.stdout
            process.stdout.close()
            self.assertEqual(process.wait(30), 0)
        self.assertTrue((self.here / 'j.xml').exists())  # files are written first
        code = """
import os, signal, sys
import stream_report
def cut(runs, skipped):
    yield 'half'
    os.kill(os.getpid(), int(sys.argv[1]))
    yield 'a page'
stream_report.page = cut
sys.exit(stream_report.main(['records', '--html', 'cut.html']))
"""
        for number in (signal.SIGTERM, signal.SIGINT):
            ended = subprocess.run([sys.executable, '-c', code, str(int(number))], cwd=self.here, env=environment(PYTHONPATH=str(ROOT)), timeout=60)
            self.assertEqual((ended.returncode, self.names()), (128 + number, ['j.xml', 'page.html', 'records']))

    def test_a_pipe_that_takes_a_part(self) -> None:
        self.put(*(like(label='x' * 200) for _ in range(400)))
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        done = self.report('records', '--json', stdout=writing, stderr=subprocess.PIPE, capture_output=False, env={'PYTHONUNBUFFERED': '1'})
        os.close(reading)
        os.close(writing)
        self.assertEqual((done.returncode, done.stderr), (2, 'stream_report.py: standard output: Resource temporarily unavailable\n'))

    def test_records_at_the_edges(self) -> None:
        more = like(usage={**like()['usage'], 'details': {}, 'service_tier': 'x'})
        part = like()
        part['delivery']['content_reads'] = None
        long = like('broken', label='é' * 100_000, model='字' * 100_000)
        long['failure']['message'] = long['error'] = 'é' * 100_000
        self.put(more, part, long, like(completion_tokens=10**4000, usage={**like()['usage'], 'completion_tokens': 10**4000}), like() | {'added': {'later': 1}})
        other = like('broken')
        other['failure']['code'] = 'other'
        self.put(other)
        for output in ('--html', '--junit'):
            self.assertEqual(self.report('records', output, '-').returncode, 0)
        done = self.report('records', '--summary')
        self.assertEqual((done.returncode, done.stderr), (0, 'stream_report.py: skipped records/005.json: is no record: outcome and failure.code differ\n'))
        self.assertLess(max(map(len, self.report('records').stdout.splitlines())), 400)

    def test_a_summary_is_bounded(self) -> None:
        many = [stream_client.to_json(like(mode, label=f'gpu-node-{n:05}.cluster.example'), one_line=True) for n in range(1000) for mode in ('ok', 'broken')]
        (self.here / 'lines.jsonl').write_bytes(b''.join(many) + b'x\n' * 1000)
        done = self.report('lines.jsonl', '--summary')
        self.assertLess(len(done.stdout), 100_000)
        for said in ('and 901 labels more', 'and 900 more', '- and 900 more', '### Synthetic runs: 1000 of 2000 passed'):
            self.assertIn(said, done.stdout)

    def test_shares_near_all_and_none(self) -> None:
        for passed, runs, said in ((9_999, 10_000, '>99.9% [99.9%, >99.9%]'), (1, 10_000, '<0.1% [<0.1%, 0.1%]'), (10, 10, '100.0% [72.2%, 100.0%]'), (0, 10, '0.0% [0.0%, 27.8%]')):
            low, high = stream_report.wilson(passed, runs)
            self.assertEqual(stream_report.share({'share': passed / runs, 'share_low': low, 'share_high': high}), said)

    def test_columns(self) -> None:
        for text, columns in (('abc', 3), ('大阪', 4), ('e\u0301', 1), ('\u1112\u1161\u11ab', 2), ('한', 2)):
            self.assertEqual(stream_report.width(text), columns)
        for text, cut_to in (('abcdef', 'abc…'), ('大阪市', '大…'), ('abcd', 'abcd')):
            self.assertEqual(stream_report.fitted(text, 4), cut_to)

    def test_progress(self) -> None:
        self.put(like(), like())
        (self.here / 'records' / '001a.json').write_bytes(b'?')
        with unittest.mock.patch.object(stream_report, 'PROGRESS_S', 0), contextlib.redirect_stderr(io.StringIO()) as err:
            list(stream_report.report([str(self.here / 'records')]))
        self.assertEqual(re.findall('[0-9]+ records read.*', err.getvalue()), ['1 records read', '2 records read', '2 records read, 1 skipped'])

    def test_the_schema(self) -> None:
        done = self.report('--schema')
        self.assertEqual((done.returncode, json.loads(done.stdout)), (0, SCHEMA))
        self.assertEqual(set(SCHEMA['properties']), RECORD_KEYS)
        seen: set[str] = set()

        def keywords(schema: Any) -> None:
            seen.update(schema)
            for name in ('properties', 'additionalProperties', 'items', 'if', 'then', 'else'):
                for below in schema.get(name, {}).values() if name == 'properties' else [schema[name]] if name in schema else []:
                    keywords(below)

        keywords(SCHEMA)
        self.assertEqual(seen - {'$schema', 'title', 'description'}, {
            'type', 'const', 'enum', 'pattern', 'required', 'properties', 'additionalProperties', 'items', 'minimum', 'maximum', 'if', 'then', 'else'})

    @unittest.skipIf(RECORD_SCHEMA is None, 'needs jsonschema')
    def test_the_schema_means_what_json_schema_says(self) -> None:
        others: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2.5, 1e12 + 0.5, '', 'passed', 'x y', 'a' * 64, 'a\n', [], [1], ['x'], {}, {'x': 1}, {'x': 'y'})

        def mutants(value: Any) -> Iterator[Any]:
            yield from others
            if isinstance(value, dict):
                for name in value:
                    yield {k: v for k, v in value.items() if k != name}
                    for mutant in mutants(value[name]):
                        yield value | {name: mutant}
                yield value | {'added': 1}
            elif isinstance(value, list) and value:
                for mutant in mutants(value[0]):
                    yield [mutant, *value[1:]]

        both = [0, 0]
        rules = {name: like()['request'][name] for name in ('policy', 'limits')}
        offline = like(request={}, input={'kind': 'body', **rules})
        wanted = [(like(), set(SCHEMA['properties'])), (like('broken'), {'ok', 'outcome', 'failure', 'error'}), (offline, {'request', 'input'})]
        for record, names in wanted:
            for mutant in (record | {name: mutant} for name in names for mutant in mutants(record.get(name))):
                valid = RECORD_SCHEMA.is_valid(mutant)
                self.assertEqual(invalid(mutant, SCHEMA) is None, valid, (mutant, invalid(mutant, SCHEMA)))
                both[valid] += 1
        self.assertGreater(min(both), 100)

    @unittest.skipUnless(LONG, 'STREAM_LONG=1 runs it')
    def test_ten_thousand_records(self) -> None:
        self.put(*(like(('ok', 'broken', 'length')[n % 3], label=f'host-{n % 7}', synthetic=False, first_text_ms=float(n)) for n in range(10_000)))
        self.assertEqual(self.report('records').stdout.splitlines()[0], 'Real runs: 10000')
        page = self.report('records', '--html', '-').stdout
        self.assertLess(len(page), 4_000_000)


class PageTextTest(unittest.TestCase):
    """What the page says, read as text."""

    def told(self, *runs: stream_report.Run, skipped: Sequence[str] = ()) -> str:
        """The page; the same runs give the same bytes, and nothing is drawn outside its axis."""
        text = ''.join(stream_report.page(runs, skipped))
        self.assertEqual(text, ''.join(stream_report.page(runs, skipped)))
        places = [float(place) for place in re.findall(r' x[12]?="([-\d.naif]+)%"', text)]
        self.assertTrue(all(0 <= place <= 100 for place in places), places)
        return text

    def phases(self, run: stream_report.Run) -> list[str]:
        return re.findall(r'<rect [^>]+><title>(.+?): [^<]+</title>', self.told(run))

    def test_origins_are_never_counted_together(self) -> None:
        runs = [example('ok', synthetic=False), example('broken', synthetic=False), *[example('ok')] * 5, *[example_offline('ok')] * 3, example_offline('broken')]
        text = self.told(*runs, skipped=['a', 'b'])
        rows = re.findall(r'<td class=n>([\d,]+)</td><td class=n>([\d,]+)</td><td class=n>([\d.]+%)</td><td class=n>([^<]+)</td>', text)
        self.assertEqual(rows, [('2', '1', '50.0%', '9.5% to 90.5%'), ('4', '3', '75.0%', '30.1% to 95.4%'), ('5', '5', '100.0%', '56.6% to 100.0%')])
        self.assertEqual(re.findall(r'<li><a href="#(\w+)">[^<]+</a>: ([^<]+)', text),
                         [('real', '1 of 2 passed'), ('unknown', '3 of 4 passed'), ('synthetic', '5 of 5 passed'), ('skipped', '2')])
        sections = dict(re.findall(r'<h2 id="(\w+)">(.*?)(?=<h2|\Z)', text, re.DOTALL))
        self.assertEqual({name: section.count('<article') for name, section in sections.items()}, {'real': 2, 'unknown': 4, 'synthetic': 5, 'skipped': 0})

    def test_labels_have_rows_of_their_own_and_a_sum(self) -> None:
        text = self.told(example('ok', label='a'), example('ok', label=None), example('broken', label='no label'))
        self.assertEqual(re.findall(r'<th scope="row">(?:<a [^>]+>)?([^<]+)(?:</a>)?</th><td class=n>(\d)</td><td class=n>(\d)</td><td class=n>\d+\.', text),
                         [('a', '1', '1'), ('no label', '1', '0'), ('no label', '1', '1'), ('All labels', '3', '2')])

    def test_the_last_phase_is_the_one_that_was_not_finished(self) -> None:
        def cut(last: str | None, url: str = 'http://127.0.0.1/', path: str = 'direct') -> stream_report.Run:
            marks = like('broken')['marks_ms']
            names = [name for name in marks if name != 'end']
            reached = names[:names.index(last) + 1] if last else []
            return example('broken', request={'url': url, 'path_taken': path}, marks_ms={name: marks[name] if name in reached else None for name in names})

        for run, expected in (
                (cut(None), ['resolving']), (cut('resolved'), ['resolving', 'connecting']),
                (cut(None, path='ssh'), ['resolving']), (cut('resolved', path='ssh'), ['resolving', 'opening the SSH tunnel']),
                (cut('connected', 'https://host/'), ['resolving', 'connecting', 'TLS handshake']),
                (cut('connected'), ['resolving', 'connecting', 'sending']),
                (cut('sent'), ['resolving', 'connecting', 'sending', 'waiting for the head']),
                (cut('head'), ['resolving', 'connecting', 'sending', 'waiting for the head', 'to the first event']),
                (cut('first_event'), ['resolving', 'connecting', 'sending', 'waiting for the head', 'to the first event', 'to the first text']),
                (example('length'), ['resolving', 'connecting', 'sending', 'waiting for the head', 'to the first event', 'to the first text', 'text',
                                     'to more text or the finish', 'to [DONE]', 'to the end'])):
            with self.subTest(expected=expected):
                self.assertEqual(self.phases(run), expected)
        self.assertEqual(self.phases(example('ok')), self.phases(example('length')))

    def test_times_of_every_kind(self) -> None:
        marks = like('ok')['marks_ms']
        for name, value in (('zero', 0), ('huge', 1e12), ('whole', 10**12), ('tiny', 1e-300)):
            with self.subTest(name=name):
                run = example('ok', marks_ms=dict.fromkeys(marks, value), first_text_ms=value, duration_ms=value, event_gaps_ms=[value] * 5)
                self.assertNotRegex(self.told(*[run] * 4, example('ok')), r'\b(nan|inf)\b')
        backwards = dict(zip(marks, range(len(marks), 0, -1), strict=True))
        self.assertIn('first\xa0text\xa013.0\xa0ms', self.told(example('ok', marks_ms=backwards)))
        self.assertIn('This record has no times', self.told(example_offline('ok')))
        self.assertNotIn('<svg', self.told(example_offline('ok')))

    def test_one_outlier_leaves_the_others_their_axis(self) -> None:
        def lasting(ms: float) -> stream_report.Run:
            return example('ok', marks_ms={'end': ms}, duration_ms=ms)

        text = self.told(*map(lasting, (1000, 1100, 1200, 1300, 1400, 1500, 1600, 1700, 1800, 1900)), lasting(60_000))
        timelines = [figure for figure in text.split('<figure>')[1:] if 'aria-labelledby' in figure]
        self.assertEqual(Counter(re.findall(r'>([^<]+)</text></svg>', ''.join(timelines))), {'2 s': 10, '60 s': 1})
        self.assertEqual([('axis of its own' in figure) for figure in timelines], [True, *[False] * 10], 'the slowest is first')

    def test_many_events_and_many_runs_make_a_small_page(self) -> None:
        self.assertLess(len(self.told(example('ok', event_gaps_ms=[0.05] * 300_000, content_events=300_001))), 100_000)
        kinds = ['ok'] * 5000 + ['broken'] * 4990 + ['length'] * 9 + ['error-first']
        text = self.told(*(example(mode) for mode in kinds))
        self.assertLess(len(text), 2_000_000)
        self.assertIn(f'{stream_report.MAX_DRAWN} of these 10,000 runs are shown one by one', text)
        self.assertEqual(Counter(re.findall(r'<h4><span class="\w+">([^<]+)', text)), {
            '✕ failed at completion: no_done': stream_report.MAX_DRAWN - 10, '✕ failed at completion: finish_not_accepted': 9, '✕ failed at protocol: server_error': 1})
        self.assertIn(f'<td>{html.escape(FAILURES["no_done"].hint)}</td>', text)

    def test_a_long_answer_is_cut_and_says_so(self) -> None:
        text = self.told(example('ok', text='é<' * 15_000))
        self.assertIn('Answer text (30,000 characters, the first 20,000 of them)', text)
        self.assertEqual(text.count('é&lt;'), 10_000)
        self.assertNotIn('<pre', self.told(example('ok', text='')))

    def test_many_files_that_are_no_records(self) -> None:
        self.assertIn('And 50 more.', self.told(skipped=['x'] * 250))


# --- the judge ----------------------------------------------------------------------------------------------------------


def naive(url: str, model: str, fault: str = '', idle: float = 2.0, deadline: float = 2.5) -> bool:
    """A plain client of some care, and with one fault where one is named: whether it takes the answer for complete."""
    start, raw, cut_short = time.monotonic(), b'', False
    host, path = url.split('/')[2], '/' + url.split('/', 3)[3]
    connection = http.client.HTTPConnection(host, timeout=idle)
    try:
        connection.request('POST', path, json.dumps({'model': model, 'stream': True, 'messages': []}))
        response = connection.getresponse()
        if response.status in (301, 302, 307) and fault == 'follows_redirects':
            return naive(f'http://{host}{response.headers["Location"]}', model)
        if (response.status != 200 and fault != 'ignores_status') or (
                not response.headers.get('Content-Type', '').lower().startswith('text/event-stream') and fault != 'ignores_content_type'):
            return False
        while b'[DONE]\r\n\r\n' not in raw:
            if time.monotonic() - start > deadline and fault != 'no_deadline':
                return False
            piece = response.read1(65536)
            raw += piece
            if not piece:
                cut_short = bool(response.length)
                break
    except (OSError, http.client.HTTPException):
        cut_short = True
    finally:
        connection.close()
    if cut_short and fault == 'restarts_and_appends':
        return naive(url, model)
    try:
        return naive_verdict(raw.decode('utf-8', 'replace' if fault == 'replaces_bad_utf8' else 'strict'), fault, cut_short)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def naive_events(text: str, fault: str) -> list[tuple[str, str]]:
    """Type and data of the events that the plain client finds in a body."""
    lines = text.splitlines() if fault == 'splits_on_u2028' else re.split('\r\n|\r|\n', text)
    lines = [*lines, ''] if fault == 'flushes_the_last_event' else lines if fault == 'splits_on_u2028' else lines[:-1]
    events, kind = [], ''
    buffer: list[str] = []
    for line in lines:
        name, _, value = line.partition(':')
        if not line:
            events += [(kind, '\n'.join(buffer))] if buffer else []
            buffer, kind = [], ''
        elif name == 'data':
            buffer.append(value.removeprefix(' '))
        elif name == 'event':
            kind = value.strip()
    return events


def naive_verdict(text: str, fault: str, cut_short: bool) -> bool:
    """What the plain client makes of a body."""
    answer, finish, done, identity = '', None, False, None
    for kind, value in naive_events(text, fault):
        if value == '[DONE]':
            done = True
            break
        if not value:
            continue
        try:
            found = json.loads(value)
        except ValueError:
            if fault == 'drops_malformed_events':
                continue
            return False
        if (kind == 'error' or found.get('error') is not None or (not found.get('choices') and 'message' in found)) and fault != 'ignores_errors':
            return False
        for choice in (found.get('choices') or [])[: 1 if fault == 'looks_at_the_first_choice' else None]:
            delta = choice.get('delta') or {}
            if (choice.get('index') or ('content' in delta and len(found['choices']) > 1)) and fault != 'looks_at_the_first_choice':
                return False
            if delta.get('tool_calls') and fault != 'ignores_tool_calls':
                return False
            if delta.get('content') and finish and fault != 'appends_after_the_finish':
                return False
            if delta.get('content') and found.get('id') and fault != 'ignores_ids':
                if identity not in (None, found['id']):
                    return False
                identity = found['id']
            answer += delta.get('content') or ''
            finish = choice.get('finish_reason') or finish
    if not answer.strip() and fault != 'accepts_white_space':
        return False
    if fault == 'takes_the_end_for_done' and not cut_short:
        return True
    if fault == 'trusts_a_short_body' and cut_short and finish == 'stop':
        return True
    return done and (finish == 'stop' or fault == 'takes_done_alone' or (fault == 'ignores_the_reason' and finish is not None))


# Each fault, with the modes that are meant to catch it.
WRONG_CLIENTS = {
    'takes_the_end_for_done': ('broken', 'close-midway', 'cut-in-event', 'eof-after-finish'),
    'takes_done_alone': ('done-without-finish', 'finish-alias'),
    'ignores_the_reason': ('length', 'content-filter', 'abort', 'network-error'),
    'ignores_errors': ('error-after-stop', 'error-empty', 'error-flat'),
    'drops_malformed_events': ('malformed', 'json-cut', 'ping-as-data'),
    'splits_on_u2028': ('separators',),
    'replaces_bad_utf8': ('bad-utf8', 'latin-1', 'overlong-utf8'),
    'flushes_the_last_event': ('done-not-ended', 'done-one-newline'),
    'follows_redirects': ('redirect-moved',),
    'trusts_a_short_body': ('cut-after-finish', 'done-cut-in-chunk'),
    'restarts_and_appends': ('cut-once',),
    'no_deadline': ('endless-comments', 'drip-line'),
    'ignores_status': ('http-500-streamed', 'http-201'),
    'ignores_content_type': ('plain-200', 'no-type'),
    'ignores_tool_calls': ('tool-call',),
    'accepts_white_space': ('spaces-only',),
    'appends_after_the_finish': ('text-after-finish',),
    'looks_at_the_first_choice': ('choices-two', 'index-one'),
    'ignores_ids': ('id-changed', 'stitched'),
}


def patient(call: Callable[[], bool], seconds: float) -> bool | None:
    """What a client that is a Python function says, None if it says nothing in time."""
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return said[0] if said else None


class JudgeTest(Directory):
    """The judge is judged: deliberately wrong clients, one fault each, are caught by the modes meant for them."""

    def test_the_plain_client_without_a_fault_agrees(self) -> None:
        modes = sorted({mode for modes in WRONG_CLIENTS.values() for mode in modes} | {'ok', 'lf', 'content-length', 'http-1-0', 'reasoning'})
        for result in fixture_server.judge(lambda url, model, _: patient(lambda: naive(url, model), 9), jobs=16, modes=modes):
            self.assertEqual(result.verdict, 'agrees', result)

    def test_each_fault_is_caught(self) -> None:
        self.assertGreaterEqual(len(WRONG_CLIENTS), 12)

        def caught(fault: str) -> list[fixture_server.Judged]:
            def ask(url: str, model: str, _mode: str) -> bool | None:
                return patient(lambda: naive(url, model, fault), 4.5)

            return fixture_server.judge(ask, jobs=4, modes=WRONG_CLIENTS[fault])

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for fault, results in zip(WRONG_CLIENTS, pool.map(caught, WRONG_CLIENTS), strict=True):
                want = 'hang' if fault == 'no_deadline' else 'false failure' if fault == 'splits_on_u2028' else 'false success'
                self.assertEqual({r.mode: r.verdict for r in results}, dict.fromkeys(WRONG_CLIENTS[fault], want), fault)

    @staticmethod
    def told(file: Path) -> str:
        return file.read_text() if file.exists() else ''

    def test_the_command(self) -> None:
        modes = 'ok,broken,length'
        own = [sys.executable, CLIENT, '--url', '{url}', '--model', '{model}', '--output', '-', '--idle', '2', '--deadline', '5']
        done = run('--judge', '--modes', modes, '--json', '--', *own, program=FIXTURE)
        self.assertEqual((done.returncode, json.loads(done.stdout)['counts']), (0, {'agrees': 3, 'false success': 0, 'false failure': 0, 'hang': 0}))
        self.assertEqual(sorted(re.sub('^[0-9]/3 ', '', line) for line in done.stderr.splitlines()),
                         ['broken: agrees', 'length: agrees', 'ok: agrees'])
        wrong = [sys.executable, '-c', 'import sys, time; time.sleep(30 if "length" in sys.argv[1] else 0); sys.exit(sys.argv[1] == "ok")', '{mode}']
        done = run('--judge', '--modes', modes, '--limit', '8', '--', *wrong, program=FIXTURE)
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (1, '3 modes: 0 agrees, 1 false success, 1 false failure, 1 hang'))
        for number in (signal.SIGTERM, signal.SIGHUP):
            pid = self.here / f'{number}'
            process = subprocess.Popen([sys.executable, FIXTURE, '--judge', '--modes', 'ok', '--', sys.executable, '-c',
                                        f'import time, os; open({str(pid)!r}, "w").write(str(os.getpid())); time.sleep(60)'],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
            self.wait_for(functools.partial(self.told, pid))
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
            self.assertEqual((process.returncode, err.splitlines()[-1].decode()), (128 + number, f'fixture_server.py: --judge: ended by {number.name}'))
            with self.assertRaises(ProcessLookupError):
                os.kill(int(pid.read_text()), 0)
        for args in (['--judge', '--modes', '', '--', 'true'], ['--judge', '--key', 'x', '--', 'true'], ['--judge'], ['--judge', '--'], ['--judge', '--', 'no-such-command'], ['--judge', '--modes', 'x', '--', 'true'],
                     ['--judge', '--jobs', '0', '--', 'true'], ['--judge', '--limit', '99', '--', 'true']):
            done = run(*args, program=FIXTURE)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count('\n')), (2, '', 1), args)

    @unittest.skipUnless(os.path.exists('/dev/full'), 'needs /dev/full')
    def test_where_nothing_can_be_written(self) -> None:
        judge = '--judge --modes ok -- true'
        for words, status in ((f'{judge} 2>/dev/full', 0), (f'{judge} 2>&-', 0), (f'{judge} >/dev/full', 2), (f'{judge} >&-', 0), ('--list-modes >/dev/full', 2),
                              ('--port 0 >/dev/full', 2), ('--list-modes | head -n 1', 0)):
            with self.subTest(words):
                done = subprocess.run(['bash', '-o', 'pipefail', '-c', f'"{sys.executable}" "{FIXTURE}" {words}'], capture_output=True, text=True, env=environment(), timeout=60)
                self.assertEqual((done.returncode, 'Traceback' in done.stderr), (status, False), done.stderr)
                if status:
                    self.assertEqual(done.stderr.splitlines()[-1], 'fixture_server.py: stdout cannot be written: No space left on device')
                elif '2>' in words:
                    self.assertEqual(done.stdout.splitlines()[-1], '1 modes: 1 agrees, 0 false success, 0 false failure, 0 hang')


# --- long sweeps --------------------------------------------------------------------------------------------------------


@unittest.skipUnless(LONG, 'a long sweep: STREAM_LONG=1 runs it')
class LongSweepTest(Directory):
    """What takes minutes, or needs root: memory, the judge over everything, full disks, the hosts file."""

    def peak(self, mode: str) -> tuple[int, str]:
        """Peak resident memory in KiB of a run against this mode, and its outcome."""
        code = 'import atexit, resource\natexit.register(lambda: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr))'
        with fixture(delay=0.0) as url:
            done = patched(code, '--url', url, '--model', f'mode:{mode}', '--output', '-', '--deadline', '30', timeout=120)
        return int(done.stderr.split()[-1]), json.loads(done.stdout)['outcome']

    def test_memory_stays_flat_whatever_a_server_sends(self) -> None:
        base, _ = self.peak('ok')
        for mode in ('endless-line', 'flood', 'endless-data-lines', 'endless-bare-data', 'field-endless', 'trailer-endless', 'deltas-flood',
                     'interim-endless', 'fields-many', 'comments-of-20000'):
            with self.subTest(mode):
                peak, outcome = self.peak(mode)
                self.assertEqual(outcome, fixture_server.MODES[mode].expect)
                self.assertLess(peak - base, 32 * 1024)

    def test_our_own_client_judged(self) -> None:
        directory = self.here
        (directory / 'ca').write_text(CA)
        (directory / 'good').write_text(GOOD + CERTIFICATE_KEY)
        own = [sys.executable, CLIENT, '--url', '{url}', '--model', '{model}', '--output', '-', '--idle', '2', '--deadline', '5']
        for options in ([], ['--certificate', 'good', '--fragment', 'random']):
            with self.subTest(options=options):
                words = [*own, '--ca-file', 'ca'] if '--certificate' in options else own
                done = run('--judge', '--jobs', '6', '--json', *options, '--', *words, program=FIXTURE, cwd=directory, timeout=300)
                wrong = [r for r in json.loads(done.stdout)['modes'] if r['verdict'] != 'agrees']
                self.assertEqual((wrong, done.returncode), ([], 0))

    @unittest.skipUnless(sys.platform == 'linux' and os.geteuid() == 0 and shutil.which('unshare'), 'needs root and unshare')
    def test_localhost_resolved_elsewhere_by_the_hosts_file_is_refused_before_the_key_is_sent(self) -> None:
        (self.here / 'hosts').write_text('192.0.2.1 localhost\n')
        script = 'mount --bind hosts /etc/hosts && ' + shlex.join([sys.executable, CLIENT, '--url', 'http://localhost:9/x', '--model', 'm', '--output', '-'])
        done = subprocess.run(['unshare', '-m', 'sh', '-c', script], capture_output=True, text=True, cwd=self.here, timeout=60,
                              env=environment(MODEL_API_KEY=KEY))
        record = json.loads(done.stdout)
        self.assertEqual((done.returncode, record['outcome'], record['marks_ms']['connected']), (1, 'not_loopback', None))

    @unittest.skipUnless(sys.platform == 'linux' and os.geteuid() == 0 and shutil.which('unshare'), 'needs root and unshare')
    def test_a_full_disk_and_a_read_only_one(self) -> None:
        (self.here / 'd').mkdir()
        ask = shlex.join([sys.executable, CLIENT, '--fixture', 'events-of-20000', '--output', 'd/run.json'])
        for prepare, status, left in [
            ('mount -t tmpfs -o size=64k none d; head -c 100000 /dev/zero > d/fill', 2, 'fill'),
            ('mount -t tmpfs -o size=64k none d; head -c 40000 /dev/zero > d/fill', 3, 'fill run.json'),
            ('mount -t tmpfs -o ro none d', 2, ''),
        ]:
            with self.subTest(prepare):
                script = f'{prepare}; {ask} 2>/dev/null; status=$?; echo; ls -A d | xargs echo; cat d/run.json 2>/dev/null; exit $status'
                done = subprocess.run(['unshare', '-m', 'sh', '-c', script], capture_output=True, text=True, cwd=self.here, timeout=60, env=environment())
                said, _, rest = done.stdout.partition('\n\n' if status == 3 else '\n')
                names, _, record = rest.partition('\n')
                self.assertEqual((done.returncode, names), (status, left), done.stdout[-2000:])
                if status == 3:
                    self.assertTrue(json.loads(said)['ok'])
                    self.assertEqual(json.loads(record)['outcome'], 'unfinished')


def fuzz(raw: bytes) -> None:
    """Any bytes as a body, and as a whole answer on the wire: the same verdict however they are cut, and no exception but ours."""
    size = raw[0] + 1 if raw else 1
    for framing in (Framing(False, None), Framing(True, None), Framing(False, len(raw) // 2)):
        whole = judge([raw[1:]], framing)
        assert judge(cut(raw[1:], range(size, len(raw) - 1, size)), framing) == whole
    left, right = socket.socketpair()
    with left, right:
        right.sendall(raw[1:50_000])
        right.shutdown(socket.SHUT_WR)
        wire = stream_client.Wire(left, Clock(1, 1), Secret(None))
        try:
            fields = stream_client.read_head(wire)[0].msg.items()
            framing_of(fields, False)
        except StreamFailure:
            pass


FUZZ_WORDS = [data(TEXT), data(STOP), data(DONE), b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n', b'event: error\n',
              b'error: x\n', b'\r\n0\r\n\r\n', b'{"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}', b'data: ', b'\xef\xbb\xbf', b'5\r\nhello\r\n', b'"usage":{"completion_tokens":1}']


class FuzzTest(unittest.TestCase):
    """What the fuzzer found, and a short run of it on random mutations."""

    def test_mutations(self) -> None:
        rng = random.Random(3)
        for _ in range(20_000 if LONG else 250):
            words = rng.choices(FUZZ_WORDS, k=rng.randint(1, 6))
            raw = bytearray(b'\x07' + b''.join(words))
            for _ in range(rng.randint(0, 4)):
                raw[rng.randrange(1, len(raw))] = rng.randrange(256)
            fuzz(bytes(raw))


# --- README -------------------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """The tables of the README that are generated from the code, by the name of their markers."""

    def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        lines = [head, ['---'] * len(head), *rows]
        return '\n'.join('| ' + ' | '.join(cell.replace('|', '\\|') for cell in row) + ' |' for row in lines)

    failures = sorted(FAILURES.items(), key=lambda item: ([*stream_client.BOUNDARIES, ''].index(item[1].boundary)))
    return {
        'failures': table(('boundary', 'code', 'meaning', 'hint'),
                          ((k.boundary or 'the one reached', f'`{code}`', k.meaning, k.hint) for code, k in failures)),
        'warnings': table(('warning', 'meaning'), ((f'`{code}`', text) for code, text in WARNINGS.items())),
        'modes': table(('mode', 'sends', 'a correct client concludes', 'from'),
                       ((f'`{name}`', m.sends, f'`{m.expect}`', m.source) for name, m in fixture_server.MODES.items())),
    }


def with_tables(text: str) -> str:
    """The README with its generated tables renewed."""
    for name in tables():
        marked = re.compile(f'(<!-- table: {name} -->\n).*?(<!-- end -->)', re.DOTALL)
        assert marked.search(text), f'README.md has no table {name}'
        text = marked.sub(lambda m: f'{m[1]}{tables()[name]}\n{m[2]}', text)  # noqa: B023  # called at once
    return text


class ReadmeTest(Directory):
    """What the README claims is what the code does."""

    text = (ROOT / 'README.md').read_text()

    def test_the_generated_tables_are_the_codes(self) -> None:
        self.assertEqual(with_tables(self.text), self.text, 'run: python3 test_stream.py --write-tables')

    def test_every_flag_is_mentioned_and_every_mentioned_flag_exists(self) -> None:
        actions = (*stream_client.make_parser()._actions, *stream_report.make_parser()._actions)
        flags = {o for a in actions for o in a.option_strings if o.startswith('--')} - {'--help'}
        mentioned = set(re.findall(r'(?<![\w-])--[a-z][a-z-]+', self.text))
        self.assertEqual(flags - mentioned, set())
        fixtures = {flag for program in (FIXTURE, str(ROOT / 'bench_stream.py'))
                    for flag in re.findall(r'--[a-z][a-z-]+', run('--help', program=program).stdout)}
        others = {'--fail', '--max-time', '--json', '--sse-keep-alive-interval', '--group', '--from-file', '--tail', '--dir', '--silent'}  # of curl, vLLM, pip, kubectl, gh and npm
        self.assertEqual(mentioned - flags - fixtures - others, set())

    def test_every_key_of_the_record_is_explained(self) -> None:
        for key in RECORD_KEYS:
            self.assertIn(f'`{key}`', self.text, key)

    def test_the_python_examples(self) -> None:
        examples = re.findall(r'```python\n(.*?)```', self.text, re.DOTALL)
        self.assertEqual(len(examples), 4)
        for example in examples:
            with self.subTest(example.splitlines()[0]), fixture('ok') as url:
                self.assertLess(len(example.splitlines()), 15)
                if 'httpx' in example and not HAS_HTTPX:
                    self.skipTest('httpx is not installed')
                program = example.replace('http://127.0.0.1:8000/v1/chat/completions', url)
                done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=60,
                                      env=environment(PYTHONPATH=str(ROOT)), cwd=self.here)
                self.assertEqual(done.returncode, 0, done.stderr)
                said = 'agrees ok\nagrees broken\nagrees stall-after-text\n' if 'fixture_server' in example else 'READY ✓'
                self.assertIn(said, done.stdout)


class AsyncTest(unittest.TestCase):
    """The layers without I/O under asyncio, standard library only."""

    def test_many_streams_in_one_loop(self) -> None:
        async def ask(url: str, mode: str) -> str:
            target = parse_url(url)
            reader, writer = await asyncio.open_connection(target.host, target.port)
            body = json.dumps({'model': f'mode:{mode}', 'stream': True}).encode()
            writer.write(b'POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (target.path.encode(), len(body), body))
            head = await reader.readuntil(b'\r\n\r\n')
            fields = [tuple(line.split(': ', 1)) for line in head.decode().split('\r\n')[1:-2]]
            framed, chat = Body(framing_of(fields, False)), ChatCompletion()  # type: ignore[arg-type]  # pairs
            try:
                while not chat.done and not framed.end:
                    raw = await reader.read(1000)
                    list(chat.feed(framed.feed(raw)))
                    if not raw:
                        framed.feed_eof()
                    if framed.failure and not chat.done:
                        raise framed.failure
                chat.end(framed.end)
            except StreamFailure as failure:
                return failure.code
            finally:
                writer.close()
            return 'passed'

        modes = [name for name, mode in fixture_server.MODES.items() if mode.group in ('whole answers', 'incomplete answers', 'chunk shapes')]

        async def all_of_them(url: str) -> list[str]:
            return await asyncio.gather(*(ask(url, mode) for mode in modes))

        with fixture() as url:
            outcomes = asyncio.run(all_of_them(url))
        self.assertEqual(dict(zip(modes, outcomes, strict=True)), {mode: fixture_server.MODES[mode].expect for mode in modes})


def main() -> None:
    """The tests, or one of the jobs beside them."""
    if sys.argv[1:] == ['--write-tables']:
        path = ROOT / 'README.md'
        path.write_text(with_tables(path.read_text()))
    elif sys.argv[1:] == ['--overshoot']:  # how far past its limit each clock ended a run
        unittest.main(argv=[sys.argv[0], 'DeadlineTest'], exit=False)
        for what, seconds in sorted(DeadlineTest.overshoots):
            print(f'{seconds * 1000:7.1f} ms  {what}')
    elif sys.argv[1:2] == ['--fuzz']:  # python3 test_stream.py --fuzz -max_total_time=600
        import atheris

        atheris.instrument_all()
        atheris.Setup([sys.argv[0], *sys.argv[2:]], fuzz)
        atheris.Fuzz()
    else:
        unittest.main()


if __name__ == '__main__':
    main()
