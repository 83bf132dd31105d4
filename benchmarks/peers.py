"""TurboQuant, QJL and KIVI beside the public packages of those names: bits, error, bias, speed and NaN, all in one run.

    python benchmarks/peers.py [--venv FOLDER --heads 8 --tokens 4096 --rounds 5 --systems mse,prod,qjl,kivi]

Pinned packages go into a virtual environment of their own (the user's cache folder, or --venv), each into its own folder because
several install a module of the same name; the second run finds them there. Every codec, ours too, runs in a process of its own with
one thread, and they take turns (ours, peer, peer, ..., ours), so that a busy machine is busy for all of them. The clock is the
processor time of the process: on an idle machine that is the wall time, on a shared one the turns of others do not count.

"honest" is a peer that holds at most b + 1 bits a number with an error within 2 % of that of the algorithm, exactly computed.
The measuring is in peers/: which packages (systems.py), how they are asked (coders.py), the turns and tables (worker.py, run.py).
"""

from peers.run import main

if __name__ == "__main__":
    main(__doc__.splitlines()[0])
