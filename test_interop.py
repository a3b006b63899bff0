"""Checks through real programs: vLLM, llama-server, transformers serve, nginx, OpenSSH, TLS servers, httpx, aiohttp, Chromium.

Then the recipes of README's "A fleet", and the GitHub Action with its job of the workflow, step by step as a runner would.

    STREAM_SERVERS=DIRECTORY python3 -m unittest -v test_interop.py

DIRECTORY is what ``bash .ci/servers DIRECTORY`` made; the packages are those of the dependency group ``interop``, nginx,
OpenSSH and Chromium with its driver come from the system; STREAM_AXE names axe-core's axe.min.js, STREAM_ACTIONS_CORE
lib/command.js of @actions/core.  What is not
installed is skipped with its name, or fails with STREAM_INTEROP=all.  Everything listens on loopback only, each program runs
in a session of its own, and a program that leaves a process behind is an error.
At the end every server's version is printed as that server reports it.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import concurrent.futures
import contextlib
import datetime as dt
import getpass
import hashlib
import html.parser
import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import fixture_server
from stream_client import FAILURES, ChatCompletion, StreamFailure, stream
from stream_report import MAX_DRAWN, MAX_LISTED, SCHEMA, Run, invalid, page
from test_stream import Directory, Raw, environment, example, example_offline, like, read_request, run, sending

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parent
CLIENT = str(ROOT / 'stream_client.py')
FIXTURE = str(ROOT / 'fixture_server.py')
SERVERS = Path(os.environ.get('STREAM_SERVERS', 'no such directory'))
VLLM, LLAMA, MODEL = SERVERS / 'vllm' / 'bin', SERVERS / 'llama-server', SERVERS / 'model'
KEY = 'interop-key-0123456789'
MARK = f'STREAM_INTEROP_MARK={os.getpid()}'  # in the environment of every client that is started here
VERSIONS: dict[str, str] = {}


def tearDownModule() -> None:
    for name, version in sorted(VERSIONS.items()):
        print(f'version: {name}: {version}', flush=True)


# --- helpers ------------------------------------------------------------------------------------------------------------


def needs(**there: bool) -> Callable[[type], type]:
    """Skip a class for what is not installed, by name; with STREAM_INTEROP=all that is a failure instead."""
    missing = ', '.join(name for name, found in there.items() if not found)

    def lacking(_: type) -> None:
        raise AssertionError(f'not installed: {missing}')

    def decorate(case: type) -> type:
        if missing and os.environ.get('STREAM_INTEROP') != 'all':
            return unittest.skip(f'not installed: {missing}')(case)
        if missing:
            case.setUpClass = classmethod(lacking)  # type: ignore[attr-defined]
        return case

    return decorate


def package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def needs_package(name: str) -> Callable[[Any], Any]:
    """Skip one test for a package, unless STREAM_INTEROP=all: then its import fails it."""
    return unittest.skipUnless(package(name) or os.environ.get('STREAM_INTEROP') == 'all', f'not installed: {name}')


def program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get('PATH', os.defpath) + ':/usr/sbin:/usr/local/sbin:/sbin')


def free_port() -> int:
    with socket.create_server(('127.0.0.1', 0)) as probe:
        return int(probe.getsockname()[1])


def fetched(port: int, path: str) -> tuple[int, bytes]:
    """Status and body that a server gives for GET."""
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=5)
    try:
        connection.request('GET', path, headers={'Authorization': f'Bearer {KEY}'})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def answers(port: int, path: str = '/health') -> bool:
    """Whether an HTTP server there answers 200."""
    try:
        return fetched(port, path)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def eventually(seen: Callable[[], Any], seconds: float, what: str) -> Any:
    """What ``seen`` returns once that is true."""
    until = time.monotonic() + seconds
    while not (found := seen()):
        if time.monotonic() > until:
            raise AssertionError(f'not within {seconds:g} s: {what}')
        time.sleep(0.05)
    return found


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    session: int
    parent: int
    title: str


def processes() -> Iterator[Process]:
    """All that run; zombies are none."""
    for entry in Path('/proc').iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent, _, session = (entry / 'stat').read_text().rpartition(')')[2].split()[:4]
                if state not in 'ZX':
                    title = (entry / 'cmdline').read_bytes().replace(b'\0', b' ').decode('utf-8', 'replace')
                    yield Process(int(entry.name), int(session), int(parent), title)


def marked() -> list[str]:
    """What the clients of these tests started and left."""
    found = []
    for process in processes():
        with contextlib.suppress(OSError):
            if MARK.encode() in Path(f'/proc/{process.pid}/environ').read_bytes().split(b'\0'):
                found.append(process.title)
    return found


class Program:
    """A server in a session of its own, its output in a file. ``stop`` ends it; ``members`` are its living processes."""

    def __init__(self, *words: object, env: dict[str, str] | None = None, cwd: str | None = None) -> None:
        self.output = tempfile.TemporaryFile()  # lives as long as the program
        self.process = subprocess.Popen(
            [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=cwd, env={**os.environ, **(env or {})})

    def log(self) -> str:
        return os.pread(self.output.fileno(), 10_000_000, 0).decode('utf-8', 'replace')

    def members(self, title: str = '') -> list[Process]:
        return [p for p in processes() if p.session == self.process.pid and title in p.title]

    def until(self, seen: Callable[[], Any], seconds: float, what: str) -> Any:
        def seen_or_dead() -> Any:
            found = seen()
            if not found and self.process.poll() is not None:
                raise AssertionError(f'{what}: ended with {self.process.returncode}: {self.log()[-3000:]}')
            return found

        try:
            return eventually(seen_or_dead, seconds, what)
        except AssertionError as exc:
            raise AssertionError(f'{exc}: {self.log()[-3000:]}') from None

    def kill(self, number: signal.Signals, title: str = '') -> None:
        """Signal every process of the session whose title holds this; without a title only the first one."""
        for pid in [p.pid for p in self.members(title)] if title else [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, seconds: float = 20.0) -> None:
        """SIGTERM, then after a while SIGKILL for the whole session; an error if even then a process is left."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        for process in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait(10)
        eventually(lambda: not self.members(), 10, 'no process is left')
        self.output.close()


class Checked(NamedTuple):
    """What a run of the client left."""

    status: int
    record: dict[str, Any]
    view: str

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks of the body, where the run had --capture."""
        body = b''.join(base64.b64decode(line['base64']) if 'base64' in line else line['text'].encode()
                        for line in map(json.loads, self.record['capture'].splitlines()) if 'text' in line or 'base64' in line)
        return [json.loads(data) for data in re.findall(r'^data: ?(\{.*)$', body.decode(), re.MULTILINE)]


class Running:
    """The client as a command, streaming; ``finish`` waits for its end."""

    unfinished: ClassVar[list[Running]] = []

    def __init__(self, url: str, *args: object, model: str = 'tiny', key: str = KEY, capture: bool = False,
                 env: dict[str, str] | None = None) -> None:
        self.key = key
        self.folder = tempfile.TemporaryDirectory()
        self.said = Path(self.folder.name, 'stderr')
        name, _, value = MARK.partition('=')
        environment = {k: v for k, v in os.environ.items() if k not in ('NO_COLOR', 'SSLKEYLOGFILE')}
        words = [sys.executable, CLIENT, '--url', url, '--model', model, '--output', f'{self.folder.name}/record', '--show-text',
                 *(('--capture', f'{self.folder.name}/capture') if capture else ()), *map(str, args)]
        with self.said.open('wb') as stderr:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
                                            env={**environment, 'MODEL_API_KEY': key, name: value, **(env or {})})
        self.unfinished.append(self)

    def await_text(self, text: str = '') -> None:
        """Return once this text has come, or any."""
        eventually(lambda: '| ' + text in self.said.read_text(), 120, 'text')

    @classmethod
    def abandon(cls) -> None:
        """What a test that failed has left."""
        for running in cls.unfinished[:]:
            running.process.kill()
            running.process.communicate()
            running.folder.cleanup()
            cls.unfinished.remove(running)

    def finish(self, seconds: float = 260) -> Checked:
        self.unfinished.remove(self)
        with self.folder:
            stdout, _ = self.process.communicate(timeout=seconds)
            view = self.said.read_text()
            kept = Path(self.folder.name, 'record').read_text()
            record = json.loads(kept)
            capture = Path(self.folder.name, 'capture')
            record['capture'] = capture.read_text() if capture.exists() else ''
        summary = json.loads(stdout)
        assert self.key not in stdout.decode() + view + kept + record['capture'], 'the key leaked'
        assert (summary['ok'], summary['outcome']) == (record['ok'], record['outcome']), summary
        return Checked(self.process.returncode, record, view)


def check(url: str, *args: object, **kwargs: Any) -> Checked:
    return Running(url, *args, **kwargs).finish()


class InteropTest(unittest.TestCase):
    """What the classes below share."""

    def tearDown(self) -> None:
        Running.abandon()

    def conclude(self, checked: Checked, outcome: str, **members: Any) -> dict[str, Any]:
        """The run came to this outcome, with these members of the record; returns the record."""
        record = checked.record
        shown = json.dumps({k: v for k, v in record.items() if k not in ('event_gaps_ms', 'capture')}, ensure_ascii=False)
        self.assertEqual(record['outcome'], outcome, shown)
        self.assertIsNone(invalid(record, SCHEMA))
        self.assertEqual(checked.status, 0 if outcome == 'passed' else 1, checked.view)
        self.assertFalse(record['synthetic'] and type(self).__name__ in ('VllmTest', 'LlamaTest', 'TransformersTest'))
        for name, value in members.items():
            self.assertEqual(record[name], value, shown)
        if record['failure'] and FAILURES[outcome].boundary:
            self.assertEqual(record['failure']['boundary'], FAILURES[outcome].boundary, shown)
        return record

    def served(self, started: Program) -> Program:
        """Stopped at the end of this test."""
        self.addCleanup(started.stop)
        return started


def served_by_class(case: type[unittest.TestCase], started: Program) -> Program:
    """Stopped at the end of the class."""
    case.addClassCleanup(started.stop)
    return started


def url_of(port: int, prefix: str = '', scheme: str = 'http', host: str = '127.0.0.1') -> str:
    return f'{scheme}://{host}:{port}{prefix}/v1/chat/completions'


def extra(**members: Any) -> tuple[str, str]:
    return '--extra-body', json.dumps(members)


def fixture_program(*args: object) -> tuple[Program, int]:
    """A fixture in a process of its own, and its port."""
    started = Program(sys.executable, FIXTURE, '--port', 0, *args)
    found = started.until(lambda: re.search(r'127\.0\.0\.1:(\d+)\n', started.log()), 20, 'the fixture listens')
    return started, int(found[1])


def answer_of(name: str) -> Any:
    """A constant of .ci/tiny_model.py, which itself can only be imported where torch is."""
    for node in ast.parse((ROOT / '.ci' / 'tiny_model.py').read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


# --- model servers ------------------------------------------------------------------------------------------------------


class ModelServerTest(InteropTest):
    """What any server of the tiny model must come to. ``direct`` are arguments with which it answers without reasoning."""

    url: ClassVar[str]
    direct: ClassVar[tuple[str, ...]] = ()
    model: ClassVar[str] = 'tiny'
    patience: ClassVar[tuple[str, ...]] = ()

    def ask(self, *args: object, **kwargs: Any) -> Checked:
        return check(self.url, *self.patience, *args, **{'model': self.model, **kwargs})

    def endless(self, *args: object) -> Running:
        """A run that streams until something ends it."""
        body = json.loads(self.direct[1]) if self.direct else {}
        return Running(self.url, '--max-tokens', 8000, '--deadline', 240, *self.patience, *extra(ignore_eos=True, **body), *args,
                       model=self.model)


@needs(vLLM=(VLLM / 'vllm').exists(), model=MODEL.exists())
class VllmTest(ModelServerTest):
    """A real vLLM on the CPU. Three tests end theirs: the two for the later ones start while the first is asked."""

    direct = extra(chat_template_kwargs={'enable_thinking': False})
    patience = ('--idle', '100', '--deadline', '240')  # it was seen silent for half a minute on a machine of two cores
    waiting: ClassVar[list[tuple[Program, int]]] = []
    current: ClassVar[tuple[Program, int] | None] = None

    @classmethod
    def start(cls) -> None:
        """Start one more."""
        port = free_port()
        environment = {
            'HF_HUB_OFFLINE': '1', 'TRANSFORMERS_OFFLINE': '1', 'VLLM_NO_USAGE_STATS': '1', 'DO_NOT_TRACK': '1',
            'VLLM_CPU_KVCACHE_SPACE': '1', 'OMP_NUM_THREADS': '1', 'PATH': f'{VLLM}:{os.environ["PATH"]}'}
        started = Program(
            VLLM / 'vllm', 'serve', MODEL / 'hf', '--host', '127.0.0.1', '--port', port, '--api-key', KEY, '--served-model-name', 'tiny',
            '--max-model-len', 8192, '--dtype', 'float32', '--enforce-eager', '--reasoning-parser', 'qwen3',
            '--sse-keep-alive-interval', 1, '--enable-log-requests', '--enable-scale-out', env=environment)
        cls.waiting.append((served_by_class(cls, started), port))

    @classmethod
    def setUpClass(cls) -> None:
        cls.start()
        cls.take_next()
        VERSIONS['vLLM'] = json.loads(fetched(cls.server()[1], '/version')[1])['version'] + ' (GET /version)'
        cls.start()
        cls.start()

    @classmethod
    def take_next(cls) -> None:
        """Wait for the next one, which then is ``server``."""
        started, port = cls.current = cls.waiting.pop(0)
        started.until(lambda: answers(port), 300, 'vLLM is ready')
        cls.url = url_of(port)

    @classmethod
    def server(cls) -> tuple[Program, int]:
        assert cls.current
        return cls.current

    def setUp(self) -> None:
        if not self.current:
            self.take_next()

    def last_run(self, *args: object) -> tuple[Running, Program]:
        """A run in mid-stream and its server, which no later test uses."""
        running = self.endless(*args)
        running.await_text()
        started, _ = self.server()
        self.addCleanup(started.stop)
        type(self).current = None
        return running, started

    def test_a_whole_answer(self) -> None:
        record = self.conclude(self.ask('--run-id', 'interop-1', *self.direct), 'passed', text='READY', finish_reason='stop', done=True,
                               completion_tokens=2, warnings=[])
        self.assertEqual(record['response']['id'], 'chatcmpl-interop-1')
        self.assertIs(record['response']['id_carries_run_id'], True)
        self.assertEqual(record['response']['headers']['server'], 'uvicorn')
        self.assertEqual(record['delivery']['body_end'], 'last_chunk')
        self.assertIn('interop-1', self.server()[0].log())

    def test_a_length_and_text_in_the_finish_chunk(self) -> None:
        checked = self.ask('--prompt', 'Colours, many times.', '--max-tokens', 6, *self.direct, capture=True)
        self.conclude(checked, 'finish_not_accepted', text='red 0 blue 0 green', finish_reason='length', done=True, completion_tokens=6)
        last = [c['choices'][0] for c in checked.chunks if c['choices']][-1]
        self.assertEqual((last['finish_reason'], bool(last['delta'].get('content'))), ('length', True), last)
        self.conclude(self.ask('--prompt', 'Colours, many times.', '--max-tokens', 6, '--accept-finish', 'length', *self.direct), 'passed')

    def test_hostile_characters_arrive_as_they_are(self) -> None:
        self.conclude(self.ask('--prompt', 'Hostile characters.', '--max-tokens', 400, *self.direct), 'passed',
                      text=answer_of('HOSTILE'), warnings=[])

    def test_a_stop_string(self) -> None:
        body = extra(stop='3', chat_template_kwargs={'enable_thinking': False})
        self.conclude(self.ask('--prompt', 'Colours, many times.', '--max-tokens', 400, *body), 'passed', finish_reason='stop')

    def test_reasoning_is_no_answer(self) -> None:
        record = self.conclude(self.ask('--prompt', 'Think first.'), 'passed', text='\n\nREADY')
        self.assertEqual(record['delivery']['reasoning_chars'], len('\nWhat is asked is one word.\n'))
        record = self.conclude(self.ask(), 'no_visible_text', text='', finish_reason='stop', done=True)
        self.assertGreater(record['delivery']['reasoning_chars'], 0)

    def test_nothing_and_white_space_are_no_answer(self) -> None:
        self.conclude(self.ask('--prompt', 'Say nothing.', *self.direct), 'no_visible_text', text='')
        self.conclude(self.ask('--prompt', 'Only white space.', *self.direct), 'no_visible_text', text=' \n  \n')

    def test_an_unknown_model(self) -> None:
        record = self.conclude(self.ask(model='nope'), 'http_status')
        self.assertEqual((record['response']['status'], 'The model `nope` does not exist.' in record['error']), (404, True), record['error'])

    def test_a_wrong_key(self) -> None:
        record = self.conclude(self.ask(key='another-key-9876543210'), 'http_status')
        self.assertEqual((record['response']['status'], 'Unauthorized' in record['error']), (401, True))

    def test_a_prompt_that_is_too_long(self) -> None:
        record = self.conclude(self.ask('--prompt', 'red ' * 9000), 'http_status')
        self.assertEqual((record['response']['status'], 'maximum context length' in record['error']), (400, True), record['error'])

    def test_a_bad_sampling_value_is_an_error_event_under_status_200(self) -> None:
        record = self.conclude(self.ask(*extra(logprobs=True, top_logprobs=100000)), 'server_error', text='')
        self.assertEqual(record['response']['status'], 200)
        self.assertEqual((record['response']['server_error']['code'], record['failure']['event']), ('400', 1), record['response'])

    def test_a_trailing_slash(self) -> None:
        record = self.conclude(check(self.url + '/'), 'redirect')
        self.assertIn(self.url, record['error'])

    def test_keep_alive_comments_while_the_engine_stalls(self) -> None:
        started, _ = self.server()
        started.kill(signal.SIGSTOP, 'VLLM::')
        try:
            waiting = Running(self.url, '--idle', 5, *self.direct)
            stalled = check(self.url, '--idle', 30, '--stall', 8, *self.direct)
        finally:
            started.kill(signal.SIGCONT, 'VLLM::')
        record = self.conclude(stalled, 'stall_timeout')
        self.assertGreaterEqual(record['delivery']['comments'], 2)
        record = self.conclude(waiting.finish(), 'passed', text='READY')
        self.assertGreaterEqual(record['delivery']['comments'], 2)
        self.assertGreater(record['first_text_ms'], 5000)

    def test_the_deadline_in_mid_stream_aborts_the_request(self) -> None:
        for seconds in (3, 8, 20, 60):  # a machine that stalls may bring no text before the first of them
            name = f'cut-short-{seconds}'
            record = self.conclude(self.endless('--run-id', name, '--deadline', seconds, '--idle', seconds).finish(), 'deadline', done=False)
            if record['text']:
                break
        self.assertTrue(record['text'])
        self.server()[0].until(lambda: re.search(rf'chatcmpl-{name}.*abort|abort.*chatcmpl-{name}', self.server()[0].log(), re.IGNORECASE),
                               60, 'the log shows the request aborted')

    def test_an_abort(self) -> None:
        running = self.endless('--run-id', 'aborted')
        running.await_text()
        connection = http.client.HTTPConnection('127.0.0.1', self.server()[1], timeout=60)
        connection.request('POST', '/inference/v1/abort_requests', json.dumps({'request_ids': ['chatcmpl-aborted']}),
                           {'Authorization': f'Bearer {KEY}', 'Content-Type': 'application/json'})
        self.assertEqual(connection.getresponse().status, 200)
        connection.close()
        record = self.conclude(running.finish(), 'finish_not_accepted', finish_reason='abort', done=True)
        self.assertTrue(record['text'])

    def test_sixteen_at_once(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            ran = list(pool.map(lambda _: self.ask('--idle', 60, *self.direct), range(16)))
        for checked in ran:
            self.conclude(checked, 'passed', text='READY')
        self.assertEqual(len({checked.record['request']['run_id'] for checked in ran}), 16)

    def test_when_the_engine_is_killed(self) -> None:
        # Most often told at once by an error event; seldom the server is long to find out, with or without keep-alive comments
        running, started = self.last_run('--idle', 60, '--stall', 20)
        started.kill(signal.SIGKILL, 'VLLM::EngineCore')
        checked = running.finish()
        record = self.conclude(checked, checked.record['outcome'], done=False)
        self.assertIn(record['outcome'], ('server_error', 'stall_timeout', 'idle_timeout'))
        if record['outcome'] == 'server_error':
            self.assertEqual(record['response']['server_error']['code'], '500', record['response'])
        self.assertTrue(record['text'])
        VERSIONS['seen: vLLM, its engine killed'] = record['outcome']

    def test_when_the_api_server_is_killed(self) -> None:
        running, started = self.last_run()
        started.kill(signal.SIGKILL)
        record = self.conclude(running.finish(), 'body_cut', done=False, finish_reason=None)
        self.assertIn('with the last chunk missing', record['error'])
        self.assertTrue(record['text'])

    def test_when_it_is_told_to_stop(self) -> None:
        # It gives its engine no time. Whether the engine can still say abort, is found dead, or is waited for with keep-alive
        # comments and without end, is a race; each is a failure of its own name
        running, started = self.last_run('--idle', 60, '--stall', 20)
        started.kill(signal.SIGTERM)
        checked = running.finish()
        record = self.conclude(checked, checked.record['outcome'])
        self.assertIn(record['outcome'], ('finish_not_accepted', 'server_error', 'stall_timeout', 'idle_timeout'))
        VERSIONS['seen: vLLM, told to stop'] = f'{record["outcome"]} {record["finish_reason"] or ""}'
        if record['outcome'] == 'finish_not_accepted':
            self.assertEqual((record['finish_reason'] in ('abort', 'length'), record['done']), (True, True))
        elif record['outcome'] == 'server_error':
            self.assertEqual(record['response']['server_error']['code'], '500')
        elif record['outcome'] == 'stall_timeout':
            self.assertGreater(record['delivery']['comments'], 2)
        self.assertTrue(record['text'])


@needs(llama_server=LLAMA.exists(), model=MODEL.exists())
class LlamaTest(ModelServerTest):
    """A real llama-server with one slot, so that a second request waits."""

    @staticmethod
    def start(*args: object) -> tuple[Program, int]:
        port = free_port()
        started = Program(LLAMA, *args, '-m', MODEL / 'tiny.gguf', '--host', '127.0.0.1', '--port', port, '--api-key', KEY, '--alias', 'tiny',
                          '-c', 8192, '-np', 1, '-t', 1, '--jinja')
        started.until(lambda: answers(port), 30, 'llama-server is ready')
        return started, port

    @classmethod
    def setUpClass(cls) -> None:
        version = subprocess.run([LLAMA, '--version'], capture_output=True, text=True, timeout=30, check=True)
        VERSIONS['llama-server'] = (version.stdout + version.stderr).splitlines()[0].removeprefix('version: ') + ' (--version)'
        started, port = cls.start()
        served_by_class(cls, started)
        cls.url = url_of(port)

    def test_a_whole_answer(self) -> None:
        record = self.conclude(self.ask('--run-id', 'interop-1'), 'passed', text='READY', finish_reason='stop', done=True,
                               completion_tokens=2, warnings=[])
        self.assertIs(record['response']['id_carries_run_id'], False)
        self.assertEqual(record['response']['headers']['server'], 'llama.cpp')

    def test_a_length(self) -> None:
        self.conclude(self.ask('--prompt', 'Colours, many times.', '--max-tokens', 6), 'finish_not_accepted', text='red 0 blue 0 green',
                      finish_reason='length', done=True)

    def test_hostile_characters_arrive_as_they_are(self) -> None:
        self.conclude(self.ask('--prompt', 'Hostile characters.', '--max-tokens', 400), 'passed', text=answer_of('HOSTILE'), warnings=[])

    def test_reasoning_is_no_answer(self) -> None:
        record = self.conclude(self.ask('--prompt', 'Think first.'), 'passed', text='READY')
        self.assertEqual(record['delivery']['reasoning_chars'], len('What is asked is one word.\n'))
        record = self.conclude(self.ask('--prompt', 'Think first.', '--max-tokens', 5), 'finish_not_accepted', text='')
        self.assertGreater(record['delivery']['reasoning_chars'], 0)

    def test_nothing_and_white_space_are_no_answer(self) -> None:
        self.conclude(self.ask('--prompt', 'Say nothing.'), 'no_visible_text', text='')
        self.conclude(self.ask('--prompt', 'Only white space.'), 'no_visible_text', text='')  # its parser trims

    def test_an_unknown_model_answers_all_the_same(self) -> None:
        record = self.conclude(self.ask(model='nope'), 'passed')
        self.assertEqual([w['code'] for w in record['warnings']], ['model_differs'])
        self.conclude(self.ask('--fail-on', 'model_differs', model='nope'), 'warning_refused')

    def test_a_wrong_key(self) -> None:
        record = self.conclude(self.ask(key='another-key-9876543210'), 'http_status')
        self.assertEqual((record['response']['status'], 'Invalid API Key' in record['error']), (401, True), record['error'])

    def test_a_prompt_that_is_too_long(self) -> None:
        record = self.conclude(self.ask('--prompt', 'red ' * 9000), 'http_status')
        self.assertEqual((record['response']['status'], 'context size' in record['error']), (400, True), record['error'])

    def test_a_bad_sampling_value(self) -> None:
        record = self.conclude(self.ask(*extra(temperature='hot')), 'http_status')
        self.assertEqual((record['response']['status'], 'type must be number' in record['error']), (400, True), record['error'])

    def test_the_head_comes_only_with_the_first_token(self) -> None:
        first = self.endless('--max-tokens', 6000)
        first.await_text()
        record = self.conclude(self.ask('--idle', 60), 'passed', text='READY')
        marks = record['marks_ms']
        self.conclude(first.finish(), 'finish_not_accepted', finish_reason='length')
        self.assertGreater(marks['head'] - marks['sent'], 500)
        self.assertLess(marks['first_text'] - marks['head'], 2000)

    def test_the_deadline_in_mid_stream_frees_the_slot(self) -> None:
        record = self.conclude(self.endless('--max-tokens', 8000, '--deadline', 1).finish(), 'deadline', done=False)
        self.assertTrue(record['text'])
        self.assertLess(self.conclude(self.ask(), 'passed')['duration_ms'], 8000)

    def test_sixteen_at_once(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for checked in pool.map(lambda _: self.ask('--idle', 60), range(16)):
                self.conclude(checked, 'passed', text='READY')

    def ended_by(self, number: signal.Signals, *args: object, options: tuple[object, ...] = ()) -> Checked:
        started, port = self.start(*options)
        self.served(started)
        running = Running(url_of(port), '--max-tokens', 8000, *extra(ignore_eos=True), *args)
        running.await_text()
        started.kill(number)
        return running.finish()

    def test_when_it_is_killed(self) -> None:
        record = self.conclude(self.ended_by(signal.SIGKILL), 'body_cut', done=False)
        self.assertIn('with the last chunk missing', record['error'])
        self.assertTrue(record['text'])

    def test_when_it_is_told_to_stop_our_clocks_end_its_silence(self) -> None:
        record = self.conclude(self.ended_by(signal.SIGTERM, '--idle', 3), 'idle_timeout', done=False)
        self.assertTrue(record['text'])
        self.assertLess(record['duration_ms'], 8000)

    def test_when_it_is_told_to_stop_and_keeps_alive(self) -> None:
        # Whether it finds the end of its engine with a comment, or sends comments without end, is a race
        checked = self.ended_by(signal.SIGTERM, '--stall', 5, options=('--sse-ping-interval', 1))
        record = self.conclude(checked, checked.record['outcome'], done=False)
        self.assertIn(record['outcome'], ('body_cut', 'stall_timeout'))
        self.assertGreaterEqual(record['delivery']['comments'], 1)
        self.assertTrue(record['text'])
        VERSIONS['seen: llama-server, told to stop with keep-alive'] = record['outcome']


@needs(transformers=(VLLM / 'transformers').exists(), model=MODEL.exists())
class TransformersTest(ModelServerTest):
    """``transformers serve``, which never sends [DONE]."""

    model = str(MODEL / 'hf')

    @classmethod
    def setUpClass(cls) -> None:
        ran = subprocess.run([VLLM / 'transformers', 'version'], capture_output=True, text=True, timeout=120, check=True)
        VERSIONS['transformers serve'] = ran.stdout.split()[-1] + ' (transformers version)'
        port = free_port()
        started = served_by_class(cls, Program(
            VLLM / 'transformers', 'serve', cls.model, '--host', '127.0.0.1', '--port', port, '--device', 'cpu',
            env={'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'}))
        started.until(lambda: answers(port, '/openapi.json'), 120, 'transformers serve is ready')
        cls.url = url_of(port)

    def test_no_done_fails_with_a_hint(self) -> None:
        checked = self.ask('--idle', 60)
        self.conclude(checked, 'no_done', text='READY', finish_reason='stop', done=False)
        self.assertIn('--tolerate no_done accepts a finish and a clean end', checked.view)

    def test_no_done_can_be_tolerated(self) -> None:
        record = self.conclude(self.ask('--idle', 60, '--tolerate', 'no_done'), 'passed', text='READY', finish_reason='stop', done=False)
        self.assertIn('no_done', [w['code'] for w in record['warnings']])
        self.assertEqual(record['request']['policy']['tolerate'], ['no_done'])

    def test_hostile_characters_arrive_as_they_are(self) -> None:
        self.conclude(self.ask('--idle', 60, '--prompt', 'Hostile characters.', '--max-tokens', 400, '--tolerate', 'no_done'), 'passed',
                      text=answer_of('HOSTILE'))


# --- nginx --------------------------------------------------------------------------------------------------------------

NGINX = """
daemon off;
pid {folder}/pid;
error_log stderr;
{user}
worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  gzip_types text/event-stream; gzip_min_length 0;
  proxy_http_version 1.1;
  proxy_set_header Connection "";
  server {{
    listen 127.0.0.1:{port};
    listen 127.0.0.1:{tls} ssl;
    ssl_certificate {folder}/chain.pem; ssl_certificate_key {folder}/key.pem;
    location /off/ {{ proxy_pass http://127.0.0.1:{fixture}/; proxy_buffering off; }}
    location /on/ {{ proxy_pass http://127.0.0.1:{fixture}/; }}
    location /on-1.0/ {{ proxy_pass http://127.0.0.1:{fixture}/; proxy_http_version 1.0; proxy_set_header Connection close; }}
    location /off-1.0/ {{ proxy_pass http://127.0.0.1:{fixture}/; proxy_http_version 1.0; proxy_buffering off; }}
    location /unframed/ {{ proxy_pass http://127.0.0.1:{fixture}/; proxy_buffering off; chunked_transfer_encoding off; }}
    location /impatient/ {{ proxy_pass http://127.0.0.1:{fixture}/; proxy_buffering off; proxy_read_timeout 1s; }}
    location /impatient-on/ {{ proxy_pass http://127.0.0.1:{fixture}/; proxy_read_timeout 1s; }}
    location /packing/ {{ proxy_pass http://127.0.0.1:{port}/packed/; proxy_set_header Accept-Encoding gzip; }}
    location /packed/ {{ proxy_pass http://127.0.0.1:{fixture}/; gzip on; }}
    location /gzip/ {{ proxy_pass http://127.0.0.1:{fixture}/; gzip on; }}
    location /nobody/ {{ proxy_pass http://127.0.0.1:{nobody}/; }}
    location /llama/ {{ proxy_pass http://127.0.0.1:{llama}/; proxy_buffering off; }}
    location /llama-on/ {{ proxy_pass http://127.0.0.1:{llama}/; proxy_buffers 64 64k; proxy_busy_buffers_size 3m; }}
    location /llama-1.0/ {{ proxy_pass http://127.0.0.1:{llama}/; proxy_http_version 1.0; proxy_buffers 64 64k;
      proxy_busy_buffers_size 3m; }}
    location /llama-unframed/ {{ proxy_pass http://127.0.0.1:{llama}/; proxy_buffering off; chunked_transfer_encoding off; }}
  }}
}}
"""
HELD = ('the text was held back and came at once: look at the application server, compression (gzip), '
        "the proxy's buffering (proxy_buffering), then the reader")


@needs(nginx=program('nginx') is not None, trustme=package('trustme'), llama_server=LLAMA.exists(), model=MODEL.exists())
class NginxTest(InteropTest):
    """nginx in front of the fixture and of llama-server."""

    port: ClassVar[int]
    tls: ClassVar[int]
    llama_port: ClassVar[int]
    ca: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        import trustme

        folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, folder)
        authority = trustme.CA()
        certificate = authority.issue_cert('gpu-host.internal')
        cls.ca = f'{folder}/ca.pem'
        authority.cert_pem.write_to_path(cls.ca)
        certificate.private_key_and_cert_chain_pem.write_to_path(f'{folder}/chain.pem')
        certificate.private_key_pem.write_to_path(f'{folder}/key.pem')
        fixture, fixture_port = fixture_program()
        served_by_class(cls, fixture)
        cls.llama_port = free_port()
        cls.port, cls.tls = free_port(), free_port()
        Path(folder, 'nginx.conf').write_text(NGINX.format(
            folder=folder, port=cls.port, tls=cls.tls, fixture=fixture_port, llama=cls.llama_port, nobody=free_port(),
            user=f'user {getpass.getuser()};' if os.getuid() == 0 else ''))
        started = served_by_class(cls, Program(program('nginx'), '-c', f'{folder}/nginx.conf', '-e', 'stderr'))
        started.until(lambda: answers(cls.port, '/off/v1/models'), 20, 'nginx is ready')
        VERSIONS['nginx'] = cls.through('off', 'ok').record['response']['headers']['server'] + ' (its Server field)'

    @classmethod
    def through(cls, location: str, mode: str, *args: object) -> Checked:
        return check(url_of(cls.port, '/' + location), *args, model=f'mode:{mode}')

    def test_without_buffering_events_arrive_as_they_are_sent(self) -> None:
        for mode in ('steady-text', 'steady-until-close'):
            with self.subTest(mode=mode):
                record = self.conclude(self.through('off', mode), 'passed', content_events=12)
                self.assertIs(record['delivery']['buffered'], False)
                self.assertGreaterEqual(record['delivery']['content_reads'], 8)
                self.assertGreater(min(sorted(record['event_gaps_ms'])[4:]), 50)

    def test_with_buffering_a_pass_stays_a_pass_and_the_holders_are_named(self) -> None:
        checked = self.through('on', 'steady-until-close')
        record = self.conclude(checked, 'passed', content_events=12)
        self.assertIs(record['delivery']['buffered'], True)
        self.assertIn(HELD, checked.view)

    def test_buffering_spares_a_chunked_answer(self) -> None:  # nginx passes each chunk on as it is decoded
        self.assertIs(self.conclude(self.through('on', 'steady-text'), 'passed')['delivery']['buffered'], False)

    def test_gzip_in_spite_of_what_was_asked_for_is_refused(self) -> None:
        record = self.conclude(self.through('packing', 'ok'), 'encoded_body')
        self.assertIn('Content-Encoding "gzip"', record['error'])
        self.conclude(self.through('gzip', 'ok'), 'passed')  # nginx heeds Accept-Encoding: identity

    def test_tls_with_a_private_authority(self) -> None:
        at = url_of(self.tls, '/off', 'https', 'gpu-host.internal')
        dial = ('--connect-to', f'127.0.0.1:{self.tls}')
        record = self.conclude(check(at, '--ca-file', self.ca, *dial, model='mode:ok'), 'passed')
        self.assertIn(record['response']['tls_version'], ('TLSv1.2', 'TLSv1.3'))
        self.assertEqual(record['request']['path_taken'], 'connect-to')
        self.conclude(check(at, *dial, model='mode:ok'), 'tls_untrusted')
        self.conclude(check(url_of(self.tls, '/off', 'https'), '--ca-file', self.ca, model='mode:ok'), 'tls_name')
        record = self.conclude(check(url_of(self.tls, '/off'), model='mode:ok'), 'http_status')
        self.assertIn('400 The plain HTTP request was sent to HTTPS port', record['error'])

    def test_an_upstream_that_ends_in_mid_stream(self) -> None:
        for location in ('off', 'on', 'off-1.0', 'on-1.0'):
            for mode, outcome, words in (
                    ('cut-in-chunk', 'body_cut', 'with the last chunk missing'), ('reset-midway', 'body_cut', 'with the last chunk missing'),
                    ('length-too-long', 'body_cut', 'of 1228 body bytes'),
                    ('close-midway', 'no_done', 'by its last chunk'),  # a close is an end for nginx, which then makes it a clean one
                    ('done-then-cut', 'passed', '')):
                with self.subTest(location=location, mode=mode):
                    self.assertIn(words, self.conclude(self.through(location, mode), outcome, text='READY ✓')['error'] or '')
        for mode in ('cut-in-chunk', 'reset-midway', 'close-midway'):  # without chunks only [DONE] tells
            with self.subTest(location='unframed', mode=mode):
                record = self.conclude(self.through('unframed', mode), 'no_done', text='READY ✓')
                self.assertIn('by closing', record['error'])

    def test_a_killed_llama_server_behind_it(self) -> None:
        for location, outcome, words in (('llama', 'body_cut', 'with the last chunk missing'), ('llama-unframed', 'no_done', 'by closing'),
                                         ('llama-on', 'body_cut', 'with the last chunk missing')):
            with self.subTest(location=location):
                started = self.llama()
                running = Running(url_of(self.port, '/' + location), '--max-tokens', 8000, *extra(ignore_eos=True))
                running.await_text()
                started.kill(signal.SIGKILL)
                record = self.conclude(running.finish(), outcome, done=False)
                self.assertIn(words, record['error'])
                started.stop()

    def llama(self) -> Program:
        started = self.served(Program(LLAMA, '-m', MODEL / 'tiny.gguf', '--host', '127.0.0.1', '--port', self.llama_port, '--api-key', KEY,
                                      '--alias', 'tiny', '-c', 8192, '-np', 1, '-t', 1, '--jinja'))
        started.until(lambda: answers(self.llama_port), 30, 'llama-server is ready')
        return started

    def test_llama_server_through_it(self) -> None:
        self.llama()
        long = ('--max-tokens', 4000, '--accept-finish', 'length', *extra(ignore_eos=True))
        for location in ('llama', 'llama-on', 'llama-1.0', 'llama-unframed'):  # it sends chunks even to HTTP/1.0
            with self.subTest(location=location):
                record = self.conclude(check(url_of(self.port, '/' + location), *long), 'passed')
                self.assertIs(record['delivery']['buffered'], False, record['delivery'])
                self.assertEqual(record['delivery']['body_end'], 'closed' if location == 'llama-unframed' else 'last_chunk')

    def test_a_read_timeout_shorter_than_the_stall(self) -> None:
        for location in ('impatient', 'impatient-on'):
            record = self.conclude(self.through(location, 'stall-after-text', '--idle', 8), 'body_cut', text='READY ✓')
            self.assertIn('with the last chunk missing', record['error'])
        record = self.conclude(self.through('impatient', 'stall-before-head', '--idle', 8), 'http_status')
        self.assertEqual((record['response']['status'], '504 Gateway Time-out' in record['error']), (504, True), record['error'])
        self.assertNotIn('<', record['error'])

    def test_nothing_behind_it(self) -> None:
        for location, mode in (('nobody', 'ok'), ('off', 'closed-at-once')):
            record = self.conclude(self.through(location, mode), 'http_status')
            self.assertEqual(record['response']['status'], 502)
            self.assertIn('"502 Bad Gateway"', record['error'])
            self.assertIn('502 and 504 what stands behind the proxy', record['failure']['hint'])

    def test_http_1_0_to_the_upstream(self) -> None:
        for mode in ('ok', 'http-1-0', 'until-close', 'content-length'):
            self.conclude(self.through('off-1.0', mode), 'passed', text='READY ✓')


# --- OpenSSH ------------------------------------------------------------------------------------------------------------

SSHD = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication {password}
PermitRootLogin yes
AllowTcpForwarding {forward}
"""


@needs(ssh=program('ssh') is not None, sshd=program('sshd') is not None, trustme=package('trustme'))
class SshHost(InteropTest):
    """A real sshd on loopback with throw-away keys, in front of a fixture."""

    folder: ClassVar[str]
    ca: ClassVar[str]
    url: ClassVar[str]
    sshd: ClassVar[Program]
    port: ClassVar[int]
    fixture_port: ClassVar[int]
    secure_port: ClassVar[int]

    @classmethod
    def setUpClass(cls) -> None:
        import trustme

        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        for name in ('host', 'user', 'stranger'):
            subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', f'{cls.folder}/{name}'], check=True, timeout=30)
        shutil.copy(f'{cls.folder}/user.pub', f'{cls.folder}/authorized')
        Path('/run/sshd').mkdir(exist_ok=True) if os.getuid() == 0 else None  # where Debian's sshd separates privileges
        cls.sshd, cls.port = cls.sshd_at('yes')
        fixture, cls.fixture_port = fixture_program()
        served_by_class(cls, fixture)
        cls.url = url_of(cls.fixture_port)
        authority = trustme.CA()
        cls.ca = f'{cls.folder}/ca.pem'
        authority.cert_pem.write_to_path(cls.ca)
        authority.issue_cert('gpu-host.internal').private_key_and_cert_chain_pem.write_to_path(f'{cls.folder}/chain.pem')
        secure, cls.secure_port = fixture_program('--certificate', f'{cls.folder}/chain.pem')
        served_by_class(cls, secure)
        with socket.create_connection(('127.0.0.1', cls.port), 10) as connection:
            VERSIONS['OpenSSH'] = connection.recv(200).decode().strip() + ' (its greeting)'

    @classmethod
    def sshd_at(cls, forward: str, password: str = 'no') -> tuple[Program, int]:
        port = free_port()
        config = Path(cls.folder, f'sshd_config.{port}')
        config.write_text(SSHD.format(port=port, folder=cls.folder, forward=forward, password=password))
        for key in ('host', 'stranger'):  # whichever is to be taken for the host's
            Path(cls.folder, f'known.{port}.{key}').write_text(f'[127.0.0.1]:{port} {Path(cls.folder, f"{key}.pub").read_text()}')
        started = served_by_class(cls, Program(program('sshd'), '-D', '-e', '-f', config))

        def listens() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), 1):
                return True
            return False

        started.until(listens, 20, 'sshd listens')
        return started, port

    def tearDown(self) -> None:
        super().tearDown()
        eventually(lambda: not marked(), 5, f'no process of a client is left: {marked()}')

    def options(self, identity: str = 'user', known: str | None = 'host', port: int | None = None) -> list[str]:
        """To reach this sshd with one of the keys, of which ``known`` is taken for the host's."""
        port = port or self.port
        settings = (f'IdentityFile={self.folder}/{identity}', 'IdentitiesOnly=yes', f'UserKnownHostsFile={self.folder}/known.{port}.{known}',
                    'GlobalKnownHostsFile=/dev/null', 'StrictHostKeyChecking=yes')
        return ['--ssh', f'127.0.0.1:{port}', *(word for s in settings for word in ('--ssh-option', s))]

    def configured(self, *settings: str) -> dict[str, str]:
        """An environment in which ssh has a configuration of these lines."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        Path(folder, 'config').write_text(''.join(f'{line}\n' for line in settings))
        Path(folder, 'ssh').write_text(f'#!/bin/sh\nexec {program("ssh")} -F {folder}/config "$@"\n')
        Path(folder, 'ssh').chmod(0o755)
        return {'PATH': f'{folder}:{os.environ["PATH"]}'}


class SshTest(SshHost):
    """``--ssh``, ``-L``, and the file run on the host."""

    def ask(self, mode: str, *args: object, url: str | None = None, **kwargs: Any) -> Checked:
        return check(url or self.url, *self.options(), *args, model=f'mode:{mode}', **kwargs)

    def test_through_the_standard_streams_of_ssh(self) -> None:
        record = self.conclude(self.ask('ok'), 'passed', text='READY ✓')
        self.assertEqual((record['request']['path_taken'], record['request']['ssh']), ('ssh', f'127.0.0.1:{self.port}'))
        self.assertEqual(record['request']['url'], self.url)
        marks = record['marks_ms']
        self.assertLess(marks['connected'], marks['sent'])
        self.assertLess(marks['sent'], marks['head'])
        self.assertIsNone(marks['resolved'])

    def test_the_verdict_is_the_same_as_without(self) -> None:
        modes = ('until-close', 'http-1-0', 'content-length', 'done-kept-open', 'byte-chunks', 'cut-in-chunk', 'close-midway', 'reset-midway',
                 'malformed', 'length', 'utf8-cut', 'closed-at-once', 'closed-in-fields', 'http-error', 'events-of-20000')
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for mode, checked in zip(modes, pool.map(self.ask, modes), strict=True):
                with self.subTest(mode=mode):
                    expected = fixture_server.MODES[mode].expect
                    if mode == 'reset-midway':  # sshd makes a close of it
                        expected = 'body_cut'
                    self.conclude(checked, expected, text=fixture_server.MODES[mode].text)

    def test_a_long_request(self) -> None:
        self.conclude(self.ask('ok', '--prompt', 'word ' * 10_000), 'passed')

    def test_https_behind_it(self) -> None:
        at = url_of(self.secure_port, '', 'https', 'gpu-host.internal')
        dial = ('--connect-to', f'127.0.0.1:{self.secure_port}', '--ca-file', self.ca)
        record = self.conclude(self.ask('ok', *dial, url=at), 'passed')
        self.assertEqual(record['request']['path_taken'], 'ssh')
        self.assertIsNotNone(record['response']['certificate_sha256'])
        self.conclude(self.ask('ok', *dial[2:], url=url_of(self.secure_port, '', 'https')), 'tls_name')

    def failed(self, checked: Checked, *words: str) -> None:
        record = self.conclude(checked, 'tunnel_failed')
        for word in words:
            self.assertIn(word, record['error'])
        self.assertIsNone(record['marks_ms']['head'])
        self.assertLess(record['duration_ms'], 8000)

    def test_a_failed_login(self) -> None:
        self.failed(check(self.url, *self.options('stranger')), 'Permission denied (publickey')

    def test_a_login_never_asks(self) -> None:
        _, port = self.sshd_at('yes', password='yes')
        asked = Path(self.folder, 'asked')
        Path(self.folder, 'askpass').write_text(f'#!/bin/sh\ntouch {asked}\n')
        Path(self.folder, 'askpass').chmod(0o755)
        env = {**self.configured('BatchMode no'), 'DISPLAY': ':9', 'SSH_ASKPASS': f'{self.folder}/askpass', 'SSH_ASKPASS_REQUIRE': 'force'}
        self.failed(check(self.url, *self.options('stranger', port=port), '--ssh-option', 'PreferredAuthentications=password', env=env),
                    'Permission denied')
        jump = ('--ssh-option', f'ProxyJump=127.0.0.1:{port}')  # whose host key is unknown to the ssh that goes there
        self.failed(check(self.url, *self.options(), *jump, env=env), 'Host key verification failed')
        self.assertFalse(asked.exists())

    def test_an_unknown_host_key(self) -> None:
        self.failed(check(self.url, *self.options(known=None)), 'Host key verification failed.')

    def test_a_host_key_that_changed(self) -> None:
        self.failed(check(self.url, *self.options(known='stranger')), 'Host key verification failed.')

    def test_a_refused_forward(self) -> None:
        _, port = self.sshd_at('no')
        self.failed(check(self.url, *self.options(port=port)), 'administratively prohibited')

    def test_nothing_listens_on_the_far_side(self) -> None:
        self.failed(check(url_of(free_port()), *self.options()), 'connect failed: Connection refused')

    def test_no_sshd_there(self) -> None:
        self.failed(check(self.url, *self.options(port=free_port())), 'Connection refused')

    def test_a_quiet_configuration_does_not_hide_the_reason(self) -> None:
        self.failed(check(self.url, *self.options('stranger'), env=self.configured('LogLevel QUIET')), 'Permission denied (publickey')

    def test_what_may_stand_in_a_configuration(self) -> None:
        for settings in (('PermitLocalCommand yes', 'LocalCommand echo hi'), ('RemoteCommand ls', 'RequestTTY force'), ('StdinNull yes',),
                         ('SessionType none',), (f'LocalForward 127.0.0.1:{free_port()} 127.0.0.1:9', 'VisualHostKey yes'), ('ControlMaster auto',
                         f'ControlPath {self.folder}/mux', 'ControlPersist yes'), ('ForwardAgent yes', 'Compression yes')):
            with self.subTest(settings=settings):
                self.conclude(self.ask('ok', env=self.configured(*settings)), 'passed', text='READY ✓')

    def sessions(self) -> list[int]:
        """The processes of sshd that serve a connection, each with its unprivileged half."""
        every = list(processes())
        served = [p.pid for p in every if p.parent == self.sshd.process.pid]
        return [*served, *(p.pid for p in every if p.parent in served)]

    def test_a_tunnel_cut_in_mid_stream(self) -> None:
        running = Running(self.url, *self.options(), '--idle', 20, model='mode:stall-after-text')
        running.await_text('READY ✓')
        self.assertTrue(self.sessions())
        for pid in self.sessions():
            os.kill(pid, signal.SIGKILL)
        record = self.conclude(running.finish(), 'tunnel_failed', text='READY ✓')
        self.assertRegex(record['error'], 'closed by remote host|Broken pipe|Connection reset')

    def test_ssh_itself_killed(self) -> None:
        running = Running(self.url, *self.options(), '--idle', 20, model='mode:stall-after-text')
        running.await_text('READY ✓')
        for process in processes():
            if process.parent == running.process.pid:
                os.kill(process.pid, signal.SIGKILL)
        record = self.conclude(running.finish(), 'tunnel_failed', text='READY ✓')
        self.assertIn('ssh ended and said nothing: signal 9', record['error'])

    def test_clocks_cover_the_tunnel(self) -> None:
        for flag, outcome in (('--idle', 'idle_timeout'), ('--deadline', 'deadline')):
            with self.subTest(flag=flag):
                record = self.conclude(self.ask('ok', '--ssh-option', 'ProxyCommand=sleep 60', flag, 1.5), outcome)
                self.assertEqual(record['failure']['boundary'], 'tunnel')
                self.assertIn('while opening the SSH tunnel', record['error'])
                self.assertLess(record['duration_ms'], 6000)
        record = self.conclude(self.ask('stall-after-text', '--idle', 2), 'idle_timeout', text='READY ✓')
        self.assertEqual(record['failure']['boundary'], 'protocol')

    def test_a_signal_ends_ssh_too(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number=number):
                running = Running(self.url, *self.options(), '--idle', 20, model='mode:stall-after-text')
                running.await_text()
                running.process.send_signal(number)
                checked = running.finish(10)
                self.assertEqual((checked.status, checked.record['outcome']), (128 + number, 'interrupted'))
                eventually(lambda: not marked(), 3, 'ssh is gone')

    def test_ssh_never_sees_the_key(self) -> None:
        spy = Path(self.folder, 'spy')
        spy.mkdir()
        Path(spy, 'ssh').write_text(f'#!/bin/sh\nenv > {spy}/seen\necho "$@" >> {spy}/seen\nexec {program("ssh")} "$@"\n')
        Path(spy, 'ssh').chmod(0o755)
        self.conclude(self.ask('ok', env={'PATH': f'{spy}:{os.environ["PATH"]}', 'ANOTHER': f'Bearer {KEY}'}), 'passed')
        seen = Path(spy, 'seen').read_text()
        self.assertIn('-W 127.0.0.1', seen)
        self.assertNotIn(KEY, seen)
        self.assertNotIn('MODEL_API_KEY', seen)
        self.assertNotIn(' -L', seen)

    def test_a_classic_tunnel(self) -> None:
        near, near_tls = free_port(), free_port()
        options = [word.replace('--ssh-option', '-o') for word in self.options()[2:]]
        started = self.served(Program('ssh', '-N', '-o', 'BatchMode=yes', '-L', f'127.0.0.1:{near}:127.0.0.1:{self.fixture_port}',
                                      '-L', f'127.0.0.1:{near_tls}:127.0.0.1:{self.secure_port}', '-p', self.port, *options, '127.0.0.1'))
        started.until(lambda: answers(near, '/v1/models'), 20, 'the tunnel is open')
        self.conclude(check(url_of(near), model='mode:ok'), 'passed')
        record = self.conclude(check(url_of(self.secure_port, '', 'https', 'gpu-host.internal'), '--ca-file', self.ca, '--connect-to',
                                     f'127.0.0.1:{near_tls}', model='mode:ok'), 'passed')
        self.assertEqual(record['request']['path_taken'], 'connect-to')

    def test_the_file_itself_run_on_the_host(self) -> None:
        options = [word.replace('--ssh-option', '-o') for word in self.options()[2:]]
        for mode, status in (('ok', 0), ('broken', 1)):
            with open(CLIENT, 'rb') as source:
                ran = subprocess.run(['ssh', '-o', 'BatchMode=yes', '-p', str(self.port), *options, '127.0.0.1', sys.executable, '-', '--url',
                                      self.url, '--model', f'mode:{mode}', '--output', '-'], stdin=source, capture_output=True, text=True,
                                     timeout=60, check=False)
            record = json.loads(ran.stdout)
            self.assertEqual((ran.returncode, record['outcome']), (status, fixture_server.MODES[mode].expect), ran.stderr)
            self.assertEqual(record['request']['path_taken'], 'direct')


# --- TLS ----------------------------------------------------------------------------------------------------------------


def abrupt(context: ssl.SSLContext, pieces: Sequence[bytes]) -> Callable[[socket.socket], None]:
    """A script for Raw: over TLS it answers a request with these, and closes without close_notify."""

    def script(connection: socket.socket) -> None:
        tls = context.wrap_socket(connection, server_side=True)
        read_request(tls)
        for piece in pieces:
            tls.sendall(piece)
        os.close(tls.detach())

    return script


@needs(trustme=package('trustme'), openssl=program('openssl') is not None)
class TlsTest(InteropTest):
    """Certificates and protocol versions of every kind, and ends without close_notify."""

    folder: ClassVar[str]
    ca: ClassVar[str]
    authority: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        import trustme

        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.authority = trustme.CA(organization_name='Interop Test Authority')
        cls.ca = f'{cls.folder}/ca.pem'
        cls.authority.cert_pem.write_to_path(cls.ca)
        ran = subprocess.run([program('openssl') or '', 'version'], capture_output=True, text=True, timeout=10, check=True)
        VERSIONS['OpenSSL'] = f'{" ".join(ran.stdout.split()[:2])} (openssl version)'

    def issued(self, name: str, *, common: str = 'gpu-host.internal', alternative: tuple[str, ...] = ('gpu-host.internal',),
               days: tuple[int, int] = (-1, 30), client_only: bool = False, self_signed: bool = False) -> str:
        """A chain with key in one PEM file, made with cryptography where trustme offers no such thing."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        signer = serialization.load_pem_private_key(self.authority.private_key_pem.bytes(), None)
        issuer = x509.load_pem_x509_certificate(self.authority.cert_pem.bytes())
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])
        now = dt.datetime.now(dt.timezone.utc)
        builder = (x509.CertificateBuilder().subject_name(subject).issuer_name(subject if self_signed else issuer.subject)
                   .public_key(key.public_key()).serial_number(x509.random_serial_number())
                   .not_valid_before(now + dt.timedelta(days[0])).not_valid_after(now + dt.timedelta(days[1])))
        if alternative:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(a) for a in alternative]), False)
        if client_only:
            builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), False)
        made = builder.sign(key if self_signed else signer, hashes.SHA256())  # type: ignore[arg-type]
        path = f'{self.folder}/{name}.pem'
        Path(path).write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return path

    @contextlib.contextmanager
    def fixture(self, path: str) -> Iterator[int]:
        with fixture_server.server(0, 'ok', 0.01, certificate=path) as served:
            thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
            thread.start()
            try:
                yield served.server_port
            finally:
                served.shutdown()
                thread.join(10)

    def asked(self, port: int, host: str = 'gpu-host.internal', *args: object) -> Checked:
        return check(url_of(port, '', 'https', host), '--connect-to', f'127.0.0.1:{port}', *(args or ('--ca-file', self.ca)), model='mode:ok')

    def test_certificates(self) -> None:
        cases: list[tuple[str, dict[str, Any], str, str, str]] = [
            ('good', {}, 'gpu-host.internal', 'passed', ''),
            ('wildcard', {'alternative': ('*.hosts.internal',)}, 'gpu.hosts.internal', 'passed', ''),
            ('self-signed', {'self_signed': True}, 'gpu-host.internal', 'tls_untrusted', 'self.signed certificate'),
            ('expired', {'days': (-30, -1)}, 'gpu-host.internal', 'tls_expired', 'certificate has expired'),
            ('not-yet', {'days': (1, 30)}, 'gpu-host.internal', 'tls_expired', 'certificate is not yet valid'),
            ('another-name', {}, '127.0.0.1', 'tls_name', 'asked for 127.0.0.1(, the certificate names gpu-host.internal)?$'),
            ('other-names', {'alternative': ('a.internal', 'b.internal')}, 'gpu-host.internal', 'tls_name',
             'asked for gpu-host.internal(, the certificate names a.internal, b.internal)?$'),
            ('address-as-common-name', {'common': '127.0.0.1', 'alternative': ()}, '127.0.0.1', 'tls_name',
             'asked for 127.0.0.1(, the certificate has no subject alternative name)?$'),
            ('address-as-dns-name', {'alternative': ('127.0.0.1',)}, '127.0.0.1', 'tls_name', 'asked for 127.0.0.1'),
            ('client-only', {'client_only': True}, 'gpu-host.internal', 'tls_untrusted', 'purpose'),
        ]
        for name, made, host, outcome, words in cases:
            with self.subTest(name=name), self.fixture(self.issued(name, **made)) as port:
                record = self.conclude(self.asked(port, host), outcome)
                if outcome != 'passed':
                    self.assertRegex(record['error'], words)
                    self.assertIsNone(record['marks_ms']['sent'], 'nothing is sent')
        with self.fixture(self.issued('unknown')) as port:
            record = self.conclude(self.asked(port, 'gpu-host.internal', '--idle', 10), 'tls_untrusted')
            self.assertIn('unable to get local issuer certificate', record['error'])

    @unittest.skipUnless(hasattr(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname='a')._sslobj,  # type: ignore[attr-defined]
                                 'get_unverified_chain'), 'this interpreter does not let the chain be read')
    def test_what_the_certificate_says_of_itself(self) -> None:
        for name, made, host, words in (
                ('names', {}, '127.0.0.1', 'asked for 127.0.0.1, the certificate names gpu-host.internal'),
                ('times', {'days': (-30, -1)}, 'gpu-host.internal', ', the certificate is valid from '),
                ('issuer', {'self_signed': True}, 'gpu-host.internal', ', the certificate was issued by gpu-host.internal')):
            with self.fixture(self.issued(name, **made)) as port:
                self.assertIn(words, self.asked(port, host).record['error'])

    def test_tls_1_1(self) -> None:
        port = free_port()
        path = self.issued('old')
        self.served(Program(program('openssl'), 's_server', '-accept', f'127.0.0.1:{port}', '-tls1_1', '-cipher', 'ALL:@SECLEVEL=0', '-cert', path,
                            '-key', path, '-quiet'))
        time.sleep(0.5)
        record = self.conclude(self.asked(port), 'tls_failed')
        self.assertRegex(record['error'], r'(?i)protocol.version|unsupported.protocol')

    def test_plain_http_on_an_https_port_and_the_reverse(self) -> None:
        with Raw(sending(b'HTTP/1.1 400 Bad Request\r\n\r\n'), read=False) as server:
            record = self.conclude(self.asked(server.port), 'tls_failed')
            self.assertIn('that port speaks plain HTTP', record['error'])
        port = free_port()
        path = self.issued('reverse')
        self.served(Program(program('openssl'), 's_server', '-accept', f'127.0.0.1:{port}', '-cert', path, '-key', path, '-quiet'))
        time.sleep(0.5)
        record = self.conclude(check(url_of(port), model='mode:ok'), 'closed_before_head')  # OpenSSL says nothing; nginx does
        self.assertIn('or that port speaks TLS', record['failure']['hint'])
        alert = b'\x15\x03\x01\x00\x02\x02\x0a'  # what other TLS stacks send
        for at in range(1, len(alert)):
            with Raw(sending(alert[:at], alert[at:])) as server:
                record = self.conclude(check(url_of(server.port), model='mode:ok'), 'head_malformed')
                self.assertIn('that port speaks TLS, use https', record['error'])

    def test_an_end_without_close_notify_at_each_event(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.issued('cut'))
        events = [b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n', b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
                  b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n', b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n',
                  b'data: [DONE]\n\n']
        head = b'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n'
        for chunked in (False, True):
            for count in range(len(events) + 1):
                sent = [b'%x\r\n%s\r\n' % (len(e), e) if chunked else e for e in events[:count]]
                first = head + (b'Transfer-Encoding: chunked\r\n\r\n' if chunked else b'\r\n')
                expected = 'passed' if count == len(events) else 'body_cut'
                with self.subTest(chunked=chunked, count=count), Raw(abrupt(context, [first, *sent]), read=False) as server:
                    record = self.conclude(self.asked(server.port), expected, text='a' if count > 1 else '')
                    if expected == 'passed':
                        self.assertEqual([w['code'] for w in record['warnings']], ['unclean_end'])


# --- other drivers ------------------------------------------------------------------------------------------------------


class Driven(NamedTuple):
    """What a driver came to."""

    outcome: str
    text: str
    finish_reason: str | None
    warnings: dict[str, int]


class DriverTest(InteropTest):
    """The layers without I/O under httpx and aiohttp: 32 streams at once, with the verdicts of ``stream()``.

    The modes are those that differ in the event stream; what differs below it, an HTTP client handles in its own way.
    """

    GROUPS = ('whole answers', 'incomplete answers', 'errors in the stream', 'event-stream forms', 'chunk shapes')

    def judge(self, opened: Callable[[], Any], reads: Callable[[Any, str, dict[str, Any]], Any]) -> None:
        """``opened()`` is a client as a context manager, ``reads(client, url, body)`` one that yields the body as it comes."""
        served = fixture_server.server(0, 'ok', 0.02)
        thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        url = url_of(served.server_port)
        modes = [name for name, mode in fixture_server.MODES.items() if mode.group in self.GROUPS]

        async def one(client: Any, gate: asyncio.Semaphore, mode: str) -> Driven:
            chat = ChatCompletion(model=f'mode:{mode}', usage_asked=True, max_tokens=128)
            outcome = 'passed'
            async with gate:
                body = {'model': f'mode:{mode}', 'messages': [{'role': 'user', 'content': 'p'}], 'stream': True, 'max_tokens': 128}
                try:
                    async for raw in reads(client, url, body):
                        for _ in chat.feed(raw):
                            pass
                        if chat.done:
                            break
                    chat.end()
                except StreamFailure as failure:
                    outcome = failure.code
            return Driven(outcome, chat.text, chat.finish_reason, dict(chat.warnings))

        async def all_of_them() -> list[Driven]:
            gate = asyncio.Semaphore(32)
            async with opened() as client:
                return await asyncio.gather(*(one(client, gate, mode) for mode in modes))

        try:
            for mode, driven in zip(modes, asyncio.run(all_of_them()), strict=True):
                with self.subTest(mode=mode):
                    record = stream(url, f'mode:{mode}', 'p')
                    after = ('after_done', 'unclean_end')  # a driver may leave at [DONE]
                    warned = {w['code']: w['count'] for w in record['warnings']}
                    self.assertEqual(driven[:3], (record['outcome'], record['text'], record['finish_reason']))
                    self.assertEqual(*({k: v for k, v in ws.items() if k not in after} for ws in (driven.warnings, warned)))
        finally:
            served.shutdown()
            served.server_close()
            thread.join(10)

    @needs_package('httpx')
    def test_httpx(self) -> None:
        import httpx

        VERSIONS['httpx'] = f'{httpx.__version__} (its own word)'

        async def reads(client: Any, url: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
            async with client.stream('POST', url, json=body) as response:
                async for raw in response.raise_for_status().aiter_raw():
                    yield raw

        self.judge(lambda: httpx.AsyncClient(trust_env=False, timeout=10, limits=httpx.Limits(max_connections=32, max_keepalive_connections=0)), reads)

    @needs_package('aiohttp')
    def test_aiohttp(self) -> None:
        import aiohttp

        VERSIONS['aiohttp'] = f'{aiohttp.__version__} (its own word)'

        async def reads(client: Any, url: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
            async with client.post(url, json=body) as response:
                response.raise_for_status()
                async for raw in response.content.iter_any():
                    yield raw

        self.judge(lambda: aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(force_close=True)), reads)


# --- the page of a report -----------------------------------------------------------------------------------------------

CHROMIUM = program('chromium') or program('google-chrome')
AXE = Path(os.environ.get('STREAM_AXE', 'no such file'))
ACTIONS_CORE = Path(os.environ.get('STREAM_ACTIONS_CORE', 'no such file'))
SAID = ('sound', '</script><img src=x onerror=alert(1)>', '"><svg onload=alert(1)>', "'><a href=javascript:alert(1)>", '</details></pre></style>',
        '<!--', '&lt;b&gt;', '\u202egnp.exe\u2066', '\x1b[2J\x00\x7f\x9b', '\u200b\ufeff\U000e0041', '\ud800', ']]>', '<style>*{display:none}</style>')
SHOWN = ('sound', *SAID[1:7], r'\u202egnp.exe\u2066', r'\x1b[2J\x00\x7f\x9b', r'\u200b\ufeff\U000e0041', r'\ud800', *SAID[11:])

# Each colour that carries something, with the colour behind it: text 4.5:1, graphics 3:1.
FAINT = """
const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const solid = text => { const v = rgb(text); return v.length === 3 || v[3] > 0 };
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (solid(c)) return c } return 'rgb(255, 255, 255)' };
const ratio = (a, b) => { const [x, y] = [light(rgb(a)), light(rgb(b))].sort((p, q) => q - p); return (x + .05) / (y + .05) };
document.querySelectorAll('details').forEach(d => d.open = true);
const faint = []; let looked = 0;
const look = (e, colour, least) => { looked++; const found = ratio(colour, behind(e));
  if (found < least) faint.push([e.tagName, e.textContent.slice(0, 40), colour, behind(e), found]) };
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const e = walk.currentNode.parentElement;
  if (walk.currentNode.data.trim() && e.checkVisibility() && e.tagName !== 'title')
    look(e, getComputedStyle(e)[e.closest('svg') ? 'fill' : 'color'], 4.5);
}
for (const e of document.querySelectorAll('rect, path, circle, line')) {
  const style = getComputedStyle(e);
  for (const colour of [style.fill, style.stroke]) if (colour !== 'none') look(e, colour, 3);
}
return [looked, faint];
"""


def replaced(value: Any, made: Callable[[], str]) -> Any:
    """The same JSON value with every string made anew, keys of headers and notes included."""
    if isinstance(value, str):
        return made()
    if isinstance(value, list):
        return [replaced(item, made) for item in value]
    if isinstance(value, dict):
        return {name: {made(): made()} if name in ('headers', 'notes') else replaced(item, made) for name, item in value.items()}
    return value


class Catalogue:
    """The records of every mode, each asked once."""

    records: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def all(cls) -> dict[str, dict[str, Any]]:
        if not cls.records:
            with fixture_server.server(0, 'ok', 0.02) as served, concurrent.futures.ThreadPoolExecutor(16) as pool:
                thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
                thread.start()
                try:
                    url = url_of(served.server_port)
                    ran = pool.map(lambda mode: stream(url, f'mode:{mode}', 'p', idle=2, deadline=5, label='catalogue'), fixture_server.MODES)
                    cls.records = dict(zip(fixture_server.MODES, ran, strict=True))
                finally:
                    served.shutdown()
                    thread.join(10)
        return cls.records


def variety() -> list[Run]:
    """A run of each look: boundaries, ways, many events, held back, no times; all three origins, two labels."""
    early = {'first_event': None, 'first_byte': None, 'first_text': None, 'last_text': None, 'finish': None, 'done': None}
    tls = {'url': 'https://gpu-host.example:8443/v1/chat/completions'}
    failed = like('broken')['failure']
    runs = [example(mode, synthetic=False, label='nightly') for mode in ('ok', 'broken', 'http-429', 'error-midstream', 'length', 'stall-after-text',
                                                                       'held-back', 'spaces-only', 'slow-text', 'finish-with-text')]
    runs += [example('ok', synthetic=False, label='nightly', request={'path_taken': 'ssh'}, marks_ms={'resolved': None}),
             example('ok', synthetic=False, label='canary', request=tls, marks_ms={'secured': 1.5}, event_gaps_ms=[0.05] * 3000, duration_ms=60_000.0,
                     content_events=3001),
             example('broken', synthetic=False, label='canary', request=tls, marks_ms={**early, 'head': None, 'sent': None},
                     failure={**failed, 'boundary': 'tls', 'code': 'tls_name'}, outcome='tls_name', text='')]
    return [*runs, example_offline('broken'), example_offline('ok'), example('ok'), example('error-controls')]


@needs(selenium=package('selenium'), chromium=CHROMIUM is not None, chromedriver=program('chromedriver') is not None, axe=AXE.is_file())
class PageTest(unittest.TestCase):
    """The page in headless Chromium."""

    driver: ClassVar[Any]
    folder: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ''
        for flag in ('headless', 'no-sandbox', 'disable-gpu', 'disable-quic', 'no-first-run', 'disable-background-networking',
                     'disable-component-update', 'disable-sync', f'user-data-dir={cls.folder}/profile'):
            options.add_argument(f'--{flag}')
        options.set_capability('goog:loggingPrefs', {'browser': 'ALL', 'performance': 'ALL'})
        cls.driver = webdriver.Chrome(options=options, service=Service(program('chromedriver')))
        cls.addClassCleanup(cls.driver.quit)
        cls.driver.set_page_load_timeout(60)
        cls.driver.set_script_timeout(120)
        VERSIONS['Chromium'] = f'{cls.driver.capabilities["browserVersion"]} (its own word)'

    def open(self, text: str, *, width: int = 1100, scheme: str = 'light', media: str = '') -> str:
        """Load this as a file, and return its URL."""
        path = Path(self.folder, 'page.html')
        path.write_text(text, 'utf-8')
        self.cdp('Emulation.setDeviceMetricsOverride', width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        self.cdp('Emulation.setEmulatedMedia', media=media, features=[{'name': 'prefers-color-scheme', 'value': scheme}])
        for kind in ('browser', 'performance'):
            self.driver.get_log(kind)
        self.driver.get(path.as_uri())
        return path.as_uri()

    def cdp(self, method: str, **params: Any) -> Any:
        return self.driver.execute_cdp_cmd(method, params)

    def js(self, body: str) -> Any:
        return self.driver.execute_script(body)

    def looked_at(self) -> Iterator[tuple[str, contextlib.AbstractContextManager[None]]]:
        """The page of ``variety``, opened in each colour scheme at each width, with the context of a test of it."""
        text = ''.join(page(variety(), ['notes.txt: not JSON']))
        for scheme in ('light', 'dark'):
            for width in (1100, 360):
                self.open(text, scheme=scheme, width=width)
                yield scheme, self.subTest(scheme=scheme, width=width)

    def noticed(self) -> tuple[list[str], list[str]]:
        """The console's messages and the URLs asked for since the page was opened."""
        asked = [json.loads(entry['message'])['message'] for entry in self.driver.get_log('performance')]
        return ([entry['message'] for entry in self.driver.get_log('browser')],
                [event['params']['request']['url'] for event in asked if event['method'] == 'Network.requestWillBeSent'])

    def test_nothing_is_asked_for_and_the_console_is_silent(self) -> None:
        self.open('<img src="missing.png"><script>console.log("said")</script>')
        messages, urls = self.noticed()
        self.assertTrue(any('said' in message for message in messages), 'the log works')
        self.assertEqual([url.rpartition('/')[2] for url in urls], ['page.html', 'missing.png'], 'the log works')
        url = self.open(''.join(page(variety())))
        self.assertEqual(self.noticed(), ([], [url]))

    def test_what_a_page_may_not_hold_would_not_run(self) -> None:
        self.open(''.join(page(variety())).replace('<h1>', '<script>document.title = "ran"</script><img src=x onerror="document.title = 1"><h1>'))
        self.assertEqual(self.driver.title, 'Streamed answers: report')
        self.assertEqual(len([message for message in self.noticed()[0] if 'Content Security Policy' in message]), 3)

    def test_hostile_strings_stay_text(self) -> None:
        def made(said: str) -> str:
            runs = [Run(said, replaced(run.record, lambda: said)) for run in variety()]
            return ''.join(page(runs, [said]))

        def tags() -> Counter[str]:
            return Counter(self.js('return Array.from(document.querySelectorAll("*"), e => e.tagName)'))

        self.open(made(SAID[0]))
        expected = tags()
        self.assertFalse({'IMG', 'SCRIPT', 'IFRAME', 'OBJECT'} & set(expected))
        for said, shown in zip(SAID, SHOWN, strict=True):
            with self.subTest(said=said):
                url = self.open(made(said))
                self.assertEqual(tags(), expected)
                self.assertEqual(self.noticed(), ([], [url]))
                self.js('document.querySelectorAll("details").forEach(d => d.open = true)')
                places = self.js('return Array.from(document.querySelectorAll("h3, h4, dd, pre, .bar p, li, td, th a"), e => e.textContent)')
                self.assertGreater(sum(shown in place for place in places), 100)

    def test_text_is_hidden_until_asked_for(self) -> None:
        self.open(''.join(page([example('ok', text='<b>one</b>\n\ttwo \u202ethree\r')])))
        answer, summary = self.driver.find_element('tag name', 'pre'), self.driver.find_element('tag name', 'summary')
        self.assertFalse(answer.is_displayed())
        self.assertNotIn('three', self.js('return document.body.innerText'))
        summary.click()
        self.assertTrue(answer.is_displayed())
        self.assertEqual(answer.get_property('textContent'), '<b>one</b>\n\ttwo \\u202ethree\\x0d')

    def test_nothing_is_wider_than_the_page(self) -> None:
        for _, looked_at in self.looked_at():
            with looked_at:
                self.assertLessEqual(*self.js('return [document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth]'))
                outside = self.js("""return Array.from(document.querySelectorAll('body *')).filter(e => !e.closest('.scroll table, pre') &&
                    e.getBoundingClientRect().right > document.scrollingElement.clientWidth + 0.5).map(e => e.outerHTML.slice(0, 100))""")
                self.assertEqual(outside, [])
        self.open(''.join(page([Run('y' * 3000, replaced(run.record, lambda: 'x' * 3000)) for run in variety()])), width=360)
        self.assertLessEqual(*self.js('return [document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth]'))

    def test_contrast(self) -> None:
        for scheme, looked_at in self.looked_at():
            with looked_at:
                looked, faint = self.js(FAINT)
                self.assertGreater(looked, 500)
                self.assertEqual(faint, [])
                self.assertEqual(self.js('return getComputedStyle(document.body).backgroundColor') == 'rgb(255, 255, 255)', scheme == 'light')
        self.js('document.documentElement.style.setProperty("--soft", "#888")')
        self.assertTrue(self.js('document.documentElement.style.setProperty("--bg", "#777");' + FAINT)[1], 'what is faint is found')

    def test_names_of_drawings(self) -> None:
        self.open(''.join(page(variety())))
        names = [node['name']['value'] for node in self.cdp('Accessibility.getFullAXTree')['nodes']
                 if not node['ignored'] and node['role']['value'] in ('image', 'img', 'SvgRoot')]
        drawn = self.js('return document.querySelectorAll("svg[role=img]").length')
        self.assertEqual(len(names), drawn)
        self.assertEqual(self.js('return document.querySelectorAll("svg:not([role=img], [aria-hidden=true], svg svg)").length'), 0)
        timelines = [name for name in names if re.search(r'(; passed|; failed at \w+: \w+)\.', name)]
        self.assertEqual(len(timelines), len([run for run in variety() if run.record['marks_ms']['end'] is not None]))
        self.assertEqual(len([name for name in names if re.match(r'[A-Z][-a-z ]+: \d+ passed runs, from .+, median .+, 95th percentile', name)]),
                         drawn - len(timelines))

    def test_ids_and_what_refers_to_them(self) -> None:
        self.open(''.join(page([*variety(), *(Run('m', record) for record in Catalogue.all().values())])))
        ids = self.js('return Array.from(document.querySelectorAll("[id]"), e => e.id)')
        self.assertEqual(len(ids), len(set(ids)))
        used = self.js("""return Array.from(document.querySelectorAll('a, [aria-labelledby]'),
            e => e.getAttribute('aria-labelledby') || e.getAttribute('href').replace(/^#/, ''))""")
        self.assertGreater(len(used), 200)
        self.assertLessEqual(set(used), set(ids))

    def test_an_accessibility_checker_finds_nothing(self) -> None:
        axe = AXE.read_text('utf-8')
        for _, looked_at in self.looked_at():
            with looked_at:
                self.js('document.querySelectorAll("details").forEach(d => d.open = true)')
                self.cdp('Runtime.evaluate', expression=axe)
                ran = self.cdp('Runtime.evaluate', expression='axe.run().then(found => JSON.stringify(found))', awaitPromise=True, returnByValue=True)
                found = json.loads(ran['result']['value'])
                self.assertEqual([(rule['id'], [node['html'][:200] for node in rule['nodes'][:3]]) for rule in found['violations']], [])
                self.assertGreater(len(found['passes']), 20)
        VERSIONS['axe-core'] = f'{found["testEngine"]["version"]} (its own word)'

    def test_in_print(self) -> None:
        self.open(''.join(page(variety())), scheme='dark', media='print', width=700)
        self.assertEqual(self.js('return getComputedStyle(document.body).backgroundColor'), 'rgb(255, 255, 255)')
        self.assertEqual(self.js('return getComputedStyle(document.querySelector("summary"), "::after").content'), '": hidden"')
        self.assertEqual(self.js(FAINT)[1], [])
        printed = base64.b64decode(self.cdp('Page.printToPDF', printBackground=True)['data'])
        self.assertTrue(printed.startswith(b'%PDF-'))
        self.assertGreater(len(re.findall(rb'/Type\s*/Page\b', printed)), 1)

    def test_the_whole_catalogue(self) -> None:
        runs = [Run(f'{mode}.json', record) for mode, record in Catalogue.all().items()]
        url = self.open(''.join(page(runs)), width=360, scheme='dark')
        self.assertEqual(self.noticed(), ([], [url]))
        kinds = {kind: [run for run in runs if run.record['synthetic'] == synthetic] for kind, synthetic in (('Real', False), ('Synthetic', True))}
        told = [f'{kind} runs: {sum(run.record["ok"] for run in own)} of {len(own)} passed' for kind, own in kinds.items()]
        self.assertEqual(self.js('return document.querySelector("nav").innerText.trim()').split('\n'), told)
        self.assertEqual(self.js('return document.querySelectorAll("article").length'), sum(min(MAX_DRAWN, len(own)) for own in kinds.values()))
        shown = self.js('return Array.from(document.querySelectorAll("h4"), e => e.textContent)')
        failures = {(run.record['failure']['boundary'], run.record['outcome']) for run in runs if not run.record['ok']}
        self.assertEqual({told for told in shown if told != '✓ passed'}, {f'✕ failed at {boundary}: {code}' for boundary, code in failures})
        self.assertLessEqual(*self.js('return [document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth]'))


# --- those who read reports -----------------------------------------------------------------------------------------------


class Cells(html.parser.HTMLParser):
    """The tags of a document, and the text of its table cells."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.cells: list[str] = []
        self._in_cell = False
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag in ('td', 'th'):
            self.cells.append('')
        self._in_cell = tag in ('td', 'th') or (self._in_cell and tag == 'code')
        assert not attrs or tag in ('th', 'td'), attrs

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag == 'code'

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells[-1] += data


@needs(junitparser=package('junitparser'), cmarkgfm=package('cmarkgfm'), duckdb=package('duckdb'), jsonschema=package('jsonschema'),
       node=program('node') is not None, actions_core=ACTIONS_CORE.is_file())
class ReaderTest(Directory):
    """The records of the whole catalogue, and hostile ones, through each output of ``stream_report.py`` to a program that reads such."""

    folder: ClassVar[Path]
    records: ClassVar[dict[str, dict[str, Any]]]

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.records = dict(Catalogue.all())
        for at, said in enumerate(SAID):
            failed = like('broken', label=said, error=said, model=said)
            failed['failure']['message'] = failed['failure']['hint'] = said
            cls.records[f'hostile-{at}'] = failed
        (cls.folder / 'records').mkdir()
        for name, record in cls.records.items():
            (cls.folder / 'records' / f'{name}.json').write_text(json.dumps(record))
        (cls.folder / 'records' / 'half.json').write_text('{"ok": true')

    def report(self, *args: str, **env: str) -> str:
        ran = subprocess.run([sys.executable, ROOT / 'stream_report.py', *args, 'records'], cwd=self.folder, env=environment(**env),
                             capture_output=True, text=True, timeout=60)
        self.assertEqual((ran.returncode, ran.stderr.count('\n')), (0, 1), ran.stderr)
        self.assertRegex(ran.stderr, '^stream_report.py: skipped records/half.json: ')
        return ran.stdout

    def failed(self, *boundaries: str) -> int:
        """How many records failed at one of these, of all where none is named."""
        return sum(not r['ok'] and (not boundaries or r['failure']['boundary'] in boundaries) for r in self.records.values())

    def test_the_table_and_its_json(self) -> None:
        told = json.loads(self.report('--json'))
        self.assertEqual(sorted(Path(run['source']).stem for part in told['origins'].values() for run in part['runs']), sorted(self.records))
        text = self.report()
        for name in self.records:
            self.assertRegex(text, rf'(?m) records/{name}\.json$')
        for part in told['origins'].values():
            total = part['total']
            self.assertEqual(total['runs'] - total['passed'], sum(failure['runs'] for failure in total['failures']))

    def test_the_schema(self) -> None:
        import jsonschema

        ran = subprocess.run([sys.executable, ROOT / 'stream_report.py', '--schema'], capture_output=True, check=True, timeout=60)
        schema = json.loads(ran.stdout)
        jsonschema.Draft202012Validator.check_schema(schema)
        for record in self.records.values():
            jsonschema.Draft202012Validator(schema).validate(record)

    def test_junit(self) -> None:
        import junitparser

        (self.here / 'junit.xml').write_text(self.report('--junit', '-'))
        suites = junitparser.JUnitXml.fromfile(str(self.here / 'junit.xml'))
        cases = [case for suite in suites for case in suite]
        self.assertEqual(sorted(Path(case.name).stem for case in cases if not case.is_skipped), sorted(self.records))
        self.assertEqual([case.name.partition(':')[0] for case in cases if case.is_skipped], ['records/half.json'])
        for suite in suites:
            self.assertEqual((suite.tests, suite.failures, suite.errors), (len(list(suite)), sum(case.is_failure for case in suite),
                                                                         sum(case.is_error for case in suite)))
        not_run = self.failed('resolve', 'connect', 'tunnel', 'tls', 'send', 'client')
        self.assertEqual((sum(s.failures for s in suites), sum(s.errors for s in suites)), (self.failed() - not_run, not_run))
        found = {Path(case.name).stem: case.result[0].message for case in cases if not case.is_passed and not case.is_skipped}
        for at, shown in enumerate(SHOWN):
            self.assertEqual(found[f'hostile-{at}'], f'completion: no_done: {shown}')

    def test_the_summary_as_github_s_markdown(self) -> None:
        import cmarkgfm

        self.report('--summary', GITHUB_STEP_SUMMARY=str(self.here / 'summary.md'))
        text = (self.here / 'summary.md').read_text()
        made = Cells(cmarkgfm.github_flavored_markdown_to_html(text, cmarkgfm.cmark.Options.CMARK_OPT_UNSAFE))
        self.assertEqual(set(made.tags) - {'h3', 'table', 'thead', 'tbody', 'tr', 'th', 'td', 'code', 'p', 'ul', 'li'}, set())
        listed = [name for name in self.records if f'records/{name}.json' in made.cells]
        failed = Counter(record['synthetic'] for record in self.records.values() if not record['ok'])
        self.assertEqual(len(listed), sum(min(MAX_LISTED, count) for count in failed.values()))
        for name in listed:
            at = made.cells.index(f'records/{name}.json')
            self.assertEqual(made.cells[at + 1 : at + 3], [self.records[name]['failure']['boundary'], self.records[name]['outcome']])
        labels = set(made.cells)
        for shown in SHOWN:
            self.assertTrue({shown.strip(), shown.strip().replace('|', '\\x7c').replace('`', '\\x60')} & labels, shown)

    def test_annotations_are_those_of_github_s_toolkit(self) -> None:
        lines = self.report('--summary', GITHUB_STEP_SUMMARY=str(self.here / 'summary.md')).splitlines()
        script = """
const { issueCommand } = require(process.argv[1]);
for (const [kind, title, message] of JSON.parse(process.argv[2])) issueCommand(kind, { title }, message);
"""
        told = []
        for line in lines:
            found = re.fullmatch('::(error|warning) title=(.*?)::(.*)', line)
            assert found, line
            plain = [unquoted.replace('%3A', ':').replace('%2C', ',').replace('%0A', '\n').replace('%0D', '\r').replace('%25', '%')
                     for unquoted in (found[2], found[3])]
            told.append([found[1], *plain])
        ran = subprocess.run([program('node') or '', '-e', script, str(ACTIONS_CORE), json.dumps(told)], capture_output=True, text=True, check=True, timeout=60)
        self.assertEqual(ran.stdout.splitlines(), lines)
        self.assertEqual([kind for kind, *_ in told], ['error'] * 10 + ['warning'])

    def test_duckdb(self) -> None:
        import duckdb

        with duckdb.connect() as connection:
            rows = connection.execute(block('sql', 'read_json').replace('records/*', f'{self.folder}/records/[!h]*')).fetchall()
        counted = Counter((r['label'], r['synthetic']) for name, r in self.records.items() if not name.startswith('h'))
        self.assertEqual({(label, synthetic): runs for label, synthetic, runs, *_ in rows}, counted)


# --- the GitHub Action ----------------------------------------------------------------------------------------------------


ACTION = './.github/actions/stream-check'


def loaded(text: str) -> Any:
    """A YAML document."""
    import yaml

    return yaml.safe_load(text)


def block(tag: str, words: str) -> str:
    """The one block of README with this tag that holds these words."""
    found = [text for text in re.findall(rf'```{tag}\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL) if words in text]
    assert len(found) == 1, f'{len(found)} blocks of {tag} hold {words!r}'
    return str(found[0])


def evaluated(expression: str, contexts: dict[str, Any]) -> str | bool:
    """An expression of the runner, as far as this repository uses any; a context that has no such member gives ''."""
    if ' && ' in expression:
        return all(evaluated(part, contexts) for part in expression.split(' && '))
    if ' || ' in expression:
        return next((value for part in expression.split(' || ') if (value := evaluated(part, contexts))), '')
    if expression == 'always()':
        return True
    if expression.endswith(" != ''"):
        return evaluated(expression.removesuffix(" != ''"), contexts) != ''
    assert re.fullmatch(r'(inputs|env|steps|secrets|matrix)(\.[\w-]+)+', expression), expression
    found: Any = contexts
    for name in expression.split('.'):
        found = found.get(name, {})
    return str(found or '')


def filled(text: object, contexts: dict[str, Any]) -> str:
    """A value of a step, with its expressions replaced."""
    return re.sub(r'\$\{\{ (.*?) \}\}', lambda found: str(evaluated(found[1], contexts)), str(text))


def obeyed(log: str) -> list[str]:
    """The commands that the runner would take from a log: at the start of a line, or as ##[...] anywhere, until it is told to stop."""
    taken, token = [], ''
    for line in log.splitlines():
        found = re.match(r'\s*::([\w-]+)(?: [^:]*)?::(.*)', line) or re.search(r'##\[([\w-]+)[^\]]*\](.*)', line)
        if found and token:
            token = '' if found[1] == token else token
        elif found and found[1] == 'stop-commands':
            token = found[2]
        elif found:
            taken.append(found[1])
    return taken


class Runner:
    """The part of GitHub's runner that the action and its job need.

    ``run`` takes steps in their order, fills in expressions, gives scripts to bash as the runner does, reads GITHUB_OUTPUT, and
    goes into the action; what it would upload, print and show in the summary is kept in ``uploads``, ``log`` and ``summary``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = ''
        self.uploads: dict[str, bytes | None] = {}
        self.sessions: list[int] = []
        self.files = {name: folder / name.lower() for name in ('GITHUB_OUTPUT', 'GITHUB_STEP_SUMMARY', 'RUNNER_TEMP')}
        self.files['RUNNER_TEMP'].mkdir()
        self.files['GITHUB_STEP_SUMMARY'].touch()

    @property
    def summary(self) -> str:
        return self.files['GITHUB_STEP_SUMMARY'].read_text()

    def run(self, steps: list[dict[str, Any]], contexts: dict[str, Any]) -> bool:
        """Run steps, whose outcomes and outputs go to ``contexts['steps']``; whether none failed."""
        succeeded = True
        for step in steps:
            kept = contexts.setdefault('steps', {}).setdefault(step.get('id', object()), {'outputs': {}, 'outcome': 'skipped'})
            condition = step.get('if', '')
            if (succeeded or 'always()' in condition) and (not condition or evaluated(condition, contexts)):
                passed = self.step(step, contexts, kept['outputs'])
                kept['outcome'] = 'success' if passed else 'failure'
                succeeded = succeeded and (passed or step.get('continue-on-error', False))
        return succeeded

    def step(self, step: dict[str, Any], contexts: dict[str, Any], outputs: dict[str, str]) -> bool:
        env = {**contexts.get('env', {}), **{name: filled(value, contexts) for name, value in step.get('env', {}).items()}}
        values = {name: filled(value, contexts) for name, value in step.get('with', {}).items()}
        if 'run' in step:
            return self.script(step, env, contexts.get('action_path', ''), outputs)
        if step['uses'] == ACTION:
            return self.action(values, env, outputs)
        name = step['uses'].partition('@')[0]
        if name == 'actions/upload-artifact':
            path = Path(values['path'])
            assert values['name'] not in self.uploads, 'the artifact exists'
            assert path.exists() or values['if-no-files-found'] == 'ignore', path
            self.uploads[values['name']] = path.read_bytes() if path.exists() else None
        return name in ('actions/upload-artifact', 'actions/checkout')

    def action(self, values: dict[str, str], env: dict[str, str], outputs: dict[str, str]) -> bool:
        """The steps of the action, with inputs from its caller; what is no input of it is an error."""
        action = loaded((ROOT / ACTION / 'action.yml').read_text())
        inputs = {name: given.get('default', '') for name, given in action['inputs'].items()}
        assert not values.keys() - inputs.keys(), values
        contexts = {'inputs': inputs | values, 'env': env, 'action_path': str(ROOT / ACTION)}
        passed = self.run(action['runs']['steps'], contexts)
        outputs.update({name: filled(output['value'], contexts) for name, output in action['outputs'].items()})
        return passed

    def script(self, step: dict[str, Any], env: dict[str, str], action_path: str, outputs: dict[str, str]) -> bool:
        file = self.folder / 'script'
        file.write_text(step['run'])
        self.files['GITHUB_OUTPUT'].write_text('')
        words = ['--noprofile', '--norc', '-eo', 'pipefail'] if step.get('shell') == 'bash' else ['-e']
        ran = subprocess.Popen(['bash', *words, file], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(
                                   GITHUB_ACTION_PATH=action_path, **{name: str(path) for name, path in self.files.items()}, **env))
        self.sessions.append(ran.pid)
        self.log += ''.join(ran.communicate(timeout=60))  # the runner reads both at once: stderr may come later than it was written
        outputs.update(re.findall('(?m)^(.*?)=(.*)$', self.files['GITHUB_OUTPUT'].read_text()))
        return ran.returncode == 0

    def clean_up(self) -> None:
        """At the end of a job the runner ends what its steps left in the background."""
        for process in processes():
            if process.session in self.sessions:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


@needs(yaml=package('yaml'), shellcheck=program('shellcheck') is not None)
class ActionTest(InteropTest, Directory):
    """The GitHub Action's own steps, run as a runner would."""

    url: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        started, port = fixture_program()
        served_by_class(cls, started)
        cls.url = url_of(port)

    def setUp(self) -> None:
        super().setUp()
        self.runner = Runner(self.here)
        self.addCleanup(self.runner.clean_up)

    def asked(self, **values: str) -> tuple[bool, dict[str, str]]:
        """The action with these inputs (_ for -) in a job that has a key if there is ``job_key``: whether it succeeded, and its outputs."""
        outputs: dict[str, str] = {}
        env = {'MODEL_API_KEY': values.pop('job_key')} if 'job_key' in values else {}
        given = {'url': self.url} | {name.replace('_', '-'): value for name, value in values.items()}
        return self.runner.action(given, env, outputs), outputs

    def record(self, outputs: dict[str, str]) -> dict[str, Any]:
        """The record, which was uploaded as it is."""
        name, uploaded = list(self.runner.uploads.items())[-1]
        path = Path(outputs['record'])
        self.assertEqual((path.parent, path.read_bytes()), (self.here / 'runner_temp' / 'stream-records', uploaded))
        found: dict[str, Any] = json.loads(uploaded or b'')
        return found | {'artifact': name}

    def test_a_whole_answer(self) -> None:
        passed, outputs = self.asked(model='mode:ok', prompt='Say it.', max_tokens='7', idle='30', deadline='90', label='nightly',
                                     args='--note=image=vllm\n\n--first-text=40\n--deadline=1\n')
        self.assertTrue(passed, self.runner.log)
        self.assertEqual({**outputs, 'record': ''}, {'record': '', 'ok': 'true', 'outcome': 'passed', 'exit-status': '0'})
        record = self.record(outputs)
        self.assertEqual((record['label'], record['notes'], record['model'], record['text']), ('nightly', {'image': 'vllm'}, 'mode:ok', 'READY ✓'))
        self.assertEqual(record['request']['clocks_s'], {'idle': 30, 'deadline': 90, 'first_text': 40, 'stall': None})
        self.assertEqual(record['request']['sampling']['max_tokens'], 7)
        self.assertEqual(record['artifact'], Path(outputs['record']).stem)
        self.assertIn('1 of 1 passed', self.runner.summary)
        self.assertEqual(obeyed(self.runner.log), [])

    def test_a_failure_fails_after_record_and_summary(self) -> None:
        passed, outputs = self.asked(model='mode:broken', artifact='mine')
        self.assertFalse(passed)
        self.assertEqual({**outputs, 'record': ''}, {'record': '', 'ok': 'false', 'outcome': 'no_done', 'exit-status': '1'})
        record = self.record(outputs)
        self.assertEqual((record['outcome'], record['artifact']), ('no_done', 'mine'))
        self.assertIn('0 of 1 passed', self.runner.summary)
        self.assertEqual(obeyed(self.runner.log), ['error'])

    def test_every_code_is_told(self) -> None:
        self.assertFalse(self.asked(model='mode:bad-utf8')[0])
        self.assertIn('::error title=events%3A not_utf8', self.runner.log)
        script = loaded((ROOT / ACTION / 'action.yml').read_text())['runs']['steps'][0]['run']
        pattern = re.search(r"verdict='(.*)'", script)
        assert pattern
        for code in ('passed', *FAILURES):
            self.assertRegex(f'{{"ok": false, "outcome": "{code}", ', pattern[1])

    def test_a_refusal_keeps_nothing(self) -> None:
        for values in ({'model': ''}, {'model': 'm', 'idle': 'soon'}, {'model': 'm', 'args': '--no-such-flag'}, {'model': 'm', 'ca_file': 'none.pem'},
                       {'model': 'm', 'args': '--fixture=ok'}):
            with self.subTest(values=values):
                passed, outputs = self.asked(**values)
                self.assertEqual((passed, {**outputs, 'record': ''}), (False, {'record': '', 'ok': '', 'outcome': '', 'exit-status': '2'}))
                self.assertIn('stream_client.py: ', self.runner.log)
                self.assertIn('no record was kept (exit status 2)', self.runner.summary)
        self.assertEqual(set(self.runner.uploads.values()), {None})
        passed, outputs = self.asked(model='m', args='--version')  # exit status 0 is not enough
        self.assertEqual((passed, outputs['ok'], outputs['exit-status']), (False, '', '0'))

    def test_a_runner_without_a_temporary_folder(self) -> None:
        (self.here / 'runner_temp').rmdir()
        (self.here / 'runner_temp').touch()
        self.assertEqual(self.asked(model='mode:ok'), (False, {'record': '', 'ok': '', 'outcome': '', 'exit-status': ''}))
        self.assertIn('no record was kept (exit status unknown)', self.runner.summary)

    def test_a_cancelled_run_keeps_its_record(self) -> None:
        records = self.here / 'runner_temp' / 'stream-records'

        def cancel() -> None:
            eventually(lambda: list(records.glob('*.json')), 30, 'the client has begun')
            self.runner.clean_up()

        canceller = threading.Thread(target=cancel)
        canceller.start()
        passed, outputs = self.asked(model='mode:stall-after-text', idle='30')
        canceller.join()
        self.assertEqual((passed, {**outputs, 'record': ''}), (False, {'record': '', 'ok': '', 'outcome': '', 'exit-status': ''}))
        self.assertEqual(self.record(outputs)['outcome'], 'unfinished')
        self.assertIn('0 of 1 passed', self.runner.summary)

    def test_no_input_becomes_shell_text_a_flag_or_an_output(self) -> None:
        hostile = ('$(touch x)', '`touch x`', '"; touch x; "', "'; touch x; '", '$IFS;touch${IFS}x', '${{ github.token }}', '*', '~', r'\n\$(touch x)', '-h',
                   '--version', '--output=x', '-', 'a\nok=true\nexit-status=0', '::error::x', '##[add-mask]READY', '; touch x', '$(<script)')
        for model, prompt, label in zip(*(hostile[at::3] for at in range(3)), strict=True):
            with self.subTest(values=(model, prompt, label)):
                passed, outputs = self.asked(model=model, prompt=prompt, label=label, args='--output=x\n--label=x\n--url=http://127.0.0.1:9/')
                self.assertTrue(passed, self.runner.log)
                record = self.record(outputs)
                self.assertEqual((record['model'], record['label'], record['request']['url']), (model, label, self.url))
                messages = json.dumps([{'role': 'user', 'content': prompt}], separators=(',', ':')).encode()
                self.assertEqual(record['request']['messages_sha256'], hashlib.sha256(messages).hexdigest())
                self.assertEqual({**outputs, 'record': ''}, {'record': '', 'ok': 'true', 'outcome': 'passed', 'exit-status': '0'})
        notes = {f'k{at}': value.replace('\n', '') for at, value in enumerate(hostile)}
        passed, outputs = self.asked(model='m', args='\n'.join(f'--note={name}={value}' for name, value in notes.items()))
        self.assertEqual((passed, self.record(outputs)['notes']), (True, notes))
        for name in ('url', 'max-tokens', 'idle', 'deadline', 'ca-file', 'args'):
            passed, outputs = self.asked(**{'model': 'm', name: '$(touch x)\nok=true'})
            self.assertEqual((passed, outputs['ok'], outputs['exit-status']), (False, '', '2'), name)
        self.assertEqual(self.names(), ['github_output', 'github_step_summary', 'runner_temp', 'script'])
        self.assertEqual(obeyed(self.runner.log), [])

    def test_what_the_server_says_is_no_command(self) -> None:
        said = '##[add-mask]READY'
        body = json.dumps({'error': {'message': f'{said}\n::set-output name=ok::true'}}).encode()
        head = b'HTTP/1.1 500 no\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % len(body)
        with Raw(sending(head + body)) as server:
            passed, outputs = self.asked(url=server.url, model='m')
        self.assertEqual((passed, outputs['outcome']), (False, 'http_status'))
        self.assertIn(said, self.runner.log)
        self.assertEqual(obeyed(self.runner.log), ['error'])
        self.assertEqual(obeyed(re.sub('::stop-commands::.*', '', self.runner.log)).count('add-mask'), 2, 'obeyed() knows such a line')

    def test_the_key(self) -> None:
        cases: list[tuple[dict[str, str], str | None]] = [
            ({'api_key': KEY}, KEY), ({'job_key': KEY}, KEY), ({'job_key': 'of-the-job', 'api_key': KEY}, KEY), ({}, None)]
        for values, sent in cases:
            with self.subTest(values=values), Raw(sending(b'HTTP/1.1 401 no\r\nContent-Length: 0\r\n\r\n')) as server:
                self.asked(url=server.url, model='m', **values)
                found = re.search(rb'Authorization: Bearer (\S+)', server.requests[0])
                self.assertEqual(found and found[1].decode(), sent)
        self.assertNotIn(KEY, self.runner.log + self.runner.summary + str(self.runner.uploads))

    def test_the_job_of_the_workflow(self) -> None:
        job = loaded((ROOT / '.github' / 'workflows' / 'ci.yml').read_text())['jobs']['action']
        for name in ('fixture_server.py', 'stream_client.py'):  # what is checked out
            (self.here / name).symlink_to(ROOT / name)
        contexts: dict[str, Any] = {}
        self.assertTrue(self.runner.run(job['steps'], contexts), self.runner.log)
        self.assertEqual([contexts['steps'][name]['outcome'] for name in ('whole', 'broken')], ['success', 'failure'])
        self.assertEqual(len(self.runner.uploads), 2)
        contexts['steps']['broken']['outputs']['outcome'] = 'passed'
        self.assertFalse(self.runner.run(job['steps'][-1:], contexts), 'its last step can fail')

    def test_every_use_of_it_fits(self) -> None:
        action = loaded((ROOT / ACTION / 'action.yml').read_text())
        required = {name for name, given in action['inputs'].items() if given.get('required')}
        for text, count in (((ROOT / '.github' / 'workflows' / 'ci.yml').read_text(), 2), (block('yaml', '/stream-check@'), 1)):
            steps = [step for job in loaded(text)['jobs'].values() for step in job['steps']]
            uses = [step for step in steps if 'stream-check' in step.get('uses', '')]
            self.assertEqual(len(uses), count)
            for step in uses:
                self.assertEqual(step['with'].keys() - action['inputs'].keys(), set())
                self.assertEqual(required - step['with'].keys(), set())
                for name in re.findall(rf'steps\.{step.get("id")}\.outputs\.([\w-]+)', text):
                    self.assertIn(name, action['outputs'])

    def test_its_scripts(self) -> None:
        action = loaded((ROOT / ACTION / 'action.yml').read_text())
        job = loaded((ROOT / '.github' / 'workflows' / 'ci.yml').read_text())['jobs']['action']
        scripts = [step['run'] for step in action['runs']['steps'] + job['steps'] if 'run' in step]
        self.assertEqual(len(scripts), 5)
        for script in scripts:
            self.assertNotIn('${{', script)
            ran = subprocess.run([program('shellcheck') or '', '-s', 'bash', '-'], input=script, capture_output=True, text=True, timeout=30)
            self.assertEqual((ran.returncode, ran.stdout), (0, ''))


# --- a fleet --------------------------------------------------------------------------------------------------------------


@needs(yaml=package('yaml'), duckdb=package('duckdb'), kubernetes_validate=package('kubernetes_validate'), xargs=program('xargs') is not None)
class FleetTest(SshHost, Directory):
    """The recipes of README's "A fleet", taken from there."""

    def setUp(self) -> None:
        super().setUp()
        for name in ('stream_client.py', 'stream_report.py'):
            (self.here / name).symlink_to(ROOT / name)
        self.path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'

    def bash(self, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(['bash', '-c', script], cwd=self.here, env=environment(**{'PATH': self.path, **env}), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=90)

    def test_xargs_over_ssh(self) -> None:
        script = block('sh', 'xargs -P').replace(':8000/', f':{self.fixture_port}/').replace('\npython3 stream_report', '\necho "xargs: $?"\npython3 stream_report')
        self.path = self.configured(f'IdentityFile {self.folder}/user', 'IdentitiesOnly yes', f'UserKnownHostsFile {self.folder}/known.{self.port}.host',
                                    f'HostKeyAlias [127.0.0.1]:{self.port}', 'StrictHostKeyChecking yes')['PATH'].replace(os.environ['PATH'], self.path)
        good = [f'127.0.0.1:{self.port}', f'localhost:{self.port}', f'{getpass.getuser()}@127.0.0.1:{self.port}']
        for hosts, status in (([*good, f'127.0.0.1:{free_port()}'], 123), (good, 0)):
            (self.here / 'hosts').write_text(''.join(f'{host}\n' for host in hosts))
            shutil.rmtree(self.here / 'records', ignore_errors=True)
            ran = self.bash(script)
            self.assertIn(f'xargs: {status}\n', ran.stdout, ran.stderr)
            records = [json.loads((self.here / 'records' / f'{host}.json').read_text()) for host in hosts]
            self.assertEqual([record['label'] for record in records], hosts)
            self.assertEqual([record['outcome'] for record in records], ['passed'] * 3 + ['tunnel_failed'] * (len(hosts) - 3), ran.stderr)
            self.assertEqual({record['request']['path_taken'] for record in records}, {'ssh'})
            self.assertEqual(sum(map(int, re.findall(r'(?m)^\w+ runs: (\d+)$', ran.stdout))), len(hosts), ran.stdout)
            self.assertEqual(ran.returncode, 0, ran.stderr)

    def fleet(self) -> list[dict[str, Any]]:
        """The Job and the CronJob, which asks the same."""
        found: list[dict[str, Any]] = loaded(block('yaml', 'kind: CronJob'))['items']
        self.assertEqual([item['kind'] for item in found], ['Job', 'CronJob'])
        self.assertEqual(found[1]['spec']['jobTemplate']['spec'], found[0]['spec'])
        return found

    def test_job_and_cron_job_are_valid(self) -> None:
        from kubernetes_validate import utils

        version = utils.latest_version()
        VERSIONS['Kubernetes'] = f'{version} (the schema of the API)'
        breaks: tuple[Callable[[dict[str, Any]], Any], ...] = (
            lambda job: job.update(completionsMode='Indexed'), lambda job: job.update(parallelism='four'),
            lambda job: job['template']['spec']['containers'][0].pop('name'))
        for item in self.fleet():
            utils.validate(item, version, strict=True)
            for break_it in breaks:
                broken = json.loads(json.dumps(item))
                break_it(broken['spec']['jobTemplate']['spec'] if item['kind'] == 'CronJob' else broken['spec'])
                with self.assertRaises(utils.ValidationError):
                    utils.validate(broken, version, strict=True)

    def test_the_job_keeps_the_rules_that_no_schema_tells(self) -> None:
        job = self.fleet()[0]['spec']
        pod = job['template']['spec']
        self.assertEqual((pod['restartPolicy'], job['backoffLimitPerIndex'], job['completionMode']), ('Never', 0, 'Indexed'))
        self.assertLessEqual(job['maxFailedIndexes'], job['completions'])
        codes = {code: rule['action'] for rule in job['podFailurePolicy']['rules'] for code in rule.get('onExitCodes', {}).get('values', ())}
        self.assertEqual(codes, {1: 'FailIndex', 2: 'FailJob', 3: 'FailIndex'})
        conditions = [(rule['action'], pattern) for rule in job['podFailurePolicy']['rules'] for pattern in rule.get('onPodConditions', ())]
        self.assertEqual(conditions, [('Ignore', {'type': 'DisruptionTarget', 'status': 'True'})])
        deadline = next(int(word.removeprefix('--deadline=')) for word in pod['containers'][0]['args'] if word.startswith('--deadline='))
        self.assertGreater(job['activeDeadlineSeconds'], deadline * -(-job['completions'] // job['parallelism']))
        script = block('sh', 'kubectl create')
        self.assertIn(f'configmap {pod["volumes"][0]["configMap"]["name"]} ', script)
        secret = pod['containers'][0]['env'][0]['valueFrom']['secretKeyRef']
        self.assertIn(f'secret generic {secret["name"]} --from-file={secret["key"]}=/dev/stdin', script)

    def contained(self, model: str, index: int) -> tuple[int, str, str]:
        """The container's command, run here: its exit status, its log and its termination message."""
        container = self.fleet()[0]['spec']['template']['spec']['containers'][0]
        message = self.here / 'termination-log'
        message.touch()
        words = [word.replace('$(JOB_COMPLETION_INDEX)', str(index)).replace('/client/', f'{self.here}/client/').replace('/dev/termination-log', str(message))
                 for word in container['command'] + container['args']]
        ran = subprocess.run([*(word.replace('--model=tiny', f'--model={model}') for word in words), f'--connect-to=127.0.0.1:{self.cluster_port}'],
                             cwd='/', env={'PATH': self.path, container['env'][0]['name']: KEY}, capture_output=True, text=True, timeout=60)
        self.assertEqual(ran.stderr, '')
        return ran.returncode, ran.stdout, message.read_text()

    def test_the_container_of_the_job(self) -> None:
        import trustme

        script = block('sh', 'kubectl create')
        authority = trustme.CA()
        authority.cert_pem.write_to_path(f'{self.here}/ca.pem')
        authority.issue_cert('vllm.models.svc').private_key_and_cert_chain_pem.write_to_path(f'{self.here}/chain.pem')
        secure, self.cluster_port = fixture_program('--certificate', self.here / 'chain.pem')
        self.served(secure)
        (self.here / 'client').mkdir()
        for name in re.findall(r'--from-file=([\w.]+)(?=\s|$)', script.splitlines()[0]):
            shutil.copy(self.here / name, self.here / 'client' / name)
        logs = ''
        for index, (model, status, outcome, said) in enumerate((('tiny', 0, 'passed', 'passed 2 content events'), ('mode:broken', 1, 'no_done', 'FAILED at completion'))):
            got, log, message = self.contained(model, index)
            record = json.loads(log)
            self.assertEqual((got, log.count('\n'), record['outcome'], record['label']), (status, 1, outcome, str(index)))
            self.assertIn(said, message)
            self.assertNotIn(KEY, log + message)
            logs += log
        got, log, message = self.contained('', 2)
        self.assertEqual((got, log), (2, ''))
        self.assertIn('--model: must be text', message)
        (self.here / 'logs').write_text(logs)
        (self.here / 'kubectl').write_text('#!/bin/sh\nexec cat logs\n')
        (self.here / 'kubectl').chmod(0o755)
        ran = self.bash(next(line for line in script.splitlines() if line.startswith('kubectl logs')), PATH=f'{self.here}:{self.path}')
        self.assertEqual((ran.returncode, ran.stderr), (0, ''))
        self.assertRegex(ran.stdout, r'(?m)^Synthetic runs: 2$')

    def test_duckdb(self) -> None:
        import duckdb

        VERSIONS['DuckDB'] = duckdb.__version__
        (self.here / 'records').mkdir()
        for at, (mode, label) in enumerate((('ok', 'a'), ('ok', 'a'), ('slow-head', 'a'), ('broken', 'a'), ('length', 'b'), ('closed-at-once', 'b'), ('ok', None))):
            run('--fixture', mode, *(('--label', label) if label else ()), '--output', f'records/{at}.json', cwd=self.here)
        real = json.loads((self.here / 'records' / '0.json').read_text()) | {'synthetic': False, 'first_text_ms': 1.5}
        (self.here / 'records' / 'real.json').write_text(json.dumps(real))
        records = [json.loads(path.read_text()) for path in (self.here / 'records').iterdir()]
        expected = {}
        for key in {(record['label'], record['synthetic']) for record in records}:
            group = [record for record in records if (record['label'], record['synthetic']) == key]
            passed = [record['first_text_ms'] for record in group if record['ok']]
            expected[key] = (len(group), len(passed) / len(group), statistics.median(passed) if passed else None)
        with duckdb.connect() as connection:
            rows = connection.execute(block('sql', 'read_json').replace('records/', f'{self.here}/records/')).fetchall()
        self.assertEqual({(label, synthetic): tuple(rest) for label, synthetic, *rest in rows}, expected)
        self.assertEqual(expected['a', False], (1, 1.0, 1.5))
        self.assertEqual(expected['a', True][:2], (4, 0.75))


if __name__ == '__main__':
    unittest.main()
