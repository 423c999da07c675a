"""demo_app.py as a server and as a program: its endpoint, its manners, its start and end."""

import concurrent.futures
import http.client
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest
from conftest import one_sentence
from gradio_client import Client
from gradio_client.exceptions import AppError
from test_demo import KINDS, PROMPT, TEXT, make, tokenizer

import demo_app
from support.explain import explain

SCRIPT = Path(demo_app.__file__)
LOOPBACK = ("127.0.0.1", "::1", "localhost", "0.0.0.0")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Connections to this machine alone; any other fails at once."""
    connect = socket.socket.connect

    def checked(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise OSError(f"the tests use no network, not even {address[0]}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", checked)


def unused_port(family=socket.AF_INET, host="127.0.0.1"):
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def as_before():
    """The environment and the handling of SIGTERM, which a server changes, are put back."""
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An output folder with three runs."""
    out = tmp_path_factory.mktemp("runs")
    for kind in ("mhf", "standard", "untokenized"):
        make(out / kind, **KINDS[kind])
    return out


@pytest.fixture(scope="module")
def served(runs):
    """The running page and its address, with the environment put back at the end."""
    before = dict(os.environ)
    flags = ["--checkpoint", str(runs / "mhf"), "--out", str(runs), "--port", str(unused_port())]
    page, address = demo_app.serve(demo_app.parse_arguments(flags))
    yield page, address
    page.demo.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def client(served):
    return Client(served[1], verbose=False)


def close_to(told, expected):
    """The same JSON; numbers may differ by 1e-6 relative or absolute, as batches round."""
    if isinstance(expected, dict):
        return told.keys() == expected.keys() and all(close_to(told[k], expected[k]) for k in told)
    if isinstance(expected, list):
        return len(told) == len(expected) and all(map(close_to, told, expected))
    if isinstance(expected, float):
        return told == pytest.approx(expected, rel=1e-6, abs=1e-6)
    return told == expected


# ---------------------------------------------------------------------------------------------
# The endpoint
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"position": 1, "top_k": 3},
        {"position": -3, "force": {"0": 5, "1": 7}},
        {"checkpoint": "standard"},
        {"checkpoint": "mhf", "force": {}},
    ],
    ids=str,
)
def test_the_endpoint_is_the_library(client, served, question):
    """/inspect answers explain's dict, and the ids, over HTTP, too."""
    told = client.predict(PROMPT, **question, api_name="/inspect")
    kind = question.get("checkpoint", "mhf")
    model, ids = served[0].lab.get(kind).model, tokenizer().encode(PROMPT)
    force = {int(j): b for j, b in question.get("force", {}).items()}
    expected = explain(model, ids, question.get("position", -1), question.get("top_k", 10), force)
    if kind == "standard":
        for entry in told["tokens"] + told["top_tokens"]:
            raw = tokenizer().token_bytes(entry["id"])
            assert entry["text"] == raw.decode("utf-8", "backslashreplace")
            entry["text"] = None
    assert close_to(told, expected | {"ids": ids})


WRONG = [
    {"prompt": ""},
    {"prompt": "a" * 10_001},
    {"prompt": TEXT},
    {"prompt": 5},
    {"prompt": "<img src=x onerror=alert(1)>", "position": 99},
    {"position": "1"},
    {"position": 0.5},
    {"top_k": 0},
    {"top_k": 10**6},
    {"force": {"3": 0}},
    {"force": {"0": 64}},
    {"force": ["<b>"]},
    {"checkpoint": "/etc/passwd"},
    {"checkpoint": "<b>"},
    {"checkpoint": "untokenized"},
]


@pytest.mark.parametrize("question", WRONG, ids=lambda q: str(q)[:40])
def test_the_endpoint_refuses_in_a_sentence(client, served, question):
    """A wrong input comes back as the library's or the app's sentence, unescaped: it is no HTML."""
    question = {"prompt": "the one"} | question
    with pytest.raises(ValueError) as expected:
        demo_app.inspect_prompt(served[0].lab, **question)
    with pytest.raises(AppError) as error:
        client.predict(**question, api_name="/inspect")
    assert str(error.value) == str(expected.value)
    one_sentence(error)


def request(address, path, body=None, **headers):
    """Status and content of a path, sent as it is: nothing is normalised before."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(address).netloc, timeout=20)
    connection.putrequest("GET" if body is None else "POST", path)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def raw_question(address, data, name="inspect"):
    """The event stream that a bare HTTP request to an endpoint gets."""
    how = {"Content-Type": "application/json"}
    status, content = request(address, f"/gradio_api/call/{name}", data, **how)
    if status != 200:
        return status, content
    event = json.loads(content)["event_id"]
    return request(address, f"/gradio_api/call/{name}/{event}")


@pytest.mark.parametrize(
    "data",
    [
        b'{"data": ["the one", 1e999, 3, null, ""]}',
        b'{"data": ["the one", -1e999, 3, null, ""]}',
        b'{"data": ["the one", NaN, 3, null, ""]}',
        b'{"data": ["the one", 0, 1e999, null, ""]}',
        b'{"data": ["the one", 0, 3, {"0": 1e999}, ""]}',
        b'{"data": ["the one", 0, 3, null, ["mhf"]]}',
        b'{"data": ["the one", 0, 3, null, {"mhf": 1}]}',
    ],
    ids=ascii,
)
def test_what_only_raw_json_can_say(served, data):
    """Infinities, NaN and lists where names belong are refused in a sentence, too: the answer is
    neither an empty error nor a result."""
    status, content = raw_question(served[1], data)
    assert status == 200 and b"event: error" in content
    assert b"must be" in content or b"there is no checkpoint" in content


MALFORMED = [
    b"",
    b"{",
    b"[]",
    b'{"data": []}',
    b'{"data": "the"}',
    b'{"data": ["the"]}' * 2,
    b'{"data": ["the", 1, 2, 3, 4, 5, 6]}',
    b'{"data": [[[[[[]]]]]]}',
]


@pytest.mark.parametrize("data", MALFORMED, ids=ascii)
def test_malformed_requests_do_no_harm(served, client, data):
    """What is no request is refused, and the next one is answered."""
    status, content = raw_question(served[1], data)
    assert status != 200 or b"event: complete" not in content
    assert client.predict("the one", api_name="/inspect")["ids"]


def test_the_endpoints_are_exact(client, served):
    """One endpoint is named: /inspect with its five parameters; others cannot be called."""
    told = client.view_api(return_format="dict", print_info=False)
    assert told["named_endpoints"].keys() == {"/inspect"} and not told["unnamed_endpoints"]
    names = [p["parameter_name"] for p in told["named_endpoints"]["/inspect"]["parameters"]]
    assert names == ["prompt", "position", "top_k", "force", "checkpoint"]
    for name in ("on_look", "on_generate", "on_add", "predict"):
        with pytest.raises(ValueError):
            client.predict("the", api_name=f"/{name}")


HIDDEN = [
    "/etc/passwd",
    "demo_app.py",
    "../demo_app.py",
    "../../../../../../etc/passwd",
    str(SCRIPT),
]
FORMS = [
    "/gradio_api/file={}",
    "/file={}",
    "/gradio_api/file/{}",
    "/gradio_api/file%3D{}",
    "/static/{}",
    "/assets/{}",
    "/{}",
    "/gradio_api/stream/{}",
]


@pytest.mark.parametrize("form", FORMS)
def test_no_file_is_served(served, form):
    """Neither the password file nor a source, nor a checkpoint, in any form of the path."""
    weights = served[0].lab.paths()["standard"] / "step-1" / "config.json"
    for path in (*HIDDEN, str(weights)):
        for told in (path, urllib.parse.quote(path, safe=""), path.replace("..", "%2e%2e")):
            status, content = request(served[1], form.format(told))
            assert status in (400, 403, 404, 405), (form, told, status)
            assert b"root:" not in content and b"import" not in content
            assert b"vocab_size" not in content


@pytest.mark.parametrize("path", ["/monitoring", "/gradio_api/proxy=http://127.0.0.1:9/x"])
def test_nothing_else_is_served(served, path):
    """Neither what others asked nor pages of other servers."""
    assert request(served[1], path)[0] in (400, 403, 404)


def test_no_file_is_taken(served):
    """A file that is sent is not stored: the page has no use for one."""
    body = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.html"\r\n'
        b"Content-Type: text/html\r\n\r\n<script>alert(1)</script>\r\n--x--\r\n"
    )
    how = {"Content-Type": "multipart/form-data; boundary=x"}
    status, content = request(served[1], "/gradio_api/upload", body, **how)
    assert status >= 400, content
    stored = Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*.html")
    assert not list(stored)


def test_the_page_itself(served):
    """The page is served with the first view in it, and asks for nothing from outside."""
    status, content = request(served[1], "/")
    text = content.decode("utf-8")
    assert status == 200 and "MultiHashFormer" in text
    loaded = re.findall(r"<(?!a\b|meta\b)[^>]*\b(?:src|href)=[\"']?(?:https?:)?//([^/\"'>]*)", text)
    assert not [host for host in loaded if host.partition(":")[0] not in LOOPBACK]
    config = json.loads(request(served[1], "/config")[1])
    assert config["title"] == "MultiHashFormer" and not config.get("analytics_enabled")
    assert config.get("run_history", False) is False


# ---------------------------------------------------------------------------------------------
# Many users
# ---------------------------------------------------------------------------------------------

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def user(number, address, questions, wait=lambda: None, seen=None):
    """Asks one question after the other; returns (prompt, answer) of each."""
    client, found = Client(address, verbose=False), []
    wait()
    for i in range(questions):
        prompt = f"the {WORDS[number % 9]} of {number} or {WORDS[i % 9]} {i}"
        job = client.submit(prompt, -1, 5, api_name="/inspect")
        while seen is not None and not job.done():
            if (rank := job.status().rank) is not None:
                seen.append(rank)
            time.sleep(0.1)
        found.append((prompt, job.result(60)))
    return found


def crowd(users, address, questions, **how):
    """All of them at once."""
    with concurrent.futures.ThreadPoolExecutor(users) as pool:
        jobs = [pool.submit(user, n, address, questions, **how) for n in range(users)]
        return list(itertools.chain(*(job.result(120) for job in jobs)))


def assert_own_answers(lab, found):
    """Every answer is that to its own question."""
    model = lab.get("mhf").model
    for prompt, told in found:
        ids = tokenizer().encode(prompt)
        assert told["ids"] == ids
        assert close_to(told["top_tokens"], explain(model, ids, top_k=5)["top_tokens"])


def test_many_users(served):
    """6 users with 4 requests each: none fails or is lost, each gets the answers to its own
    questions, and who waits is told the place."""
    lab, seen = served[0].lab, []
    lab.lock.acquire()  # until all have asked
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            job = pool.submit(crowd, 6, served[1], 4, seen=seen)
            deadline = time.monotonic() + 60
            while max(seen, default=0) < 3 and time.monotonic() < deadline and not job.done():
                time.sleep(0.05)
            lab.lock.release()
            found = job.result(120)
    finally:
        if lab.lock.locked():
            lab.lock.release()
    assert len({prompt for prompt, _ in found}) == len(found) == 24 and max(seen) >= 3
    assert_own_answers(lab, found)


def test_a_user_who_leaves(served):
    """A request that is dropped while it waits does not hold up the others."""
    with served[0].lab.lock:
        status, content = request(
            served[1],
            "/gradio_api/call/inspect",
            b'{"data": ["the one", -1, 3, null, ""]}',
            **{"Content-Type": "application/json"},
        )
        assert status == 200 and json.loads(content)["event_id"]
    found = crowd(1, served[1], 2)
    assert_own_answers(served[0].lab, found)


# ---------------------------------------------------------------------------------------------
# Starting
# ---------------------------------------------------------------------------------------------


BAD_FLAGS = [("--port", text) for text in ("0", "65536", "-1", "x", "", "7860.5")]
BAD_FLAGS += [("--host", ""), ("--nowhere",)]


@pytest.mark.parametrize("flags", BAD_FLAGS, ids=str)
def test_bad_flags(capsys, flags):
    """A flag that cannot be is named, with exit status 2."""
    with pytest.raises(SystemExit) as stop:
        demo_app.parse_arguments(flags)
    assert stop.value.code == 2 and flags[0] in capsys.readouterr().err


def test_a_busy_port_is_refused():
    """A port that was asked for and is taken is a sentence with its number."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError) as error:
            demo_app.free_port("127.0.0.1", port)
    one_sentence(error, port, "127.0.0.1")


@pytest.fixture
def busy_7860():
    """The first port that is tried is taken, if not by somebody else then by us."""
    try:
        server = socket.create_server(("127.0.0.1", 7860))
    except OSError:
        yield
    else:
        yield
        server.close()


def test_the_next_free_port(busy_7860):
    """Without --port the first free one from 7860 on is taken."""
    port = demo_app.free_port("127.0.0.1", None)
    assert port > 7860
    with socket.create_server(("127.0.0.1", port)):
        assert demo_app.free_port("127.0.0.1", None) > port


def test_a_port_that_is_taken_in_between(monkeypatch, runs):
    """A port that another program takes between look and launch is no traceback: the next one is
    taken, or there is one sentence."""
    free_port, others = demo_app.free_port, []

    def stolen(host, port):
        found = free_port(host, port)
        if not others:
            others.append(socket.create_server((host, found)))
        return found

    monkeypatch.setattr(demo_app, "free_port", stolen)
    flags = demo_app.parse_arguments(["--checkpoint", str(runs / "mhf"), "--out", str(runs)])
    try:
        page, address = demo_app.serve(flags)
        assert urllib.parse.urlsplit(address).port != others[0].getsockname()[1]
        page.demo.close()
    except ValueError as error:
        assert "\n" not in str(error)
    finally:
        others[0].close()


# ---------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch, runs):
    """main() in a terminal that knows ASCII alone, with an emoji in the first example's prompt:
    (status, standard output, standard error), both read as UTF-8."""

    def example(checkpoint):
        return [("label", "O 😀" if checkpoint.tokenizer else "5 7", "reason")]

    def call(*flags, checkpoint=runs / "mhf", port=True):
        flags = [*flags, "--out", str(runs)] + (["--port", str(unused_port())] if port else [])
        flags += ["--checkpoint", str(checkpoint)] if checkpoint else []
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
        with monkeypatch.context() as patch:
            for name, stream in zip(("stdout", "stderr"), streams):
                patch.setattr(sys, name, stream)
            patch.setattr(demo_app, "examples", example)
            status = demo_app.main(list(flags))
        for stream in streams:
            stream.flush()
        return status, *(stream.buffer.getvalue().decode("utf-8") for stream in streams)

    return call


def assert_answered(found):
    """The address and one answer were printed."""
    status, out, errors = found
    assert status == 0 and "Traceback" not in errors
    assert re.search(r"http://\S+:\d+", out) and re.search(r"selftest: .*\d %", out)


def test_selftest(program, busy_7860):
    """--selftest prints the address, with another port where 7860 is taken, and what one request
    was answered, whatever the terminal's encoding, and ends with status 0."""
    found = program("--selftest", port=False)
    assert_answered(found)
    assert int(re.search(r"http://127\.0\.0\.1:(\d+)", found[1])[1]) > 7860
    assert "😀" in found[1]


def test_proxies_do_not_stop_it(program, monkeypatch, runs):
    """Proxy variables of the environment, even of dead proxies, have no say; a checkpoint without
    a tokenizer, which reads token ids, answers, too."""
    dead = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    for name, proxy in (dead | {"all_proxy": "socks5://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(name.upper(), proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert_answered(program("--selftest", checkpoint=runs / "untokenized"))


def test_ipv6(program, runs):
    """::1 is this machine, too; and a standard model answers."""
    try:
        port = unused_port(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    flags = "--selftest", "--host", "::1", "--port", str(port)
    found = program(*flags, port=False, checkpoint=runs / "standard")
    assert_answered(found)
    assert f"http://[::1]:{port}" in found[1]


def test_ctrl_c(program, monkeypatch):
    """Ctrl-C ends the server without a traceback, with status 0."""

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_app.gr.Blocks, "block_thread", interrupted)
    status, out, errors = program()
    assert status == 0 and not errors and "http://" in out


def test_a_busy_port(program):
    """A taken port is one sentence with its number, and status 2."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert_refused(program("--port", str(port), port=False), f"--port {port}")


def assert_refused(found, *parts):
    """Nothing but one sentence with the parts, and status 2."""
    status, out, errors = found
    assert status == 2 and not out and errors.count("\n") == 1
    assert errors.startswith("demo_app.py: error: ") and all(part in errors for part in parts)


@pytest.mark.parametrize("name", ["nowhere", "nobody/nothing", "test_demo_server.py", "empty"])
def test_no_such_checkpoint(program, tmp_path, monkeypatch, name):
    """Neither a folder nor on the hub, a file, an empty folder: one sentence."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "test_demo_server.py").touch()
    monkeypatch.chdir(tmp_path)
    assert_refused(program(checkpoint=name), name)


def test_a_changed_library(program, tmp_path, monkeypatch):
    """Where the shipped checkpoint does not fit a student's mhf.py, the sentence names the flag
    that opens another one."""
    shipped = make(tmp_path / "shipped") / "step-1"
    config = json.loads((shipped / "config.json").read_text())
    (shipped / "config.json").write_text(json.dumps(config | {"bottle_neck_dim": 5}))
    monkeypatch.setattr(demo_app, "SHIPPED", shipped)
    assert_refused(program(checkpoint=None), str(shipped), "--checkpoint")


def test_a_host_of_another_machine(program):
    """An address that this machine does not have is one sentence."""
    assert_refused(program("--host", "192.0.2.1"), "192.0.2.1")


# ---------------------------------------------------------------------------------------------
# A process of its own
# ---------------------------------------------------------------------------------------------

WATCH = f"""
import os, runpy, sys
ALLOWED = {(*LOOPBACK, "", None, b"localhost", b"127.0.0.1")!r}

def watch(event, args):
    if event in ("socket.connect", "socket.sendto"):
        host = args[1][0] if isinstance(args[1], tuple) else None
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = args[0]
    else:
        return
    if host not in ALLOWED:
        os.write(2, f"OUTSIDE {{event}} {{args}}\\n".encode())
        os._exit(66)

sys.addaudithook(watch)
script = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module", autouse=True)
def process(runs, tmp_path_factory):
    """The program in a process of its own, started first of all: (process, its temporary files)."""
    tmp = tmp_path_factory.mktemp("program")
    (tmp / "watch.py").write_text(WATCH, encoding="utf-8")
    (tmp / "tmp").mkdir()
    # Gradio's own folder is somebody else's: who got there first may make it a file.
    (tmp / "tmp" / "gradio").write_text("somebody else's", encoding="utf-8")
    inherited = {k: v for k, v in os.environ.items() if k != "GRADIO_TEMP_DIR"}
    started = subprocess.Popen(
        [sys.executable, str(tmp / "watch.py"), str(SCRIPT), "--port", str(unused_port())]
        + ["--checkpoint", str(runs / "mhf"), "--out", str(runs)],
        env=inherited | {"TMPDIR": str(tmp / "tmp"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=tmp,
    )
    yield started, tmp / "tmp"
    started.kill()
    started.communicate()


def test_from_start_to_end(process):
    """No other machine's name is looked up, and none connected to. Where "gradio" among the
    temporary files is somebody else's, a folder for this user alone is used. SIGTERM ends the
    server without a traceback; the folder is removed, and nothing else is."""
    started, folder = process
    line = started.stdout.readline()
    assert "http://" in line, started.communicate(timeout=60)
    address = re.search(r"http://\S+", line)[0]
    assert request(address, "/")[0] == 200
    assert b"event: complete" in raw_question(address, b'{"data": ["the", -1, 3, null, ""]}')[1]
    (private,) = (path for path in folder.iterdir() if path.name != "gradio")
    assert private.is_dir() and private.stat().st_mode & 0o77 == 0
    started.send_signal(signal.SIGTERM)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 0 and "Traceback" not in errors, errors[-500:]
    assert "OUTSIDE" not in errors
    assert [path.name for path in folder.iterdir()] == ["gradio"]


@pytest.mark.parametrize("host", ["203.0.113.9", "no-such-host.invalid"])
def test_a_host_that_is_not_here(host, monkeypatch):
    """An address of another machine, or a name that nobody has, is about --host, not the port."""

    def unknown(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    if host.endswith("invalid"):  # no look-up leaves this machine
        monkeypatch.setattr(socket.socket, "bind", unknown)
    with pytest.raises(ValueError) as error:
        demo_app.free_port(host, None)
    one_sentence(error, "--host", host)
