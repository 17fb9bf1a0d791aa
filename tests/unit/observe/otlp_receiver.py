"""A receiver of OpenTelemetry's logs by OTLP/HTTP, in a process of its own, as its messages fix how protobuf works.

It prints its port, and each request as JSON by the names of the messages; what is no such message is answered with 400.
With the word partial it says that it has refused a record.
"""

from __future__ import annotations

import http.server
import json
import sys

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsPartialSuccess,
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            request = json_format.Parse(body, ExportLogsServiceRequest())
        except json_format.ParseError as error:
            self.send_error(400, str(error)[:200].replace("\n", " "))
            return
        if self.path != "/v1/logs" or self.headers["Content-Type"] != "application/json":
            self.send_error(404)
            return
        seen = {"token": self.headers["x-token"], "request": json_format.MessageToDict(request)}
        print(json.dumps(seen), flush=True)
        answer = ExportLogsServiceResponse()
        if sys.argv[1:] == ["partial"]:
            refused = ExportLogsPartialSuccess(rejected_log_records=1, error_message="too old")
            answer.partial_success.CopyFrom(refused)
        content = json_format.MessageToJson(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


with http.server.HTTPServer(("127.0.0.1", 0), Receiver) as server:
    print(server.server_port, flush=True)
    server.serve_forever()
