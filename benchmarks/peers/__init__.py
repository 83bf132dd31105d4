"""Our codecs beside public packages: coders.py asks them, systems.py says what is compared with what, worker.py and run.py measure."""
