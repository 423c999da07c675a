"""demo_app.py as a server and as a program: its endpoint, its manners, its start and end."""

import concurrent.futures
import contextlib
import functools
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.parse
from pathlib import Path

import pytest
from gradio_client import Client
from test_demo import KINDS, PROMPT, TEXT, make, tokenizer

import demo_app
from support.explain import explain

SCRIPT = Path(demo_app.__file__)
OWN = {"127.0.0.1", "::1", "localhost", "0.0.0.0", socket.gethostname()}
with contextlib.suppress(OSError):
    OWN |= {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
JSON = {"Content_Type": "application/json"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Connections to this machine alone; any other fails at once."""
    connect = socket.socket.connect

    def checked(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in OWN:
            raise OSError(f"the tests use no network, not even {address[0]}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", checked)


@pytest.fixture(autouse=True, scope="module")
def as_before():
    """The environment and the handling of SIGTERM, which a server changes, are put back."""
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, handler)


def unused_port(family=socket.AF_INET, host="127.0.0.1"):
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An output folder with three runs."""
    out = tmp_path_factory.mktemp("runs")
    for kind in ("mhf", "standard", "untokenized"):
        make(out / kind, **KINDS[kind])
    return out


@pytest.fixture(scope="module")
def served(runs):
    """The running page and its address, as `python demo_app.py --checkpoint ... --out ...`."""
    given = dict(checkpoint=runs / "mhf", out=runs, device="cpu", host="127.0.0.1", share=False)
    page, address = demo_app.serve(types.SimpleNamespace(port=unused_port(), **given))
    page.lab.open = functools.cache(page.lab._open)
    yield page, address
    page.demo.close()


@pytest.fixture(scope="module")
def client(served):
    return Client(served[1], verbose=False)


def request(address, path, body=None, method="POST", **headers):
    """Status and content of a path, sent as it is: nothing is normalised before."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(address).netloc, timeout=60)
    method, length = ("GET", {}) if body is None else (method, {"Content_Length": str(len(body))})
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in (length | headers).items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(body)
    answer = connection.getresponse()
    status, content = answer.status, answer.read()
    connection.close()
    return status, content


class User:
    """A browser's side of the page: what its script sends, and what it gets."""

    def __init__(self, served):
        (self.page, self.address), self.name = served, f"user{id(self)}"

    def send(self, handler, do, **data):
        """The final values of what the event draws: {view: HTML}; AssertionError with a message."""
        fns = self.page.demo.fns.items()
        index, fn = next(x for x in fns if getattr(x[1].fn, "__name__", "") == handler)
        body = dict(data=[None] * len(fn.inputs), fn_index=index, session_hash=self.name)
        body |= dict(event_data={"do": do} | data, trigger_id=None)
        path, body = "/gradio_api/queue/join", json.dumps(body).encode()
        assert request(self.address, path, body, **JSON)[0] == 200
        _, stream = request(self.address, f"/gradio_api/queue/data?session_hash={self.name}")
        said = [json.loads(x[5:]) for x in stream.decode().split("\n\n") if x.startswith("data:")]
        (last,) = [m for m in said if m["msg"] == "process_completed"]
        assert last["success"], last["output"]["error"]
        return dict(zip(("session", "tabs", *demo_app.DRAWN), last["output"]["data"]))

    def act(self, do, **data):
        return self.send("on_act", do, **data)


def about(expected):
    """The same JSON, in which numbers may differ by 1e-6, relative or absolute."""
    close_to = lambda number: pytest.approx(float(number), rel=1e-6, abs=1e-6)  # noqa: E731
    return json.loads(json.dumps(expected), parse_float=close_to)


QUESTIONS = [
    {}, {"position": 1, "top_k": 3}, {"position": -3, "force": {"0": 5, "1": 7}},
    {"checkpoint": "standard"}, {"checkpoint": "mhf", "only": {"1": 7}, "top_k": 100},
]  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_the_endpoint_is_the_library(client, served, question):
    """/inspect answers explain's dict, and the ids, over HTTP, too."""
    told = client.predict(PROMPT, **question, api_name="/inspect")
    lab, ids = served[0].lab, tokenizer().encode(PROMPT)
    model = lab.of(demo_app.FRESH | {"checkpoint": question.get("checkpoint", "mhf")}).model
    what = [{int(j): b for j, b in question.get(k, {}).items()} for k in ("force", "only")]
    expected = explain(model, ids, question.get("position", -1), question.get("top_k", 10), *what)
    assert told == about(expected | {"ids": ids})


WRONG = [
    dict(prompt=""), dict(prompt="a" * 10_001), dict(prompt=TEXT), dict(prompt=5),
    dict(prompt="<img src=x onerror=a>", position=99), dict(position="x"), dict(position=0.5),
    dict(top_k=0), dict(top_k=101), dict(top_k="5"), dict(force={"3": 0}), dict(force={"0": 64}),
    dict(force={"x": 0}), dict(force=["<b>"]), dict(only={"0": -1}), dict(only={"0": 0, "1": 5}),
    dict(checkpoint="/etc/passwd"), dict(checkpoint="<b>"), dict(checkpoint="untokenized"),
    dict(checkpoint="standard", only={"0": 1}), dict(checkpoint=["mhf"]),
]  # fmt: skip


def raw_question(address, data):
    """The event stream that a bare HTTP request to /inspect gets."""
    status, content = request(address, "/gradio_api/call/inspect", data, **JSON)
    if status != 200:
        return status, content
    return request(address, f"/gradio_api/call/inspect/{json.loads(content)['event_id']}")


def ask(address, prompt="the one", **question):
    """("complete" or "error", the JSON) that a question gets."""
    plain = dict(position=-1, top_k=1, force=None, checkpoint="", only=None)
    body = json.dumps({"data": [prompt, *(plain | question).values()]}).encode()
    event, data = raw_question(address, body)[1].decode().split("\ndata: ")
    return event.removeprefix("event: "), json.loads(data)


@pytest.mark.parametrize("question", WRONG, ids=lambda q: str(q)[:40])
def test_the_endpoint_refuses_in_a_sentence(served, question):
    """A wrong input comes back as one short sentence, without a traceback and unescaped."""
    event, told = ask(served[1], **question)
    assert event == "error" and 0 < len(told["error"]) < 300 and "\n" not in told["error"]
    assert not re.search("Traceback|&lt;|wrong; the server", told["error"])


ODD = ['1e999, 3, null, ""', 'NaN, 3, null, ""', '0, 1e999, null, ""', '0, 3, {"0": 1e999}, ""']


@pytest.mark.parametrize("odd", [*ODD, '0, 3, null, {"mhf": 1}', "", "{", "[[[]]]"])
def test_what_only_raw_json_can_say(served, odd):
    """Infinities, dicts for names and what is no request are refused; the next one is answered."""
    status, content = raw_question(served[1], b'{"data": ["the one", %s, null]}' % odd.encode())
    assert status != 200 or b"event: error" in content
    assert ask(served[1])[0] == "complete"


def test_the_endpoints_are_exact(client):
    """One endpoint is public: /inspect with its six parameters."""
    told = client.view_api(return_format="dict", print_info=False)
    assert told["named_endpoints"].keys() == {"/inspect"} and not told["unnamed_endpoints"]
    names = [p["parameter_name"] for p in told["named_endpoints"]["/inspect"]["parameters"]]
    assert names == ["prompt", "position", "top_k", "force", "checkpoint", "only"]


def routes_of(app):
    """(path, methods) of every route, with a word in the place of each parameter."""
    for route in app.routes:
        if hasattr(route, "original_router"):
            yield from routes_of(route.original_router)
        else:
            yield re.sub(r"{[^}]*}", "x", route.path), route.methods or {"GET"}


ALLOWED = {"/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset"}
OTHERS = ["call/on_act", "run/on_act", "call/v2/inspect", "%75pload", "queue/join/../upload"]


def test_other_routes_do_not_answer(served):
    """Of all routes that take something only those that the page needs do not answer 403."""
    posts = {path for path, methods in routes_of(served[0].demo.app) if methods - {"GET", "HEAD"}}
    taken = [path for path in posts if request(served[1], path, b"{}", **JSON)[0] != 403]
    assert {path.rstrip("/") for path in taken} == ALLOWED and len(posts) > 20
    for path in ["/upload", "//gradio_api/upload", *(f"/gradio_api/{name}" for name in OTHERS)]:
        assert request(served[1], path, b"{}")[0] == 403, path
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert request(served[1], "/gradio_api/queue/data", b"{}", method)[0] == 403


def test_large_bodies_are_refused(served):
    """Over 64 KB, or without a length that is a number; 64 KB are read."""
    path, chunks = "/gradio_api/call/inspect", dict(Transfer_Encoding="chunked", Content_Length="x")
    for body, length in ((b"x" * 65_537, {}), (b"", dict(Content_Length="9" * 20)), (b"0", chunks)):
        assert request(served[1], path, body, **JSON | length)[0] in (400, 413)
    assert raw_question(served[1], b'{"data": ["the"], "x": "%s"}' % (b"x" * 65_000))[0] == 200


def test_other_names_of_the_host_are_refused(served):
    """On loopback a page of another name, which a rebound DNS entry leads here, gets nothing."""
    port = urllib.parse.urlsplit(served[1]).port
    for host in ("evil.example", "127.0.0.1.evil.example", ""):
        assert request(served[1], "/", Host=f"{host}:{port}")[0] == 421
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert request(served[1], "/config", Host=f"{host}:{port}")[0] == 200


HIDDEN = ["/etc/passwd", "demo_app.py", "../demo_app.py", "../../../../etc/passwd", str(SCRIPT)]
FORMS = ["/gradio_api/file={}", "/file={}", "/gradio_api/file/{}", "/gradio_api/file%3D{}", "/{}"]
FORMS += ["/static/{}", "/assets/{}", "/svelte/{}", "/gradio_api/proxy=http://127.0.0.1:9/{}"]


@pytest.mark.parametrize("form", FORMS)
def test_no_file_is_served(served, form):
    """Neither the password file nor a source, nor a checkpoint, in any form of the path."""
    weights = served[0].lab.paths()["standard"] / "step-1" / "config.json"
    for path in (*HIDDEN, str(weights)):
        for told in (path, urllib.parse.quote(path, safe=""), path.replace("..", "%2e%2e")):
            status, content = request(served[1], form.format(told))
            assert status in (400, 403, 404, 405) and not re.search(b"root:|import|vocab_", content)


def test_nothing_is_uploaded(served):
    """No part of the page takes a file, and the route for one is closed."""
    parts = {part["type"] for part in served[0].demo.get_config_file()["components"]}
    assert parts and not parts & {"file", "uploadbutton", "fileexplorer", "image", "audio", "video"}
    how = {"Content_Type": "multipart/form-data; boundary=x"}
    assert request(served[1], "/gradio_api/upload", b"--x--\r\n", **how)[0] == 403


def test_many_users(served):
    """20 users with 5 requests each at once: none is lost, each gets the answer to its own."""

    def user(number):
        prompts = [f"the one of {number} or {i}" for i in range(5)]
        return [(prompt, ask(served[1], prompt)[1][0]) for prompt in prompts]

    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        found = [pair for pairs in pool.map(user, range(20)) for pair in pairs]
    assert len(dict(found)) == len(found) == 100
    model = served[0].lab.of(demo_app.FRESH | {"checkpoint": "mhf"}).model
    assert all(told["ids"] == tokenizer().encode(prompt) for prompt, told in found)
    for _, told in found[::7]:
        assert told["top_tokens"] == about(explain(model, told["ids"], top_k=1)["top_tokens"])


def test_two_sessions_do_not_mix(served):
    """What one user types, adds and generates is not in what the other gets, whoever comes next."""
    one, two = User(served), User(served)
    assert one.act("type", prompt="the zebra") and two.act("type", prompt="or not to be")
    assert "zebra" in one.act("add", words="zebra", space=True)["vocabulary"]
    seen = two.act("add", words="okapi", space=True)
    assert "okapi" in seen["vocabulary"] and "zebra" not in "".join(map(str, seen.values()))
    written = one.send("on_write", "generate", many="3", seed="0")
    assert "zebra" in written["way"] and "okapi" not in "".join(map(str, written.values()))
    seen = two.act("pick", index="1")
    assert "okapi" in seen["vocabulary"] and "zebra" not in "".join(map(str, seen.values()))


def test_a_mistake_is_one_sentence_and_the_page_goes_on(served):
    """Neither a traceback nor markup; the session is what it was."""
    user = User(served)
    user.act("type", prompt="the one")
    wrong = dict(what=dict(function="9", bucket="0"), add=dict(words="<b>" * 30, space=True))
    for do, data in (wrong | dict(nowhere={}, pick={}, type={})).items():
        with pytest.raises(AssertionError) as error:
            user.act(do, **data)
        assert not re.search('Traceback|<b>|File "', str(error.value).partition("\n")[0])
    assert "the one" in user.act("type", prompt="the one two")["link"].replace("+", " ")


def test_generation_holds_up_nobody(served):
    """While 3 users generate, another's requests are answered within 2 s each."""
    users = [User(served) for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        how = dict(do="generate", many="45", seed="1")
        jobs, waited = [pool.submit(u.send, "on_write", **how) for u in users], []
        for _ in range(3):
            start = time.monotonic()
            assert ask(served[1])[0] == "complete"
            waited.append(time.monotonic() - start)
        during = not all(job.done() for job in jobs)
        assert all("data-do" in job.result()["generate"] for job in jobs)
    assert during and max(waited) < 2, waited


@pytest.fixture
def program(monkeypatch, runs):
    """main() in a terminal that knows ASCII alone: (status, standard output, standard error)."""

    def call(*flags, checkpoint=runs / "mhf", port=None):
        flags = [*flags, "--out", str(runs), "--port", str(port or unused_port())]
        flags += ["--checkpoint", str(checkpoint)] if checkpoint else []
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
        with monkeypatch.context() as patch:
            for name, stream in zip(("stdout", "stderr"), streams):
                patch.setattr(sys, name, stream)
            status = demo_app.main(flags)
        [stream.flush() for stream in streams]
        return status, *(stream.buffer.getvalue().decode("utf-8") for stream in streams)

    return call


def assert_refused(found, *parts):
    """Nothing but one sentence with the parts, and status 2."""
    status, out, errors = found
    assert status == 2 and not out and errors.count("\n") == 1
    assert errors.startswith("demo_app.py: error: ") and all(part in errors for part in parts)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_selftest_whatever_the_proxies(program, monkeypatch, host):
    """--selftest answers one request and ends; dead proxies of the environment have no say."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        kind = "socks5" if name.lower() == "all_proxy" else "http"
        monkeypatch.setenv(name, f"{kind}://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    try:
        port = unused_port(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError:
        pytest.skip("this machine has no IPv6")
    status, out, errors = program("--selftest", "--host", host, port=port)
    assert status == 0 and "Traceback" not in errors and "selftest: " in out
    assert f"http://[{host}]:{port}" in out if ":" in host else f"http://{host}:{port}" in out


def test_an_address_for_others(program, monkeypatch):
    """--host 0.0.0.0 prints an address that can be opened; Ctrl-C then ends it, with status 0."""
    codes = []

    def interrupted(self):
        address = re.search(r"http://\S+", sys.stdout.buffer.getvalue().decode())[0]
        codes.append(request(address, "/")[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_app.gr.Blocks, "block_thread", interrupted)
    status, out, errors = program("--host", "0.0.0.0")
    assert status == 0 and not errors and "0.0.0.0" not in out and codes == [200]


def test_what_cannot_be_served(program, tmp_path, monkeypatch):
    """A port, an address or a checkpoint that cannot be: one sentence each, and status 2."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert_refused(program(port=port), f"--port {port}")
    for port in (65536, -1):
        assert_refused(program(port=port), "65535")
    assert_refused(program("--host", "192.0.2.1"), "--host 192.0.2.1")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere", "nobody/nothing", "empty"):
        assert_refused(program(checkpoint=name), name)
    shipped = make(tmp_path / "shipped") / "step-1"
    config = json.loads((shipped / "config.json").read_text())
    (shipped / "config.json").write_text(json.dumps(config | {"bottle_neck_dim": 5}))
    monkeypatch.setattr(demo_app, "SHIPPED", {"shipped": shipped})  # a student's own mhf.py
    assert_refused(program(checkpoint=None), str(shipped), "--checkpoint")


WATCH = f"""
import os, runpy, sys

def watch(event, args):
    host = args[1] if event in ("socket.connect", "socket.sendto") else args[0] if args else None
    host = host[0] if isinstance(host, tuple) else host
    if event.startswith(("socket.connect", "socket.send", "socket.get")) and isinstance(host, str):
        if host not in {sorted(OWN | {""})!r}:
            os.write(2, f"OUTSIDE {{event}} {{args}}\\n".encode())

sys.addaudithook(watch)
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.fixture(scope="module", autouse=True)
def processes(runs, tmp_path_factory):
    """The program twice, started first of all: [(process, its folder of temporary files)]."""
    started, flags = [], ["--checkpoint", str(runs / "mhf"), "--out", str(runs), "--port"]
    for name in ("one", "two"):
        tmp = tmp_path_factory.mktemp(name)
        # Gradio's own folder is somebody else's: who got there first may make it a file.
        (tmp / "gradio").write_text("somebody else's", encoding="utf-8")
        environment = {k: v for k, v in os.environ.items() if k != "GRADIO_TEMP_DIR"}
        environment |= {"TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
        call = [sys.executable, "-c", WATCH, *flags, str(unused_port())]
        heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # nohup ignores it
        how = dict(stdout=-1, stderr=-1, encoding="utf-8", preexec_fn=heard)
        started.append((subprocess.Popen(call, env=environment, cwd=tmp, **how), tmp))
    yield started
    for process, _ in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_from_start_to_end(processes, which):
    """No other machine is asked for; a signal ends it cleanly, and its folder is removed."""
    process, folder = processes[which == signal.SIGINT]
    line = process.stdout.readline()
    assert "http://" in line, process.communicate(timeout=60)
    address = re.search(r"http://\S+", line)[0]
    assert request(address, "/")[0] == 200 and ask(address)[0] == "complete"
    (private,) = (path for path in folder.iterdir() if path.name != "gradio")
    assert private.is_dir() and private.stat().st_mode & 0o77 == 0
    process.send_signal(which)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors, errors[-500:]
    assert "OUTSIDE" not in errors and [path.name for path in folder.iterdir()] == ["gradio"]
