"""The page under siege: sixteen visitors at once with images, bombs, other files, and paths that lead elsewhere.

Every request has to be answered, or refused in words; the server stays, says nothing of its own files, and does not
grow.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, urlsplit

from tests.data.segmentation_folders import picture
from tests.soak import mutations
from tests.soak.part import Outcome
from tests.trained import weights_file

AT_ONCE = 16
PATIENCE = 180
# Pages of memory that a server may have more at the end than after everything has been tried once.
GROWTH = 1.25
ELSEWHERE = ("/etc/passwd", "../../../../etc/passwd", "/proc/self/environ", "..%2f..%2f..%2fetc%2fpasswd", "~/.bashrc")


class Page:
    """``kronattn demo`` in a process of its own."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        weights = weights_file(folder)
        command = [sys.executable, "-u", "-m", "kronattn.cli", "demo", "--weights", str(weights), "--port", "0"]
        self._log = (folder / "log").open("w")
        (folder / "temporary").mkdir()
        environment = {**os.environ, "TMPDIR": str(folder / "temporary")}
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment)
        assert self.server.stdout is not None
        found = re.search(r"http://\S+", self.server.stdout.readline())
        if found is None:
            raise RuntimeError(f"the page did not come up: {(folder / 'log').read_text()}")
        self.where = urlsplit(found[0])
        _, text = self._request("GET", "/config")
        dependencies = json.loads(text)["dependencies"]
        self._take = next(d["id"] for d in dependencies if (len(d["inputs"]), len(d["outputs"])) == (4, 7))
        self._follow = next(d["id"] for d in dependencies if (len(d["inputs"]), len(d["outputs"])) == (5, 5))
        self._memory: list[int] = []

    def close(self) -> Mapping[str, Any]:
        alive = self.server.poll() is None
        self.server.send_signal(signal.SIGTERM)
        try:
            self.server.wait(60)
        except subprocess.TimeoutExpired:
            self.server.kill()
        self._log.close()
        said = (self.folder / "log").read_text()
        wrong = [] if alive else [f"the server ended by itself: {said[-900:]}"]
        # Gradio writes down every path that it refuses, and every call that no browser makes: those are not ours.
        for trace in said.split("Traceback (most recent call last):")[1:]:
            if "/kronattn/" in trace:
                wrong.append(f"the server printed a traceback: {trace[-900:]}")
        # PyTorch's folder for compiled code and Gradio's own, which stays empty, are not ours.
        if left := [path.name for path in (self.folder / "temporary").rglob("*") if "uploads" in path.parts]:
            wrong.append(f"left behind when the page went: {left[:5]}")
        # The first rounds load what is loaded once.
        early, late = self._memory[min(3, len(self._memory) - 1) :][:3], self._memory[-3:]
        if early and max(late) > GROWTH * max(early):
            wrong.append(f"memory went from {max(early) >> 20} MB to {max(late) >> 20} MB")
        figures = {"memory_first_mb": max(early) >> 20, "memory_last_mb": max(late) >> 20} if early else {}
        return figures | {"requests_at_once": AT_ONCE, "wrong": wrong}

    def run(self, number: int) -> Outcome:
        outcome = Outcome()
        with ThreadPoolExecutor(AT_ONCE) as visitors:
            for tried, wrong in visitors.map(self._visit, range(number * AT_ONCE, (number + 1) * AT_ONCE)):
                outcome.tried.append(tried)
                outcome.wrong += wrong
        status = Path(f"/proc/{self.server.pid}/statm").read_text().split()
        self._memory.append(int(status[1]) * os.sysconf("SC_PAGE_SIZE"))
        return outcome

    def _visit(self, number: int) -> tuple[dict[str, Any], list[str]]:
        draw = Random(number)
        kind = draw.choice(
            ["image", "image", "broken", "odd image", "other file", "too large", "elsewhere", "path", "text"]
        )
        start = time.monotonic()
        try:
            answer, wrong = getattr(self, "_" + kind.replace(" ", "_"))(draw, f"soak{number}")
        except (OSError, http.client.HTTPException) as error:
            answer, wrong = "no answer", [f"no answer to {kind}: {error!r}"]
        if kind == "too large":
            # To hang up on someone who sends too much is an answer.
            answer, wrong = ("refused", []) if answer == "no answer" else (answer, wrong)
        if time.monotonic() - start > PATIENCE:
            wrong.append(f"{kind} took {time.monotonic() - start:.0f} s")
        return {"request": kind, "answer": answer}, wrong

    def _image(self, draw: Random, visitor: str) -> tuple[str, list[str]]:
        stream = io.BytesIO()
        picture(draw.randrange(100), (draw.choice([8, 90, 700]), draw.choice([8, 120, 900]))).save(stream, "PNG")
        answer, wrong, text = self._shown(stream.getvalue(), "a.png", visitor)
        if answer == "answered" and "attends most to" not in text:
            wrong = [*wrong, f"no attention for a whole image: {text[text.rindex('process_completed') :][:500]}"]
        if answer == "answered":
            # The same visitor moves the pointer.
            spot = ",".join(draw.choice(["10", "-5", "99999", "nan", "", "1e9"]) for _ in range(5))
            wrong = [
                *wrong,
                *self._call(self._follow, [None, draw.choice([0, 3, 10**9]), "kv", "qkv", spot], visitor)[1],
            ]
        return answer, wrong

    def _broken(self, draw: Random, visitor: str) -> tuple[str, list[str]]:
        stream = io.BytesIO()
        picture(draw.randrange(100), (90, 120)).save(stream, draw.choice(["PNG", "JPEG", "GIF", "WEBP", "TIFF"]))
        return self._shown(mutations.by_bytes(stream.getvalue(), draw)[1], "a.png", visitor)[:2]

    def _odd_image(self, draw: Random, visitor: str) -> tuple[str, list[str]]:
        stream = io.BytesIO()
        picture(draw.randrange(100), (90, 120)).save(stream, "PNG")
        return self._shown(mutations.image(stream.getvalue(), draw)[1], "a.png", visitor)[:2]

    def _other_file(self, draw: Random, visitor: str) -> tuple[str, list[str]]:
        nested = b"[" * 10**6
        svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
        zeros = bytes(draw.choice([0, 1, 10**6]))
        content = draw.choice([nested, svg, zeros, b"PK\x03\x04" + zeros, b"#!/bin/sh\n", b"\x1f\x8b" + zeros])
        name = draw.choice(["a.png", "a.svg", "a.json", "../../outside.png", "a" * 300 + ".png", "é\u202e.png", "CON"])
        return self._shown(content, name, visitor)[:2]

    def _too_large(self, draw: Random, visitor: str) -> tuple[str, list[str]]:
        status, _ = self._upload(bytes(21 * 2**20), "a.png")
        return ("refused", []) if status in (400, 413) else (str(status), [f"21 MB were taken: {status}"])

    def _elsewhere(self, draw: Random, visitor: str) -> tuple[str, list[str]]:
        """Files of the computer, asked for by address."""
        path = draw.choice(ELSEWHERE)
        status, text = self._request("GET", f"/gradio_api/file={path}")
        wrong = [f"{path} was served"] if status == 200 or "root:" in text else []
        return "refused", wrong

    def _path(self, draw: Random, visitor: str) -> tuple[str, list[str]]:
        """Files of the computer, handed in as if they had been uploaded."""
        path = draw.choice(ELSEWHERE)
        answer, wrong, text = self._call(self._take, [_file(path), 0, "kv", "qkv"], visitor, words=False)
        return answer, [*wrong, f"{path} was read"] if "root:" in text else wrong

    def _text(self, draw: Random, visitor: str) -> tuple[str, list[str]]:
        """Calls that no browser makes."""
        data = draw.choice([[], [None] * 4, [7, "a", {}, []], ["x" * 10**6] * 4, [{"path": 7}, 0, "kv", "qkv"]])
        body = draw.choice([json.dumps({"data": data, "fn_index": draw.choice([self._take, 10**6, -1, "a"])}), "{", ""])
        status, text = self._request("POST", "/gradio_api/queue/join", body, {"Content-Type": "application/json"})
        return ("answered" if status == 200 else "refused"), _leaks(text)

    def _shown(self, content: bytes, name: str, visitor: str) -> tuple[str, list[str], str]:
        status, text = self._upload(content, name)
        if status != 200:
            return (
                "refused",
                [] if 400 <= status < 500 else [f"an upload was answered with {status}: {text[:300]}"],
                text,
            )
        return self._call(self._take, [_file(json.loads(text)[0]), 0, "kv", "qkv"], visitor)

    def _upload(self, content: bytes, name: str) -> tuple[int, str]:
        head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{quote(name)}"\r\n\r\n'
        body = head.encode() + content + b"\r\n--x--\r\n"
        return self._request("POST", "/gradio_api/upload", body, {"Content-Type": "multipart/form-data; boundary=x"})

    def _call(self, function: int, data: list[Any], visitor: str, words: bool = True) -> tuple[str, list[str], str]:
        """As the page's script does: into the queue, and what comes of it from there."""
        body = json.dumps({"data": data, "fn_index": function, "session_hash": visitor})
        status, text = self._request("POST", "/gradio_api/queue/join", body, {"Content-Type": "application/json"})
        if status != 200:
            refused = 400 <= status < 500 or status == 503
            return "refused", [] if refused else [f"a call was answered with {status}: {text[:300]}"], text
        _, text = self._request("GET", f"/gradio_api/queue/data?session_hash={visitor}", until=b"process_completed")
        if "process_completed" not in text:
            return "no answer", [f"a call was never completed: {text[-300:]}"], text
        if '"success":false' in text:
            # Gradio refuses paths by itself, without a word; whatever else ends like this ended without a reason.
            end = text[text.rindex("process_completed") :]
            wordless = [f"an error without a word: {end[:300]}"] if words and '"error":null' in end else []
            return "refused", wordless, text
        return "answered", _leaks(text), text

    def _request(
        self,
        method: str,
        path: str,
        body: str | bytes | None = None,
        headers: Mapping[str, str] = {},
        until: bytes = b"",
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.where.hostname or "", self.where.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            if not until:
                return response.status, response.read().decode(errors="replace")
            read = b""
            for line in response:
                read += line
                if until in line:
                    break
            return response.status, read.decode(errors="replace")
        finally:
            connection.close()


def _file(path: str) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}, "orig_name": "a.png"}


def _leaks(text: str) -> list[str]:
    return (
        [f"an answer shows the server's insides: {text[:600]}"]
        if "Traceback" in text or "site-packages" in text
        else []
    )


PART = Page
