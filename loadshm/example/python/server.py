# SPDX-License-Identifier: Apache-2.0

"""An HTTP server that takes uploads and reports how many it is busy with.

    PYTHONPATH=loadshm python3 loadshm/example/python/server.py /run/shop/load 8
"""

import http.server
import sys

import segue_load


class Upload(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        with self.server.load:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        reply = f"{len(body)} bytes\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


def main():
    path, capacity = sys.argv[1:]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upload)
    server.load = segue_load.Reporter(path, int(capacity))
    print("%s:%d" % server.server_address, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
