"""The demo in a real browser: Debian's Chromium, driven by Playwright.

Skipped where either is missing; MHF_BROWSER_TESTS=required fails instead. MHF_SCREENSHOTS names a
folder for pictures. One server with the shipped checkpoints serves all tests, most share a page:
whatever they do, no error may reach the console and no request may leave this machine.
"""

import math
import os
import re
import subprocess
import sys
import time
import urllib.parse
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import mhf
from support.explain import explain, explain_word
from support.tokenizer import Tokenizer

CHROMIUM, REQUIRED = "/usr/bin/chromium", os.environ.get("MHF_BROWSER_TESTS") == "required"
try:
    import axe_playwright_python
    from playwright.sync_api import expect, sync_playwright

    missing = None if os.path.exists(CHROMIUM) else f"there is no {CHROMIUM}"
except ImportError as error:
    missing = f"{error}: pip install playwright axe-playwright-python"
if missing and REQUIRED:
    raise RuntimeError(f"MHF_BROWSER_TESTS=required, but {missing}")
if missing:
    pytest.skip(missing, allow_module_level=True)

ROOT = Path(mhf.__file__).resolve().parent
PAPER, JOINT = "paper's objective", "joint objective"
SHIPPED = {PAPER: "checkpoint-paper", JOINT: "checkpoint"}
AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
TABS = ["Signature", "Gate", "Cascade", "Probability", "Generate", "Vocabulary"]
PROMPT = "I do beseech your grace, my good lord"
ROMEO = "**ROMEO**  \nBut, soft! what light through yonder"
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
GENERATED = "#generate .text [role=button]"
expect.set_options(timeout=20_000)  # milliseconds: a wait, not a claim

# Counts what the page asked the server and what it answered, to know when the page is at rest.
COUNT = """
window.asked = 0; window.answered = 0; window.last = 0;
const count = (name, n) => { window[name] += n; window.last = performance.now(); };
new MutationObserver(() => count('asked', 0)).observe(
  document, {subtree: true, childList: true, attributes: true});
const plain = window.fetch;
window.fetch = async (...args) => {
  const url = String(args[0].url ?? args[0]), run = url.includes('/run/');
  const asks = run || url.includes('/queue/join');
  if (asks) count('asked', 1);
  const response = await plain(...args);
  if (asks && (run || !response.ok)) count('answered', 1);
  if (!url.includes('/queue/data')) return response;
  const [page, own] = response.body.tee();
  (async () => {
    let text = '';
    try {
      for await (const part of own.pipeThrough(new TextDecoderStream())) {
        const lines = (text + part).split('\\n');
        text = lines.pop();
        for (const line of lines) if (line.includes('"process_completed"')) count('answered', 1);
      }
    } catch {}  // the page is closed
  })();
  return new Response(page, response);
};
"""


@pytest.fixture(autouse=True)
def no_network():
    """Everything here goes over loopback; `visit` sees to it that nothing goes further."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the demo with the shipped checkpoints is served."""
    folder = tmp_path_factory.mktemp("demo")
    log = folder / "log.txt"
    command, one = [sys.executable, ROOT / "demo_app.py", "--out", folder], {"OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=os.environ | one, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"http://\S+", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        yield found.group()
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def library():
    """{name: (model, tokenizer)} of the shipped checkpoints, as the library has them."""
    folders = {name: ROOT / "tutorials" / folder for name, folder in SHIPPED.items()}
    return {name: (mhf.load(f), Tokenizer.load(f)) for name, f in folders.items()}


@pytest.fixture(scope="module")
def visit(address):
    """Opens the demo in a new context, at rest after its first answer; checks where it asked."""
    requests = []

    def visit(query=()):
        page = browser.new_context(viewport=DESK).new_page()
        page.add_init_script(COUNT)
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda m: m.type == "error" and visit.errors.append(m.text))
        page.on("pageerror", lambda error: visit.errors.append(str(error)))
        page.goto(f"{address}/?{urllib.parse.urlencode(query)}")
        rest(page, 0)
        return page

    visit.errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        visit.page = visit()
        visit.page.add_script_tag(path=AXE)
        for tab in TABS:  # which is not in the page before
            open_tab(visit.page, tab)
        yield visit
        browser.close()
    away = [url for url in requests if not url.startswith((address + "/", "data:", "blob:"))]
    assert requests and not away and not visit.errors


@pytest.fixture
def page(visit):
    """The page that tests share, at PROMPT, with the paper's checkpoint and the first tab."""
    page = visit.page
    if page.locator("#checkpoint").input_value() != PAPER:
        choose(page, "checkpoint", PAPER)
    look(page, PROMPT)
    open_tab(page, "Signature")
    yield page
    page.set_viewport_size(DESK)
    assert visit.errors == []


def rest(page, before):
    """Waits for more requests than `before`, all of them answered and drawn 40 ms ago."""
    still = "asked === answered && performance.now() - last > 40"
    page.wait_for_function(f"asked > {before} && {still}")


@contextmanager
def answered(page):
    before = page.evaluate("asked")
    yield
    rest(page, before)


def look(page, prompt):
    with answered(page):
        page.locator("#prompt").fill(prompt)


def choose(page, what, value):
    with answered(page):
        page.locator(f"select[data-do={what}]").focus()  # as a user does, who may have typed
        page.locator(f"select[data-do={what}]").select_option(value)


def click(page, selector, nth=0):
    with answered(page):
        page.locator(selector).nth(nth).click()


def open_tab(page, name):
    tab = page.get_by_role("tab", name=name, exact=True)
    if not tab.count():  # on a phone
        page.locator(".overflow-menu > button").click()
        tab = page.locator(".overflow-dropdown button").get_by_text(name, exact=True)
    tab.first.click()
    expect(page.locator(f"#{name.lower()}")).to_be_visible()


def opened(page):
    (name,) = [tab for tab in TABS if page.locator(f"#{tab.lower()}").is_visible()]
    return name.lower()


def position(page):
    return int(page.locator("#way .context [aria-pressed=true]").get_attribute("data-index"))


def strip(page):
    return "".join(page.locator("#way .context bdi").all_text_contents())


def signs(text):
    """As tokens show it."""
    return text.replace(" ", "␣").replace("\n", "↵")


def data(page, selector, name):
    return page.locator(selector).evaluate_all(f"x => x.map(e => Number(e.dataset.{name}))")


def write(page, many=12, seed=3, wait=True):
    look(page, ROMEO)
    open_tab(page, "Generate")
    for name, value in (("many", many), ("seed", seed)):
        page.locator(f"[name={name}]").fill(str(value))
    if wait:
        return click(page, "#go")
    page.locator("#go").click()
    page.locator(GENERATED).nth(2).wait_for()


UNFOLD = """document.querySelectorAll('.label-wrap:not(.open), details:not([open]) > summary')
  .forEach(e => e.click())"""


def shoot(page, name):
    if folder := os.environ.get("MHF_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


BOXES = "x => x.map(e => e.getBoundingClientRect()).map(b => [b.x, b.y, b.right, b.bottom])"


def test_the_first_screen_shows_the_whole_picture(page):
    """At 1280 x 800 nobody scrolls for it; at 390 x 844 for no percentage, nor its first half."""
    for size, parts in ((DESK, "#way, #way .share"), (PHONE, "#way .share, .context + svg")):
        page.set_viewport_size(size)
        page.evaluate("scrollTo(0, 0)")
        boxes = page.locator(parts).evaluate_all(BOXES)
        assert len(boxes) == 9
        for left, top, right, bottom in boxes:
            assert min(left, top) >= 0 and right <= size["width"] and bottom <= size["height"]


CUT = """() => [...document.querySelectorAll('.mhf, .mhf *')].filter(
  e => e.clientWidth && e.scrollWidth > e.clientWidth + 1
    && !e.closest('.scroll, pre, svg, .context, .chip, input')
).map(e => e.outerHTML.slice(0, 100))"""


def test_no_page_scrolls_sideways(page):
    """No tab is too wide for 390 to 1920 pixels, nor a part of it; 640 is 1280 at 200 %."""
    zoom, found = page.context.new_cdp_session(page), []
    write(page, 30)
    page.evaluate(UNFOLD)
    for width in (1920, 1280, 390, 640):
        size = {"width": width, "height": 400 if width == 640 else 844}
        page.set_viewport_size(size)
        if width == 640:
            doubled = size | {"mobile": False, "deviceScaleFactor": 2}
            zoom.send("Emulation.setDeviceMetricsOverride", doubled)
        for tab in TABS:
            open_tab(page, tab)
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            found += [(width, tab, wide)] * (wide > 0) + page.evaluate(CUT)
            width == 640 or shoot(page, f"{tab.lower()}-{width}")  # which would end the zoom
        ((left, _, right, _),) = page.locator("#way").evaluate_all(BOXES)
        margin = page.evaluate("document.documentElement.clientWidth") - right
        found += [(width, left, margin)] * (abs(left - margin) > 1)
    zoom.detach()
    assert found == []


AXE_RUN = """async ([where, only]) => {
  const found = await axe.run(where ?? document, {runOnly: only, resultTypes: ['violations']});
  return found.violations.flatMap(v => v.nodes.map(n => `${v.id}: ${n.html} ${n.failureSummary}`));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_bars_a_user_with_a_disability(page, scheme):
    """axe-core finds no violation of WCAG A, AA in any tab; in the dark none of contrast."""
    only = ["wcag2a", "wcag2aa"] if scheme == "light" else ["color-contrast"]
    page.emulate_media(color_scheme=scheme)
    write(page)
    click(page, GENERATED, 4)
    open_tab(page, "Cascade")
    click(page, "#cascade .bucket", 2)
    page.evaluate(UNFOLD)
    found = []
    for tab in TABS:
        open_tab(page, tab)
        where = None if tab == TABS[0] else f"[role=tabpanel]:has(#{tab.lower()})"
        found += page.evaluate(AXE_RUN, [where, only])
        shoot(page, f"{tab.lower()}-{scheme}")
    page.emulate_media(color_scheme="light")
    assert found == []


MOVING = """() => [...document.querySelectorAll('*')].filter(element => {
  const style = getComputedStyle(element), moves = /[1-9]/.test(style.transitionDuration);
  return style.animationName != 'none' || style.transitionProperty != 'none' && moves;
}).map(element => element.outerHTML.slice(0, 100))"""


def test_motion_is_left_out_for_those_who_ask(page):
    """With prefers-reduced-motion no element has an animation or a transition."""
    page.emulate_media(reduced_motion="reduce")
    moving = page.evaluate(MOVING), page.evaluate("document.getAnimations().length")
    page.emulate_media(reduced_motion="no-preference")
    assert moving == ([], 0)


def told_of(library, name=PAPER, position=-1, **what):
    model, tokenizer = library[name]
    return explain(model, tokenizer.encode(PROMPT), position, **what)


def same(page, selector, name, expected):
    assert data(page, selector, name) == pytest.approx(list(expected), rel=1e-6, abs=1e-6)


def check(page, trace, chosen=0):
    """The picture, the gate and the steps to a token's probability are those of a trace."""
    votes, best = trace["top_tokens"][:8], trace["top_tokens"][chosen]
    bits = [[-x / math.log(2) for x in vote["log_p"]] for vote in votes]
    same(page, "#way [data-bits]", "bits", sum(bits, []))
    same(page, "#way [data-sum]", "sum", map(sum, bits))
    same(page, "#way [data-p]", "p", [math.exp(vote["log_prob"]) for vote in votes])
    same(page, "[data-alpha]", "alpha", trace["tokens"][trace["position"]]["gate"])
    logs = math.log(best["joint_prob"]), best["log_prob_paper"], best["log_prob"]
    same(page, "[data-step]", "step", map(math.exp, logs))
    same(page, "[data-left]", "left", best["left"])


def check_cascade(page, trace):
    """Every bucket and every path has the probability that a trace has for it."""
    parts = [(f["function"], b) for f in trace["functions"] for b in f["top"] + f["paths"]]
    known = {(j, b["bucket"]): b["prob"] for j, b in parts}
    where = [data(page, "#cascade .bucket", part) for part in ("function", "bucket")]
    expected = [known[place] for place in zip(*where)]
    assert len(expected) >= 9 * len(trace["functions"])
    same(page, "#cascade .bucket", "prob", expected)
    same(page, "#cascade [data-p]", "p", [math.exp(e["log_prob"]) for e in trace["top_tokens"][:6]])


def check_drawn(page, trace, **cuts):
    """How likely each token is drawn, as mhf.sampling_probs says."""
    scores = [-math.inf if s is None else s for s in trace["scores"]]
    p = mhf.sampling_probs(torch.tensor([scores]) / trace["calibration"], **cuts)[0]
    same(page, "[data-drawn]", "drawn", [p[entry["id"]].item() for entry in trace["top_tokens"]])


@pytest.mark.parametrize("name", SHIPPED)
def test_the_numbers_are_those_of_explain(page, library, name):
    """Of both checkpoints, at two tokens, and of a chosen path."""
    if name != PAPER:
        choose(page, "checkpoint", name)
    for at in (8, 3):
        click(page, "#way .context button", at)
        trace = told_of(library, name, at)
        for equal in (check, check_cascade, check_drawn):
            equal(page, trace)
    click(page, "#way .vote .name", 2)
    check(page, trace, 2)


@pytest.mark.parametrize("kind", ["only", "force"])
def test_a_bucket_answers_what_if(page, library, kind):
    """The cascade is explain's with `only` or `force`; the same bucket ends it, or the button."""
    open_tab(page, "Cascade")
    choose(page, "kind", kind)
    plain = told_of(library)
    bucket = page.locator("#cascade .bucket[data-function='1']").nth(3).get_attribute("data-bucket")
    trace = told_of(library, **{kind: {1: int(bucket)}})
    again = f"#cascade .bucket[data-function='1'][data-bucket='{bucket}']"
    for end in (again, "#cascade [data-do=what][data-function='-1']"):
        click(page, again)
        check_cascade(page, trace)
        check(page, plain)
        same(page, "[data-tv]", "tv", [trace["total_variation"]])
        click(page, end)
        check_cascade(page, plain)
        assert page.locator("[data-tv]").count() == 0


def test_sliders_change_what_is_drawn(page, library):
    """Temperature, top-k and top-p give the probabilities of mhf.sampling_probs; so does Reset."""
    open_tab(page, "Probability")
    trace, cuts = told_of(library), {}
    for name, value in (("temperature", 0.5), ("top_k", 7), ("top_p", 0.6)):
        cuts[name] = value
        with answered(page):
            page.locator(f"#probability-above [type=number][name={name}]").fill(str(value))
        check_drawn(page, trace, **cuts)
    click(page, "#probability-above [data-reset]")
    check_drawn(page, trace)


def test_sliders_of_two_tabs_are_one(page):
    """A change or Reset in one tab shows in the other, on the slider and as a number."""
    fields = page.locator("#probability-above input, #generate-above input")
    values = lambda: fields.evaluate_all("x => x.map(e => Number(e.value))")  # noqa: E731
    open_tab(page, "Generate")
    for kind, name, value in (("range", "temperature", 1.5), ("number", "top_k", 30)):
        with answered(page):
            page.locator(f"#generate-above [type={kind}][name={name}]").fill(str(value))
    assert values() == [1.5, 1.5, 30, 30, 1, 1] * 2
    open_tab(page, "Probability")
    click(page, "#probability-above [data-reset]")
    assert values() == [1, 1, 0, 0, 1, 1] * 2


def test_a_number_out_of_range_is_refused_in_words(page, library):
    """The page names the range, and the old value holds."""
    open_tab(page, "Probability")
    field = page.locator("#probability-above [type=number][name=temperature]")
    with answered(page):
        field.fill("0.7")
    asked, status = page.evaluate("asked"), page.locator("#probability-above [role=status]")
    for wrong in ("9", "-1", ""):
        field.fill(wrong)
        assert "temperature is a number from 0 to 3" in status.inner_text()
    assert page.evaluate("asked") == asked
    check_drawn(page, told_of(library), temperature=0.7)
    click(page, "#probability-above [data-reset]")


def test_typing_moves_the_picture(page):
    """Without any button, and what was typed stands in the field, with the caret in it."""
    with answered(page):
        page.locator("#prompt").press("End")
        page.keyboard.type(" hath a", delay=20)
    text = PROMPT + " hath a"
    assert (strip(page), page.locator("#prompt").input_value()) == (signs(text), text)
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_what_was_typed_goes_before_a_click(page):
    """A click on the tour right after the last letter neither loses nor overwrites the text."""
    while page.locator("[data-by='-1']").is_enabled():
        click(page, "[data-by='-1']")
    with answered(page):
        page.locator("#prompt").fill("My lord")
        page.locator("[data-by='1']").click()
        expect(page.locator(".tour")).to_contain_text("2 of 8")
    assert (strip(page), page.locator("#prompt").input_value()) == ("My␣lord", "My lord")
    choose(page, "example", "a plea")  # which takes its place
    assert page.locator("#prompt").input_value() == "My lord, I do beseech your"


@pytest.mark.parametrize("text, said", [("", "1 to 10,000"), ("x" * 10_001, "10,001")])
def test_a_text_that_cannot_be_read_is_said(page, text, said):
    """In the sentence's place; the picture and what was typed stay."""
    look(page, text)
    assert said in page.locator("#way .sentence").inner_text()
    assert (strip(page), page.locator("#prompt").input_value()) == (signs(PROMPT), text)


def test_every_step_of_the_tour_opens(page):
    """Each has its own text and a filled tab; the buttons end at the ends."""
    back, forth, texts, tabs = "[data-by='-1']", "[data-by='1']", [], []
    while page.locator(back).is_enabled():
        click(page, back)
    for _ in range(7):
        assert page.locator(forth).is_enabled()
        click(page, forth)
        texts.append(page.locator(".tour").inner_text())
        tabs += [opened(page)] * (opened(page) not in tabs)
        assert len(page.locator(f"#{opened(page)}").inner_text()) > 40
    assert page.locator(forth).is_disabled() and page.locator(back).is_enabled()
    assert len({*texts}) == 7 and tabs == [tab.lower() for tab in TABS]


UNDER = "e => document.activeElement.closest('[data-do]')?.contains(e)"


def press(page, how, selector, nth):
    """Clicks on a part, or does with the keyboard alone: Tab up to it, then a key."""
    if how == "mouse":
        return click(page, selector, nth)
    before = {"#way": "[data-do=checkpoint]", "#cas": "[data-do=kind]"}
    page.locator(before.get(selector[:4], "#generate-above [data-reset]")).focus()
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.locator(selector).nth(nth).evaluate(UNDER):
            break
    with answered(page):
        page.keyboard.press(how)


KEYS = ["mouse", "Enter", " "]


PARTS = [  # what is pressed, the tab open before, which one, the tab then, the vote chosen
    ("#way .context button", "Signature", 2, "signature", 0),
    ("#way .vote .name", "Vocabulary", 3, "cascade", 3),
    ("#way .ribbon", "Vocabulary", 1, "gate", 0),
    ("#way .center.white:not(.small)", "Vocabulary", 1, "signature", 0),
    ("#cascade [data-do=go]", "Cascade", 2, "cascade", 2),
    ("#cascade .bucket", "Cascade", 4, "cascade", 0),
    (GENERATED, "Generate", 5, "generate", None),
    ("#way .vote >> nth=2 >> .full", "Vocabulary", 1, "cascade", 2),
    ("#way .vote >> nth=2 >> .share", "Vocabulary", 0, "probability", 2),
]


@pytest.mark.parametrize("selector, before, nth, tab, chosen", PARTS)
def test_a_part_does_what_it_shows(page, selector, before, nth, tab, chosen):
    """By the mouse, by Enter and Space; the focus stays on it, also when it is drawn anew."""
    for how in KEYS[:1] if ">>" in selector else KEYS[:: 1 + ("#way" in selector)]:
        write(page) if selector == GENERATED else look(page, PROMPT)
        open_tab(page, before)
        press(page, how, selector, nth)
        assert opened(page) == tab
        forced = page.locator("#cascade .bucket.forced")
        assert forced.count() == (".bucket" in selector)
        piece = forced if ".bucket" in selector else page.locator(selector).nth(nth)
        assert position(page) == int(piece.get_attribute("data-index") or 8)
        assert piece.evaluate(UNDER) or ">>" in selector
        marks = page.locator("#way .vote").evaluate_all("x => x.map(e => e.matches('.chosen'))")
        assert chosen is None or marks == [k == chosen for k in range(8)]
    if selector == GENERATED:
        assert piece.get_attribute("aria-pressed") == "true"
        name = page.locator("#probability .marked").first.inner_text()
        assert name == signs(piece.text_content())


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_details_take_the_sentences_place(page, size):
    """What the pointer or the focus is on is told there; nothing moves, and it comes back."""
    page.set_viewport_size(size)
    page.mouse.move(1, 1)
    line, views = page.locator("#way .sentence"), page.locator("#way, #views, #link")
    own, where = line.inner_text(), views.evaluate_all(BOXES)
    for part in (".context button", ".center.white", ".ribbon", ".vote .name"):
        piece = page.locator(f"#way {part}").nth(2)
        tip = piece.evaluate("e => e.closest('[data-tip]').dataset.tip")
        piece.hover()
        assert (line.inner_text(), views.evaluate_all(BOXES)) == (tip, where)
        page.mouse.move(1, 1)
        assert line.inner_text() == own
        piece.evaluate("e => e.closest('[tabindex], button').focus()")
        assert (line.inner_text(), views.evaluate_all(BOXES)) == (tip, where)
        page.locator("#prompt").focus()
        assert line.inner_text() == own


def test_the_same_seed_gives_the_librarys_text(page, library):
    """Character for character, line breaks as line breaks, and the box scrolls with the text."""
    model, tokenizer = library[PAPER]
    write(page, 90)
    ids = tokenizer.encode(ROMEO)
    new = list(model.generate(ids, 90, seed=3, stop=tokenizer.ends))
    box = page.locator("#generate .text")
    expected = tokenizer.decode([*ids, *new])
    assert box.text_content() == expected
    assert box.inner_text().count("\n") == expected.count("\n") > 3
    assert page.locator(GENERATED).count() == len(new)
    left = "e => e.scrollHeight - e.clientHeight - e.scrollTop"
    assert box.evaluate("e => e.scrollTop") > 0 and box.evaluate(left) < 2


def test_stop_and_typing_end_the_writing(page):
    """The text keeps what it has, with candidates; what is typed is what the picture shows."""
    write(page, 200, wait=False)
    page.locator("#stop").click()
    page.locator("#generate [data-do=branch]").first.wait_for()
    many = page.locator(GENERATED).count()
    page.wait_for_timeout(400)
    assert page.locator(GENERATED).count() == many < 150
    write(page, 200, wait=False)
    page.locator("#prompt").fill("My lord")
    expect(page.locator("#way .context bdi").last).to_have_text("␣lord")
    page.wait_for_timeout(400)
    assert (strip(page), page.locator("#prompt").input_value()) == ("My␣lord", "My lord")
    assert page.locator(GENERATED).count() == 0


def test_writing_goes_on_with_another_candidate(page):
    """What was there before the step stays, then comes the candidate, then new tokens."""
    write(page)
    before = data(page, GENERATED, "token")
    click(page, GENERATED, 4)
    candidates = data(page, "#generate [data-do=branch]", "token")
    other = next(k for k, token in enumerate(candidates) if token != before[4])
    click(page, "#generate [data-do=branch]", other)
    after = data(page, GENERATED, "token")
    assert after[:5] == [*before[:4], candidates[other]] and len(after) > 5


def test_a_typed_word_shows_where_it_goes(page, library):
    """Its buckets are those of the library, token or not."""
    for word in ("hello", "lord", "自拍"):
        with answered(page):
            page.locator("[data-do=peek]").fill(word)
        signature = explain_word(library[PAPER][0], word.encode())["signature"]
        assert data(page, "#word .address", "bucket") == signature


def test_new_words_are_their_users_alone(visit, page, library):
    """Words of any script get the library's signatures, work in the prompt, and stay private."""
    other, words = visit({"tab": "vocabulary"}), ["سيلفي", "自拍", "🤳🏽"]
    other.locator("[name=words]").fill("\n".join(words))
    click(other, "[data-do=add]")
    model, _ = library[PAPER]
    signatures = [explain_word(model, f" {word}".encode())["signature"] for word in words]
    shown = other.locator("#vocabulary .added .id").all_text_contents()
    assert [int(number) for number in shown] == sum(signatures, [])
    assert "Parameters added: 0" in other.locator("#vocabulary").inner_text()
    click(other, "[data-do=use]", 1)
    assert other.locator("#way .context bdi").last.text_content() == "␣自拍"
    look(page, "a 自拍")
    assert page.locator("#way .context button").count() > 4
    assert page.locator("#vocabulary .added").count() == 0


def test_a_link_shows_the_same_in_another_browser(page, visit):
    """Prompt, position and tab, made by hand, are back in a fresh browser."""
    click(page, "#way .context button", 4)
    open_tab(page, "Gate")
    assert page.locator("#link a").get_attribute("href") in page.url
    again = visit(urllib.parse.parse_qsl(urllib.parse.urlparse(page.url).query))
    assert (strip(again), position(again), opened(again)) == (signs(PROMPT), 4, "gate")
    assert again.url == page.url


ATTACK = "<img/src='x'/onerror=document.title='X'>"
HARD = [
    "</textarea></script><script>document.title='X'</script>" + ATTACK,
    "\n${document.title='X'} {{7*7}} {% raw %} &lt;b&gt; \\u0041 `'\"",
    "one\n\n\ntwo\tthree \u202eسلام\u202c 👩‍👩‍👧 a\u0301\u200b\ufeff\n",
]


def harmless(page):
    assert page.title() == "MultiHashFormer"
    assert page.locator(":is(.mhf, .toast-body) :is(img, script)").count() == 0


def toast(page):
    """The message of a mistake, which is then closed."""
    text = page.get_by_test_id("toast-text").last.text_content()
    harmless(page)
    page.get_by_test_id("toast-close").last.click()
    expect(page.locator(".toast-body")).to_have_count(0)
    return text


def test_hard_prompts_are_shown_as_text(page, library):
    """Code, markup, control characters, emoji and right-to-left texts are tokens, no more."""
    for hard in HARD:
        look(page, hard)
        ids = library[PAPER][1].encode(hard)
        assert page.locator("#way .context button").count() == min(24, len(ids))
        choose(page, "checkpoint", JOINT)  # which draws the field anew
        assert page.locator("#prompt").input_value() == hard
        harmless(page)


def test_markup_in_links_words_and_messages_is_text(visit):
    """A hostile link's prompt, a typed word, a new word, the message that it is there already."""
    page = visit(dict.fromkeys(("prompt", "position", "tab"), ATTACK))
    assert page.locator("#prompt").input_value() == ATTACK and strip(page) in signs(ATTACK)
    assert "The link's position, tab was left out" in page.locator("#way .sentence").inner_text()
    with answered(page):
        page.locator("[data-do=peek]").fill(ATTACK)
    assert ATTACK in page.locator("#word").inner_text()
    open_tab(page, "Vocabulary")
    for _ in range(2):
        page.locator("[name=words]").fill(ATTACK)
        click(page, "[data-do=add]")
    assert ATTACK[:12] in toast(page)
    click(page, "[data-do=use]")
    harmless(page)


SET = "(e, values) => { for (const name in values) e.setAttribute(name, values[name]); }"
MISTAKES = [  # tab, part, what it is made to say, and the message
    ("Cascade", "#cascade .bucket", {"data-bucket": "99999"}, "99999"),
    ("Signature", "#way .context button", {"data-index": "x"}, "'x'"),
    ("Signature", "[data-do=tour]:enabled", {"data-do": "nothing"}, "nothing"),
    ("Signature", "[data-do=peek]", {"name": "other"}, "word"),
    ("Vocabulary", "[data-do=add]", {}, "1 to 50 words"),
    ("Generate", "#go", {"data-do": "branch"}, "token"),
]


@pytest.mark.parametrize("tab, selector, wrong, said", MISTAKES)
def test_a_mistake_is_told(page, tab, selector, wrong, said):
    """An event that fails says why, and the page goes on."""
    open_tab(page, tab)
    piece = page.locator(selector).first.element_handle()
    right = {name: piece.get_attribute(name) for name in wrong}
    piece.evaluate(SET, wrong)
    with answered(page):
        piece.fill("lost") if "peek" in selector else piece.click()
    piece.evaluate(SET, right)
    assert said in toast(page)
