"""`python -m proofs_checks` = `kvtheory verify`. Started by name: nothing imports the command line, which stands on top."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[:] = ["kvtheory", "verify", *sys.argv[1:]]
    runpy.run_module("kvtheory", run_name="__main__", alter_sys=False)
