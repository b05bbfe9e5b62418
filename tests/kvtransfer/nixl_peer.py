"""The sender's process of the NIXL tests: ``nixl_peer.py NAME NUM_PAGES PAGE_BYTES``.

Prints "@endpoint HEX", then "@notice HEX" for each notice. Reads "progress on|off" (it starts on), "write PAGE
GENERATION", "quit" from its input and answers each with "@done". Ends by itself when its input does.
"""

import select
import sys

import numpy as np

from splitserve.kvtransfer.nixl_transport import NixlTransport
from splitserve.kvtransfer.transport import PoolMemory

POLL_S = 0.002


def say(*words: str) -> None:
    print("@" + " ".join(words), flush=True)


def main(name: str, num_pages: int, page_bytes: int) -> None:
    data = np.zeros((num_pages, page_bytes), np.uint8)
    transport = NixlTransport(name, PoolMemory(data.ctypes.data, page_bytes, num_pages, data))

    def write(page: int, generation: int) -> None:
        transport.set_generation(page, generation)
        data[page] = (page * 13 + generation) % 256

    for page in range(num_pages):
        write(page, 1)
    say("endpoint", transport.endpoint().hex())
    active = True
    while True:
        if active:
            for notice in transport.notices():
                say("notice", notice.hex())
        if not select.select([sys.stdin], [], [], POLL_S)[0]:
            continue
        match sys.stdin.readline().split():
            case ["progress", state]:
                active = state == "on"
            case ["write", page, generation]:
                write(int(page), int(generation))
            case _:
                break
        say("done")
    transport.close()
    say("done")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
