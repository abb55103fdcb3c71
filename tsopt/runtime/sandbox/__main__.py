"""`python -m tsopt.runtime.sandbox FD [DIRECTORY]`: the helper process, which imports torch and the engines."""

import gc
import socket
import sys


def run() -> None:
    # Before the imports, which make 400,000 objects that stay: a third of the time went into examining them.
    gc.disable()
    sys.path += sys.argv[2:]  # where backends of the user's may be: after all else
    from tsopt.runtime.sandbox.worker import main

    main(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    run()
