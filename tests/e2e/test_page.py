"""The web page in a real browser: headless Chromium over its debugging pipe.

Nothing here waits for a fixed time. The browser gets as long as it needs, within one bound for the whole
module that only a hang can reach: the first start of Chromium on a busy machine takes minutes.
"""

import json
import os
import select
import shutil
import subprocess
import time

import pytest

from test_images import GOLDEN, content, data

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BOUND = 900  # seconds for the whole module


class Browser:
    """One page. Messages of the DevTools protocol go over two pipes, each ended by a NUL byte: no port
    to find, and no driver whose own timeouts would end a slow start."""

    FLAGS = (
        "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions",
        "--disable-sync", "--window-size=1200,800",
    )

    def __init__(self, folder):
        self.deadline = time.monotonic() + BOUND
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        # Chromium reads descriptor 3 and writes 4.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *self.FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.buffer = b""
        self.last_id = 0
        self.session = None
        self.complaints = []  # exceptions and errors of the page
        self.requests = []    # the address of the page, and what it has asked for
        self.chooser = None   # the file input that a dialog was opened for
        self.wait(lambda: self.pages())
        page = self.pages()[0]["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def pages(self):
        return [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]

    def read(self):
        """The next message."""
        while b"\0" not in self.buffer:
            left = self.deadline - time.monotonic()
            assert left > 0 and select.select([self.answers], [], [], left)[0], "the browser hangs"
            piece = os.read(self.answers, 1 << 16)
            assert piece, "the browser has ended"
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.last_id:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.notice(answer)

    def notice(self, event):
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append((params["documentURL"], params["request"]["url"]))
        elif event.get("method") == "Page.fileChooserOpened":
            self.chooser = params["backendNodeId"]

    def run(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector):
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent).join('|')")

    def press_enter(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r",
                      windowsVirtualKeyCode=13)

    def wait(self, condition):
        while not condition():
            assert time.monotonic() < self.deadline, f"the page does not get there: {self.complaints}"
            time.sleep(0.05)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    running = Browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.close()


def ask(browser, text, thinking, tokens):
    """Greedy: what comes back is the same every time."""
    browser.run(
        "document.getElementById('temperature').value = 0;"
        f"document.getElementById('thinking').checked = {json.dumps(thinking)};"
        f"document.getElementById('tokens').value = {tokens};"
        f"document.getElementById('input').value = {json.dumps(text)};"
        "document.getElementById('form').requestSubmit()"
    )


def idle(browser):
    return browser.text("#send") == "Send"


def open_page(browser, server):
    """The page of a model that is known; no answer ends before its limit. What it sends is kept."""
    browser.complaints.clear()
    browser.call("Page.navigate", url=server.url + "/")
    browser.wait(lambda: not browser.run("window.sent"))  # the page of the test before is gone
    browser.wait(lambda: browser.text("#state") == "ready")
    browser.wait(lambda: "context 16,384" in browser.text("#model"))
    browser.run(
        "const send = window.fetch; window.sent = []; window.fetch = (url, options) => {"
        "  if (options.body) {"
        "    sent.push(JSON.parse(options.body));"
        "    options.body = options.body.replace('{', '{\"ignore_eos\": true, ');"
        "  }"
        "  return send(url, options); }; 0"
    )


def expect_own_requests(browser):
    """Nothing comes from another place."""
    assert browser.requests and all(url.startswith((page, "data:")) for page, url in browser.requests)


def offers_images(browser):
    return browser.run("document.getElementById('attach').checkVisibility()")


def test_chat_and_live_state(server, browser):
    open_page(browser, server)
    assert browser.text("#pools .pool").count("in use") == 2
    assert not offers_images(browser)
    ask(browser, "<b>hello</b>", thinking=True, tokens=24)
    browser.wait(lambda: idle(browser))
    assert browser.text(".user .text") == "<b>hello</b>"  # text, not markup
    assert len(browser.text(".assistant details .text")) > 4
    ask(browser, "again", thinking=False, tokens=24)
    browser.wait(lambda: idle(browser))
    assert browser.text(".assistant > .text")
    browser.wait(lambda: browser.text("#generated_tokens") == "48")

    # Stopping frees the request, which would take long to end by itself.
    cancelled = server.metric("cachalot_cancelled_total")
    ask(browser, "more", thinking=True, tokens=16000)
    browser.wait(lambda: server.metric("cachalot_running") == 1)
    browser.run("document.getElementById('form').requestSubmit()")
    browser.wait(lambda: server.metric("cachalot_running") == 0)
    assert server.metric("cachalot_cancelled_total") == cancelled + 1
    browser.wait(lambda: idle(browser))

    assert not browser.complaints
    expect_own_requests(browser)


class Composer:
    """What a user does with images on the page of `server`, and sees."""

    def __init__(self, browser, server):
        self.browser, self.server = browser, server
        open_page(browser, server)
        browser.call("Page.setInterceptFileChooserDialog", enabled=True)

    def choose(self, *files):
        """With the keyboard and the file dialog."""
        self.browser.chooser = None
        self.browser.press_enter("#attach")
        self.browser.wait(lambda: self.browser.pages() and self.browser.chooser)  # asking lets events in
        self.browser.call("DOM.setFileInputFiles", files=[str(file) for file in files],
                          backendNodeId=self.browser.chooser)

    def drop(self, *files):
        for kind in ("dragEnter", "dragOver", "drop"):
            self.browser.call("Input.dispatchDragEvent", type=kind, x=200, y=200, data={
                "items": [], "files": [str(file) for file in files], "dragOperationsMask": 1})

    def paste(self, file, mime):
        self.browser.run(
            "{ const clipboardData = new DataTransfer();"
            f"  const bytes = Uint8Array.from(atob('{data(file.name)}'), c => c.charCodeAt(0));"
            f"  clipboardData.items.add(new File([bytes], '{file.name}', {{type: '{mime}'}}));"
            "   document.getElementById('input').dispatchEvent("
            "     new ClipboardEvent('paste', {clipboardData, bubbles: true, cancelable: true})); }"
        )

    def thumbnails(self, within="#images"):
        return self.browser.run(f"[...document.querySelectorAll('{within} img')].map(e => e.alt)")

    def wait_for(self, *names):
        self.browser.wait(lambda: self.thumbnails() == list(names))

    def send(self, text):
        """The messages that were sent, and how many tokens they took."""
        before = self.server.metric("cachalot_prompt_tokens_total")
        ask(self.browser, text, thinking=False, tokens=8)
        self.browser.wait(lambda: idle(self.browser))
        return self.browser.run("sent.at(-1).messages"), self.server.metric("cachalot_prompt_tokens_total") - before

    def answer(self):
        return self.browser.run("[...document.querySelectorAll('.assistant > .text')].at(-1).textContent")

    def notice(self):
        return self.browser.text("#notice").strip()


def expected(server, messages):
    """What the API answers, and the tokens that it counts."""
    answer = server.openai.chat.completions.create(
        model="model", messages=messages, max_tokens=8, temperature=0,
        extra_body={"thinking": {"type": "disabled"}, "ignore_eos": True},
    )
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def test_images_are_sent_as_they_are(seeing, browser):
    page = Composer(browser, seeing)
    assert offers_images(browser)
    page.choose(GOLDEN / "rgb.png", GOLDEN / "expected.json", GOLDEN / "420.jpg")
    page.wait_for("rgb.png", "420.jpg")
    assert page.notice() == "expected.json: not a JPEG, PNG, WebP or GIF image"
    assert browser.run("document.querySelector('#images button').ariaLabel") == "Remove rgb.png"
    browser.press_enter("#images li:last-child button")
    page.wait_for("rgb.png")

    messages, tokens = page.send("What is this?")
    assert messages == [{"role": "user", "content": content("rgb.png")}]
    assert (page.answer(), tokens) == expected(seeing, messages)
    assert tokens > expected(seeing, [{"role": "user", "content": "What is this?"}])[1] + 4
    assert page.notice() == ""
    page.wait_for()
    assert page.thumbnails(".user") == ["rgb.png"]

    # A later message sends the image again, in its place.
    reply = {"role": "assistant", "content": page.answer(), "reasoning_content": ""}
    later, tokens = page.send("Sure?")
    assert later == [*messages, reply, {"role": "user", "content": "Sure?"}]
    assert (page.answer(), tokens) == expected(seeing, later)

    assert not browser.complaints
    expect_own_requests(browser)


def test_images_are_dropped_and_pasted(seeing, browser):
    page = Composer(browser, seeing)
    page.drop(GOLDEN / "lossy.webp", GOLDEN / "420.jpg")
    page.wait_for("lossy.webp", "420.jpg")
    page.paste(GOLDEN / "plain.gif", "image/gif")
    page.wait_for("lossy.webp", "420.jpg", "plain.gif")
    page.drop(GOLDEN / "expected.json")
    browser.wait(lambda: page.notice() == "expected.json: not a JPEG, PNG, WebP or GIF image")

    messages, tokens = page.send("")
    assert [part["image_url"]["url"] for part in messages[0]["content"]] == [
        f"data:image/{kind};base64,{data(name)}"
        for kind, name in (("webp", "lossy.webp"), ("jpeg", "420.jpg"), ("gif", "plain.gif"))]
    assert (page.answer(), tokens) == expected(seeing, messages)
    assert not browser.complaints


def test_a_refused_message_returns(seeing, browser, tmp_path):
    page = Composer(browser, seeing)
    (tmp_path / "cut.png").write_bytes((GOLDEN / "rgb.png").read_bytes()[:400])
    page.choose(GOLDEN / "gray.png", tmp_path / "cut.png")
    page.wait_for("gray.png", "cut.png")
    page.send("And now?")
    assert page.notice().startswith("messages[0].content[1].image_url.url: PNG: ")
    assert page.thumbnails() == ["gray.png", "cut.png"]
    assert browser.run("document.getElementById('input').value") == "And now?"
    assert browser.text("#log") == ""
    # The browser itself notes answers of 400.
    assert [complaint["url"] for complaint in browser.complaints] == [seeing.url + "/v1/chat/completions"]
    browser.complaints.clear()

    browser.press_enter("#images li:last-child button")
    messages, tokens = page.send("And now?")
    assert messages == [{"role": "user", "content": content("gray.png", text="And now?")}]
    assert (page.answer(), tokens) == expected(seeing, messages)
    assert not browser.complaints
