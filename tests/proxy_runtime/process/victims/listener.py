"""Serves a counter on a listening TCP socket and, while /dev/shm/hold is not there, asks itself for it.

With an argument, keeps one connection open.
"""

import os
import socket
import sys
import threading
import time

listener = socket.create_server(("127.0.0.1", 5555))


def serve() -> None:
    count = 0
    while True:
        connection, _ = listener.accept()
        connection.sendall(str(count).encode())
        count += 1
        if len(sys.argv) == 1:
            connection.close()
        else:
            kept.append(connection)


kept = []
threading.Thread(target=serve, daemon=True).start()
while True:
    if not os.path.exists("/dev/shm/hold"):
        client = socket.create_connection(("127.0.0.1", 5555))
        # The server closes last here, so that no half-closed connection is left behind.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        print(client.recv(100).decode())
        if len(sys.argv) == 1:
            client.close()
        else:
            time.sleep(1000)
    elif not os.path.exists("/dev/shm/held"):
        open("/dev/shm/held", "w").close()
    time.sleep(0.002)
