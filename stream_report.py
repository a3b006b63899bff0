#!/usr/bin/env python3
"""Reads evidence records of stream_client.py and tells what they say together: tables, a comparison, a page, reports for CI.

    records -> validated against SCHEMA -> kept apart by origin (real, unknown, synthetic) and label -> one or more outputs

A record is only read, never written. What is no record, half a record, or one of a later schema is named on stderr and skipped.
Times are milliseconds. Exit status: 0 reported, 2 refused (arguments, files, nothing to report, what cannot be compared).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import stat
import statistics
import sys
import time
import unicodedata
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__version__ = '0.1.0'
MAX_RECORD_BYTES = 67_108_864  # one record; the longest answer of default limits makes 7 MB
MAX_ANNOTATIONS = 10  # what GitHub shows of one kind and step
MAX_LISTED = 100  # failed runs in a job summary, which GitHub bounds to 1 MiB
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
_COUNT = {'type': 'integer', 'minimum': 0}
_TIME = {'type': 'number', 'minimum': 0, 'maximum': 1e12}  # milliseconds
_SHA256 = {'type': 'string', 'pattern': '^[0-9a-f]{64}' + _END}
_CODE = {'type': 'string', 'pattern': '^[a-z][a-z0-9_]*' + _END}
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
        'finish_reason': _or_null(_TEXT), 'done': _FLAG, 'completion_tokens': _or_null(_COUNT), 'error': _or_null(_TEXT),
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
                                                _or_null(_COUNT)))),
        'client': _object({'version': _TEXT, 'source_sha256': _or_null(_SHA256), 'python': _TEXT, 'platform': _TEXT}),
        'started_at': _or_null(_UTC), 'label': _or_null(_TEXT), 'notes': _TEXTS, 'synthetic': _or_null(_FLAG),
        'input': _or_null(_object({'kind': {'enum': ['capture', 'body']}, 'policy': _POLICY, 'limits': _LIMITS})),
    }, 'input'),  # younger than the rest
    'if': {'properties': {'ok': {'const': True}}},
    'then': {'properties': {'outcome': {'const': 'passed'}, 'failure': {'type': 'null'}, 'error': {'type': 'null'}}},
    'else': {'properties': {'outcome': {'pattern': '^(?!passed$)'}, 'failure': {'type': 'object'}, 'error': {'type': 'string'}}},
}
_TYPES: dict[str, tuple[type, ...]] = {'string': (str,), 'boolean': (bool,), 'integer': (int,), 'number': (int, float),
                                       'object': (dict,), 'array': (list,), 'null': (type(None),)}


def invalid(value: Any, schema: Mapping[str, Any], path: str = '') -> str | None:
    """The first thing in which a value from JSON differs from a schema, None if nothing does.

    Knows the keywords that SCHEMA uses, with their meaning in JSON Schema 2020-12 (an integer is written as one here).
    """
    named = f'{path or "the record"}: '
    kinds = schema.get('type')
    if kinds:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not any(type(value) in _TYPES[kind] for kind in kinds):
            return f'{named}{_brief(value)} is no {" or ".join(kinds)}'
    if 'const' in schema and value != schema['const']:
        return f'{named}{_brief(value)} is not {_brief(schema["const"])}'
    if 'enum' in schema and value not in schema['enum']:
        return f'{named}{_brief(value)} is none of {", ".join(map(_brief, schema["enum"])) or "those allowed"}'
    found = None
    if isinstance(value, str):
        if 'pattern' in schema and not re.search(schema['pattern'], value):
            found = f'{named}{_brief(value)} does not match {schema["pattern"]}'
    elif isinstance(value, dict):
        found = _invalid_members(value, schema, path)
    elif isinstance(value, list):
        items = schema.get('items')
        found = next(filter(None, (invalid(item, items, f'{path}[{at}]') for at, item in enumerate(value))), None) if items else None
    elif value is not None and not schema.get('minimum', value) <= value <= schema.get('maximum', value):
        found = f'{named}{_brief(value)} is out of range'
    if not found and 'if' in schema:
        found = invalid(value, schema['else' if invalid(value, schema['if'], path) else 'then'], path)
    return found


def _invalid_members(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str | None:
    for name in schema.get('required', ()):
        if name not in value:
            return f'{path or "the record"}: has no {name}'
    known, others = schema.get('properties', {}), schema.get('additionalProperties')
    for name, member in value.items():
        rule = known.get(name, others)
        found = rule and invalid(member, rule, f'{path}.{name}' if path else name)
        if found:
            return str(found)
    return None


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

    def __init__(self, keep_text: bool, progress: Callable[[int], None]) -> None:
        self.runs: list[Run] = []
        self.skipped: list[str] = []
        self.files: set[tuple[int, int]] = set()  # (device, inode): none is read twice, and none is written to
        self._keep_text, self._progress = keep_text, progress

    def read(self, path: str) -> None:
        """Read a path as given by the user; ``-`` is standard input. Raises Refused where it cannot be opened."""
        if path == '-':
            self._lines('standard input', sys.stdin.buffer, 1)
        elif os.path.isdir(path):
            found = 0
            for directory, folders, names in os.walk(path, onerror=self._unreadable):
                folders.sort()
                for name in sorted(names):
                    file = os.path.join(directory, name)
                    if name.endswith(('.json', '.jsonl')) and not name.startswith('.') and os.path.isfile(file):
                        found += 1
                        self._file(file)
            if not found:
                self.skipped.append(f'{path}: holds no .json or .jsonl file')
        elif os.path.exists(path):
            self._file(path)
        else:
            raise Refused(f'{shown(path)}: there is no such file or directory')

    def _unreadable(self, exc: OSError) -> None:
        self.skipped.append(f'{exc.filename}: {exc.strerror}')

    def _file(self, path: str) -> None:
        try:
            with open(path, 'rb') as file:
                there = os.fstat(file.fileno())
                if stat.S_ISREG(there.st_mode):
                    if (there.st_dev, there.st_ino) in self.files:
                        return
                    self.files.add((there.st_dev, there.st_ino))
                first = file.readline(MAX_RECORD_BYTES + 1)
                if first.rstrip() != b'{' and (rest := file.readline(MAX_RECORD_BYTES + 1)):  # no record file: records, one a line
                    self._take(f'{path}:1', first)
                    self._take(f'{path}:2', rest)
                    self._lines(path, file, 3)
                else:
                    self._take(path, first + (file.read(MAX_RECORD_BYTES + 1) if first.endswith(b'\n') else b''))
        except OSError as exc:
            self.skipped.append(f'{path}: {exc.strerror}')

    def _lines(self, name: str, file: Any, number: int) -> None:
        while line := file.readline(MAX_RECORD_BYTES + 1):
            self._take(f'{name}:{number}', line)
            number += 1

    def _take(self, source: str, data: bytes) -> None:
        if not data.strip() and ':' in source:
            return  # an empty line
        try:
            if len(data) > MAX_RECORD_BYTES:
                raise ValueError(f'longer than {MAX_RECORD_BYTES} bytes')
            record = json.loads(data.decode(), parse_constant=_no_constant)
            wrong = invalid(record, SCHEMA)
            if wrong:
                capture = isinstance(record, dict) and 'capture' in record
                raise ValueError('a capture, which stream_client.py --input judges' if capture else wrong)
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
            self._progress(len(self.runs))


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
    return max(0.0, (middle - half) / below), min(1.0, (middle + half) / below)


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the share ``q`` of the values does not exceed (nearest rank); None of no values."""
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1] if values else None


def spread(values: Iterable[float | None]) -> dict[str, Any]:
    """How many values there are, their median and 95th percentile; None are not counted."""
    known = [value for value in values if value is not None]
    return {'n': len(known), 'median': statistics.median(known) if known else None, 'p95': quantile(known, 0.95)}


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """What runs of one origin say together: counts, the share that passed, times of those, failures in the order of boundaries."""
    records = [run.record for run in runs]
    passed = [record for record in records if record['ok']]
    low, high = wilson(len(passed), len(records)) if records else (None, None)
    failures: dict[tuple[str, str], int] = {}
    for record in records:
        if record['failure']:
            which = record['failure']['boundary'], record['failure']['code']
            failures[which] = failures.get(which, 0) + 1
    return {
        'runs': len(records), 'passed': len(passed), 'share': len(passed) / len(records) if records else None,
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
    for name in ('real', 'unknown', 'synthetic'):
        own = [run for run in everything if origin(run.record) == name]
        own.sort(key=lambda run: (run.record['started_at'] or '', run.source))
        labels: dict[str | None, list[Run]] = {}
        for run in own:
            labels.setdefault(run.record['label'], []).append(run)
        if own:
            made.append(Part(name, own, dict(sorted(labels.items(), key=lambda item: (item[0] is None, item[0] or '')))))
    return made


TITLES = {'real': 'real', 'unknown': 'of unknown origin: a body judged offline', 'synthetic': 'synthetic: the fixture answered'}


# --- text ---------------------------------------------------------------------------------------------------------------

# What never leaves as it came: C0, DEL, C1, invisible and bidi controls, line separators, surrogates, what XML does not allow
_UNSAFE = re.compile('[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb\ufffe\uffff]')


def shown(text: str) -> str:
    """Text from a record or a file name on one line, with everything that steers or hides written as an escape."""
    return _UNSAFE.sub(lambda m: f'\\x{ord(m[0]):02x}' if ord(m[0]) < 256 else f'\\u{ord(m[0]):04x}', text)


def width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.category(c) in ('Mn', 'Me') else 2 if unicodedata.east_asian_width(c) in 'WF' else 1 for c in text)


def fitted(text: str, columns: int) -> str:
    """The text, cut with an ellipsis where it takes more columns than these."""
    if width(text) <= columns:
        return text
    while width(text) >= columns:
        text = text[:-1]
    return text + '…'


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


def share(found: Mapping[str, Any]) -> str:
    """The share that passed with its interval, in per cent."""
    return f'{found["share"]:.1%} [{found["share_low"]:.1%}, {found["share_high"]:.1%}]'


def named(label: str | None) -> str:
    """A label as shown."""
    return '(no label)' if label is None else shown(label)


def verdict(record: Mapping[str, Any]) -> str:
    """``passed``, or the boundary and the code."""
    return 'passed' if record['ok'] else f'{record["failure"]["boundary"]}: {record["outcome"]}'


LABEL_HEADS = ('label', ' runs', ' passed', ' share [95 %]', ' headers', ' p95', ' first text', ' p95', ' duration', ' p95')
FAILURE_HEADS = ('label', 'boundary', 'code', ' runs')
READING = 'Times in ms: median and 95th percentile (nearest rank) of the runs that passed. Share: 95 % Wilson interval.'


def figure_rows(part: Part) -> list[tuple[str, dict[str, Any]]]:
    """The figures of each label, and those of all of them where there are several."""
    rows = [(named(label), figures(runs)) for label, runs in part.labels.items()]
    return [*rows, ('all', figures(part.runs))] if len(rows) > 1 else rows


def _cells(found: Mapping[str, Any]) -> tuple[str, ...]:
    times = [ms(found[key][which]) for key in ('head_ms', 'first_text_ms', 'duration_ms') for which in ('median', 'p95')]
    return str(found['runs']), str(found['passed']), share(found), *times


def text_report(runs: Sequence[Run]) -> Iterator[str]:
    """Lines for a terminal: for each origin a line a run, then a line a label, then its failures."""
    for part in parts(runs):
        yield f'{len(part.runs)} run{"s" * (len(part.runs) != 1)}, {TITLES[part.origin]}'
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
    'clocks': lambda r: r['request']['clocks_s'], 'policy': lambda r: r['request']['policy'],
}


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
        other = next((run for side in sides for run in side if of(run.record) != of(first.record)), None)
        if other:
            values = [shown(fitted(v if isinstance(v, str) else json.dumps(v), 120)) for v in (of(first.record), of(other.record))]
            raise Refused(f'--compare: {name} differ: {values[0]} in {shown(first.source)}, {values[1]} in {shown(other.source)}')
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
            ratio = '-' if not one or other is None else f'x{other / one:.2f}'
            rows.append((f'{name}, {which}', ms(one), ms(other), ratio))
    rows.append(('buffered on the way', str(a['buffered']), str(b['buffered']), ''))
    yield f'runs {TITLES[found["origin"]]}'
    yield ''
    yield from table(('', f' {fitted(named(a["label"]), 32)}', f' {fitted(named(b["label"]), 32)}', ' second to first'), rows)
    yield ''
    failures = [(fitted(named(side['label']), 32), f['boundary'], f['code'], str(f['runs'])) for side in (a, b) for f in side['failures']]
    if failures:
        yield from table(FAILURE_HEADS, failures)
        yield ''
    yield f'{READING} Intervals that overlap show no difference.'


# --- for CI -------------------------------------------------------------------------------------------------------------


def junit(runs: Sequence[Run], skipped: Sequence[str]) -> bytes:
    """JUnit XML: a suite an origin and label, a case a run. A failure is a verdict on an answer, an error a run that could not be made
    (NOT_RUN), and what was no record stands as skipped.
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
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + str(ET.tostring(root, encoding='unicode')).encode() + b'\n'


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
    return '`' + shown(text).replace('`', '\\x60').replace('|', '\\x7c') + '`'


def _markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield '| ' + ' | '.join(head.strip() for head in heads) + ' |'
    yield '| ' + ' | '.join('---:' if head.startswith(' ') else '---' for head in heads) + ' |'
    for row in rows:
        yield '| ' + ' | '.join(row) + ' |'
    yield ''


def markdown(runs: Sequence[Run], skipped: Sequence[str]) -> Iterator[str]:
    """Lines of a GitHub job summary: for each origin a table of labels, and the runs that failed (at most MAX_LISTED)."""
    for part in parts(runs):
        yield f'### {sum(run.record["ok"] for run in part.runs)} of {len(part.runs)} runs passed, {TITLES[part.origin]}'
        yield ''
        yield from _markdown_table(LABEL_HEADS, [(_code(name), *_cells(row)) for name, row in figure_rows(part)])
        failed = [run for run in part.runs if not run.record['ok']]
        if failed:
            yield from _markdown_table(('record', 'boundary', 'code', 'message'), [
                (_code(source), r['failure']['boundary'], r['outcome'], _code(fitted(r['error'], 400)))
                for source, r in failed[:MAX_LISTED]])
        if len(failed) > MAX_LISTED:
            yield from (f'and {len(failed) - MAX_LISTED} more', '')
    for line in skipped[:MAX_LISTED]:
        yield f'- skipped: {_code(line)}'
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
    parser.add_argument('--html', metavar='FILE', help='write one self-contained page')
    parser.add_argument('--junit', metavar='FILE', help='write JUnit XML, a test case a run')
    parser.add_argument('--summary', action='store_true',
                        help=f'append Markdown to the file that {SUMMARY_VARIABLE} names, or print it; print an annotation a failed run')
    parser.add_argument('--force', action='store_true', help='replace FILE where it exists')
    parser.add_argument('--schema', action='store_true', help='print the JSON Schema of a record, and nothing else')
    parser.add_argument('--version', action='version', version=f'stream-report {__version__}')
    return parser


def _progress() -> Callable[[int], None]:
    last = time.monotonic()

    def tell(count: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            print(f'stream_report.py: {count} records read', file=sys.stderr, flush=True)

    return tell


def _refuse_existing(path: str, force: bool, read: set[tuple[int, int]]) -> None:
    if os.path.isdir(path) or not os.path.basename(path):
        raise Refused(f'{shown(path)}: names a directory')
    if os.path.lexists(path):
        if not force:
            raise Refused(f'{shown(path)}: exists; --force replaces it')
        there = os.lstat(path)
        if (there.st_dev, there.st_ino) in read or not stat.S_ISREG(there.st_mode):
            raise Refused(f'{shown(path)}: is {"a record that is read here" if stat.S_ISREG(there.st_mode) else "no regular file"}')


def _write(path: str, pieces: Iterable[bytes], force: bool) -> None:
    """Write a file whole or not at all: under another name first, which then takes its place."""
    temporary = os.path.join(os.path.dirname(path), f'.stream-{os.urandom(8).hex()}.tmp')
    try:
        with open(temporary, 'xb') as file:
            file.writelines(pieces)
        if force:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)  # exclusive
    except FileExistsError:
        raise Refused(f'{shown(path)}: exists; --force replaces it') from None
    except OSError as exc:
        raise Refused(f'{shown(path)}: cannot be written: {exc.strerror}') from None
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)


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
    if args.compare:
        found = compare(args.compare, runs)
        yield from (json.dumps(found),) if args.json else compare_report(found)
    elif args.json:
        yield json.dumps(json_report(runs, skipped))
    elif not (args.html or args.junit or args.summary):
        yield from text_report(runs)
    if args.summary:
        yield from _summarise(runs, skipped)
    if args.junit:
        _write(args.junit, [junit(runs, skipped)], args.force)


def report(argv: Sequence[str] | None) -> Iterator[str]:
    """The lines that the command prints. Raises Refused."""
    args = make_parser().parse_args(argv)
    if args.schema:
        yield json.dumps(SCHEMA, indent=1)
        return
    if not args.paths:
        raise Refused('no PATH: name records, directories, or - for lines on standard input')
    targets = [path for path in (args.html, args.junit) if path is not None]
    reader = Reader(args.html is not None, _progress())
    for path in targets:
        _refuse_existing(path, args.force, set())
    for path in args.paths:
        reader.read(path)
    for path in targets:
        _refuse_existing(path, args.force, reader.files)
    for line in reader.skipped:
        print(f'stream_report.py: skipped {shown(line)}', file=sys.stderr)
    if not reader.runs:
        raise Refused('there is no record to report')
    yield from _outputs(args, reader.runs, reader.skipped)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0 or 2; 130 by SIGINT)."""
    try:
        for line in report(argv):
            sys.stdout.buffer.write(f'{line}\n'.encode())
        sys.stdout.flush()
    except Refused as exc:
        print(f'stream_report.py: {exc}', file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as exc:
        print(f'stream_report.py: standard output: {exc.strerror}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == '__main__':
    sys.exit(main())
