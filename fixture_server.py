#!/usr/bin/env python3
"""A loopback server that answers chat-completion requests in every way a streaming client should be tested against.

Each mode of ``MODES`` is one way to answer: what it sends, what a correct client must conclude, and the specification or
public report that it comes from.  The mode is the server's, or the request's own when its model is ``mode:NAME``, so that
one running fixture serves all.  Every answer carries the header field ``X-Stream-Fixture``: it is synthetic.

A mode yields steps: bytes to write, seconds to pause (PAUSE stands for the server's delay), or one of the ends RESET
and HOLD; without one our side is closed (a half close) and the client's close is waited for.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import gzip
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
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
RESET, HOLD = 'reset', 'hold'
RANDOM, REPLAY = 'random', 'replay'  # modes of the server that are no rows of the catalogue
Step = bytes | float | str


class Request(NamedTuple):
    """What a mode may know of the request: the id that its chunks carry and the model's name, JSON-escaped, its key.

    ``again`` tells whether the same mode was asked for moments ago, by a client that tries again.
    """

    id: bytes
    model: bytes
    key: str
    again: bool = False

    def fill(self, piece: bytes) -> bytes:
        """The piece with ``$ID`` and ``$MODEL`` replaced."""
        return piece.replace(b'$ID', self.id).replace(b'$MODEL', self.model)


# --- building blocks ----------------------------------------------------------------------------------------------------


def chunk(delta: Any = None, finish: Any = None, **members: Any) -> dict[str, Any]:
    """A chat.completion.chunk with one choice; ``members`` replace or add members of the chunk."""
    choice = {'index': 0, 'delta': {} if delta is None else delta, 'logprobs': None, 'finish_reason': finish}
    return {'id': 'chatcmpl-$ID', 'object': 'chat.completion.chunk', 'created': 1790000000, 'model': '$MODEL',
            'choices': [choice], **members}


def choice(**members: Any) -> dict[str, Any]:
    """A chunk whose choice has exactly the given members."""
    return chunk(choices=[members])


def choice_event(**members: Any) -> bytes:
    """An event with such a chunk."""
    return event(choice(**members))


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


def raw(*steps: Step) -> Callable[[Request], Iterator[Step]]:
    """Steps sent as they are, but for ``$ID`` and ``$MODEL``."""

    def run(request: Request) -> Iterator[Step]:
        for step in steps:
            yield request.fill(step) if isinstance(step, bytes) else step

    return run


def chunks(*pieces: Step, end: Sequence[Step] = (LAST,), fields: Sequence[str] = EVENT_STREAM, status: str = '200 OK',
           extension: bytes = b'') -> Callable[[Request], Iterator[Step]]:
    """A head, each piece as one chunk, and then ``end`` as it is."""

    def run(request: Request) -> Iterator[Step]:
        yield head(*fields, CHUNKED, status=status)
        for piece in pieces:
            yield framed(request.fill(piece), extension) if isinstance(piece, bytes) else piece
        yield from end

    return run


def sized(*pieces: Step, more: int = 0, fields: Sequence[str] = EVENT_STREAM, status: str = '200 OK',
          end: Sequence[Step] = ()) -> Callable[[Request], Iterator[Step]]:
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
        [Request], Iterator[Step]]:
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
STEADY = (ROLE, *((0.12, text('one ')) * 12), *END)
ERROR = {'message': 'EngineCore encountered an issue.', 'type': 'InternalServerError', 'param': None, 'code': 500}
TOOL = {'tool_calls': [{'index': 0, 'id': 'call-1', 'type': 'function', 'function': {'name': 'look', 'arguments': '{"a'}}]}
LONG = 70_000
MODES: dict[str, Mode] = {}


def group(name: str, *rows: tuple[Any, ...]) -> None:
    """Add rows of (name, expect, sends, source, steps[, text]) to the catalogue."""
    for key, expect, sends, source, steps, *kept in rows:
        assert key not in MODES, key
        MODES[key] = Mode(name, expect, sends, source, steps, *kept)


def shape(data: Any) -> Callable[[Request], Iterator[Step]]:
    """A whole answer with this event between text and finish."""
    return chunks(*START, event(data), *END)


def finished(reason: Any) -> Callable[[Request], Iterator[Step]]:
    """A whole answer with this finish_reason."""
    return chunks(*START, event(chunk(finish=reason)), USAGE, DONE)


def translated(pieces: Iterable[Step], old: bytes, new: bytes) -> list[Step]:
    """The pieces with some bytes replaced."""
    return [p.replace(old, new) if isinstance(p, bytes) else p for p in pieces]


group(
    'whole answers',
    ('ok', 'passed', 'comment, role, two pieces of text, stop, usage, [DONE]; CRLF', 'OpenAI API, chat.completion.chunk',
     chunks(*ANSWER)),
    ('one-chunk', 'passed', 'role, text and stop in one chunk', 'lobehub/lobehub#3252',
     chunks(event(chunk({'role': 'assistant', 'content': 'READY ✓'}, 'stop')), DONE)),
    ('finish-with-text', 'passed', 'the finish shares its chunk with the last text', 'vLLM 0.32 with a slow reader',
     chunks(COMMENT, ROLE, PAUSE, READY, event(chunk({'content': '✓'}, 'stop', usage=COUNTS)), DONE)),
    ('usage-every-chunk', 'passed', 'usage on every chunk, growing', 'vLLM continuous_usage_stats',
     chunks(ROLE, text('READY ', usage={**COUNTS, 'completion_tokens': 1}), text('✓', usage={**COUNTS, 'completion_tokens': 2}),
            STOP, USAGE, DONE)),
    ('usage-null', 'passed', 'null counts until the last chunk', 'Bedrock gateways; langfuse/langfuse#6658',
     chunks(ROLE, text('READY ', usage={'completion_tokens': None, 'prompt_tokens': None}), CHECK, *END)),
    ('usage-partial', 'passed', 'usage objects without completion_tokens', 'LiteLLM, SGLang',
     chunks(ROLE, text('READY ', usage={'prompt_tokens': 9}), text('✓', usage={}), *END)),
    ('usage-absent', 'passed', 'no usage although asked for', 'llama-cpp-python 0.3.36', chunks(*START, STOP, DONE)),
    ('usage-huge', 'passed', 'a token count beyond 64 bits', 'RFC 8259 section 6',
     chunks(*START, STOP, event(chunk(choices=[], usage={'completion_tokens': 10**29})), DONE)),
    ('usage-timings', 'passed', 'usage together with timings', 'llama-server b11434',
     chunks(*START, STOP, event(chunk(choices=[], usage=COUNTS, timings={'predicted_ms': 1.5, 'cache_n': 0})), DONE)),
    ('usage-in-finish', 'passed', 'usage on the finish chunk, unasked', 'transformers serve 5.19',
     chunks(*START, event(chunk(finish='stop', usage=COUNTS)), DONE)),
    ('choices-null', 'passed', 'choices null on the usage chunk', 'Lambdua/openai4j#60',
     chunks(*START, STOP, event(chunk(choices=None, usage=COUNTS)), DONE)),
    ('delta-null', 'passed', 'delta null on the finish chunk and before', 'Azure content filters',
     chunks(*START, choice_event(index=0, delta=None, finish_reason=None), choice_event(index=0, delta=None, finish_reason='stop'),
            USAGE, DONE)),
    ('delta-absent', 'passed', 'no delta on the finish chunk', 'Azure, asynchronous filters',
     chunks(*START, choice_event(index=0, finish_reason='stop'), USAGE, DONE)),
    ('prompt-filter', 'passed', 'a first chunk without choices and with an empty id', 'Azure prompt_filter_results',
     chunks(event({'id': '', 'object': '', 'model': '', 'choices': [], 'prompt_filter_results': [{'prompt_index': 0}]}), *ANSWER)),
    ('error-null', 'passed', 'error null on every chunk', 'Foundry Local',
     chunks(event(chunk({'role': 'assistant'}, error=None)), text('READY ', error=None), text('✓', error=None), *END)),
    ('finish-empty', 'passed', 'finish_reason "" until the finish', 'old SGLang and Ollama',
     chunks(event(chunk({'content': 'READY '}, '')), event(chunk({'content': '✓'}, '')), *END)),
    ('finish-null-text', 'passed', 'finish_reason "null" until the finish', 'PowerShell/AIShell#350, KoboldCpp',
     chunks(event(chunk({'content': 'READY '}, 'null')), event(chunk({'content': '✓'}, 'null')), *END)),
    ('finish-absent', 'passed', 'no finish_reason member until the finish', 'transformers serve 5.19',
     chunks(choice_event(index=0, delta={'content': 'READY '}), choice_event(index=0, delta={'content': '✓'}), *END)),
    ('finish-repeated', 'passed', 'the same finish again on the usage chunk', 'OpenRouter, LM Studio',
     chunks(*START, STOP, event(chunk(finish='stop', usage=COUNTS)), DONE)),
    ('stop-reason', 'passed', 'stop_reason with a token id beside the finish', 'vLLM 0.32',
     chunks(*START, choice_event(index=0, delta={}, finish_reason='stop', stop_reason=7, token_ids=None), USAGE, DONE)),
    ('reasoning', 'passed', 'reasoning before the text', 'vLLM 0.32, deepseek_r1 parser',
     chunks(ROLE, event(chunk({'reasoning': 'Let me think.'})), PAUSE, READY, CHECK, *END)),
    ('reasoning-both', 'passed', 'reasoning under both names', 'vLLM 0.12 to 0.15',
     chunks(ROLE, event(chunk({'reasoning': 'Hm.', 'reasoning_content': 'Hm.'})), READY, CHECK, *END)),
    ('logprobs', 'passed', 'log probabilities with every piece', 'OpenAI API, logprobs',
     chunks(ROLE, *(choice_event(index=0, delta={'content': t}, finish_reason=None, logprobs={'content': [
         {'token': t, 'logprob': -0.5, 'bytes': list(t.encode()), 'top_logprobs': []}]}) for t in ('READY ', '✓')), *END)),
    ('empty-members', 'passed', 'refusal null, tool_calls [], function_call null', 'OpenAI API; spring-projects/spring-ai#6928',
     chunks(*(event(chunk({'content': t, 'refusal': None, 'tool_calls': [], 'function_call': None})) for t in ('READY ', '✓')),
            *END)),
    ('unknown-members', 'passed', 'members that no API defines, at every level', 'OpenAI API, obfuscation; Groq x_groq',
     chunks(*(choice_event(delta={'x': [1], 'content': t}, note={}, finish_reason=None, index=0) for t in ('READY ', '✓')),
            *END)),
    ('id-on-role-only', 'passed', 'the id is on the role chunk only', 'BerriAI/litellm#376',
     chunks(ROLE, text('READY ', id=None), text('✓', id=''), *END)),
    ('model-differs', 'passed', 'another model name than the one asked for', 'mnfst/llm-gateway#2620',
     chunks(*START[:2], text('READY ', model='another'), text('✓', model='another'), *END)),
    ('surrogates-split', 'passed', 'a surrogate pair escaped in two chunks', 'RFC 8259 section 7',
     chunks(READY, CHECK, event('{"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}'),
            event('{"choices":[{"index":0,"delta":{"content":"\\ude42"}}]}'), *END), 'READY ✓🙂'),
    ('ascii-escapes', 'passed', 'text escaped to ASCII', 'llama-cpp-python 0.3.36',
     chunks(event(json.dumps(chunk({'content': 'READY ✓🙂'}))), *END), 'READY ✓🙂'),
    ('separators', 'passed', 'U+2028, U+2029, U+0085, U+FEFF, VT and FF inside the text', 'openai/openai-python#498',
     chunks(text('READY \u2028\u2029\u0085\ufeff'), event('{"choices":[{"index":0,"delta":{"content":"\\u000b\\f✓"}}]}'), *END),
     'READY \u2028\u2029\u0085\ufeff\x0b\x0c✓'),
    ('spells-done', 'passed', 'text that spells the end of a stream', 'openai/openai-node#2309',
     chunks(text('READY data: [DONE]\n\n[DONE]'), text('✓'), *END), 'READY data: [DONE]\n\n[DONE]✓'),
    ('outer-spaces', 'passed', 'text with white space at both ends', 'WHATWG HTML, one space is removed',
     chunks(text('  READY'), text(' '), text('✓ \n'), *END), '  READY ✓ \n'),
    ('replacement-character', 'passed', 'U+FFFD in the text', 'Aider-AI/aider#4279', chunks(text('READY '), text('✓\ufffd'), *END),
     'READY ✓\ufffd'),
    ('after-done', 'passed', 'events after [DONE]', 'foundation-model-stack/fms-guardrails-orchestrator#482',
     chunks(*ANSWER, text('more'), event({'error': ERROR}))),
    ('key-twice-same', 'passed', 'a key twice in one object with the same value', 'RFC 8259 section 4',
     chunks(*START, event('{"id":"chatcmpl-$ID","choices":[],"usage":null,"usage":null}'), *END)),
)
group(
    'incomplete answers',
    ('broken', 'no_done', 'the body ends after the text', 'BerriAI/litellm#40260', chunks(*START)),
    ('eof-after-finish', 'no_done', 'finish and usage, then the end of the body', 'transformers serve 5.19',
     chunks(*START, STOP, USAGE)),
    ('eof-after-role', 'no_done', 'the body ends after the role', 'CommandCodeAI/command-code#785', chunks(ROLE), ''),
    ('empty-body', 'no_done', 'a chunked body without a byte', 'omnigent-ai/omnigent#1189', chunks(), ''),
    ('comments-only', 'no_done', 'comments and then the end', 'WHATWG HTML, comments', chunks(COMMENT, PAUSE, COMMENT), ''),
    ('done-alone', 'no_finish', '[DONE] and nothing else', 'ggml-org/llama.cpp#14566', chunks(DONE), ''),
    ('done-after-role', 'no_finish', 'role, then [DONE]', 'vllm-project/vllm#19536', chunks(ROLE, DONE), ''),
    ('done-without-finish', 'no_finish', 'text, then [DONE]', 'router-for-me/CLIProxyAPI#6010', chunks(*START, DONE)),
    ('finish-null-only', 'no_finish', 'finish_reason null to the end', 'vllm-project/vllm#27572',
     chunks(*START, event(chunk()), DONE)),
    ('finish-alias', 'no_finish', 'finishReason in place of finish_reason', 'jakobdylanc/llmcord#84',
     chunks(*START, choice_event(index=0, delta={}, finishReason='stop'), DONE)),
    ('done-not-ended', 'no_done', '"data: [DONE]" without the blank line', 'openai/openai-node#2725',
     chunks(*START, STOP, USAGE, b'data: [DONE]')),
    ('done-one-newline', 'no_done', '"data: [DONE]" with one line end', 'ikawrakow/ik_llama.cpp#467',
     chunks(*START, STOP, USAGE, b'data: [DONE]\n')),
    ('cut-in-event', 'no_done', 'the last event is cut in its JSON, the body ends in good order', 'open-webui/open-webui#29628',
     chunks(*START, STOP[:60])),
    ('length', 'finish_not_accepted', 'finish_reason length', 'OpenAI API, finish_reason', finished('length')),
    ('length-with-text', 'finish_not_accepted', 'length on the chunk with the last text', 'vllm-project/vllm#35705',
     chunks(ROLE, PAUSE, READY, event(chunk({'content': '✓'}, 'length')), DONE)),
    ('content-filter', 'finish_not_accepted', 'finish_reason content_filter', 'Azure OpenAI', finished('content_filter')),
    ('abort', 'finish_not_accepted', 'finish_reason abort, usage, [DONE], clean end', 'vllm-project/vllm#57082', finished('abort')),
    ('network-error', 'finish_not_accepted', 'finish_reason network_error', 'BerriAI/litellm#22673', finished('network_error')),
    ('repetition', 'finish_not_accepted', 'finish_reason repetition', 'vLLM, repetition detection', finished('repetition')),
    ('end-turn', 'finish_not_accepted', 'finish_reason end_turn', 'Anthropic through gateways', finished('end_turn')),
    ('finish-tool-calls', 'finish_not_accepted', 'finish_reason tool_calls without a call', 'QwenLM/qwen-code#8920',
     finished('tool_calls')),
    ('finish-stop-blank', 'finish_not_accepted', 'finish_reason "stop "', 'OpenAI API, an enumeration', finished('stop ')),
    ('finish-upper', 'finish_not_accepted', 'finish_reason "STOP"', 'Gemini through gateways', finished('STOP')),
    ('no-text', 'no_visible_text', 'stop and [DONE] without text', 'vllm-project/vllm#40986', chunks(ROLE, *END), ''),
    ('spaces-only', 'no_visible_text', 'white space only', 'amd/gaia#3501', chunks(text('  \n'), text(' \u3000\u00a0'), *END),
     '  \n \u3000\u00a0'),
    ('invisible-only', 'no_visible_text', 'zero-width and control characters only', 'Unicode categories Cf and Cc',
     chunks(text('\u200b\u2060\ufeff\u00ad'), *END), '\u200b\u2060\ufeff\u00ad'),
    ('replacement-only', 'no_visible_text', 'U+FFFD only', 'Unicode, replacement character', chunks(text('\ufffd\ufffd'), *END),
     '\ufffd\ufffd'),
    ('reasoning-only', 'no_visible_text', 'reasoning only', 'vLLM 0.32, reasoning parser',
     chunks(ROLE, event(chunk({'reasoning_content': 'Hm.'})), *END), ''),
    ('message-not-delta', 'no_visible_text', 'a whole message in place of a delta', 'sashabaranov/go-openai#1057',
     chunks(choice_event(index=0, message={'role': 'assistant', 'content': 'READY ✓'}, finish_reason='stop'), DONE), ''),
    ('legacy-text', 'no_visible_text', 'the completions API: choices with text', 'OpenAI API, completions',
     chunks(choice_event(index=0, text='READY ✓', finish_reason='stop'), DONE), ''),
)
group(
    'errors in the stream',
    ('error-first', 'server_error', 'an error event first, then [DONE]', 'vLLM 0.32, bad sampling value',
     chunks(event({'error': {**ERROR, 'code': 400, 'message': 'top_logprobs is too large'}}), DONE), ''),
    ('error-midstream', 'server_error', 'an error event after text, then [DONE], clean end', 'vLLM 0.32, engine killed',
     chunks(*START, event({'error': ERROR}), DONE)),
    ('error-after-stop', 'server_error', 'an error event after stop', 'zendev-sh/goai#110',
     chunks(*START, STOP, event({'error': ERROR}), DONE)),
    ('error-text', 'server_error', 'error is a string', 'transformers serve 5.19', chunks(*START, event({'error': 'compute failed'}))),
    ('error-list', 'server_error', 'error is an array', 'agentgateway/agentgateway#1340', shape({'error': ['overloaded']})),
    ('error-empty', 'server_error', 'error is an empty object', 'coder/aibridge#56', shape({'error': {}})),
    ('error-false', 'server_error', 'error is false', 'OpenAI API, error is an object or null', shape(chunk(error=False))),
    ('error-flat', 'server_error', 'object "error" with the message at top level', 'older vLLM',
     shape({'object': 'error', 'message': 'out of memory', 'type': 'BadRequestError', 'code': 400})),
    ('error-detail', 'server_error', 'detail without choices', 'FastAPI error bodies', shape({'detail': 'Internal Server Error'})),
    ('error-message', 'server_error', 'message and code without choices', 'OpenRouter, flat errors',
     shape({'code': 502, 'message': 'upstream failed', 'choices': []})),
    ('error-in-choice', 'server_error', 'an error inside the choice', 'OpenRouter',
     chunks(*START, choice_event(index=0, delta={}, finish_reason='error', error={'code': 502, 'message': 'provider'}), DONE)),
    ('error-with-text', 'server_error', 'an error beside a choice with text', 'jgravelle/jmunch-mcp#5',
     shape(chunk({'content': 'lost'}, error=ERROR))),
    ('error-event', 'server_error', 'event: error with an error object', 'CommandCodeAI/command-code#755',
     chunks(*START, event({'error': ERROR}, kind='error'), DONE)),
    ('error-event-flat', 'server_error', 'event: error without an error member, after stop', 'meilisearch/meilisearch#6477',
     chunks(*START, STOP, event({'code': 400, 'details': 'top logprobs'}, kind='error'), DONE)),
    ('error-event-text', 'server_error', 'event: error with plain text', 'TGI generate_stream',
     chunks(*START, event('request failed', kind='error'), *END)),
    ('error-event-done', 'server_error', 'event: error with the data [DONE]', 'WHATWG HTML, event types',
     chunks(*START, STOP, event('[DONE]', kind='error'), DONE)),
    ('error-field', 'server_error', 'a line "error: ..."', 'old llama.cpp; ggml-org/llama.cpp#28724',
     chunks(*START, b'error: {"code":500,"message":"slot failed"}\n\n', *END)),
    ('error-echoes-key', 'server_error', 'an error that repeats the Authorization header', 'sgl-project/genai-bench#101',
     lambda request: chunks(*START, event({'error': {'message': f'bad token {request.key}', 'code': request.key}}), DONE)(request)),
    ('error-controls', 'server_error', 'an error with terminal escapes and bidi controls', 'ECMA-48; Unicode UAX 9',
     shape({'error': {'message': '\x1b[2J\x1b]0;owned\x07\u202egnihton\u009b31m'}})),
)
PLAIN = ('Content-Type: application/json',)
COMPLETION = {'id': 'chatcmpl-$ID', 'object': 'chat.completion', 'model': '$MODEL', 'choices': [
    {'index': 0, 'message': {'role': 'assistant', 'content': 'READY ✓'}, 'finish_reason': 'stop'}]}
group(
    'wrong content',
    ('http-error', 'http_status', 'status 503 and a JSON error', 'RFC 9110 section 15.6.4',
     json_error('503 Service Unavailable', {'error': {'message': 'fixture: no capacity', 'type': 'unavailable', 'code': 503}}), ''),
    ('http-400', 'http_status', 'status 400, prompt too long', 'vLLM 0.32',
     json_error('400 Bad Request', {'error': {'message': 'maximum context length is 2048 tokens', 'code': 400}}), ''),
    ('http-401', 'http_status', 'status 401, error is a string', 'vLLM 0.32, wrong key',
     json_error('401 Unauthorized', {'error': 'Unauthorized'}), ''),
    ('http-404', 'http_status', 'status 404, unknown model', 'vLLM 0.32',
     json_error('404 Not Found', {'error': {'message': 'The model `x` does not exist.', 'code': 404}}), ''),
    ('http-422', 'http_status', 'status 422 with detail', 'openclaw/openclaw#46649',
     json_error('422 Unprocessable Entity', {'detail': [{'loc': ['body', 'stream_options'], 'msg': 'extra fields'}]}), ''),
    ('http-429', 'http_status', 'status 429 with Retry-After', 'containers/ramalama#2343',
     json_error('429 Too Many Requests', {'error': {'message': 'slow down'}}, 'Retry-After: 5'), ''),
    ('http-500-streamed', 'http_status', 'status 500 with a whole event stream', 'RFC 9110 section 15.6.1',
     chunks(*ANSWER, status='500 Internal Server Error'), ''),
    ('http-502', 'http_status', 'status 502 and an HTML page', 'nginx, upstream down',
     sized(b'<html><head><title>502 Bad Gateway</title></head></html>', fields=('Content-Type: text/html',), status='502 Bad Gateway'),
     ''),
    ('http-201', 'http_status', 'status 201 with a whole event stream', 'WHATWG HTML, status 200 only',
     chunks(*ANSWER, status='201 Created'), ''),
    ('http-204', 'http_status', 'status 204', 'WHATWG HTML, no content ends a stream', raw(head(status='204 No Content')), ''),
    ('http-206', 'http_status', 'status 206 with a whole event stream', 'RFC 9110 section 15.3.7',
     chunks(*ANSWER, status='206 Partial Content'), ''),
    ('http-101', 'http_status', 'status 101', 'RFC 9110 section 15.2.2',
     raw(head('Upgrade: x', 'Connection: upgrade', status='101 Switching Protocols')), ''),
    ('http-401-stalled', 'http_status', 'status 401, its body never comes', 'Yamato-Security/senrigan#47',
     raw(head(*PLAIN, 'Content-Length: 100', status='401 Unauthorized'), HOLD), ''),
    ('http-echoes-key', 'http_status', 'status 401 that repeats the key in reason, field and body', 'sgl-project/genai-bench#101',
     lambda request: sized(json.dumps({'error': {'message': f'invalid: {request.key}'}}).encode(), status=f'401 {request.key}',
                           fields=(*PLAIN, f'Server: {request.key}'))(request), ''),
    ('redirect', 'redirect', 'status 307 to the same path with a slash', 'vLLM 0.32, trailing slash',
     raw(head(f'Location: {PATH}/', 'Content-Length: 0', status='307 Temporary Redirect')), ''),
    ('redirect-moved', 'redirect', 'status 301 to a mode that would answer', 'geek-fun/dockit#472',
     raw(head(f'Location: {PATH}?mode=ok', 'Content-Length: 0', status='301 Moved Permanently')), ''),
    ('redirect-echoes-key', 'redirect', 'a Location that repeats the key', 'promptfoo/promptfoo#160',
     lambda request: raw(head(f'Location: https://gateway.invalid/{request.key}', 'Content-Length: 0', status='302 Found'))(request),
     ''),
    ('json-200', 'not_event_stream', 'a completion that was not streamed', 'WHATWG HTML, the content type',
     sized(json.dumps(COMPLETION).encode(), fields=PLAIN), ''),
    ('html-200', 'not_event_stream', 'an HTML page with status 200', 'RFC 8910, captive portals',
     sized(b'<!doctype html><title>Sign in</title>', fields=('Content-Type: text/html; charset=utf-8',)), ''),
    ('ndjson-200', 'not_event_stream', 'JSON lines', 'Ollama, /api/chat',
     sized(b'{"message":{"content":"READY"},"done":false}\n{"done":true}\n', fields=('Content-Type: application/x-ndjson',)), ''),
    ('plain-200', 'not_event_stream', 'an event stream labelled text/plain', 'WHATWG HTML, the content type',
     chunks(*ANSWER, fields=('Content-Type: text/plain',)), ''),
    ('no-type', 'not_event_stream', 'an event stream without Content-Type', 'WHATWG HTML, the content type',
     chunks(*ANSWER, fields=()), ''),
    ('empty-200', 'not_event_stream', 'status 200 and nothing', 'FerroxLabs/wayland#1178', raw(head('Content-Length: 0')), ''),
    ('gzip', 'encoded_body', 'a whole answer, compressed and saying so', 'letta-ai/letta#3189',
     sized(gzip.compress(b''.join(p for p in ANSWER if isinstance(p, bytes)), mtime=0),
           fields=(*EVENT_STREAM, 'Content-Encoding: gzip')), ''),
    ('gzip-unsaid', 'not_utf8', 'a whole answer, compressed without saying so', 'psf/requests#5494',
     sized(gzip.compress(b''.join(p for p in ANSWER if isinstance(p, bytes)), mtime=0)), ''),
    ('type-parameters', 'passed', 'TEXT/Event-Stream with a parameter', 'RFC 9110 section 8.3.1',
     chunks(*ANSWER, fields=('content-type:TEXT/Event-Stream ; charset="latin-1"',))),
)
PLAIN_CHECK = event('{"choices":[{"index":0,"delta":{"content":"✓"}}]}')
LF_ANSWER = translated(ANSWER, b'\r\n', b'\n')
group(
    'event-stream forms',
    ('lf', 'passed', 'LF line ends', 'WHATWG HTML, end-of-line', chunks(*LF_ANSWER)),
    ('cr', 'passed', 'CR line ends', 'WHATWG HTML, end-of-line', chunks(*translated(ANSWER, b'\r\n', b'\r'))),
    ('line-ends-mixed', 'passed', 'LF, CR and CRLF in turn', 'anomalyco/opencode#38106',
     chunks(COMMENT, *translated([ROLE, READY], b'\r\n\r\n', b'\n\r'), *translated([CHECK, STOP], b'\r\n\r\n', b'\r\r\n'), DONE)),
    ('crlf-cut', 'passed', 'every CRLF cut between two writes', 'openai/openai-python#1230',
     chunks(*(half for p in ANSWER if isinstance(p, bytes) for half in (p[:-3], 0.01, p[-3:-2], p[-2:-1], 0.01, p[-1:])))),
    ('bom', 'passed', 'a byte order mark in front', 'WHATWG HTML, one BOM', chunks(b'\xef\xbb\xbf', *ANSWER)),
    ('no-space', 'passed', 'no space after the colon', 'mistralai/mistral-vibe#774', chunks(*translated(ANSWER, b'data: ', b'data:'))),
    ('data-lines', 'passed', 'JSON over several data lines', 'SamSaffron/term-llm#454',
     chunks(ROLE, READY, CHECK.replace(b'"choices":', b'"choices":\r\ndata: '), *END)),
    ('other-fields', 'passed', 'id, retry and unknown fields', 'WHATWG HTML, fields',
     chunks(*translated(ANSWER, b'data: ', b'id: 7\r\nretry: 10\r\nnothing\r\ndata: '))),
    ('comments-between', 'passed', 'comments between the lines of an event', 'mnfst/llm-gateway#2053',
     chunks(*translated(ANSWER, b'data: ', b':\r\n: ping\r\ndata: '))),
    ('message-events', 'passed', 'event: message on every event', 'WHATWG HTML, the default type',
     chunks(*translated(ANSWER, b'data: ', b'event: message\r\ndata: '))),
    ('ping-events', 'passed', 'event: ping with empty data', 'infiniflow/ragflow#15381',
     chunks(*START, event('', kind='ping'), *END)),
    ('named-done', 'passed', '[DONE] in an event of type done', 'WHATWG HTML, event types', chunks(*START, STOP, USAGE,
     event('[DONE]', kind='done'))),
    ('empty-data', 'passed', 'events with empty data as keep-alive', 'diegosouzapw/OmniRoute#7031',
     chunks(*START[:4], event(''), CHECK, *END)),
    ('multibyte-cut', 'passed', 'every byte of the check mark in its own chunk', 'openai/openai-python#498',
     chunks(*START[:5], *(PLAIN_CHECK[at : at + 1] for at in range(len(PLAIN_CHECK))), *END)),
    ('named-chunks', 'no_done', 'chunks in events of another type, no [DONE]', 'microsoft/autogen#6465',
     chunks(event(chunk({'content': 'READY ✓'}, 'stop'), kind='chunk')), ''),
    ('indented', 'no_done', 'fields indented by a space', 'WHATWG HTML, field names', chunks(*translated(ANSWER, b'data', b' data')), ''),
    ('upper-case', 'no_done', 'DATA in place of data', 'WHATWG HTML, field names', chunks(*translated(ANSWER, b'data', b'DATA')), ''),
    ('json-lines', 'no_done', 'bare JSON lines in an event stream', 'earendil-works/pi#8462',
     chunks(*translated(LF_ANSWER, b'data: ', b'')), ''),
    ('html-as-events', 'no_done', 'an HTML page labelled text/event-stream', 'RFC 9110 section 8.3',
     chunks(b'<html><body>Service unavailable</body></html>\n'), ''),
    ('done-lower-case', 'not_json', '[done]', 'OpenAI API, the [DONE] sentinel', chunks(*START, STOP, USAGE, event('[done]'), DONE)),
    ('done-quoted', 'not_an_object', '"[DONE]" in quotes', 'OpenAI API, the [DONE] sentinel',
     chunks(*START, STOP, USAGE, event('"[DONE]"'), DONE)),
    ('done-blank', 'not_json', '[DONE] and a space', 'WHATWG HTML, only a leading space is removed',
     chunks(*START, STOP, USAGE, event('[DONE] '), DONE)),
    ('done-prefix', 'not_json', '[DONE] with text behind it', 'openai-python, prefix test', chunks(*START, STOP, event('[DONE]{}'))),
    ('ping-as-data', 'not_json', 'keep-alive text sent as data', 'vllm-project/vllm#38732',
     chunks(*START, event(': keep-alive'), *END)),
    ('bad-utf8', 'not_utf8', 'a byte that is not UTF-8', 'WHATWG HTML, UTF-8 always',
     chunks(ROLE, READY, CHECK.replace('✓'.encode(), b'\xff'), *END), 'READY '),
    ('latin-1', 'not_utf8', 'text in Latin-1', 'WHATWG HTML, UTF-8 always', chunks(ROLE, READY, CHECK.replace('✓'.encode(), b'\xe9'),
     *END), 'READY '),
    ('overlong-utf8', 'not_utf8', 'an overlong slash', 'RFC 3629 section 3', chunks(ROLE, READY, CHECK.replace('✓'.encode(), b'\xc0\xaf'),
     *END), 'READY '),
    ('utf8-surrogate', 'not_utf8', 'a surrogate encoded in UTF-8', 'RFC 3629 section 3',
     chunks(ROLE, READY, text('\ud83d'), *END), 'READY '),
    ('utf8-in-comment', 'not_utf8', 'a bad byte in a comment', 'RFC 3629 section 3',
     chunks(ROLE, READY, b': \xfe\n', CHECK, *END), 'READY '),
    ('utf8-cut', 'not_utf8', 'the body ends inside a character', 'RFC 3629 section 3',
     chunks(*START, STOP, USAGE, DONE[:-2] + b'\xe2\x9c')),
    ('utf-16', 'not_utf8', 'the stream in UTF-16', 'WHATWG HTML, UTF-8 always',
     chunks(*(p.decode().encode('utf-16') for p in ANSWER if isinstance(p, bytes))), ''),
)
group(
    'chunk shapes',
    ('malformed', 'not_json', 'an event that is not JSON after the text', 'RFC 8259', shape('{invalid}')),
    ('json-cut', 'not_json', 'JSON cut in the middle', 'RFC 8259', shape('{"choices":[{"index":0,"del')),
    ('json-two', 'not_json', 'two objects in one event', 'RFC 8259', shape('{"choices":[]}{"choices":[]}')),
    ('json-nan', 'not_json', 'NaN among the log probabilities', 'waybarrios/vllm-mlx#107', shape('{"choices":[],"x":NaN}')),
    ('json-infinity', 'not_json', '-Infinity among the log probabilities', 'vllm-project/vllm#57519',
     shape('{"choices":[],"x":-Infinity}')),
    ('json-control', 'not_json', 'a raw control character in a string', 'RFC 8259 section 7',
     shape('{"choices":[{"index":0,"delta":{"content":"a\tb"}}]}')),
    ('json-bom', 'not_json', 'a byte order mark inside an event', 'RFC 8259 section 8.1', shape('\ufeff{"choices":[]}')),
    ('json-deep', 'json_limits', 'arrays nested 101 levels deep', 'RFC 8259 section 9', shape('[' * 101 + ']' * 101)),
    ('json-abyss', 'json_limits', 'arrays nested 30,000 levels deep', 'RFC 8259 section 9', shape('{"a":' + '[' * 30_000)),
    ('json-long-number', 'json_limits', 'an integer of 5,000 digits', 'RFC 8259 section 9',
     shape('{"choices":[],"created":' + '9' * 5000 + '}')),
    ('json-array', 'not_an_object', 'an array', 'OpenAI API', shape([])),
    ('json-null', 'not_an_object', 'null', 'OpenAI API', shape(None)),
    ('json-number', 'not_an_object', 'a number', 'OpenAI API', shape(7)),
    ('key-twice', 'repeated_key', 'finish_reason twice, null and stop', 'RFC 8259 section 4',
     chunks(*START, event('{"choices":[{"index":0,"delta":{},"finish_reason":null,"finish_reason":"stop"}]}'), USAGE, DONE)),
    ('key-twice-nested', 'repeated_key', 'content twice in one delta', 'RFC 8259 section 4',
     chunks(*START, event('{"choices":[{"index":0,"delta":{"content":"a","content":"b"}}]}'), *END)),
    ('key-twice-kinds', 'repeated_key', 'index twice, 0 and false', 'RFC 8259 section 4',
     chunks(*START, event('{"choices":[{"index":false,"index":0,"delta":{}}]}'), *END)),
    ('choices-two', 'many_choices', 'two choices in one chunk', 'vLLM 0.32, n = 2',
     shape(chunk(choices=[{'index': 0, 'delta': {'content': 'a'}}, {'index': 1, 'delta': {'content': 'b'}}]))),
    ('choices-same', 'many_choices', 'two choices with the same index', 'amd/gaia#3501',
     shape(chunk(choices=[{'index': 0, 'delta': {}}, {'index': 0, 'delta': {}}]))),
    ('index-one', 'choice_index', 'a choice with index 1', 'vLLM 0.32, n = 2', shape(choice(index=1, delta={'content': 'b'}))),
    ('index-null', 'choice_index', 'a choice with index null', 'OpenAI API', shape(choice(index=None, delta={}))),
    ('index-false', 'choice_index', 'a choice with index false', 'OpenAI API', shape(choice(index=False, delta={}))),
    ('index-float', 'choice_index', 'a choice with index 0.0', 'OpenAI API', shape('{"choices":[{"index":0.0,"delta":{}}]}')),
    ('index-absent', 'missing_index', 'a choice without an index', 'OpenAI API', shape(choice(delta={'content': 'more'}))),
    ('choices-object', 'bad_shape', 'choices is an object', 'OpenAI API', shape(chunk(choices={'index': 0}))),
    ('choices-empty-object', 'bad_shape', 'choices is an empty object', 'OpenAI API', shape(chunk(choices={}))),
    ('choice-null', 'bad_shape', 'the choice is null', 'OpenAI API', shape(chunk(choices=[None]))),
    ('delta-list', 'bad_shape', 'delta is an array', 'OpenAI API', shape(choice(index=0, delta=['x']))),
    ('delta-text', 'bad_shape', 'delta is a string', 'OpenAI API', shape(choice(index=0, delta='x'))),
    ('content-number', 'bad_shape', 'content is a number', 'OpenAI API', shape(chunk({'content': 0}))),
    ('content-parts', 'bad_shape', 'content is an array of parts', 'OpenAI API, message content', shape(chunk({'content': [
        {'type': 'text', 'text': 'READY'}]}))),
    ('finish-number', 'bad_shape', 'finish_reason is a number', 'OpenAI API', shape(chunk(finish=0))),
    ('finish-object', 'bad_shape', 'finish_reason is an object', 'SGLang, meta_info', shape(chunk(finish={'type': 'stop'}))),
    ('finish-long', 'bad_shape', 'finish_reason has 65 characters', 'OpenAI API, an enumeration; CWE-770', shape(chunk(finish='s' * 65))),
    ('usage-list', 'bad_usage', 'usage is an array', 'OpenAI API', shape(chunk(choices=[], usage=[3]))),
    ('usage-text', 'bad_usage', 'the count is a string', 'OpenAI API', shape(chunk(choices=[], usage={'completion_tokens': '3'}))),
    ('usage-float', 'bad_usage', 'the count is 3.0', 'OpenAI API', shape(chunk(choices=[], usage={'completion_tokens': 3.0}))),
    ('usage-true', 'bad_usage', 'the count is true', 'OpenAI API', shape(chunk(choices=[], usage={'completion_tokens': True}))),
    ('usage-negative', 'bad_usage', 'the count is -1', 'OpenAI API', shape(chunk(choices=[], usage={'completion_tokens': -1}))),
    ('tool-call', 'tool_call', 'a tool call', 'CommandCodeAI/command-code#785', shape(chunk(TOOL))),
    ('tool-call-with-text', 'tool_call', 'a tool call beside text', 'QwenLM/qwen-code#8920', shape(chunk({**TOOL, 'content': 'x'}))),
    ('function-call', 'tool_call', 'the older function_call', 'OpenAI API', shape(chunk({'function_call': {'name': 'look'}}))),
    ('refusal', 'refused', 'a refusal', 'OpenAI API, refusal', shape(chunk({'refusal': 'I will not.'}))),
    ('text-after-finish', 'text_after_finish', 'text after the finish', 'openai/openai-agents-python#3769',
     chunks(*START, STOP, text('more'), USAGE, DONE)),
    ('text-with-second-finish', 'text_after_finish', 'the last text and stop twice', 'vllm-project/vllm#52640',
     chunks(*START[:5], event(chunk({'content': '✓'}, 'stop')), event(chunk({'content': '✓'}, 'stop')), DONE)),
    ('second-finish', 'second_finish', 'stop and then length', 'ROCm/ATOM#1711',
     chunks(*START, STOP, event(chunk(finish='length')), USAGE, DONE)),
    ('id-changed', 'id_changed', 'text under two ids', 'HKUDS/nanobot#4038', chunks(*START, text('again', id='other'), *END)),
    ('stitched', 'id_changed', 'an answer that starts anew under another id', 'HKUDS/nanobot#4038, in the gateway',
     chunks(ROLE, READY, *(p.replace(b'$ID', b'$ID-2') for p in (ROLE, READY, CHECK, *END))), 'READY '),
    ('half-surrogate', 'unpaired_surrogate', 'half a surrogate pair', 'RFC 8259 section 7',
     chunks(*START, event('{"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}'), *END), 'READY ✓\ufffd'),
    ('half-surrogate-low', 'unpaired_surrogate', 'a low surrogate before the text', 'RFC 8259 section 7',
     chunks(event('{"choices":[{"index":0,"delta":{"content":"\\ude42"}}]}'), READY, CHECK, *END), '\ufffdREADY ✓'),
)
NO_LENGTH = head(*EVENT_STREAM, CHUNKED)
INTERIM = b'HTTP/1.1 102 Processing\r\n\r\n'
FILLED, TEXT_ONLY, FINISHED, ROLE_ONLY = (
    Request(b'fixture', b'fixture', '').fill(b''.join(p for p in pieces if isinstance(p, bytes)))
    for pieces in (ANSWER, START, (*START, STOP), [ROLE]))
group(
    'HTTP framing',
    ('content-length', 'passed', 'a whole answer with its length', 'RFC 9112 section 6.2', sized(*ANSWER)),
    ('http-1-0', 'passed', 'an HTTP/1.0 answer ended by closing', 'nginx with HTTP/1.0 upstreams',
     until_close(*ANSWER, version='1.0')),
    ('until-close', 'passed', 'an HTTP/1.1 answer ended by closing', 'RFC 9112 section 6.3', until_close(*ANSWER)),
    ('connection-close', 'passed', 'chunked with Connection: close', 'uvicorn',
     chunks(*ANSWER, fields=(*EVENT_STREAM, 'Connection: close'))),
    ('kept-open', 'passed', 'a whole chunked answer, the connection stays open', 'vLLM 0.32, 5 s keep-alive',
     chunks(*ANSWER, end=(LAST, HOLD))),
    ('done-kept-open', 'passed', '[DONE], but neither last chunk nor close', 'openai/openai-node#2725, keep-alive servers',
     chunks(*ANSWER, end=(HOLD,))),
    ('one-chunk-all', 'passed', 'everything in one chunk', 'LostRuins/koboldcpp#1168', chunks(FILLED)),
    ('byte-chunks', 'passed', 'every byte in a chunk of its own', 'RFC 9112 section 7.1',
     chunks(*(FILLED[at : at + 1] for at in range(len(FILLED))))),
    ('chunk-extensions', 'passed', 'chunk extensions', 'RFC 9112 section 7.1.1', chunks(*ANSWER, extension=b' ;n="a;b";x')),
    ('trailers', 'passed', 'trailer fields', 'RFC 9112 section 7.1.2',
     chunks(*ANSWER, end=(b'0\r\nServer-Timing: x;dur=1\r\nX-Check: ok\r\n\r\n',))),
    ('chunk-zeros', 'passed', 'chunk sizes with leading zeros and upper-case digits', 'RFC 9112 section 7.1',
     raw(NO_LENGTH, b'00%X\r\n%s\r\n' % (len(FILLED), FILLED), LAST)),
    ('interim-100', 'passed', 'a 100 answer first', 'RFC 9110 section 15.2.1',
     raw(b'HTTP/1.1 100 Continue\r\n\r\n', NO_LENGTH, framed(FILLED), LAST)),
    ('interim-103', 'passed', 'a 103 answer with fields first', 'RFC 8297',
     raw(b'HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n', NO_LENGTH, framed(FILLED), LAST)),
    ('interim-many', 'passed', 'eight interim answers first', 'RFC 9110 section 15.2',
     raw(INTERIM * 8, NO_LENGTH, framed(FILLED), LAST)),
    ('done-then-cut', 'passed', 'the last chunk is missing after [DONE]', 'open-webui/open-webui#29628', chunks(*ANSWER, end=())),
    ('done-then-reset', 'passed', 'a reset after [DONE]', 'RFC 9293 section 3.5.2', chunks(*ANSWER, end=(RESET,))),
    ('done-then-garbage', 'passed', 'bytes that are no chunk after [DONE]', 'RFC 9112 section 7.1', chunks(*ANSWER, end=(b'Oops\r\n',))),
    ('done-then-short', 'passed', 'a Content-Length that claims more after [DONE]', 'RFC 9112 section 6.3', sized(*ANSWER, more=500)),
    ('length-too-long', 'body_cut', 'a Content-Length that claims 500 bytes more', 'python/cpython#115997', sized(*START, more=500)),
    ('length-too-short', 'no_done', 'a Content-Length that ends before [DONE]', 'RFC 9112 section 6.3', sized(*ANSWER, more=-9)),
    ('length-zero', 'no_done', 'Content-Length 0', 'amd/gaia#3501', raw(head(*EVENT_STREAM, 'Content-Length: 0')), ''),
    ('close-midway', 'no_done', 'closed after the text, no other framing', 'RFC 9112 section 6.3', until_close(*START)),
    ('chunk-size-bad', 'chunk_malformed', 'a chunk size that is no number', 'RFC 9112 section 7.1',
     raw(NO_LENGTH, framed(TEXT_ONLY), b'zz\r\n', framed(FILLED), LAST)),
    ('chunk-size-underscore', 'chunk_malformed', 'the chunk size 0_9', "Python's int()",
     raw(NO_LENGTH, framed(TEXT_ONLY), b'0_9\r\n: comment\r\n', LAST)),
    ('chunk-size-negative', 'chunk_malformed', 'the chunk size -5', "Python's int()", raw(NO_LENGTH, framed(TEXT_ONLY), b'-5\r\n', LAST)),
    ('chunk-size-0x', 'chunk_malformed', 'the chunk size 0x9', "Python's int()",
     raw(NO_LENGTH, framed(TEXT_ONLY), b'0x9\r\n: comment\r\n', LAST)),
    ('chunk-size-huge', 'chunk_malformed', 'a chunk size of 17 digits', 'RFC 9112 section 7.1',
     raw(NO_LENGTH, framed(TEXT_ONLY), b'1' * 17 + b'\r\n', HOLD)),
    ('chunk-no-crlf', 'chunk_malformed', 'no CRLF after the chunk data', 'RFC 9112 section 7.1',
     raw(NO_LENGTH, framed(TEXT_ONLY)[:-2], framed(FILLED), LAST)),
    ('chunk-bare-lf', 'chunk_malformed', 'LF in place of CRLF after the chunk size', 'RFC 9112 section 7.1',
     raw(NO_LENGTH, framed(TEXT_ONLY), b'9\n: comment\r\n', LAST)),
    ('proxy-page', 'chunk_malformed', "a gateway's 502 answer where a chunk size is due", 'Security-Onion-Solutions/securityonion#15841',
     raw(NO_LENGTH, framed(TEXT_ONLY), b'HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n')),
    ('trailer-broken', 'chunk_malformed', 'a trailer line that is no field, before [DONE]', 'RFC 9112 section 7.1.2',
     chunks(*START, end=(b'0\r\nno field\r\n\r\n',))),
    ('trailer-endless', 'chunk_malformed', 'trailer fields without end', 'RFC 9112 section 7.1.2',
     repeated((NO_LENGTH, framed(TEXT_ONLY), b'0\r\n'), lambda n: b'X-Trailer: %d\r\n' % n * 100, 0)),
    ('lone-zero', 'body_cut', 'the last chunk without its final CRLF, then closed', 'python/cpython#115997',
     chunks(*START, end=(b'0\r\n',))),
    ('two-lengths', 'length_conflict', 'two Content-Length fields that differ', 'RFC 9112 section 6.3',
     raw(head(*EVENT_STREAM, 'Content-Length: 10', 'Content-Length: 2000'), FILLED), ''),
    ('length-and-chunked', 'length_conflict', 'Content-Length beside chunked', 'RFC 9112 section 6.3',
     chunks(*ANSWER, fields=(*EVENT_STREAM, 'Content-Length: 5')), ''),
    ('length-signed', 'length_conflict', 'Content-Length +5', 'RFC 9110 section 8.6',
     raw(head(*EVENT_STREAM, 'Content-Length: +5000'), FILLED), ''),
    ('chunked-http-1-0', 'length_conflict', 'chunked in an HTTP/1.0 answer', 'RFC 9112 section 6.1',
     raw(head(*EVENT_STREAM, CHUNKED, version='1.0'), framed(FILLED), LAST), ''),
    ('coding-unknown', 'length_conflict', 'a transfer coding that nobody knows', 'RFC 9112 section 6.1',
     raw(head(*EVENT_STREAM, 'Transfer-Encoding: xchunked'), framed(FILLED), LAST), ''),
    ('coding-gzip', 'encoded_body', 'the transfer coding gzip, chunked', 'RFC 9112 section 7.2',
     raw(head(*EVENT_STREAM, 'Transfer-Encoding: gzip, chunked'), framed(gzip.compress(FILLED, mtime=0)), LAST), ''),
    ('interim-nine', 'interim_limit', 'nine interim answers first', 'RFC 9110 section 15.2',
     raw(INTERIM * 9, NO_LENGTH, framed(FILLED), LAST), ''),
    ('interim-endless', 'interim_limit', '100 answers without end', 'python/cpython#123793',
     repeated((), lambda _: b'HTTP/1.1 100 Continue\r\n\r\n', 0.01), ''),
    ('status-line-bad', 'head_malformed', 'a status line of another protocol', 'RFC 9112 section 4',
     raw(b'SSH-2.0-OpenSSH_9.2\r\n'), ''),
    ('status-not-number', 'head_malformed', 'the status 2_00', "Python's int()",
     raw(NO_LENGTH.replace(b' 200 ', b' 2_00 '), framed(FILLED), LAST), ''),
    ('http-0-9', 'head_malformed', 'a body without a head', 'RFC 9112 appendix C.1', raw(FILLED), ''),
    ('field-broken', 'head_malformed', 'a line without colon before Transfer-Encoding', "http.client's parser",
     raw(head(*EVENT_STREAM, 'no field at all', CHUNKED), framed(FILLED), LAST), ''),
    ('field-blank', 'head_malformed', 'a blank before the colon of a field', 'RFC 9112 section 5.1',
     raw(head(*EVENT_STREAM, 'Transfer-Encoding : chunked'), framed(FILLED), LAST), ''),
    ('field-bare-cr', 'head_malformed', 'a bare CR in a field', 'RFC 9112 section 2.2',
     raw(head(*EVENT_STREAM, 'X: a\rTransfer-Encoding: chunked'), FILLED), ''),
    ('fields-many', 'head_too_large', '150 header fields', "http.client's limit of 100",
     chunks(*ANSWER, fields=(*EVENT_STREAM, *(f'X-{n}: y' for n in range(150)))), ''),
    ('field-long', 'head_too_large', 'a header field of 70,000 characters', "http.client's limit of 65,536",
     chunks(*ANSWER, fields=(*EVENT_STREAM, 'X-Long: ' + 'y' * LONG)), ''),
    ('field-endless', 'head_too_large', 'a header field without end', 'RFC 9112 section 5',
     repeated((b'HTTP/1.1 200 OK\r\nX-Endless: ',), lambda _: b'y' * 8192, 0), ''),
)
group(
    'connection faults',
    ('closed-at-once', 'closed_before_head', 'closed without a byte', 'vllm-project/vllm#7262', raw(), ''),
    ('closed-in-status', 'closed_before_head', 'closed in the status line', 'RFC 9112 section 8', raw(b'HTTP/1.1 20'), ''),
    ('closed-in-fields', 'closed_before_head', 'closed in the header fields', "http.client takes this for the end of the head",
     raw(b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n'), ''),
    ('reset-at-once', 'closed_before_head', 'a reset without a byte', 'BerriAI/litellm#34819', raw(RESET), ''),
    ('reset-after-head', 'connection_reset', 'a reset after the head', 'BerriAI/litellm#34819', chunks(end=(RESET,)), ''),
    ('reset-midway', 'connection_reset', 'a reset after the text', 'anthropics/claude-code#3197', chunks(*START, end=(RESET,))),
    ('reset-after-finish', 'connection_reset', 'a reset between finish and [DONE]', 'NVIDIA/TensorRT-LLM#18289',
     chunks(*START, STOP, end=(RESET,))),
    ('cut-in-chunk', 'body_cut', 'closed inside a chunk', 'vLLM 0.32, API server killed', chunks(*START, end=(framed(STOP)[:40],))),
    ('cut-in-chunk-size', 'body_cut', 'closed inside a chunk-size line', 'RFC 9112 section 8', chunks(*START, end=(b'1f',))),
    ('cut-in-chunk-end', 'body_cut', 'closed between the CR and LF behind a chunk', 'RFC 9112 section 8',
     chunks(*START, end=(framed(STOP)[:-1],))),
    ('cut-before-last-chunk', 'body_cut', 'closed before the last chunk', 'llama-server, killed', chunks(*START, end=())),
    ('cut-once', 'body_cut', 'cut after the text; asked again within two seconds, the whole answer', 'HKUDS/nanobot#4038',
     lambda request: chunks(*START, COMMENT, *(END if request.again else ()), end=(LAST,) if request.again else ())(request)),
    ('cut-after-finish', 'body_cut', 'closed after finish and usage, no last chunk', 'theopenco/llmgateway#1901',
     chunks(*START, STOP, USAGE, end=())),
    ('done-cut-in-chunk', 'body_cut', 'the chunk with [DONE] is cut inside it', 'RFC 9112 section 8',
     chunks(*START, STOP, USAGE, end=(framed(DONE)[:-5],))),
)
group(
    'time',
    ('stall-before-head', 'idle_timeout', 'not a byte', 'openonion/connectonion#1116', raw(HOLD), ''),
    ('stall-in-head', 'idle_timeout', 'half a head and silence', 'RFC 9112 section 9.5', raw(b'HTTP/1.1 200 OK\r\nContent-', HOLD), ''),
    ('stall-before-event', 'idle_timeout', 'a head and silence', 'azrtydxb/Fastllm-proxy#19', raw(NO_LENGTH, HOLD), ''),
    ('stall-after-text', 'idle_timeout', 'silence after the text', 'llama-server after SIGTERM', chunks(*START, end=(HOLD,))),
    ('stall-after-finish', 'idle_timeout', 'silence between finish and [DONE]', 'NVIDIA/TensorRT-LLM#18289',
     chunks(*START, STOP, USAGE, end=(HOLD,))),
    ('stall-in-event', 'idle_timeout', 'silence inside an event', 'WHATWG HTML, dispatch', chunks(*START, STOP[:50], end=(HOLD,))),
    ('stall-before-blank-line', 'idle_timeout', 'silence before the blank line behind [DONE]', 'WHATWG HTML, dispatch',
     chunks(*START, STOP, USAGE, DONE[:-2], end=(HOLD,))),
    ('stall-bad-chunk', 'chunk_malformed', 'a bad byte where a chunk size is due, then silence', 'RFC 9112 section 7.1',
     chunks(*START, end=(b'H', HOLD))),
    ('stall-malformed', 'not_json', 'an event that is not JSON, then silence', 'RFC 8259', chunks(*START, event('oops'), end=(HOLD,))),
    ('drip-status', 'deadline', 'the status line a byte at a time', 'local check, CPython 3.11',
     lambda _: dripped(b'HTTP/1.1 200 ' + b'O' * 60, 0.5), ''),
    ('drip-head', 'deadline', 'header fields a byte at a time', 'anthony-chaudhary/fak#5486',
     lambda _: dripped(b'HTTP/1.1 200 OK\r\nX-Slow: ' + b'y' * 60, 0.5), ''),
    ('drip-chunk-line', 'deadline', 'a chunk extension a byte at a time', 'RFC 9112 section 7.1.1',
     lambda request: (*chunks(*START, end=())(request), *dripped(b'1;' + b'x' * 60, 0.5))),
    ('drip-line', 'deadline', 'a line of the stream a byte at a time', 'anthony-chaudhary/fak#5486',
     lambda request: (*chunks(*START, end=())(request),
                      *(framed(s) if isinstance(s, bytes) else s for s in dripped(b'd' * 60, 0.5)))),
    ('drip-trailer', 'deadline', 'a trailer a byte at a time, before [DONE]', 'RFC 9112 section 7.1.2',
     lambda request: (*chunks(*START, end=())(request), *dripped(b'0\r\nX: ' + b'y' * 60, 0.5))),
    ('drip-after-done', 'passed', 'a trailer a byte at a time, after [DONE]', 'RFC 9112 section 7.1.2',
     lambda request: (*chunks(*ANSWER, end=())(request), *dripped(b'0\r\nX: ' + b'y' * 20, 0.2))),
    ('endless-comments', 'deadline', 'comments without end', 'anthony-chaudhary/fak#5486',
     repeated((NO_LENGTH, framed(TEXT_ONLY)), lambda _: framed(b': ping\n\n'), 0.2)),
    ('endless-empty-deltas', 'deadline', 'empty deltas without end', 'cybertec-postgresql/pg_hardstorage#62',
     repeated((NO_LENGTH, framed(TEXT_ONLY)), lambda _: framed(event('{"choices":[{"index":0,"delta":{}}]}')), 0.2)),
    ('endless-text', 'deadline', 'text without end', 'vllm-project/vllm#54947',
     repeated((NO_LENGTH, framed(ROLE_ONLY)), lambda _: framed(event('{"choices":[{"index":0,"delta":{"content":"x"}}]}')), 0.2), None),
    ('endless-after-finish', 'deadline', 'comments without end between finish and [DONE]', 'LostRuins/koboldcpp#1168',
     repeated((NO_LENGTH, framed(FINISHED)), lambda _: framed(b':\n'), 0.2)),
    ('comments-then-answer', 'passed', 'keep-alive comments for three seconds, then the answer', 'vLLM --sse-keep-alive-interval',
     chunks(*((b': keep-alive\n\n', 1.0) * 3), *ANSWER)),
    ('slow-text', 'passed', 'a piece of text a second', 'vllm-project/vllm#3768', chunks(COMMENT, ROLE, 1.0, READY, 1.0, CHECK, 1.0, *END)),
    ('steady-text', 'passed', 'twelve pieces of text, one every 0.12 s', 'vLLM 0.32, one event a token', chunks(*STEADY), 'one ' * 12),
    ('steady-until-close', 'passed', 'the same, ended by closing', 'vLLM behind nginx with HTTP/1.0', until_close(*STEADY), 'one ' * 12),
    ('held-back', 'passed', '1.5 s of silence, then the same at once', 'nginx 1.22, proxy_buffering',
     chunks(1.5, b''.join(piece for piece in STEADY if isinstance(piece, bytes))), 'one ' * 12),
    ('slow-head', 'passed', 'the head comes with the first token', 'llama-server b11434', lambda request: (1.5, *chunks(*ANSWER)(request))),
)
PADDED = event('{"choices":[{"index":0,"delta":{}}],"pad":"' + 'y' * 20_000 + '"}')
group(
    'size',
    ('line-of-60000', 'passed', 'a line of 60,000 characters', 'CWE-770; the limit is 65,536',
     chunks(ROLE, text('READY ✓' + 'y' * 60_000), *END), 'READY ✓' + 'y' * 60_000),
    ('event-of-900000', 'passed', 'an event of 900,000 characters in lines of 16,000', 'CWE-770; the limit is 1,048,576',
     chunks(ROLE, READY, CHECK, event('{"choices":[],"pad":[' + '\ndata: '.join(['"' + 'y' * 16_000 + '",'] * 56) + '"y"]}'), *END)),
    ('events-of-20000', 'passed', '20,000 events with text in one go', 'sgl-project/sglang#12064', chunks(
        ROLE, *([text('y') * 500] * 40), READY, CHECK, *END), 'y' * 20_000 + 'READY ✓'),
    ('comments-of-20000', 'passed', '20,000 comments', 'WHATWG HTML, comments', chunks(*START, b': ping\n\n' * 20_000, *END)),
    ('line-too-long', 'line_too_long', 'a line of 70,000 characters, and no end', 'CWE-770; the limit is 65,536',
     chunks(*START, text('y' * LONG))),
    ('comment-too-long', 'line_too_long', 'a comment of 70,000 characters, and no end', 'CWE-770; the limit is 65,536',
     chunks(*START, b': ' + b'y' * LONG + b'\n\n')),
    ('event-too-long', 'event_too_long', 'an event of 1.2 million characters in lines of 16,000, and no end',
     'CWE-770; the limit is 1,048,576',
     chunks(*START, *([b'data: ' + b'y' * 16_000 + b'\n'] * 75))),
    ('answer-too-long', 'answer_too_long', '1.1 million characters of text, and no end', 'CWE-770; the limit is 1,048,576',
     chunks(ROLE, *([text('y' * 50_000)] * 22)), 'y' * 1_000_000),
    ('endless-line', 'line_too_long', 'a line without end', 'CWE-770',
     repeated((NO_LENGTH, framed(TEXT_ONLY)), lambda _: framed(b'y' * 8192), 0)),
    ('endless-data-lines', 'event_too_long', 'data lines without a blank line', 'CWE-770',
     repeated((NO_LENGTH, framed(TEXT_ONLY)), lambda _: framed(b'data: ' + b'y' * 1000 + b'\n'), 0)),
    ('endless-bare-data', 'event_too_long', 'bare data lines without a blank line', 'CWE-770',
     repeated((NO_LENGTH, framed(TEXT_ONLY)), lambda _: framed(b'data\n' * 2000), 0)),
    ('deltas-flood', 'body_too_large', 'empty deltas as fast as they go', 'CWE-770',
     repeated((NO_LENGTH, framed(TEXT_ONLY)), lambda _: framed(PADDED * 16), 0)),
    ('flood', 'body_too_large', 'comments as fast as they go', 'CWE-770',
     repeated((NO_LENGTH, framed(TEXT_ONLY)), lambda _: framed((b': ' + b'y' * 60_000 + b'\n') * 8), 0)),
)


# --- server -------------------------------------------------------------------------------------------------------------


class FixtureServer(ThreadingHTTPServer):
    """``.mode`` and ``.delay`` (seconds) may be changed while it runs; they hold for requests that name no mode."""

    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, port: int, mode: str, delay: float, fragment: int | str | None, seed: int, tls: ssl.SSLContext | None) -> None:
        self.mode, self.delay, self.fragment, self.tls, self.seed = mode, delay, fragment, tls, seed
        self.replayed: Callable[[Request], Iterable[Step]] | None = None
        self._numbers = itertools.count(1)
        self._asked: dict[str, float] = {}
        super().__init__(('127.0.0.1', port), Handler)

    def draw(self) -> tuple[int, random.Random]:
        """The ordinal of a request and its own source of randomness, the same for the same seed."""
        number = next(self._numbers)
        return number, random.Random(f'{self.seed} {number}')  # noqa: S311  # repeatable, no secret

    def again(self, name: str) -> bool:
        """Whether this mode was asked for within the last two seconds."""
        now = time.monotonic()
        before = self._asked.get(name, -10.0)
        self._asked[name] = now
        return now - before < 2.0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no event worth a traceback; anything else is one line."""
        kind = sys.exc_info()[0]
        if kind and not issubclass(kind, OSError):
            _say(f'fixture_server.py: {kind.__name__} while answering')


class Handler(BaseHTTPRequestHandler):
    """One connection. Errors are JSON; nothing is logged."""

    protocol_version = 'HTTP/1.1'
    timeout = CLIENT_TIMEOUT_S
    disable_nagle_algorithm = True
    server: FixtureServer

    def setup(self) -> None:
        """The TLS handshake, where there is one, in this connection's own thread."""
        if self.server.tls:
            self.request.settimeout(CLIENT_TIMEOUT_S)
            self.request = self.server.tls.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        """Close the TLS layer too, which socketserver does not know."""
        super().finish()
        if self.server.tls:
            self.request.close()

    def do_GET(self) -> None:
        """``/v1/models`` lists the modes."""
        if self.path != '/v1/models':
            self.send_error(404)
            return
        self._json(200, {'object': 'list', 'data': [
            {'id': f'mode:{name}', 'object': 'model', 'created': 1790000000, 'owned_by': 'fixture'} for name in MODES]})

    def do_POST(self) -> None:
        """The one endpoint."""
        length = self.headers.get('Content-Length', '')
        if self.path.partition('?mode=')[0] != PATH:
            self._refuse(404, f'only POST {PATH} is here')
        elif not re.fullmatch('[0-9]{1,18}', length):
            self._refuse(411, 'Content-Length is missing or malformed')
        elif int(length) > MAX_REQUEST_BYTES:
            self._refuse(413, f'the request is larger than {MAX_REQUEST_BYTES} bytes')
        else:
            self._completion(self.rfile.read(int(length)))

    def _completion(self, raw_body: bytes) -> None:
        try:
            body = json.loads(raw_body)
        except (ValueError, RecursionError):
            self._refuse(400, 'the request is not JSON')
            return
        model = body.get('model') if isinstance(body, dict) else None
        if not isinstance(model, str) or body.get('stream') is not True:
            self._refuse(400, 'the request must be an object with stream true and a model')
            return
        name = self.path.partition('?mode=')[2] or (model[5:] if model.startswith('mode:') else self.server.mode)
        number, rng = self.server.draw()
        if name == RANDOM:
            name = rng.choice(list(MODES))
            _say(f'request {number}: mode {name}')
        if name not in MODES and not (name == REPLAY and self.server.replayed):
            self._refuse(404, f'there is no mode {name[:80]!a}')
            return
        given = re.sub('[^A-Za-z0-9._-]', '', self.headers.get('X-Request-Id', ''))[:128]
        key = re.sub('[^!-~]', '', self.headers.get('Authorization', '').removeprefix('Bearer '))[:200] or 'no-key-given'
        request = Request(given.encode() or b'fixture', json.dumps(model)[1:-1].encode(), key, self.server.again(name))
        self.close_connection = True
        with contextlib.suppress(OSError):
            if name == REPLAY and self.server.replayed:
                self._answer(self.server.replayed(request), False, rng)
            else:
                self._answer(MODES[name].steps(request), MODES[name].group == 'size', rng)

    def _answer(self, steps: Iterable[Step], large: bool, rng: random.Random) -> None:
        connection = self.connection
        for step in steps:
            if isinstance(step, bytes):
                for piece in self._cut(step, 4096 if large or len(step) > 4096 else 1, rng):
                    connection.sendall(piece)
            elif isinstance(step, float):
                time.sleep(self.server.delay if step == PAUSE else step)
            elif step == RESET:
                time.sleep(0.05)  # let what was sent arrive: a reset may overtake it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
                self.rfile.close()  # it holds the socket too, and socketserver would send a FIN first
                connection.close()
                return
            else:
                self._wait(HOLD_S)
                return
        self._part()

    def _cut(self, data: bytes, least: int, rng: random.Random) -> Iterator[bytes]:
        """One write as several: of ``fragment`` bytes, or of random lengths; large ones no finer than ``least`` bytes."""
        fragment, at = self.server.fragment, 0
        while at < len(data):
            size = len(data) if fragment is None else rng.randint(1, 40) if fragment == 'random' else int(fragment)
            size = max(size, least)
            yield data[at : at + size]
            at += size

    def _part(self) -> None:
        """End our side in good order and let the client close, so that no unread byte turns our close into a reset."""
        self.connection.settimeout(2.0)
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.unwrap()  # sends close_notify and waits for the client's, or for its close
        else:
            self.connection.shutdown(socket.SHUT_WR)
            self._wait(2.0)

    def _wait(self, seconds: float) -> None:
        """Until the client closes."""
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
            self._part()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """http.server's own refusals (bad request line, unknown method) as JSON."""
        with contextlib.suppress(OSError):
            if not hasattr(self, 'request_version') or self.request_version == 'HTTP/0.9':
                self.request_version = 'HTTP/1.1'
            self._refuse(code, message or self.responses.get(code, ('error', ''))[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the client's record is the log."""


def server(port: int = 18080, mode: str = 'ok', delay: float = 0.05, *, fragment: int | str | None = None, seed: int = 0,
           certificate: str | None = None, key: str | None = None, replay: str | None = None) -> FixtureServer:
    """A fixture bound to 127.0.0.1 (``.server_port``, ``.mode``, ``.delay``); call ``serve_forever`` to run it.

    ``port`` 0 picks a free one; ``delay`` is the pause around text, in seconds; ``fragment`` cuts every write into pieces of
    so many bytes, or ``random`` lengths drawn with ``seed``; ``certificate`` and ``key`` (PEM files) make it HTTPS.
    The mode ``random`` answers each request with one drawn with ``seed`` and logs which; ``replay`` names a capture or a plain
    body file that every request is answered with, unless its model names a mode.
    Raises ValueError for an unknown mode or a value out of range, OSError when the port is taken or a file cannot be read.
    """
    if mode not in MODES and mode != RANDOM:
        raise ValueError(f'there is no mode {mode!r}')
    if not 0 <= port <= 65535:
        raise ValueError('the port must be from 0 to 65535')
    if not 0 <= delay <= HOLD_S:
        raise ValueError(f'the delay must be from 0 to {HOLD_S:g} seconds')
    if fragment is not None and fragment != 'random' and not (isinstance(fragment, int) and fragment > 0):
        raise ValueError('fragment must be a number of bytes, or random')
    tls = None
    if key is not None and certificate is None:
        raise ValueError('a key needs its certificate')
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, key)
    steps = None if replay is None else replayed(replay)
    made = FixtureServer(port, mode if steps is None else REPLAY, delay, fragment, seed, tls)
    made.replayed = steps
    return made


def replayed(path: str) -> Callable[[Request], Iterable[Step]]:
    """The recorded answer in a file: a capture of the client, with its timing, or plain body bytes (``curl -sN > FILE``).

    A capture is JSON lines: first the head (``capture``, ``headers``, and ``status``, null where none came), then a line a read
    (``ms`` since the head, and ``text``, or ``base64`` where it is not UTF-8), last how it ended (``end``, ``outcome``). What it
    has of an answer that is no event stream (``excerpt``) is served as if it were the whole.
    Raises OSError, or ValueError for a capture that is malformed.
    """
    with open(path, 'rb') as file:
        data = file.read()
    if not data.startswith(b'{"capture":'):
        return lambda _: (head(*EVENT_STREAM, CHUNKED), *([framed(data)] if data else []), LAST)
    try:
        whole, _, _cut = data.rpartition(b'\n')  # a killed writer's last line may be cut
        first, *lines = [dict(json.loads(line)) for line in whole.split(b'\n')]
        fields = [f'{k}: {v}' for k, v in first['headers'].items() if k not in ('transfer-encoding', 'content-length', 'connection')]
        status = None if first['status'] is None else int(first['status'])
        if first['capture'] != 1 or not (status is None or 100 <= status <= 999) or any(re.search('[\r\n\0]', field) for field in fields):
            raise ValueError
        reads = [(float(line['ms']), line['text'].encode() if 'text' in line else base64.b64decode(line['base64'], validate=True))
                 for line in lines if 'end' not in line and line.get('text') != '']
        last = lines[-1] if lines and 'end' in lines[-1] else {'end': None}
        if any(line.get('excerpt') for line in lines):
            last = {'end': 'closed'}
        start = b'' if status is None else head(*fields, CHUNKED, status=f'{status} Replayed')
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError(f'{path} is a malformed capture') from None

    def run(_request: Request) -> Iterator[Step]:
        yield start
        at = 0.0
        for ms, read in reads:
            yield max(0.0, min(ms - at, HOLD_S * 1000) / 1000)
            at = ms
            yield framed(read)
        if last['end'] in ('last_chunk', 'length', 'closed'):
            yield LAST
        elif last.get('outcome') == 'connection_reset':
            yield RESET
        elif last['end'] == 'open' or last.get('outcome') in ('idle_timeout', 'deadline', 'first_text_timeout', 'stall_timeout'):
            yield HOLD

    return run


# --- judging any client ---------------------------------------------------------------------------------------------------


class Judged(NamedTuple):
    """What a client made of one mode: ``verdict`` is agrees, false success, false failure or hang; ``seconds`` it took."""

    mode: str
    expect: str
    verdict: str
    seconds: float


def judge(ask: Callable[[str, str, str], bool | None], *, jobs: int = 2, modes: Sequence[str] = (), fragment: int | str | None = None,
          seed: int = 0, certificate: str | None = None, key: str | None = None, told: Callable[[Judged], object] = lambda _: None,
          ) -> list[Judged]:
    """Hold a client against the catalogue.

    ``ask(url, model, mode)`` is called once per mode, in ``jobs`` threads, and returns whether the client took the answer for
    complete, None if it did not come to an end in time (a hang). ``told`` is called with each result as it comes.
    """
    lock = threading.Lock()

    def one(name: str) -> Judged:
        start = time.monotonic()
        took = ask(url, f'mode:{name}', name)
        passes = MODES[name].expect == 'passed'
        verdict = 'hang' if took is None else 'agrees' if took == passes else 'false failure' if passes else 'false success'
        result = Judged(name, MODES[name].expect, verdict, round(time.monotonic() - start, 2))
        with lock:
            told(result)
        return result

    names = list(dict.fromkeys(modes or MODES))
    fixture = server(0, 'ok', 0.02, fragment=fragment, seed=seed, certificate=certificate, key=key)
    url = f'http{"s" if certificate else ""}://127.0.0.1:{fixture.server_port}{PATH}'
    thread = threading.Thread(target=fixture.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            # Those about time first: they sleep while the others work.
            order = sorted(names, key=lambda n: MODES[n].group != 'time')
            found = {r.mode: r for r in pool.map(one, order)}
    finally:
        fixture.shutdown()
        fixture.server_close()
    return [found[name] for name in names]


class Command:
    """A client that is a command: exit status 0 means that it took the answer for complete; killed after ``limit`` seconds."""

    def __init__(self, words: Sequence[str], limit: float) -> None:
        self.words, self.limit = words, limit
        self.stopped = 0
        self._running: set[subprocess.Popen[bytes]] = set()

    def __call__(self, url: str, model: str, mode: str) -> bool | None:
        """Run it against one mode."""
        if self.stopped:
            return None
        filled = [w.replace('{url}', url).replace('{model}', model).replace('{mode}', mode) for w in self.words]
        process = subprocess.Popen(filled, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True, env={**os.environ, 'MODEL_API_KEY': 'fixture-key-0123456789'})
        self._running.add(process)
        try:
            return process.wait(self.limit) == 0
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._kill(process)
            process.wait()
            self._running.discard(process)

    def stop(self, number: int, _frame: object = None) -> None:
        """End what runs and start nothing more: the handler of a signal."""
        self.stopped = number
        for process in list(self._running):
            self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it started


def mode_rows() -> list[dict[str, str]]:
    """The catalogue as a list of objects: ``mode``, ``group``, ``sends``, ``expect`` and ``source``."""
    return [{'mode': name, 'group': m.group, 'sends': m.sends, 'expect': m.expect, 'source': m.source}
            for name, m in MODES.items()]


def _fragment(text: str) -> int | str:
    if text != 'random' and not re.fullmatch('[1-9][0-9]{0,8}', text):
        raise argparse.ArgumentTypeError('must be a number of bytes, or random')
    return text if text == 'random' else int(text)


def _say(text: str, fd: int = 2) -> OSError | None:
    """Write a line to stderr, or to the descriptor given; what prevents that."""
    left = memoryview((text + '\n').encode(errors='replace'))
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError as exc:
        return exc
    return None


def _printed(text: str) -> int:
    """Write a line to stdout: the exit status, 2 where it cannot be written; a reader that has read enough is none of that."""
    wrong = _say(text, 1)
    if wrong is None or isinstance(wrong, BrokenPipeError):
        return 0
    _say(f'fixture_server.py: stdout cannot be written: {wrong.strerror}')
    return 2


def _listed_modes(as_json: bool) -> str:
    if as_json:
        return json.dumps(mode_rows(), indent=1)
    return '\n'.join(f'{row["mode"]:24} {row["expect"]:20} {row["sends"]} [{row["source"]}]' for row in mode_rows())


def _judge_command(args: argparse.Namespace, words: Sequence[str]) -> int:
    """``--judge``: a line a mode and the counts on stdout, progress on stderr; 0 only when all agree, 2 for bad arguments."""
    modes = [] if args.modes is None else list(dict.fromkeys(args.modes.split(',')))
    unknown = [m for m in modes if m not in MODES]
    refusal = ''
    if not words or shutil.which(words[0]) is None:
        refusal = 'behind -- there must be a command that can be run'
    elif unknown:
        refusal = f'unknown mode {unknown[0][:80]!a}'
    elif not 1 <= args.jobs <= 64 or not 0 < args.limit <= HOLD_S:
        refusal = f'--jobs is from 1 to 64, --limit above 0 and at most {HOLD_S:g}'
    if refusal:
        _say(f'fixture_server.py: --judge: {refusal}')
        return 2
    done, total, client = itertools.count(1), len(modes or MODES), Command(words, args.limit)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, client.stop)

    def told(result: Judged) -> None:
        _say(f'{next(done)}/{total} {result.mode}: {result.verdict}')

    try:
        results = judge(client, jobs=args.jobs, modes=modes, fragment=args.fragment, seed=args.seed,
                        certificate=args.certificate, key=args.key, told=told)
    except (ValueError, OSError) as exc:
        _say(f'fixture_server.py: --judge: {getattr(exc, "strerror", None) or exc}')
        return 2
    if client.stopped:
        _say(f'fixture_server.py: --judge: ended by {signal.Signals(client.stopped).name}')
        return 128 + client.stopped
    counts = {v: sum(r.verdict == v for r in results) for v in ('agrees', 'false success', 'false failure', 'hang')}
    if args.json:
        said = json.dumps({'command': list(words), 'counts': counts, 'modes': [r._asdict() for r in results]}, indent=1)
    else:
        said = '\n'.join([*(f'{r.verdict:14} {r.mode:26} expected {r.expect}' for r in results),
                          f'{total} modes: ' + ', '.join(f'{n} {v}' for v, n in counts.items())])
    return _printed(said) or (0 if counts['agrees'] == total else 1)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit status 0, or 2 for arguments it refuses or a port that is taken."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # where one of the three was closed, no socket may come to stand
        pass
    os.close(fd)
    parser = argparse.ArgumentParser(prog='fixture_server.py', allow_abbrev=False, description=__doc__.split('\n')[0])
    parser.add_argument('--port', type=int, default=18080, help='0 picks a free one (default 18080)')
    parser.add_argument('--mode', default='ok', help='default ok; random draws one for each request; a request '
                        'may name its own with the model mode:NAME')
    parser.add_argument('--delay', type=float, default=0.05, metavar='S', help='pause around text (default 0.05)')
    parser.add_argument('--fragment', type=_fragment, metavar='N|random', help='cut every write into pieces of so many bytes')
    parser.add_argument('--seed', type=int, default=0, metavar='N', help='for what is random')
    parser.add_argument('--certificate', metavar='FILE', help='PEM; makes it HTTPS')
    parser.add_argument('--key', metavar='FILE', help="PEM; the certificate's key, where it is in another file")
    parser.add_argument('--list-modes', action='store_true', help='what each mode sends and what must be concluded')
    parser.add_argument('--json', action='store_true', help='with --list-modes: a JSON array')
    parser.add_argument('--replay', metavar='FILE', help="answer with a recorded body: the client's --capture, or plain bytes")
    parser.add_argument('--judge', action='store_true', help='run the command behind -- once per mode, with {url}, {model} and {mode} '
                        'replaced; exit status 0 means that it took the answer for complete')
    parser.add_argument('--jobs', type=int, default=4, metavar='N', help='with --judge: how many at once (default 4)')
    parser.add_argument('--limit', type=float, default=20.0, metavar='S', help='with --judge: for one mode (default 20)')
    parser.add_argument('--modes', metavar='NAME[,...]', help='with --judge: only these')
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index('--') if '--' in words else len(words)
    args = parser.parse_args(words[:at])
    if args.list_modes:
        return _printed(_listed_modes(args.json))
    if args.judge or words[at + 1 :]:
        return _judge_command(args, words[at + 1 :])
    try:
        fixture = server(args.port, args.mode, args.delay, fragment=args.fragment, seed=args.seed, certificate=args.certificate,
                         key=args.key, replay=args.replay)
    except (ValueError, OSError) as exc:
        what = f'port {args.port} or a file cannot be used: {exc.strerror}' if isinstance(exc, OSError) else exc
        _say(f'fixture_server.py: {what}')
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: threading.Thread(target=fixture.shutdown).start())
    with fixture:
        url = f'http{"s" if args.certificate else ""}://127.0.0.1:{fixture.server_port}'
        status = _printed(f'fixture in mode {fixture.mode} on {url}')
        if not status:
            fixture.serve_forever(0.05)
    return status


if __name__ == '__main__':
    sys.exit(main())
