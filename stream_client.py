#!/usr/bin/env python3
"""Ask a vLLM-style endpoint for one streamed answer and say whether that answer was complete.

One process, one request, one verdict, one evidence record.  Data flows from the top of this file to the bottom::

    socket bytes -> Body -> body bytes -> Events -> event data -> ChatCompletion -> text and verdict -> record

    open --text--> open --finish_reason--> finished --[DONE]--> done        (TRANSITIONS below is the whole table)

A pass means: text with a visible character, then ``finish_reason`` "stop", then the ``[DONE]`` event, no error object
anywhere and nothing malformed before ``[DONE]``.  It does not prove that the text is correct, that the task was done or
that the GPU stopped.  HTTP 200, a role chunk, reasoning, usage or ``[DONE]`` alone prove nothing.

Exceptions: ``StreamFailure(ValueError)`` carries one code of ``FAILURES``; ``NotUtf8(StreamFailure, UnicodeDecodeError)``;
``Refused(ValueError)`` is an argument that was refused before anything was sent.

Exit codes: 0 passed; 1 the run failed, record written; 2 refused, nothing sent and nothing left behind; 3 the record could
not be written (it goes to stdout as one line); 128+n ended by signal n, record written.

Nothing above the section "transport" does I/O: bytes, strings and clock values go in, so that tests feed tables and an
asyncio program can drive ``ChatCompletion`` with what httpx or aiohttp hands it.
"""

from __future__ import annotations

if __name__ == '__main__':
    # Ctrl-C while the imports below run ends the process without a traceback
    import _signal  # type: ignore[import-not-found]  # the built-in half of signal: at once there

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

    # A sixth of the start: what is made by now is no garbage, and http.client would load OpenSSL for plain HTTP too
    import gc
    import sys

    gc.disable()
    if 'ssl' not in sys.modules:
        sys.modules['ssl'] = None  # type: ignore[assignment]  # so that it is not found there; tls_context imports it
        import http.client

        del sys.modules['ssl']

import argparse
import base64
import codecs
import collections
import errno
import functools
import hashlib
import http.client
import io
import itertools
import json
import math
import os
import re
import select
import signal
import socket
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypedDict

if TYPE_CHECKING:
    import ssl
    import subprocess
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
    from types import FrameType, TracebackType

    from typing_extensions import Unpack

__version__ = '0.1.0'
SCHEMA_VERSION = 1

# --- limits and defaults ------------------------------------------------------------------------------------------------

MAX_LINE_CHARS = 65_536  # one event-stream line, comments too; the longest line real servers were seen to send is 60 KB
MAX_EVENT_CHARS = 1_048_576  # one event's data with its joining LFs
MAX_ANSWER_CHARS = 1_048_576  # the answer text; 32,768 tokens of 32 characters
MAX_STREAM_BYTES = 67_108_864  # the whole body: an answer at its limit, sent as one character an event, is about this
MAX_HEAD_BYTES = 262_144  # status line and header fields of one answer; http.client itself allows 100 lines of 64 KiB
MAX_CHUNK_LINE_BYTES = 4_096  # a chunk-size line with its extensions, or one trailer line
MAX_TRAILER_BYTES = 65_536  # all trailer lines together
MAX_ERROR_BODY_BYTES = 4_096  # the excerpt kept of an answer that is no event stream
MAX_INTERIM = 8  # 1xx answers before the final one (curl and h11 set no limit, so an endless row of them holds a client)
MAX_NESTING = 100  # levels of JSON nesting; a chunk has 4 to 8
MAX_INT_DIGITS = 4_300  # the default of sys.set_int_max_str_digits, made the same on every Python
MAX_FINISH_CHARS = 64  # a finish_reason; the longest in use has 28
MAX_QUOTE_CHARS = 300  # server text quoted in a message
MAX_CLOCK_S = 86_400.0  # upper bound of both clocks: one day
MAX_TOKENS = 32_768
MAX_LEARNED_CHARS = 4_096  # a chunk that later ones are compared with; the search in it may cost its square
MAX_SAID_BYTES = 16_384  # the end of what ssh says on stderr
READ_BYTES = 65_536
ERROR_BODY_S = 0.5  # how long the excerpt of an error body may take
DRAIN_S = 0.25  # how long to look for the end of the body after [DONE]
DEFAULT_URL = 'http://127.0.0.1:8000/v1/chat/completions'
DEFAULT_PROMPT = 'Reply with exactly the word READY.'
KEY_VARIABLE = 'MODEL_API_KEY'
FIXTURE_FIELD = 'X-Stream-Fixture'  # the header field by which the fixture says that its answers are synthetic
COMPRESSIONS = ('gzip', 'x-gzip', 'deflate', 'compress', 'x-compress', 'br', 'zstd')
RECORDED_FIELDS = (
    'age', 'cache-control', 'connection', 'content-encoding', 'content-length', 'content-type', 'date', 'retry-after',
    'server', 'transfer-encoding', 'via', 'x-accel-buffering', 'x-request-id',
)

# --- failures -----------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """What a failure code stands for: the boundary it belongs to, its one meaning and the one hint for the reader."""

    boundary: str
    meaning: str
    hint: str


REACHED = ''  # the boundary of the clock codes: the one that the run had reached
BOUNDARIES = (
    'resolve', 'connect', 'tunnel', 'tls', 'send', 'head', 'status', 'content', 'framing', 'events', 'json', 'protocol',
    'completion', 'client',
)

FAILURES = {
    'resolve_failed': Kind('resolve', 'the host name has no address', 'check the name in --url or --connect-to, and DNS'),
    'connect_refused': Kind('connect', 'nothing listens on that port', 'is the server up, and the port or tunnel right?'),
    'connect_failed': Kind('connect', 'no address could be connected', 'check route, firewall and tunnel'),
    'not_loopback': Kind('connect', 'plain HTTP would leave this host', 'use https, or a tunnel that ends on loopback'),
    'tunnel_failed': Kind('tunnel', 'ssh gave no tunnel, or the tunnel broke', 'see what ssh says; then the same by hand: '
                          'ssh -o BatchMode=yes -W HOST:PORT DESTINATION'),
    'tls_untrusted': Kind('tls', 'the certificate has no trusted issuer', 'name the private CA with --ca-file'),
    'tls_expired': Kind('tls', 'the certificate is not valid at this time', 'renew it, and check the clock of this host'),
    'tls_name': Kind('tls', 'the certificate is for another name', 'use its name in --url; --connect-to dials elsewhere'),
    'tls_failed': Kind('tls', 'the TLS handshake or record layer failed', 'plain HTTP on that port? TLS below 1.2?'),
    'send_failed': Kind('send', 'the connection broke while the request was sent', 'see the log of server and proxy'),
    'closed_before_head': Kind('head', 'closed before the status line and fields were whole',
                               'the server crashed, a proxy gave up (idle limits of 60, 100 or 300 s are usual), or that port speaks TLS'),
    'head_malformed': Kind('head', 'status line or header fields break HTTP/1.1', 'is this an HTTP/1.1 server at all?'),
    'head_too_large': Kind('head', 'status line or header fields exceed the limit', 'a proxy or server adds too many'),
    'interim_limit': Kind('head', 'too many interim (1xx) answers', 'the server or proxy never sends the final answer'),
    'http_status': Kind('status', 'a status other than 200', 'see the excerpt: 401 or 403 is the key, 404 the URL path or '
                        'the model, 400 the request or its length, 429 and 503 load, 502 and 504 what stands behind the proxy'),
    'redirect': Kind('status', 'a redirect, which is never followed', 'use the final URL (a trailing slash, http for https?)'),
    'not_event_stream': Kind('content', 'the body is not text/event-stream', 'does this path stream? is it the right server?'),
    'encoded_body': Kind('content', 'the body is compressed or otherwise encoded', 'turn compression off for this path'),
    'body_cut': Kind('framing', 'the body ended short of its own framing', 'server killed or proxy gave up: see their logs'),
    'connection_reset': Kind('framing', 'the connection was reset in the body', 'server or proxy crashed: see their logs'),
    'chunk_malformed': Kind('framing', 'the chunked transfer coding is broken', "a proxy's error page inside the body?"),
    'length_conflict': Kind('framing', 'the head gives no single well-formed length', 'mend the proxy that adds the fields'),
    'body_too_large': Kind('framing', 'the body exceeds the limit', 'raise --max-stream-bytes for answers you expect'),
    'not_utf8': Kind('events', 'the event stream is not UTF-8', 'compressed without saying so, or cut inside a character?'),
    'line_too_long': Kind('events', 'a line exceeds the limit', 'raise --max-line-chars for payloads you have defined'),
    'event_too_long': Kind('events', 'an event exceeds the limit', 'raise --max-event-chars for payloads you have defined'),
    'not_json': Kind('json', 'an event is not JSON', 'keep-alive text sent as data, or an error page inside the stream?'),
    'json_limits': Kind('json', 'an event is nested too deeply or holds too long a number', 'no chunk needs this'),
    'repeated_key': Kind('json', 'a key stands twice in one object with different values', 'readers would disagree on it'),
    'server_error': Kind('protocol', 'the server reported an error in the stream', "see the message, and the server's log"),
    'not_an_object': Kind('protocol', 'an event is JSON but no object', 'is this a chat-completion endpoint?'),
    'many_choices': Kind('protocol', 'more than one choice in a chunk', 'one run judges one choice: ask for n = 1'),
    'choice_index': Kind('protocol', 'a choice has an index other than 0', 'one run judges one choice: ask for n = 1'),
    'missing_index': Kind('protocol', 'a choice has no index', '--tolerate missing_index reads it as 0'),
    'bad_shape': Kind('protocol', 'a member of a chunk has the wrong type', 'is this a chat-completion endpoint?'),
    'bad_usage': Kind('protocol', 'usage is not what the API defines', 'a gateway that rewrites usage?'),
    'tool_call': Kind('protocol', 'the answer calls a tool', 'this checks text answers: ask without tools'),
    'refused': Kind('protocol', 'the model refused in the refusal member', 'ask another prompt'),
    'text_after_finish': Kind('protocol', 'text came after the finish', 'two answers in one stream, or a gateway fault'),
    'second_finish': Kind('protocol', 'a second, different finish came', 'two answers in one stream, or a gateway fault'),
    'id_changed': Kind('protocol', 'text came under two ids', 'two answers stitched together; --tolerate id_changed if not'),
    'answer_too_long': Kind('protocol', 'the answer exceeds the limit', 'lower --max-tokens or raise --max-answer-chars'),
    'no_done': Kind('completion', 'the body ended before [DONE]', 'server or proxy ended early; where a server never sends '
                    '[DONE] (transformers serve), --tolerate no_done accepts a finish and a clean end'),
    'no_finish': Kind('completion', '[DONE] came without a finish_reason', 'the engine ended without finishing: see its log'),
    'finish_not_accepted': Kind('completion', 'finished for another reason than accepted', 'length: raise --max-tokens or '
                                'shorten the answer; abort: the engine shut down; --accept-finish accepts others'),
    'no_visible_text': Kind('completion', 'the answer has no visible character', 'all reasoning? raise --max-tokens; or a '
                            'chat template that answers nothing'),
    'unpaired_surrogate': Kind('completion', 'half a surrogate pair stands alone in the text', 'the server cuts characters'),
    'warning_refused': Kind('completion', 'complete, but with a warning named by --fail-on', 'see warnings in the record'),
    'idle_timeout': Kind(REACHED, 'no byte moved for --idle seconds', 'silence may be a queue or a long prefill (vLLM and '
                         'llama.cpp were seen silent for 16 to 20 s): raise --idle, e.g. --idle 60'),
    'deadline': Kind(REACHED, 'the run reached --deadline', 'raise --deadline, or lower --max-tokens'),
    'first_text_timeout': Kind(REACHED, 'no visible text within --first-text', 'queue, prefill or hidden reasoning'),
    'stall_timeout': Kind(REACHED, 'no event with data for --stall seconds', 'keep-alive comments alone are no progress'),
    'interrupted': Kind('client', 'ended by a signal or by the caller', 'run it again to have a verdict'),
    'unfinished': Kind('client', 'the run had not ended when this was written',
                       'the process was killed, or the capture ends early: run it again'),
    'internal': Kind('client', 'a fault in this client', 'please report it with this record, the text removed'),
}

WARNINGS = {
    'named_event': 'an event of another type than message was ignored',
    'empty_event': 'an event with empty data was ignored',
    'empty_chunk': 'a chunk had neither choices nor usage',
    'object_differs': 'a chunk was of another object type than chat.completion.chunk',
    'model_differs': 'the answering model has another name than the one asked for',
    'id_differs': 'the id changed on a chunk without text',
    'finish_empty': 'finish_reason was "" or "null", taken as none yet',
    'finish_repeated': 'the same finish_reason came again',
    'no_usage': 'usage was asked for and never came',
    'usage_contradicts': 'usage counts no tokens although text or reasoning came',
    'max_tokens_exceeded': 'usage counts more tokens than max_tokens',
    'replacement_character': 'the text holds U+FFFD: something upstream replaced bytes that were not UTF-8',
    'after_done': 'events came after [DONE] and were ignored',
    'capture_incomplete': 'the capture could not be written to its end',
    'unclean_end': 'the body did not end as its framing says, after [DONE]',
}
AFTER_THE_VERDICT = ('after_done', 'unclean_end', 'capture_incomplete')  # so they never change it, --fail-on or not
TOLERABLE = ('no_done', 'id_changed', 'missing_index')


class StreamFailure(ValueError):
    """A broken rule. ``code`` is a key of FAILURES; ``event`` is the ordinal (from 1) of the event it was found in."""

    def __init__(self, code: str, message: str, *, event: int | None = None, boundary: str | None = None) -> None:
        ValueError.__init__(self, message)
        self.code = code
        self.message = message
        self.event = event
        self.boundary = boundary or FAILURES[code].boundary

    def __str__(self) -> str:
        return self.message

    @property
    def hint(self) -> str:
        """The one hint that belongs to the code."""
        return FAILURES[self.code].hint


class NotUtf8(StreamFailure, UnicodeDecodeError):
    """The event stream is not UTF-8. ``start`` is the offset in the body of the first byte that is wrong."""

    def __init__(self, wrong: bytes, offset: int, reason: str) -> None:
        UnicodeDecodeError.__init__(self, 'utf-8', wrong, 0, len(wrong), reason)
        StreamFailure.__init__(self, 'not_utf8', f'byte 0x{wrong[0]:02x} at body offset {offset} is not UTF-8: {reason}')


class Refused(ValueError):
    """An argument refused before anything was created or sent. ``argument`` is its Python name, the flag with ``_``."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f'{argument}: {message}')
        self.argument, self.message = argument, message


# Characters that never leave this program as they came: C0, DEL, C1, bidi controls, line separators, BOM, surrogates.
_UNSAFE = re.compile('[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]')


def escaped(text: str) -> str:
    r"""The text with control, bidi and surrogate characters as ``\xNN`` or ``\uNNNN``."""
    return _UNSAFE.sub(lambda m: f'\\x{ord(m[0]):02x}' if m[0] < '\x80' else f'\\u{ord(m[0]):04x}', text)


_NAMED = {'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&apos;'}  # references of HTML


@functools.cache
def _forms(char: str) -> tuple[re.Pattern[str], ...]:
    r"""One character of the key in every form it may be echoed in; a text may go on in several of them (``%25``, ``\u0075``).

    Repeats are bounded, so that a search takes linear time.
    """
    code = ''.join(f'[{d}{d.upper()}]' for d in f'{ord(char):02x}')
    named = f'{_NAMED[char]}|' if char in _NAMED else ''
    marked = f'{named}%{code}|&#[xX]0{{0,6}}{code};|&#0{{0,6}}{ord(char)};'
    unit = rf'\\{{1,8}}u00{code}'
    if char not in '\\%&u':
        return (re.compile(rf'\\{{0,8}}(?:{re.escape(char)}|{marked})|{unit}'),)
    plain = [rf'\\{{{n}}}' for n in range(1, 17)] if char == '\\' else [rf'\\{{0,8}}{char}']
    return tuple(re.compile(form) for form in (rf'\\{{0,8}}(?:{marked})|{unit}', *plain))


@functools.cache
def _any(char: str) -> str:
    return f'(?:{"|".join(form.pattern for form in _forms(char))})'


def _starred(text: str, form: str) -> str:
    r"""The text of JSON with asterisks in place of the key in this form (ones, where it is a number), and JSON still.

    Where a backslash before it takes its first character for an escape (``\n``), that stays; where it only precedes it
    (``\/``), it goes too.
    """
    def hide(found: re.Match[str]) -> str:
        start = run = found.end(1)
        while run and text[run - 1] == '\\':
            run -= 1
        before = (start - run) % 2
        kept = {'u': 5, **dict.fromkeys('ntrbf', 1)}.get(form[0], 0) if before else 0
        gone = before if not kept else 0
        star = '1' if form.isdigit() else '*'
        return found[1][: len(found[1]) - gone] + form[:kept] + star * (gone + len(form) - kept)

    return re.sub(rf'(\\?){re.escape(form)}', hide, text)


class Secret:
    """The API key, which is to appear nowhere. ``mask`` takes it out of a text, before that text is cut to length.

    It is found in every form that servers echo: plain, percent-encoded, escaped in JSON (also twice) or HTML, or folded.
    Keys shorter than 8 characters are left alone: masking them would garble ordinary words and hide little.
    """

    _FOLD = re.compile(r'\r?\n[ \t]*')
    _CUT = r'\\{1,16}(?:u[0-9A-Fa-f]{0,3}|%[0-9A-Fa-f]?|&[#A-Za-z0-9]{0,10})?|%[0-9A-Fa-f]?|&[#A-Za-z0-9]{0,10}'  # a form that is cut
    _CUT_CHARS = 32  # more than such a form has
    _CUT_AT_END, _HALF = re.compile(rf'(?:{_CUT})\Z'), re.compile(rf'{_CUT}|\r?\n?[ \t]*')

    def __init__(self, key: str | None) -> None:
        self.key = key or ''
        self._hidden = self.key if len(self.key) >= 8 else ''
        once = json.dumps(self._hidden)[1:-1]
        web = ''.join(c if c.isalnum() or c in '-._~' else f'%{ord(c):02X}' for c in self._hidden)
        exact = (self._hidden, once, once.replace('/', '\\/'), json.dumps(once)[1:-1], web, ''.join(_NAMED.get(c, c) for c in self._hidden))
        self._exact = sorted(set(exact), key=len, reverse=True) if self._hidden else []
        self._may_start = re.compile(f'(?={_any(self._hidden[0])})') if self._hidden else None

    def _readings(self, text: str, start: int) -> Iterator[Collection[int]]:
        """Where none, one, two ... characters of the key can end in ``text`` from ``start`` on, for as long as they stand there."""
        ends: Collection[int] = (start,)
        yield ends
        for at, char in enumerate(self._hidden):
            found: list[int] = []
            for end in ends:
                fold = self._FOLD.match(text, end) if at and text[end : end + 1] in ('\r', '\n') else None
                begin = fold.end() if fold else end
                found += [match.end() for form in _forms(char) if (match := form.match(text, begin))]
            if not found:
                return
            ends = found if len(found) == 1 else set(found)
            yield ends

    def _whole(self, text: str, start: int) -> int | None:
        """Where the key ends that stands in ``text`` from ``start`` on; None if it does not."""
        *_, (count, ends) = enumerate(self._readings(text, start))
        return max(ends) if count == len(self._hidden) else None

    def _goes_on(self, text: str, start: int, least: int) -> bool:
        """Whether ``text`` ends within a key that stands there from ``start`` on, after ``least`` characters of it or more."""
        return any(self._HALF.fullmatch(text, end) for ends in itertools.islice(self._readings(text, start), least, len(self._hidden))
                   for end in ends if len(text) - end < self._CUT_CHARS or text[end] in '\r\n')

    def stands_in(self, text: str) -> bool:
        """Whether a text holds the key as it is."""
        return bool(self._hidden) and self._hidden in text

    def mask(self, text: str, stars: bool = False) -> str:
        """The text with ``[key]`` in place of the key, or with as many asterisks as its form has characters."""
        if not self._hidden or len(text) < len(self._hidden):
            return text
        for form in self._exact:
            if form in text:
                text = _starred(text, form) if stars else text.replace(form, '[key]')
        if not re.search(r'[\\%&]|\n[ \t]', text):  # no escape, so there is no other form
            return text
        kept, at = [], 0
        for first in re.finditer(rf'{_any(self._hidden[0])}(?=\r?\n|{_any(self._hidden[1])})', text):
            end = self._whole(text, first.start()) if first.start() >= at else None
            if end:
                kept += [text[at : first.start()], '*' * (end - first.start()) if stars else '[key]']
                at = end
        return ''.join(kept) + text[at:]

    def begins_at(self, text: str, least: int) -> int:
        """Where a start of the key, of ``least`` characters or more, stands at the end of ``text``; its length if none does."""
        for may in self._may_start.finditer(text, max(0, len(text) - 24 * len(self._hidden))) if self._may_start else ():
            if self._goes_on(text, may.start(), least):
                return may.start()
        return len(text)

    def form_cut(self, text: str) -> int:
        """Where an escape that is cut stands at the end of ``text``; its length if none does, or there is no key."""
        cut = self._CUT_AT_END.search(text, max(0, len(text) - self._CUT_CHARS)) if self._hidden else None
        return cut.start() if cut else len(text)

    def mask_cut(self, text: str, stars: bool = False) -> str:
        """The same for a text that may be cut somewhere: 6 characters of the key or more at its end are masked too."""
        text = self.mask(text, stars)
        body = text.rstrip('\ufffd')  # what a cut inside a character leaves
        start = self.begins_at(body, 6)
        if start == len(body):
            return text
        return body[:start] + ('*' * (len(body) - start) if stars else '[key]')

    def mask_all(self, value: Any) -> Any:
        """A JSON value with every string in it masked."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, list):
            return [self.mask_all(v) for v in value]
        return {self.mask(k): self.mask_all(v) for k, v in value.items()} if isinstance(value, dict) else value

    def quote(self, text: object, limit: int = MAX_QUOTE_CHARS, cut: bool = False) -> str:
        """Server text (``cut`` where it may be cut already) made fit to be shown: masked, then escaped, then cut to ``limit``."""
        whole = text if isinstance(text, str) else _dumps(text)
        most = limit + 12 * len(self._hidden) + 64  # more cannot be shown, and masking a MiB would take long
        safe = escaped(self.mask_cut(whole[:most]) if cut or len(whole) > most else self.mask(whole))
        return safe if len(safe) <= limit else safe[: limit - 3] + '...'


# --- wire to body (RFC 9112 sections 6 and 7) ----------------------------------------------------------------------------


class Framing(NamedTuple):
    """How a body is delimited: ``chunked``, by ``length`` (bytes), or, with neither, by the close of the connection."""

    chunked: bool
    length: int | None


def framing_of(fields: Sequence[tuple[str, str]], http_1_0: bool, secret: Secret | None = None) -> Framing:
    """The framing that the header fields of a final answer define; ``secret`` is masked in messages.

    Raises StreamFailure ``length_conflict`` where they are malformed or contradict each other and ``encoded_body`` for a
    transfer coding other than chunked (RFC 9112 section 6.3; a message that has both kinds of length "ought to be
    handled as an error").
    """
    quote = (secret or Secret(None)).quote
    coded = [v for k, v in fields if k.lower() == 'transfer-encoding']
    codings = [c.strip(' \t') for v in coded for c in v.split(',') if c.strip(' \t')]
    lengths = {n.strip(' \t') for k, v in fields if k.lower() == 'content-length' for n in v.split(',')}
    named = f'Transfer-Encoding "{quote(", ".join(codings), 80)}"'
    if any(c.split(';')[0].lower() in COMPRESSIONS for c in codings):
        raise StreamFailure('encoded_body', f'{named}: only chunked is read')
    if coded and ([c.lower() for c in codings] != ['chunked'] or http_1_0):
        raise StreamFailure('length_conflict', named + (' in an HTTP/1.0 answer' if http_1_0 else ''))
    if coded and lengths:
        raise StreamFailure('length_conflict', 'both Transfer-Encoding and Content-Length')
    if len(lengths) > 1 or any(not re.fullmatch('[0-9]{1,18}', n) for n in lengths):
        raise StreamFailure('length_conflict', f'Content-Length "{quote(", ".join(sorted(lengths)), 80)}"')
    return Framing(bool(coded), int(lengths.pop()) if lengths else None)


class Body:
    """Strict, bounded decoder of one message body: socket bytes in, body bytes out; no I/O.

    ``end`` is None until the body is over, then ``last_chunk``, ``length`` or ``closed``; ``failure`` holds a broken rule
    once the bytes before it were handed over. http.client's own reader is not used because it takes a short body for a
    clean one, ``0_9`` and ``-5`` for chunk sizes and a lone ``0`` line for the end.
    """

    # A chunk-size line, and what may become one. Blanks before the extension or the CRLF are allowed (BWS, and old servers).
    _SIZE = re.compile(rb'([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\x00]*)?\r\n')
    _SIZE_START = re.compile(rb'(?:[0-9A-Fa-f]{1,16}(?:[ \t]*(?:;[^\r\n\x00]*)?\r?)?)?')
    _TRAILER = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\x00]*)?\r\n")
    _TRAILER_START = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+(?::[^\r\n\x00]*)?)?\r?")

    def __init__(self, framing: Framing, *, max_bytes: int = MAX_STREAM_BYTES) -> None:
        self.framing = framing
        self.max_bytes = max_bytes
        self.end: str | None = None
        self.failure: StreamFailure | None = None
        self.bytes = 0  # body bytes handed over
        self._wire = 0  # offset in the framed body of the first byte that was not yet taken in
        self._left = framing.length or 0  # body bytes still due in this chunk or length
        self._state = 'size' if framing.chunked else 'data'
        self._held = b''  # an incomplete chunk-size line, CRLF or trailer line
        self._trailer = 0
        if framing.length == 0:
            self.end = 'length'

    def feed(self, raw: bytes) -> bytes:
        """The body bytes in ``raw``. Whatever follows the end of the body is dropped. Sets ``end`` and ``failure``."""
        if self.failure or self.end:
            return b''
        if self.framing.chunked:
            return self._bounded(self._chunks(raw))
        if self.framing.length is None:
            return self._bounded(raw)
        data = raw[: self._left]
        self._left -= len(data)
        if not self._left:
            self.end = 'length'
        return self._bounded(data)

    def feed_eof(self, how: str = '') -> None:
        """The peer closed. Sets ``end`` to ``closed`` where that is a proper end, else ``failure`` to ``body_cut``."""
        if self.failure or self.end:
            return
        if not self.framing.chunked and self.framing.length is None and not how:
            self.end = 'closed'
        elif self.framing.chunked:
            due = f'{self._left} bytes of a chunk due' if self._state == 'data' else 'the last chunk missing'
            self.failure = StreamFailure('body_cut', f'connection closed after {self.bytes} body bytes with {due}')
        elif self.framing.length is not None:
            whole = self.framing.length
            self.failure = StreamFailure('body_cut', f'connection closed after {self.bytes} of {whole} body bytes')
        else:
            self.failure = StreamFailure('body_cut', f'connection closed after {self.bytes} body bytes {how}')

    def _bounded(self, data: bytes) -> bytes:
        if self.bytes + len(data) > self.max_bytes:
            data, self.end = data[: self.max_bytes - self.bytes], None
            self.failure = StreamFailure(
                'body_too_large', f'body is longer than the limit of {self.max_bytes} bytes (--max-stream-bytes)')
        self.bytes += len(data)
        return data

    def _chunks(self, raw: bytes) -> bytes:
        data, at, out = self._held + raw if self._held else raw, 0, []
        self._held = b''
        size = len(data)
        while at < size and not self.end and not self.failure:
            if self._state == 'data':
                piece = data[at : at + self._left]
                out.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = 'crlf'
            elif self._state == 'crlf':
                if data[at] != 13 or (at + 1 < size and data[at + 1] != 10):
                    self._malformed(data, at + (data[at] == 13), 'CRLF after the chunk data')
                elif at + 1 == size:
                    break
                else:
                    at += 2
                    self._state = 'size'
            elif self._state == 'size':
                line = self._SIZE.match(data, at, at + MAX_CHUNK_LINE_BYTES)
                if not line:
                    self._partial(data, at, self._SIZE_START, 'a chunk size in hexadecimal')
                    break
                at = line.end()
                self._left = int(line[1], 16)
                self._state = 'data' if self._left else 'trailer'
            else:
                line = self._TRAILER.match(data, at, at + MAX_CHUNK_LINE_BYTES)
                if not line:
                    self._partial(data, at, self._TRAILER_START, 'a trailer field or the final CRLF')
                    break
                self._trailer += line.end() - at
                if line.end() - at == 2:
                    self.end = 'last_chunk'
                elif self._trailer > MAX_TRAILER_BYTES:
                    self.failure = StreamFailure('chunk_malformed', f'trailer is longer than {MAX_TRAILER_BYTES} bytes')
                at = line.end()
        self._held = data[at:] if not (self.end or self.failure) else b''
        self._wire += size - len(self._held)
        return b''.join(out)

    def _partial(self, data: bytes, at: int, start: re.Pattern[bytes], wanted: str) -> None:
        """Decide whether an incomplete line can still become what is wanted; if not, it fails at its first wrong byte."""
        stop = min(len(data), at + MAX_CHUNK_LINE_BYTES)
        found = start.match(data, at, stop)
        good = found.end() if found else at
        if good < stop:
            self._malformed(data, good, wanted)
        elif stop - at == MAX_CHUNK_LINE_BYTES:
            self.failure = StreamFailure('chunk_malformed', f'expected {wanted}, found a line of over {stop - at} bytes')

    def _malformed(self, data: bytes, wrong: int, wanted: str) -> None:
        # The bytes held from earlier reads stand in front of data, and _wire counts up to the first held byte.
        found = f'byte 0x{data[wrong]:02x} ({chr(data[wrong])!a})' if wrong < len(data) else 'nothing'
        where = f'offset {self._wire + wrong} of the framed body'
        self.failure = StreamFailure('chunk_malformed', f'expected {wanted}, found {found} at {where}')


# --- bytes to events (WHATWG HTML, "Parsing an event stream" and "Interpreting an event stream") ------------------------


_utf8_decode = codecs.utf_8_decode


class Event(str):
    """The data of an event whose type is not ``message``; equals its data, and ``type`` is its event type."""

    __slots__ = ('type',)
    type: str

    def __new__(cls, data: str, kind: str) -> Event:
        """An event of type ``kind`` with these data."""
        self = super().__new__(cls, data)
        self.type = kind
        return self


class Events:
    """Incremental event-stream parser: ``feed`` bytes, get the data of every event that they complete. No I/O.

    Strict UTF-8; one BOM at offset 0 removed; lines end with LF, CR or CRLF and with nothing else (U+2028, U+2029,
    U+0085, VT and FF are ordinary); an event is dispatched when the first terminator of its blank line is seen; one not
    ended by a blank line never is. ``comments``, ``unknown_fields``, ``last_event_id`` and ``reconnection_ms`` tell what
    else was seen, ``error_field`` the first ``error:`` line (old llama.cpp) as (events dispatched before it, value).
    """

    def __init__(self, *, max_line_chars: int = MAX_LINE_CHARS, max_event_chars: int = MAX_EVENT_CHARS) -> None:
        self.max_line_chars = max_line_chars
        self.max_event_chars = max_event_chars
        self.failure: StreamFailure | None = None
        self.dispatched = 0
        self.comments = 0
        self.unknown_fields = 0
        self.error_field: tuple[int, str] | None = None
        self.last_event_id = ''
        self.reconnection_ms: int | None = None
        self._tail = b''  # the start of a character that the next read completes
        self._offset = 0  # body offset of the first byte of _tail
        self._begun = False  # the first character, which may be a BOM, was seen
        self._after_cr = False  # the last character was a CR: an LF now belongs to it
        self._line: list[str] = []  # the pieces of a line that is still open ...
        self._line_chars = 0  # ... and their length
        self._data: list[str] = []  # the data buffer, a line an item ...
        self._data_chars = 0  # ... and its length with the joining LFs
        self._type = ''
        self._id = ''

    def feed(self, raw: bytes) -> list[str]:
        """The data of each event that ``raw`` completes, as str (an ``Event`` where the type is not ``message``).

        Raises StreamFailure (a ValueError) on a broken rule. Where ``raw`` completes events before the offending
        character these are returned, ``failure`` is set and the next call raises.
        """
        if self.failure:
            raise self.failure
        out: list[str] = []
        try:
            text, used = _utf8_decode(raw, 'strict', False)
            whole = used == len(raw) and self._begun and not self._tail
        except UnicodeDecodeError:
            whole = False
        if whole:
            self._offset += used
        else:
            text, self.failure = self._decode(raw)
        try:
            if text:
                self._lines(text, out)
        except StreamFailure as earlier:
            self.failure = earlier
        self.dispatched += len(out)
        if self.failure and not out:
            raise self.failure
        return out

    def finish(self) -> None:
        """The body ended. Raises the pending failure, or NotUtf8 (a UnicodeDecodeError) if it ended inside a character."""
        if not self.failure and self._tail:
            self.failure = NotUtf8(self._tail, self._offset, 'unexpected end of data')
        if self.failure:
            raise self.failure

    @property
    def between_events(self) -> bool:
        """Whether what came so far ends with a blank line or a comment: nothing stands half way."""
        return not (self._line or self._data or self._tail)

    @property
    def open_data(self) -> str | None:
        """Data that no blank line has ended, with an open ``data`` line taken as ended; None without any. Never an event."""
        line = ''.join(self._line)
        name, _, value = line.partition(':')
        lines = self._data + ([value[value.startswith(' ') :]] if name == 'data' else [])
        return '\n'.join(lines) if lines else None

    def _decode(self, raw: bytes) -> tuple[str, StreamFailure | None]:
        """The same where a character was or is cut, one is wrong, or the first may be a BOM."""
        data = self._tail + raw if self._tail else raw
        failure: StreamFailure | None = None
        try:
            text, used = _utf8_decode(data, 'strict', False)
        except UnicodeDecodeError as exc:
            text, used = _utf8_decode(data[: exc.start], 'strict', True)
            failure = NotUtf8(data[exc.start : exc.start + 1], self._offset + exc.start, 'invalid start or continuation byte')
        self._tail = data[used:]
        self._offset += used
        if text and not self._begun:
            self._begun = True
            text = text[text[0] == '\ufeff' :]
        return text, failure

    def _lines(self, text: str, out: list[str]) -> None:
        if self._after_cr and text[0] == '\n':
            text = text[1:]
            self._after_cr = False
            if not text:
                return
        self._after_cr = False
        if '\r' in text:
            self._after_cr = text[-1] == '\r'
            text = text.replace('\r\n', '\n').replace('\r', '\n')
        if '\n' not in text:
            self._open_line(text)
            return
        lines = text.split('\n')
        if self._line:
            self._open_line(lines[0])
            lines[0] = ''.join(self._line)
            self._line.clear()
            self._line_chars = 0
        rest = lines.pop()
        # The hot path, once per line and bound to locals: a data line, then the blank line that dispatches it.
        max_line, max_event, buffer = self.max_line_chars, self.max_event_chars, self._data
        for line in lines:
            if not line:
                if buffer:
                    data = buffer[0] if len(buffer) == 1 else '\n'.join(buffer)
                    out.append(data if not self._type or self._type == 'message' else Event(data, self._type))
                    buffer.clear()
                self._type = ''
                self.last_event_id = self._id
            elif len(line) > max_line:
                raise self._too_long('line', max_line)
            elif line.startswith('data: '):
                value = line[6:]
                self._data_chars = self._data_chars + 1 + len(value) if buffer else len(value)
                if self._data_chars > max_event:
                    raise self._too_long('event', max_event)
                buffer.append(value)
            else:
                self._field(line, self.dispatched + len(out))
        if rest:
            self._open_line(rest)

    def _open_line(self, piece: str) -> None:
        self._line.append(piece)
        self._line_chars += len(piece)
        if self._line_chars > self.max_line_chars:
            raise self._too_long('line', self.max_line_chars)

    def _field(self, line: str, dispatched: int) -> None:
        name, _, value = line.partition(':')
        value = value[value.startswith(' ') :]
        if not name:
            self.comments += 1
        elif name == 'data':
            self._data_chars = self._data_chars + 1 + len(value) if self._data else len(value)
            if self._data_chars > self.max_event_chars:
                raise self._too_long('event', self.max_event_chars)
            self._data.append(value)
        elif name == 'event':
            self._type = value
        elif name == 'id':
            if '\0' not in value:
                self._id = value
        elif name == 'retry':
            if re.fullmatch('[0-9]{1,18}', value):
                self.reconnection_ms = int(value)
        elif name == 'error':
            self.error_field = self.error_field or (dispatched, value)
        else:
            self.unknown_fields += 1

    def _too_long(self, what: str, limit: int) -> StreamFailure:
        return StreamFailure(
            f'{what}_too_long', f'{what} is longer than the limit of {limit} characters (--max-{what}-chars)')


# --- events to verdict (OpenAI API, "The chat completion chunk object") --------------------------------------------------

# State and input give the next state; a pair that is missing is the failure named in VIOLATIONS.
TRANSITIONS = {
    ('open', 'text'): 'open',
    ('open', 'finish'): 'finished',
    ('open', 'done'): 'done',  # judged at the end: no_finish
    ('finished', 'finish again'): 'finished',
    ('finished', 'done'): 'done',
}
VIOLATIONS = {
    ('finished', 'text'): ('text_after_finish', 'text after finish_reason "{finish}"'),
    ('finished', 'finish'): ('second_finish', 'a second finish_reason after "{finish}"'),
}


class Policy(NamedTuple):
    """How strict to be: finish reasons accepted beside ``stop``, failures tolerated, warnings that fail the run."""

    accept_finish: tuple[str, ...] = ()
    tolerate: tuple[str, ...] = ()
    fail_on: tuple[str, ...] = ()


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(',', ':'), default=str)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen and value is not seen[key] and _differs(value, seen[key]):
                raise StreamFailure('repeated_key', 'a key stands twice in one object with different values')
            seen[key] = value
    return members


def _differs(value: Any, other: Any) -> bool:
    if value != other or type(value) is not type(other):
        return True
    if not isinstance(value, (dict, list)) or repr(value) == repr(other):  # 1, 1.0 and true differ inside too
        return False
    return json.dumps(value, sort_keys=True) != json.dumps(other, sort_keys=True)


def _no_constant(name: str) -> NoReturn:
    raise StreamFailure('not_json', f'{name} is not JSON')


def _bounded_int(digits: str) -> int:
    if len(digits.lstrip('-')) <= MAX_INT_DIGITS:
        try:
            return int(digits)
        except ValueError:  # a lower limit was set in this process
            raise StreamFailure('json_limits', f'an integer of {len(digits)} digits, more than this Python was told to take') from None
    raise StreamFailure('json_limits', f'an integer of more than {MAX_INT_DIGITS} digits')


_LEVELS = {'[': 1, '{': 1, ']': -1, '}': -1}


def _too_deep(text: str) -> bool:
    # Strings are skipped whole, one that never ends to the end of the text, so that each character is looked at once.
    tokens = re.findall(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', text, re.DOTALL)
    return max(itertools.accumulate(_LEVELS.get(token, 0) for token in tokens)) > MAX_NESTING


_checked = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_bounded_int).decode
_scan = json.JSONDecoder(parse_constant=_no_constant).scan_once  # type: ignore[attr-defined]  # not in typeshed


def strict_json(text: str) -> Any:
    """The value of a JSON text, the same on every Python.

    Raises StreamFailure: ``not_json`` (NaN and Infinity are none), ``json_limits`` for more than 100 levels or an integer
    of more than 4,300 digits, ``repeated_key`` for a key that stands twice in one object with different values.
    """
    if text.count('[') + text.count('{') > MAX_NESTING and _too_deep(text):
        raise StreamFailure('json_limits', f'JSON nested more than {MAX_NESTING} levels deep')
    try:
        return _checked(text)
    except StreamFailure:
        raise
    except ValueError:
        raise StreamFailure('not_json', 'not JSON') from None


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


# Characters that show nothing: the categories Cc, Cf, Cs, Zs, Zl and Zp of Unicode 16, U+FFFD and the noncharacters.  A table
# of our own, since unicodedata differs between Pythons; unassigned and private-use characters count as visible.
_VISIBLE = re.compile(
    '[^\x00-\x20\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f\u205f-\u2064'
    '\u2066-\u206f\u3000\ud800-\udfff\ufdd0-\ufdef\ufeff\ufff9-\ufffb\ufffd-\uffff\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3'
    '\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f'
    + ''.join(chr(plane << 16 | low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF)) + ']')
_SURROGATE = re.compile('[\ud800-\udfff]')


NOTHING_ALIKE = ('\r', '\r', sys.maxsize, -1)  # leaves no text between, whatever the data


class ChatCompletion:
    """The strict state machine of one streamed chat completion with one text choice. No I/O.

    Either ``feed`` it body bytes, which runs them through ``events`` and yields text as it is found, or ``take`` one
    event at a time; then ``end`` gives the verdict. ``text``, ``finish_reason``, ``done``, ``warnings`` and the counts may
    be read at any time. A failure is absorbing: it stands, and every later call raises it.
    """

    def __init__(self, *, model: str | None = None, max_tokens: int | None = None, usage_asked: bool = False,
                 policy: Policy | None = None, max_answer_chars: int = MAX_ANSWER_CHARS, events: Events | None = None,
                 secret: Secret | None = None) -> None:
        self.events = events or Events()
        self.asked_model, self.max_tokens, self.usage_asked = model, max_tokens, usage_asked
        self.policy = policy or Policy()
        self.max_answer_chars = max_answer_chars
        self.secret = secret or Secret(None)
        self.state = 'open'
        self.failure: StreamFailure | None = None
        self.warnings: dict[str, int] = {}
        self._warned = 0
        self.seen = 0  # events judged, up to [DONE]
        self.data_events = 0  # of these the ones of type message, with data
        self.content_events = 0
        self.reasoning_events = self.reasoning_chars = 0
        self.answer_chars = 0
        self.visible = False
        self.finish_reason: str | None = None
        self.usage: dict[str, int | None] = {'completion_tokens': None, 'prompt_tokens': None, 'cached_tokens': None,
                                             'reasoning_tokens': None}
        self.usage_seen = False
        self.id: Any = None  # of the chunks with text, or of the first chunk that has one
        self.text_id: Any = None
        self.model: str | None = None
        self.system_fingerprint: str | None = None
        self.server_error: dict[str, str] | None = None
        self._like, self._learn_from = NOTHING_ALIKE, 0  # see _learn
        self._answer = io.StringIO()
        self._high = ''  # a high surrogate whose low half the next piece may bring

    @property
    def done(self) -> bool:
        """Whether ``[DONE]`` was seen."""
        return self.state == 'done'

    @property
    def text(self) -> str:
        """The answer so far; a surrogate half left alone stands as U+FFFD."""
        return _SURROGATE.sub('\ufffd', self._answer.getvalue() + self._high)

    def shed(self) -> None:
        """Let the answer go, for its memory."""
        self._answer = io.StringIO()

    def feed(self, raw: bytes) -> Iterator[str]:
        """Judge the events that ``raw`` (body bytes) completes; yields each new piece of text. Raises StreamFailure.

        Text that came before a failure is yielded before it is raised, also when both share ``raw``.
        """
        events = self.events
        if self.state == 'done':  # only to count what follows
            try:
                later = len(events.feed(raw))
            except ValueError:
                later = 0
            if later:
                self._warn('after_done', later)
            return
        before = events.dispatched
        try:
            found = events.feed(raw)
        except StreamFailure:  # kept in events.failure; an error field may stand before it
            found = []
        stop = events.error_field[0] - before if events.error_field else -1
        for at, data in enumerate(found):
            if at == stop:
                break
            piece = self.take(data)
            if piece:
                yield piece
            if self.state == 'done':
                if at + 1 < len(found):
                    self._warn('after_done', len(found) - at - 1)
                return
        if events.error_field:
            self._error(events.error_field[1])
        if events.failure:
            raise self._fail(events.failure)

    def take(self, data: str) -> str:
        """Judge one event: its data, an ``Event`` where its type is not ``message``. Returns the text it adds.

        Raises StreamFailure; within one chunk the first finding stands, in the order error object, JSON, usage, choice,
        delta, finish and text.
        """
        if self.failure:
            raise self.failure
        if self.state == 'done':
            self._warn('after_done')
            return ''
        self.seen += 1
        try:
            if type(data) is not str:
                data = data if isinstance(data, Event) and data.type != 'message' else str(data)
            if type(data) is not str or not data or data == '[DONE]':
                return self._sentinel_or_ignored(data)
            self.data_events += 1
            # The hot path: a chunk that differs from one judged before in nothing but plain text (_learn)
            before, behind, start, end = self._like
            if data.startswith(before) and data.endswith(behind):
                content = data[start:end]
                if content and content.isprintable() and '"' not in content and '\\' not in content:
                    return self._text(content)
                return self._chunk(self._parse(data))
            warned = self._warned
            chunk = self._parse(data)
            text = self._chunk(chunk)
            if text and warned == self._warned and self.seen >= self._learn_from and len(data) <= MAX_LEARNED_CHARS:
                self._learn(data, chunk, text)
            return text
        except StreamFailure as failure:
            raise self._fail(failure) from None

    def _sentinel_or_ignored(self, data: str) -> str:
        kind = data.type if isinstance(data, Event) else 'message'
        if kind == 'error':
            self._error(data)
        if data == '[DONE]':
            self._move('done')
        else:
            self._warn('named_event' if kind != 'message' else 'empty_event')
        return ''

    def end(self, body_end: str | None = None) -> None:
        """The verdict once the stream is over. ``body_end`` tells how the body ended (``Body.end``), None if unknown.

        Returns on a pass; raises StreamFailure otherwise: the failure found before, or one of the boundary completion.
        """
        if self.failure:
            raise self.failure
        if self._high:
            self._answer.write(self._high)
            self._high = ''
        try:
            if not self.done:
                self.events.finish()
            self._judge(body_end)
        except StreamFailure as failure:
            raise self._fail(failure) from None

    def _judge(self, body_end: str | None) -> None:
        finish = self.finish_reason
        if not self.done:
            whole = body_end in ('last_chunk', 'length') and self.events.between_events
            if not (finish and whole and 'no_done' in self.policy.tolerate):
                raise StreamFailure('no_done', self._no_done(body_end))
            self._warn('no_done')
        if finish is None:
            raise StreamFailure('no_finish', f'[DONE] came after {self.content_events} content events without a finish_reason')
        if finish != 'stop' and finish not in self.policy.accept_finish:
            raise StreamFailure('finish_not_accepted', f'finish_reason is "{self.secret.quote(finish)}", expected "stop"')
        if not self.visible:
            raise StreamFailure('no_visible_text', f'no visible character in {self.answer_chars} characters of text, '
                                f'{self.reasoning_chars} of reasoning')
        text = self._answer.getvalue()
        if _SURROGATE.search(text):
            raise StreamFailure('unpaired_surrogate', 'half a surrogate pair stands alone in the text')
        if '\ufffd' in text:
            self._warn('replacement_character')
        self._judge_usage()
        refused = [w for w in self.warnings if w in self.policy.fail_on]
        if refused:
            raise StreamFailure('warning_refused', f'{refused[0]} (--fail-on): {warning_text(refused[0])}')

    def _judge_usage(self) -> None:
        tokens = self.usage['completion_tokens']
        if self.usage_asked and not self.usage_seen:
            self._warn('no_usage')
        if tokens == 0 and (self.content_events or self.reasoning_events):
            self._warn('usage_contradicts')
        if tokens is not None and self.max_tokens is not None and tokens > self.max_tokens:
            self._warn('max_tokens_exceeded')

    def _no_done(self, body_end: str | None) -> str:
        how = {'last_chunk': 'its last chunk', 'length': 'its Content-Length', 'closed': 'closing'}.get(body_end or '')
        finish = 'none' if self.finish_reason is None else f'"{self.secret.quote(self.finish_reason)}"'
        message = f'the body ended before [DONE]{f", by {how}," if how else ""} after {self.seen} events; finish_reason: {finish}'
        left = self.events.open_data
        if left == '[DONE]':
            message += '; "data: [DONE]" stands at the end, but no blank line ends that event'
        elif left is not None:
            message += f'; an event of {len(left)} characters was cut'
        elif not self.seen and self.events.unknown_fields:
            message += f'; {self.events.unknown_fields} lines were no event-stream fields'
        return message

    def _learn(self, data: str, chunk: dict[str, Any], text: str) -> None:
        """Keep what stands before and behind the text of a chunk that was judged and had nothing but text to say.

        JSON reads a chunk with the same before and behind, and between them characters that stand for themselves in a
        string, to the same members, its text apart; so it is judged like this one, as long as neither state nor names have
        changed (``_forget``). That the cut is right is tried here with another text and the strict decoder.
        """
        self._learn_from = self.seen + 16  # where every chunk differs otherwise, trying costs little
        if self.state != 'open' or chunk.get('usage') is not None or len(chunk['choices'][0]['delta']) > 1:
            return
        at = data.rfind(f'"{text}"') + 1
        before, behind = data[:at], data[at + len(text) :]
        chunk['choices'][0]['delta']['content'] = other = f'{text}, another'
        try:
            if at and strict_json(f'{before}{other}{behind}') == chunk:
                self._like = before, behind, len(before), -len(behind)
        except StreamFailure:
            pass

    def _forget(self) -> None:
        self._like, self._learn_from = NOTHING_ALIKE, 0

    def _warn(self, code: str, times: int = 1) -> None:
        self._warned += times
        self.warnings[code] = self.warnings.get(code, 0) + times

    def _fail(self, failure: StreamFailure) -> StreamFailure:
        if not self.failure:
            if failure.boundary in ('json', 'protocol'):
                failure.event = self.seen
            self.failure = failure
        return self.failure

    def _move(self, step: str) -> None:
        target = TRANSITIONS.get((self.state, step))
        if target is None:
            code, message = VIOLATIONS[self.state, step]
            raise StreamFailure(code, message.format(finish=self.secret.quote(self.finish_reason)))
        self.state = target
        self._forget()

    def _parse(self, data: str) -> dict[str, Any]:
        """The chunk in ``data``. The plain C scanner reads it; a count proves that no key can stand twice.

        Each key has a colon of its own outside strings. So where the text has no more colons than the objects at hand
        have different keys, no key was repeated, and the slower checked decoder is not needed.
        """
        if len(data) <= MAX_INT_DIGITS and data.count('[') + data.count('{') <= MAX_NESTING:
            try:
                chunk, end = _scan(data, 0)
            except (ValueError, StopIteration, RecursionError):
                chunk, end = None, -1
            if end == len(data) and type(chunk) is dict:
                keys = len(chunk)
                choices = chunk.get('choices')
                if type(choices) is list and len(choices) == 1 and type(choices[0]) is dict:
                    delta = choices[0].get('delta')
                    keys += len(choices[0]) + (len(delta) if type(delta) is dict else 0)
                usage = chunk.get('usage')
                if type(usage) is dict:
                    keys += len(usage)
                if data.count(':') == keys:
                    return chunk
        try:
            chunk = strict_json(data)
        except StreamFailure as exc:
            raise StreamFailure(exc.code, f'event {self.seen}: {exc.message}: "{self.secret.quote(data, 120, cut=True)}"') from None
        if type(chunk) is not dict:
            raise StreamFailure('not_an_object', f'event {self.seen} is JSON but no object: "{self.secret.quote(data, 120, cut=True)}"')
        return chunk

    def _chunk(self, chunk: dict[str, Any]) -> str:
        kind, choices, usage = chunk.get('object'), chunk.get('choices'), chunk.get('usage')
        if kind == 'error' or chunk.get('error') is not None:
            self._error(chunk['error'] if chunk.get('error') is not None else chunk)
        without = choices is None or choices == []
        if without:
            if any(chunk.get(name) is not None for name in ('message', 'detail', 'code')):
                self._error(chunk)
            if choices is None and usage is None:
                self._warn('empty_chunk')
        elif type(choices) is list:
            self._choice_errors(choices)
        if kind != 'chat.completion.chunk' or chunk.get('model') != self.model or 'system_fingerprint' in chunk:
            self._head_members(chunk)
        if usage is not None:
            self._usage(usage)
        choice = {} if without else self._choice(choices)
        delta, finish = choice.get('delta'), choice.get('finish_reason')
        content = '' if delta is None else self._delta(delta)
        if content:
            if self.state != 'open':
                self._move('text')
            if chunk.get('id') != self.text_id:
                self._text_id(chunk.get('id'))
            content = self._text(content)
        elif chunk.get('id') != self.id:
            self._other_id(chunk.get('id'))
        if finish is not None:
            self._finish(finish)
        return content

    def _choice_errors(self, choices: list[Any]) -> None:
        for choice in choices:
            for part in (choice, choice.get('delta')) if type(choice) is dict else ():
                if type(part) is dict and part.get('error') is not None:
                    self._error(part['error'])

    def _error(self, error: Any) -> NoReturn:
        """Raise ``server_error`` for an error in any of its forms: object, string, or event data of type error."""
        if isinstance(error, str):
            try:
                error = strict_json(error)
            except StreamFailure:
                error = str(error)
        if isinstance(error, dict) and error.get('error') is not None:
            error = error['error']
        parts = {'message': error}
        if isinstance(error, dict):
            message = next((error[k] for k in ('message', 'detail', 'error') if error.get(k) is not None), error)
            parts = {'message': message, 'type': error.get('type') or error.get('error_type'), 'code': error.get('code')}
        self.server_error = {k: self.secret.quote(v) for k, v in parts.items() if v is not None or k == 'message'}
        extra = ''.join(f', {k} {v}' for k, v in self.server_error.items() if k != 'message')
        failure = StreamFailure('server_error', f'error in the stream: {self.server_error["message"]}{extra}', event=self.seen)
        raise self._fail(failure)

    def _head_members(self, chunk: dict[str, Any]) -> None:
        kind, model, print_ = chunk.get('object'), chunk.get('model'), chunk.get('system_fingerprint')
        if kind not in ('chat.completion.chunk', None, ''):
            self._warn('object_differs')
        if model and model != self.model and isinstance(model, str):
            self.model = model
            self._forget()
            if self.asked_model is not None and model != self.asked_model:
                self._warn('model_differs')
        if print_ and self.system_fingerprint is None and isinstance(print_, str):
            self.system_fingerprint = print_

    def _usage(self, usage: Any) -> None:
        if type(usage) is not dict:
            raise StreamFailure('bad_usage', f'event {self.seen}: usage is neither an object nor null')
        self.usage_seen = True
        count = usage.get('completion_tokens')
        if count is not None:
            if not _count(count):
                quoted = self.secret.quote(count, 40)
                raise StreamFailure('bad_usage', f'event {self.seen}: completion_tokens {quoted} is no whole number from 0 up')
            self.usage['completion_tokens'] = count
        prompt, completion = usage.get('prompt_tokens_details'), usage.get('completion_tokens_details')
        for name, value in (
            ('prompt_tokens', usage.get('prompt_tokens')),
            ('cached_tokens', prompt.get('cached_tokens') if type(prompt) is dict else None),
            ('reasoning_tokens', completion.get('reasoning_tokens') if type(completion) is dict else None),
        ):
            if value is not None:
                self.usage[name] = value if _count(value) else None

    def _choice(self, choices: Any) -> dict[str, Any]:
        if type(choices) is not list:
            raise StreamFailure('bad_shape', f'event {self.seen}: choices is neither an array nor null')
        if len(choices) > 1:
            raise StreamFailure('many_choices', f'event {self.seen} has {len(choices)} choices, expected one')
        choice = choices[0]
        if type(choice) is not dict:
            raise StreamFailure('bad_shape', f'event {self.seen}: the choice is no object')
        index = choice.get('index', 0)
        if index != 0 or type(index) is not int:
            quoted = self.secret.quote(index, 40)
            raise StreamFailure('choice_index', f'event {self.seen}: the choice has index {quoted}, expected 0')
        if 'index' not in choice:
            if 'missing_index' not in self.policy.tolerate:
                raise StreamFailure('missing_index', f'event {self.seen}: the choice has no index')
            self._warn('missing_index')
        return choice

    def _delta(self, delta: Any) -> str:
        if type(delta) is not dict:
            raise StreamFailure('bad_shape', f'event {self.seen}: delta is neither an object nor null')
        content = delta.get('content')
        if content is not None and type(content) is not str:
            raise StreamFailure('bad_shape', f'event {self.seen}: content is neither a string nor null')
        if not content or len(delta) > 1:
            if delta.get('tool_calls') or delta.get('function_call'):
                raise StreamFailure('tool_call', f'event {self.seen} calls a tool, expected text')
            if delta.get('refusal'):
                raise StreamFailure('refused', f'event {self.seen}: refusal "{self.secret.quote(delta["refusal"])}"')
            named = (delta.get('reasoning'), delta.get('reasoning_content'))
            reasoning = next((r for r in named if r and isinstance(r, str)), '')
            if reasoning:
                self.reasoning_events += 1
                self.reasoning_chars += len(reasoning)
        return content or ''

    def _text_id(self, given: Any) -> None:
        if given is None or given == '':
            return
        if self.text_id is not None:
            if 'id_changed' not in self.policy.tolerate:
                was, now = self.secret.quote(self.text_id, 60), self.secret.quote(given, 60)
                raise StreamFailure('id_changed', f'event {self.seen} carries text under id "{now}", earlier text had "{was}"')
            self._warn('id_changed')
        elif self.id is not None and self.id != given:
            self._warn('id_differs')
        self.id = self.text_id = given
        self._forget()

    def _other_id(self, given: Any) -> None:
        if given is None or given == '':
            return
        if self.id is not None:
            self._warn('id_differs')
        else:
            self.id = given

    def _text(self, content: str) -> str:
        """Take in new answer text; returns it as it can be shown, a high surrogate held back for its other half."""
        self.answer_chars += len(content)
        if self.answer_chars > self.max_answer_chars:
            limit = f'the limit of {self.max_answer_chars} characters (--max-answer-chars)'
            self.answer_chars -= len(content)
            raise StreamFailure('answer_too_long', f'answer is longer than {limit}')
        self.content_events += 1
        if self._high or not content.isascii():
            content = self._high + content
            self._high = ''
            if _SURROGATE.search(content):
                content = content.encode('utf-16-le', 'surrogatepass').decode('utf-16-le', 'surrogatepass')
                if '\ud800' <= content[-1] <= '\udbff':
                    content, self._high = content[:-1], content[-1]
        self._answer.write(content)
        if not self.visible:
            self.visible = _VISIBLE.search(content) is not None
        return content

    def _finish(self, finish: Any) -> None:
        if type(finish) is not str or len(finish) > MAX_FINISH_CHARS:
            self.finish_reason = None
            raise StreamFailure('bad_shape', f'event {self.seen}: finish_reason is no string of up to {MAX_FINISH_CHARS} characters')
        if finish in ('', 'null'):
            self._warn('finish_empty')
        elif finish == self.finish_reason:
            self._move('finish again')
            self._warn('finish_repeated')
        else:
            self._move('finish')
            self.finish_reason = finish


def warning_text(code: str) -> str:
    """What a warning says; a tolerated failure says its meaning."""
    return WARNINGS.get(code) or f'tolerated: {FAILURES[code].meaning}'


# --- time ---------------------------------------------------------------------------------------------------------------


class _GraceOver(Exception):
    """A wait that changes nothing (after [DONE], for an error body) is over."""


class Clock:
    """The clocks of one run on one monotonic clock, in seconds: idle, deadline, and where asked for first text and stall.

    ``remaining`` is the timeout for the next operation on the wire; it raises when a clock has run out, with the phase
    reached and, from ``arrived``, what had come.
    """

    _WORDS: ClassVar = {'idle_timeout': ('no byte for {0:g} s (--idle {0:g})', 'idle'),
              'deadline': ('not over after {0:g} s (--deadline {0:g})', 'deadline'),
              'first_text_timeout': ('no visible text after {0:g} s (--first-text {0:g})', 'first_text'),
              'stall_timeout': ('no event with data for {0:g} s (--stall {0:g})', 'stall')}

    def __init__(self, idle: float, deadline: float, first_text: float | None = None, stall: float | None = None,
                 now: Callable[[], float] = time.monotonic) -> None:
        self.idle, self.deadline, self.first_text, self.stall = idle, deadline, first_text, stall
        self.now = now
        self.start = self.moved = now()  # moved: the last progress of bytes, either way
        self.event_at: float | None = None  # the last event with data; from sending on
        self.text_seen = False
        self.boundary, self.phase = 'resolve', 'resolving the host name'
        self.arrived: Callable[[], str] = lambda: 'nothing had arrived'
        self.roused: Callable[[], None] = lambda: None  # asked at least once a second; may raise what ends the run
        self._grace: float | None = None

    def enter(self, boundary: str, phase: str) -> None:
        """A new phase begins; beginning it counts as progress."""
        self.boundary, self.phase, self.moved = boundary, phase, self.now()

    def grace(self, seconds: float) -> None:
        """From here on nothing but the deadline and these seconds count, and their end raises _GraceOver."""
        self._grace = min(self.now() + seconds, self.start + self.deadline)

    def _over(self) -> tuple[float, str]:
        """The earliest end of the clocks that count from the start, and its code."""
        end = self.start + self.deadline, 'deadline'
        if self.first_text is not None and not self.text_seen:
            return min(end, (self.start + self.first_text, 'first_text_timeout'))
        return end

    def due(self) -> tuple[float, str]:
        """The earliest end of a clock and its code."""
        end = min(self._over(), (self.moved + self.idle, 'idle_timeout'))
        if self.stall is not None and self.event_at is not None:
            return min(end, (self.event_at + self.stall, 'stall_timeout'))
        return end

    def woken(self) -> None:
        """A wait ended with bytes at hand. Raises StreamFailure if it ended too late, since the process itself was stopped.

        Those bytes are progress, so that idle and stall are not over; a clock that counts from the start is.
        """
        end, code = self._over()
        if self._grace is None and self.now() >= end:
            raise self.failure(code)

    def remaining(self) -> float:
        """Seconds until the next clock runs out, above 0. Raises StreamFailure (or _GraceOver) when one has."""
        end, code = self.due() if self._grace is None else (self._grace, '')
        left = end - self.now()
        if left > 0:
            return left
        if not code:
            raise _GraceOver
        raise self.failure(code)

    def wait_ms(self) -> int:
        """How long the next poll may take, in milliseconds: until a clock runs out, and a second at most. Raises as ``remaining``."""
        self.roused()
        return math.ceil(min(self.remaining(), 1.0) * 1000)

    def failure(self, code: str) -> StreamFailure:
        """The failure that says which clock ran out, in which phase, and what had arrived."""
        words, name = self._WORDS[code]
        limit = words.format(getattr(self, name))
        return StreamFailure(code, f'{limit} while {self.phase}; {self.arrived()}', boundary=self.boundary)


# --- transport ----------------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A validated endpoint URL. ``host`` is without brackets."""

    url: str
    https: bool
    host: str
    port: int
    path: str


def loopback(host: str) -> bool:
    """Whether ``host`` is an IPv4 or IPv6 loopback literal in its plain form."""
    for family, test in ((socket.AF_INET, b'\x7f'), (socket.AF_INET6, b'\0' * 15 + b'\1')):
        try:
            if socket.inet_pton(family, host).startswith(test):
                return True
        except (OSError, ValueError):
            pass
    return False


def _authority(argument: str, text: str, default_port: int | None) -> tuple[str, int]:
    parts = re.fullmatch(r'(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]{1,253}))(:[0-9]{0,6})?', text)
    if not parts:
        raise Refused(argument, 'the host is malformed (a name, an IPv4 address, or an IPv6 address in brackets)')
    if parts[1]:
        try:
            socket.inet_pton(socket.AF_INET6, parts[1])
        except OSError:
            raise Refused(argument, 'the IPv6 address is malformed') from None
    elif not all(1 <= len(label) <= 63 for label in parts[2].removesuffix('.').split('.')):  # an absolute name ends in a dot
        raise Refused(argument, 'the host is malformed (each part of a name has 1 to 63 characters)')
    port = int(parts[3][1:] or '0') if parts[3] else default_port
    if port is None or not 1 <= port <= 65535:
        raise Refused(argument, 'the port must be from 1 to 65535')
    return parts[1] or parts[2], port


def parse_url(url: str) -> Target:
    """The parts of an endpoint URL. Raises Refused; the message never repeats user info, query or a bad port."""
    if not isinstance(url, str) or not re.fullmatch('[\x21-\x7e]{1,4096}', url):
        raise Refused('url', 'must be 1 to 4,096 printable ASCII characters without spaces')
    for char, what in (('\\', 'a backslash'), ('#', 'a fragment'), ('?', 'a query')):
        if char in url:
            raise Refused('url', f'must not have {what}')
    parts = re.fullmatch('(https?)://([^/]*)(/.*)?', url, re.IGNORECASE)
    if not parts:
        raise Refused('url', 'must be a full http:// or https:// URL')
    if '@' in parts[2]:
        raise Refused('url', f'must not have credentials; the key goes into {KEY_VARIABLE}')
    https = parts[1].lower() == 'https'
    host, port = _authority('url', parts[2], 443 if https else 80)
    if not https and host.lower() != 'localhost' and not loopback(host):
        raise Refused('url', 'plain http is for loopback only: use https, or a tunnel that ends on 127.0.0.1')
    return Target(url, https, host, port, parts[3] or '/')


def resolve(host: str, port: int, clock: Clock) -> list[Any]:
    """The addresses of a host as getaddrinfo gives them, in a thread that is abandoned when a clock runs out."""
    if loopback(host):  # nothing to ask anyone
        return [(socket.AF_INET6 if ':' in host else socket.AF_INET, socket.SOCK_STREAM, 0, '', (host, port))]
    answer: list[Any] = []
    over = threading.Event()

    def look_up() -> None:
        try:
            answer.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as exc:
            answer[:] = [exc]
        finally:
            over.set()

    try:
        threading.Thread(target=look_up, name='resolver', daemon=True).start()
    except RuntimeError as exc:
        raise StreamFailure('resolve_failed', f'no thread for the resolver: {exc}') from None
    while not over.wait(clock.wait_ms() / 1000):
        pass
    if not answer or isinstance(answer[0], Exception):
        reason = escaped(str(answer[0])) if answer else 'no address'
        raise StreamFailure('resolve_failed', f'{host} was not resolved: {reason}')
    return answer


def connect(addresses: list[Any], clock: Clock) -> tuple[socket.socket, str]:
    """A connected TCP socket and its peer's address: the addresses in turn, each with its share of the time that remains."""
    problems: list[str] = []
    refused = 0
    for at, (family, kind, proto, _, address) in enumerate(addresses):
        clock.enter('connect', 'connecting')
        name = _peer(address)
        share = (clock.start + clock.deadline - clock.now()) / (len(addresses) - at)
        try:
            sock = socket.socket(family, kind, proto)
        except OSError as exc:
            problems.append(f'{name}: {exc.strerror}')
            continue
        try:
            sock.settimeout(min(share, clock.remaining()))
            sock.connect(address)
            if sock.getsockname()[:2] == address[:2]:  # the kernel met itself on a free port of its own range
                raise ConnectionRefusedError(errno.ECONNREFUSED, 'Connection refused')
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, 'TCP_NOTSENT_LOWAT'):  # what waits in the kernel is no progress: keep that little
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 16_384)
            return sock, name
        except OSError as exc:
            sock.close()
            if isinstance(exc, TimeoutError) and exc.errno is None:
                if at + 1 == len(addresses):
                    raise clock.failure(clock.due()[1]) from None
                problems.append(f'{name}: timed out')
            else:
                refused += isinstance(exc, ConnectionRefusedError)
                problems.append(f'{name}: {exc.strerror or exc}')
        except BaseException:
            sock.close()
            raise
    code = 'connect_refused' if refused == len(problems) else 'connect_failed'
    raise StreamFailure(code, '; '.join(problems[:8]) + (f'; and {len(problems) - 8} more' if problems[8:] else ''))


def _peer(address: tuple[Any, ...]) -> str:
    return f'[{address[0]}]:{address[1]}' if ':' in str(address[0]) else f'{address[0]}:{address[1]}'


SSH_FIXED = {  # ssh takes the first value of an option
    'batchmode': 'yes',
    'controlmaster': 'no',
    'controlpath': 'none',
    'loglevel': 'INFO',  # below it the reason of a failure is not told
    'permitlocalcommand': 'no',  # it would write into the stream
}
SSH_UNASKED = ('DISPLAY', 'WAYLAND_DISPLAY', 'SSH_ASKPASS')  # the ssh to a jump host has no BatchMode of ours


class Tunnel:
    """``ssh -W`` as a child process: its standard streams are the connection to the far side, and no local port is opened.

    One thread starts the child, keeps the end of what it says on stderr and waits for it, so that no signal can come between
    its start and ``stop``. The child has no terminal and no variable that holds the key.
    """

    def __init__(self, destination: tuple[str | None, str, int | None], options: Sequence[str], to: str, secret: Secret) -> None:
        user, host, port = destination
        options = (*(f'{name}={value}' for name, value in SSH_FIXED.items()), *options)
        self._command = ['ssh', '-W', to, *(('-p', str(port)) if port else ()), *(('-l', user) if user else ()),
                         *(word for option in options for word in ('-o', option)), '--', host]
        self._secret = secret
        self._said = bytearray()
        self._child: subprocess.Popen[bytes] | None = None
        self._started, self._over = threading.Event(), threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._carry, name='ssh', daemon=True)
        self.opened_at: float | None = None
        # Two pairs, since ssh closes only its output when the far side has no more to send
        self.sock, self._theirs_out = socket.socketpair()
        self.out, self._theirs_in = socket.socketpair()
        self.out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # what waits for ssh is no progress
        self._unread: socket.socket | None = self._theirs_in.dup()

    def start(self) -> None:
        """Start ssh. Whoever calls this calls ``stop``. Raises StreamFailure."""
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise StreamFailure('tunnel_failed', f'no thread for ssh: {exc}') from None

    def _carry(self) -> None:
        import subprocess

        key = self._secret.key
        environment = {k: v for k, v in os.environ.items() if k not in (KEY_VARIABLE, *SSH_UNASKED)
                       and not (key and (v == key or (len(key) >= 8 and key in v)))}
        try:
            with self._theirs_in, self._theirs_out:
                child = self._child = subprocess.Popen(  # noqa: S603  # every word was checked
                    self._command, stdin=self._theirs_in.fileno(), stdout=self._theirs_out.fileno(), stderr=subprocess.PIPE,
                    env={**environment, 'SSH_ASKPASS_REQUIRE': 'never'}, start_new_session=True)
            self._started.set()
            if self._stopped:  # it took long to start
                self._kill(signal.SIGKILL)
            with child:
                while piece := os.read(child.stderr.fileno(), 4096) if child.stderr else b'':
                    self._said += piece
                    del self._said[:-MAX_SAID_BYTES]
        except OSError as exc:
            self._said += f'ssh did not start: {exc.strerror}'.encode()
        finally:
            self._started.set()
            self._over.set()

    def await_open(self, clock: Clock) -> None:
        """After the first bytes were sent: return once ssh took them, as it does when the channel is open, or once it ended.

        Raises StreamFailure of a clock, with the boundary ``tunnel``.
        """
        if self._unread is None:
            return
        before = clock.boundary, clock.phase
        clock.enter('tunnel', 'opening the SSH tunnel')
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        while not self._taken() and not poller.poll(min(5, clock.wait_ms())):
            pass
        if self._taken():
            self.opened_at = clock.now()
        self._unread.close()  # from here on the child alone holds that end
        self._unread = None
        clock.enter(*before)

    def _taken(self) -> bool:
        try:
            return bool(self._unread and not self._unread.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def dead(self) -> bool:
        """Whether ssh has ended, other than by the far side's wish."""
        return bool(self._child and self._child.poll())

    def failure(self, patience: float) -> str | None:
        """Why the tunnel broke, in ssh's last words; None where it did not. ssh has ``patience`` seconds to end."""
        self._over.wait(patience)
        status = self._child.poll() if self._child else 255
        if not status and self.opened_at:  # it still runs, or the far side closed everything
            return None
        whole = bytes(self._said).partition(b'\n')[2] if len(self._said) == MAX_SAID_BYTES else bytes(self._said)
        lines = [line.strip() for line in self._secret.mask(whole.decode('utf-8', 'replace')).splitlines()]
        told = [line for line in lines if line and not line.startswith(('@@', '**', 'Warning: Permanently added'))]
        how = 'it closed the connection' if status is None else f'signal {-status}' if status < 0 else f'status {status}'
        return self._secret.quote('; '.join(told[-4:]), 2 * MAX_QUOTE_CHARS) or f'ssh ended and said nothing: {how}'

    def stop(self) -> None:
        """End the child and those it started: a moment for SIGTERM, then SIGKILL."""
        self._stopped = True
        if self._unread:
            self._unread.close()
        if self._thread.ident is None:
            self._theirs_in.close()
            self._theirs_out.close()
            return
        self._started.wait(1)
        self._kill(signal.SIGTERM)
        until = time.monotonic() + 0.05
        while self._kill(0):
            if time.monotonic() > until:
                self._kill(signal.SIGKILL)
                self._over.wait(0.2)
                return
            time.sleep(0.002)

    def _kill(self, number: int) -> bool:
        """Signal the child's group; whether there is one."""
        try:
            if self._child:
                os.killpg(self._child.pid, number)
            return self._child is not None
        except OSError:
            return False


def _presented(tls: ssl.SSLObject, code: str) -> str:
    """What a certificate that was not accepted says of itself in this matter; '' where this interpreter hides it."""
    try:
        chain = tls._sslobj.get_unverified_chain()  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public way
        told = chain[0].get_info()
        names = [name for _, name in told.get('subjectAltName', ())]
        if code == 'tls_expired':
            return f', the certificate is valid from {told["notBefore"]} to {told["notAfter"]}'
        if code == 'tls_untrusted':
            return ', the certificate was issued by ' + ', '.join(value for part in told['issuer'] for _, value in part)
        return f', the certificate names {", ".join(names[:8])}' if names else ', the certificate has no subject alternative name'
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return ''


class _SendStopped(Exception):
    """The request was not sent whole: the server answered, closed or reset while it was being sent."""


class Wire:
    """The connection as http.client sees it (``sendall``, ``makefile``), with the clocks in front of every operation.

    http.client may close what it thinks its socket or file is: ``close`` leaves the connection open, ``shut`` ends it.
    Every ``makefile`` is this one reader, so that no byte is lost between head and body. TLS runs over memory BIOs: then
    each socket read is one clocked operation in the handshake too, and ``read_at`` is the time it returned.
    """

    def __init__(self, link: socket.socket | Tunnel, clock: Clock, secret: Secret) -> None:
        self.tunnel = link if isinstance(link, Tunnel) else None
        self.sock, self.out = (link.sock, link.out) if isinstance(link, Tunnel) else (link, link)
        self.clock, self.secret = clock, secret
        for end in (self.sock, self.out):
            end.setblocking(False)
        self._readable = select.poll()
        self._readable.register(self.sock, select.POLLIN)
        self.read_at = clock.now()
        self.ended = False  # the connection itself ended, well or badly
        self.truncated = False  # TLS ended without close_notify
        self.tls: ssl.SSLObject | None = None
        self._in: ssl.MemoryBIO | None = None
        self._out: ssl.MemoryBIO | None = None
        self._buffer = bytearray()
        self._searched = 0
        self._status_due = True
        self.head_bytes = 0

    # -- what http.client calls

    def sendall(self, data: bytes) -> None:
        """Send everything, or raise: StreamFailure for a clock, _SendStopped where the server stopped it."""
        if self.tls and self._out:
            for at in range(0, len(data), 16384):  # records, so that the BIO does not hold the whole body twice
                self.tls.write(data[at : at + 16384])
                self._send(self._out.read(), answers=True)
        else:
            self._send(data, answers=True)

    def makefile(self, *_args: object, **_kwargs: object) -> Wire:
        """Give this reader, whatever is asked for."""
        return self

    def readline(self, limit: int = -1) -> bytes:
        """One line of the head, with its end. Raises StreamFailure where the head ends early, is too large or malformed."""
        while (end := self._buffer.find(b'\n', self._searched)) < 0:
            self._searched = len(self._buffer)
            if self.head_bytes + self._searched > MAX_HEAD_BYTES:
                raise StreamFailure('head_too_large', f'status line and header fields exceed {MAX_HEAD_BYTES} bytes')
            raw = self.recv()
            if not raw:
                self.head_bytes += len(self._buffer)
                raise StreamFailure('closed_before_head', f'connection closed after {self.head_bytes} bytes of the head')
            self._buffer += raw
            if self._buffer.startswith(b'\x15\3') and self._status_due:
                break
        if self._buffer.startswith(b'\x15\3') and self._status_due:  # the start of an alert record
            raise StreamFailure('head_malformed', 'expected an HTTP/1.1 status line, found a TLS alert: that port speaks TLS, use https')
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        self._searched = 0
        if self.head_bytes + len(line) > MAX_HEAD_BYTES:
            raise StreamFailure('head_too_large', f'status line and header fields exceed {MAX_HEAD_BYTES} bytes')
        if self._status_due and not re.fullmatch(rb'HTTP/1\.[0-9] [1-9][0-9]{2}(?: [^\r\n\x00]*)?\r?\n', line):
            found = self.secret.quote(line.decode('latin-1').rstrip(), 60)
            raise StreamFailure('head_malformed', f'expected an HTTP/1.1 status line, found "{found}"')
        if b'\0' in line or b'\r' in line[:-2] or line.endswith(b'\r\r\n'):
            raise StreamFailure('head_malformed', 'a header line holds a bare CR or a NUL')
        if not self._status_due and not re.match(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:|[ \t]|\r?\n", line):
            raise StreamFailure('head_malformed', f'a header line is no field (it could hide Transfer-Encoding): byte 0x{line[0]:02x}')
        self._status_due = False
        self.head_bytes += len(line)
        return line if limit < 0 else line[:limit]

    def begin_head(self) -> None:
        """The next line is a status line."""
        self._status_due, self.head_bytes = True, 0

    def close(self) -> None:
        """Nothing: http.client closes early on ``Connection: close``."""

    flush = close

    # -- what the run calls

    @property
    def buffered(self) -> int:
        """How many bytes came that were not asked for yet."""
        return len(self._buffer)

    def read(self) -> bytes:
        """The next bytes of the answer, those that came with the head first; empty at the end. Raises OSError."""
        if self._buffer:
            raw = bytes(self._buffer)
            self._buffer.clear()
            return raw
        return self.recv()

    def secure(self, context: ssl.SSLContext, name: str) -> None:
        """The TLS handshake. Raises StreamFailure of the boundary ``tls``."""
        import ssl

        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        begun = b''  # the first bytes of the answer, however they were cut
        try:
            tls = context.wrap_bio(self._in, self._out, server_hostname=name)
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._send(self._out.read())
                    raw = self._receive()
                    begun += raw[: 5 - len(begun)]
                    if not raw:
                        raise StreamFailure('tls_failed', 'connection closed in the TLS handshake') from None
                    self._in.write(raw)
            self._send(self._out.read())
        except ssl.SSLCertVerificationError as exc:
            self._alert()
            code = {9: 'tls_expired', 10: 'tls_expired', 62: 'tls_name', 63: 'tls_name', 64: 'tls_name'}.get(exc.verify_code)
            code = code or 'tls_untrusted'
            words = f'{exc.verify_message} (OpenSSL verify code {exc.verify_code}); asked for {name}{_presented(tls, code)}'
            raise StreamFailure(code, self.secret.quote(words)) from None
        except (OSError, UnicodeError, _SendStopped) as exc:  # SSLError is an OSError; a name may be no IDNA
            self._alert()
            reason = getattr(exc, 'reason', None) or getattr(exc, 'strerror', None) or str(exc)
            plain = '; that port speaks plain HTTP' if begun == b'HTTP/' else ''
            raise StreamFailure('tls_failed', f'TLS handshake failed: {escaped(str(reason))}{plain}') from None
        self.tls = tls

    def _alert(self) -> None:
        try:
            if self._out and self._out.pending:
                self.out.send(self._out.read())
        except OSError:
            pass

    def recv(self) -> bytes:
        """Decrypted bytes of at least one socket read; empty at the end of the connection. Raises OSError."""
        if not self.tls or not self._in or not self._out:
            return self._receive()
        import ssl

        while True:
            try:
                return self.tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                if self._out.pending:
                    self._send(self._out.read())
                raw = self._receive()
                if raw:
                    self._in.write(raw)
                else:
                    self._in.write_eof()
            except ssl.SSLZeroReturnError:
                return b''
            except ssl.SSLEOFError:
                self.truncated = True
                return b''
            except ssl.SSLError as exc:
                raise StreamFailure('tls_failed', f'TLS record layer failed: {escaped(exc.reason or type(exc).__name__)}') from None

    def shut(self) -> None:
        """Close the connection at once, so that the server can abort what it still computes."""
        for sock in {self.sock, self.out}:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()

    def _receive(self) -> bytes:
        while True:
            if not self._readable.poll(self.clock.wait_ms()):
                continue
            self.clock.woken()
            try:  # only now, since recv makes its buffer before it waits
                raw = self.sock.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                self.ended = True
                raise
            self.read_at = self.clock.moved = self.clock.now()
            self.ended = not raw
            return raw

    def _send(self, data: bytes, answers: bool = False) -> None:
        """Send all of ``data``. With ``answers`` an answer that comes meanwhile stops it, unless it is an interim one."""
        wanted = {self.out.fileno(): select.POLLOUT}
        if answers:
            wanted[self.sock.fileno()] = wanted.get(self.sock.fileno(), 0) | select.POLLIN
        poller = select.poll()
        for fd, events in wanted.items():
            poller.register(fd, events)
        view = memoryview(data)
        while view:
            ready = dict(poller.poll(self.clock.wait_ms()))
            if not ready:
                continue
            try:
                if ready.get(self.out.fileno(), 0) & ~select.POLLIN:
                    view = view[self.out.send(view[:READ_BYTES]) :]
                    self.clock.moved = self.clock.now()
                    if self.tunnel:
                        self.tunnel.await_open(self.clock)
                else:
                    self._buffer += self._early()
                    if _ANSWER.match(self._buffer) or len(self._buffer) > MAX_HEAD_BYTES:
                        raise _SendStopped('the server answered before it had read the request')
            except BlockingIOError:
                pass
            except OSError as exc:
                self.ended = True
                raise _SendStopped(exc.strerror or type(exc).__name__) from None

    def _early(self) -> bytes:
        """What came while the request is being sent, decrypted; nothing where it was only TLS's own."""
        raw = self.sock.recv(READ_BYTES)
        self.read_at = self.clock.moved = self.clock.now()
        if not raw:
            self.ended = True
            raise _SendStopped('the server closed its side')
        if not self.tls or not self._in:
            return raw
        import ssl

        self._in.write(raw)
        plain = b''
        try:
            while piece := self.tls.read(READ_BYTES):
                plain += piece
        except ssl.SSLWantReadError:
            pass
        return plain


# The start of a final answer, behind whole interim ones.
_ANSWER = re.compile(rb'(?:HTTP/1\.[0-9] 1(?!01)[0-9]{2}[^\n]*\n(?:[^\r\n][^\n]*\n)*\r?\n)*(?!HTTP/1\.[0-9] 1(?!01))(?=.{12})', re.DOTALL)


class _Response(http.client.HTTPResponse):
    """http.client's response head, counting the 100 answers that its ``begin`` would skip without end."""

    interim = 0

    def _read_status(self) -> tuple[str, int, str]:
        self.fp.begin_head()  # type: ignore[attr-defined]  # our Wire
        version, status, reason = super()._read_status()  # type: ignore[misc]  # not in typeshed
        if status == http.client.CONTINUE:
            self.interim += 1
            if self.interim > MAX_INTERIM:
                raise StreamFailure('interim_limit', f'more than {MAX_INTERIM} interim answers')
        return version, status, reason


def read_head(wire: Wire) -> tuple[_Response, int]:
    """The final status line and header fields, and how many interim (1xx, not 101) answers came before them.

    Raises StreamFailure of the boundary ``head``, or a clock's.
    """
    interim = 0
    while True:
        response = _Response(wire, method='POST')  # type: ignore[arg-type]  # our Wire stands for the socket
        response.interim = interim
        try:
            response.begin()
        except http.client.LineTooLong:
            raise StreamFailure('head_too_large', 'a line of the head exceeds 65536 bytes') from None
        except (http.client.HTTPException, ValueError) as exc:
            if isinstance(exc, StreamFailure):
                raise
            if 'headers' in str(exc):
                raise StreamFailure('head_too_large', 'more than 100 header fields') from None
            raise StreamFailure('head_malformed', f'the head is malformed ({type(exc).__name__})') from None
        except OSError as exc:
            got = wire.head_bytes + wire.buffered
            raise StreamFailure('closed_before_head', f'{exc.strerror or exc} after {got} bytes of the head') from None
        defects = [type(d).__name__ for d in response.msg.defects]
        if any('Multipart' not in d and 'Boundary' not in d for d in defects):  # those speak of a body, which is not there yet
            raise StreamFailure('head_malformed', f'the header fields are defective ({defects[0]})')
        interim = response.interim
        if not 100 <= response.status < 200 or response.status == 101:
            return response, interim
        interim += 1
        if interim > MAX_INTERIM:
            raise StreamFailure('interim_limit', f'more than {MAX_INTERIM} interim answers')


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """A client context: TLS 1.2 at least, names verified, the system's trust or the one of ``ca_file``. Raises Refused.

    Built by hand, since ssl.create_default_context would write the session keys to SSLKEYLOGFILE.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(['http/1.1'])
    if ca_file is None:
        context.load_default_certs()
        return context
    try:
        if not stat.S_ISREG(os.stat(ca_file).st_mode):
            raise Refused('ca_file', 'is no regular file')
        context.load_verify_locations(cafile=ca_file)
    except ssl.SSLError:
        raise Refused('ca_file', 'holds no certificate in PEM form') from None
    except (OSError, ValueError, TypeError) as exc:
        if isinstance(exc, Refused):
            raise
        raise Refused('ca_file', f'cannot be read: {getattr(exc, "strerror", None) or exc}') from None
    return context


# --- evidence -----------------------------------------------------------------------------------------------------------


_STEERING = re.compile('[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]')


def to_json(record: Mapping[str, Any], one_line: bool = False) -> bytes:
    """A record as JSON in UTF-8, one top-level key a line or all on one, with nothing in it that could steer a terminal."""
    members = []
    for name, value in record.items():  # each by itself, since one character beyond ASCII widens all those of its string
        text = f'{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}'
        members.append(_STEERING.sub(lambda m: f'\\u{ord(m[0]):04x}', text).encode())
    return b'{' + b', '.join(members) + b'}\n' if one_line else b'{\n ' + b',\n '.join(members) + b'\n}\n'


class Evidence:
    """The record file: created exclusively before anything is sent, replaced atomically by the final record.

    At any moment the name is absent or holds valid JSON. Raises Refused from the constructor; ``finish`` raises OSError.
    """

    def __init__(self, path: str, provisional: bytes) -> None:
        self.path = path
        self.directory = os.path.dirname(path) or '.'
        try:
            self._fd = self._reserve(provisional)
        except FileExistsError:
            raise Refused('output', f'{escaped(path)} exists and is never overwritten') from None
        except (OSError, ValueError) as exc:
            reason = getattr(exc, 'strerror', None) or exc
            raise Refused('output', f'{escaped(path)} cannot be created: {reason}') from None

    def _reserve(self, data: bytes) -> int:
        if os.path.lexists(self.path):
            raise FileExistsError
        if not os.path.basename(self.path):
            raise IsADirectoryError(errno.EISDIR, 'names a directory')
        temporary, fd = self._temporary(data)
        try:
            os.link(temporary, self.path, follow_symlinks=False)
        except FileExistsError:
            os.close(fd)
            raise
        except OSError:  # a file system without hard links
            os.close(fd)
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._write(fd, data)
            except BaseException:
                os.close(fd)
                os.unlink(self.path)
                raise
        finally:
            os.unlink(temporary)
        self._sync_directory()
        return fd

    def finish(self, data: bytes) -> None:
        """Put the final record in place. Raises OSError if the name is gone or no longer ours, or writing fails."""
        temporary, fd = self._temporary(data)
        try:
            os.close(fd)
            ours, there = os.fstat(self._fd), os.lstat(self.path)
            if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
                raise FileExistsError(errno.EEXIST, 'the name now belongs to another file')
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(self._fd)
        self._sync_directory()

    def drop(self) -> None:
        """Remove the file, if it is still ours: the run was refused."""
        _unlink_ours(self._fd, self.path)

    def _temporary(self, data: bytes) -> tuple[str, int]:
        path = os.path.join(self.directory, f'.stream-{os.urandom(8).hex()}.tmp')
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._write(fd, data)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return path, fd

    def _write(self, fd: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)

    def _sync_directory(self) -> None:
        try:
            fd = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a directory that may be written but not read
            return
        try:
            os.fsync(fd)
        except OSError:  # some file systems refuse to sync a directory
            pass
        finally:
            os.close(fd)


def _unlink_ours(fd: int, path: str) -> None:
    """Close a file of ours, and remove it if it still has its name."""
    try:
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            os.unlink(path)
    except OSError:
        pass
    finally:
        os.close(fd)


CAPTURE_START = b'{"capture":'
MAX_CAPTURE_LINE_BYTES = 8 * READ_BYTES  # a read of control characters, each of them six in JSON
UTC = '[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z'


def _utf8_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Capture:
    """The received body as it arrives, one JSON line a read, each written at once, so that a killed run keeps its evidence.

    The first line is the head: ``{"capture": 1, "started_at": ..., "ms": when it came, "synthetic": ..., "status": ...,
    "headers": {...}, "asked": {...}}``, with harmless fields only, and of the request what warnings rest on. Then a line a
    read: ``{"ms": since the head, "text": ...}``, or ``"base64"`` where it is not UTF-8 or would spell the key, and
    ``"excerpt": true`` where the answer is no event stream, so that its body says no more than why. The last tells how it
    ended: ``{"end": ..., "outcome": ..., "boundary": ..., "error": ..., "ms": ...}``, and ``incomplete`` where the reads
    would have more than ``most`` bytes. The key is masked with equal length, also where reads cut it: a read that may end in
    its start waits for the next. Raises Refused; a write that fails ends the capture, never the run.
    """

    def __init__(self, path: str, secret: Secret, most: int) -> None:
        self.path, self.secret = path, secret
        self.begun = self.incomplete = self.excerpt = self._broken = False
        self._left = most
        self._held: list[tuple[float, int]] = []  # reads that wait: their times and lengths ...
        self._text = ''  # ... and their bytes as characters, so that the key's forms can be looked for
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as exc:
            raise Refused('capture', f'{escaped(path)} cannot be created: {getattr(exc, "strerror", None) or exc}') from None

    def line(self, value: Mapping[str, Any]) -> None:
        """Write one line."""
        self.begun = True
        self._write(to_json(value, one_line=True))

    def _write(self, line: bytes) -> None:
        try:
            left = memoryview(line)
            while left and not self._broken:
                left = left[os.write(self._fd, left) :]
        except OSError:
            self._broken = self.incomplete = True

    def read(self, ms: float, data: bytes, last: bool = False) -> None:
        """Write what one read brought, ``ms`` milliseconds after the head."""
        self._held.append((ms, len(data)))
        text = self._text + data.decode('latin-1')
        if last:
            self._text, known = self.secret.mask_cut(text, stars=True), len(text)
        else:
            cut = self.secret.form_cut(text)  # which may be of the key's last character, or of its first
            self._text = self.secret.mask(text[:cut], stars=True) + text[cut:]
            known = min(cut, self.secret.begins_at(self._text, 1))
        while self._held and self._held[0][1] <= known:
            ms, length = self._held.pop(0)
            self._put(ms, self._text[:length].encode('latin-1'))
            self._text, known = self._text[length:], known - length

    def _put(self, ms: float, data: bytes) -> None:
        if not data or self.incomplete:
            return
        line: dict[str, Any] = {'ms': ms, 'text': _utf8_or_none(data), **({'excerpt': True} if self.excerpt else {})}
        written = to_json(line, one_line=True)
        if line['text'] is None or self.secret.stands_in(written.decode()):  # JSON's \n before the rest of it, say
            line['base64'] = base64.b64encode(data).decode()
            del line['text']
            written = to_json(line, one_line=True)
        self._left -= len(written)
        self.incomplete = self._left < 0
        if not self.incomplete:
            self._write(written)

    def end(self, record: Mapping[str, Any]) -> None:
        """Write the last line."""
        self.read(record['duration_ms'], b'', last=True)
        boundary = record['failure'] and record['failure']['boundary']
        self.line({'end': record['delivery']['body_end'], 'outcome': record['outcome'], 'boundary': boundary, 'error': record['error'],
                   'ms': record['duration_ms'], **({'incomplete': True} if self.incomplete else {})})
        os.close(self._fd)

    def drop(self) -> None:
        """Remove the file, if it is still ours: the run was refused."""
        _unlink_ours(self._fd, self.path)


# --- run ----------------------------------------------------------------------------------------------------------------


class MoreOptions(TypedDict, total=False):
    """The further keyword arguments of ``stream``; clocks in seconds, limits in characters or bytes."""

    first_text: float | None
    stall: float | None
    connect_to: str | None
    ssh: str | None
    ssh_option: Sequence[str]
    messages: list[dict[str, Any]] | None
    system: str | None
    extra_body: dict[str, Any] | None
    accept_finish: Sequence[str]
    tolerate: Sequence[str]
    fail_on: Sequence[str]
    max_line_chars: int
    max_event_chars: int
    max_answer_chars: int
    max_stream_bytes: int
    run_id: str | None
    label: str | None
    notes: dict[str, str] | None


class Options(MoreOptions, total=False):
    """The keyword arguments of ``ChatStream``."""

    max_tokens: int
    idle: float
    deadline: float
    ca_file: str | None
    token: str | None


DEFAULTS: Options = {
    'max_tokens': 128, 'idle': 10.0, 'deadline': 60.0, 'first_text': None, 'stall': None, 'ca_file': None, 'token': None,
    'connect_to': None, 'ssh': None, 'ssh_option': (), 'messages': None, 'system': None, 'extra_body': None,
    'accept_finish': (), 'tolerate': (), 'fail_on': (), 'max_line_chars': MAX_LINE_CHARS, 'max_event_chars': MAX_EVENT_CHARS,
    'max_answer_chars': MAX_ANSWER_CHARS, 'max_stream_bytes': MAX_STREAM_BYTES, 'run_id': None, 'label': None, 'notes': None,
}
LIMITS = ('max_line_chars', 'max_event_chars', 'max_answer_chars', 'max_stream_bytes')
CLOCKS = ('idle', 'deadline', 'first_text', 'stall')
SHOWN_BY_BODY = ('events', 'json', 'protocol', 'completion')  # boundaries of what a body shows by itself
RECORDED_OPTIONS = ('accept_finish', 'tolerate', 'fail_on', *LIMITS, 'label', 'notes', 'token', 'idle', 'deadline')
BODY_ENDS = ('last_chunk', 'length', 'closed', 'open')
FIXED_MEMBERS = ('stream', 'n', 'model', 'messages')  # of the request body: what the verdict rests on


def checked_text(argument: str, value: Any, most: int = MAX_EVENT_CHARS) -> str:
    """A non-empty str that is valid Unicode, of at most ``most`` characters. Raises Refused."""
    if not isinstance(value, str) or not value:
        raise Refused(argument, 'must be text that is not empty')
    if _SURROGATE.search(value):
        raise Refused(argument, 'is not valid Unicode')
    if len(value) > most:
        raise Refused(argument, f'is longer than {most} characters')
    return value


def checked_key(argument: str, key: Any) -> str | None:
    """An API key of characters 0x21 to 0x7e; None for none or an empty one. Raises Refused, which never holds the key."""
    if key is None or key == '':
        return None
    if not isinstance(key, str) or not re.fullmatch('[\x21-\x7e]{1,4096}', key):
        raise Refused(argument, 'the key may only have characters from 0x21 to 0x7e')
    return key


def _checked_numbers(o: Options) -> None:
    for name in CLOCKS:
        value = o[name]  # type: ignore[literal-required]  # a name from CLOCKS
        if value is None and name in ('first_text', 'stall'):
            continue
        if type(value) not in (int, float) or not 0 < value <= MAX_CLOCK_S:
            raise Refused(name, f'must be seconds above 0, at most {MAX_CLOCK_S:g}')
    for name, most in (('max_tokens', MAX_TOKENS), *((n, 2**40) for n in LIMITS)):
        value = o[name]  # type: ignore[literal-required]  # a name from LIMITS
        if type(value) is not int or not 1 <= value <= most:
            raise Refused(name, f'must be a whole number from 1 to {most}')


def _checked_policy(o: Options) -> Policy:
    lists = []
    every = tuple(w for w in (*WARNINGS, *TOLERABLE) if w not in AFTER_THE_VERDICT)
    for name, known in (('accept_finish', None), ('tolerate', TOLERABLE), ('fail_on', (*(w for w in every if w in WARNINGS), 'all'))):
        values = o[name]  # type: ignore[literal-required]  # one of the three names
        if not isinstance(values, (list, tuple, set, frozenset)):
            raise Refused(name, 'must be a list of strings')
        for value in values:
            if known is not None and value not in known:
                raise Refused(name, f'knows only {", ".join(known)}')
            checked_text(name, value, MAX_FINISH_CHARS)
        lists.append(tuple(dict.fromkeys(values)))
    accept, tolerate, fail_on = lists
    return Policy(accept, tolerate, every if 'all' in fail_on else fail_on)


def _checked_messages(prompt: str | None, o: Options) -> list[dict[str, Any]]:
    messages = o['messages']
    if messages is None:
        messages = [{'role': 'user', 'content': checked_text('prompt', prompt)}]
    elif prompt is not None:
        raise Refused('messages', 'and a prompt exclude each other')
    elif not isinstance(messages, list) or not messages:
        raise Refused('messages', 'must be an array of messages that is not empty')
    elif not all(isinstance(m, dict) and isinstance(m.get('role'), str) and m['role'] for m in messages):
        raise Refused('messages', 'each message must be an object with a role')
    if o['system'] is not None:
        messages = [{'role': 'system', 'content': checked_text('system', o['system'])}, *messages]
    return messages


def _encoded(argument: str, value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(',', ':'), allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        raise Refused(argument, 'is not valid JSON in valid Unicode') from None


def _checked_notes(o: Options) -> dict[str, str]:
    if o['notes'] is not None and not isinstance(o['notes'], dict):
        raise Refused('note', 'must be a dict of strings')
    notes = o['notes'] or {}
    if len(notes) > 64:
        raise Refused('note', 'more than 64 notes')
    for key, value in notes.items():
        if not isinstance(key, str) or not re.fullmatch('[A-Za-z0-9_.-]{1,64}', key):
            raise Refused('note', 'a key may have letters, digits, dot, dash and underscore')
        checked_text('note', value, 1024)
    return notes


def _checked_ssh(destination: Any, options: Any) -> tuple[str | None, str, int | None] | None:
    if not isinstance(options, (list, tuple)):
        raise Refused('ssh_option', 'must be a list of strings')
    for option in options:
        if not isinstance(option, str) or not re.fullmatch('[A-Za-z][A-Za-z0-9]{1,63}(=| +)[^\x00-\x1f\x7f]{1,4096}', option):
            raise Refused('ssh_option', 'must be NAME=VALUE, as for ssh -o')
        if re.split('[= ]', option)[0].lower() in (*SSH_FIXED, 'forkafterauthentication'):
            raise Refused('ssh_option', f'may not set {", ".join(SSH_FIXED)} or forkafterauthentication')
    if destination is None:
        if options:
            raise Refused('ssh_option', 'needs --ssh')
        return None
    words = destination if isinstance(destination, str) else ''
    parts = re.fullmatch(r'(?:([A-Za-z0-9._][A-Za-z0-9._-]{0,63})@)?([A-Za-z0-9._\[].*)', words)
    if not parts:
        raise Refused('ssh', 'must be [USER@]HOST[:PORT]')
    host, port = _authority('ssh', parts[2], 22)
    import shutil

    if shutil.which('ssh') is None:
        raise Refused('ssh', 'needs the program ssh (OpenSSH), and there is none')
    return parts[1], host, port if re.search(r':[0-9]*\Z', parts[2]) else None  # None: what ssh's own configuration says


class ChatStream:
    """One run: a context manager that yields the answer's text as it arrives and then holds the finished ``record``.

    >>> with ChatStream(url, 'tiny', 'Say READY.') as answer:  # doctest: +SKIP
    ...     for text in answer:
    ...         print(text, end='')
    >>> answer.record['ok']  # doctest: +SKIP

    The constructor raises Refused (a ValueError) for arguments it does not take; nothing is sent before the first text is
    asked for. Every later failure is in the record. Leaving early closes the connection and records ``interrupted``.
    """

    def __init__(self, url: str, model: str, prompt: str | None, **options: Unpack[Options]) -> None:
        self._take_options(options, DEFAULTS)
        o = self.options
        self.target = parse_url(url)
        self.model: str | None = checked_text('model', model, 1024)
        messages = _checked_messages(prompt, o)
        self.run_id: str = os.urandom(16).hex() if o['run_id'] is None else o['run_id']
        if not isinstance(self.run_id, str) or not re.fullmatch('[A-Za-z0-9._-]{1,128}', self.run_id):
            raise Refused('run_id', 'must be 1 to 128 letters, digits, dots, dashes and underscores')
        self.dial = self._checked_dial(o['connect_to'])
        self.ssh = _checked_ssh(o['ssh'], o['ssh_option'])
        self.body = self._request_body(messages)
        sent = _encoded('messages', messages)
        self.messages_sha256, self.messages_bytes = hashlib.sha256(sent).hexdigest(), len(sent)
        if o['ca_file'] is not None and not self.target.https:
            raise Refused('ca_file', 'needs an https URL')
        self._context = tls_context(o['ca_file']) if self.target.https else None
        self._begin()

    def _take_options(self, options: Options, known: Iterable[str]) -> None:
        """Check and keep those options that a request and a recording have in common."""
        unknown = next((name for name in options if name not in known), None)
        if unknown:
            raise TypeError(f'unexpected keyword argument {unknown!r}')
        self.options: Options = {**DEFAULTS, **options}
        o = self.options
        _checked_numbers(o)
        self.policy = _checked_policy(o)
        self.secret = Secret(checked_key('token', o['token']))
        self.notes = _checked_notes(o)
        self.label = None if o['label'] is None else checked_text('label', o['label'], 256)

    def _checked_dial(self, connect_to: str | None) -> tuple[str, int]:
        if connect_to is None:
            return self.target.host, self.target.port
        if not isinstance(connect_to, str):
            raise Refused('connect_to', 'must be HOST:PORT')
        host, port = _authority('connect_to', connect_to, None)
        if not self.target.https and host.lower() != 'localhost' and not loopback(host):
            raise Refused('connect_to', 'plain http is for loopback only')
        return host, port

    def _request_body(self, messages: list[dict[str, Any]]) -> bytes:
        body: dict[str, Any] = {
            'model': self.model, 'messages': messages, 'stream': True, 'stream_options': {'include_usage': True},
            'max_tokens': self.options['max_tokens'], 'temperature': 0, 'n': 1,
        }
        extra = {} if self.options['extra_body'] is None else self.options['extra_body']
        if not isinstance(extra, dict):
            raise Refused('extra_body', 'must be a JSON object')
        touched = next((name for name in FIXED_MEMBERS if name in extra), None)
        if touched:
            raise Refused('extra_body', f'may not touch {touched}')
        self.sampling = {k: v for k, v in {**body, **extra}.items() if k not in FIXED_MEMBERS}
        _encoded('extra_body', extra)
        return _encoded('messages', {**body, **extra})

    def _begin(self) -> None:
        o = self.options
        asked = self.sampling.get('stream_options')
        limit = self.sampling.get('max_tokens')
        self.chat = ChatCompletion(
            model=self.model, max_tokens=limit if _count(limit) else None, policy=self.policy, secret=self.secret,
            usage_asked=isinstance(asked, dict) and asked.get('include_usage') is True,
            max_answer_chars=o['max_answer_chars'],
            events=Events(max_line_chars=o['max_line_chars'], max_event_chars=o['max_event_chars']))
        self.failure: StreamFailure | None = StreamFailure('unfinished', 'the run had not ended when this record was written')
        self.started_at: str | None = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())
        self.clock = Clock(o['idle'], o['deadline'], o['first_text'], o['stall'])
        self.clock.arrived = self._arrived
        self.marks: dict[str, float] = {}  # seconds on the clock
        self.gaps: list[float] = []  # milliseconds
        self.reads = self.content_reads = 0
        self._booked = 0  # content events whose times were booked
        self.longest_gap = 0.0
        self.digest = hashlib.sha256()
        self.wire: Wire | None = None
        self.tunnel: Tunnel | None = None
        self.framed: Body | None = None
        self.body_end: str | None = None
        self.response: dict[str, Any] = dict.fromkeys(
            ('status', 'http_version', 'id', 'id_carries_run_id', 'model', 'system_fingerprint', 'headers', 'interim', 'peer',
             'tls_version', 'certificate_sha256', 'certificate_expires', 'server_error', 'body_excerpt'))
        self.synthetic: bool | None = False
        self._stopped: str | None = None  # why the request was not sent whole
        self.capture: Capture | None = None  # set by whoever wants one, before the run
        self.timed = True  # whether the times and reads are those of the answer
        self._left: str | None = None  # why another thread closed this run
        self._record: dict[str, Any] | None = None
        self._texts = self._run()

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return self._texts

    def close(self, why: str = 'the caller left before the end of the stream') -> None:
        """Close the connection, and the record with ``interrupted`` if the run had not ended."""
        if self._record is None and self.failure and self.failure.code == 'unfinished':
            self.failure = StreamFailure('interrupted', why)
        try:
            self._texts.close()
        except ValueError:  # another thread is in it: it will find the connection closed
            self._left = why
            if self.wire:
                self.wire.shut()
            return
        self._end()

    @property
    def record(self) -> dict[str, Any]:
        """The evidence record: finished once the run is over, before that the provisional one (``unfinished``)."""
        return self._record or build_record(self)

    def asked(self) -> dict[str, Any]:
        """The group ``request`` of the record."""
        o = self.options
        sampling = self.sampling if len(_dumps(self.sampling)) <= 4096 else {
            'sha256': hashlib.sha256(_dumps(self.sampling).encode()).hexdigest()}
        return {
            'url': self.target.url, 'path_taken': 'ssh' if o['ssh'] else 'connect-to' if o['connect_to'] else 'direct',
            'connect_to': o['connect_to'], 'ssh': o['ssh'], 'run_id': self.run_id, **self._rules(),
            'messages_sha256': self.messages_sha256, 'messages_bytes': self.messages_bytes,
            'clocks_s': {name: o[name] for name in CLOCKS},  # type: ignore[literal-required]  # names from CLOCKS
            'sampling': sampling}

    def judged(self) -> dict[str, Any] | None:
        """The group ``input`` of the record: None where the answer came from a server."""
        return None

    def _rules(self) -> dict[str, Any]:
        return {
            'policy': {'accept_finish': self.secret.mask_all(list(dict.fromkeys(('stop', *self.policy.accept_finish)))),
                       'tolerate': list(self.policy.tolerate), 'fail_on': list(self.policy.fail_on)},
            'limits': {name: self.options[name] for name in LIMITS}}  # type: ignore[literal-required]  # names from LIMITS

    def _run(self) -> Generator[str, None, None]:
        if self._record is not None:
            return
        self.clock.start = self.clock.moved = self.clock.now()
        try:
            yield from self._exchange()
            self.failure = None
        except StreamFailure as failure:
            self.failure = self._diagnosed(failure)
        except (GeneratorExit, Refused):
            raise
        except Exception as exc:  # noqa: BLE001  # a fault of ours, or of memory: recorded, with nothing that could hold the key
            self.failure = self._diagnosed(StreamFailure('internal', f'{type(exc).__name__} in the client'))
        except BaseException as exc:
            self.failure = StreamFailure('interrupted', str(exc) or type(exc).__name__)
            if self.chat.done:  # in the wait for the end of the body, so the verdict stands
                self.body_end = 'open'
                self.failure = self._verdict_at_done()
            raise
        finally:
            self._end()

    def _verdict_at_done(self) -> StreamFailure | None:
        try:
            self.chat.end(self.body_end)
        except StreamFailure as failure:
            return failure
        return None

    def _diagnosed(self, failure: StreamFailure) -> StreamFailure:
        """What another thread closed was interrupted; a connection that ended before the verdict may have ended with its tunnel."""
        if self._left is not None:
            return StreamFailure('interrupted', self._left)
        untouched = failure.boundary in ('status', 'content', 'client')
        ended = self.wire is not None and self.wire.ended and not self.chat.done and not untouched
        if self.tunnel and (ended or (FAILURES[failure.code].boundary == REACHED and self.tunnel.dead)):
            self.marks['end'] = self.clock.now()
            left = self.clock.start + self.clock.deadline - self.clock.now()
            said = self.tunnel.failure(min(0.3, max(0.05, left)))
            if said:
                return StreamFailure('tunnel_failed', f'{said}; {self._arrived()}')
        return failure

    def _end(self) -> None:
        if self.wire:
            self.wire.shut()
        if self.tunnel:
            self.tunnel.stop()
        if self._record is None:
            if self.wire:
                self._book_text(self.wire.read_at)
            self.marks.setdefault('end', self.clock.now())
            record = self._built()
            if self.capture:
                if not self.capture.begun:  # no head came
                    self.capture.line(self._capture_head())
                self.capture.end(record)
                if self.capture.incomplete:
                    self.chat.warnings['capture_incomplete'] = 1
                    self._built()

    def _built(self) -> dict[str, Any]:
        try:
            self._record = build_record(self)
        except MemoryError:
            return self.shed()
        return self._record

    def shed(self) -> dict[str, Any]:
        """The record without the answer, where the memory does not hold both: ``internal``."""
        self._record = None
        self.chat.shed()
        self.failure = StreamFailure('internal', 'MemoryError in the client: the answer is not in this record')
        self._record = build_record(self)
        return self._record

    def _exchange(self) -> Iterator[str]:
        wire = self._open()
        self._send(wire)
        fields = self._head(wire)
        self._refuse_other_content(wire, fields)
        yield from self._stream(wire, framing_of(fields, self.response['http_version'] == '1.0', self.secret))

    def _open(self) -> Wire:
        link: socket.socket | Tunnel
        if self.ssh:
            link = self.tunnel = Tunnel(self.ssh, self.options['ssh_option'], _peer(self.dial), self.secret)
            self.tunnel.start()
        else:
            link = self._connected()
        self.wire = wire = Wire(link, self.clock, self.secret)
        if self._context:
            self.clock.enter('tls', 'in the TLS handshake')
            wire.secure(self._context, self.target.host.removesuffix('.'))
        if wire.tls:
            self.marks['secured'] = self.clock.now()
            self._certificate(wire.tls)
        return wire

    def _connected(self) -> socket.socket:
        host, port = self.dial
        addresses = resolve(host, port, self.clock)
        self.marks['resolved'] = self.clock.now()
        if not self.target.https:
            away = next((a[4] for a in addresses if not loopback(str(a[4][0]))), None)
            if away:
                raise StreamFailure('not_loopback', f'{host} resolves to {_peer(away)}; plain http stays on loopback')
        sock, self.response['peer'] = connect(addresses, self.clock)
        self.marks['connected'] = self.clock.now()
        return sock

    def _certificate(self, tls: ssl.SSLObject) -> None:
        import ssl

        self.response['tls_version'] = tls.version()
        self.response['certificate_sha256'] = hashlib.sha256(tls.getpeercert(True) or b'').hexdigest()
        expires = (tls.getpeercert() or {}).get('notAfter')
        if isinstance(expires, str):
            expiry = time.gmtime(ssl.cert_time_to_seconds(expires))
            self.response['certificate_expires'] = time.strftime('%Y-%m-%dT%H:%M:%SZ', expiry)

    def _send(self, wire: Wire) -> None:
        self.clock.enter('send', 'sending the request')
        connection = http.client.HTTPConnection(self.target.host, self.target.port)
        connection.default_port = 443 if self.target.https else 80  # the Host field goes without it
        connection.sock = wire  # our Wire stands for the socket
        headers = {'Content-Type': 'application/json', 'Accept': 'text/event-stream', 'Accept-Encoding': 'identity',
                   'User-Agent': f'stream-client/{__version__}', 'X-Request-Id': self.run_id, 'Connection': 'close'}
        if self.secret.key:
            headers['Authorization'] = f'Bearer {self.secret.key}'
        self.clock.event_at = self.clock.now()
        try:
            connection.request('POST', self.target.path, body=self.body, headers=headers)
            self.marks['sent'] = self.clock.now()
        except _SendStopped as stopped:  # an answer may explain it
            self._stopped = str(stopped)

    def _head(self, wire: Wire) -> list[tuple[str, str]]:
        self.clock.enter('head', 'waiting for the status line and header fields')
        try:
            response, interim = read_head(wire)
        except StreamFailure as failure:
            if self._stopped and failure.code == 'closed_before_head':
                raise StreamFailure('send_failed', f'the request was not sent whole: {self._stopped}') from None
            raise
        self.marks['head'] = wire.read_at
        fields = [(k, re.sub('\r?\n[ \t]+', ' ', v).strip(' \t')) for k, v in response.msg.items()]  # unfolded
        self.synthetic = self.synthetic or response.msg.get(FIXTURE_FIELD) is not None
        self.response.update(
            status=response.status, http_version='1.0' if response.version == 10 else '1.1', interim=interim,
            headers={name: self.secret.quote(', '.join(v for k, v in fields if k.lower() == name))
                     for name in RECORDED_FIELDS if name in response.msg})
        if self.capture:
            self.capture.line(self._capture_head())
        if response.status != 200:
            self._refuse_status(wire, response, fields)
        if self._stopped:
            raise StreamFailure('send_failed', f'status 200, but the request was not sent whole: {self._stopped}')
        return fields

    def _refuse_status(self, wire: Wire, response: _Response, fields: list[tuple[str, str]]) -> NoReturn:
        status = f'HTTP status {response.status} {self.secret.quote(response.reason, 60)}'.rstrip()
        if 300 <= response.status < 400:
            location = re.split('[?#]', self.secret.mask(response.msg.get('location', '')))[0]
            where = f'to "{self.secret.quote(re.sub("//[^/]*@", "//", location))}"' if location else 'without a Location'
            raise StreamFailure('redirect', f'{status}, a redirect {where}, is not followed')
        excerpt, said = self._excerpt(wire, fields)
        self.response['body_excerpt'] = excerpt
        after = response.msg.get('retry-after')
        raise StreamFailure('http_status', f'POST {self.target.path[:200]}: {status}' + (f': "{said}"' if said else '')
                            + (f' (Retry-After {self.secret.quote(after, 40)})' if after else ''))

    def _excerpt(self, wire: Wire, fields: list[tuple[str, str]]) -> tuple[str | None, str | None]:
        """What an answer that is no event stream says: up to 4 KiB taken within 500 ms, escaped, and its error message."""
        self.clock.grace(ERROR_BODY_S)
        try:
            body = Body(framing_of(fields, False), max_bytes=MAX_ERROR_BODY_BYTES + 6 * len(self.secret.key))
        except StreamFailure:
            return None, None
        parts = []
        if self.capture:
            self.capture.excerpt = True
        try:
            while not body.end and not body.failure:
                raw = wire.read()
                parts.append(body.feed(raw))
                self._capture_read(parts[-1], wire.read_at)
                if not raw:
                    body.feed_eof()
        except (_GraceOver, OSError, StreamFailure):
            pass
        return self._excerpt_of(b''.join(parts))

    def _excerpt_of(self, raw: bytes) -> tuple[str | None, str | None]:
        if not raw:
            return None, None
        if raw.startswith(b'\x1f\x8b'):
            return '(gzip)', None
        return self._quoted(raw)

    def _quoted(self, raw: bytes) -> tuple[str, str]:
        text = self.secret.mask_cut(raw.decode('utf-8', 'replace'))
        return self.secret.quote(text, MAX_ERROR_BODY_BYTES), self.secret.quote(_error_message(text))

    def _refuse_other_content(self, wire: Wire, fields: list[tuple[str, str]]) -> None:
        types = [v for k, v in fields if k.lower() == 'content-type']
        encodings = [v.strip(' \t').lower() for k, v in fields if k.lower() == 'content-encoding']
        if any(e not in ('', 'identity') for e in encodings):
            raise StreamFailure('encoded_body', f'Content-Encoding "{self.secret.quote(", ".join(encodings), 60)}"')
        if types and all(map(_is_event_stream, types)):
            return
        named = f'Content-Type "{self.secret.quote(", ".join(types), 100)}"' if types else 'no Content-Type'
        excerpt, said = self._excerpt(wire, fields)
        self.response['body_excerpt'] = excerpt
        looks = _looks_like(excerpt or '')
        raise StreamFailure('not_event_stream', f'{named}, expected text/event-stream; the body {looks}'
                            + (f': "{said}"' if said and looks == 'is JSON' else ''))

    def _stream(self, wire: Wire, framing: Framing) -> Iterator[str]:
        chat = self.chat
        self.framed = body = Body(framing, max_bytes=self.options['max_stream_bytes'])
        self.clock.enter('framing', 'waiting for the body')
        while not chat.done and not body.end:
            try:
                raw = wire.read() if body.framing.length != 0 else b''
            except OSError as exc:
                raise StreamFailure('connection_reset', f'{exc.strerror or exc} after {body.bytes} body bytes') from None
            data = body.feed(raw)
            if not raw:
                body.feed_eof('without close_notify' if wire.truncated else '')
            yield from self._judge(data, wire.read_at)
            if body.failure and not chat.done:
                raise body.failure
        if chat.done:
            self._drain(wire, body)
        else:
            self.body_end = body.end
        chat.end(self.body_end)

    def _judge(self, data: bytes, at: float) -> Iterator[str]:
        """The text in what one read brought, and the read booked."""
        chat = self.chat
        before = (chat.content_events, chat.data_events)
        due = self.clock.due()[0]
        try:
            for text in chat.feed(data):
                yield text
                if self.clock.now() >= due:  # time spent by the reader of the text counts
                    self._progress(at, before[1])
                    self.clock.remaining()
        finally:
            self._note(data, at, *before)

    def _note(self, data: bytes, at: float, content_before: int, events_before: int) -> None:
        """Book one read: all that came in it shares its time."""
        chat, marks = self.chat, self.marks
        self._keep(data, at)
        self.reads += bool(data)
        previous = marks.get('last_byte', marks['head'])
        if data:
            self.longest_gap = max(self.longest_gap, at - previous)
            marks['last_byte'] = at
        for name, reached in (('first_byte', bool(data)), ('first_event', chat.seen > 0),
                              ('first_reasoning', chat.reasoning_events > 0), ('first_text', chat.content_events > 0),
                              ('finish', chat.finish_reason is not None), ('done', chat.done)):
            if reached and name not in marks:
                marks[name] = at
        self.content_reads += chat.content_events > content_before
        self._book_text(at)
        self._progress(at, events_before)
        stage = 'completion' if chat.finish_reason else 'protocol' if chat.seen else 'events' if 'first_byte' in marks else ''
        self.clock.boundary = stage or 'framing'
        self.clock.phase = 'waiting for [DONE]' if chat.finish_reason else 'waiting for more of the body'

    def _book_text(self, at: float) -> None:
        """Book the times of text that came by ``at``. A signal may cut it anywhere: called again, it completes what is missing."""
        count = self.chat.content_events
        if count and 'last_text' not in self.marks:
            self.marks['last_text'] = at
        due = count - 1 - len(self.gaps)
        if due > 0:
            self.gaps.extend([round((at - self.marks['last_text']) * 1000, 3), *[0.0] * (due - 1)])
        if count > self._booked:
            self._booked, self.marks['last_text'] = count, at

    def _keep(self, data: bytes, at: float) -> None:
        self.digest.update(data)
        self._capture_read(data, at)

    def _capture_read(self, data: bytes, at: float) -> None:
        if self.capture and data:
            self.capture.read(round((at - self.marks['head']) * 1000, 3), data)

    def _progress(self, at: float, events_before: int) -> None:
        if self.chat.data_events > events_before:
            self.clock.event_at = at
        self.clock.text_seen = self.chat.visible

    def _drain(self, wire: Wire, body: Body) -> None:
        """After [DONE]: see how the body ends, for at most 250 ms. Nothing that happens here changes the verdict."""
        self.clock.grace(DRAIN_S)
        try:
            while not body.end and not body.failure:
                raw = wire.read()
                self._count(body.feed(raw), wire.read_at)
                if not raw:
                    body.feed_eof('without close_notify' if wire.truncated else '')
        except _GraceOver:
            self.body_end = 'open'
            return
        except (OSError, StreamFailure):
            body.failure = StreamFailure('connection_reset', 'reset after [DONE]')
        self.body_end = body.end
        if body.failure:
            self.chat.warnings['unclean_end'] = 1

    def _capture_head(self) -> dict[str, Any]:
        asked = {'model': self.model, 'max_tokens': self.chat.max_tokens, 'usage': self.chat.usage_asked}
        synthetic = self.synthetic if 'head' in self.marks else self.synthetic or None
        head = {'capture': 1, 'started_at': self.started_at, 'ms': self._ms('head'), 'synthetic': synthetic}
        return {**head, 'status': self.response['status'], 'headers': self.response['headers'] or {}, 'asked': self.secret.mask_all(asked)}

    def _count(self, data: bytes, at: float) -> None:
        """Book what came after [DONE]."""
        self._keep(data, at)
        for _ in self.chat.feed(data):
            pass

    def _ms(self, mark: str) -> float | None:
        """Milliseconds from the start to a mark that was reached."""
        return round((self.marks[mark] - self.clock.start) * 1000, 3) if mark in self.marks else None

    def _arrived(self) -> str:
        if self.framed is None:
            return f'{self.wire.head_bytes if self.wire else 0} bytes of the answer had arrived'
        chat = self.chat
        return (f'{self.framed.bytes} body bytes, {chat.seen} events and {chat.answer_chars} characters of text had arrived'
                + (f', finish_reason "{self.secret.quote(chat.finish_reason)}"' if chat.finish_reason else ''))


def _not_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # not for a writer of a FIFO: clocks wait


class Recording(ChatStream):
    """A body that was recorded, judged offline: a capture, or the plain bytes of an event stream (``curl -sN``).

    ``source`` is a path or a descriptor, which may be a pipe that is still being written. Of the options of ``ChatStream`` it
    has RECORDED_OPTIONS; ``model`` is the one that was asked for, where that is known. The record has an empty ``request``,
    and times only where a capture has them. Raises Refused for a file that cannot be read and for a malformed capture.
    """

    def __init__(self, source: str | os.PathLike[str] | int, model: str | None = None, **options: Unpack[Options]) -> None:
        options = {'idle': MAX_CLOCK_S, 'deadline': MAX_CLOCK_S, **options}
        self._take_options(options, RECORDED_OPTIONS)
        self.model = None if model is None else checked_text('model', model, 1024)
        self.run_id, self.sampling = '', {}
        self._begin()
        self.started_at, self.synthetic, self.timed = None, None, False
        self._last: dict[str, Any] = {}  # the last line of a capture
        self._said = b''  # what a captured answer said that was no event stream
        self._begins = b''  # plain bytes, for the message where they are no event stream
        try:
            self._file = open(source, 'rb', buffering=0, closefd=not isinstance(source, int), opener=_not_waiting)
            self._regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        except (OSError, ValueError) as exc:
            raise Refused('input', f'cannot be read: {getattr(exc, "strerror", None) or exc}') from None

    def _end(self) -> None:
        self._file.close()
        super()._end()

    def asked(self) -> dict[str, Any]:
        """Nothing was asked."""
        return {}

    def judged(self) -> dict[str, Any] | None:
        """What was judged, and by which rules."""
        return {'kind': 'capture' if self.timed else 'body', **self._rules()}

    def _exchange(self) -> Iterator[str]:
        self.framed = body = Body(Framing(False, None), max_bytes=self.options['max_stream_bytes'])
        self.clock.enter('framing', 'waiting for the body')
        try:
            for at, raw in self._reads():
                data = body.feed(raw)
                if self.chat.done:
                    self._count(data, at)
                else:
                    if self.timed and self.response['status'] != 200:
                        raise StreamFailure('http_status', f'the capture says status {self.response["status"]}')
                    yield from self._judge(data, at)
                    if self.chat.done:
                        self.clock.grace(DRAIN_S)
                    elif body.failure:
                        raise body.failure
                if body.failure:
                    self._last = {'end': None}
                    break
        except _GraceOver:
            self._last = {'end': 'open'}
        self._verdict()

    def _verdict(self) -> None:
        """What the end of the input means. Raises StreamFailure."""
        last, chat = self._last, self.chat
        self.body_end, outcome = last.get('end'), last.get('outcome', '')
        self.response['body_excerpt'] = self._excerpt_of(self._said)[0]
        if chat.done:
            if last and not self.body_end:  # as in _drain
                chat.warnings['unclean_end'] = 1
        elif not self.timed:
            self._refuse_other_input()
        elif not last or last.get('incomplete'):
            raise StreamFailure('unfinished', f'the capture {"reached its bound" if last else "has no last line: its run was killed"}')
        elif outcome in FAILURES and FAILURES[outcome].boundary not in SHOWN_BY_BODY:  # a reset, say, or a clock
            reached = last['boundary'] if last.get('boundary') in BOUNDARIES else self.clock.boundary
            raise StreamFailure(outcome, self.secret.quote(last.get('error') or 'so says the capture', 1000),
                                boundary=FAILURES[outcome].boundary or reached)
        elif outcome in FAILURES and not self.body_end:
            raise StreamFailure('unfinished', f'the capture ends where its run failed with "{outcome}", which is no failure by the '
                                              'policy and limits given now: what followed is not known')
        chat.end(self.body_end)

    def _refuse_other_input(self) -> None:
        excerpt, said = self._quoted(self._begins)
        looks = _looks_like(excerpt)
        if self._begins and not self.chat.seen and looks != LOOKS_RIGHT:
            raise StreamFailure('not_event_stream', f'the input {looks}: "{said}"')

    def _reads(self) -> Iterator[tuple[float, bytes]]:
        """What each read brought, and when it came: by the capture's word, or the start where there is none."""
        pieces = self._pieces()
        first = b''
        for piece in pieces:
            first += piece
            if not any(start.startswith(first) and start != first for start in (CAPTURE_START, b'HTTP/')):
                break
        pieces = itertools.chain([first], pieces)
        if first.startswith(CAPTURE_START):
            self.timed = True
            yield from self._captured(pieces)
            return
        if first.startswith(b'HTTP/'):
            raise StreamFailure('not_event_stream', 'the input begins with a status line: record the body alone (curl without -i)')
        self.marks['head'] = self.clock.start
        for piece in pieces:
            self._begins = (self._begins + piece)[:MAX_ERROR_BODY_BYTES]
            yield self.clock.start, piece

    def _pieces(self) -> Iterator[bytes]:
        poller = select.poll()
        poller.register(self._file, select.POLLIN)
        while True:
            if self._regular and not self.chat.done:
                self.clock.remaining()
            while not self._regular and not poller.poll(self.clock.wait_ms()):
                pass
            try:
                piece: bytes | None = self._file.read(READ_BYTES)
            except OSError as exc:
                raise Refused('input', f'cannot be read: {exc.strerror}') from None
            self.clock.moved = self.clock.now()
            if piece == b'':
                return
            if piece:  # None where another reader of this pipe was faster
                yield piece

    def _captured(self, pieces: Iterable[bytes]) -> Iterator[tuple[float, bytes]]:
        number, held = 0, b''
        for piece in itertools.chain(pieces, [b'']):
            *lines, held = (held + piece).split(b'\n') if piece else (held, b'')  # at its end a line may be cut
            for line in lines:
                if not piece and not line:
                    return
                number += 1
                try:
                    if len(line) > MAX_CAPTURE_LINE_BYTES:
                        raise ValueError('longer than any that is written')
                    found = self._line(number, strict_json(line.decode()))
                except Refused:
                    raise
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                    if not piece or self.chat.done:
                        return
                    raise Refused('input', f'is a malformed capture: line {number}') from None
                if found:
                    yield found
            if len(held) > MAX_CAPTURE_LINE_BYTES and not self.chat.done:
                raise Refused('input', f'is a malformed capture: line {number + 1}')

    def _line(self, number: int, line: dict[str, Any]) -> tuple[float, bytes] | None:
        """Take a line of a capture in; what it says of a read. Raises what a malformed line leads to."""
        ms = float(line.get('ms') or 0) / 1000
        if not 0 <= ms <= 2 * MAX_CLOCK_S:
            raise ValueError('no time')
        if number == 1:
            self._take_head(line, self.clock.start + ms)
            return None
        if self._last:
            raise ValueError('a line after the last')
        if 'end' in line:
            self._last = {**line, 'end': line['end'] if line['end'] in BODY_ENDS else None, 'outcome': str(line['outcome'])}
            self._passed(self.clock.start + ms)
            return None
        self._passed(self.marks['head'] + ms)
        data = line['text'].encode() if 'text' in line else base64.b64decode(line['base64'], validate=True)
        if line.get('excerpt') is True:
            self._said = (self._said + data)[: 8 * MAX_ERROR_BODY_BYTES]  # with a key the run read more than it shows
            return None
        return self.marks['end'], data

    def _take_head(self, line: dict[str, Any], at: float) -> None:
        if line['capture'] != 1:
            raise Refused('input', 'is a capture of a later version')
        self.marks['end'] = at  # where the capture has come to
        status, synthetic, began = line['status'], line.get('synthetic'), line.get('started_at')
        fields = {k: self.secret.quote(str(v)) for k, v in line['headers'].items() if k in RECORDED_FIELDS}
        self.response.update(status=status if _count(status) and status < 1000 else None, headers=None if status is None else fields)
        if status is not None:
            self.marks['head'] = self.marks['end']
        self.synthetic = synthetic if isinstance(synthetic, bool) else None
        self._take_asked(line.get('asked'))
        self.started_at = began if isinstance(began, str) and re.fullmatch(UTC, began) else None

    def _take_asked(self, asked: Any) -> None:
        if isinstance(asked, dict):
            model, most = asked.get('model'), asked.get('max_tokens')
            if self.model is None and isinstance(model, str):
                self.model = self.chat.asked_model = model
            self.chat.max_tokens = most if _count(most) else None
            self.chat.usage_asked = asked.get('usage') is True

    def _passed(self, at: float) -> None:
        if at < self.marks['end']:
            raise ValueError('time runs backwards')
        self.marks['end'] = at


def _error_message(text: str) -> str:
    """The message of an error body: of ``error`` (object or string), ``detail`` or ``message``, a page's title, else the text."""
    title = re.search('<title>([^<]+)</title>', text, re.IGNORECASE)
    if title and text.lstrip().startswith('<'):
        return title[1].strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # cut, perhaps: then the first message that is whole
        cut = re.search(r'"(?:message|detail|error)"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"', text) if text.startswith('{') else None
        return cut[1] if cut else text.strip()
    for _ in range(3):
        if isinstance(value, dict):
            value = next((value[k] for k in ('error', 'detail', 'message') if value.get(k) is not None), value)
    return value if isinstance(value, str) else _dumps(value)


LOOKS_RIGHT = 'looks like an event stream all the same'


def _is_event_stream(content_type: str) -> bool:
    unquoted = ''.join(content_type.split('"')[::2])
    # A field that came twice may have been joined to one on the way (RFC 9110 section 5.3)
    return all(media_type.partition(';')[0].strip(' \t').lower() == 'text/event-stream' for media_type in unquoted.split(','))


def _looks_like(excerpt: str) -> str:
    start = re.sub(r'^(?: |\\x0[ad])+', '', excerpt)
    if not excerpt:
        return 'is empty'
    if excerpt == '(gzip)':
        return 'is gzip data'
    if re.match('<(!doctype|html|head|body|title)', start, re.IGNORECASE):
        return 'is HTML'
    if re.match(r'(data|event|id|retry)?:', start):
        return LOOKS_RIGHT
    if not start.startswith(('{', '[')):
        return 'is text'
    if '"chat.completion"' in excerpt:
        return 'is a completion that was not streamed'
    return 'is NDJSON' if re.search(r'\}(\\x0d)?\\x0a\{', excerpt) else 'is JSON'


def build_record(run: ChatStream) -> dict[str, Any]:
    """The evidence record of a run, as it stands: contract of its keys in the README. Pure: reads the run, writes nothing."""
    chat, failure = run.chat, run.failure
    tunnelled = {'connected': run.tunnel.opened_at} if run.tunnel and run.tunnel.opened_at else {}
    ms = {k: round((v - run.clock.start) * 1000, 3) for k, v in {**run.marks, **tunnelled}.items()} if run.timed else {}
    quote = run.secret.quote
    shown = None if failure is None else {
        'code': failure.code, 'boundary': failure.boundary, 'message': failure.message, 'hint': failure.hint,
        'event': failure.event}
    answered = None if chat.id is None else quote(chat.id, 200)
    response = {
        **run.response, 'id': answered, 'model': None if chat.model is None else quote(chat.model, 200),
        'id_carries_run_id': _carries(str(chat.id), run.run_id) if answered is not None and run.run_id else None,
        'server_error': chat.server_error,
        'system_fingerprint': None if chat.system_fingerprint is None else quote(chat.system_fingerprint, 200),
    }
    record: dict[str, Any] = {
        'ok': failure is None,
        'outcome': failure.code if failure else 'passed',
        'model': run.model,
        'text': '',
        'first_text_ms': ms.get('first_text'),
        'duration_ms': ms.get('end'),
        'content_events': chat.content_events,
        'event_gaps_ms': [],
        'finish_reason': None if chat.finish_reason is None else quote(chat.finish_reason),
        'done': chat.done,
        'completion_tokens': chat.usage['completion_tokens'],
        'error': failure.message if failure else None,
        'schema_version': SCHEMA_VERSION,
        'failure': shown,
        'warnings': [{'code': k, 'count': n, 'message': warning_text(k)} for k, n in chat.warnings.items()],
        'request': run.asked(),
        'response': response,
        'marks_ms': {name: ms.get(name) for name in ('resolved', 'connected', 'secured', 'sent', 'head', 'first_byte',
                     'first_event', 'first_reasoning', 'first_text', 'last_text', 'finish', 'done', 'end')},
        'delivery': {
            'bytes': run.framed.bytes if run.framed else 0, 'reads': run.reads if run.timed else None, 'events': chat.seen,
            'comments': chat.events.comments,
            'unknown_fields': chat.events.unknown_fields, 'content_reads': run.content_reads if run.timed else None,
            'reasoning_events': chat.reasoning_events, 'reasoning_chars': chat.reasoning_chars,
            'longest_gap_ms': round(run.longest_gap * 1000, 3) if run.timed else None, 'body_end': run.body_end,
            'body_sha256': run.digest.hexdigest(), 'buffered': _buffered(chat, run.content_reads, ms)},
        'usage': dict(chat.usage) if chat.usage_seen else None,
        'client': client_facts(),
        'started_at': run.started_at,
        'label': run.label,
        'notes': run.notes,
        'synthetic': run.synthetic,
        'input': run.judged(),
    }
    for own in ('model', 'error', 'label', 'notes'):
        record[own] = run.secret.mask_all(record[own])
    for name in record['request'].keys() & {'url', 'connect_to', 'ssh', 'run_id', 'sampling'}:
        record['request'][name] = run.secret.mask_all(record['request'][name])
    if shown:
        shown['message'] = record['error']
    record['text'], record['event_gaps_ms'] = chat.text, run.gaps if run.timed else []
    return record


def _carries(text: str, word: str) -> bool:
    return re.search(f'(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])', text) is not None


def _buffered(chat: ChatCompletion, content_reads: int, ms: Mapping[str, float]) -> bool | None:
    """Whether something between engine and client held the text back: it came in few reads, late, after a second or more."""
    if chat.content_events < 4 or not {'sent', 'finish'} <= ms.keys():
        return None
    span = ms['finish'] - ms['sent']
    late = ms['first_text'] - ms['sent'] > 0.8 * span
    return content_reads * 10 <= chat.content_events and late and span >= 1000


@functools.cache
def client_facts() -> dict[str, Any]:
    """Version and SHA-256 of this file, the Python and the platform it runs on."""
    try:
        with open(__file__, 'rb') as source:
            digest: str | None = hashlib.sha256(source.read()).hexdigest()
    except OSError:  # run from standard input
        digest = None
    system = os.uname()
    return {'version': __version__, 'source_sha256': digest, 'python': '.'.join(map(str, sys.version_info[:3])),
            'platform': f'{system.sysname} {system.release} {system.machine}'}


def stream(url: str, model: str, prompt: str | None, *, max_tokens: int = 128, idle: float = 10.0, deadline: float = 60.0,
           ca_file: str | None = None, token: str | None = None, on_text: Callable[[str], object] | None = None,
           **options: Unpack[MoreOptions]) -> dict[str, Any]:
    """Ask ``model`` at ``url`` for one streamed answer to ``prompt`` and return the evidence record.

    ``idle`` and ``deadline`` are seconds, ``token`` is the API key, ``on_text`` is called with each piece of text as it
    arrives; the other keyword arguments are those of ``MoreOptions``.
    Raises ValueError for arguments it refuses, before a byte is sent, and whatever ``on_text`` raises, after the
    connection was closed. Every other failure is in the record: ``ok`` is False and ``outcome`` is a key of FAILURES.
    Works in any thread; touches no signal handler, global timeout or other global state.
    """
    if on_text is not None and not callable(on_text):
        raise Refused('on_text', 'must be callable')
    given: Options = {'max_tokens': max_tokens, 'idle': idle, 'deadline': deadline, 'ca_file': ca_file, 'token': token, **options}
    with ChatStream(url, model, prompt, **given) as answer:
        for text in answer:
            if on_text is not None:
                on_text(text)
    return answer.record


# --- command line -------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """A signal ended the run; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f'ended by {signal.Signals(number).name}')
        self.number = number


class Signals:
    """SIGINT, SIGTERM and SIGHUP, each unless it was ignored at start: raised once, and only while armed.

    A signal that comes at another moment (while the record is written, say) is kept; ``arm`` raises it. So does ``check``, since
    Python drops an exception that a handler raises within a finalizer or a callback of the garbage collector.
    """

    def __init__(self) -> None:
        self._armed = False
        self.pending = 0  # the first signal that came
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.pending:
            return
        self.pending = number
        self.check()

    def arm(self) -> None:
        """From here on a signal raises Interrupted."""
        self._armed = True
        self.check()

    def check(self) -> None:
        """Raise the signal that came, if one did."""
        if self._armed and self.pending:
            raise Interrupted(self.pending)

    def disarm(self) -> None:
        """From here on signals are only kept."""
        self._armed = False


def put(output: Any, text: str | bytes, patience: float = 0.5) -> bool:
    """Write text to a stream, waiting for room no longer than ``patience`` seconds in all; False if it was not all taken."""
    return not _written(output, text.encode('utf-8', 'backslashreplace') if isinstance(text, str) else text, patience)


def put_record(record: Mapping[str, Any]) -> bool:
    """Write a record to stdout as one line, for as long as its reader takes some of it every 5 seconds; whether all was taken."""
    data, before = to_json(record, one_line=True), -1
    while data and len(data) != before:
        before = len(data)
        data = _written(sys.stdout, data, 5.0)
    return not data


def _written(output: Any, data: bytes, patience: float) -> bytes:
    """Write what the stream takes within ``patience`` seconds; returns what is left."""
    try:
        fd = output.fileno()
    except (AttributeError, OSError, ValueError):
        try:
            output.write(data.decode())
        except (AttributeError, OSError, ValueError):
            return data
        return b''
    left, until = memoryview(data), time.monotonic() + patience
    try:
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        while left and poller.poll(max(0.0, until - time.monotonic()) * 1000):
            left = left[os.write(fd, left[:512]) :]  # a pipe that polls writable takes at least PIPE_BUF bytes
    except OSError:
        pass
    return bytes(left)


class View:
    """A person's view on stderr: the answer behind ``| ``, so that no server text starts a line, and then the verdict.

    Showing text never waits: what a slow reader does not take at once is kept, up to a MiB, and tried again later.
    """

    def __init__(self, output: Any, show_text: bool) -> None:
        self.output = output
        self.show_text = show_text
        self.colour = _is_terminal(output) and not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'
        self.open = False  # a line of text has no end yet
        self._kept: collections.deque[bytes] = collections.deque()
        self._kept_bytes = 0

    def text(self, piece: str) -> None:
        """Show a piece of the answer, with newlines as lines of their own and every other control character escaped."""
        if self.show_text:
            lines = [escaped(line) for line in piece.replace('\t', '    ').split('\n')]
            shown = ('' if self.open else '| ') + '\n| '.join(lines)
            self.open = True
            self._put(shown.encode(), 0)

    def _put(self, data: bytes, patience: float) -> None:
        if self._kept_bytes < 1_048_576 or patience:
            self._kept.append(data)
            self._kept_bytes += len(data)
        until = time.monotonic() + patience
        while self._kept:
            left = _written(self.output, self._kept[0], max(0.0, until - time.monotonic()))
            self._kept_bytes -= len(self._kept[0]) - len(left)
            if left:
                self._kept[0] = left
                return
            self._kept.popleft()

    def verdict(self, record: Mapping[str, Any], where: str) -> None:
        """One line: passed or failed, at which boundary, why, what to do, and where the record is."""
        failure = record['failure']
        if failure:
            mark = '\x1b[31mFAILED\x1b[0m' if self.colour else 'FAILED'
            said = f'at {failure["boundary"]}: {failure["code"]}: {failure["message"]}; hint: {failure["hint"]}'
        else:
            mark = '\x1b[32mpassed\x1b[0m' if self.colour else 'passed'
            said = f'{record["content_events"]} content events'
            if record['duration_ms'] is not None:  # it is where nothing tells the times
                said += f', first text after {record["first_text_ms"]:.0f} ms, {record["duration_ms"]:.0f} ms in all'
            if record['delivery']['buffered']:
                said += ('; the text was held back and came at once: look at the application server, compression (gzip), '
                         "the proxy's buffering (proxy_buffering), then the reader")
            if record['warnings']:
                said += '; warnings: ' + ', '.join(w['code'] for w in record['warnings'])
        line = ('\n' if self.open else '') + f'{mark} {escaped(said)}; record: {escaped(where)}\n'
        self._put(line.encode('utf-8', 'backslashreplace'), 0.5)


def _is_terminal(output: Any) -> bool:
    try:
        return bool(output.isatty())
    except (AttributeError, ValueError, OSError):
        return False


def summary(record: Mapping[str, Any], output: str) -> str:
    """The line for stdout: JSON in ASCII, under 4 KiB."""
    keys = ('ok', 'outcome', 'first_text_ms', 'duration_ms', 'finish_reason', 'error')
    members = {**{k: record[k] for k in keys}, 'output': output}
    line = json.dumps(members) + '\n'
    for limit in (1000, 300, 100):
        if len(line) < 4096:
            break
        line = json.dumps({k: v[:limit] + '...' if isinstance(v, str) and len(v) > limit else v for k, v in members.items()}) + '\n'
    return line


class _Parser(argparse.ArgumentParser):
    """argparse with errors as Refused, so that they are one line."""

    def error(self, message: str) -> NoReturn:
        flag, colon, rest = message.partition(': ')
        raise Refused(flag.removeprefix('argument '), rest) if flag.startswith('argument ') and colon else Refused('arguments', message)


def _decimal(text: str) -> float:
    if not re.fullmatch(r'[0-9]{1,9}(\.[0-9]{1,9})?', text, re.ASCII):
        raise argparse.ArgumentTypeError('must be a plain decimal number')
    return float(text)


def _whole(text: str) -> int:
    if not re.fullmatch('[0-9]{1,15}', text, re.ASCII):
        raise argparse.ArgumentTypeError('must be a plain whole number')
    return int(text)


def _utf8(text: str) -> str:
    """An argument as UTF-8, whatever the locale made of its bytes."""
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        raise argparse.ArgumentTypeError('is not valid Unicode (UTF-8)') from None


def _listed(text: str) -> list[str]:
    return _utf8(text).split(',')


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser; every flag that is an option of ``stream`` has its name."""
    parser = _Parser(prog='stream_client.py', allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                     description='Ask a chat-completion endpoint for one streamed answer and say whether it was complete.',
                     epilog='exit status: 0 passed, 1 failed (record written), 2 refused (nothing sent), 3 record not written, '
                     f'128+n ended by signal n\nThe API key is read from {KEY_VARIABLE}, or from --api-key-file.')
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument('--url', default=None, help=f'full endpoint URL (default {DEFAULT_URL})')
    where.add_argument('--fixture', metavar='MODE', help='ask the fixture instead, started inside this process')
    where.add_argument('--input', type=_utf8, metavar='FILE', help='judge a capture, or the bytes of a body, offline; - is stdin')
    add('--model', type=_utf8, help='model name; required except with --fixture and --input')
    add('--output', type=_utf8, metavar='FILE', help='where the record goes, created exclusively; - is stdout (default: a new name here)')
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--prompt', type=_utf8, help=f'default: {DEFAULT_PROMPT}')
    what.add_argument('--prompt-file', metavar='FILE', help='- is stdin')
    what.add_argument('--messages-file', metavar='FILE', help='a JSON array of messages; - is stdin')
    add('--system', type=_utf8, metavar='TEXT', help='a system message in front')
    add('--extra-body', type=_utf8, metavar='JSON', help='more members of the request body (sampling, chat_template_kwargs)')
    add('--max-tokens', type=_whole, metavar='N', help='default 128')
    add('--idle', type=_decimal, metavar='S', help='longest wait without a byte (default 10; none with --input)')
    add('--deadline', type=_decimal, metavar='S', help='for the whole run (default 60; none with --input)')
    add('--first-text', type=_decimal, metavar='S', help='fail when no visible text came by then')
    add('--stall', type=_decimal, metavar='S', help='fail when no event with data came for so long')
    add('--ca-file', metavar='FILE', help="trust these certificates (PEM) in place of the system's")
    add('--connect-to', metavar='HOST:PORT', help="dial this address; Host, SNI and verification keep the URL's name")
    add('--ssh', metavar='[USER@]HOST[:PORT]', help='connect from this host, through ssh -W; the URL means what it means there')
    add('--ssh-option', metavar='NAME=VALUE', action='append', help='passed to ssh as -o; may be repeated')
    add('--api-key-file', metavar='FILE', help=f'read the key here in place of {KEY_VARIABLE}')
    add('--accept-finish', type=_listed, metavar='REASON[,...]', help='finish reasons accepted beside stop')
    add('--tolerate', type=_listed, metavar='CODE[,...]', help=f'warn only: {", ".join(TOLERABLE)}')
    add('--fail-on', type=_listed, metavar='WARNING[,...]', help='fail where there is this warning, or all')
    for name in LIMITS:
        add('--' + name.replace('_', '-'), type=_whole, metavar='N', help=f'default {DEFAULTS[name]}')  # type: ignore[literal-required]
    add('--capture', type=_utf8, metavar='FILE', help='keep the body as it arrives, created exclusively')
    add('--run-id', metavar='ID', help='sent as X-Request-Id (default: a new one)')
    add('--label', type=_utf8, metavar='TEXT', help='recorded: what this run is one of')
    add('--note', type=_utf8, metavar='KEY=VALUE', action='append', default=[], help='recorded; may be repeated')
    add('--show-text', action='store_true', help='show the text on stderr as it arrives, also when that is no terminal')
    add('--version', action='version', version=f'stream-client {__version__}')
    return parser


def _contents(argument: str, path: str) -> str:
    try:
        with open(0 if path == '-' else path, 'rb', closefd=path != '-') as file:
            raw = file.read(MAX_STREAM_BYTES + 1)
        if len(raw) > MAX_STREAM_BYTES:
            raise Refused(argument, f'is longer than {MAX_STREAM_BYTES} bytes')
        return raw.decode()
    except UnicodeDecodeError:
        raise Refused(argument, 'is not valid Unicode (UTF-8)') from None
    except (OSError, ValueError) as exc:
        if isinstance(exc, Refused):
            raise
        raise Refused(argument, f'cannot be read: {getattr(exc, "strerror", None) or exc}') from None


def _json_argument(argument: str, text: str) -> Any:
    try:
        return strict_json(text)
    except StreamFailure as exc:
        raise Refused(argument, exc.message) from None


def _key(args: argparse.Namespace) -> str | None:
    if args.api_key_file is None:
        return checked_key(KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    try:
        key = re.sub('\r?\n\\Z', '', _contents('api_key_file', args.api_key_file))
    except Refused as exc:
        raise Refused('api_key_file', exc.message) from None
    if not key:
        raise Refused('api_key_file', 'is empty')
    return checked_key('api_key_file', key)


def _notes(args: argparse.Namespace) -> dict[str, str]:
    notes: dict[str, str] = {}
    for note in args.note:
        key, equals, value = note.partition('=')
        if not equals or key in notes:
            raise Refused('note', 'must be KEY=VALUE, each KEY once')
        notes[key] = value
    return notes


def _recording_of(args: argparse.Namespace) -> ChatStream:
    given = {name: value for name, value in vars(args).items() if not (value is None or value is False or value == [])}
    odd = given.keys() - {'input', 'model', 'output', 'api_key_file', 'note', 'show_text', *RECORDED_OPTIONS}
    if odd:
        raise Refused(min(odd), 'says nothing with --input')
    if args.input == '-' and sys.stdin is None:
        raise Refused('input', 'is stdin, which is closed')
    if args.input == args.api_key_file == '-':
        raise Refused('api_key_file', 'and --input cannot both be stdin')
    options = {name: given[name] for name in RECORDED_OPTIONS if name in given}
    source = 0 if args.input == '-' else os.fsdecode(args.input.encode())
    return Recording(source, args.model, token=_key(args), notes=_notes(args), **options)


def _run_of(args: argparse.Namespace, url: str) -> ChatStream:
    if args.input is not None:
        return _recording_of(args)
    options: dict[str, Any] = {k: v for k, v in vars(args).items() if k in DEFAULTS and v is not None}
    if args.fixture is not None and args.ssh is not None:
        raise Refused('ssh', 'and --fixture exclude each other')
    prompt = args.prompt
    if args.prompt_file is not None:
        prompt = checked_text('prompt_file', _contents('prompt_file', args.prompt_file))
    elif args.messages_file is not None:
        options['messages'] = _json_argument('messages_file', _contents('messages_file', args.messages_file))
    elif prompt is None:
        prompt = DEFAULT_PROMPT
    if args.extra_body is not None:
        options['extra_body'] = _json_argument('extra_body', args.extra_body)
        if not isinstance(options['extra_body'], dict):
            raise Refused('extra_body', 'must be a JSON object')
    model = 'fixture' if args.model is None and args.fixture is not None else args.model
    if model is None:
        raise Refused('model', 'is required')
    return ChatStream(url, model, prompt, token=_key(args), notes=_notes(args), **options)


def _start_fixture(mode: str) -> tuple[str, Any]:
    try:
        import fixture_server
    except ImportError:
        raise Refused('fixture', 'needs fixture_server.py beside this file') from None
    try:
        server = fixture_server.server(0, mode, 0.05)
    except ValueError:
        raise Refused('fixture', 'unknown mode; fixture_server.py --list-modes names them') from None
    except OSError as exc:
        raise Refused('fixture', f'cannot listen: {exc.strerror}') from None
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return f'http://127.0.0.1:{server.server_port}/v1/chat/completions', server


def _claim_standard_fds() -> None:
    """Where stdin, stdout or stderr were closed at start, no file of ours may come to stand in their place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _carry_out(run: ChatStream, signals: Signals, view: View) -> int:
    """Run to the end; the number of the signal that ended it, or 0. The record is finished in any case."""
    try:
        run.clock.roused = signals.check
        try:
            signals.arm()
            with run:
                for text in run:
                    view.text(text)
        finally:
            signals.disarm()
    except Interrupted as exc:
        run.close(str(exc))
        return exc.number
    return 0


def _prepared(argv: Sequence[str] | None, signals: Signals) -> tuple[argparse.Namespace, ChatStream, Evidence | None, Any]:
    """Everything up to the reserved record: arguments, run, evidence (None for stdout) and the fixture, if one was asked for."""
    args, unknown = make_parser().parse_known_args(argv)
    if unknown:  # shown only where it looks like a flag: it may be a secret
        flags = [a.split('=')[0] for a in unknown if re.fullmatch('--[a-z]{2,12}(-[a-z]{2,12}){0,2}(=.*)?', a, re.DOTALL)]
        raise Refused('arguments', f'unknown: {", ".join(flags) or "a word that is no flag"}')
    if args.output == '':
        raise Refused('output', 'must not be empty')
    signals.arm()
    try:
        url, fixture = _start_fixture(args.fixture) if args.fixture is not None else (args.url, None)
        run = _run_of(args, DEFAULT_URL if url is None else url)
        if fixture is not None:
            run.synthetic = True  # also where no head comes that says so
    finally:
        signals.disarm()
    if args.output is None:
        args.output = f'stream-{time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())}-{os.urandom(4).hex()}.json'
    try:
        if args.capture is not None:
            if args.capture == '-':
                raise Refused('capture', 'names a file, and - is none')
            if args.output != '-' and os.path.abspath(args.capture) == os.path.abspath(args.output):
                raise Refused('capture', 'and --output name one file')
            run.capture = Capture(os.fsdecode(args.capture.encode()), run.secret, 4 * run.options['max_stream_bytes'] + 1_048_576)
        evidence = Evidence(os.fsdecode(args.output.encode()), to_json(run.record)) if args.output != '-' else None
    except Refused as exc:
        if run.capture:
            run.capture.drop()
        raise Refused(exc.argument, run.secret.mask(exc.message)) from None
    args.output = run.secret.mask(args.output)
    return args, run, evidence, fixture


def _refuse(exc: Refused, before: str = '') -> int:
    flag = 'messages_file' if exc.argument == 'messages' else exc.argument
    flag = flag if flag in (KEY_VARIABLE, 'arguments') else '--' + flag.lstrip('-').replace('_', '-')
    put(sys.stderr, f'{before}stream_client.py: {escaped(flag)}: {escaped(exc.message)}\n')
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, 1, 2, 3 or 128 + a signal's number)."""
    _claim_standard_fds()
    signals = Signals()
    try:
        args, run, evidence, fixture = _prepared(argv, signals)
    except Refused as exc:
        return _refuse(exc)
    except MemoryError:
        put(sys.stderr, 'stream_client.py: arguments: more than the memory holds\n')
        return 2
    except Interrupted as exc:
        put(sys.stderr, f'stream_client.py: {exc} before anything was sent\n')
        return 128 + exc.number
    view = View(sys.stderr, args.show_text or args.fixture is not None or _is_terminal(sys.stderr))
    try:
        number = _carry_out(run, signals, view)
    except Refused as exc:  # a capture that is malformed further on
        if evidence:
            evidence.drop()
        return _refuse(exc, '\n' if view.open else '')
    except MemoryError:  # in showing the text
        number = 0
        run.shed()
    if fixture is not None:
        fixture.shutdown()
        fixture.server_close()
    try:
        return _report(run.record, evidence, args.output, view, number)
    except MemoryError:
        return _report(run.shed(), evidence, args.output, view, number)


def _report(record: dict[str, Any], evidence: Evidence | None, output: str, view: View, number: int) -> int:
    status = 128 + number if number else 0 if record['ok'] else 1
    try:
        if evidence:
            evidence.finish(to_json(record))
            view.verdict(record, output)
            put(sys.stdout, summary(record, output))
            return status
        view.verdict(record, 'stdout')
        if put_record(record):
            return status
        put(sys.stderr, 'stream_client.py: the record could not be written to stdout\n')
    except OSError as exc:
        put(sys.stderr, f'stream_client.py: the record could not be written to {escaped(output)}: {exc.strerror}\n')
        put_record(record)
    return 3


def entry() -> NoReturn:
    """The command as a program: the record is in place, so a signal while Python ends changes nothing any more."""
    import gc

    gc.freeze()
    gc.enable()
    if hasattr(sys, 'set_int_max_str_digits'):
        sys.set_int_max_str_digits(MAX_INT_DIGITS)  # whatever the environment says: a verdict does not depend on it
    status = main()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


if __name__ == '__main__':
    entry()
