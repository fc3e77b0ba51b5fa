"""Checks the admin interface on a Unix socket against its own OpenAPI document, with third-party validators.

    check.py SOCKET

Checks the document itself, then queries each path that needs no parameter other than the name of an allocation, and checks each response.
Prints one JSON object: the version of OpenAPI, the number of operations that were tried, and the errors.
"""

import http.client
import json
import socket
import sys

from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path):
        super().__init__("localhost")
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(self.path)


def ask(path, method, target):
    connection = Connection(path)
    connection.request(method, target)
    answer = connection.getresponse()
    return answer.status, answer.headers.get_content_type(), answer.read().decode(errors="replace")


def main():
    path = sys.argv[1]
    _, _, text = ask(path, "GET", "/openapi.json")
    document = json.loads(text)
    wrong = [str(error.message) for error in OpenAPIV31SpecValidator(document).iter_errors()]
    _, _, text = ask(path, "GET", "/v1/allocations")
    allocations = json.loads(text)["allocations"]
    tried = 0

    def judge(method, target, described):
        nonlocal tried
        status, media, text = ask(path, method, target)
        tried += 1
        responses = document["paths"][described][method.lower()]["responses"]
        response = responses.get(str(status), {})
        if "$ref" in response:
            response = document["components"]["responses"][response["$ref"].rsplit("/", 1)[1]]
        content = response.get("content", {})
        if media not in content:
            wrong.append(f"{method} {target}: {status} {media} is not described")
        elif media.endswith("json"):
            schema = dict(content[media]["schema"], components=document["components"])
            errors = OAS31Validator(schema).iter_errors(json.loads(text))
            wrong.extend(f"{method} {target}: {error.message}" for error in errors)

    for described, item in document["paths"].items():
        if "get" not in item:
            # The error for an unsupported GET is documented too.
            continue
        if "{id}" in described:
            bounds = "?seconds=1" if described.endswith("/capture") else ""
            for allocation in allocations:
                judge("GET", described.replace("{id}", allocation["id"]) + bounds, described)
            judge("GET", described.replace("{id}", "0" * 32), described)
            judge("GET", described.replace("{id}", "nonsense"), described)
        elif described.endswith("/events"):
            # Otherwise endless.
            judge("GET", f"{described}?count=0", described)
        else:
            judge("GET", described, described)
    judge("GET", "/v1/allocations?limit=nonsense", "/v1/allocations")
    judge("POST", "/v1/reload", "/v1/reload")
    print(json.dumps({"openapi": document["openapi"], "allocations": len(allocations), "tried": tried, "wrong": wrong}))


main()
