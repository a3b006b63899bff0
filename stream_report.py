"""Records of runs, told as one page of HTML."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stream_client import BOUNDARIES, FAILURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class Run(NamedTuple):
    """A record and where it came from."""

    source: str
    record: dict[str, Any]


def wilson(passed: int, runs: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share."""
    if not runs:
        return 0.0, 1.0
    z = 1.959963984540054
    share, spread = passed / runs, z * z / runs
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / runs + spread / (4 * runs)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def quantile(values: Sequence[float], q: float) -> float | None:
    """The nearest-rank quantile, None of nothing."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)] if values else None


def origin(record: dict[str, Any]) -> str:
    """Who answered: 'real', 'synthetic' (the fixture) or 'unknown'."""
    return {False: 'real', True: 'synthetic', None: 'unknown'}[record['synthetic']]


# --- the page -----------------------------------------------------------------------------------------------------------

MAX_DRAWN = 200  # runs of one origin that are shown one by one
MAX_TEXT_CHARS = 20_000  # of an answer
MAX_SAID_CHARS = 1_000  # of any other string
MAX_SKIPPED = 200  # lines about files that were no records
MAX_MS = 1e12  # 31 years: what is more is drawn and told as this
MIN_VALUES = 3  # below that many a distribution shows nothing that the table does not
BINS = 24
LOG_FROM = 20  # a distribution whose ends differ by this factor has a logarithmic axis
DECADES = 4  # of such an axis, at most; what is less than its start is drawn there
TICK_UNITS = 1_000  # a timeline's width in the units in which its ticks are thinned
FAR = 2  # a run this many times longer than nine tenths of its label's runs has a time axis of its own
OWN_AXIS_BELOW = 0.1  # so has one that fills less of the common axis

ORIGINS = {
    'real': ('Real runs', 'Nothing said that the fixture answered.'),
    'unknown': ('Runs of unknown origin', 'Judged from a body that was kept; nothing tells what server it came from.'),
    'synthetic': ('Synthetic runs', 'Answered by the fixture: they say how the checker judges, and nothing about any server.'),
}

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

# Controls, format characters and surrogates: what shows nothing, or makes something else look different.
_HIDDEN = re.compile('[\x00-\x1f\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f'
                     '\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd'
                     '\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]')
_HIDDEN_BUT_LINES = re.compile(_HIDDEN.pattern.replace('\x00-\x1f', '\x00-\x08\x0b-\x1f'))

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


def _code(found: re.Match[str]) -> str:
    code = ord(found[0])
    return rf'\x{code:02x}' if code < 0x80 else rf'\u{code:04x}' if code < 0x10000 else rf'\U{code:08x}'


def _e(text: object, limit: int = MAX_SAID_CHARS, hidden: re.Pattern[str] = _HIDDEN) -> str:
    r"""Any string as text of the page: cut to ``limit`` characters, what is hidden as ``\uNNNN``, then escaped for HTML."""
    whole = str(text)
    return html.escape(hidden.sub(_code, whole[:limit])) + (f' … ({len(whole):,} characters in all)' if len(whole) > limit else '')


def _ms(value: float | None) -> str:
    """A time in a unit and with digits that suit it; a dash for none."""
    if value is None:
        return '-'
    if value < 10_000:
        return f'{value:,.{3 if 0 < value < 1 else 1 if 0 < value < 100 else 0}f} ms'
    return f'{value / 1000:,.{1 if value < 1e6 else 0}f} s'


def _count(number: int, one: str) -> str:
    return f'{number:,} {one}{"" if number == 1 else "s"}'


def _times(record: dict[str, Any]) -> dict[str, float]:
    """The marks that were reached, bounded and in order even where the record's are not."""
    at, times = 0.0, {}
    for name in TOLD:
        if (value := record['marks_ms'].get(name)) is not None:
            times[name] = at = max(at, min(value, MAX_MS))
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
    return {name: [min(v, MAX_MS) for v in map(metric, passed) if v is not None] for name, metric in METRICS.items()}


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
    top, median, late = max(counts.values()), quantile(values, 0.5), quantile(values, 0.95)
    told = (f'{_count(len(values), "passed run")}, from {_ms(low)} to {_ms(high)}, median {_ms(median)}, '
            f'95th percentile {_ms(late)}{", logarithmic axis" if log else ""}')
    yield f'<figure><div class="draw"><svg role="img" width="100%" height="100" aria-label="{name}: {told}">'
    for i, count in sorted(counts.items()):
        tall = max(2.0, 70 * count / top)
        yield f'<rect class="h" x="{i * 100 / BINS:.2f}%" width="{100 / BINS - 0.4:.2f}%" y="{76 - tall:.1f}" height="{tall:.1f}"/>'
    for value, style in ((median, 'm'), (late, 'm d')):
        x = where(value or 0.0)
        yield f'<line class="{style}" x1="{x:.2f}%" x2="{x:.2f}%" y1="2" y2="76"/>'
    yield from _labels(ticks, where, 76, log)
    yield (f'</svg></div><figcaption><b>{name}</b>{", log scale" if log else ""}: {_count(len(values), "passed run")}, '
           f'at most {top:,} in a bar; median {_ms(median)} (line), p95 {_ms(late)} (dashed).</figcaption></figure>\n')


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
        at = min(at + gap, MAX_MS)
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
               f'<title>{working}: {_ms(until - since)}</title></rect>')
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
    told = ', '.join(f'{TOLD[name]} {_ms(at)}'.replace(' ', '\xa0') for name, at in times.items())
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
    if not delivery['reads']:
        return
    yield 'Delivery', (f'{_count(delivery["events"], "event")} in {_count(delivery["reads"], "read")}, with text '
                       f'{record["content_events"]:,} in {delivery["content_reads"]:,}; {_count(delivery["bytes"], "byte")}; '
                       f'body end: {_e(delivery["body_end"] or "none seen")}')
    if delivery['buffered']:
        yield 'Held back', 'yes: the text came late and at once, so something between engine and client buffered it'
    told = [f'{name.removesuffix("_tokens")} {count:,}' for name, count in (usage or {}).items() if count is not None]
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
    about += [f'{what} {_ms(record[name])}' for what, name in (('first text', 'first_text_ms'), ('duration', 'duration_ms'))
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
    passed = sum(run.record['ok'] for run in runs)
    low, high = wilson(passed, len(runs))
    measured = _measured(runs)
    times = [_ms(quantile(measured[metric], q)) for metric in ('Time to first text', 'Duration') for q in (0.5, 0.95)]
    return [name, f'{len(runs):,}', f'{passed:,}', f'{passed / len(runs):.1%}', f'{low:.1%} to {high:.1%}', *times]


def _depth(boundary: str) -> int:
    """The place of a boundary in their order; the last one for a boundary of another version."""
    return BOUNDARIES.index(boundary) if boundary in BOUNDARIES else len(BOUNDARIES)


def _failures(runs: Sequence[Run], what: str) -> Iterator[str]:
    """What failed, in the order of the boundaries."""
    failures = [run.record['failure'] for run in runs if run.record['failure']]
    counts = Counter((failure['boundary'], failure['code']) for failure in failures)
    if counts:
        order = sorted(counts.items(), key=lambda item: (_depth(item[0][0]), -item[1], item[0]))
        rows = [[_e(boundary), f'<code>{_e(code)}</code>', f'{count:,}', FAILURES[code].meaning if code in FAILURES else '']
                for (boundary, code), count in order]
        yield from _table('Failures', what, ('Boundary', 'Code', 'Runs', 'Meaning'), rows, (0, 1, 3))


def _label(name: str, runs: Sequence[Run], drawn: Sequence[Run], ident: str, what: str) -> Iterator[str]:
    """The runs of one label: failures, distributions, and those that are drawn."""
    yield f'<section><h3 id="{ident}">{name}</h3>\n'
    what = f'{what}, {name}'
    yield from _failures(runs, what)
    measured = {metric: values for metric, values in _measured(runs).items() if values}
    if measured:
        rows = ([metric, f'{len(values):,}', _ms(min(values)), *(_ms(quantile(values, q)) for q in (0.5, 0.95)), _ms(max(values))]
                for metric, values in measured.items())
        yield from _table('Times of the runs that passed', what, ('Metric', 'Runs', 'Least', 'Median', 'p95', 'Most'), rows)
    figures = [''.join(_histogram(metric, values)) for metric, values in measured.items() if len(values) >= MIN_VALUES]
    if figures:
        yield f'<div class="figures">{"".join(figures)}</div>\n'
    order = sorted(drawn, key=lambda run: (run.record['ok'], _depth((run.record['failure'] or {}).get('boundary', ''))))
    common = _common_axis(order)
    for i, run in enumerate(order):
        yield from _run(run, common, f'{ident}-{i}')
    yield '</section>\n'


def _section(kind: str, runs: Sequence[Run]) -> Iterator[str]:
    """All of one origin; nothing in it counts a run of another."""
    title, meaning = ORIGINS[kind]
    labels: dict[str | None, list[Run]] = {}
    for run in runs:
        labels.setdefault(run.record['label'], []).append(run)
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
    kinds = {kind: [run for run in runs if origin(run.record) == kind] for kind in ORIGINS}
    digest = base64.b64encode(hashlib.sha256(CSS.encode()).digest()).decode()
    yield ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
           f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'sha256-{digest}\'; '
           'base-uri \'none\'; form-action \'none\'"><meta name="viewport" content="width=device-width, initial-scale=1">'
           f'<meta name="color-scheme" content="light dark"><title>Streamed answers: report</title><style>{CSS}</style></head>\n'
           '<body><header><h1>Streamed answers</h1><nav aria-label="Sections"><ul>')
    for kind, own in kinds.items():
        if own:
            passed = sum(run.record['ok'] for run in own)
            yield f'<li><a href="#{kind}">{ORIGINS[kind][0]}</a>: {passed:,} of {len(own):,} passed</li>'
    if skipped:
        yield f'<li><a href="#skipped">No records</a>: {len(skipped):,}</li>'
    yield '</ul></nav></header>\n<main>\n'
    if not runs:
        yield '<p>There is no record to report.</p>\n'
    for kind, own in kinds.items():
        if own:
            yield from _section(kind, own)
    if skipped:
        yield ('<section aria-labelledby="skipped"><h2 id="skipped">No records</h2>'
               '<p class="soft">What was given and could not be read as a record.</p><ul>')
        yield from (f'<li>{_e(line)}</li>' for line in skipped[:MAX_SKIPPED])
        yield f'</ul>{f"<p>And {len(skipped) - MAX_SKIPPED:,} more.</p>" if len(skipped) > MAX_SKIPPED else ""}</section>\n'
    yield ('</main>\n<footer><p>A pass says that one streamed answer was complete, not that it is right. Times are from the start of a '
           'run; medians and 95th percentiles (p95) are nearest ranks over the runs that passed; intervals are Wilson score intervals. '
           'An inter-event gap is the time between two events with text, which may hold several tokens each.</p></footer></body></html>\n')


# --- command line -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Write the page of the record files that are named as arguments to stdout."""
    sys.stdout.writelines(page([Run(name, json.loads(Path(name).read_text('utf-8'))) for name in sys.argv[1:]]))


if __name__ == '__main__':
    main()
