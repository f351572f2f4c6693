# SPDX-License-Identifier: Apache-2.0
"""Gives three of four edits the name of a service that a process has or could have, and one action.
Nearly all random edits are refused before they reach the balancer or the agent."""

import os
import zlib

import schemathesis

SERVICES = ["web", "web", "web", "other"]
SERVERS = [None, "s1", "s2", "s9"]
ACTIONS = [
    ("remove", True),
    ("reset", True),
    ("set", {"drained": True}),
    ("set", {"drained": False, "weight": 3}),
    ("set", {"timeouts": {"new": "10s"}}),
    ("set", {"timeouts": None}),
    ("add", {"locator": "fd00:5:0:9::/64"}),
    ("add", {"vip": "2001:db8::9", "port": "all", "protocol": "udp"}),
]


if os.environ["NODE_ROLE"] == "server":
    SERVERS = [None, None, None, "s1"]
    ACTIONS = [
        ("remove", True),
        ("reset", True),
        ("set", {"drained": True}),
        ("set", {"drained": False, "accept": {"policy": "always"}}),
        ("set", {"accept": None}),
        ("set", {"candidates": 2}),
        ("add", {"vip": "2001:db8::9", "port": "all", "protocol": "udp"}),
        ("add", {"vip": "2001:db8::9", "port": "80", "protocol": "tcp", "accept": {"policy": "never"}}),
    ]


@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("edits"), list):
        for edit in body["edits"]:
            if isinstance(edit, dict) and isinstance(edit.get("service"), str) and edit["service"]:
                aim(edit)
    return body


def aim(edit):
    chosen = zlib.crc32(repr(sorted(edit.items(), key=str)).encode())
    if chosen % 4 == 0:
        return
    for name in ("server", "add", "set", "remove", "reset"):
        edit.pop(name, None)
    edit["service"] = SERVICES[chosen // 4 % 4]
    if server := SERVERS[chosen // 16 % 4]:
        edit["server"] = server
    name, value = ACTIONS[chosen // 64 % len(ACTIONS)]
    edit[name] = value
