#!/usr/bin/env python3
"""Reads evidence records of stream_client.py and tells what they say together: tables, a comparison, a page, reports for CI.

    records -> validated against SCHEMA -> kept apart by origin (real, unknown, synthetic) and label -> one or more outputs

A record is only read, never written. What is no record, half a record, or one of a later schema is named on stderr and skipped.
Times are milliseconds. Exit status: 0 reported, 2 refused (arguments, files, nothing to report, what cannot be compared).
"""

from __future__ import annotations

import argparse
import base64
import codecs
import functools
import hashlib
import html
import io
import itertools
import json
import math
import os
import re
import signal
import stat
import statistics
import sys
import time
import unicodedata
import xml.etree.ElementTree as ET
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__version__ = '0.1.0'
MAX_RECORD_BYTES = 67_108_864  # one record; the longest answer of default limits makes 7 MB
MAX_ANNOTATIONS = 10  # what GitHub shows of one kind and step
MAX_LISTED = 100  # labels, failed runs and skipped files in a job summary, each; GitHub drops one of more than 1 MiB
PROGRESS_S = 2.0  # between two lines of progress on stderr
SUMMARY_VARIABLE = 'GITHUB_STEP_SUMMARY'

# --- the record ---------------------------------------------------------------------------------------------------------

BOUNDARIES = ('resolve', 'connect', 'tunnel', 'tls', 'send', 'head', 'status', 'content', 'framing', 'events', 'json', 'protocol',
              'completion', 'client')  # in the order they are met
NOT_RUN = ('resolve', 'connect', 'tunnel', 'tls', 'send', 'client')  # a failure here says nothing about an answer


def _object(members: Mapping[str, Any], *optional: str, **more: Any) -> dict[str, Any]:
    return {'type': 'object', 'required': [name for name in members if name not in optional], 'properties': dict(members), **more}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, 'type': [schema['type'], 'null']}


_END = r'$(?!\n)'  # the end in ECMAScript's regular expressions, and in Python's too
_TEXT = {'type': 'string'}
_FLAG = {'type': 'boolean'}
_COUNT = {'type': 'integer', 'minimum': 0, 'maximum': 2**63 - 1}
_CLAIMED = {'type': 'integer', 'minimum': 0}  # what a server claims has no bound
_TIME = {'type': 'number', 'minimum': 0, 'maximum': 1e12}  # milliseconds
_SHA256 = {'type': 'string', 'pattern': '^[0-9a-f]{64}' + _END}
_CODE = {'type': 'string', 'pattern': '^[a-z][a-z0-9_]{0,63}' + _END}
_UTC = {'type': 'string', 'pattern': '^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z' + _END}
_TEXTS = {'type': 'object', 'additionalProperties': _TEXT}
_CODES = {'type': 'array', 'items': _TEXT}
_POLICY = _object({'accept_finish': _CODES, 'tolerate': _CODES, 'fail_on': _CODES})
_LIMITS = _object(dict.fromkeys(('max_line_chars', 'max_event_chars', 'max_answer_chars', 'max_stream_bytes'), _COUNT))
_CLOCK = {'type': ['number', 'null'], 'minimum': 0}
_REQUEST = _object({
    'url': _TEXT, 'path_taken': {'enum': ['direct', 'connect-to', 'ssh']}, 'connect_to': _or_null(_TEXT), 'ssh': _or_null(_TEXT),
    'run_id': _TEXT, 'policy': _POLICY, 'messages_sha256': _SHA256, 'messages_bytes': _COUNT, 'limits': _LIMITS,
    'clocks_s': _object(dict.fromkeys(('idle', 'deadline', 'first_text', 'stall'), _CLOCK)), 'sampling': {'type': 'object'}})
_RESPONSE = _object({
    'status': _or_null(_COUNT), 'http_version': _or_null(_TEXT), 'id': _or_null(_TEXT), 'id_carries_run_id': _or_null(_FLAG),
    'model': _or_null(_TEXT), 'system_fingerprint': _or_null(_TEXT), 'headers': _or_null(_TEXTS), 'interim': _or_null(_COUNT),
    'peer': _or_null(_TEXT), 'tls_version': _or_null(_TEXT), 'certificate_sha256': _or_null(_SHA256),
    'certificate_expires': _or_null(_UTC), 'server_error': _or_null(_TEXTS), 'body_excerpt': _or_null(_TEXT)})
_DELIVERY = _object({
    **dict.fromkeys(('bytes', 'events', 'comments', 'unknown_fields', 'reasoning_events', 'reasoning_chars'), _COUNT),
    'reads': _or_null(_COUNT), 'content_reads': _or_null(_COUNT),
    'longest_gap_ms': _or_null(_TIME), 'body_end': {'enum': ['last_chunk', 'length', 'closed', 'open', None]},
    'body_sha256': _SHA256, 'buffered': _or_null(_FLAG)})
SCHEMA: dict[str, Any] = {
    '$schema': 'https://json-schema.org/draft/2020-12/schema',
    'title': 'evidence record of stream-client',
    'description': 'schema_version 1. Keys are added, never removed or given another meaning: a reader ignores those it does not know. '
                   'A change that this rule does not allow raises schema_version.',
    **_object({
        'ok': _FLAG, 'outcome': _CODE, 'model': _or_null(_TEXT), 'text': _TEXT, 'first_text_ms': _or_null(_TIME),
        'duration_ms': _or_null(_TIME), 'content_events': _COUNT, 'event_gaps_ms': {'type': 'array', 'items': _TIME},
        'finish_reason': _or_null(_TEXT), 'done': _FLAG, 'completion_tokens': _or_null(_CLAIMED), 'error': _or_null(_TEXT),
        'schema_version': {'const': 1},
        'failure': _or_null(_object({'code': _CODE, 'boundary': _CODE, 'message': _TEXT, 'hint': _TEXT, 'event': _or_null(_COUNT)})),
        'warnings': {'type': 'array', 'items': _object({'code': _CODE, 'count': _COUNT, 'message': _TEXT})},
        'request': {'if': {'type': 'object', 'required': ['url']}, 'then': _REQUEST,
                    'else': {'type': 'object', 'additionalProperties': {'enum': []}}},  # empty: judged offline
        'response': _RESPONSE,
        'marks_ms': _object(dict.fromkeys((
            'resolved', 'connected', 'secured', 'sent', 'head', 'first_byte', 'first_event', 'first_reasoning', 'first_text', 'last_text',
            'finish', 'done', 'end'), _or_null(_TIME))),
        'delivery': _DELIVERY,
        'usage': _or_null(_object(dict.fromkeys(('completion_tokens', 'prompt_tokens', 'cached_tokens', 'reasoning_tokens'),
                                                _or_null(_CLAIMED)))),
        'client': _object({'version': _TEXT, 'source_sha256': _or_null(_SHA256), 'python': _TEXT, 'platform': _TEXT}),
        'started_at': _or_null(_UTC), 'label': _or_null(_TEXT), 'notes': _TEXTS, 'synthetic': _or_null(_FLAG),
        'input': _or_null(_object({'kind': {'enum': ['capture', 'body']}, 'policy': _POLICY, 'limits': _LIMITS})),
    }, 'input'),  # younger than the rest
    'if': {'properties': {'ok': {'const': True}}},
    'then': {'properties': {'outcome': {'const': 'passed'}, 'failure': {'type': 'null'}, 'error': {'type': 'null'}}},
    'else': {'properties': {'outcome': {'pattern': '^(?!passed$)'}, 'failure': {'type': 'object'}, 'error': {'type': 'string'}}},
}
_TYPES: dict[str, frozenset[type]] = {name: frozenset(types) for name, types in (
    ('string', (str,)), ('boolean', (bool,)), ('integer', (int,)), ('number', (int, float)), ('object', (dict,)), ('array', (list,)),
    ('null', (type(None),)))}


@functools.cache
def _types(*names: str) -> frozenset[type]:
    return frozenset().union(*(_TYPES[name] for name in names))


def invalid(value: Any, schema: Mapping[str, Any]) -> str | None:
    """The first thing in which a value from JSON differs from a schema, as ``path: what``; None if nothing does.

    Knows the keywords that SCHEMA uses, with their meaning in JSON Schema 2020-12 (an integer is written as one here).
    """
    found = _invalid(value, schema)
    return found and found.removeprefix(': ').removeprefix('.')


def _invalid(value: Any, schema: Mapping[str, Any]) -> str | None:
    kinds = schema.get('type')
    if kinds is not None:
        names = (kinds,) if isinstance(kinds, str) else kinds
        if type(value) not in _types(*names):
            return f': {_brief(value)} is no {" or ".join(names)}'
        if len(schema) == 1:  # most are no more than a type
            return None
    if 'const' in schema and not _same(value, schema['const']):
        return f': {_brief(value)} is not {_brief(schema["const"])}'
    if 'enum' in schema and not any(_same(value, one) for one in schema['enum']):
        return f': {_brief(value)} is none of {", ".join(map(_brief, schema["enum"])) or "those allowed"}'
    found = None
    if isinstance(value, str):
        if 'pattern' in schema and not re.search(schema['pattern'], value):
            found = f': {_brief(value)} does not match {schema["pattern"]}'
    elif isinstance(value, dict):
        found = _invalid_members(value, schema)
    elif isinstance(value, list):
        found = _invalid_items(value, schema['items']) if 'items' in schema else None
    elif value is not None and not schema.get('minimum', value) <= value <= schema.get('maximum', value):
        found = f': {_brief(value)} is out of range'
    if not found and 'if' in schema:
        found = _invalid(value, schema['else' if _invalid(value, schema['if']) else 'then'])
    return found


def _invalid_members(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    for name in schema.get('required', ()):
        if name not in value:
            return f': has no {name}'
    known, others = schema.get('properties', {}), schema.get('additionalProperties')
    for name, member in value.items():
        rule = known.get(name, others)
        if rule and (found := _invalid(member, rule)):
            return f'.{name}{found}'
    return None


def _invalid_items(value: Sequence[Any], schema: Mapping[str, Any]) -> str | None:
    for at, item in enumerate(value):
        if found := _invalid(item, schema):
            return f'[{at}]{found}'
    return None


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)  # 1 and true are two things in JSON


def _brief(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, (dict, list)) else f'an {"object" if isinstance(value, dict) else "array"}'
    return text if len(text) <= 60 else text[:57] + '...'


class Run(NamedTuple):
    """A record and where it was read: a file's path, ``PATH:LINE``, or ``standard input:LINE``."""

    source: str
    record: dict[str, Any]


def origin(record: Mapping[str, Any]) -> str:
    """``real``, ``synthetic`` (the fixture answered) or ``unknown`` (a body without its head was judged offline)."""
    return 'unknown' if record['synthetic'] is None else 'synthetic' if record['synthetic'] else 'real'


# --- reading ------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A clear line for the user; exit status 2."""


class Reader:
    """Reads records from files, directories and standard input; ``runs`` are those found, ``skipped`` names all else."""

    def __init__(self, keep_text: bool, progress: Callable[[int, int], None]) -> None:
        self.runs: list[Run] = []
        self.skipped: list[str] = []
        self.files: set[tuple[int, int]] = set()  # (device, inode): none is read twice, and none is written to
        self._keep_text, self._progress = keep_text, progress

    def read(self, path: str) -> None:
        """Read a path as given by the user; ``-`` is standard input. Raises Refused where there is none."""
        if path == '-':
            if sys.stdin is None:
                raise Refused('standard input is closed')
            try:
                self._open('standard input', sys.stdin.buffer)
            except OSError as exc:
                raise Refused(f'standard input cannot be read: {exc.strerror}') from None
        elif os.path.isdir(path):
            self._directory(path)
        elif os.path.exists(path):
            self._file(path)
        else:
            raise Refused(f'{shown(path)}: there is no such file or directory')

    def _directory(self, path: str) -> None:
        found = False
        for directory, folders, names in os.walk(path, onerror=lambda exc: self.skipped.append(f'{exc.filename}: {exc.strerror}')):
            folders.sort()
            self.skipped += [f'{os.path.join(directory, name)}: is a link to a directory' for name in folders
                             if os.path.islink(os.path.join(directory, name))]
            for name in sorted(names):
                if name.endswith(('.json', '.jsonl')):
                    found = True
                    file = os.path.join(directory, name)
                    if os.path.isfile(file):
                        self._file(file)
                    else:  # one that nobody writes to would be waited for
                        self.skipped.append(f'{file}: is no regular file')
        if not found:
            self.skipped.append(f'{path}: holds no .json or .jsonl file')

    def _file(self, path: str) -> None:
        try:
            with open(path, 'rb') as file:
                self._open(path, file)
        except OSError as exc:
            self.skipped.append(f'{path}: {exc.strerror}')

    def _open(self, name: str, file: Any) -> None:
        """Read a record alone, as the client writes it, or records one a line; which, its first line tells."""
        there = os.fstat(file.fileno())
        if stat.S_ISREG(there.st_mode):
            if _identity(there) in self.files:
                return
            self.files.add(_identity(there))
        lines = _lines(file)
        first = next(lines, b'')
        captured = first.startswith(b'{"capture":')
        if captured or first.rstrip() in (b'{', b'['):
            rest = file.read(MAX_RECORD_BYTES) + file.readline(MAX_RECORD_BYTES)  # to the end of a line
            if re.search(rb'^(?:\xef\xbb\xbf)?{.*"schema_version":', rest, re.MULTILINE):  # records, one a line, behind what is none
                self._take_lines(name, itertools.chain(_lines(io.BytesIO(first + rest)), lines))
            elif captured:
                self.skipped.append(f'{name}: is no record but a capture, which stream_client.py --input judges')
            else:
                self._take(name, first + rest)
        else:
            second = next(lines, b'')
            if second:
                self._take_lines(name, itertools.chain((first, second), lines))
            else:
                self._take(name, first)

    def _take_lines(self, name: str, lines: Iterable[bytes]) -> None:
        for number, line in enumerate(lines, 1):
            if line.strip() or len(line) > MAX_RECORD_BYTES:
                self._take(f'{name}:{number}', line)

    def _take(self, source: str, data: bytes) -> None:
        try:
            if len(data) > MAX_RECORD_BYTES:
                raise ValueError(f'longer than {MAX_RECORD_BYTES} bytes')
            record = json.loads(data.decode(), parse_constant=_no_constant)
            wrong = _not_read(record)
            if wrong:
                raise ValueError(wrong)
        except UnicodeDecodeError:
            self.skipped.append(f'{source}: is no record: not UTF-8')
        except RecursionError:
            self.skipped.append(f'{source}: is no record: nested too deeply')
        except ValueError as exc:  # not JSON, or JSON of another shape
            self.skipped.append(f'{source}: is no record: {exc}')
        else:
            if not self._keep_text:
                record['text'] = ''
            self.runs.append(Run(source, record))
        self._progress(len(self.runs), len(self.skipped))


def _not_read(record: Any) -> str | None:
    """Why this is no record that can be told of, or None."""
    version = record.get('schema_version') if isinstance(record, dict) else None
    if type(version) is int and version > 1:
        return f'schema_version {version} is later than 1, which this program knows'
    wrong = invalid(record, SCHEMA)
    if wrong or not record['failure']:
        return wrong
    for name, of in (('outcome', 'code'), ('error', 'message')):
        if record[name] != record['failure'][of]:
            return f'{name} and failure.{of} differ'
    return None


def _lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(MAX_RECORD_BYTES + 1):
        yield line.removeprefix(codecs.BOM_UTF8)
        while len(line) > MAX_RECORD_BYTES and not line.endswith(b'\n'):  # the rest of it is no line
            line = file.readline(MAX_RECORD_BYTES + 1)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not JSON')


# --- figures ------------------------------------------------------------------------------------------------------------


def wilson(passed: int, runs: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927): (low, high), each from 0 to 1. ``runs`` is at least 1."""
    z = statistics.NormalDist().inv_cdf(0.975)
    share = passed / runs
    middle = share + z * z / (2 * runs)
    half = z * math.sqrt(share * (1 - share) / runs + z * z / (4 * runs * runs))
    below = 1 + z * z / runs
    return (middle - half) / below if passed else 0.0, (middle + half) / below if passed < runs else 1.0


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the share ``q`` of the values does not exceed (nearest rank); None of no values."""
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1] if values else None


def spread(values: Iterable[float | None]) -> dict[str, Any]:
    """How many values there are, their median and 95th percentile; None are not counted."""
    known = [value for value in values if value is not None]
    return {'n': len(known), 'median': statistics.median(known) if known else None, 'p95': quantile(known, 0.95)}


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """What runs of one origin, one at least, say together: counts, the share that passed, times of those, and failures in the
    order of boundaries.
    """
    records = [run.record for run in runs]
    passed = [record for record in records if record['ok']]
    low, high = wilson(len(passed), len(records))
    failures = Counter((r['failure']['boundary'], r['failure']['code']) for r in records if r['failure'])
    return {
        'runs': len(records), 'passed': len(passed), 'share': len(passed) / len(records),
        'share_low': low, 'share_high': high,
        'head_ms': spread(record['marks_ms']['head'] for record in passed),
        'first_text_ms': spread(record['first_text_ms'] for record in passed),
        'duration_ms': spread(record['duration_ms'] for record in passed),
        'buffered': sum(record['delivery']['buffered'] is True for record in records),
        'failures': [{'boundary': boundary, 'code': code, 'runs': count} for (boundary, code), count in sorted(
            failures.items(), key=lambda item: (_order(item[0][0]), -item[1], item[0][1]))],
    }


def _order(boundary: str) -> int:
    return BOUNDARIES.index(boundary) if boundary in BOUNDARIES else len(BOUNDARIES)


class Part(NamedTuple):
    """The runs of one origin, in the order of their start, and by label (None last)."""

    origin: str
    runs: list[Run]
    labels: dict[str | None, list[Run]]


def parts(runs: Iterable[Run]) -> list[Part]:
    """Runs kept apart by origin, so that no number mixes synthetic and real ones; origins without a run are left out."""
    made = []
    everything = list(runs)
    for name in ORIGINS:
        own = [run for run in everything if origin(run.record) == name]
        own.sort(key=lambda run: run.record['started_at'] or '')  # those of one second as they were read
        labels: dict[str | None, list[Run]] = {}
        for run in own:
            labels.setdefault(run.record['label'], []).append(run)
        if own:
            made.append(Part(name, own, dict(sorted(labels.items(), key=lambda item: (item[0] is None, item[0] or '')))))
    return made


ORIGINS = {
    'real': ('Real runs', 'Nothing said that the fixture answered.'),
    'unknown': ('Runs of unknown origin', 'Judged from a body that was kept; nothing tells what server it came from.'),
    'synthetic': ('Synthetic runs', 'Answered by the fixture: they say how the checker judges, and nothing about any server.'),
}


# --- text ---------------------------------------------------------------------------------------------------------------

# Controls, format characters, surrogates and what XML does not allow: what shows nothing, steers, or makes something look different
_HIDDEN = re.compile('[\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f'
                     '\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff'
                     '\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]')
_COMMAND = re.compile(r'(?<![^\n])(\s*)::')
_HIDDEN_BUT_LINES = re.compile(_HIDDEN.pattern.replace('\x00-\x1f', '\x00-\x08\x0b-\x1f'))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return rf'\x{code:02x}' if code < 0x100 else rf'\u{code:04x}' if code < 0x10000 else rf'\U{code:08x}'


def shown(text: str, hidden: re.Pattern[str] = _HIDDEN) -> str:
    """Text from a record or a file name, on one line, with everything that steers or hides written as an escape.

    So is what GitHub's runner takes for a command: ``##[`` wherever it stands in a line of a log, ``::`` at its start.
    """
    return _COMMAND.sub(r'\1\\x3a:', hidden.sub(_escape, text)).replace('##[', '#\\x23[')


def width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.category(c) in ('Mn', 'Me') or '\u1160' <= c <= '\u11ff'  # marks; vowels and finals of Hangul
               else 2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in text)


def fitted(text: str, columns: int) -> str:
    """The text, cut with an ellipsis where it takes more columns than these."""
    cut = text[: 4 * columns]  # marks that take no column are that many at most
    if cut == text and width(text) <= columns:
        return text
    while width(cut) >= columns:
        cut = cut[:-1]
    return cut + '…'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: columns as wide as they need, those whose head starts with a space set to the right."""
    widths = [max([width(head), *(width(row[at]) for row in rows)]) for at, head in enumerate(heads)]
    for row in (heads, *rows):
        cells = []
        for cell, head, columns in zip(row, heads, widths, strict=True):
            gap = ' ' * (columns - width(cell))
            cells.append(gap + cell if head.startswith(' ') else cell + gap)
        yield '  '.join(cells).rstrip()


def ms(value: float | None) -> str:
    """Milliseconds for a person: a decimal below 1,000, none above."""
    return '-' if value is None else f'{value:.1f}' if value < 1000 else f'{value:.0f}'


def percent(part: float) -> str:
    """A share in per cent with one decimal; all and none only where it is all or none."""
    said = f'{part:.1%}'
    return '>99.9%' if said == '100.0%' and part < 1 else '<0.1%' if said == '0.0%' and part > 0 else said


def share(found: Mapping[str, Any]) -> str:
    """The share that passed with its interval, in per cent."""
    return f'{percent(found["share"])} [{percent(found["share_low"])}, {percent(found["share_high"])}]'


def named(label: str | None) -> str:
    """A label as shown, in quotes where it reads as one of our own words."""
    return '(no label)' if label is None else f'"{label}"' if label.strip('"') in ('(no label)', 'all labels') else shown(label)


def verdict(record: Mapping[str, Any]) -> str:
    """``passed``, or the boundary and the code."""
    return 'passed' if record['ok'] else f'{record["failure"]["boundary"]}: {record["outcome"]}'


LABEL_HEADS = ('label', ' runs', ' passed', ' share [95 %]', ' headers', ' p95', ' first text', ' p95', ' duration', ' p95')
FAILURE_HEADS = ('label', 'boundary', 'code', ' runs')
READING = 'Times in ms: median and 95th percentile (nearest rank) of the runs that passed. Share: 95 % Wilson interval.'


def figure_rows(part: Part) -> list[tuple[str, dict[str, Any]]]:
    """The figures of each label, and those of all of them where there are several."""
    rows = [(named(label), figures(runs)) for label, runs in part.labels.items()]
    return [*rows, ('all labels', figures(part.runs))] if len(rows) > 1 else rows


def _cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    times = [ms(found[key][which]) for key in ('head_ms', 'first_text_ms', 'duration_ms') for which in ('median', 'p95')]
    return str(found['runs']), str(found['passed']), share(found), *times


def text_report(runs: Sequence[Run]) -> Iterator[str]:
    """Lines for a terminal: for each origin a line a run, then a line a label, then its failures."""
    for part in parts(runs):
        yield f'{ORIGINS[part.origin][0]}: {len(part.runs)}'
        yield ''
        yield from table(('started', 'label', 'model', 'verdict', ' headers', ' first text', ' duration', ' events', 'record'), [
            (r['started_at'] or '-', fitted(named(r['label']), 24), fitted(shown(r['model'] or '-'), 24), verdict(r),
             ms(r['marks_ms']['head']), ms(r['first_text_ms']), ms(r['duration_ms']), str(r['content_events']), shown(source))
            for source, r in part.runs])
        yield ''
        found = figure_rows(part)
        yield from table(LABEL_HEADS, [(fitted(name, 40), *_cells(row)) for name, row in found])
        yield ''
        failures = [(fitted(name, 40), f['boundary'], f['code'], str(f['runs'])) for name, row in found for f in row['failures']]
        if failures:
            yield from table(FAILURE_HEADS, failures)
            yield ''
    yield READING


def json_report(runs: Sequence[Run], skipped: Sequence[str]) -> dict[str, Any]:
    """The same for programs."""
    kept = ('started_at', 'label', 'model', 'outcome', 'first_text_ms', 'duration_ms', 'content_events')
    return {'report_version': 1, 'origins': {part.origin: {
        'total': figures(part.runs),
        'labels': [{'label': label, **figures(own)} for label, own in part.labels.items()],
        'runs': [{'source': source, **{name: r[name] for name in kept}, 'boundary': r['failure'] and r['failure']['boundary'],
                  'head_ms': r['marks_ms']['head'], 'run_id': r['request'].get('run_id')} for source, r in part.runs],
    } for part in parts(runs)}, 'skipped': list(skipped)}


# --- comparison ---------------------------------------------------------------------------------------------------------

# What has to be the same in all runs of both labels, or their figures say nothing about what differs
COMPARED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    'origin': origin, 'messages': lambda r: r['request']['messages_sha256'], 'model': lambda r: r['model'],
    'sampling': lambda r: r['request']['sampling'], 'limits': lambda r: r['request']['limits'],
    'clocks': lambda r: r['request']['clocks_s'],
    'policy': lambda r: {name: sorted(said) if name in _POLICY['properties'] else said for name, said in r['request']['policy'].items()},
}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # 1, "1" and true are three things


def _comparable(labels: Sequence[str], runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    sides = [[run for run in runs if run.record['label'] == label] for label in labels]
    for label, side in zip(labels, sides, strict=True):
        if not side:
            have = ', '.join(sorted({shown(run.record['label']) for run in runs if run.record['label'] is not None})) or 'none'
            raise Refused(f'--compare: no record has the label {shown(label)}; there are: {have}')
        offline = next((run for run in side if not run.record['request']), None)
        if offline:
            raise Refused(f'--compare: {shown(offline.source)} was judged offline, so what was asked is not known')
    first = sides[0][0]
    for name, of in COMPARED.items():
        asked = of(first.record)
        other = next((run for side in sides for run in side if _text(of(run.record)) != _text(asked)), None)
        if other:
            values = [asked, of(other.record)]
            member, texts = '', [_text(value) for value in values]
            if isinstance(asked, dict):
                one, two = ({k: _text(v) for k, v in value.items()} for value in values)
                member = next(k for k in {**one, **two} if one.get(k) != two.get(k))
                texts = [one.get(member, 'absent'), two.get(member, 'absent')]
            told = [shown(fitted(text, 120)) for text in texts]
            where = shown(f', in {member}') if member else ''
            raise Refused(f'--compare: {name} differ{where}: {told[0]} in {shown(first.source)}, {told[1]} in {shown(other.source)}')
    return sides[0], sides[1]


def compare(labels: Sequence[str], runs: Sequence[Run]) -> dict[str, Any]:
    """Two labels side by side. Raises Refused where they cannot be compared."""
    if labels[0] == labels[1]:
        raise Refused('--compare: needs two labels')
    sides = _comparable(labels, runs)
    a, b = ({**figures(side), 'longest_gap_ms': spread(run.record['delivery']['longest_gap_ms'] for run in side if run.record['ok']),
             'events_per_read': spread(r['content_events'] / r['delivery']['content_reads'] for _, r in side
                                       if r['ok'] and r['delivery']['content_reads'])} for side in sides)
    apart = a['share_low'] > b['share_high'] or b['share_low'] > a['share_high']
    return {'origin': origin(sides[0][0].record), 'a': {'label': labels[0], **a}, 'b': {'label': labels[1], **b}, 'shares_apart': apart}


def compare_report(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a terminal."""
    a, b = found['a'], found['b']
    rows = [('runs', str(a['runs']), str(b['runs']), ''),
            ('passed', share(a), share(b), 'intervals are apart' if found['shares_apart'] else 'intervals overlap')]
    for key, name in (('head_ms', 'time to headers'), ('first_text_ms', 'time to first text'), ('duration_ms', 'duration'),
                      ('longest_gap_ms', 'longest gap between reads'), ('events_per_read', 'content events a read')):
        for which in ('median', 'p95'):
            one, other = a[key][which], b[key][which]
            ratio = '-' if not one or other is None else f'x{other / one:.3g}'
            rows.append((f'{name}, {which}', ms(one), ms(other), ratio))
    rows.append(('buffered on the way', str(a['buffered']), str(b['buffered']), ''))
    yield ORIGINS[found['origin']][0]
    yield ''
    yield from table(('', f' {fitted(named(a["label"]), 32)}', f' {fitted(named(b["label"]), 32)}', ' second to first'), rows)
    yield ''
    failures = [(fitted(named(side['label']), 32), f['boundary'], f['code'], str(f['runs'])) for side in (a, b) for f in side['failures']]
    if failures:
        yield from table(FAILURE_HEADS, failures)
        yield ''
    yield f'{READING} Intervals that overlap show no difference.'


# --- for CI -------------------------------------------------------------------------------------------------------------


def junit(runs: Sequence[Run], skipped: Sequence[str]) -> Iterator[str]:
    """Pieces of JUnit XML: a suite an origin and label, a case a run.

    A failure is a verdict on an answer, an error a run that came to none (NOT_RUN); what was no record stands as skipped.
    """
    root = ET.Element('testsuites', name='stream-client')
    for part in parts(runs):
        for label, own in part.labels.items():
            cases = [_case(f'{part.origin}.{named(label)}', run) for run in own]
            _suite(root, f'{part.origin}: {named(label)}', cases)
    if skipped:
        cases = []
        for line in skipped:
            case = ET.Element('testcase', classname='no record', name=shown(line), time='0')
            ET.SubElement(case, 'skipped', message=shown(line))
            cases.append(case)
        _suite(root, 'no records', cases)
    ET.indent(root)
    yield '<?xml version="1.0" encoding="utf-8"?>\n'
    yield f'{ET.tostring(root, encoding="unicode")}\n'


def _suite(root: ET.Element, name: str, cases: Sequence[ET.Element]) -> None:
    def count(kind: str) -> str:
        return str(sum(case.find(kind) is not None for case in cases))

    took = sum(float(case.get('time', 0)) for case in cases)
    suite = ET.SubElement(root, 'testsuite', name=name, tests=str(len(cases)), failures=count('failure'), errors=count('error'),
                          skipped=count('skipped'), time=f'{took:.3f}')
    suite.extend(cases)


def _case(classname: str, run: Run) -> ET.Element:
    record = run.record
    case = ET.Element('testcase', classname=classname, name=shown(run.source), time=f'{(record["duration_ms"] or 0) / 1000:.3f}')
    properties = ET.SubElement(case, 'properties')
    for name, value in (('run_id', record['request'].get('run_id')), ('url', record['request'].get('url')), ('model', record['model']),
                        ('started_at', record['started_at'])):
        if value is not None:
            ET.SubElement(properties, 'property', name=name, value=shown(value))
    failure = record['failure']
    if failure:
        kind = 'error' if failure['boundary'] in NOT_RUN else 'failure'
        ET.SubElement(case, kind, type=failure['code'], message=shown(f'{verdict(record)}: {failure["message"]}')).text = shown(
            f'hint: {failure["hint"]}')
    return case


def _code(text: str) -> str:
    """Text as a code span of GitHub's Markdown, where nothing is markup, no name is a mention and no address a link."""
    return '`' + (shown(fitted(text, 200)).replace('`', '\\x60').replace('|', '\\x7c') or ' ') + '`'


def _markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield '| ' + ' | '.join(head.strip() for head in heads) + ' |'
    yield '| ' + ' | '.join('---:' if head.startswith(' ') else '---' for head in heads) + ' |'
    for row in rows:
        yield '| ' + ' | '.join(row) + ' |'
    yield ''


def markdown(runs: Sequence[Run], skipped: Sequence[str]) -> Iterator[str]:
    """Lines of a GitHub job summary: for each origin a table of labels, and the runs that failed (at most MAX_LISTED)."""
    for part in parts(runs):
        yield f'### {ORIGINS[part.origin][0]}: {sum(run.record["ok"] for run in part.runs)} of {len(part.runs)} passed'
        yield ''
        found = figure_rows(part)
        listed = found if len(found) <= MAX_LISTED else [*found[: MAX_LISTED - 1], found[-1]]
        yield from _markdown_table(LABEL_HEADS, [(_code(name), *_cells(row)) for name, row in listed])
        if len(listed) < len(found):
            yield from (f'and {len(found) - len(listed)} labels more', '')
        failed = [run for run in part.runs if not run.record['ok']]
        if failed:
            yield from _markdown_table(('record', 'boundary', 'code', 'message'), [
                (_code(source), r['failure']['boundary'], r['outcome'], _code(r['error']))
                for source, r in failed[:MAX_LISTED]])
        if len(failed) > MAX_LISTED:
            yield from (f'and {len(failed) - MAX_LISTED} more', '')
    for line in skipped[:MAX_LISTED]:
        yield f'- skipped: {_code(line)}'
    if len(skipped) > MAX_LISTED:
        yield f'- and {len(skipped) - MAX_LISTED} more'
    if skipped:
        yield ''
    yield READING


def workflow_commands(runs: Sequence[Run], skipped: Sequence[str]) -> Iterator[str]:
    """GitHub workflow commands: an error a failed run, a warning a file that was no record; at most MAX_ANNOTATIONS of each."""
    def command(kind: str, title: str, message: str) -> str:
        def data(text: str) -> str:
            return shown(text).replace('%', '%25')

        return f'::{kind} title={data(title).replace(":", "%3A").replace(",", "%2C")}::{data(message)}'

    failed = [run for part in parts(runs) for run in part.runs if not run.record['ok']]
    for source, record in failed[:MAX_ANNOTATIONS]:
        kind = ' (synthetic)' if origin(record) == 'synthetic' else ''
        yield command('error', f'{verdict(record)}{kind}', f'{source}: {record["error"]}; hint: {record["failure"]["hint"]}')
    for line in skipped[:MAX_ANNOTATIONS]:
        yield command('warning', 'no record', line)


# --- the page -----------------------------------------------------------------------------------------------------------

MAX_DRAWN = 200  # runs of one origin that are shown one by one
MAX_TEXT_CHARS = 20_000  # of an answer
MAX_SAID_CHARS = 1_000  # of any other string
MAX_SKIPPED = 200  # lines about files that were no records
MIN_VALUES = 3  # below that many a distribution shows nothing that the table does not
BINS = 24
LOG_FROM = 20  # a distribution whose ends differ by this factor has a logarithmic axis
DECADES = 4  # of such an axis, at most; what is less than its start is drawn there
TICK_UNITS = 1_000  # a timeline's width in the units in which its ticks are thinned
FAR = 2  # a run this many times longer than nine tenths of its label's runs has a time axis of its own
OWN_AXIS_BELOW = 0.1  # so has one that fills less of the common axis

# What goes on until each mark is reached, in the order of the marks, and the class that draws it: set-up, waiting, text, closing.
PHASES = {
    'resolved': ('resolving', 's'), 'connected': ('connecting', 's o'), 'secured': ('TLS handshake', 's'), 'sent': ('sending', 's o'),
    'head': ('waiting for the head', 'w'), 'first_event': ('to the first event', 'w o'), 'first_text': ('to the first text', 'w'),
    'last_text': ('text', 't'), 'finish': ('to more text or the finish', 'w o'), 'done': ('to [DONE]', 'c'), 'end': ('to the end', 'c'),
}
TOLD = {'resolved': 'resolved', 'connected': 'connected', 'secured': 'TLS done', 'sent': 'sent', 'head': 'head',
        'first_event': 'first event', 'first_reasoning': 'first reasoning', 'first_text': 'first text', 'last_text': 'last text',
        'finish': 'finish', 'done': '[DONE]', 'end': 'end'}
SHAPES = {'first_text': '<path class="v" d="M-5-5H5L0 4z"/>', 'finish': '<path class="v" d="M0-3.5L3.5 0 0 3.5-3.5 0z"/>',
          'done': '<circle class="r" r="5.5"/>', 'failed': '<path class="x" d="M-4.5-4.5L4.5 4.5M4.5-4.5L-4.5 4.5"/>'}

CSS = """
:root { color-scheme: light dark; --bg: #fff; --panel: #f6f7f9; --ink: #1b1f24; --soft: #545b66; --line: #d5d9df; --axis: #7a818c;
  --good: #0b6650; --bad: #b3261e; --link: #1f4fa3; --setup: #4a5f92; --setup2: #7b8db8; --wait: #a85a08; --wait2: #c27209;
  --text: #0f766e; --close: #6b7280 }
@media screen and (prefers-color-scheme: dark) { :root { --bg: #14171b; --panel: #1c2026; --ink: #e4e7eb; --soft: #a3abb7;
  --line: #353b45; --axis: #7d8694; --good: #58cfa9; --bad: #ff8f86; --link: #8fb5ff; --setup: #93a8dc; --setup2: #6378ad;
  --wait: #f2ae55; --wait2: #bd7d2b; --text: #3fc2b0; --close: #8f98a6 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; -webkit-text-size-adjust: 100% }
header, main, footer { max-width: 68rem; margin: 0 auto; padding: 0 1.25rem }
header { padding-top: 1.5rem } footer { padding-bottom: 3rem; color: var(--soft) }
h1, h2, h3, h4, p, ul, dl, figure { margin: 0 }
h1 { font-size: 1.6rem; line-height: 1.2 } h2 { font-size: 1.3rem } h3 { font-size: 1.05rem } h4 { font-size: 1rem }
main > section { margin-top: 2.5rem; padding-top: 1rem; border-top: 3px solid var(--ink) }
section section { margin-top: 2rem }
a { color: var(--link) } :focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; font-size: .9em }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 2rem; margin-top: .75rem; padding: 0; list-style: none }
.soft, dt, caption, figcaption, .key { color: var(--soft) } .good { color: var(--good) } .bad { color: var(--bad) }
.scroll { overflow-x: auto; margin-top: 1rem }
table { border-collapse: collapse; overflow-wrap: normal } caption { text-align: left; padding-bottom: .25rem }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th:first-child, td:first-child { padding-left: 0 } thead th { font-weight: 600; vertical-align: bottom; border-bottom-color: var(--axis) }
tbody th { font-weight: 400; min-width: 9rem; overflow-wrap: anywhere }
td:last-child:not(.n) { min-width: 15rem } tr.all > * { font-weight: 600; border-bottom: 0 }
td.n { white-space: nowrap } .n { text-align: right }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.25rem 2rem; margin-top: 1.25rem }
figcaption { margin-top: .3rem; font-size: .87rem } h3::first-letter { text-transform: uppercase } figcaption b { color: var(--ink) }
.draw { padding: 0 8px } svg { display: block; overflow: visible; fill: none } svg text { font-size: 12px; fill: var(--soft) }
.key { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin-top: 1rem; padding: 0; list-style: none; font-size: .87rem }
.key svg { display: inline-block; vertical-align: middle; margin-right: .5rem }
.run { margin-top: 1rem; padding: .75rem 1rem .85rem; background: var(--panel); border-left: 4px solid var(--good) }
.run.failed { border-left-color: var(--bad) } .run > * + * { margin-top: .4rem } .run figure { margin-top: .6rem }
.run .bar { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1.5rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .93rem } dd { margin: 0 }
summary { cursor: pointer; width: fit-content; color: var(--link) }
pre { margin: .4rem 0 0; padding: .6rem .75rem; max-height: 24rem; overflow: auto; background: var(--bg); border: 1px solid var(--line);
  white-space: pre-wrap; tab-size: 4 }
.s { fill: var(--setup) } .s.o { fill: var(--setup2) } .w { fill: var(--wait) } .w.o { fill: var(--wait2) } .t, .h { fill: var(--text) }
.c { fill: var(--close) } .v { fill: var(--ink) } .r { stroke: var(--ink); stroke-width: 1.5 } .x { stroke: var(--bad); stroke-width: 2.5 }
.k, .m { stroke: var(--ink); vector-effect: non-scaling-stroke } .m { stroke-width: 1.5 } .d { stroke-dasharray: 4 3 }
.a { stroke: var(--axis) }
svg .f { fill: var(--bad); font-weight: 600 }
@media (max-width: 40rem) { header, main, footer { padding: 0 .75rem } header { padding-top: 1rem } .run { padding: .6rem }
  tbody th { min-width: 6rem } dl { grid-template-columns: 1fr } dd { margin-bottom: .25rem } svg .even { display: none } }
@media print { :root { color-scheme: light } body { font-size: 10pt; print-color-adjust: exact; -webkit-print-color-adjust: exact }
  header, main, footer { max-width: none; padding: 0 } .scroll, pre { overflow: visible; max-height: none }
  figure, tr, .run { break-inside: avoid } h2, h3, .key { break-after: avoid }
  details:not([open]) > summary::after { content: ": hidden" } }
"""


def _e(text: object, limit: int = MAX_SAID_CHARS, hidden: re.Pattern[str] = _HIDDEN) -> str:
    r"""Any string as text of the page: cut to ``limit`` characters, what is hidden as ``\uNNNN``, then escaped for HTML."""
    whole = str(text)
    return html.escape(shown(whole[:limit], hidden)) + (f' … ({len(whole):,} characters in all)' if len(whole) > limit else '')


def _time(value: float | None) -> str:
    """A time in a unit and with digits that suit it; a dash for none."""
    if value is None:
        return '-'
    if value < 10_000:
        return f'{value:,.{3 if 0 < value < 1 else 1 if 0 < value < 100 else 0}f} ms'
    return f'{value / 1000:,.{1 if value < 1e6 else 0}f} s'


def _count(number: int, one: str) -> str:
    return f'{number:,} {one}{"" if number == 1 else "s"}'


def _times(record: dict[str, Any]) -> dict[str, float]:
    """The marks that were reached, in order even where the record's are not."""
    at, times = 0.0, {}
    for name in TOLD:
        if (value := record['marks_ms'].get(name)) is not None:
            times[name] = at = max(at, value)
    return times


def _table(title: str, of: str, head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,),
           total: bool = False) -> Iterator[str]:
    """A table in a region that scrolls by itself. Cells are HTML; ``words`` are the columns that are not numbers."""
    def cells(row: Sequence[str]) -> str:
        made = []
        for i, cell in enumerate(row):
            tag = 'td' if i else 'th scope="row"'
            made.append(f'<{tag}{"" if i in words else " class=n"}>{cell}</{tag[:2]}>')
        return ''.join(made)

    listed = list(rows)
    yield f'<div class="scroll" role="group" tabindex="0" aria-label="{title}, {of}"><table><caption>{title}</caption><thead><tr>'
    yield ''.join(f'<th scope="col"{"" if i in words else " class=n"}>{column}</th>' for i, column in enumerate(head))
    yield '</tr></thead><tbody>'
    for at, row in enumerate(listed, 1):
        yield f'<tr{" class=all" if total and at == len(listed) else ""}>{cells(row)}</tr>'
    yield '</tbody></table></div>\n'


def _gap(record: dict[str, Any]) -> float | None:
    return max(record['event_gaps_ms'], default=None)


METRICS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    'Time to headers': lambda record: record['marks_ms'].get('head'),
    'Time to first text': lambda record: record['first_text_ms'],
    'Largest inter-event gap': _gap,
    'Duration': lambda record: record['duration_ms'],
}


def _measured(runs: Sequence[Run]) -> dict[str, list[float]]:
    """What the passed runs measured, by metric."""
    passed = [run.record for run in runs if run.record['ok']]
    return {name: [value for value in map(metric, passed) if value is not None] for name, metric in METRICS.items()}


# Axes


def _step(span: float, parts: int = 5) -> float:
    """The least round step (1, 2 or 5 times a power of ten) of which at most ``parts`` make up the span."""
    rough = max(span, 1e-3) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= rough * (1 - 1e-9))


def _axis(low: float, high: float) -> list[float]:
    """Round values, evenly spaced, the first at most ``low`` and the last at least ``high``."""
    step = _step(high - low)
    first = math.floor(low / step + 1e-9)
    return [i * step for i in range(first, max(first + 1, math.ceil(high / step - 1e-9)) + 1)]


def _labels(ticks: Sequence[float], where: Callable[[float], float], y: int, units: bool = False) -> Iterator[str]:
    """The axis line at ``y`` with its labelled ticks, as SVG; of many labels every second gives way on a phone.

    The unit stands at the last one, or with ``units`` at each, so that it may change on the way.
    """
    yield f'<line class="a" x2="100%" y1="{y}" y2="{y}"/>'
    for i, tick in enumerate(ticks):
        x, last = where(tick), i == len(ticks) - 1
        anchor = 'end' if last else 'middle' if i else 'start'
        hide = ' class="even"' if i % 2 and not last and len(ticks) > 4 else ''
        unit, divisor = ('s', 1000) if (tick if units else ticks[-1]) >= 1000 else ('ms', 1)
        label = f'{tick / divisor:,.10g}{f" {unit}" if last or units else ""}'
        yield (f'<line class="a" x1="{x:.2f}%" x2="{x:.2f}%" y1="{y}" y2="{y + 4}"/>'
               f'<text{hide} x="{x:.2f}%" y="{y + 16}" text-anchor="{anchor}">{label}</text>')


# Distributions


def _histogram(name: str, values: Sequence[float]) -> Iterator[str]:
    """One metric as a figure: bars, the median, the 95th percentile. The same numbers are in its text and in the table."""
    low, high = min(values), max(*values, 1e-3)
    log = high >= low * LOG_FROM
    if log:
        last = math.ceil(math.log10(high) - 1e-9)
        first = last - DECADES if low <= 0 else max(last - DECADES, math.floor(math.log10(low) + 1e-9))
        ticks = [10.0 ** n for n in range(first, last + 1)]
    else:
        ticks = _axis(low, high)

    def where(value: float) -> float:
        if log:
            return math.log(max(value, ticks[0]) / ticks[0]) / math.log(ticks[-1] / ticks[0]) * 100
        return (value - ticks[0]) / (ticks[-1] - ticks[0]) * 100

    counts = Counter(min(BINS - 1, int(where(v) * BINS / 100)) for v in values)
    top, median, late = max(counts.values()), statistics.median(values), quantile(values, 0.95)
    told = (f'{_count(len(values), "passed run")}, from {_time(low)} to {_time(high)}, median {_time(median)}, '
            f'95th percentile {_time(late)}{", logarithmic axis" if log else ""}')
    yield f'<figure><div class="draw"><svg role="img" width="100%" height="100" aria-label="{name}: {told}">'
    for i, count in sorted(counts.items()):
        tall = max(2.0, 70 * count / top)
        yield f'<rect class="h" x="{i * 100 / BINS:.2f}%" width="{100 / BINS - 0.4:.2f}%" y="{76 - tall:.1f}" height="{tall:.1f}"/>'
    for value, style in ((median, 'm'), (late, 'm d')):
        x = where(value or 0.0)
        yield f'<line class="{style}" x1="{x:.2f}%" x2="{x:.2f}%" y1="2" y2="76"/>'
    yield from _labels(ticks, where, 76, log)
    yield (f'</svg></div><figcaption><b>{name}</b>{", log scale" if log else ""}: {_count(len(values), "passed run")}, '
           f'at most {top:,} in a bar; median {_time(median)} (line), p95 {_time(late)} (dashed).</figcaption></figure>\n')


# Timelines


def _common_axis(runs: Sequence[Run]) -> list[float]:
    """The axis of all these runs but those that take far longer than most; empty when none has times."""
    ends = [max(times.values()) for run in runs if (times := _times(run.record))]
    most = quantile(ends, 0.9) or 0.0
    return _axis(0.0, max(end for end in ends if end <= most * FAR)) if most else []


def _ticks(record: dict[str, Any], full: float) -> str:
    """The path of the ticks of content events, thinned to one for each of TICK_UNITS places."""
    at: float | None = record['first_text_ms']
    if at is None:
        return ''
    seen = set()
    for gap in (0.0, *record['event_gaps_ms']):
        at += gap
        seen.add(min(TICK_UNITS, max(0, round(at / full * TICK_UNITS))))
    return ''.join(f'M{x} 0V8' for x in sorted(seen))


def _segments(record: dict[str, Any], times: dict[str, float]) -> Iterator[tuple[str, str, float, float]]:
    """Each phase of the run: what went on, its class, its start and its end. A failed run ends within the phase it had not finished."""
    request = record['request']
    plain = 'secured' not in times and not str(request.get('url')).startswith('https')
    order = [name for name in PHASES if not (plain and name == 'secured')]
    reached = max((i for i, name in enumerate(order[:-1]) if name in times), default=-1)
    start = 0.0
    for name in [*(name for name in order[:reached + 1] if name in times), 'end']:
        phase = order[reached + 1] if name == 'end' and not record['ok'] else name
        working, style = PHASES[phase]
        if phase == 'connected' and request.get('path_taken') == 'ssh':
            working = 'opening the SSH tunnel'
        until = times.get(name, start)
        yield working, style, start, until
        start = until


def _timeline(record: dict[str, Any], common: Sequence[float], ident: str) -> Iterator[str]:
    """The run as a figure: phases, ticks, marks, axis, and the same in words."""
    times = _times(record)
    if not times:
        yield '<p class="soft">This record has no times, so there is no timeline.</p>'
        return
    end = max(times.values())
    own = not (common and common[-1] * OWN_AXIS_BELOW <= end <= common[-1])
    axis = _axis(0.0, max(end, 1e-3)) if own else common
    full = axis[-1]

    def where(value: float) -> float:
        return min(value / full, 1.0) * 100

    yield f'<figure><div class="draw"><svg role="img" width="100%" height="60" aria-labelledby="{ident}">'
    for working, style, since, until in _segments(record, times):
        y, tall = (19, 6) if style[0] in 'wc' else (16, 12)
        wide = max(where(until) - where(since), 0.1)
        yield (f'<rect class="{style}" x="{where(since):.2f}%" width="{wide:.2f}%" y="{y}" height="{tall}">'
               f'<title>{working}: {_time(until - since)}</title></rect>')
    yield (f'<svg y="32" width="100%" height="8" viewBox="0 0 {TICK_UNITS} 8" preserveAspectRatio="none">'
           f'<path class="k" d="{_ticks(record, full)}"/></svg>')
    for name in ('first_text', 'finish', 'done'):
        if name in times:
            yield f'<svg x="{where(times[name]):.2f}%" y="7">{SHAPES[name]}</svg>'
    said = 'passed'
    if failure := record['failure']:
        x, right = where(end), end > full / 2
        said = f'failed at {_e(failure["boundary"])}: {_e(failure["code"])}'
        yield (f'<svg x="{x:.2f}%" y="22">{SHAPES["failed"]}</svg><svg x="{x:.2f}%" y="11">'
               f'<text class="f" x="{-14 if right else 14}" text-anchor="{"end" if right else "start"}">{_e(failure["code"])}</text></svg>')
    yield from _labels(axis, where, 42)
    told = ', '.join(f'{TOLD[name]} {_time(at)}'.replace(' ', '\xa0') for name, at in times.items())
    scale = ' It has a time axis of its own.' if own else ''
    yield f'</svg></div><figcaption id="{ident}">{told}; {said}.{scale}</figcaption></figure>'


def _facts(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What else helps to understand a run, as pairs of a term and HTML."""
    request, response, delivery, usage = record['request'], record['response'], record['delivery'], record['usage']
    if failure := record['failure']:
        yield 'Message', _e(failure['message']) + (f' (event {failure["event"]:,})' if failure['event'] is not None else '')
        yield 'Hint', _e(failure['hint'])
    for warning in record['warnings']:
        yield 'Warning', f'<code>{_e(warning["code"])}</code> ({warning["count"]:,}): {_e(warning["message"])}'
    asked = [request[name] for name in ('url', 'path_taken') if request.get(name) is not None]
    if response.get('status') is not None:
        asked += [f'status {response["status"]}', f'HTTP/{response.get("http_version")}', response.get('tls_version') or '']
    if asked:
        yield 'Request', ', '.join(_e(word) for word in asked if word)
    if response.get('body_excerpt') is not None:
        yield 'Body excerpt', _e(response['body_excerpt'])
    for name, value in record['notes'].items():
        yield 'Note', f'{_e(name)} = {_e(value)}'
    if not delivery['bytes']:
        return
    events, texts = _count(delivery['events'], 'event'), f'{record["content_events"]:,}'
    if delivery['reads'] is not None and delivery['content_reads'] is not None:
        events, texts = f'{events} in {_count(delivery["reads"], "read")}', f'{texts} in {delivery["content_reads"]:,}'
    yield 'Delivery', (f'{events}, with text {texts}; {_count(delivery["bytes"], "byte")}; '
                       f'body end: {_e(delivery["body_end"] or "none seen")}')
    if delivery['buffered']:
        yield 'Held back', 'yes: the text came late and at once, so something between engine and client buffered it'
    told = [f'{name} {usage[f"{name}_tokens"]:,}' for name in ('completion', 'prompt', 'cached', 'reasoning')
            if usage and usage[f'{name}_tokens'] is not None]
    yield 'Finish', (('no finish_reason' if record['finish_reason'] is None else f'<code>{_e(record["finish_reason"])}</code>')
                     + (', [DONE] seen' if record['done'] else ', no [DONE]')
                     + (f'; tokens as the server counts them: {_e(", ".join(told))}' if told else ''))


def _run(run: Run, common: Sequence[float], ident: str) -> Iterator[str]:
    """One run: verdict, timeline, facts, and the answer, hidden until asked for."""
    record, text = run.record, run.record['text']
    if failure := record['failure']:
        verdict = f'<span class="bad">✕ failed at {_e(failure["boundary"])}: {_e(failure["code"])}</span>'
    else:
        verdict = '<span class="good">✓ passed</span>'
    about = [_e(record[name]) for name in ('started_at', 'model') if record[name] is not None]
    about += [f'{what} {_time(record[name])}' for what, name in (('first text', 'first_text_ms'), ('duration', 'duration_ms'))
              if record[name] is not None]
    yield f'<article class="run{" failed" if failure else ""}"><div class="bar"><h4>{verdict}</h4><p>{_e(run.source)}</p></div>'
    yield f'<p class="soft">{" · ".join(about)}</p>'
    yield from _timeline(record, common, ident)
    facts = ''.join(f'<dt>{term}</dt><dd>{told}</dd>' for term, told in _facts(record))
    yield f'<dl>{facts}</dl>'
    if text:
        cut = f', the first {MAX_TEXT_CHARS:,} of them' if len(text) > MAX_TEXT_CHARS else ''
        yield (f'<details><summary>Answer text ({_count(len(text), "character")}{cut})</summary>'
               '<pre role="group" tabindex="0" aria-label="Answer text">'
               f'{_e(text[:MAX_TEXT_CHARS], MAX_TEXT_CHARS, _HIDDEN_BUT_LINES)}</pre></details>')
    yield '</article>\n'


# Sections


def _key() -> str:
    """What the timelines are drawn with."""
    bars = {'set-up: resolve, connect or tunnel, TLS, send': ('s', 's o'),
            'waiting: for the head, the first event, the first text, the finish': ('w', 'w o', 'w'),
            'text': ('t',), '[DONE] and end': ('c',)}
    items = []
    for told, styles in bars.items():
        y, tall = (4, 6) if styles[0] in 'wc' else (1, 12)
        drawn = ''.join(f'<rect class="{style}" x="{i * 14}" y="{y}" width="13" height="{tall}"/>' for i, style in enumerate(styles))
        items.append((told, len(styles) * 14, drawn))
    items.append(('events with text (too dense to tell apart, they share a tick)', 18,
                  '<path class="k" d="M2 3V11M7 3V11M9 3V11M16 3V11"/>'))
    items += [(told, 14, f'<svg x="7" y="7">{SHAPES[name]}</svg>') for told, name in (
        ('first text', 'first_text'), ('finish_reason', 'finish'), ('[DONE]', 'done'), ('failure', 'failed'))]
    return '<ul class="key">' + ''.join(f'<li><svg width="{width}" height="14" aria-hidden="true">{drawn}</svg>{told}</li>'
                                        for told, width, drawn in items) + '</ul>\n'


def _drawn(runs: Sequence[Run]) -> list[Run]:
    """At most MAX_DRAWN runs: of every failure of a label one, then its second and so on, then the slowest that passed."""
    seen: Counter[tuple[str, str]] = Counter()
    slowest = sorted(runs, key=lambda run: -(run.record['duration_ms'] or 0))
    ranks = []
    for run in slowest:
        kind = (str(run.record['label']), run.record['outcome'])
        ranks.append((run.record['ok'], 0 if run.record['ok'] else seen[kind]))
        seen[kind] += 1
    best = sorted(range(len(slowest)), key=ranks.__getitem__)[:MAX_DRAWN]
    return [slowest[i] for i in best]


TOTALS = ('Label', 'Runs', 'Passed', 'Share', '95% interval', 'First text, median', 'p95', 'Duration, median', 'p95')


def _totals(name: str, runs: Sequence[Run]) -> list[str]:
    """The cells of one row: how many passed, and the times of those."""
    found = figures(runs)
    times = [_time(found[key][which]) for key in ('first_text_ms', 'duration_ms') for which in ('median', 'p95')]
    interval = f'{percent(found["share_low"])} to {percent(found["share_high"])}'
    return [name, f'{found["runs"]:,}', f'{found["passed"]:,}', html.escape(percent(found['share'])), html.escape(interval), *times]


def _failures(runs: Sequence[Run], what: str) -> Iterator[str]:
    """What failed, in the order of the boundaries."""
    hints = {run.record['outcome']: run.record['failure']['hint'] for run in runs if run.record['failure']}
    if hints:
        rows = [[_e(f['boundary']), f'<code>{_e(f["code"])}</code>', f'{f["runs"]:,}', _e(hints[f['code']])]
                for f in figures(runs)['failures']]
        yield from _table('Failures', what, ('Boundary', 'Code', 'Runs', 'Hint'), rows, (0, 1, 3))


def _label(name: str, runs: Sequence[Run], drawn: Sequence[Run], ident: str, what: str) -> Iterator[str]:
    """The runs of one label: failures, distributions, and those that are drawn."""
    yield f'<section><h3 id="{ident}">{name}</h3>\n'
    what = f'{what}, {name}'
    yield from _failures(runs, what)
    measured = {metric: values for metric, values in _measured(runs).items() if values}
    if measured:
        rows = ([metric, f'{len(values):,}', _time(min(values)), _time(statistics.median(values)), _time(quantile(values, 0.95)),
                 _time(max(values))]
                for metric, values in measured.items())
        yield from _table('Times of the runs that passed', what, ('Metric', 'Runs', 'Least', 'Median', 'p95', 'Most'), rows)
    figures = [''.join(_histogram(metric, values)) for metric, values in measured.items() if len(values) >= MIN_VALUES]
    if figures:
        yield f'<div class="figures">{"".join(figures)}</div>\n'
    order = sorted(drawn, key=lambda run: (run.record['ok'], _order((run.record['failure'] or {}).get('boundary', ''))))
    common = _common_axis(order)
    for i, run in enumerate(order):
        yield from _run(run, common, f'{ident}-{i}')
    yield '</section>\n'


def _section(part: Part) -> Iterator[str]:
    """All of one origin; nothing in it counts a run of another."""
    kind, runs, labels = part
    title, meaning = ORIGINS[kind]
    names = {label: 'no label' if label is None else _e(label) for label in labels}
    idents = {label: f'{kind}-{i}' for i, label in enumerate(labels)}
    what = title.lower()
    yield f'<section aria-labelledby="{kind}"><h2 id="{kind}">{title}</h2><p class="soft">{meaning}</p>\n'
    rows = [_totals(f'<a href="#{idents[label]}">{names[label]}</a>', own) for label, own in labels.items()]
    if len(labels) > 1:
        rows.append(_totals('All labels', runs))
    yield from _table('By label', what, TOTALS, rows, total=len(labels) > 1)
    drawn = _drawn(runs)
    if len(drawn) < len(runs):
        yield (f'<p>{len(drawn):,} of these {len(runs):,} runs are shown one by one: failures first, of every kind, then the slowest. '
               f'The others, {len(runs) - len(drawn):,}, are in the tables and distributions only.</p>\n')
    if any(_times(run.record) for run in drawn):
        yield _key()
    shown: dict[str | None, list[Run]] = {}
    for run in drawn:
        shown.setdefault(run.record['label'], []).append(run)
    for label, own in labels.items():
        name = names[label] if label is None else f'label {names[label]}'
        yield from _label(name, own, shown.get(label, ()), idents[label], what)
    yield '</section>\n'


def page(runs: Sequence[Run], skipped: Sequence[str] = ()) -> Iterator[str]:
    """The pieces of one self-contained HTML document about these runs; ``skipped`` says what could not be read as a record.

    No script, no request, no clock: the same runs give the same bytes. Every string of a record is text in it, whatever it holds.
    """
    apart = parts(runs)
    digest = base64.b64encode(hashlib.sha256(CSS.encode()).digest()).decode()
    yield ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
           f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'sha256-{digest}\'; '
           'base-uri \'none\'; form-action \'none\'"><meta name="viewport" content="width=device-width, initial-scale=1">'
           f'<meta name="color-scheme" content="light dark"><title>Streamed answers: report</title><style>{CSS}</style></head>\n'
           '<body><header><h1>Streamed answers</h1><nav aria-label="Sections"><ul>')
    for part in apart:
        passed = sum(run.record['ok'] for run in part.runs)
        yield f'<li><a href="#{part.origin}">{ORIGINS[part.origin][0]}</a>: {passed:,} of {len(part.runs):,} passed</li>'
    if skipped:
        yield f'<li><a href="#skipped">No records</a>: {len(skipped):,}</li>'
    yield '</ul></nav></header>\n<main>\n'
    for part in apart:
        yield from _section(part)
    if skipped:
        yield ('<section aria-labelledby="skipped"><h2 id="skipped">No records</h2>'
               '<p class="soft">What was given and could not be read as a record.</p><ul>')
        yield from (f'<li>{_e(line)}</li>' for line in skipped[:MAX_SKIPPED])
        yield f'</ul>{f"<p>And {len(skipped) - MAX_SKIPPED:,} more.</p>" if len(skipped) > MAX_SKIPPED else ""}</section>\n'
    yield ('</main>\n<footer><p>A pass says that one streamed answer was complete, not that it is right. Times are from the start of a '
           'run; medians and 95th percentiles (p95, nearest rank) are those of the runs that passed; intervals are Wilson score intervals. '
           'An inter-event gap is the time between two events with text, which may hold several tokens each.</p></footer></body></html>\n')


# --- command line -------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(shown(message))


def make_parser() -> argparse.ArgumentParser:
    """The command line, and nothing else."""
    parser = _Parser(prog='stream_report.py', allow_abbrev=False, description=__doc__.partition('\n')[0] if __doc__ else None)
    parser.add_argument('paths', metavar='PATH', nargs='*',
                        help='a record, a file with a record a line, a directory of either, or - for lines on stdin')
    parser.add_argument('--json', action='store_true', help='print the figures, or the comparison, as JSON')
    parser.add_argument('--compare', nargs=2, metavar=('A', 'B'), help='print two labels side by side')
    parser.add_argument('--html', metavar='FILE', help='write one self-contained page; - is stdout')
    parser.add_argument('--junit', metavar='FILE', help='write JUnit XML, a test case a run; - is stdout')
    parser.add_argument('--summary', action='store_true',
                        help=f'append Markdown to the file that {SUMMARY_VARIABLE} names, or print it; print an annotation a failed run')
    parser.add_argument('--force', action='store_true', help='replace FILE where it exists')
    parser.add_argument('--schema', action='store_true', help='print the JSON Schema of a record, and nothing else')
    parser.add_argument('--version', action='version', version=f'stream-report {__version__}')
    return parser


def _say(line: str) -> None:
    try:
        if sys.stderr is not None:  # closed at start
            print(f'stream_report.py: {line}', file=sys.stderr, flush=True)
    except OSError:
        pass


def _progress() -> Callable[[int, int], None]:
    last = time.monotonic()

    def tell(count: int, skipped: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            _say(f'{count} records read' + (f', {skipped} skipped' if skipped else ''))

    return tell


def _identity(there: os.stat_result) -> tuple[int, int]:
    return there.st_dev, there.st_ino


def _refuse_read(path: str, there: os.stat_result, read: set[tuple[int, int]]) -> None:
    if _identity(there) in read:
        raise Refused(f'{shown(path)}: is a record that is read here')


def _refuse_existing(path: str, force: bool, read: set[tuple[int, int]]) -> None:
    if not path:
        raise Refused('the name of a file is empty')
    if os.path.isdir(path) or not os.path.basename(path):
        raise Refused(f'{shown(path)}: names a directory')
    if os.path.lexists(path):
        there = os.lstat(path)
        _refuse_read(path, there, read)
        if not force:
            raise Refused(f'{shown(path)}: exists; --force replaces it')
        if not stat.S_ISREG(there.st_mode):
            raise Refused(f'{shown(path)}: is no regular file')


def _write(path: str, pieces: Iterable[str], force: bool, mode: int) -> None:
    """Write a file whole or not at all: under another name, which then takes its place, exclusively unless ``force``."""
    temporary = os.path.join(os.path.dirname(path), f'.stream-{os.urandom(8).hex()}.tmp')
    try:
        with open(temporary, 'x', encoding='utf-8', opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.writelines(pieces)
        if force:
            os.replace(temporary, path)
        else:
            _name(temporary, path)
    except FileExistsError:
        raise Refused(f'{shown(path)}: exists; --force replaces it') from None
    except OSError as exc:
        raise Refused(f'{shown(path)}: cannot be written: {exc.strerror}') from None
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)


def _name(temporary: str, path: str) -> None:
    try:
        os.link(temporary, path)  # exclusive
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: nobody else is meant to come between
        if os.path.lexists(path):
            raise FileExistsError from None
        os.rename(temporary, path)


def _summarise(runs: Sequence[Run], skipped: Sequence[str]) -> Iterator[str]:
    path = os.environ.get(SUMMARY_VARIABLE)
    if path:
        try:
            with open(path, 'a', encoding='utf-8') as file:
                file.writelines(f'{line}\n' for line in markdown(runs, skipped))
        except OSError as exc:
            raise Refused(f'{shown(path)}: cannot be written: {exc.strerror}') from None
    else:
        yield from markdown(runs, skipped)
    yield from workflow_commands(runs, skipped)


def _outputs(args: argparse.Namespace, runs: Sequence[Run], skipped: Sequence[str]) -> Iterator[str]:
    compared = compare(args.compare, runs) if args.compare else None
    for path, pieces, mode in ((args.junit, junit, 0o666), (args.html, page, 0o600)):  # a page holds the answers
        if path == '-':
            yield ''.join(pieces(runs, skipped)).rstrip('\n')
        elif path is not None:
            _write(path, pieces(runs, skipped), args.force, mode)
    if args.summary:
        yield from _summarise(runs, skipped)
    if compared:
        yield from (_json(compared),) if args.json else compare_report(compared)
    elif args.json:
        yield _json(json_report(runs, skipped))
    elif not (args.html or args.junit or args.summary):
        yield from text_report(runs)


def _json(value: Any) -> str:
    return json.dumps(value).replace('##[', '#\\u0023[')  # as in ``shown``


def _check_targets(args: argparse.Namespace, read: set[tuple[int, int]]) -> None:
    """Refuse what must not be written, and two documents on standard output. Raises Refused."""
    targets = [path for path in (args.html, args.junit) if path not in (None, '-')]
    for path in targets:
        _refuse_existing(path, args.force, read)
    files = {os.path.realpath(path) for path in targets}
    if len(targets) > len(files):
        raise Refused('--html and --junit name one file')
    if sum((args.html == '-', args.junit == '-', args.summary, args.json or bool(args.compare))) > 1:
        raise Refused('only one output can go to standard output')
    summary = os.environ.get(SUMMARY_VARIABLE) if args.summary else None
    if summary:
        if os.path.exists(summary):
            _refuse_read(summary, os.stat(summary), read)
        if os.path.realpath(summary) in files:
            raise Refused(f'{SUMMARY_VARIABLE} and --html or --junit name one file')


def report(argv: Sequence[str] | None) -> Iterator[str]:
    """The lines that the command prints. Raises Refused."""
    args = make_parser().parse_args(argv)
    if args.schema:
        yield json.dumps(SCHEMA, indent=1)
        return
    if not args.paths:
        raise Refused('no PATH: name records, directories, or - for lines on standard input')
    reader = Reader(args.html is not None, _progress())
    _check_targets(args, set())  # before long work
    for path in args.paths:
        reader.read(path)
    _check_targets(args, reader.files)
    for line in reader.skipped:
        _say(f'skipped {shown(line)}')
    if not reader.runs:
        raise Refused('there is no record to report')
    yield from _outputs(args, reader.runs, reader.skipped)


def _put(data: bytes) -> None:
    """Write to standard output, all of it: an unbuffered stream of Python's may take a part."""
    if data and sys.stdout is None:
        raise Refused('standard output is closed')
    left = memoryview(data)
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 2, or 128 + a signal's number."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that no half file is left
    try:
        lines: list[bytes] = []
        for line in report(argv):
            lines.append(f'{line}\n'.encode())
            if len(lines) == 1000:
                _put(b''.join(lines))
                lines = []
        _put(b''.join(lines))
    except Refused as exc:
        _say(str(exc))
        return 2
    except BrokenPipeError:  # whoever read it has enough
        return 0
    except OSError as exc:
        _say(f'standard output: {exc.strerror}')
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == '__main__':
    sys.exit(main())
