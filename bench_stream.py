"""What the client costs, beside other clients, measured in one run: medians of interleaved rounds, as ratios.

    python3 bench_stream.py [--check] [--json] [--rounds 7] [--scale 1.0] [--only NAME[,...]]

The peers are those of the dependency group ``bench``.  A time is CPU time of this process or of a child (user and system)
unless it is called lag or overshoot.  Each row holds what was reached against a reach; ``--check`` names every reach that was
missed and exits 1.  Absolute figures are this machine's; only ratios within one run mean something elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import functools
import gc
import json
import math
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import stream_client
from stream_client import ChatCompletion, ChatStream, Events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parent
CLIENT = str(ROOT / 'stream_client.py')
FIXTURE = str(ROOT / 'fixture_server.py')
TEXTS = ('The ', 'answer', ' is', ' 漢字', ', of', ' course', ' 🙂', ',\n', ' "one"', ' line', ' after', ' another', ' naïve', ' and', ' so', ' on.')
READ = 65_536
LIMITS = {'max_answer_chars': 2**40, 'max_stream_bytes': 2**40}
LIMIT_FLAGS = [f'--{name.replace("_", "-")}={2**40}' for name in LIMITS]


class Row(NamedTuple):
    """One line of the table. ``figures`` are shown in ``unit``; ``reached`` says whether ``reach`` holds, None without one."""

    measure: str
    unit: str
    figures: dict[str, float]
    reach: str
    reached: bool | None


class Bench(NamedTuple):
    """How much is done: rounds, and a factor for the counts."""

    rounds: int
    scale: float

    def count(self, full: int, least: int = 100) -> int:
        return max(least, int(full * self.scale))

    def rotate(self, contenders: dict[str, Callable[[], float]]) -> dict[str, float]:
        """The median of each contender's own measure, taken in turns."""
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(self.rounds):
            for name, measure in contenders.items():
                gc.collect()
                taken[name].append(measure())
        return {name: statistics.median(values) for name, values in taken.items()}


# --- workload -----------------------------------------------------------------------------------------------------------


def payload(text: str) -> str:
    """The data of one chunk as vLLM sends it, raw UTF-8, about 260 bytes."""
    return json.dumps({
        'id': 'chatcmpl-5849fbefc5d8779c74e90544bdf637b5', 'object': 'chat.completion.chunk', 'created': 1796032130, 'model': 'tiny-model',
        'choices': [{'index': 0, 'delta': {'content': text}, 'logprobs': None, 'finish_reason': None, 'token_ids': None}]},
        ensure_ascii=False, separators=(',', ':'))


LAST = ('{"id":"chatcmpl-5849fbefc5d8779c74e90544bdf637b5","object":"chat.completion.chunk","created":1796032130,"model":"tiny-model",'
        '"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}', '[DONE]')


def payloads(count: int) -> list[str]:
    return [payload(TEXTS[at % len(TEXTS)]) for at in range(count)]


def events(count: int, eol: str = '\n') -> list[bytes]:
    """Events with text, one bytes object each."""
    kinds = [f'data: {payload(text)}{eol}{eol}'.encode() for text in TEXTS]
    return [kinds[at % len(kinds)] for at in range(count)]


def whole(count: int) -> bytes:
    """A complete body."""
    return b''.join(events(count)) + ''.join(f'data: {data}\n\n' for data in LAST).encode()


def cut(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


def cpu(work: Callable[[], object], per: int) -> Callable[[], float]:
    """Microseconds of CPU time for each of ``per`` things."""
    def measure() -> float:
        start = time.process_time()
        work()
        return (time.process_time() - start) / per * 1e6
    return measure


# --- parsers ------------------------------------------------------------------------------------------------------------


def ours(reads: Iterable[bytes]) -> int:
    parser = Events()
    return sum(len(parser.feed(raw)) for raw in reads)


def by_httpx_sse(reads: Iterable[bytes]) -> int:
    from httpx_sse._decoders import SSEDecoder, SSELineDecoder

    decode, lines, decoder, found = codecs.getincrementaldecoder('utf-8')().decode, SSELineDecoder(), SSEDecoder(), 0
    for raw in reads:
        text = decode(raw)
        if text:
            for line in lines.decode(text):
                found += decoder.decode(line) is not None
    return found


def by_openai(reads: Iterable[bytes]) -> int:
    from openai._streaming import SSEDecoder

    return sum(1 for _ in SSEDecoder().iter_bytes(iter(reads)))


def by_sseclient(reads: Iterable[bytes]) -> int:
    import sseclient

    return sum(1 for _ in sseclient.SSEClient(iter(reads)).events())


def by_launchdarkly(reads: Iterable[bytes]) -> int:
    from ld_eventsource.reader import _BufferedLineReader, _SSEReader

    return sum(1 for _ in _SSEReader(_BufferedLineReader.lines_from(iter(reads))).events_and_comments())


PARSERS: dict[str, Callable[[Iterable[bytes]], int]] = {
    'stream_client': ours, 'httpx-sse': by_httpx_sse, 'openai': by_openai, 'sseclient-py': by_sseclient, 'launchdarkly': by_launchdarkly}


def parse(bench: Bench) -> Iterator[Row]:
    """Bytes to event data."""
    count, few = bench.count(50_000), bench.count(10_000)
    long_line = b'data: ' + b'x' * 60_000 + b'\n\n'
    long_event = b'data: ' + b'\ndata: '.join([b'x' * 16_000] * 56) + b'\n\n'
    never = 'not slower than httpx-sse'
    for name, reads, found, reach in (
        ('reads of 64 KiB', cut(b''.join(events(count)), READ), count, '1.8 times the fastest of httpx-sse, openai and sseclient-py; not slower than launchdarkly'),
        ('reads of 4 KiB', cut(b''.join(events(count)), 4096), count, never),
        ('one event a read', events(count), count, never),
        ('CRLF, reads of 64 KiB', cut(b''.join(events(count, '\r\n')), READ), count, never),
        ('one byte a read', cut(b''.join(events(few)), 1), few, never),
        ('lines of 60 KB, reads of 4 KiB', cut(long_line * bench.count(500, 20), 4096), bench.count(500, 20), never),
        ('events of 900 KB in lines of 16 KB, reads of 64 KiB', cut(long_event * bench.count(40, 4), READ), bench.count(40, 4), never),
    ):
        for parser in PARSERS.values():
            if parser(reads) != found:
                raise AssertionError(f'{parser.__name__} does not find {found} events at {name}')
        took = bench.rotate({who: cpu(functools.partial(parser, reads), found) for who, parser in PARSERS.items()})
        own = took['stream_client']
        good = own <= took['httpx-sse']
        if reach != never:
            good = own * 1.8 <= min(took['httpx-sse'], took['openai'], took['sseclient-py']) and own <= took['launchdarkly']
        yield Row(f'parse, {name}', 'us an event', took, reach, good)


# --- verdict ------------------------------------------------------------------------------------------------------------


def judged(body: bytes) -> None:
    chat = ChatCompletion(events=Events(), usage_asked=True, max_answer_chars=2**40)
    for raw in cut(body, READ):
        for _ in chat.feed(raw):
            pass
    chat.end()


def loaded(datas: list[str]) -> None:
    for data in datas:
        json.loads(data)


def joined(body: bytes) -> None:
    from httpx_sse._decoders import SSEDecoder, SSELineDecoder

    decode, lines, decoder, pieces = codecs.getincrementaldecoder('utf-8')().decode, SSELineDecoder(), SSEDecoder(), []
    for raw in cut(body, READ):
        for line in lines.decode(decode(raw)):
            event = decoder.decode(line)
            if event is not None and event.data != '[DONE]':
                pieces.append(json.loads(event.data)['choices'][0]['delta'].get('content') or '')
    ''.join(pieces)


def typed(body: bytes) -> None:
    import httpx
    import openai

    answer = httpx.Response(200, headers={'content-type': 'text/event-stream'}, stream=httpx.ByteStream(body))
    http: Any = httpx.Client(transport=httpx.MockTransport(lambda _: answer))
    with openai.OpenAI(api_key='x', base_url='http://127.0.0.1/v1', http_client=http) as client:
        stream = client.chat.completions.create(model='m', messages=[], stream=True)
        if not ''.join(chunk.choices[0].delta.content or '' for chunk in stream):
            raise AssertionError('no text')


def verdict(bench: Bench) -> Iterator[Row]:
    """Bytes to verdict, in this process."""
    count, few = bench.count(50_000), bench.count(2_000)
    body, datas, small = whole(count), payloads(count), whole(few)
    took = bench.rotate({
        'stream_client': cpu(lambda: judged(body), count), 'json.loads alone': cpu(lambda: loaded(datas), count),
        'httpx-sse, loads, join': cpu(lambda: joined(body), count), 'openai SDK': cpu(lambda: typed(small), few)})
    own = took['stream_client']
    yield Row('bytes to verdict, reads of 64 KiB', 'us an event', took,
              'at most 1.5 times json.loads; faster than httpx-sse, loads, join; 20 times faster than the SDK',
              own <= 1.5 * took['json.loads alone'] and own < took['httpx-sse, loads, join'] and 20 * own <= took['openai SDK'])


# --- whole runs ---------------------------------------------------------------------------------------------------------


class Child(NamedTuple):
    """What a child process used: seconds of CPU time, and its greatest resident size in KiB."""

    seconds: float
    peak: int


# In between, since a child's greatest size begins with its parent's
RUNNER = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss, status]))
"""


def run(words: Sequence[str], folder: str) -> Child:
    """A child process, with its own use of the machine. Raises AssertionError unless it ends with status 0."""
    environment = {k: v for k, v in os.environ.items() if k != 'PYTHONDONTWRITEBYTECODE'}
    ran = subprocess.run([sys.executable, '-S', '-c', RUNNER, *words], capture_output=True, text=True, cwd=folder, env=environment, check=True)
    seconds, peak, status = json.loads(ran.stdout)
    if status:
        raise AssertionError(f'{words}: status {status}: {ran.stderr[-2000:]}')
    return Child(seconds, peak)


def cost(words: Sequence[str], folder: str, factor: int = 1) -> float:
    return run(words, folder).seconds * factor


SERVER = """
import os, socket, sys
count, events, last = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3].encode()
kinds = [k + b'\\n\\n' for k in events.split(b'\\n\\n') if k]
block = b''.join(b'%x\\r\\n%s\\r\\n' % (len(k), k) for k in kinds)
rest = b''.join(b'%x\\r\\n%s\\r\\n' % (len(k), k) for k in kinds[:count % len(kinds)]) + b'%x\\r\\n%s\\r\\n0\\r\\n\\r\\n' % (len(last), last)
many = block * (4096 // len(kinds))
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection = listener.accept()[0]
    if os.fork() == 0:
        seen = b''
        while b'\\r\\n\\r\\n' not in seen or not seen.endswith(b'}'):
            seen += connection.recv(65536) or sys.exit()
        connection.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nTransfer-Encoding: chunked\\r\\nConnection: close\\r\\n\\r\\n')
        left = count // len(kinds)
        per = 4096 // len(kinds)
        while left >= per:
            connection.sendall(many)
            left -= per
        connection.sendall(block * left + rest)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        os._exit(0)
    connection.close()
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


class Served:
    """A server in another process that answers every request with ``count`` events, each in a chunk of its own."""

    def __init__(self, count: int) -> None:
        kinds = ''.join(f'data: {payload(text)}\n\n' for text in TEXTS)
        last = ''.join(f'data: {data}\n\n' for data in LAST)
        self.process = subprocess.Popen([sys.executable, '-c', SERVER, str(count), kinds, last], stdout=subprocess.PIPE, start_new_session=True)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())
        self.url = f'http://127.0.0.1:{self.port}/v1/chat/completions'

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


RAW = """
import http.client, json, sys
from urllib.parse import urlsplit
at = urlsplit(sys.argv[1])
connection = http.client.HTTPConnection(at.hostname, at.port)
connection.request('POST', at.path, json.dumps({'model': 'm', 'messages': [], 'stream': True}))
response = connection.getresponse()
"""
SCRIPTS = {
    'http.client, unparsed': RAW + 'while response.read1(65536):\n    pass\n',
    'http.client and json.loads': RAW + textwrap.dedent("""
        rest = b''
        while raw := response.read1(65536):
            *found, rest = (rest + raw).split(b'\\n\\n')
            for event in found:
                if event != b'data: [DONE]':
                    json.loads(event[6:])
        """),
    'httpx, httpx-sse': textwrap.dedent("""
        import json, sys, httpx, httpx_sse
        text = ''
        with httpx.Client(timeout=60) as client, httpx_sse.connect_sse(client, 'POST', sys.argv[1], json={'model': 'm', 'messages': [], 'stream': True}) as source:
            for event in source.iter_sse():
                if event.data == '[DONE]':
                    break
                text += ''.join(c['delta'].get('content') or '' for c in json.loads(event.data)['choices'])
        """),
    'openai SDK': textwrap.dedent("""
        import sys, openai
        client = openai.OpenAI(base_url=sys.argv[1].removesuffix('/chat/completions'), api_key='x', timeout=60, max_retries=0)
        stream = client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}], stream=True)
        text = ''.join(chunk.choices[0].delta.content or '' for chunk in stream if chunk.choices)
        """),
}
CURL = ('curl', '-sN', '-H', 'Content-Type: application/json', '-d', '{"model":"m","messages":[],"stream":true}')


def clients(url: str, folder: str, *flags: str) -> dict[str, list[str]]:
    """Each client as a command."""
    commands = {'stream_client': [sys.executable, CLIENT, '--url', url, '--model', 'tiny-model', '--output', '-', *flags]}
    for name, script in SCRIPTS.items():
        path = Path(folder, re.sub('[^a-z]', '_', name) + '.py')
        path.write_text(script)
        commands[name] = [sys.executable, str(path), url]
    if shutil.which('curl'):
        commands['curl -N'] = [*CURL, url]
    return commands


def whole_run(bench: Bench) -> Iterator[Row]:
    """A run over loopback, each client a process of its own, its start taken off."""
    count = bench.count(100_000, 1000)
    with tempfile.TemporaryDirectory() as folder, Served(count) as many, Served(1) as one:
        starts = clients(one.url, folder)
        commands = clients(many.url, folder, *LIMIT_FLAGS)
        took = bench.rotate({name: functools.partial(cost, words, folder) for name, words in commands.items()})
        base = bench.rotate({name: functools.partial(cost, words, folder) for name, words in starts.items()})
    each = {name: (took[name] - base[name]) / count * 1e6 for name in took}
    own = each['stream_client']
    yield Row(f'run of {count} events over loopback, less that of one', 'us an event', each,
              'ahead of every Python client that parses; at most 2 times http.client and json.loads',
              own < each['httpx, httpx-sse'] and own < each['openai SDK'] and own <= 2 * each['http.client and json.loads'])


def start(bench: Bench) -> Iterator[Row]:
    """One whole process that asks for one short answer; as a module, whose compiled form Python keeps, and as a script."""
    with tempfile.TemporaryDirectory() as folder, Served(1) as one:
        shutil.copy(CLIENT, folder)
        commands = {'python3 -c pass': [sys.executable, '-c', 'pass'], **clients(one.url, folder)}
        commands['python3 -m stream_client'] = [sys.executable, '-m', 'stream_client', *commands['stream_client'][2:]]
        run(commands['python3 -m stream_client'], folder)
        took = bench.rotate({name: functools.partial(cost, words, folder, 1000) for name, words in commands.items()})
    reach = "Python's start and at most 60 ms; less than half of the SDK's"
    for own, name in (('python3 -m stream_client', 'as a module'), ('stream_client', 'as a script, compiled each time')):
        others = {who: ms for who, ms in took.items() if who in (own, 'python3 -c pass', 'openai SDK') or 'stream_client' not in who}
        yield Row(f'a whole process for one short answer, {name}', 'ms of CPU', {'stream_client': others.pop(own), **others}, reach,
                  took[own] <= took['python3 -c pass'] + 60 and took[own] < took['openai SDK'] / 2)


# --- growth -------------------------------------------------------------------------------------------------------------


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of log cost over log size, by least squares."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(cost) for cost in costs]).slope


def growth(bench: Bench) -> Iterator[Row]:
    """Cost against size."""
    biggest = bench.count(1_000_000, 16_000)
    sizes = [1_000, *(size for size in (10_000, 100_000) if size < biggest), biggest]
    bodies = {size: whole(size) for size in sizes}

    def judge(size: int) -> float:
        again = max(1, 100_000 // size)
        begun = time.process_time()
        for _ in range(again):
            judged(bodies[size])
        return (time.process_time() - begun) / again

    took = bench.rotate({str(size): functools.partial(judge, size) for size in sizes})
    slope = exponent(sizes, list(took.values()))
    yield Row('growth with the number of events', 'us an event', {**{name: cost / int(name) * 1e6 for name, cost in took.items()}, 'exponent': slope},
              'an exponent from 0.97 to 1.03', 0.97 <= slope <= 1.03)
    bodies.clear()

    lines = [1_000, 10_000, 100_000, 1_000_000]
    texts = {size: cut((b'data: ' + 'aé漢🙂'.encode() * (size // 4) + b'\n\n') * (4_000_000 // size), READ) for size in lines}

    def parse_lines(size: int) -> float:
        begun = time.process_time()
        parser = Events(max_line_chars=2**40, max_event_chars=2**40)
        for raw in texts[size]:
            parser.feed(raw)
        return (time.process_time() - begun) / (4_000_000 // size)

    took = bench.rotate({str(size): functools.partial(parse_lines, size) for size in lines})
    slope = exponent(lines, list(took.values()))
    yield Row('growth with the length of a line', 'ns a character', {**{name: cost / int(name) * 1e9 for name, cost in took.items()}, 'exponent': slope},
              'an exponent from 0.97 to 1.03', 0.97 <= slope <= 1.03)


def memory(bench: Bench) -> Iterator[Row]:
    """Peak size of the process, and what the record of a long stream needs in it."""
    count = bench.count(1_000_000, 20_000)
    with tempfile.TemporaryDirectory() as folder, Served(1_000) as few, Served(count) as many:
        small = run(clients(few.url, folder)['stream_client'], folder).peak
        large = run(clients(many.url, folder, *LIMIT_FLAGS)['stream_client'], folder).peak
    text = sum(len(TEXTS[at % len(TEXTS)]) for at in range(count))
    # The text, once as a list of pieces being joined and once in the record, at up to 4 bytes a character; the gaps, a pointer and
    # a float each; and the record as JSON text, its bytes and a copy of both while it is written
    needed = (text * 4 * 2 + count * (8 + 24) + 2 * (text * 4 + count * 8)) / 2**20
    grown = (large - small) / 1024
    yield Row(f'peak memory, {count} events against 1,000', 'MiB', {'1,000 events': small / 1024, f'{count} events': large / 1024, 'growth': grown,
                                                                    'the record needs': needed}, 'growth no more than the record needs', grown <= needed)


# --- time ---------------------------------------------------------------------------------------------------------------


def stamps(bench: Bench) -> Iterator[Row]:
    """How long after it was sent an event is stamped, on one clock."""
    singles, bursts = bench.count(1_000, 50), bench.count(50, 5)
    sent: list[int] = []
    listener = socket.create_server(('127.0.0.1', 0))

    def serve() -> None:
        connection = listener.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(65536)
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n')
        event = events(1)[0]
        for burst in [1] * singles + [100] * bursts:
            time.sleep(0.002)
            sent.append(time.monotonic_ns())
            connection.sendall(event * burst)
        connection.sendall(whole(0))
        connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    seen: list[float] = []
    with ChatStream(f'http://127.0.0.1:{listener.getsockname()[1]}/x', 'tiny-model', 'x') as answer:
        for _ in answer:
            assert answer.wire
            seen.append(answer.wire.read_at)
    listener.close()
    lags = sorted((at * 1e9 - was) / 1000 for at, was in zip(seen[:singles], sent, strict=False))
    shared = sum(len({*seen[singles + 100 * at : singles + 100 * at + 100]}) == 1 for at in range(bursts)) / bursts
    figures = {'median lag': statistics.median(lags), '99th percentile': lags[int(len(lags) * 0.99)], 'bursts of one stamp, %': 100 * shared}
    yield Row('arrival stamps', 'us after sending', figures, 'bursts share one stamp (95 % of them, a burst may be two reads)', shared >= 0.95)


def overshoot(bench: Bench) -> Iterator[Row]:
    """How far past its limit a clock ends the run, in each phase: the deadline tests, with what they measured."""
    ran = subprocess.run([sys.executable, str(ROOT / 'test_stream.py'), '--overshoot'], capture_output=True, text=True, cwd=ROOT, check=False)
    found = re.findall(r'^ *(-?[\d.]+) ms  (.+)$', ran.stdout, re.MULTILINE)
    if not found:
        raise AssertionError(ran.stderr[-2000:])
    figures = {what: float(ms) for ms, what in found}
    yield Row('overshoot of the clocks', 'ms', figures, 'the worst under 100 ms', max(figures.values()) < 100)


def concurrent(bench: Bench) -> Iterator[Row]:
    """Slow streams at once: a thread each, the layers without I/O under asyncio, and httpx."""
    fixture = subprocess.Popen([sys.executable, FIXTURE, '--port', '0'], stdout=subprocess.PIPE, text=True)
    assert fixture.stdout
    url = 'http://' + fixture.stdout.readline().split()[-1].removeprefix('http://').split('/')[0] + '/v1/chat/completions'
    kinds = ('threads', 'asyncio', 'httpx')
    try:
        for count in (1, 64, 256):
            words = {kind: [sys.executable, __file__, '--streams', kind, str(count), url] for kind in kinds}
            idle = {kind: [sys.executable, __file__, '--streams', kind, '0', url] for kind in kinds}
            taken: dict[str, list[Child]] = {kind: [] for kind in kinds}
            base: dict[str, list[Child]] = {kind: [] for kind in kinds}
            for kind in kinds * bench.rounds:
                taken[kind].append(run(words[kind], str(ROOT)))
                base[kind].append(run(idle[kind], str(ROOT)))
            seconds = {kind: (statistics.median(c.seconds for c in taken[kind]) - statistics.median(c.seconds for c in base[kind])) / count * 1000
                       for kind in kinds}
            memory = {kind: (statistics.median(c.peak for c in taken[kind]) - statistics.median(c.peak for c in base[kind])) / count for kind in kinds}
            names = {'threads': 'stream_client, a thread each', 'asyncio': 'stream_client under asyncio', 'httpx': 'httpx, httpx-sse'}
            for unit, figures in (('ms of CPU a stream', seconds), ('KiB a stream', memory)):
                worst = max(figures['threads'], figures['asyncio'])
                alone = count == 1  # what is measured there is the machine: a process that wakes twelve times
                yield Row(f'{count} slow streams at once', unit, {names[kind]: figures[kind] for kind in kinds},
                          '' if alone else 'no worse than httpx', None if alone else worst <= figures['httpx'])
    finally:
        fixture.terminate()
        fixture.communicate()


async def _asked(url: str, mode: str) -> None:
    """One stream with the layers without I/O under asyncio."""
    target = stream_client.parse_url(url)
    reader, writer = await asyncio.open_connection(target.host, target.port)
    body = json.dumps({'model': mode, 'stream': True}).encode()
    writer.write(b'POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (target.path.encode(), len(body), body))
    head = await reader.readuntil(b'\r\n\r\n')
    fields = [(name, value) for name, _, value in (line.partition(': ') for line in head.decode().split('\r\n')[1:-2])]
    framed, chat = stream_client.Body(stream_client.framing_of(fields, False)), ChatCompletion()
    while not chat.done:
        for _ in chat.feed(framed.feed(await reader.read(READ))):
            pass
    chat.end(framed.end)
    writer.close()


def streams(kind: str, count: int, url: str) -> None:
    """What ``--streams`` runs: one quick stream, which loads what is loaded once, and then so many slow ones at once."""
    if kind == 'threads':
        outcomes: list[str] = []

        def judge(mode: str) -> None:
            outcomes.append(stream_client.stream(url, mode, 'x')['outcome'])

        judge('mode:ok')
        threads = [threading.Thread(target=judge, args=('mode:steady-text',)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if outcomes != ['passed'] * (count + 1):
            raise AssertionError(outcomes)
    elif kind == 'asyncio':
        async def ours() -> None:
            await _asked(url, 'mode:ok')
            await asyncio.gather(*(_asked(url, 'mode:steady-text') for _ in range(count)))

        asyncio.run(ours())
    else:
        import httpx
        import httpx_sse

        async def ask(client: Any, mode: str) -> None:
            async with httpx_sse.aconnect_sse(client, 'POST', url, json={'model': mode, 'stream': True}) as source:
                text = [json.loads(event.data) async for event in source.aiter_sse() if event.data != '[DONE]']
            if len(text) < 5:
                raise AssertionError(text)

        async def theirs() -> None:
            async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)) as client:
                await ask(client, 'mode:ok')
                await asyncio.gather(*(ask(client, 'mode:steady-text') for _ in range(count)))

        asyncio.run(theirs())


# --- table --------------------------------------------------------------------------------------------------------------

BENCHES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    'parse': parse, 'verdict': verdict, 'whole-run': whole_run, 'start': start, 'growth': growth, 'memory': memory, 'stamps': stamps,
    'overshoot': overshoot, 'concurrent': concurrent}


def versions() -> dict[str, str]:
    """What was measured, and on what."""
    found = {'stream-client': stream_client.__version__, 'Python': platform.python_version(), 'system': f'{platform.system()} {platform.machine()}',
             'cores': str(os.cpu_count())}
    for name in ('httpx', 'httpx-sse', 'openai', 'sseclient-py', 'launchdarkly-eventsource'):
        found[name] = metadata.version(name)
    if shutil.which('curl'):
        found['curl'] = subprocess.run(['curl', '--version'], capture_output=True, text=True, check=True).stdout.split()[1]
    return found


def shown(row: Row) -> str:
    """The row as a line of a Markdown table; figures of others with their ratio to ours."""
    own = row.figures.get('stream_client')
    figures = [f'{name} {value:.3g}' + (f' ({value / own:.2g}x)' if own and name != 'stream_client' else '') for name, value in row.figures.items()]
    mark = {True: 'reached', False: '**missed**', None: ''}[row.reached]
    return f'| {row.measure} | {row.unit} | {"; ".join(figures)} | {row.reach}{": " if mark else ""}{mark} |'


def main() -> int:
    """The command; exit status 1 where --check is given and a reach was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0], allow_abbrev=False)
    parser.add_argument('--check', action='store_true', help='name every reach that was missed, and exit 1 if one was')
    parser.add_argument('--json', action='store_true', help='an object in place of the table')
    parser.add_argument('--rounds', type=int, default=7, help='measurements of each, of which the median counts (default 7)')
    parser.add_argument('--scale', type=float, default=1.0, help='a factor for the number of events (default 1)')
    parser.add_argument('--only', default=','.join(BENCHES), metavar='NAME[,...]', help=f'of {", ".join(BENCHES)}')
    parser.add_argument('--streams', nargs=3, metavar=('KIND', 'COUNT', 'URL'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.streams:
        streams(args.streams[0], int(args.streams[1]), args.streams[2])
        return 0
    unknown = set(args.only.split(',')) - set(BENCHES)
    if unknown or args.rounds < 1 or args.scale <= 0:
        parser.error(f'unknown: {", ".join(sorted(unknown))}' if unknown else '--rounds and --scale are above 0')
    try:
        found = versions()
    except metadata.PackageNotFoundError as exc:
        parser.error(f'{exc.name} is not installed: pip install --group bench')
    bench, rows = Bench(args.rounds, args.scale), []
    if not args.json:
        print(', '.join(f'{name} {version}' for name, version in found.items()))
        print('\n| measure | unit | figures | reach |\n| --- | --- | --- | --- |', flush=True)
    for name in args.only.split(','):
        for row in BENCHES[name](bench):
            rows.append(row)
            if not args.json:
                print(shown(row), flush=True)
    if args.json:
        print(json.dumps({'versions': found, 'rounds': args.rounds, 'scale': args.scale, 'rows': [row._asdict() for row in rows]}))
    missed = [row for row in rows if row.reached is False]
    for row in missed if args.check else ():
        print(f'missed: {row.measure} ({row.unit}): {row.reach}', file=sys.stderr)
    return 1 if args.check and missed else 0


if __name__ == '__main__':
    sys.exit(main())
