"""Echoes UDP: echo.py ADDRESS PORT [DATAGRAMS]; if DATAGRAMS is given, it exits with code 7 after that many."""
import os, socket, sys

s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], int(sys.argv[2])))
left = int(sys.argv[3]) if len(sys.argv) > 3 else -1
while left != 0:
    data, peer = s.recvfrom(2048)
    s.sendto(data, peer)
    left -= 1
print("this is the end", flush=True)
os._exit(7)
