"""Is busy with 1 of 4 requests until its standard input ends.

It has two children: a forked process that has closed its parent's Reporter, and an executed
program.
"""

import os
import subprocess
import sys

import segue_load


def start_children(load):
    ready, tell = os.pipe()
    if os.fork() == 0:
        load.close()
        os.write(tell, b"r")
        os.read(0, 1)
        os._exit(0)
    os.read(ready, 1)
    subprocess.Popen(["cat"], close_fds=False)


def main():
    load = segue_load.Reporter(sys.argv[1], 4)
    load.begin()
    start_children(load)
    print("busy", flush=True)
    os.read(0, 1)


if __name__ == "__main__":
    main()
