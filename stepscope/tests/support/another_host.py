"""A proxy that shows a server of this machine at another address, in a page of another site, as Colab does."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# The path is resolved as Colab's own function does
AROUND = """<!DOCTYPE html><title>A notebook</title><iframe title="output" width="100%" height="900"></iframe>
<script>
  const proxy = `http://127.0.0.1:${location.port}`;
  document.querySelector("iframe").src = new URL("PATH", proxy).toString();
</script>"""
ASKED_WITH = ("Accept", "Accept-Encoding", "Content-Type")
PASSED_ON = {"content-type", "content-encoding", "content-security-policy", "cache-control", "location"}
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def shown_elsewhere(port: int, path: str) -> Iterator[tuple[str, str]]:
    """Yield the address of a page with a frame that shows `path` of the server on `port`, and the frame's host."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/around":
                self._answer(200, {"Content-Type": "text/html"}, AROUND.replace("PATH", path).encode())
                return
            wanted = {name: self.headers[name] for name in ASKED_WITH if name in self.headers}
            content = self.rfile.read(int(self.headers["Content-Length"] or 0)) or None
            request = urllib.request.Request(f"http://127.0.0.1:{port}{self.path}", content, wanted)
            try:
                answer = _direct.open(request, timeout=120)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                headers = {name: value for name, value in answer.headers.items() if name.lower() in PASSED_ON}
                self._answer(answer.status, headers, answer.read())

        do_POST = do_GET  # as the request has content, or none

        def _answer(self, status, headers, content):
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(BrokenPipeError):  # the browser has left the page
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}/around", f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
