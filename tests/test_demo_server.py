"""demo_app.py as a server and as a program: its endpoint, its manners, its class."""

import concurrent.futures
import http.client
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest
from conftest import FIXTURES, one_sentence
from gradio_client import Client
from gradio_client.exceptions import AppError
from test_demo import KINDS, PROMPT, TEXT, Reader, make, name_of, tokenizer

import demo_app
import train

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
    """/inspect answers mhf.explain's dict, and the ids, over HTTP, too."""
    told = client.predict(PROMPT, **question, api_name="/inspect")
    kind = question.get("checkpoint", "mhf")
    model, ids = served[0].lab.get(kind).model, tokenizer().encode(PROMPT)
    force = {int(j): b for j, b in question.get("force", {}).items()}
    expected = model.explain(ids, question.get("position", -1), question.get("top_k", 10), force)
    if kind == "standard":
        for entry in told["tokens"] + told["top_tokens"]:
            assert bytes(entry["bytes"]) == tokenizer().token_bytes(entry["id"])
            entry["bytes"] = entry["text"] = None
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
    for name in ("on_look", "on_generate", "on_add", "on_fit", "predict"):
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
    """Asks one question after the other; returns (prompt, answer, seconds) of each."""
    client, found = Client(address, verbose=False), []
    wait()
    for i in range(questions):
        prompt = f"the {WORDS[number % 9]} of {number} or {WORDS[i % 9]} {i}"
        start = time.perf_counter()
        job = client.submit(prompt, -1, 5, api_name="/inspect")
        while seen is not None and not job.done():
            if (rank := job.status().rank) is not None:
                seen.append(rank)
            time.sleep(0.1)
        found.append((prompt, job.result(60), time.perf_counter() - start))
    return found


def crowd(users, address, questions, **how):
    """All of them at once."""
    with concurrent.futures.ThreadPoolExecutor(users) as pool:
        jobs = [pool.submit(user, n, address, questions, **how) for n in range(users)]
        return list(itertools.chain(*(job.result(120) for job in jobs)))


def assert_own_answers(lab, found):
    """Every answer is that to its own question."""
    model = lab.get("mhf").model
    for prompt, told, _ in found:
        ids = tokenizer().encode(prompt)
        assert told["ids"] == ids
        assert close_to(told["top_tokens"], model.explain(ids, top_k=5)["top_tokens"])


def test_five_users(served):
    """5 users with 10 requests each, at the same time: none fails, each gets its own answers."""
    found = crowd(5, served[1], 10)
    assert len(found) == 50 and len({prompt for prompt, *_ in found}) == 50
    assert_own_answers(served[0].lab, found)
    print(f"5 users: median {1000 * statistics.median(s for *_, s in found):.0f} ms")


def test_twenty_users(served):
    """20 users with 5 requests each: none fails or is lost, and who waits is told the place."""
    lab, seen = served[0].lab, []
    lab.lock.acquire()  # until all have asked
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            job = pool.submit(crowd, 20, served[1], 5, seen=seen)
            deadline = time.monotonic() + 60
            while max(seen, default=0) < 3 and time.monotonic() < deadline and not job.done():
                time.sleep(0.05)
            lab.lock.release()
            found = job.result(120)
    finally:
        if lab.lock.locked():
            lab.lock.release()
    assert len(found) == 100 and max(seen) >= 3
    assert_own_answers(lab, found)
    print(f"20 users: median {1000 * statistics.median(s for *_, s in found):.0f} ms")


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


class Stop(Exception):
    pass


@pytest.fixture
def started(monkeypatch, runs):
    """serve() up to the page: returns what the page is given."""

    def started(*flags):
        given = []

        def page(*args):
            given.extend(args)
            raise Stop

        monkeypatch.setattr(demo_app, "Page", page)
        with pytest.raises(Stop):
            demo_app.serve(demo_app.parse_arguments(["--out", str(runs), *flags]))
        return given

    return started


@pytest.mark.parametrize("flags", [(), ("--host", "127.0.0.1"), ("--host", "localhost")], ids=str)
def test_a_class_on_this_machine(started, flags):
    """Bound to loopback the page has a class."""
    _, classroom, _ = started(*flags)
    assert isinstance(classroom, demo_app.Classroom)


@pytest.mark.parametrize("flags", [("--host", "0.0.0.0"), ("--share",)], ids=str)
def test_no_class_for_others(started, flags):
    """Open to other machines it has none, and says why, with the flag that would give one."""
    _, classroom, why = started(*flags)
    assert classroom is None and "--host 127.0.0.1" in why


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
def selftest(capsys, runs):
    """main() with --selftest on a free port; returns (status, standard output, standard error)."""

    def call(*flags, checkpoint=None, port=True):
        flags = ["--checkpoint", str(checkpoint or runs / "mhf"), "--out", str(runs), *flags]
        flags += ["--port", str(unused_port())] if port else []
        return demo_app.main([*flags, "--selftest"]), *capsys.readouterr()

    return call


def assert_answered(found):
    """The address and one answer were printed."""
    status, out, errors = found
    assert status == 0 and "Traceback" not in errors
    assert re.search(r"http://\S+:\d+", out) and re.search(r"selftest: .*\d %", out)


def test_selftest(selftest):
    """--selftest prints the address and what one request was answered, and ends with status 0."""
    assert_answered(selftest())


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_proxies_do_not_stop_it(selftest, monkeypatch, proxy):
    """Proxy variables of the environment, even of dead proxies, have no say."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(name.upper(), proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert_answered(selftest())


@pytest.mark.parametrize("kind", ["standard", "untokenized", "published"])
def test_selftest_of_other_checkpoints(selftest, runs, kind):
    """So it does with a standard model, and where prompts are token ids."""
    folder = FIXTURES / "tiny_h4" if kind == "published" else runs / kind
    assert_answered(selftest(checkpoint=folder))


def test_the_next_port_is_printed(selftest, busy_7860):
    """With 7860 taken another one is, and printed."""
    found = selftest(port=False)
    assert_answered(found)
    assert int(re.search(r"http://127\.0\.0\.1:(\d+)", found[1])[1]) > 7860


def test_ipv6(selftest):
    """::1 is this machine, too."""
    try:
        port = unused_port(socket.AF_INET6, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    found = selftest("--host", "::1", "--port", str(port), port=False)
    assert_answered(found)
    assert f"http://[::1]:{port}" in found[1]


def test_a_busy_port(selftest):
    """A taken port is one sentence with its number, and status 2."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert_refused(selftest("--port", str(port), port=False), f"--port {port}")


def assert_refused(found, *parts):
    """Nothing but one sentence with the parts, and status 2."""
    status, out, errors = found
    assert status == 2 and not out and errors.count("\n") == 1
    assert errors.startswith("demo_app.py: error: ") and all(part in errors for part in parts)


@pytest.mark.parametrize("name", ["nowhere", "nobody/nothing", "test_demo_server.py", "empty"])
def test_no_such_checkpoint(selftest, tmp_path, monkeypatch, name):
    """Neither a folder nor to be had from the hub, a file, an empty folder: one sentence."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "test_demo_server.py").touch()
    monkeypatch.chdir(tmp_path)
    assert_refused(selftest(checkpoint=name), name)


def test_a_host_of_another_machine(selftest):
    """An address that this machine does not have is one sentence."""
    assert_refused(selftest("--host", "192.0.2.1"), "192.0.2.1")


# ---------------------------------------------------------------------------------------------
# Processes of their own
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


@pytest.fixture(scope="module")
def programs(runs, tmp_path_factory):
    """Three programs, started together: {name: (process, its folder for temporary files)}."""
    tmp, started = tmp_path_factory.mktemp("programs"), {}
    (tmp / "watch.py").write_text(WATCH, encoding="utf-8")
    given = ["--checkpoint", str(runs / "mhf"), "--out", str(runs)]
    for name in ("selftest", "SIGINT", "SIGTERM"):
        (tmp / name).mkdir()
        flags = ["--selftest"] if name == "selftest" else []
        inherited = {k: v for k, v in os.environ.items() if k != "GRADIO_TEMP_DIR"}
        started[name] = subprocess.Popen(
            [sys.executable, str(tmp / "watch.py"), str(SCRIPT), *given, *flags]
            + ["--port", str(unused_port())],
            env=inherited | {"TMPDIR": str(tmp / name), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=tmp,
        )
    # Gradio's own folder is somebody else's: who got there first may make it a file.
    (tmp / "selftest" / "gradio").write_text("somebody else's", encoding="utf-8")
    yield {name: (process, tmp / name) for name, process in started.items()}
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def tested(programs):
    """(status, output, errors, names of the temporary files left) of the selftest."""
    process, folder = programs["selftest"]
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors, [path.name for path in folder.iterdir()]


def test_nothing_outside_is_asked(tested):
    """No other machine's name is looked up, and none connected to, from start to end."""
    status, out, errors, _ = tested
    assert status == 0 and "OUTSIDE" not in errors and "selftest: " in out, errors[-500:]


def test_a_foreign_temporary_folder(tested):
    """Where "gradio" among the temporary files is somebody else's, a private folder is used; it
    is removed, and nothing else is."""
    status, _, errors, left = tested
    assert status == 0 and left == ["gradio"], errors[-500:]


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
def test_ending(programs, how):
    """Ctrl-C and SIGTERM end the server without a traceback; its temporary files, in one folder
    for this user alone, are removed."""
    process, folder = programs[how]
    address = re.search(r"http://\S+", process.stdout.readline())[0]
    assert request(address, "/")[0] == 200
    (private,) = folder.iterdir()
    assert private.is_dir() and private.stat().st_mode & 0o77 == 0
    process.send_signal(getattr(signal, how))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors, errors[-500:]
    assert "OUTSIDE" not in errors and not list(folder.iterdir())


# ---------------------------------------------------------------------------------------------
# The class
# ---------------------------------------------------------------------------------------------

FAKE = """
import json, os, pathlib, signal, sys, time
given = sys.argv[1:]
if given[0] == "--resume":
    run = pathlib.Path(given[1])
else:
    given = dict(zip(given[::2], given[1::2]))
    run = pathlib.Path(given["--out"]) / given["--name"]
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"parameters": {"total": 189281, "table": 65536}}))
    (run / "log.csv").write_text("step,loss,tokens_per_second,perplexity,top1,valid_mass\\n")
    (run / "samples.txt").write_text("")
with open(run / "calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if (run.parent / "fail").exists():
    sys.exit("train.py: error: there is no data")
def stop(*args):
    (run / "ready").unlink()
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
with open(run / "log.csv", "a") as log:
    log.write("1,9.5,,,,\\n2,7.25,1234.5,432.1,0.125,nan\\n")
with open(run / "samples.txt", "a") as samples:
    samples.write("--- step 1\\nold\\n--- step 2\\n<b>new</b> text\\n")
(run / "ready").touch()
if (run.parent / "end").exists():
    sys.exit(0)
time.sleep(60)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A class whose train.py only writes what train.py writes."""
    (tmp_path / "train.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.setattr(demo_app, "HERE", tmp_path)
    classroom = demo_app.Classroom(tmp_path / "out")
    (tmp_path / "out").mkdir()
    yield classroom
    classroom.stop()


def until(condition, seconds=120):
    """Waits for it; fails if it never comes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def ready(classroom):
    """Both runs have written their numbers."""
    return all((classroom.out / name / "ready").exists() for name in classroom.runs.values())


def states(classroom):
    return {run["name"]: run["state"] for run in classroom.status()}


def test_two_runs_side_by_side(fake):
    """Both models are trained, with the same flags but for the model; status and view have what
    the runs wrote."""
    fake.start(150)
    until(lambda: ready(fake))
    assert fake.busy() and states(fake) == {"mhf": "training", "standard": "training"}
    one, two = (json.loads((fake.out / n / "calls").read_text()) for n in fake.runs.values())
    one, two = (dict(zip(call[::2], call[1::2], strict=True)) for call in (one, two))
    assert {k for k in one if one[k] != two[k]} == {"--model", "--name"}
    assert one["--steps"] == "150" and {one["--model"], two["--model"]} == {"mhf", "standard"}
    view = demo_app.view_train(fake.status())
    for run, status in zip(view["runs"], fake.status(), strict=True):
        assert (run["step"], run["loss"], run["perplexity"]) == ("2", "7.25", "432.1")
        assert (run["top1"], run["valid_mass"]) == ("0.125", "–")
        assert status["curve"] == [(1, 9.5), (2, 7.25)]
        assert "189,281" in run["parameters"] and "65,536" in run["parameters"]
    assert [line["last"] for line in view["curve"]["lines"]] == [(2, 7.25)] * 2
    page = Reader(demo_app.show("train", view))
    assert "<b>new</b> text" in page.text and "old" not in page.text and "7.25" in page.text


def test_stop_and_go_on(fake):
    """Stopped as by Ctrl-C; continued, each run resumes its own folder."""
    fake.start(100)
    until(lambda: ready(fake))
    fake.stop()
    assert not fake.busy() and set(states(fake).values()) == {"stopped"}
    fake.resume()
    until(lambda: ready(fake))
    assert set(states(fake).values()) == {"training"}
    for name in fake.runs.values():
        *_, last = (fake.out / name / "calls").read_text().splitlines()
        assert json.loads(last) == ["--resume", str(fake.out / name)]
    fake.stop()


def test_finished_and_failed(fake):
    """A run that ends is finished; one that fails says why, in train.py's own sentence."""
    (fake.out / "end").touch()
    fake.start(100)
    until(lambda: not fake.busy())
    assert set(states(fake).values()) == {"finished"}
    (fake.out / "fail").touch()
    fake.start(100)
    until(lambda: not fake.busy())
    assert set(states(fake).values()) == {"failed: train.py: error: there is no data"}
    assert demo_app.show("train", demo_app.view_train(fake.status()))


def test_refused_trainings(fake):
    """One class at a time; nothing to go on with at first; stopping nothing is no mistake."""
    with pytest.raises(ValueError) as error:
        fake.resume()
    one_sentence(error)
    fake.stop()
    assert fake.status() == []
    fake.start(100)
    for again in (lambda: fake.start(100), fake.resume):
        with pytest.raises(ValueError) as error:
            again()
        one_sentence(error)
    assert len(fake.processes) == 2
    until(lambda: ready(fake))
    fake.stop()


def test_starting_anew_at_once(fake):
    """A class that is stopped and started again within a second is another one."""
    for _ in range(2):
        fake.start(100)
        until(lambda: ready(fake) or not fake.busy())
        fake.stop()
    assert set(states(fake).values()) == {"stopped"}
    assert len([path for path in fake.out.iterdir() if path.is_dir()]) == 4


def test_status_of_half_written_files(fake):
    """Wherever the files end that a run is writing just then, there is a status and a view."""
    fake.start(100)
    until(lambda: ready(fake))
    fake.stop()
    run = fake.out / fake.runs["mhf"]
    for name in ("log.csv", "run.json", "samples.txt"):
        whole = (run / name).read_text(encoding="utf-8")
        for end in range(len(whole)):
            (run / name).write_text(whole[:end], encoding="utf-8")
            assert demo_app.show("train", demo_app.view_train(fake.status()))
        (run / name).write_text(whole, encoding="utf-8")


def test_the_page_with_a_class(fake, runs):
    """The tab has its buttons, whose events are answered at once; the timer runs while there is
    something to watch."""
    page = demo_app.Page(demo_app.Lab(runs / "mhf", runs), fake)
    parts = page.demo.get_config_file()["components"]
    assert {"fit", "fit-stop", "fit-on"} <= {part["props"].get("elem_id") for part in parts}
    names = {name_of(fn.fn): fn for fn in page.demo.fns.values() if fn.fn is not None}
    for name in ("on_fit", "on_halt", "on_further", "on_tick"):
        assert not names[name].queue and len(names[name].outputs) == 2
    html, timer = page.on_fit(50)
    assert timer.active and len(Reader(html).all("tr")) == 3
    with pytest.raises(demo_app.gr.Error):
        names["on_fit"].fn(50)
    until(lambda: ready(fake))
    html, timer = page.on_halt()
    assert not timer.active and Reader(html).text.count("stopped") == 2
    html, timer = page.on_further()
    assert timer.active
    until(lambda: ready(fake))
    assert page.on_tick()[1].active
    page.on_halt()


def test_the_flags_are_train_py_s():
    """train.py takes the class's flags, for both models, and trains on data that needs no
    network."""
    for kind in ("mhf", "standard"):
        given = demo_app.CLASS_FLAGS | {"steps": 50, "model": kind, "out": "x", "name": "y"}
        flags = [part for key, value in given.items() for part in (f"--{key}", str(value))]
        args = train.parse(flags)
        assert args["data"] == ["pydocs"] and args["steps"] == 50


def test_a_real_class(tmp_path, monkeypatch):
    """train.py itself, smaller still: it trains, stops, goes on, and its checkpoints open."""
    smaller = dict(tokenizer="bpe:300", hidden_size=16, num_buckets=64, bottle_neck_dim=4)
    smaller |= dict(intermediate_size=16, tokens_per_step=256, max_position_embeddings=32)
    monkeypatch.setattr(
        demo_app, "CLASS_FLAGS", demo_app.CLASS_FLAGS | smaller | {"eval_every": 20}
    )
    classroom = demo_app.Classroom(tmp_path)
    steps = lambda: [int(run.get("step", 0)) for run in classroom.status()]  # noqa: E731
    try:
        classroom.start(2000)
        until(lambda: min(steps()) >= 20)
        classroom.stop()
        stopped = steps()
        assert set(states(classroom).values()) == {"stopped"} and max(stopped) < 2000
        lab = demo_app.Lab(None, tmp_path)
        for name in classroom.runs.values():
            assert lab.get(name).model.num_parameters()["total"] > 0
        classroom.runs.pop("standard")  # one is enough to see that it goes on
        stopped = steps()
        classroom.resume()
        until(lambda: all(now > before for now, before in zip(steps(), stopped, strict=True)))
    finally:
        classroom.stop()
    assert set(states(classroom).values()) == {"stopped"}


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
