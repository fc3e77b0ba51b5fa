#!/usr/bin/env python3
"""Sends back what it receives over TCP: echo.py ADDRESS PORT"""

import selectors
import socket
import sys

selector = selectors.DefaultSelector()


def accept(listener):
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, echo)


def echo(connection):
    try:
        data = connection.recv(65536)
        if data:
            connection.send(data)
            return
    except BlockingIOError:
        return
    except OSError:
        pass
    selector.unregister(connection)
    connection.close()


listener = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=1024)
listener.setblocking(False)
selector.register(listener, selectors.EVENT_READ, accept)
while True:
    for key, _ in selector.select():
        key.data(key.fileobj)
